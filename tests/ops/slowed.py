"""`zl` with steps that can be slowed and stopped from outside: the hook of the tests, in a process of its own.

STEP_S        seconds that every step takes longer
STEP_BLOCKER  while this file exists, a step of the engine thread does not end; the file with ".held" is there from the
              moment that one is held
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from zl.cli import main
from zl.gpu.native.step import NativeStep

STEP_S = float(os.environ.get("STEP_S", "0"))
BLOCKER = Path(os.environ.get("STEP_BLOCKER", "/nonexistent"))
HELD = BLOCKER.with_name(BLOCKER.name + ".held")

launch = NativeStep.launch


def slowed(self: NativeStep, slot: int) -> int:
    if threading.current_thread() is threading.main_thread():
        return launch(self, slot)  # the canary of the start, before there is an engine thread
    time.sleep(STEP_S)
    while BLOCKER.exists():
        HELD.touch()
        time.sleep(0.01)
    return launch(self, slot)


NativeStep.launch = slowed  # type: ignore[method-assign]
sys.exit(main())
