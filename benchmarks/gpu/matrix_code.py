"""Figures of kernels that multiply matrices by warpgroups, read from their machine code.

What bounds such a kernel is its loop over blocks. Each turn keeps the tensor cores, the units for
special functions and the slots that issue instructions busy for some clocks. The copies are another
warpgroup's. Two warpgroups compute at the same time, so that the unit with the most clocks may be
busy all the time, if the schedule is good: `Loop.share` is then the tensor cores' share of it.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

from benchmarks.gpu.machine_code import Instruction, Kernel, every_loop

# Of a Hopper multiprocessor in a clock: products and additions of its tensor cores, of 16-bit
# numbers; special functions; and warps of a warpgroup, each of which has a scheduler of its own.
PRODUCTS, SPECIAL = 2048, 16
THREADS = 128  # of a warpgroup


@dataclasses.dataclass(frozen=True)
class Loop:
    """One turn of a loop over blocks, as a warpgroup computes it.

    Attributes:
        products: Number of matrix products' instructions.
        tensor_clocks: Clocks that these keep the tensor cores busy.
        special_clocks: Clocks that special functions take.
        whole: Instructions of a turn whose tile needs no mask.
        masked: Those of a turn whose tile is masked.
        waits: Number of times that a warpgroup waits for its products.
    """

    products: int
    tensor_clocks: float
    special_clocks: float
    whole: int
    masked: int
    waits: int

    @property
    def share(self) -> float:
        """Estimate of the tensor cores' share of a turn's clocks, if nothing waits."""
        return self.tensor_clocks / max(self.tensor_clocks, self.special_clocks, self.whole)


def loops_of(kernel: Kernel) -> list[Loop]:
    """Return the loops of a kernel that multiply matrices, without loops around them."""
    return [_loop(body) for body in _bodies(kernel)]


def failures(kernel: Kernel, program: str) -> Iterator[str]:
    """Yield a sentence for each rule that a kernel of attention breaks."""
    where = f"{kernel.name} of {program}"
    if kernel.spilled:
        yield f"{where} spills {kernel.spilled} bytes a thread."
    if kernel.float_atomics:
        yield f"{where} adds floats by {', '.join(kernel.float_atomics)}."
    bodies = list(_bodies(kernel))
    if not bodies:
        yield f"{where} has no loop with products of warpgroups."
    for body in bodies:
        names = Counter(each.name.split(".")[0] for each in body)
        groups = sum("gsb0" in each.operands for each in body if each.name.startswith("HGMMA"))
        # ptxas makes products wait for one another, and says so in a warning alone, where it
        # cannot prove that their registers are left alone.
        if (waits := _loop(body).waits) > groups:
            yield f"{where} waits {waits} times for {groups} groups of products in a turn."
        if names["UTMALDG"]:
            yield f"{where} starts copies in the loop that multiplies."
        if wide := names["LDL"] + names["STL"]:
            yield f"{where} moves registers to memory {wide} times in a turn."
    copies = sum(each.name.startswith("UTMALDG") for each in kernel.instructions)
    if not copies:
        yield f"{where} loads nothing by the copy engine."


def _bodies(kernel: Kernel) -> Iterator[tuple[Instruction, ...]]:
    """Yield the innermost loops with products of warpgroups."""
    code = kernel.instructions
    # Waits for barriers are loops of their own behind the kernel's end, and branch back.
    ends = [i for i, each in enumerate(code) if each.name == "EXIT"]
    behind = max(ends, default=len(code))
    with_products = [
        (start, end)
        for start, end in every_loop(code)
        if end < behind and any(each.name.startswith("HGMMA") for each in code[start:end])
    ]
    for start, end in with_products:
        others = (each for each in with_products if each != (start, end))
        if not any(start <= first and last <= end for first, last in others):
            yield code[start:end]


def _loop(body: tuple[Instruction, ...]) -> Loop:
    instructions = [each for each in body if not each.is_label]
    products = [each.name for each in instructions if each.name.startswith("HGMMA")]
    special = sum(each.name.startswith("MUFU") for each in instructions)
    return Loop(
        products=len(products),
        tensor_clocks=sum(map(_clocks, products)),
        special_clocks=special * THREADS / SPECIAL,
        whole=len(instructions) - _masked(body),
        masked=len(instructions),
        waits=sum(each.name.startswith("WARPGROUP.DEPBAR") for each in instructions),
    )


def _clocks(name: str) -> float:
    """Return the clocks of a product such as ``HGMMA.64x128x16.F32.BF16``."""
    found = re.search(r"\.(\d+)x(\d+)x(\d+)", name)
    assert found is not None
    m, n, k = map(int, found.groups())
    return m * n * k / PRODUCTS


def _masked(body: tuple[Instruction, ...]) -> int:
    """Return the instructions of the longest stretch that a branch skips: the mask."""
    labels = {each.name: i for i, each in enumerate(body) if each.is_label}
    longest = 0
    for i, each in enumerate(body):
        target = re.search(r"\.(L_x_\d+)", each.operands) if each.name.startswith("BRA") else None
        end = labels.get(target[1], i) if target is not None else i
        skipped = body[i + 1 : end]
        if not any(x.name.startswith(("HGMMA", "MUFU")) for x in skipped):
            longest = max(longest, sum(not x.is_label for x in skipped))
    return longest
