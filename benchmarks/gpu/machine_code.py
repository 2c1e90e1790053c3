"""Kernels of a compiled program, and the figures that decide their speed, read from machine code.

A kernel that gathers rows waits for memory. What matters is how many loads wait for one another in
a turn of its loop (*round trips*) and how many bytes are under way meanwhile. The estimate here
takes loads as issued in order, and a load as taking one unit of time and all else none; an
instruction that reads a loaded register waits for its load.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import pathlib
import re
import subprocess
import tempfile
from collections import Counter
from typing import Any

import pyarrow

_RIEGELI = bytes.fromhex("83af70d10d884a3f")
_ELF = b"\x7fELF\x02\x01\x01"
_CUDA = 190  # machine of an ELF file
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_MOSAIC = "_mosaic_gpu_kernel"  # behind the names of Mosaic's kernels
_MOST_THREADS = 1024  # of a block
_PASSES = 8  # of a loop's body, by which its turns have settled


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, such as ``LDG.E.128 R4, desc[UR4][R2.64]``; or a label."""

    name: str
    operands: str = ""
    is_label: bool = False

    @property
    def width(self) -> int:
        """Bytes that each thread loads or stores."""
        return next((_BYTES[part] for part in self.name.split(".")[1:] if part in _BYTES), 4)

    @property
    def is_float_atomic(self) -> bool:
        """Whether it adds floats in memory, or could by comparing and swapping."""
        return bool(re.match(r"(RED|ATOM)", self.name)) and bool(
            re.search(r"\.(F16|F32|F64|BF16|FTZ|CAS)", self.name)
        )


@dataclasses.dataclass(frozen=True)
class Waits:
    """Waits of a stretch of instructions.

    Attributes:
        round_trips: Loads that wait for one another, in a turn of a loop.
        loads: Number of loads by the bytes that each thread loads.
    """

    round_trips: float
    loads: dict[int, int]

    @property
    def bytes(self) -> int:
        """Bytes that a warp loads."""
        return 32 * sum(width * count for width, count in self.loads.items())

    def bytes_under_way(self, resident_warps: int) -> float:
        """Return the bytes that a multiprocessor waits for at a time, on the average."""
        return self.bytes * resident_warps / max(self.round_trips, 1)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program.

    Attributes:
        name: Its name.
        registers: Registers of a thread.
        spilled: Bytes of local memory of a thread.
        shared_memory: Bytes of shared memory of a block that are known when it is compiled.
        warps: Warps of a block.
        instructions: Its machine code.
        is_mosaic: Whether Mosaic made it.
    """

    name: str
    registers: int
    spilled: int
    shared_memory: int
    warps: int
    instructions: tuple[Instruction, ...]
    is_mosaic: bool = False

    @property
    def float_atomics(self) -> list[str]:
        """Names of its instructions that add floats in memory."""
        names = (each.name for each in self.instructions if each.is_float_atomic)
        return list(dict.fromkeys(names))

    @property
    def turns(self) -> list[Waits]:
        """One turn of each innermost loop that loads."""
        every = (turn(self.instructions[start:end]) for start, end in loops(self.instructions))
        return [waits for waits in every if waits.loads]

    @property
    def before_first_store(self) -> Waits:
        """The stretch from the kernel's start to its first store, each loop taken once."""
        names = [each.name for each in self.instructions]
        first = next((i for i, name in enumerate(names) if name.startswith("STG")), len(names))
        return once(self.instructions[:first])

    @property
    def tile(self) -> Waits:
        """A tile's own stretch, its innermost loops skipped.

        This is a turn of the loop over a program's tiles, once its turns have settled; where there
        is no such loop, the kernel from its start to its end.
        """
        inner = loops(self.instructions)
        outer = [each for each in every_loop(self.instructions) if each not in inner]
        start, end = max(outer, key=_length, default=(0, len(self.instructions)))
        inner = [each for each in inner if start <= each[0] and each[1] <= end]
        skipped = {i for first, last in inner for i in range(first, last + 1)}
        stretch = tuple(self.instructions[i] for i in range(start, end) if i not in skipped)
        return turn(stretch) if outer else once(stretch)


def kernels(compiled: Any, tools: pathlib.Path, names: str = "") -> list[Kernel]:
    """Return the kernels of a compiled program.

    Args:
        compiled: Result of compiling for a CUDA device.
        tools: Folder of ``cuobjdump`` and ``nvdisasm``.
        names: Regular expression at the start of the names of the kernels to return.
    """
    binaries = [
        binary
        for binary in _binaries(compiled.runtime_executable().serialize())
        if any(re.match(names, name.decode()) for name in re.findall(rb"\.text\.([\w.$]+)", binary))
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        every = pool.map(lambda binary: _disassemble(binary, tools), binaries)
        return [kernel for some in every for kernel in some]


@functools.cache  # Programs have many small kernels in common.
def _disassemble(binary: bytes, tools: pathlib.Path) -> list[Kernel]:
    result = []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        path = pathlib.Path(file.name)
        threads = _threads(_run(tools / "cuobjdump", "-elf", path))
        code = re.split(r"^\.text\.(\S+):", _run(tools / "nvdisasm", "-c", path), flags=re.M)
        functions = dict(zip(code[1::2], code[2::2], strict=True))
        for usage in re.finditer(
            r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)",
            _run(tools / "cuobjdump", "-res-usage", path),
        ):
            registers, stack, shared, local = map(int, usage.groups()[1:])
            name = usage[1].removesuffix(_MOSAIC)
            result.append(
                Kernel(
                    name=name,
                    registers=registers,
                    spilled=stack + local,
                    shared_memory=shared,
                    warps=-(-threads.get(usage[1], _MOST_THREADS) // 32),
                    instructions=parse(functions[usage[1]]),
                    is_mosaic=name != usage[1],
                )
            )
    return result


def _threads(text: str) -> dict[str, int]:
    """Return the threads of a block of each kernel, of cuobjdump's text."""
    sections = re.split(r"^\.nv\.info\.(\S+)", text, flags=re.M)
    found = {}
    for name, section in zip(sections[1::2], sections[2::2], strict=True):
        limit = re.search(
            r"EIATTR_(?:MAX_THREADS|REQNTID).*?Value:((?:\s+0x[0-9a-f]+)+)", section, re.S
        )
        if limit is not None:
            found[name] = math.prod(int(each, 16) for each in limit[1].split())
    return found


def parse(text: str) -> tuple[Instruction, ...]:
    """Parse the output of nvdisasm."""
    result = []
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line).strip()
        if label := re.match(r"\.(L_x_\d+):", line):
            result.append(Instruction(label[1], is_label=True))
        elif match := re.match(r"(?:@!?U?P[T\d]+\s+)?([A-Z0-9_]+(?:\.\w+)*)\s*(.*?);", line):
            result.append(Instruction(match[1], match[2]))
    return tuple(result)


def loops(instructions: tuple[Instruction, ...]) -> list[tuple[int, int]]:
    """Return the first and last position of each innermost loop."""
    found = every_loop(instructions)
    return [
        (start, end)
        for start, end in found
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in found)
    ]


def every_loop(instructions: tuple[Instruction, ...]) -> list[tuple[int, int]]:
    """Return the first and last position of each loop: those of backward branches."""
    labels = {each.name: i for i, each in enumerate(instructions) if each.is_label}
    branches = [
        (labels.get(target[1], i), i)
        for i, each in enumerate(instructions)
        if each.name.startswith("BRA") and (target := re.search(r"\.(L_x_\d+)", each.operands))
    ]
    # Behind its end a kernel has a branch to itself, which is not a loop.
    return sorted({(start, end) for start, end in branches if start < end - 2})


def _length(loop: tuple[int, int]) -> int:
    return loop[1] - loop[0]


def turn(body: tuple[Instruction, ...]) -> Waits:
    """Return what one turn of a loop waits for, once its turns have settled."""
    clock = _Clock()
    for _ in range(_PASSES):
        clock.run(body)
    half = clock.now
    for _ in range(_PASSES):
        clock.run(body)
    return Waits((clock.now - half) / _PASSES, _loads(body))


def once(instructions: tuple[Instruction, ...]) -> Waits:
    """Return what instructions wait for that run once, loads that are never read included."""
    clock = _Clock()
    clock.run(instructions)
    return Waits(max([clock.now, *clock.ready.values()]), _loads(instructions))


class _Clock:
    """The time, in round trips to memory, and when each register is loaded."""

    def __init__(self) -> None:
        self.now = 0
        self.ready: dict[int, int] = {}

    def run(self, instructions: tuple[Instruction, ...]) -> None:
        for each in instructions:
            target, _, rest = each.operands.partition(",")
            writes = not re.match(r"ST|RED|ATOM|BRA|ISETP|FSETP", each.name)
            for register in _registers(rest if writes else each.operands):
                self.now = max(self.now, self.ready.get(register, 0))
            if each.name.startswith("LDG"):
                first = min(_registers(target), default=0)
                for register in range(first, first + max(each.width // 4, 1)):
                    self.ready[register] = self.now + 1
            elif writes:
                for register in _registers(target):
                    self.ready.pop(register, None)


def _loads(instructions: tuple[Instruction, ...]) -> dict[int, int]:
    return dict(Counter(each.width for each in instructions if each.name.startswith("LDG")))


def _registers(operands: str) -> set[int]:
    found = re.findall(r"(?<![A-Z])R(\d+)(\.64)?", operands)
    return {int(number) + i for number, pair in found for i in range(2 if pair else 1)}


def _run(tool: pathlib.Path, *arguments: Any) -> str:
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


# A serialized executable holds the machine code in ELF files, inside compressed chunks of a
# riegeli file (github.com/google/riegeli), which may hold another riegeli file.
def _binaries(executable: bytes) -> list[bytes]:
    """Return the ELF files for NVIDIA GPUs of a serialized executable."""
    result = []
    for chunk in _chunks(executable):
        start = chunk.find(_ELF)
        while start >= 0:

            def number(at: int, size: int, start: int = start, chunk: bytes = chunk) -> int:
                return int.from_bytes(chunk[start + at : start + at + size], "little")

            sections = number(40, 8) + number(58, 2) * number(60, 2)
            segments = number(32, 8) + number(54, 2) * number(56, 2)
            if number(18, 2) == _CUDA:
                result.append(chunk[start : start + max(sections, segments)])
            start = chunk.find(_ELF, start + 16)
    return result


def _chunks(data: bytes) -> list[bytes]:
    """Return the decompressed chunks of the riegeli file that begins somewhere in ``data``."""
    begin = data.find(_RIEGELI)
    if begin < 0:
        return [data]
    data = data[begin:]
    # Each block of 64 KiB begins with a header of 24 bytes.
    plain = b"".join(data[i + 24 : i + 65536] for i in range(0, len(data), 65536))
    result, i = [], 0
    while i + 40 <= len(plain):
        size, kind = int.from_bytes(plain[i + 8 : i + 16], "little"), plain[i + 24]
        body = plain[i + 40 : i + 40 + size]
        i += 40 + size
        if kind != ord("r"):  # not a chunk of records
            continue
        sizes, start = _varint(body, 1)
        values = body[start + sizes :]
        if body[0] == ord("s"):
            values = _snappy(values[_varint(values, 0)[1] :])
        result += _chunks(values) if _RIEGELI in values else [values]
    return result


def _snappy(data: bytes) -> bytes:
    size = _varint(data, 0)[0]
    return pyarrow.decompress(data, size, codec="snappy", asbytes=True)


def _varint(data: bytes, i: int) -> tuple[int, int]:
    """Return the number of variable length at a position, and the position behind it."""
    value = shift = 0
    while True:
        value |= (data[i] & 127) << shift
        shift += 7
        i += 1
        if data[i - 1] < 128:
            return value, i
