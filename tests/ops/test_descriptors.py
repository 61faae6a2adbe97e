"""zl/ops/descriptors.py: the soft limit of open files becomes the hard one."""

from __future__ import annotations

import subprocess
import sys


def test_the_soft_limit_is_raised_to_the_hard_one():
    code = """
import resource
from zl.ops import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
assert descriptors.limit() == 64
descriptors.raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, 128)
descriptors.raise_limit()
print(descriptors.limit())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "128\n"
