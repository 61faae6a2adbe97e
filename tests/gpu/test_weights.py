"""zl/gpu/weights.py and what is behind its door: both formats, every type, and every way to be wrong."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.oracle import LLAMA3, gguf_tensors, pack, save_hf, tiny_llama, write_gguf
from zl.errors import ModelError
from zl.gpu.gguf_file import QUANTISED, GgufSource
from zl.gpu.model import load_weights
from zl.gpu.weights import open_model
from zl.shapes import RopeScaling

KINDS = ("F32", "F16", "BF16", *QUANTISED)
K_QUANTS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Keep hash files out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama(tie_word_embeddings=False)


@pytest.fixture
def tiny_gguf(tiny, tmp_path):
    return write_gguf(tiny, tmp_path / "tiny.gguf")


@pytest.fixture
def tiny_folder(tiny, tmp_path):
    return save_hf(tiny, tmp_path / "folder")


def refused(path: Path) -> str:
    """Open, expect a refusal, and return its one line."""
    with pytest.raises(ModelError) as caught:
        open_model(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def mapped_files(tensor: torch.Tensor) -> str:
    """Name the file that a tensor's memory is mapped from, or ''."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= address < high:
            return line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
    return ""


# The embedded model


def test_embedded_model_equals_transformers_reading(gguf_path, oracle):
    source = open_model(gguf_path)
    expected = oracle.state_dict()
    for name in ("embed", "norm", "layers.0.wq", "layers.0.wk", "layers.17.wv", "layers.29.wo", "layers.3.w_down"):
        stored = {"embed": "embed_tokens", "norm": "norm"}.get(name) or name.replace("wq", "self_attn.q_proj").replace(
            "wk", "self_attn.k_proj"
        ).replace("wv", "self_attn.v_proj").replace("wo", "self_attn.o_proj").replace("w_down", "mlp.down_proj")
        assert torch.equal(source.tensor(name, torch.float32), expected[f"model.{stored}.weight"]), name


def test_embedded_model_shape_and_fields(gguf_path):
    source = open_model(gguf_path)
    shape = source.shape
    assert (shape.n_layers, shape.hidden, shape.n_heads, shape.n_kv_heads, shape.head_dim) == (30, 576, 9, 3, 64)
    assert (shape.ffn, shape.vocab, shape.max_position, shape.rope_theta) == (1536, 49152, 8192, 100_000.0)
    assert shape.tied
    assert not shape.attention_bias
    assert not shape.mlp_bias
    assert (shape.eos_ids, shape.bos_id) == ((2,), 1)
    assert "<|im_start|>" in source.chat_template
    assert len(source.tokenizer_fields["tokenizer.ggml.tokens"]) == 49152
    assert source.tokenizer_fields["tokenizer.ggml.merges"][0] == "Ġ t"


def test_embedded_model_header_equals_the_librarys_reader(gguf_path):
    reader = gguf.GGUFReader(gguf_path)
    source = open_model(gguf_path)
    ours = source.tokenizer_fields
    assert ours == {k: f.contents() for k, f in reader.fields.items() if k.startswith("tokenizer.")}


# GGUF: values


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_tensors_equal_the_librarys_dequantisation(kind, tmp_path):
    model = tiny_llama(**K_QUANTS)
    source = open_model(write_gguf(model, tmp_path / "m.gguf", kind))
    raw = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    heads = {"attn_q": 8, "attn_k": 2}
    names = {
        "wq": "attn_q",
        "wk": "attn_k",
        "wv": "attn_v",
        "wo": "attn_output",
        "w_up": "ffn_up",
        "w_down": "ffn_down",
    }
    for ours, theirs in names.items():
        tensor = raw[f"blk.1.{theirs}.weight"]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if theirs in heads:  # undo the pairs one row at a time
            half = values.shape[0] // heads[theirs] // 2
            rows = [
                values[h * 2 * half + 2 * i + m] for h in range(heads[theirs]) for m in range(2) for i in range(half)
            ]
            values = np.stack(rows)
        got = source.tensor(f"layers.1.{ours}", torch.float32)
        assert torch.equal(got, torch.from_numpy(values.copy())), ours
        assert torch.equal(source.tensor(f"layers.1.{ours}", torch.bfloat16), got.bfloat16()), ours
        blocks = source.blocks(f"layers.1.{ours}")
        if kind in QUANTISED:
            assert blocks[0] == kind
            assert blocks[1].dtype == np.uint8
            assert blocks[1].shape[0] == values.shape[0]
            assert np.array_equal(gguf.dequantize(blocks[1], gguf.GGMLQuantizationType[kind]), values), ours
        else:
            assert blocks is None


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_rows_of_q_and_k_and_their_biases_come_back_in_half_rotation_order(kind, tmp_path):
    model = tiny_llama(attention_bias=True)
    source = open_model(write_gguf(model, tmp_path / "m.gguf", kind))
    state = model.state_dict()
    tolerance = 0 if kind == "F32" else 0.01
    for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "o_proj")):
        for letter, part in (("w", "weight"), ("b", "bias")):
            expected = state[f"model.layers.1.self_attn.{theirs}.{part}"]
            got = source.tensor(f"layers.1.{letter}{ours}", torch.float32)
            assert (got - expected).abs().max() <= tolerance, (ours, part)


def test_gguf_slabs_join_to_the_whole(tmp_path, monkeypatch):
    path = write_gguf(tiny_llama(), tmp_path / "m.gguf", "Q4_1")
    whole = open_model(path).tensor("layers.0.wq", torch.float32)
    monkeypatch.setattr("zl.gpu.gguf_file._SLAB", 1000)
    assert torch.equal(open_model(path).tensor("layers.0.wq", torch.float32), whole)


def test_gguf_is_mapped_and_views_stay_valid_after_the_source_is_gone(tiny_gguf, tiny):
    source = open_model(tiny_gguf)
    up = source.tensor("layers.0.w_up", torch.float32)
    assert mapped_files(up) == str(tiny_gguf)
    del source
    assert torch.equal(up, tiny.state_dict()["model.layers.0.mlp.up_proj.weight"])


def test_quantised_blocks_are_mapped(tmp_path):
    path = write_gguf(tiny_llama(), tmp_path / "m.gguf", "Q4_0")
    _, rows = open_model(path).blocks("layers.0.w_up")
    assert mapped_files(torch.from_numpy(rows)) == str(path)


# GGUF: hyper-parameters


def test_gguf_end_ids_join_eos_eot_and_eom(tiny, tmp_path):
    fields = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5, "tokenizer.ggml.bos_token_id": 1}
    shape = open_model(write_gguf(tiny, tmp_path / "m.gguf", fields=fields)).shape
    assert (shape.eos_ids, shape.bos_id) == ((2, 5, 7), 1)


def test_gguf_rope_tensor_and_linear_scaling_become_factors(tiny, tmp_path):
    divisors = np.array([1, 1, 4, 8], np.float32)
    path = write_gguf(tiny, tmp_path / "a.gguf", extra={"rope_freqs.weight": divisors})
    assert open_model(path).shape.rope_factors == (1, 1, 4, 8)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert open_model(write_gguf(tiny, tmp_path / "b.gguf", fields=linear)).shape.rope_factors == (2, 2, 2, 2)
    none = {"llama.rope.scaling.type": "none"}
    assert open_model(write_gguf(tiny, tmp_path / "c.gguf", fields=none)).shape.rope_factors is None


def test_gguf_tied_head_is_the_absent_one(tiny, tmp_path):
    assert not open_model(write_gguf(tiny, tmp_path / "a.gguf")).shape.tied
    source = open_model(write_gguf(tiny_llama(), tmp_path / "b.gguf"))
    assert source.shape.tied
    assert "head" not in source.names


def test_gguf_qwen2_rows_stay_as_they_are(tmp_path):
    model = tiny_llama(kind="qwen2")
    source = open_model(write_gguf(model, tmp_path / "m.gguf", arch="qwen2"))
    assert source.shape.attention_bias
    assert "layers.0.bo" not in source.names
    state = model.state_dict()
    assert torch.equal(source.tensor("layers.0.wq", torch.float32), state["model.layers.0.self_attn.q_proj.weight"])
    assert torch.equal(source.tensor("layers.0.bk", torch.float32), state["model.layers.0.self_attn.k_proj.bias"])


# GGUF: refusals


def test_missing_file_names_pull():
    assert "zl pull" in refused(Path("/nowhere/model.gguf"))


def test_other_architecture_is_named_with_what_is_supported(tiny, tmp_path):
    text = refused(write_gguf(tiny, tmp_path / "m.gguf", arch="gemma2"))
    assert "'gemma2'" in text
    assert "llama" in text


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "above zero"),
        ({"llama.expert_count": 8}, "experts"),
        ({"split.count": 3}, "llama-gguf-split"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.attention.head_count": 0}, "n_heads"),
        ({"llama.attention.head_count_kv": 5}, "share"),
        ({"llama.block_count": 4_000_000_000}, "missing"),
        ({"llama.block_count": 2.5}, "whole number"),
        ({"llama.block_count": 1}, "blk.1."),
        ({"llama.embedding_length": "wide"}, "not a number"),
        ({"llama.feed_forward_length": 64}, "hyper-parameters"),
    ],
)
def test_gguf_that_cannot_be_served_says_why(tiny, tmp_path, fields, word):
    assert word in refused(write_gguf(tiny, tmp_path / "m.gguf", fields=fields))


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"])
def test_missing_tensor_is_named(tiny, tmp_path, name):
    text = refused(write_gguf(tiny, tmp_path / "m.gguf", leave_out=name))
    assert "missing" in text
    assert name in text or {"output_norm.weight": "norm", "blk.1.ffn_up.weight": "layers.1.w_up"}[name] in text


def test_extra_norms_are_refused(tiny, tmp_path):
    extra = {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    assert "attn_q_norm" in refused(write_gguf(tiny, tmp_path / "m.gguf", extra=extra))


def test_unread_tensor_type_is_named(tiny, tmp_path):
    path = write_gguf(tiny, tmp_path / "m.gguf", "F16")
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    assert struct.unpack_from("<I", data, at)[0] == int(gguf.GGMLQuantizationType.F16)
    struct.pack_into("<I", data, at, int(gguf.GGMLQuantizationType.IQ2_XS))
    path.write_bytes(data)
    text = refused(path)
    assert "IQ2_XS" in text
    assert "Q4_K" in text


@pytest.mark.parametrize(
    "head", [b"", b"GG", b"PK\3\4 not a model at all", b"GGUF\1\0\0\0" + bytes(40), b"GGUF\0\0\0\3"]
)
def test_what_is_no_gguf_is_refused(tmp_path, head):
    path = tmp_path / "m.gguf"
    path.write_bytes(head)
    refused(path)


def test_truncation_is_found_wherever_it_is(tiny_gguf):
    data = tiny_gguf.read_bytes()
    end = gguf.GGUFReader(tiny_gguf).data_offset
    for size in [*range(0, end, 97), end, end + 1, len(data) // 2, len(data) - 64]:
        tiny_gguf.write_bytes(data[:size])
        refused(tiny_gguf)


def test_damaged_headers_are_refused_or_read_never_worse(tiny_gguf):
    data = tiny_gguf.read_bytes()
    end = gguf.GGUFReader(tiny_gguf).data_offset
    rng = np.random.default_rng(1)
    refusals: list[str] = []
    for _ in range(400):
        damaged = np.frombuffer(data, np.uint8).copy()
        at = rng.integers(0, end, 1 + rng.integers(0, 3))
        damaged[at] = rng.integers(0, 256, len(at), np.uint8)
        tiny_gguf.unlink()  # a new inode: an old mapping of these bytes may live on
        damaged.tofile(tiny_gguf)
        try:
            load_weights(open_model(tiny_gguf), torch.float32)
        except ModelError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert not any("\n" in text for text in refusals)


def test_pickled_weights_are_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"\x80\x02}q\x00.")
    assert "pickled" in refused(path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(_llama_config())
    (tmp_path / "folder" / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    assert "safetensors only" in refused(tmp_path / "folder")


def _llama_config() -> str:
    return json.dumps(tiny_llama().config.to_dict(), default=str)


# Folders


@pytest.mark.parametrize("shards", [False, True])
def test_folder_tensors_equal_the_model_and_lie_in_the_file(tiny, tmp_path, shards):
    folder = save_hf(tiny, tmp_path / "m", **({"max_shard_size": "100KB"} if shards else {}))
    assert len(list(folder.glob("*.safetensors"))) > 1 if shards else (folder / "model.safetensors").is_file()
    source = open_model(folder)
    state = tiny.state_dict()
    for name, stored in (
        ("embed", "model.embed_tokens"),
        ("head", "lm_head"),
        ("layers.1.wk", "model.layers.1.self_attn.k_proj"),
    ):
        got = source.tensor(name, torch.float32)
        assert torch.equal(got, state[f"{stored}.weight"])
        assert mapped_files(got).startswith(str(folder))
    assert source.blocks("embed") is None


def test_folder_shape_is_the_configurations(tmp_path):
    model = tiny_llama(
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LLAMA3,
        tie_word_embeddings=True,
        eos_token_id=[2, 9],
    )
    folder = save_hf(model, tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "hello"}')
    source = open_model(folder)
    shape = source.shape
    assert shape.head_dim == 16
    assert shape.attention_bias
    assert shape.mlp_bias
    assert shape.tied
    assert shape.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    assert (shape.eos_ids, shape.bos_id) == ((2, 9, 11), 1)
    assert source.chat_template == "hello"
    (folder / "chat_template.jinja").write_text("from its file")
    assert open_model(folder).chat_template == "from its file"


def test_folder_reads_both_spellings_of_rope_scaling(tmp_path):
    folder = save_hf(tiny_llama(rope_parameters=LLAMA3 | {"rope_theta": 5e5}), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    new = open_model(folder).shape
    old = {k: v for k, v in config.pop("rope_parameters").items() if k != "rope_theta"}
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": old, "rope_theta": 5e5}))
    assert open_model(folder).shape == new
    assert new.rope_theta == 5e5
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert open_model(folder).shape.rope_factors == (2.0,) * 4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "gemma"}, "'gemma'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "layers.2."),
        ({"vocab_size": 161}, "hyper-parameters"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding"),
        ({"model_type": "qwen2"}, "missing"),
    ],
)
def test_folder_that_cannot_be_served_says_why(tiny_folder, change, word):
    config = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(json.dumps(config | change))
    assert word in refused(tiny_folder)


def test_folder_with_files_missing_or_damaged_is_refused(tiny_folder):
    weights = tiny_folder / "model.safetensors"
    data = weights.read_bytes()
    for damaged in (data[: len(data) // 2], data[:5], b"", b"\xff" * 64):
        weights.unlink()
        weights.write_bytes(damaged)
        assert "damaged" in refused_file(tiny_folder, weights)
    weights.unlink()
    assert "no model.safetensors" in refused(tiny_folder)
    index = tiny_folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}')
    assert "leads out" in refused_file(tiny_folder, index)
    index.write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    assert "gone.safetensors" in refused(tiny_folder)
    (tiny_folder / "config.json").write_text("{")
    assert "not JSON" in refused_file(tiny_folder, tiny_folder / "config.json")
    (tiny_folder / "config.json").unlink()
    assert "config.json" in refused(tiny_folder)


def refused_file(folder: Path, file: Path) -> str:
    text = refused(folder)
    assert str(file) in text
    return text


def test_folder_with_a_surplus_or_strange_tensor_is_refused(tiny_folder):
    tensors = load_file(tiny_folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tiny_folder / "model.safetensors", metadata={"format": "pt"})
    open_model(tiny_folder)  # derived, and known to be harmless
    save_file(tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, tiny_folder / "model.safetensors")
    assert "q_norm" in refused(tiny_folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tiny_folder / "model.safetensors")
    assert "F8_E4M3" in refused(tiny_folder)


# Hashes and loading


def test_hash_is_the_files_and_follows_a_change(tiny_gguf):
    first = open_model(tiny_gguf)
    assert first.sha256 == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    assert first.sha256 == open_model(tiny_gguf).sha256
    data = bytearray(tiny_gguf.read_bytes())
    data[-1] ^= 1
    tiny_gguf.write_bytes(data)
    assert open_model(tiny_gguf).sha256 == hashlib.sha256(data).hexdigest()


def test_hash_is_taken_from_the_cache_while_the_file_is_the_same(tiny_gguf, tmp_path):
    known = open_model(tiny_gguf).sha256
    (entry,) = (tmp_path / "cache" / "zl" / "sha256").glob("*.json")
    entry.write_text(entry.read_text().replace(known, "f" * 64))
    assert open_model(tiny_gguf).sha256 == "f" * 64
    entry.write_text("not json")
    assert open_model(tiny_gguf).sha256 == known


def test_hash_of_a_folder_depends_on_every_file(tiny, tmp_path):
    folder = save_hf(tiny, tmp_path / "m", max_shard_size="100KB")
    before = open_model(folder).sha256
    assert re.fullmatch("[0-9a-f]{64}", before)
    last = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert open_model(folder).sha256 != before


def test_load_weights_reports_progress_and_keeps_vectors_in_float32(tiny_gguf):
    shares: list[float] = []
    weights = load_weights(open_model(tiny_gguf), torch.bfloat16, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) == len(weights.tensors)
    assert {n for n, t in weights.tensors.items() if t.dtype == torch.float32} == {
        n for n in weights.tensors if n.endswith("norm")
    }
    wide = weights.widened()
    assert all(t.dtype == torch.float32 for t in wide.tensors.values())
    assert torch.equal(wide["layers.0.wq"].bfloat16(), weights["layers.0.wq"])


def test_test_writer_permutes_for_real(tiny):
    """The GGUF writer of the tests must differ from the plain order, or the order tests above would prove nothing."""
    ours = gguf_tensors(tiny)["blk.0.attn_q.weight"]
    plain = tiny.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert not np.array_equal(ours, plain)
    assert np.array_equal(ours[1], plain[4])  # head size 8: the partner of row 0 is row 4


def test_k_quant_test_blocks_are_finite_and_varied():
    for kind in ("Q4_K", "Q5_K", "Q6_K"):
        values = gguf.dequantize(
            pack(np.ones((4, 256), np.float32) * [[1], [2], [3], [4]], kind), gguf.GGMLQuantizationType[kind]
        )
        assert np.isfinite(values).all()
        assert values.std() > 0


def test_source_of_a_file_is_a_gguf_source(tiny_gguf):
    assert isinstance(open_model(str(tiny_gguf)), GgufSource)
