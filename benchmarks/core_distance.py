"""Measures the distance of the machine's first two cores.

Usage: python -m benchmarks.core_distance [--times N]
Prints the nanoseconds that a value takes from one core to the other and back, once a second. Cores
that share a cache take 50 to 110. The host of a virtual machine may move its cores apart at any
moment, to 300 and more; lookups of large tables then take 1.8 times as long (docs/performance.md).
Compiles core_distance.c with `cc`; Linux only.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
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
    """Return the nanoseconds there and back; 0 where there is one core or no C compiler."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2 or shutil.which("cc") is None:
        return 0
    with tempfile.TemporaryDirectory() as directory:
        program = os.path.join(directory, "core_distance")
        subprocess.run(["cc", "-O2", "-pthread", str(_SOURCE), "-o", program], check=True)
        command = [program, *map(str, cores)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
