"""Run before any test module is imported: Triton decides at its own import whether kernels are interpreted.

The default suite needs no GPU, so it interprets them; the suite on a GPU sets TRITON_INTERPRET=0. Tests that need the
real compiler (tests/gpu/test_compile.py) start a process of their own.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
