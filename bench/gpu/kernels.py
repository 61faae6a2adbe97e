"""Kernels on fresh random inputs against float64 references, in the shapes of a model; bits across buckets."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from bench.gpu.report import Report
from tests.gpu.kernel_kit import INTERPRETED, AttentionCase, attention_case
from zl.gpu.kernels.decode_attention import decode_attention
from zl.gpu.kernels.linear import linear
from zl.gpu.kernels.norm_residual import norm_residual
from zl.gpu.kernels.prefill_attention import prefill_attention
from zl.gpu.kernels.qkv_rope_write import qkv_rope_write, qkv_rope_write_reference
from zl.gpu.kernels.rope import rope_table
from zl.gpu.kernels.silu_mul import silu_mul
from zl.sampling.sampler import sample, sample_triton
from zl.shapes import PAGE, ModelShape, pages_for

BF16_ERROR = 2**-7 if INTERPRETED else 2**-8 * 1.01
"""Largest relative error of a value rounded once: bf16 keeps 8 bits. The interpreter cuts off where a GPU rounds."""


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found.double() - exact).abs() / (exact.abs() + 1e-3)).max())


class Kernels:
    """The checks of one model shape on one device.

    rows     sizes of the products that are compared, the widest last
    lengths  (start, tokens) of the attended segments
    """

    def __init__(
        self,
        report: Report,
        shape: ModelShape,
        device: str,
        capability: int,
        rows: Sequence[int],
        lengths: Sequence[tuple[int, int]],
        max_len: int,
    ):
        self.report, self.shape, self.device, self.capability = report, shape, device, capability
        self.rows, self.lengths, self.max_len = rows, lengths, max_len

    def run(self) -> None:
        """Check every kernel."""
        s = self.shape
        q = s.n_heads * s.head_dim
        qkv = q + 2 * s.n_kv_heads * s.head_dim
        products = ((qkv, s.hidden), (s.hidden, q), (2 * s.ffn, s.hidden), (s.hidden, s.ffn), (s.vocab, s.hidden))
        for n, k in products:
            self.product(n, k)
        self.attention()
        self.norm()
        self.gate()
        self.rotation()
        self.sampler()

    def product(self, n: int, k: int) -> None:
        """Compare `linear` with a float64 product, and a row's bits in every bucket."""
        g = self._generator(f"{n}x{k}")
        x = torch.randn(max(self.rows), k, generator=g, device=self.device).bfloat16()
        weight = (torch.randn(n, k, generator=g, device=self.device) * k**-0.5).bfloat16()
        exact = x.double() @ weight.double().T
        outs, worst = {}, 0.0
        for m in self.rows:
            out = torch.full((m, n), float("nan"), device=self.device)
            linear(x[:m], weight, out, self._count(m), capability=self.capability)
            outs[m] = out
            worst = max(worst, float((out.double() - exact[:m]).abs().max()))
        # Products of bf16 are exact in float32; what remains is k roundings of sums of about 1.
        self._judge(f"linear {n}x{k}", worst, 2e-4)
        widest = outs[max(self.rows)]
        same = [m for m in self.rows if torch.equal(outs[m], widest[:m])]
        text = f"buckets {same} of {list(self.rows)} agree in every bit with the widest"
        self.report.prove(self.shape.name, f"linear {n}x{k} bits", len(same) == len(self.rows), text)

    def attention(self) -> None:
        """Compare both attention kernels with float64 over shuffled pages whose unread slots hold NaN."""
        s = self.shape
        heads = {"n_heads": s.n_heads, "n_kv": s.n_kv_heads, "head_dim": s.head_dim, "max_len": self.max_len}
        case = attention_case(11, [(start + n - 1, 1) for start, n in self.lengths], **heads)
        decode_attention(
            case.q, case.pool, case.page_table, case.segments, case.partials, case.out, max_len=case.max_len
        )
        self._judge("decode attention", self._attention_error(case), 0.02)
        case = attention_case(12, self.lengths, **heads)
        prefill_attention(
            case.q, case.pool, case.page_table, case.segments, case.out, max_len=case.max_len, min_tokens=1
        )
        self._judge("prefill attention", self._attention_error(case), 0.02)
        beside = torch.full_like(case.out, float("nan"))
        last = [(start + n - 1, 1) for start, n in self.lengths]
        segments = case.segments
        offsets = segments.offset + segments.tokens - 1
        singles = segments._replace(
            start=segments.start + segments.tokens - 1, tokens=torch.ones_like(segments.tokens), offset=offsets
        )
        decode_attention(case.q, case.pool, case.page_table, singles, case.partials, beside, max_len=case.max_len)
        at = offsets.long()
        same = torch.equal(beside[at], case.out[at])
        text = f"last tokens of {len(last)} segments: {'equal' if same else 'other'} bits"
        self.report.prove(self.shape.name, "decode equals prefill attention", same, text)

    def norm(self) -> None:
        """Compare RMSNorm with float64."""
        n, hidden = max(self.rows), self.shape.hidden
        g = self._generator("norm")
        x = torch.randn(n, hidden, generator=g, device=self.device) * 3
        gain = torch.randn(hidden, generator=g, device=self.device)
        out = torch.zeros(n, hidden, dtype=torch.bfloat16, device=self.device)
        norm_residual(x, gain, out, self._count(n), eps=self.shape.rms_eps)
        wide = x.double()
        exact = wide * (wide.square().mean(1, keepdim=True) + self.shape.rms_eps).rsqrt() * gain.double()
        self._judge("RMSNorm, relative", _relative(out, exact), BF16_ERROR)

    def gate(self) -> None:
        """Compare SwiGLU with float64."""
        n, ffn = max(self.rows), self.shape.ffn
        both = torch.randn(n, 2 * ffn, generator=self._generator("gate"), device=self.device) * 2
        out = torch.zeros(n, ffn, dtype=torch.bfloat16, device=self.device)
        silu_mul(both, out, self._count(n))
        gate, up = both.double().chunk(2, 1)
        exact = gate * torch.sigmoid(gate) * up
        self._judge("SwiGLU, relative", _relative(out, exact), BF16_ERROR)

    def rotation(self) -> None:
        """Compare rotation and the write into pages with the plain reference."""
        s, n = self.shape, min(64, max(self.rows))
        g = self._generator("rope")
        qkv = torch.randn(n, (s.n_heads + 2 * s.n_kv_heads) * s.head_dim, generator=g, device=self.device)
        bias = torch.randn(qkv.shape[1], generator=g, device=self.device) if s.attention_bias else None
        cos, sin = (table.to(self.device) for table in rope_table(s, self.max_len))
        n_pages = pages_for(n) + 2
        slots = torch.randperm(n_pages * PAGE)[:n].to(torch.int32).to(self.device)
        positions = torch.randint(0, self.max_len, (n,), dtype=torch.int32).to(self.device)
        tails = torch.zeros(n, dtype=torch.int32, device=self.device)
        found = []
        for write in (qkv_rope_write, qkv_rope_write_reference):
            q = torch.zeros(n, s.n_heads, s.head_dim, dtype=torch.bfloat16, device=self.device)
            pool = torch.zeros(2, n_pages, PAGE, s.n_kv_heads, s.head_dim, dtype=torch.bfloat16, device=self.device)
            write(qkv, cos, sin, positions, slots, tails, self._count(n), q, pool, bias=bias)
            found.append((q.double(), pool.double()))
        (q, pool), (q_ref, pool_ref) = found
        worst = max(float((q - q_ref).abs().max()), float((pool - pool_ref).abs().max()))
        self._judge("RoPE and page write", worst, 0.04)

    def sampler(self) -> None:
        """Compare tokens and logprobs with the torch sampler."""
        n, vocab = 16, self.shape.vocab
        g = self._generator("sampler")
        logits = torch.randn(n, vocab, generator=g, device=self.device) * 3
        seen = torch.rand(n, vocab, generator=g, device=self.device) < 0.1
        places = torch.nn.functional.pad(seen, (0, -vocab % 32)).view(n, -1, 32).to(torch.int64)
        words = (places << torch.arange(32, device=self.device)).sum(2)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        column = torch.linspace(0, 1.2, n, device=self.device)
        top_p, penalty = torch.full((n,), 0.9, device=self.device), torch.full((n,), 1.1, device=self.device)
        seed = torch.arange(n, device=self.device) * 1_000_003
        index = torch.arange(n, device=self.device)
        token = torch.zeros(n, dtype=torch.int64, device=self.device)
        logprob, finite = torch.zeros(n, device=self.device), torch.zeros(n, dtype=torch.bool, device=self.device)
        sample_triton(
            logits, words.contiguous(), column, top_p, penalty, seed, index, torch.empty_like(logits), token, logprob,
            finite,
        )  # fmt: skip
        wanted, wanted_logprob, _ = sample(logits, seen, column, top_p, penalty, seed.tolist(), index)
        same = int((token == wanted).sum())
        error = float((logprob - wanted_logprob)[token == wanted].abs().max())
        ok = same >= n - 1 and bool(finite.all()) and error < 1e-4
        text = f"{same} of {n} tokens equal, logprobs within {error:.1e}"
        self.report.prove(self.shape.name, "sampler", ok, text, error=error)

    def _attention_error(self, case: AttentionCase) -> float:
        """Return the largest difference from float64 softmax attention; infinite where anything is not finite."""
        worst = 0.0
        for row, start, n, offset in zip(*(column.tolist() for column in case.segments), strict=True):
            pages = case.page_table[row, : pages_for(start + n)].long()
            k, v = (case.pool[i][pages].flatten(0, 1)[: start + n].double() for i in (0, 1))
            group = case.q.shape[1] // k.shape[1]
            k, v = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (k, v))
            q = case.q[offset : offset + n].double().transpose(0, 1)
            scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
            places = torch.arange(start + n, device=q.device)
            later = places[None, :] > places[start:, None]
            exact = (scores.masked_fill(later, float("-inf")).softmax(2) @ v).transpose(0, 1)
            error = (case.out[offset : offset + n].double() - exact).abs().max()
            worst = max(worst, float(error) if bool(torch.isfinite(error)) else float("inf"))
        return worst

    def _judge(self, name: str, error: float, limit: float) -> None:
        self.report.prove(self.shape.name, name, error <= limit, f"error {error:.1e}, limit {limit:.1e}", error=error)

    def _count(self, n: int) -> torch.Tensor:
        return torch.tensor([n], dtype=torch.int32, device=self.device)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
