from __future__ import annotations

import pytest

from jaxrec.plan.formatting import format_bytes, format_numbers, format_seconds


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (123_456, "123 kB"),
        (2.5e6, "2.50 MB"),
        (80e9, "80.00 GB"),
        (1.25e12, "1.25 TB"),
    ],
)
def test_bytes(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (2e-6, "2 us"), (0.0125, "12.5 ms"), (3.5, "3.5 s"), (12_345, "12,345 s")],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "total", "text"),
    [
        ([], 4, ""),
        ([3], 4, "3"),
        ([0], 1, "0"),
        ([0, 1, 2, 3], 4, "all"),
        ([0, 2, 3, 5], 8, "0, 2-3, 5"),
    ],
)
def test_numbers(numbers, total, text):
    assert format_numbers(numbers, total) == text
