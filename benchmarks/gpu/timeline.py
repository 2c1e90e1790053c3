"""The least time of a scheduled step, and how much of its traffic runs under matrix products."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from benchmarks.gpu.roofline import (
    COLLECTIVES,
    MEMORY,
    NO_WORK,
    Instruction,
    bytes_moved,
    called_by,
    collective_work,
    computations_of,
    shape_bytes,
)
from jaxrec.plan import Topology

# Multiplications and additions a second of an H200 in TF32, by data sheet. JAX multiplies matrices
# of float32 in TF32 unless told otherwise.
PRODUCTS = 494.7e12
_SLICES = ("slice", "dynamic-slice", "gather")
# Operations that write parts of their first operand, and the operand that they write.
_IN_PLACE = {"scatter": 2, "dynamic-update-slice": 1}


@dataclasses.dataclass
class Transfer:
    """A collective of a step's timeline.

    Attributes:
        kind: Kind, such as "all-to-all".
        scope: Its place in the step, the program's ``op_name``.
        is_rows: Whether it carries rows of numbers, and not ids.
        num_bytes: Bytes of its result on a device.
        start: Second at which it begins.
        stop: Second at which it ends.
        under_products: Seconds of it in which matrix products run.
        under_kernels: Seconds of it in which any kernel runs.
    """

    kind: str
    scope: str
    is_rows: bool
    num_bytes: int
    start: float
    stop: float
    under_products: float = 0.0
    under_kernels: float = 0.0

    @property
    def seconds(self) -> float:
        """Its time on the links."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The collectives of a step in order, and the seconds that the step takes."""

    transfers: list[Transfer]
    seconds: float

    def share_under_products(self, scope: str = "") -> float:
        """Return the share of the time of rows' transfers, in some scope, under matrix products."""
        found = [each for each in self.transfers if each.is_rows and scope in each.scope]
        total = sum(each.seconds for each in found)
        return sum(each.under_products for each in found) / total if total else math.nan


def timeline(program: str, topology: Topology) -> Timeline:
    """Run a scheduled program on a device whose kernels and links have the data sheet's rates.

    Kernels run one after the other, and so do collectives, beside them. A kernel takes the time of
    its bytes in memory or of its products, the longer one. Starting takes no time. Loops whose
    number of turns is unknown have none: they are the further rounds of exchanges.

    Args:
        program: The optimized program of a device, with its schedule.
        topology: The devices, of `roofline.data_sheet`.
    """
    bodies = computations_of(program)
    entry = re.search(r"^ENTRY %([\w.-]+)", program, re.M)
    assert entry is not None
    instructions = bodies[entry[1]]
    transfers: list[Transfer] = []
    pending: dict[str, Transfer] = {}
    kernels: list[tuple[float, float, bool]] = []
    clock = links = 0.0
    for name, each in instructions.items():
        shapes = [instructions[x].shape for x in each.operands if x in instructions]
        if each.kind.endswith("-done"):
            if (transfer := pending.pop(each.operands[0], None)) is not None:
                clock = max(clock, transfer.stop)
        elif each.kind.removesuffix("-start") in COLLECTIVES:
            begin = max(clock, links)
            links = begin + collective_work(each, shapes, topology).link_seconds
            transfer = _transfer(each, shapes, begin, links)
            transfers.append(transfer)
            if each.kind.endswith("-start") and '"is_sync":true' not in each.line:
                pending[name] = transfer
            else:
                clock = links
        elif not NO_WORK.fullmatch(each.kind) and each.kind not in ("while", "conditional"):
            body = called_by(each, "calls")
            inner = bodies.get(body, {}) if body else {}
            is_sort = each.kind == "sort" or any(x.kind == "sort" for x in inner.values())
            flops = product_flops(each, shapes, inner)
            moved = fusion_bytes(each, shapes, inner) if inner and not is_sort else None
            moved = bytes_moved(each, shapes, is_sort) if moved is None else moved
            seconds = max(moved / MEMORY, flops / PRODUCTS)
            kernels.append((clock, clock + seconds, flops > 0))
            clock += seconds
    for transfer in transfers:
        for start, stop, is_product in kernels:
            both = max(0.0, min(stop, transfer.stop) - max(start, transfer.start))
            transfer.under_kernels += both
            transfer.under_products += both * is_product
    return Timeline(transfers, clock)


def _transfer(each: Instruction, operands: list[str], start: float, stop: float) -> Transfer:
    scope = re.search(r'op_name="([^"]*)"', each.line)
    kind = each.kind.removesuffix("-start")
    # Ids are integers; dense gradients and single numbers are reduced by all devices.
    is_rows = kind != "all-reduce" and bool(re.match(r"(f32|bf16|f16|u16|u8)\[\d+,", operands[0]))
    num_bytes = sum(map(shape_bytes, operands))
    return Transfer(kind, scope[1] if scope else "", is_rows, num_bytes, start, stop)


def product_flops(each: Instruction, operands: list[str], body: Mapping[str, Instruction]) -> float:
    """Return the multiplications and additions of a kernel's matrix products.

    Args:
        each: The kernel.
        operands: Shapes of its operands.
        body: Instructions of its fusion; empty: it has none.
    """
    if each.kind == "custom-call":
        found = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', each.line)
        if found is None or "gemm" not in each.line:
            return 0.0
        results = re.findall(r"\[([\d,]+)\]", each.shape)
        return 2.0 * math.prod(_sizes(results[0])) * _sizes(operands[0])[int(found[1])]
    flops = 0.0
    for dot in body.values():
        if dot.kind == "dot":
            left = body[dot.operands[0]].shape
            axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.line)
            assert axes is not None
            contracted = [_sizes(left)[int(axis)] for axis in axes[1].split(",") if axis]
            flops += 2.0 * math.prod(_sizes(dot.shape)) * math.prod(contracted)
    return flops


def fusion_bytes(
    each: Instruction, operands: list[str], body: Mapping[str, Instruction]
) -> float | None:
    """Return the bytes that a fusion reads and writes; None for a fusion without operands.

    Of an array that is sliced it reads the slice. An array that is scattered into stays in place.
    """
    moved = 0.0
    for name, parameter in body.items():
        if parameter.kind != "parameter":
            continue
        names, users = {name}, [x for x in body.items() if name in x[1].operands]
        while any(x.kind == "bitcast" for _, x in users):
            names |= {alias for alias, x in users if x.kind == "bitcast"}
            users = [x for x in body.items() if x[0] not in names and names & {*x[1].operands}]
        kinds = [x.kind if x.operands[0] in names else "" for _, x in users]
        if users and all(kind in _SLICES for kind in kinds):
            moved += sum(shape_bytes(x.shape) for _, x in users)
        elif not any(kind in _IN_PLACE for kind in kinds):
            moved += shape_bytes(parameter.shape)
    root = list(body.values())[-1]
    while root.kind == "bitcast":
        root = body[root.operands[0]]
    if root.kind in _IN_PLACE:
        updates = root.operands[_IN_PLACE[root.kind]]
        return moved + shape_bytes(body[updates].shape)
    return moved + shape_bytes(each.shape)


def _sizes(shape: str) -> list[int]:
    dims = shape.partition("[")[2].partition("]")[0] if "[" in shape else shape
    return [int(size) for size in dims.split(",") if size]
