"""What a newcomer can get wrong ends in one line that says what and what to do: no traceback.

Exit status 2 where somebody has to change something first, which systemd does not restart; 1 where a restart may help.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import gguf
import pytest

from tests.tiny_model import write_tiny
from zl.gpu.native.build import have_compiler

pytestmark = pytest.mark.system


def serve(*flags: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "zl", "serve", "--metrics", "off", "--log-level", "warning", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | env)


def one_line(done: subprocess.CompletedProcess, *words: str, status: int) -> None:
    assert done.returncode == status, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("zl: ")
    for word in words:
        assert word in lines[0], lines[0]


def unix(tmp_path) -> list[str]:
    return ["--listen", f"unix:{tmp_path / 'zl.sock'}"]


def test_missing_model(tmp_path):
    one_line(serve("--model", str(tmp_path / "absent.gguf"), *unix(tmp_path)), "absent.gguf", "no file", status=2)


def test_unknown_model_name(tmp_path):
    one_line(serve("--model", "smollm3", *unix(tmp_path)), "smollm3", "smollm2-135m-instruct", status=2)


def test_file_that_is_no_model(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("shopping list")
    one_line(serve("--model", str(path), *unix(tmp_path)), "notes.gguf", status=2)


def test_truncated_model(tmp_path, gguf_path):
    path = tmp_path / "half.gguf"
    with gguf_path.open("rb") as whole:
        path.write_bytes(whole.read(gguf_path.stat().st_size // 2))
    one_line(serve("--model", str(path), *unix(tmp_path)), "half.gguf", status=2)


def test_other_architecture(tmp_path):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    one_line(serve("--model", str(path), *unix(tmp_path)), "mamba", "llama", status=2)


def test_pickled_weights_are_never_read(tmp_path):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "hidden_size": 64,
        "num_hidden_layers": 1, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    one_line(serve("--model", str(tmp_path), *unix(tmp_path)), "safetensors", status=2)


def test_port_in_use(gguf_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        done = serve("--model", str(gguf_path), "--listen", f"tcp:127.0.0.1:{port}", "--max-rows", "1", ZL_THREADS="1")
    one_line(done, str(port), "in use", status=1)


def test_metrics_port_in_use_is_found_before_the_model_is_read(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("shopping list")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve("--model", str(path), *unix(tmp_path), "--metrics", f"127.0.0.1:{port}")
    one_line(done, f"metrics: 127.0.0.1:{port} is in use", status=1)


@pytest.mark.parametrize("name", ["access_log", "audit_log"])
def test_a_log_that_cannot_be_written_is_found_before_the_model_is_read(tmp_path, name):
    path = tmp_path / "notes.gguf"
    path.write_text("shopping list")
    where = tmp_path / "absent" / "log.jsonl"
    done = serve("--model", str(path), *unix(tmp_path), f"--{name.replace('_', '-')}", str(where))
    one_line(done, f"{name} {where}: cannot be appended to: No such file or directory", "or off", status=2)


def test_an_empty_token_starts_no_open_server(tmp_path):
    done = serve("--model", str(tmp_path / "absent.gguf"), *unix(tmp_path), ZL_AUTH_TOKEN="")
    one_line(done, "auth_token = '' (environment variable ZL_AUTH_TOKEN)", "unset it", status=2)


def test_a_server_that_others_reach_without_a_token_is_warned_of(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("shopping list")
    done = serve("--model", str(path), "--listen", "tcp:0.0.0.0:0")
    warning, error = done.stderr.splitlines()
    assert "WARNING" in warning.upper()
    assert "anybody who reaches tcp:0.0.0.0:" in warning
    assert "set auth_token_file and tls_cert" in warning
    assert error.startswith("zl: ")


def test_socket_in_a_folder_that_is_not_there(tmp_path, gguf_path):
    done = serve("--model", str(gguf_path), "--listen", f"unix:{tmp_path}/none/zl.sock")
    one_line(done, "none/zl.sock", "folder does not exist", status=2)


def test_address_that_the_machine_does_not_have(gguf_path):
    done = serve("--model", str(gguf_path), "--listen", "tcp:192.0.2.1:7433")  # TEST-NET-1, RFC 5737: nobody's
    one_line(done, "tcp:192.0.2.1:7433", "no such address", status=1)


def test_cache_that_cannot_be_written(tmp_path):
    if not have_compiler():
        pytest.skip("nothing is compiled here")
    cache = tmp_path / "cache"
    cache.write_text("a file in the way, for root may write anywhere")
    done = serve("--model", str(write_tiny(tmp_path / "model")), *unix(tmp_path), XDG_CACHE_HOME=str(cache))
    one_line(done, f"cannot write below {cache}/zl/native/", "set XDG_CACHE_HOME", status=2)


def test_too_little_memory_for_the_pool(tmp_path, gguf_path):
    done = serve("--model", str(gguf_path), "--kv-memory", "8MiB", *unix(tmp_path))
    one_line(done, "8.00 MiB", "--kv-memory", "--max-model-len", status=2)


def test_more_memory_than_the_machine_has(tmp_path, gguf_path):
    one_line(serve("--model", str(gguf_path), "--kv-memory", "90000GiB", *unix(tmp_path)), "does not fit", status=2)


def test_cuda_without_a_driver(tmp_path, gguf_path):
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has a driver")
    done = serve("--model", str(gguf_path), "--device", "cuda", *unix(tmp_path))
    one_line(done, "--device cpu", status=2)


def test_unknown_setting_in_the_file(tmp_path):
    config = tmp_path / "zl.toml"
    config.write_text("[limits]\nmax_row = 3\n")
    one_line(serve("--config", str(config)), "zl.toml:2", "max_rows", status=2)
