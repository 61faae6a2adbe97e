"""zl/gpu/nvtx.py: ranges open and close in order, and off means that nothing is wrapped."""

from __future__ import annotations

import pytest
import torch

from zl.errors import DeviceError
from zl.gpu.nvtx import MarkedEngine, NvtxMark, unmarked


class Bindings:
    def __init__(self):
        self.log: list[str] = []

    def range_push(self, name):
        self.log.append(name)

    def range_pop(self):
        self.log.append("end")


class Engine:
    name = "double"
    fallback = True

    def __init__(self, log):
        self.log = log

    def launch(self, slot):
        self.log.append(f"launch of {slot}")
        return 7

    def wait(self, seq):
        self.log.append(f"wait for {seq}")
        raise RuntimeError("lost")

    def close(self):
        self.log.append("closed")


def test_off_hands_back_the_very_function():
    def work():
        pass

    assert unmarked("name", work) is work


def test_ranges_nest_and_close_however_a_call_ends():
    bindings = Bindings()
    mark = NvtxMark(bindings)
    bindings.log.clear()
    engine = MarkedEngine(Engine(bindings.log), mark)
    plan = mark("plan", lambda slot: engine.launch(slot))
    assert plan(2) == 7
    with pytest.raises(RuntimeError, match="lost"):
        engine.wait(7)
    engine.close()
    assert (engine.name, engine.fallback) == ("double", True)
    assert bindings.log == ["plan", "launch", "launch of 2", "end", "end", "wait", "wait for 7", "end", "closed"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_a_torch_without_nvtx_is_refused_with_the_remedy():
    with pytest.raises(DeviceError, match="leave nvtx off"):
        NvtxMark()
