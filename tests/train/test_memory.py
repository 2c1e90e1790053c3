from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# In a process of its own: what it sets cannot be taken back.
TOUCH_AGAIN = """
import resource
import numpy as np
from jaxrec.train.memory import keep_freed_memory

assert keep_freed_memory()
for repeat in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.full(1 << 26, 1, np.uint8)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert faults < 16, faults
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_memory_used_again_is_not_asked_for_again():
    subprocess.run([sys.executable, "-P", "-c", TOUCH_AGAIN], check=True)
