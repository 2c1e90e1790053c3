"""How far the first two cores are from each other, which decides how fast both read memory.

Usage: python -m benchmarks.core_distance [--times N]
Prints in how many nanoseconds a value travels from one core to the other and back, once a second.
Cores that share a cache take 50 to 110. A virtual machine's cores may be moved apart, to 300 and
more, at any moment: lookups of large tables then take 1.8 times as long (docs/performance.md).
Compiles core_distance.c with `cc`; Linux only.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import subprocess
import tempfile
import time

import tyro

_SOURCE = pathlib.Path(__file__).with_suffix(".c")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
        times: How often to measure.
    """

    times: int = 10


def main(options: Options) -> None:
    for _ in range(options.times):
        print(core_distance(), flush=True)
        time.sleep(1)


def core_distance() -> int:
    """Nanoseconds of the way there and back; 0 where there is one core alone."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return 0
    command = [_program(), *map(str, cores)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@functools.cache
def _program() -> str:
    path = pathlib.Path(tempfile.mkdtemp()) / "core_distance"
    subprocess.run(["cc", "-O2", "-pthread", str(_SOURCE), "-o", str(path)], check=True)
    return str(path)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
