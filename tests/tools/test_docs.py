"""The examples of docs/protocol.md and docs/client.md work as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_server import FakeServer
from zl.config import load
from zl.facts import shapes_of
from zl.gpu.weights import open_model
from zl.net import codec
from zl.net.messages import RequestType
from zl.sampling.profiles import PROFILES, Profile
from zl.shapes import PAGE
from zl.text.prompt import PromptBuilder
from zl.text.tokenizer import text_model
from zl.tools.dissector import dissect

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = Path(__file__).parents[2] / "zl" / "net" / "zl.proto"


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


HEX = [bytes.fromhex("".join(line.partition(";")[0] for line in block.splitlines()))
       for block in blocks("protocol.md", "hex")]  # fmt: skip


@pytest.mark.parametrize("data", HEX, ids=lambda data: data[:8].hex())
def test_each_block_of_bytes_is_whole_frames(data):
    assert dissect(data).wrong_at is None


def test_the_blocks_of_bytes_are_what_their_text_says():
    ping, hi, answer, chat, tokens, cancel, hello, error = HEX
    assert ping == bytes(4)
    assert hi == codec.encode_request(request_id=1, messages=["Hi"], temperature=0, max_tokens=4)
    first, last = answer[: 4 + 0x12], answer[4 + 0x12 :]
    assert first == codec.encode_tokens(1, [19556, 28], b"Hello,", None, 42)
    usage = codec.Usage(31, 3, 28, False, 1_200, 34_000, 90_000, 150)
    assert last == codec.encode_last(1, [253], b" you", None, codec.Finish.LENGTH, usage)
    assert chat == codec.encode_request(request_id=2, system="Be brief.", messages=["2+2?", "4", "Why?"],
                                        temperature=0.7, seed=42, stop=["\n"])  # fmt: skip
    assert tokens == codec.encode_request(request_id=3, encoding=1, messages=[codec.pack_tokens([504, 3575, 282])])
    assert cancel == codec.encode_request(request_id=2, operation=1)
    assert hello == codec.encode_request(request_id=9, operation=2, auth_token="s3cret")
    overloaded = codec.PeerError(codec.Code.OVERLOADED, "no row and no queue place is left", retry_after_ms=250)
    assert error == codec.encode_error(overloaded, 5)


def test_the_page_has_the_schema_as_it_is():
    (printed,) = blocks("protocol.md", "proto")
    assert printed.strip() in SCHEMA.read_text("utf-8")


def test_the_table_of_sampling_profiles_is_the_program_s():
    text = (DOCS / "protocol.md").read_text("utf-8").partition("### Sampling profiles")[2]
    rows = re.findall(r"^\| (\d) \| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    told = {int(number): Profile(name, *map(float, values)) for number, name, *values in rows}
    assert told == dict(PROFILES)
    assert {number: profile.name for number, profile in told.items()} == {each.value: each.name for each in RequestType}


@pytest.mark.parametrize("page", ["docs/configuration.md", "systemd/zl.toml"])
def test_the_system_prompt_of_the_examples_fills_a_page(page, gguf_path, tmp_path):
    (line,) = re.findall(r"^(?:# )?(system_prompts = \[.*)$", (DOCS.parent / page).read_text("utf-8"), re.MULTILINE)
    path = tmp_path / "zl.toml"
    path.write_text(f"[model]\n{line}\n")
    source = open_model(gguf_path)
    text, settings = text_model(source), load(file=str(path), environ={})
    prompts = PromptBuilder(text, shapes_of(settings, source.shape))
    (system,) = settings.system_prompts
    assert prompts.build(system.encode(), [b"Hello"], max_prompt_tokens=1000).prefix_len >= PAGE
    assert "less than some 25 words" in (DOCS / "configuration.md").read_text()
    words = system.split()
    assert prompts.build(" ".join(words[:18]).encode(), [b"Hi"], max_prompt_tokens=1000).prefix_len < PAGE


def python(code: str, address: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "ZL_CONNECT": address, "HOME": "/nonexistent", **env}
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60,
                          check=False, env=env)  # fmt: skip


def test_the_client_of_the_protocol_page_gets_an_answer():
    (code,) = blocks("protocol.md", "python")
    with FakeServer() as server:
        done = python(code, server.address)
        assert (done.returncode, done.stdout) == (0, "Paris it is \n"), done.stderr
        done = python(code.replace("say Paris it is", "fail OVERLOADED"), server.address)
        assert "error: {1: 5, 2: b'told to fail: OVERLOADED'" in done.stdout


class DocServer(FakeServer):
    """Answers any question in a few words, and notes what it was asked."""

    def __init__(self):
        super().__init__()
        self.asked: list[str] = []

    async def _answer(self, request, writer):
        self.asked.append(request.messages[-1].decode("utf-8", "replace"))
        request.messages[-1] = b"say Paris 1 2 3 4 5 of course"
        await super()._answer(request, writer)


CLIENT = blocks("client.md", "python")


@pytest.mark.parametrize("number", range(len(CLIENT)))
def test_each_example_of_the_client_page_runs(number, gguf_path, monkeypatch):
    from tests import fake_server
    from zl.client.tokens import ClientTokenizer

    sha256 = ClientTokenizer.from_file(gguf_path).model.sha256 if "tokens" in CLIENT[number] else ""
    monkeypatch.setattr(fake_server.INFO, "tokenizer_sha256", sha256)
    with DocServer() as server, DocServer() as other:
        # The page's addresses are of servers that do not exist here.
        code = CLIENT[number].replace("tcp:10.0.0.1:7433", server.address).replace("tcp:10.0.0.2:7433", other.address)
        done = python(code, server.address, MODEL=str(gguf_path))
        assert (done.returncode, done.stderr) == (0, "")
        assert server.asked or other.asked


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "arguments", "stdin", "words"),
    [
        ("many_streams.py", ["20"], "", "20 answers"),
        ("live_editing.py", [], "one\none two\n", "Paris"),
        ("rag_qdrant.py", ["When is the museum open?"], "", "context, 400 bytes: Paris"),
    ],
)
def test_each_example_file_runs(name, arguments, stdin, words):
    if "qdrant" in name:
        pytest.importorskip("qdrant_client", reason="the example's extra is not installed (pip install '.[examples]')")
    with DocServer() as server:
        done = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], input=stdin, capture_output=True,
                              text=True, timeout=60, check=False,
                              env={"PATH": os.environ["PATH"], "ZL_CONNECT": server.address})  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        if "qdrant" in name:
            assert server.asked[0].startswith("Sum up: The museum of clocks is open from Tuesday")  # found first
            assert server.asked[1] == "When is the museum open?"
            assert len(server.requests[1].context) == 400


def test_every_example_file_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"many_streams.py", "live_editing.py", "rag_qdrant.py"}


def test_importing_the_client_brings_nothing_heavy():
    code = "import sys, zl.client; print([m for m in ('torch', 'numpy', 'asyncio', 'tokenizers') if m in sys.modules])"
    assert python(code, "").stdout == "[]\n"
