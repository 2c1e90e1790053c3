from __future__ import annotations

import platform
import subprocess
import sys

import pytest

import jaxrec

# In a process of its own: what it sets cannot be taken back.
TOUCH_AGAIN = """
import resource
import jaxrec

assert jaxrec.keep_freed_memory()
import numpy as np

for repeat in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.full(1 << 26, 1, np.uint8)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert faults < 16, faults
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_memory_used_again_is_not_asked_for_again():
    subprocess.run([sys.executable, "-P", "-c", TOUCH_AGAIN], check=True)


# An array of more than an arena of a thread can hold, in threads that are started later, too.
IN_THREADS = """
import resource, threading
import jaxrec

is_kept = jaxrec.keep_freed_memory()
import pyarrow
import numpy as np

def touch():
    for _ in range(4):
        np.full(1 << 27, 1, np.uint8)

faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
assert is_kept, is_kept
assert max(faults[1:]) < 1000, faults
"""

TOO_LATE = """
import threading
import jaxrec

begun, done = threading.Barrier(2), threading.Event()
thread = threading.Thread(target=lambda: (bytearray(1000), begun.wait(), done.wait()))
thread.start()
begun.wait()
assert not jaxrec.keep_freed_memory()
done.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
@pytest.mark.parametrize("program", [IN_THREADS, TOO_LATE], ids=["in threads", "too late"])
def test_threads(program):
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def test_other_libraries_keep_their_settings(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not jaxrec.keep_freed_memory()
