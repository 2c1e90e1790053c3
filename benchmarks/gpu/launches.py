"""What a compiled program hands to a GPU, read from XLA's dump of its thunks.

A thunk is one launch: a kernel, a call of a library, a copy. XLA writes their sequence twice. The
first file has all of them; in the second one those that XLA joins are inside of command buffers
(CUDA graphs), which the host starts at once.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import ClassVar

_KERNELS = ("kCustomKernel", "kKernel")
# Mosaic's kernels, and on a card CUB's sort.
_CALLS = ("kCustomCall", "kLegacyCustomCall")
_COPIES = ("kCopy", "kDeviceToDeviceCopy", "kMemset32BitValue", "kMemzero")
_LOOPS = ("kWhile", "kConditional")
# Only the order of other thunks.
_NO_LAUNCHES = ("kSequential", "kAsyncDone", "kWaitForStreams")


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One line of a dump, such as ``036: kCustomKernel [prev=035 (1) | sink] update grid: ...``.

    Attributes:
        kind: Kind of thunk.
        name: Name of the kernel; otherwise the kind.
        depth: Number of thunks around it.
        blocks: Blocks of the kernel; None: not said.
    """

    kind: str
    name: str
    depth: int = 0
    blocks: int | None = None


@dataclasses.dataclass(frozen=True)
class Launches:
    """Launches of a program, those in loops counted once.

    Attributes:
        kernels: Kernels of XLA and of jaxrec, except sorts.
        sorts: Sorts. On a card each is one call of CUB, without a card many kernels of XLA.
        libraries: Calls of libraries, such as matrix products.
        copies: Copies and fills.
        loops: Loops and branches, which wait for a number that the card computes.
        starts: What the host starts: command buffers, and launches outside of them.
        blocks: Blocks of each kernel, by its name.
    """

    NAMES: ClassVar[tuple[str, ...]] = (
        "kernels",
        "sorts",
        "library calls",
        "copies and fills",
        "loops",
        "started by the host",
    )

    kernels: int
    sorts: int
    libraries: int
    copies: int
    loops: int
    starts: int
    blocks: dict[str, int]

    @property
    def total(self) -> int:
        """Launches of all kinds."""
        return self.kernels + self.sorts + self.libraries + self.copies + self.loops

    def cells(self) -> tuple[int, ...]:
        """Return the total, then the numbers that `NAMES` names."""
        numbers = self.kernels, self.sorts, self.libraries, self.copies, self.loops, self.starts
        return self.total, *numbers

    @classmethod
    def of(cls, dump: pathlib.Path) -> Launches:
        """Return the launches of the program that XLA dumped into a folder."""
        (path,) = dump.glob("*.thunk_sequence.txt")
        every = parse(path.read_text())
        # XLA writes this file only if it joined some thunks.
        last = [parse(x.read_text()) for x in dump.glob("*.thunk_sequence_after_thunk_passes.txt")]
        return cls.of_thunks(every, last[0] if last else every)

    @classmethod
    def of_thunks(cls, every: list[Thunk], last: list[Thunk]) -> Launches:
        """Return the launches of thunks, before and after some join into command buffers."""
        every = [thunk for thunk in every if thunk.kind not in _NO_LAUNCHES]
        sorting, other = [], []
        for thunk in every:
            (sorting if _is_sort(thunk) else other).append(thunk)
        groups = (_KERNELS + _CALLS, _COPIES, _LOOPS)
        kernels, copies, loops = (sum(x.kind in kinds for x in other) for kinds in groups)
        # The passes over one array are sort_11_0, sort_11_0__1, and so on.
        sorts = len({thunk.name.partition("__")[0] for thunk in sorting})
        starts = [x for x in last if x.depth == 0 and x.kind not in _NO_LAUNCHES]
        of_sorts = {x.name.partition("__")[0] for x in starts if _is_sort(x)}
        return cls(
            kernels=kernels,
            sorts=sorts,
            libraries=len(other) - kernels - copies - loops,
            copies=copies,
            loops=loops,
            starts=sum(not _is_sort(x) for x in starts) + len(of_sorts),
            blocks={x.name: x.blocks for x in every if x.blocks is not None},
        )


def parse(text: str) -> list[Thunk]:
    """Parse a dump of thunks."""
    thunks = []
    for line in text.splitlines():
        found = re.match(r"( *)\d+: (k\w+)\s*(?:\[.*?\])?\s*([\w.]*)", line)
        if found is None:
            continue
        indent, kind, name = found.groups()
        grid = re.search(r"grid: \[(\d+), (\d+), (\d+)\]", line)
        blocks = None if grid is None else int(grid[1]) * int(grid[2]) * int(grid[3])
        thunks.append(Thunk(kind, name or kind, len(indent) // 4, blocks))
    return thunks


def _is_sort(thunk: Thunk) -> bool:
    return thunk.kind in _KERNELS and "sort" in thunk.name
