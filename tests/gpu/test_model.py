"""zl/gpu/model.py, pool.py, torch_step.py and the reference ops, against transformers and against themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.oracle import LLAMA3, load_gguf, oracle_greedy, oracle_logits, save_hf, tiny_llama, write_gguf
from zl.errors import InvariantError, ShapeError
from zl.gpu.gguf_file import QUANTISED
from zl.gpu.kernels.rope import rope_table
from zl.gpu.model import Layout, Weights, forward, load_weights, logits, make_rope
from zl.gpu.pinned import EOS, FIRST, IGNORE_EOS, LENGTH, NUMERIC, SAMPLE, SKIPPED, RowColumns, StepSlot
from zl.gpu.pool import KVPool
from zl.gpu.torch_step import TorchStep
from zl.gpu.weights import open_model
from zl.shapes import PAGE, ModelShape, Shapes, pages_for

F32, BF16 = torch.float32, torch.bfloat16
BF16_BOUND = 0.03
"""Most that bfloat16 may move the embedded model's first-token logits: norm of the difference by norm of float32's."""


def fresh_pool(shape: ModelShape, n_pages: int, dtype: torch.dtype) -> KVPool:
    """Make a pool whose every page holds what must never be read."""
    pool = KVPool(shape, n_pages, dtype)
    pool.data.fill_(float("nan"))
    return pool


@torch.inference_mode()
def all_logits(weights: Weights, ids: list[int], chunks: tuple[int, ...] = ()) -> torch.Tensor:
    """Compute all positions' logits of one row, its pages scattered in a poisoned pool; `chunks` split the prefill."""
    shape = weights.shape
    n = pages_for(len(ids))
    pool = fresh_pool(shape, 2 * n + 1, weights.dtype)
    pages = torch.arange(2 * n, 0, -2)[None]
    pool.zero(pages[0])
    rope = make_rope(shape, len(ids))
    out, start = [], 0
    for length in chunks or (len(ids),):
        part = torch.tensor(ids[start : start + length])
        hidden = forward(weights, rope, part, Layout([start], [length], pages), pool)
        out.append(logits(weights, hidden))
        start += length
    assert start == len(ids)
    return torch.cat(out)


def tiny_ids(n: int = 150, vocab: int = 160) -> list[int]:
    return np.random.default_rng(3).integers(3, vocab, n).tolist()


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


# Against transformers: random small models

GRID = {
    "one key head a query head": {"num_key_value_heads": 12},
    "three": {"num_key_value_heads": 4},
    "four": {"num_key_value_heads": 3},
    "eight": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "untied": {"tie_word_embeddings": False},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "attention biases": {"attention_bias": True},
    "feed-forward biases": {"mlp_bias": True},
    "head size of its own": {"head_dim": 20},
    "qwen2": {"kind": "qwen2", "tie_word_embeddings": False},
    "all at once": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": False,
        "num_hidden_layers": 3,
    },
}


@pytest.mark.parametrize("name", GRID)
def test_folder_logits_equal_transformers(name, tmp_path):
    model = tiny_llama(**GRID[name])
    weights = load_weights(open_model(save_hf(model, tmp_path / "m")), F32)
    ids = tiny_ids()
    expected = oracle_logits(model, ids)
    assert expected.std() > 0.1
    assert relative(all_logits(weights, ids), expected) < 1e-4


@pytest.mark.parametrize("seed", range(8))
def test_random_configurations_equal_transformers(seed, tmp_path):
    rng = np.random.default_rng(seed)
    group, n_kv = int(rng.choice([1, 3, 4, 8])), int(rng.integers(1, 4))
    llama3 = LLAMA3 | {
        "factor": float(rng.choice([2.0, 8.0, 32.0])),
        "original_max_position_embeddings": int(rng.choice([32, 64, 128])),
        "rope_theta": float(rng.choice([1e4, 5e5])),
    }
    model = tiny_llama(
        seed,
        num_attention_heads=group * n_kv,
        num_key_value_heads=n_kv,
        head_dim=int(rng.choice([8, 16, 24, 64])),
        hidden_size=group * n_kv * int(rng.choice([4, 6, 10])),
        intermediate_size=int(rng.choice([48, 100])),
        num_hidden_layers=int(rng.integers(1, 4)),
        tie_word_embeddings=bool(rng.integers(2)),
        attention_bias=bool(rng.integers(2)),
        mlp_bias=bool(rng.integers(2)),
        rope_parameters=llama3 if rng.integers(2) else {"rope_type": "default", "rope_theta": 1e4},
    )
    weights = load_weights(open_model(save_hf(model, tmp_path / "m")), F32)
    ids = tiny_ids(100)
    assert relative(all_logits(weights, ids, (33, 1, 66)), oracle_logits(model, ids)) < 1e-4


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *QUANTISED])
def test_gguf_logits_equal_transformers_reading_of_the_file(kind, tmp_path):
    """Both sides read the same file: transformers un-permutes and dequantises it by its own loader."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    path = write_gguf(tiny_llama(**sizes, tie_word_embeddings=False), tmp_path / "m.gguf", kind, fields=_vocabulary())
    ids = tiny_ids(80)
    ours = all_logits(load_weights(open_model(path), F32), ids)
    assert ours.std() > 0.01
    assert relative(ours, oracle_logits(load_gguf(path), ids)) < 1e-4


def _vocabulary() -> dict[str, int]:
    return {"llama.vocab_size": 160}  # transformers asks the metadata, not the embedding


def test_gguf_rope_tensor_equals_llama3_scaling(tmp_path):
    """A converter writes Llama-3 scaling as divisors; zl must compute the same logits from them."""
    scaled = tiny_llama(rope_parameters=LLAMA3)
    plain = 1.0 / 10_000.0 ** (np.arange(0, 8, 2, dtype=np.float32) / 8)
    rope = LlamaRotaryEmbedding(scaled.config)
    divisors = (plain / rope.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 4
    path = write_gguf(scaled, tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors})
    ids = tiny_ids()
    expected = oracle_logits(scaled, ids)
    assert relative(all_logits(load_weights(open_model(path), F32), ids), expected) < 1e-4
    without = write_gguf(scaled, tmp_path / "n.gguf")
    assert relative(all_logits(load_weights(open_model(without), F32), ids), expected) > 1e-2


def test_gguf_biases_equal_transformers(tmp_path):
    for arch, options in (("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {"kind": "qwen2"})):
        model = tiny_llama(**options)
        path = write_gguf(model, tmp_path / f"{arch}.gguf", arch=arch)
        ids = tiny_ids(60)
        assert relative(all_logits(load_weights(open_model(path), F32), ids), oracle_logits(model, ids)) < 1e-4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100_000.0},
        LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0, "factor": 32.0},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    ],
)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_rope_tables_are_transformers_bit_by_bit(rope, head_dim, tmp_path):
    model = tiny_llama(rope_parameters=rope, head_dim=head_dim, num_hidden_layers=1)
    shape = open_model(save_hf(model, tmp_path / "m")).shape
    cos, sin = rope_table(shape, 4096)
    expected = LlamaRotaryEmbedding(model.config)(torch.zeros(1), torch.arange(4096)[None])
    for got, want in zip((cos, sin), expected, strict=True):
        assert torch.equal(torch.cat((got, got), -1), want[0])


# Against transformers: the embedded model


@pytest.fixture(scope="module")
def embedded(gguf_path):
    return load_weights(open_model(gguf_path), F32)


@pytest.fixture(scope="module")
def tokenizer(gguf_path):
    return AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    """Give the shortest, a middle and a long prompt of the test set, as transformers tokenizes them."""
    lines = (Path(__file__).parent.parent / "data" / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line) for line in lines if line.strip()]
    texts = []
    for chat in chats:
        roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(chat["messages"])]
        texts.append([{"role": "system", "content": chat["system"]}, *roles])
    ids = [list(tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False)) for t in texts]
    ids.sort(key=len)
    return [ids[0], ids[len(ids) // 2], ids[-2]]


def test_embedded_model_logits_and_greedy_tokens_equal_transformers(embedded, oracle, prompts):
    stepper = Stepper(embedded)
    for row, ids in enumerate(prompts):
        assert relative(all_logits(embedded, ids), oracle_logits(oracle, ids)) < 1e-4
        stepper.seat(row, ids, 64, IGNORE_EOS)
    results = stepper.run(*((row, 0, len(ids), FIRST | SAMPLE) for row, ids in enumerate(prompts)))
    tokens = [[token] for token, _, _ in results]
    for i in range(63):
        results = stepper.run(*((row, len(ids) + i, 1, SAMPLE) for row, ids in enumerate(prompts)))
        for line, (token, _, _) in zip(tokens, results, strict=True):
            line.append(token)
    assert [flags for _, _, flags in results] == [LENGTH] * 3
    assert tokens == [oracle_greedy(oracle, ids, 64) for ids in prompts]


def test_embedded_model_in_bfloat16_stays_within_its_bound(gguf_path, embedded, prompts, tell):
    narrow = load_weights(open_model(gguf_path), BF16)
    errors = []
    for ids in prompts:
        first, exact = all_logits(narrow, ids)[-1], all_logits(embedded, ids)[-1]
        errors.append(float((first - exact).norm() / exact.norm()))
    tell("first-token logits, relative error of bfloat16: " + " ".join(f"{e:.4f}" for e in errors))
    assert 0 < max(errors) < BF16_BOUND


# Against itself: pages, chunks, neighbours


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunks", [(1,) * 100, (32, 32, 36), (31, 1, 1, 67), (64, 36), (5, 95)])
def test_chunked_prefill_equals_whole(chunks, dtype, tmp_path):
    weights = load_weights(open_model(save_hf(tiny_llama(), tmp_path / "m")), dtype)
    ids = tiny_ids(100)
    # bfloat16: a sum that rounds the other way moves a value by a whole step of 2^-8
    assert relative(all_logits(weights, ids, chunks), all_logits(weights, ids)) < (1e-5 if dtype is F32 else 0.02)


def test_widened_weights_change_no_bit(tmp_path):
    weights = load_weights(open_model(save_hf(tiny_llama(), tmp_path / "m")), BF16)
    ids = tiny_ids(70)
    assert torch.equal(all_logits(weights, ids), all_logits(weights.widened(), ids))


@torch.inference_mode()
def test_mixed_segments_equal_each_row_alone(tmp_path):
    weights = load_weights(open_model(save_hf(tiny_llama(), tmp_path / "m")), F32)
    rows = [tiny_ids(n) for n in (40, 97, 70, 64, 5)]
    pool = fresh_pool(weights.shape, 25, F32)  # the last page, where -1 would lead, stays poisoned
    table = torch.full((5, 4), -1)
    free = iter(torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist())
    for row, ids in zip(table, rows, strict=True):
        for i in range(pages_for(len(ids))):
            row[i] = next(free)
    pool.zero(table[table >= 0])
    rope = make_rope(weights.shape, 100)
    lengths = [len(ids) for ids in rows]
    done = [0] * 5
    last: list[torch.Tensor] = [torch.empty(0)] * 5
    for takes in ([39, 50, 69, 63, 1], [1, 46, 0, 1, 3], [0, 1, 1, 0, 1]):
        live = [r for r in range(5) if takes[r]]
        ids = [t for r in live for t in rows[r][done[r] : done[r] + takes[r]]]
        layout = Layout([done[r] for r in live], [takes[r] for r in live], table[live])
        out = logits(weights, forward(weights, rope, torch.tensor(ids), layout, pool))
        ends = np.cumsum([takes[r] for r in live]) - 1
        for r, end in zip(live, ends, strict=True):
            done[r] += takes[r]
            last[r] = out[end]
    assert done == lengths
    for r in range(5):
        assert relative(last[r], all_logits(weights, rows[r])[-1]) < 1e-5


def test_pool_refuses_another_dtype_and_counts_its_page(tmp_path):
    shape = open_model(save_hf(tiny_llama(), tmp_path / "m")).shape
    pool = KVPool(shape, 3, BF16)
    assert pool.data.nbytes == 3 * KVPool.page_bytes(shape, BF16)
    k = torch.zeros(1, shape.n_kv_heads, shape.head_dim)
    with pytest.raises(ShapeError):
        pool.write(0, torch.tensor([0]), k, k)


# The step program


def argmax_sample(logits, seen, temperature, top_p, penalty, seed, index):
    """Sample as the contract says for temperature 0 and no penalty."""
    assert seen.shape == logits.shape
    assert len(seed) == len(index) == len(temperature) == len(top_p) == len(penalty) == len(logits)
    token = logits.argmax(-1)
    logprob = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
    return token, logprob, logits.isfinite().all(-1)


class Stepper:
    """A step program with its columns, a poisoned pool, and a plan of one step at a time."""

    def __init__(
        self, weights: Weights, max_rows: int = 4, max_model_len: int = 640, n_pages: int = 64, sample=argmax_sample
    ):
        shapes = Shapes(max_rows=max_rows, max_model_len=max_model_len, n_pages=n_pages)
        self.columns = RowColumns(shapes)
        self.slots = [StepSlot(shapes), StepSlot(shapes)]
        self.step = TorchStep(weights.shape, weights, self.columns, self.slots, shapes, sample=sample)
        self.step._pool.data.fill_(float("nan"))
        self.turn = 0

    def seat(
        self, row: int, ids: list[int], max_new: int, flags: int = 0, pages: list[int] | None = None, seed: int = 0
    ) -> None:
        c = self.columns
        c.put_ids(row, ids)
        c.max_new[row], c.row_flags[row], c.seed[row] = max_new, flags, seed
        c.temperature[row], c.top_p[row], c.penalty[row] = 0, 1, 1
        n = pages_for(len(ids) + max_new)
        c.page_table[row] = -1
        c.page_table[row, :n] = range(row * 16, row * 16 + n) if pages is None else pages[:n]

    def run(self, *segs: tuple[int, int, int, int]) -> list[tuple[int, float, int]]:
        """Run (row, start, len, flags) segments in one step; return (token, logprob, flags) of each."""
        slot = self.slots[self.turn]
        slot.n_segs[0] = len(segs)
        for s, (row, start, length, flags) in enumerate(segs):
            slot.seg_row[s], slot.seg_start[s], slot.seg_len[s], slot.seg_flags[s] = row, start, length, flags
        self.step.wait(self.step.launch(self.turn))
        self.turn ^= 1
        return [(int(slot.out_token[s]), float(slot.out_logprob[s]), int(slot.out_flags[s])) for s in range(len(segs))]

    def generate(self, row: int, ids: list[int], n: int, flags: int = 0) -> list[int]:
        """Seat a row and decode `n` tokens alone, or fewer where it ends."""
        self.seat(row, ids, n, flags)
        [(token, _, out)] = self.run((row, 0, len(ids), FIRST | SAMPLE))
        tokens = [token]
        while not out:
            [(token, _, out)] = self.run((row, len(ids) + len(tokens) - 1, 1, SAMPLE))
            tokens.append(token)
        return tokens


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Give a tiny model, its weights, and a prompt."""
    model = tiny_llama(tie_word_embeddings=False)
    folder = save_hf(model, tmp_path_factory.mktemp("small"))
    return model, load_weights(open_model(folder), F32), tiny_ids(45)


def test_step_generates_transformers_greedy_tokens_and_logprobs(small):
    model, weights, ids = small
    stepper = Stepper(weights)
    expected = oracle_greedy(model, ids, 40)
    assert stepper.generate(1, ids, 40, IGNORE_EOS) == expected
    stepper.seat(2, ids, 40)
    [(token, logprob, _)] = stepper.run((2, 0, 45, FIRST | SAMPLE))
    exact = oracle_logits(model, ids)[-1].log_softmax(-1)
    assert token == expected[0]
    assert logprob == pytest.approx(float(exact[token]), rel=1e-4)


def test_step_with_zls_own_sampler_is_greedy_at_zero_and_repeats_a_seed(small):
    model, weights, ids = small
    stepper = Stepper(weights, sample=None)
    assert stepper.generate(0, ids, 12, IGNORE_EOS) == oracle_greedy(model, ids, 12)
    runs = []
    for row, seed in ((1, 5), (3, 5), (2, 6)):
        stepper.seat(row, ids, 8, IGNORE_EOS, seed=seed)
        stepper.columns.temperature[row], stepper.columns.top_p[row] = 1.0, 0.95
        tokens = [stepper.run((row, 0, 45, FIRST | SAMPLE))[0][0]]
        tokens += [stepper.run((row, 45 + i, 1, SAMPLE))[0][0] for i in range(7)]
        runs.append(tokens)
    assert runs[0] == runs[1] != runs[2]


def test_step_mixes_prefill_chunks_with_decode_rows(small):
    model, weights, ids = small
    alone = oracle_greedy(model, ids, 6)
    other = tiny_ids(90)[45:]
    stepper = Stepper(weights)
    stepper.seat(0, ids, 6, IGNORE_EOS)
    stepper.seat(3, other, 6, IGNORE_EOS)
    tokens = [stepper.run((0, 0, 45, FIRST | SAMPLE))[0][0]]
    assert stepper.run((3, 0, 20, FIRST), (0, 45, 1, SAMPLE))[0] == (-1, 0.0, 0)
    tokens.append(int(stepper.slots[1].out_token[1]))
    first = stepper.run((3, 20, 25, SAMPLE), (0, 46, 1, SAMPLE))
    tokens.append(first[1][0])
    others = [first[0][0]]
    for i in range(3):
        results = stepper.run((0, 47 + i, 1, SAMPLE), (3, 45 + i, 1, SAMPLE))
        tokens.append(results[0][0])
        others.append(results[1][0])
    assert tokens == alone
    assert results[0][2] == LENGTH
    assert others == oracle_greedy(model, other, 4)


def test_step_ends_rows_at_eos_and_at_length_and_skips_them_after(small):
    model, weights, ids = small
    greedy = oracle_greedy(model, ids, 8)
    end = greedy[3]
    stop_at = greedy.index(end)
    ending = Weights(_with_eos(weights.shape, end), weights.dtype, weights.tensors)
    assert Stepper(ending).generate(0, ids, 8, IGNORE_EOS) == greedy
    stepper = Stepper(ending)
    assert stepper.generate(0, ids, 8) == greedy[: stop_at + 1]
    assert int(stepper.slots[stepper.turn ^ 1].out_flags[0]) == EOS
    assert stepper.run((0, 45 + stop_at + 1, 1, SAMPLE)) == [(-1, 0.0, SKIPPED)]
    assert stepper.generate(0, ids, stop_at + 1) == greedy[: stop_at + 1]
    assert int(stepper.slots[stepper.turn ^ 1].out_flags[0]) == EOS | LENGTH


def _with_eos(shape: ModelShape, token: int) -> ModelShape:
    return ModelShape(**{f: getattr(shape, f) for f in ModelShape.__dataclass_fields__} | {"eos_ids": (token,)})


def test_step_hands_the_sampler_its_row_columns_seed_index_and_exact_seen_set(small):
    _, weights, ids = small
    calls: list[tuple] = []

    def spy(*args):
        calls.append(args)
        return argmax_sample(*args)

    stepper = Stepper(weights, sample=spy)
    stepper.seat(2, ids, 9, seed=2**64 - 1)
    c = stepper.columns
    c.temperature[2], c.top_p[2], c.penalty[2] = 0.5, 0.25, 1.5
    stepper.run((2, 0, 40, FIRST))
    assert not calls  # no draw was asked for
    [(first, _, _)] = stepper.run((2, 40, 5, SAMPLE))
    [(second, _, _)] = stepper.run((2, 45, 1, SAMPLE))
    for i, (_, seen, temperature, top_p, penalty, seed, index) in enumerate(calls):
        assert set(seen[0].nonzero()[:, 0].tolist()) == set(ids) | set([first][:i])
        assert (temperature.tolist(), top_p.tolist(), penalty.tolist()) == ([0.5], [0.25], [1.5])
        assert (list(seed), index.tolist()) == ([2**64 - 1], [i])
    stepper.seat(2, ids[:3], 9)
    stepper.run((2, 0, 3, FIRST | SAMPLE))
    assert set(calls[2][1][0].nonzero()[:, 0].tolist()) == set(ids[:3])  # the owner before has left nothing
    assert second >= 0


def test_step_marks_non_finite_logits_and_ends_the_row_alone(small):
    model, weights, ids = small
    broken = dict(weights.tensors)
    broken["embed"] = weights["embed"].clone()
    broken["embed"][7] = float("nan")
    stepper = Stepper(Weights(weights.shape, weights.dtype, broken))
    healthy = [i for i in ids if i != 7]
    stepper.seat(0, [5, 7, 9], 4)
    stepper.seat(1, healthy, 4, IGNORE_EOS)
    results = stepper.run((0, 0, 3, FIRST | SAMPLE), (1, 0, len(healthy), FIRST | SAMPLE))
    assert results[0] == (-1, 0.0, NUMERIC)
    assert results[1][0] == oracle_greedy(model, healthy, 1)[0]
    assert stepper.run((0, 3, 1, SAMPLE))[0][2] == SKIPPED
    # The next owner of the row and of its poisoned page is healthy.
    stepper.seat(0, healthy, 4, IGNORE_EOS)
    [(token, _, flags)] = stepper.run((0, 0, len(healthy), FIRST | SAMPLE))
    assert (token, flags) == (results[1][0], 0)


def test_stale_nan_beyond_the_written_tokens_does_not_leak(small):
    """A page whose owner wrote one token still has 31 places of its last owner: they are zeroed, not only masked."""
    model, weights, _ = small
    ids = tiny_ids(PAGE + 1)
    stepper = Stepper(weights)  # every page starts as NaN
    stepper.seat(0, ids, 3, IGNORE_EOS)
    [(token, logprob, flags)] = stepper.run((0, 0, PAGE + 1, FIRST | SAMPLE))
    assert (token, flags) == (oracle_greedy(model, ids, 1)[0], 0)
    assert np.isfinite(logprob)
    untouched = stepper.step._pool.data[:, :, 2:]
    assert untouched.isnan().all()  # and nothing else was cleared


def test_step_refuses_a_plan_without_pages_and_a_wait_for_nothing(small):
    _, weights, ids = small
    stepper = Stepper(weights)
    stepper.seat(0, ids, 4)
    stepper.columns.page_table[0, 1] = -1
    with pytest.raises(InvariantError, match="row 0"):
        stepper.run((0, 0, 45, FIRST | SAMPLE))
    with pytest.raises(InvariantError, match="step 9"):
        stepper.step.wait(9)
    stepper.step.close()


# The folder for peers


def test_folder_written_for_peers_is_the_same_model(gguf_path, oracle, tokenizer, prompts, tmp_path):
    from transformers import AutoModelForCausalLM

    from bench.hf_folder import write_hf_folder

    out = write_hf_folder(gguf_path, tmp_path / "peer")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == BF16
    expected = oracle.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    assert model.generation_config.eos_token_id == 2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    written = AutoTokenizer.from_pretrained(out)
    ids = written.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert open_model(out).shape.eos_ids == (2,)
    assert (
        relative(all_logits(load_weights(open_model(out), BF16), prompts[0]), oracle_logits(oracle, prompts[0])) < 0.05
    )
