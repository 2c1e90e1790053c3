"""Disks that are full, and limits of files."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import shutil
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def small_disk(directory: pathlib.Path, megabytes: int) -> Iterator[pathlib.Path]:
    """Mount a file system in memory; skip the test where that is not allowed."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs the right to mount a file system")
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mount refuses a file system in memory")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write no file above a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
