"""Where `is_ragged` is refused, and where it warns."""

from __future__ import annotations

import dataclasses
import re
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrec.mesh.ragged_support import check_ragged

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]


@dataclasses.dataclass(frozen=True)
class Device:
    """A described device: what `check_ragged` reads, and what tells it from others."""

    id: int
    platform: str
    process_index: int


def gpus(shape, axes, *, per_process=None, platform="gpu"):
    """A mesh of described devices."""
    count = int(np.prod(shape))
    each = [Device(i, platform, i // (per_process or count)) for i in range(count)]
    return Mesh(np.array(each).reshape(shape), axes)


def outcome(mesh, replica_axis=None):
    """The message of a warning or an error; None if there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            check_ragged(mesh, replica_axis)
        except (UserWarning, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("mesh", "replica_axis", "message"),
    [
        (gpus((8,), ("data",)), None, None),
        (gpus((9,), ("data",)), None, "UserWarning: .* 9 GPUs of one process"),
        (gpus((2, 4), ("host", "data"), per_process=4), None, "UserWarning: .* 8 GPUs of 2 proc"),
        (gpus((4, 8), ("host", "data"), per_process=8), None, "UserWarning: .* 32 GPUs of 4 proc"),
        (gpus((4, 8), ("copy", "data"), per_process=8), "copy", None),
        (gpus((8, 4), ("data", "copy"), per_process=4), "copy", "UserWarning: .* 8 GPUs of 8 proc"),
        (gpus((4, 8), ("copy", "data")), {"user": "copy"}, "UserWarning: .* 32 GPUs"),
        (gpus((33,), ("data",)), None, "ValueError: .* 33 GPUs: .*is_ragged=False"),
        (gpus((64,), ("data",), platform="tpu"), None, None),
        (gpus((2,), ("data",), platform="cpu"), None, "ValueError: XLA has no ragged"),
    ],
    ids=[
        "kernel",
        "nine",
        "two_processes",
        "thirty_two",
        "replica_in_a_process",
        "replica_over_processes",
        "replicas_of_some_tables",
        "thirty_three",
        "tpu",
        "cpu",
    ],
)
def test_by_the_devices_that_exchange_rows(monkeypatch, mesh, replica_axis, message):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0, 1))
    assert re.match(message or "None", str(outcome(mesh, replica_axis)))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ((0, 11, 2), "ValueError: .* crashes on more than 32 GPUs"),
        ((0, 12, 0), "ValueError: .* fails on more than 32 GPUs"),
        ((0, 13, 0), "UserWarning: .* 64 GPUs of one process"),
    ],
    ids=["crashes", "fails", "not_known_to_fail"],
)
def test_by_the_version(monkeypatch, version, message):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert re.match(message, str(outcome(gpus((64,), ("data",)))))
