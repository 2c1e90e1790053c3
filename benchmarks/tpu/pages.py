"""Pages of compiled programs in Markdown, written by benchmarks/tpu/compile.py and read by it."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from benchmarks.tpu.findings import Findings
from benchmarks.tpu.programs import Program

RESULTS = pathlib.Path(__file__).parents[1] / "results"
HEADER = (
    f"| program | chip | {' | '.join(Findings.HEADERS)} | compiled in s |",
    "|---|---|" + "---|" * (len(Findings.HEADERS) + 1),
)


@dataclasses.dataclass
class Results:
    """Results of a chip's programs.

    Attributes:
        lines: Line of the page's table, by program.
        reasons: Sentences about failures, by program.
    """

    lines: dict[str, str] = dataclasses.field(default_factory=dict)
    reasons: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: pathlib.Path) -> Results:
        """Return the results of a page; a missing one has none."""
        results = cls()
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            if found := re.match(r"\| (.+?) \| v\w+ \|", line):
                results.lines[found[1]] = line
            elif found := re.match(r"- ((.+?) for v\w+ .*)", line):
                results.reasons.setdefault(found[2], []).append(found[1])
        return results

    def add(self, name: str, line: str, reasons: list[str]) -> None:
        """Replace the results of a program."""
        self.lines[name], self.reasons[name] = line, reasons


def page(chip: str, results: Results, every: Sequence[Program], versions: str) -> str:
    """Return the results for a chip in Markdown.

    Args:
        chip: Name of the chip.
        results: Its results.
        every: All programs, in the order of the page.
        versions: Versions of the compiler.
    """
    every = [each for each in every if chip in each.chips]
    done = [each for each in every if each.name in results.lines]

    def reasons(is_supported: bool) -> list[str]:
        names = [each.name for each in done if each.is_supported == is_supported]
        return [f"- {each}" for name in names for each in results.reasons.get(name, ())] or [
            "None."
        ]

    missing = [each.name for each in every if each.name not in results.lines]
    return "\n".join(
        [
            f"# Programs compiled for a TPU {chip} by {versions}\n",
            f"Made by `python -m benchmarks.tpu.compile --chip {chip}` without a TPU. Nothing was "
            "timed; docs/tpu.md says what the figures mean.\n",
            *HEADER,
            *(results.lines[each.name] for each in done),
            "\nFailures of supported programs:\n",
            *reasons(True),
            "\nNot supported:\n",
            *reasons(False),
            f"\nNot compiled: {'; '.join(missing) or 'none'}.",
            "",
        ]
    )
