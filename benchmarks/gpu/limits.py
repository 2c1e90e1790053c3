"""Limits on the machine code of kernels: spills, atomics, round trips and bytes under way."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from benchmarks.gpu.machine_code import Kernel


@dataclasses.dataclass(frozen=True)
class Limit:
    """Limits on kernels whose program matches.

    Attributes:
        kernel: Name of the kernel.
        programs: Regular expression found in the program's name.
        round_trips: Most loads of a loop's turn that wait for one another.
        before_store: Most round trips before the first store; None: any number.
        bytes_under_way: Fewest bytes under way on a multiprocessor, in each loop.
        load_bytes: Fewest bytes of the widest load of each loop, or of the kernel.
        cards: Regular expression found in the card's name.
    """

    kernel: str
    programs: str
    round_trips: float
    before_store: int | None = None
    bytes_under_way: int = 0
    load_bytes: int = 0
    cards: str = ""


# The first that matches holds.
LIMITS = (
    # The codes of rows of 64 columns begin at multiples of 4 bytes where a row has 4 more bytes, of
    # 8 where a scale and an offset of 8 bytes follow, and of 16 where codes are all.
    Limit("pool", "D(64|128|256) trained int8 ", round_trips=3, before_store=5, load_bytes=8),
    Limit("pool", "D(64|128|256) float8 ", round_trips=3, before_store=5, load_bytes=16),
    Limit("pool", "D(64|128|256) (int|float8_e)", round_trips=3, before_store=5, load_bytes=4),
    Limit("copy_rows", "D(64|128) trained int8 ", round_trips=2, before_store=2, load_bytes=8),
    Limit("copy_rows", "D(64|128) float8 ", round_trips=2, before_store=2, load_bytes=16),
    Limit("copy_rows", "D(64|128) (int|float8_e)", round_trips=2, before_store=2, load_bytes=4),
    # Fewer bytes under way than several rows of a bag at a time have, and faster; see
    # docs/internals/gpu.md.
    Limit("pool", "(D64|D128|D256) .* L(1|3|20)$", round_trips=3, bytes_under_way=24_000),
    Limit("pool", "", round_trips=9),
    Limit("copy_rows", "", round_trips=2),
    Limit("sum_part", "", round_trips=6),
    # Triton's list of runs sums blocks too.
    Limit("list_runs", "", round_trips=6),
    # Mosaic's two passes sum parts and blocks too, beside counting and listing runs.
    Limit("first_pass", "", round_trips=6),
    Limit("second_pass", "", round_trips=6),
    Limit("square_runs", "", round_trips=6),
    # A run of one lookup takes two before its first store. This counts both loops, once each.
    # JAX 0.12.0.1 compiles these programs otherwise for an A100 and an L4 than for other cards.
    Limit("update", "triton .*adagrad D64 float32 L20$", 2, before_store=6, cards="A100|L4"),
    Limit("update", "triton .*adagrad D128 float32 L20$", 2, before_store=6, cards="L4"),
    Limit("update", "adagrad (D16|D64|D128) .* L20$", round_trips=2, before_store=5),
    Limit("update", "", round_trips=9),
)
# Most launches of a call, by regular expressions found in its name. The first that matches holds.
LAUNCHES = (
    ("reference|clip_norm", None),
    ("mosaic fused_update", 6),
    ("triton fused_update", 7),
    ("pooled_lookup|flatten_bags", 3),
    ("row_lookup", 1),
)
# The kernels that read or write tables: one of each program that calls them must have a limit, so
# that a kernel with a new name does not escape its limits.
PRIMITIVES = ("pooled_lookup", "row_lookup", "fused_update")


def limit_of(kernel: str, program: str, card: str) -> Limit | None:
    """Return the limit of a kernel in a program for a card; None: it has none."""
    for limit in LIMITS:
        is_of_card = re.search(limit.cards, card)
        if limit.kernel == kernel and re.search(limit.programs, program) and is_of_card:
            return limit
    return None


def most_launches(program: str) -> int | None:
    """Return how many launches a program may take; None: any number."""
    return next((most for pattern, most in LAUNCHES if re.search(pattern, program)), None)


def failures(kernel: Kernel, program: str, card: str, resident_warps: int) -> Iterator[str]:
    """Yield a sentence for each limit that a kernel of a program exceeds on a card."""
    where = f"{kernel.name} of {program}"
    if kernel.spilled:
        yield f"{where} spills {kernel.spilled} bytes a thread."
    if kernel.float_atomics:
        yield f"{where} adds floats by {', '.join(kernel.float_atomics)}."
    if (limit := limit_of(kernel.name, program, card)) is None:
        return
    for turn in kernel.turns:
        size = turn.bytes_under_way(resident_warps)
        if turn.round_trips > limit.round_trips:
            yield (
                f"{where} has {turn.round_trips:g} round trips in a turn of a loop, over "
                f"{limit.round_trips}."
            )
        if size < limit.bytes_under_way:
            least = limit.bytes_under_way / 1e3
            yield f"{where} has {size / 1e3:.0f} KB under way, below {least:g}."
    before = kernel.before_first_store
    widest = min((max(each.loads) for each in [*kernel.turns, before] if each.loads), default=0)
    if widest < limit.load_bytes:
        yield f"{where} loads at most {widest} bytes at once, below {limit.load_bytes}."
    if limit.before_store is not None and before.round_trips > limit.before_store:
        yield (
            f"{where} has {before.round_trips:g} round trips before its first store, over "
            f"{limit.before_store}."
        )
