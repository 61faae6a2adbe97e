"""Fixtures that the whole suite shares: the embedded model, and transformers' own reading of it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# `tests` and `bench` are no packages of the distribution; the suite imports helpers from them whatever starts it.
ROOT = str(Path(__file__).parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# What starts the suite in the background may have it ignore these; programs under test would inherit that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

MODEL = "smollm2-135m-instruct"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    """Give the embedded model's file; only `zl pull`'s own code ever fetches it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "zl" / "models" / MODEL_FILE
    if path.is_file():
        return path
    from zl.pull import fetch

    return fetch(MODEL)


@pytest.fixture(scope="session")
def oracle(gguf_path):
    """Give the embedded model as a float32 transformers LlamaForCausalLM, read by transformers' own GGUF loader."""
    from tests.oracle import load_gguf

    return load_gguf(gguf_path)


@pytest.fixture
def tell(record_property) -> Callable[[str], None]:
    """Say something that the end of the run shows, whatever captures or distributes the tests."""
    return lambda text: record_property("told", text)


def pytest_terminal_summary(terminalreporter):
    """Show what tests had to tell."""
    told = [
        (report.nodeid, text)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, text in report.user_properties
        if name == "told"
    ]
    if told:
        terminalreporter.section("figures")
    for nodeid, text in told:
        terminalreporter.write_line(f"{nodeid.partition('::')[2]}: {text.strip()}")
