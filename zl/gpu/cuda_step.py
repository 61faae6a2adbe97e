"""The step program of the CUDA device: Triton kernels over static buffers, captured once a bucket and replayed.

Owns weights, KV pool, row state, buffers, graphs and events. Not yet run on a GPU (docs/gpu-status.md); the dry mode
runs the same code uncaptured, in Triton's interpreter. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from zl.errors import DeviceError, InvariantError, ShapeError
from zl.gpu.addresses import Addresses
from zl.gpu.cuda_memory import token_buckets
from zl.gpu.kernels.context_loader import Context, Plan, Rows, load_context
from zl.gpu.kernels.decode_attention import Partials, Segments, decode_attention
from zl.gpu.kernels.embed_rows import embed_rows
from zl.gpu.kernels.filter_update import filter_update
from zl.gpu.kernels.launch import INTERPRETED
from zl.gpu.kernels.linear import linear
from zl.gpu.kernels.norm_residual import norm_residual
from zl.gpu.kernels.prefill_attention import prefill_attention
from zl.gpu.kernels.qkv_rope_write import qkv_rope_write
from zl.gpu.kernels.rope import rope_table
from zl.gpu.kernels.sampling_columns import RowSampling, SegmentSampling, gather_sampling
from zl.gpu.kernels.silu_mul import silu_mul
from zl.gpu.kernels.stop_check import Draws, Results, RowLimits, stop_check
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.pool import KVPool
from zl.gpu.upload import Progress, Uploader
from zl.sampling.sampler import sample_triton
from zl.shapes import ModelShape, Shapes

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's tensors on the device: matrices bf16 [out, in], q over k over v, gate over up; the rest float32."""

    attn_norm: torch.Tensor
    w_qkv: torch.Tensor
    b_qkv: torch.Tensor | None
    wo: torch.Tensor
    bo: torch.Tensor | None
    mlp_norm: torch.Tensor
    w_gate_up: torch.Tensor
    b_gate_up: torch.Tensor | None
    w_down: torch.Tensor
    b_down: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Buffers:
    """One bucket's activations: float32 and bf16 [T, …], then [R, …] for the segments' last tokens."""

    context: Context
    x: torch.Tensor
    h: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    act: torch.Tensor
    partials: Partials
    last: torch.Tensor
    logits: torch.Tensor
    scratch: torch.Tensor
    sampling: SegmentSampling
    draws: Draws
    drawn: torch.Tensor

    def front(self, t: int, r: int) -> Buffers:
        """Return views of the first `t` tokens' and `r` segment places' parts."""
        c = self.context
        return Buffers(
            context=Context._make([*(column[:t] for column in c[:5]), *(column[:r] for column in c[5:11]), *c[11:]]),
            x=self.x[:t],
            h=self.h[:t],
            qkv=self.qkv[:t],
            q=self.q[:t],
            attended=self.attended[:t],
            gate_up=self.gate_up[:t],
            act=self.act[:t],
            partials=Partials(*(part[:r] for part in self.partials)),
            last=self.last[:r],
            logits=self.logits[:r],
            scratch=self.scratch[:r],
            sampling=SegmentSampling(*(column[:r] for column in self.sampling)),
            draws=Draws(*(column[:r] for column in self.draws)),
            drawn=self.drawn[:r],
        )


def load_layer(tensors: Mapping[str, torch.Tensor], i: int, upload: Uploader) -> Layer:
    """Join and upload one layer's tensors, by canonical name."""

    def matrix(*names: str) -> torch.Tensor:
        return upload.tensor([tensors[f"layers.{i}.{n}"] for n in names], BF16)

    def vector(name: str) -> torch.Tensor:
        return upload.tensor([tensors[f"layers.{i}.{name}"]], torch.float32)

    def bias(*names: str) -> torch.Tensor | None:
        full = [f"layers.{i}.{name}" for name in names]
        if not any(name in tensors for name in full):
            return None
        sizes = [tensors[name.replace(".b_", ".w_").replace(".b", ".w")].shape[0] for name in full]
        parts = [tensors[n].float() if n in tensors else torch.zeros(size) for n, size in zip(full, sizes, strict=True)]
        return upload.tensor(parts, torch.float32)

    return Layer(
        vector("attn_norm"), matrix("wq", "wk", "wv"), bias("bq", "bk", "bv"), matrix("wo"), bias("bo"),
        vector("mlp_norm"), matrix("w_gate", "w_up"), bias("b_gate", "b_up"), matrix("w_down"), bias("b_down"),
    )  # fmt: skip


class CudaStep:
    """Run steps over the shared columns; an `Engine` (gpu.programs).

    tensors  a model's tensors by canonical name, each read once
    columns, slots   host memory that the device maps (pinned or registered); plain memory in the dry mode
    device   "cuda:0", or "cpu": the dry mode, where nothing is captured and kernels are interpreted
    Capture  thread-local, so that other threads may use the device meanwhile; widest bucket first, one pool; each
             bucket once for steps of single tokens and once for mixed ones, for either slot
    progress called with the bytes uploaded so far
    debug_addresses  check before each step that nothing which the program points at has moved since capture
    Raises   ShapeError for a model that the kernels do not take; DeviceError in the dry mode without the interpreter
    """

    fallback = False

    def __init__(
        self,
        shape: ModelShape,
        tensors: Mapping[str, torch.Tensor],
        columns: RowColumns,
        slots: Sequence[StepSlot],
        shapes: Shapes,
        *,
        device: str = "cuda:0",
        progress: Progress | None = None,
        debug_addresses: bool = False,
    ):
        if shape.head_dim not in (64, 128):
            raise ShapeError("head_dim", shape.head_dim, "64 or 128: serve this model with --device cpu")
        self._device = torch.device(device)
        self._dry = self._device.type == "cpu"
        if self._dry and not INTERPRETED:
            raise DeviceError("the dry mode needs TRITON_INTERPRET=1 set before triton is imported", call="CudaStep")
        self.name = "cuda, dry: interpreted" if self._dry else f"cuda graphs on {torch.cuda.get_device_name(device)}"
        self._capability = 80 if self._dry else 10 * torch.cuda.get_device_capability(device)[0]
        self._shape = shape
        self._columns = columns
        self._slots = slots
        self._max_len = shapes.max_model_len
        upload = Uploader(self._device, progress=progress)
        self._layers = [load_layer(tensors, i, upload) for i in range(shape.n_layers)]
        self._embed = upload.tensor([tensors["embed"]], BF16)
        self._norm = upload.tensor([tensors["norm"]], torch.float32)
        self._head = self._embed if shape.tied else upload.tensor([tensors["head"]], BF16)
        upload.close()
        cos, sin = rope_table(shape, shapes.max_model_len)
        self._cos, self._sin = cos.contiguous().to(self._device), sin.contiguous().to(self._device)
        # Zeroed: a page is cleared by its first token, but what was never written must be no NaN either.
        self._pool = KVPool(shape, shapes.n_pages, BF16, self._device).data.zero_()
        self._eos = torch.tensor(sorted(shape.eos_ids) or [-1], dtype=torch.int32, device=self._device)
        self._bind(columns, shapes.max_rows)
        self._launched = 0
        self._buckets = token_buckets(shapes.step_tokens)
        # Every bucket is the front of the widest one's buffers: steps never overlap on the stream.
        widest = self._allocate(self._buckets[0], min(self._buckets[0], shapes.max_rows))
        self._buffers = {t: widest.front(t, min(t, shapes.max_rows)) for t in self._buckets}
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        if not self._dry:
            self._stream = torch.cuda.Stream(self._device)
            # One event a slot: a slot is launched again only after its step was waited for.
            self._events = [torch.cuda.Event() for _ in slots]
            self._capture()
        self._addresses = Addresses(self._listed_addresses) if debug_addresses else None

    def launch(self, slot: int) -> int:
        """Start the step that slot `slot` plans; return its sequence number. One graph launch, no allocation.

        Raises InvariantError for a plan wider than the build, or, in the debug mode, for an address that moved.
        """
        if self._addresses is not None:
            self._addresses.check()
        bucket, mixed = self._program(slot)
        if self._dry:
            self._compute(slot, bucket, mixed)
        else:
            with torch.cuda.stream(self._stream):
                self._graphs[slot, bucket, mixed].replay()
                self._events[slot].record(self._stream)
        return self._count(slot)

    def launch_uncaptured(self, slot: int) -> int:
        """Start the same step kernel by kernel: the twin that `make gpu-check` compares replays with, bit by bit."""
        bucket, mixed = self._program(slot)
        if self._dry:
            self._compute(slot, bucket, mixed)
        else:
            with torch.cuda.stream(self._stream):
                self._compute(slot, bucket, mixed)
                self._events[slot].record(self._stream)
        return self._count(slot)

    def _program(self, slot: int) -> tuple[int, bool]:
        """Pick the narrowest bucket for a plan, and whether it has segments of more than one token."""
        plan = self._slots[slot]
        n = int(plan.n_segs[0])
        lengths = plan.seg_len[:n]
        total = int(lengths.sum())
        bucket = next((t for t in reversed(self._buckets) if t >= total and self._places(t) >= n), None)
        if bucket is None:
            raise InvariantError(f"a step of {total} tokens in {n} segments was planned for buckets {self._buckets}")
        return bucket, n > 0 and int(lengths.max()) > 1

    def _count(self, slot: int) -> int:
        self._launched += 1
        self._last[slot] = self._launched
        return self._launched

    def wait(self, seq: int) -> None:
        """Block, without the interpreter's lock, until step `seq` has ended.

        Raises InvariantError for a number that was never given out.
        """
        if not 0 < seq <= self._launched:
            raise InvariantError(f"step {seq} was waited for, {self._launched} were launched")
        if self._dry:
            return
        # A slot that was launched again meanwhile had to be waited for before, so that step has ended.
        for slot, last in enumerate(self._last):
            if last == seq:
                self._events[slot].synchronize()  # sync

    def close(self) -> None:
        """Give the graphs and buffers back; no step may be in flight."""
        if not self._dry:
            self._stream.synchronize()  # sync
        self._graphs.clear()
        self._buffers.clear()
        self._layers.clear()

    def device_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """List what the program owns on the device, by name; the narrower buckets' buffers are fronts of these."""
        for i, layer in enumerate(self._layers):
            for part in fields(layer):
                tensor = getattr(layer, part.name)
                if tensor is not None:
                    yield f"layers.{i}.{part.name}", tensor
        yield from {"embed": self._embed, "norm": self._norm, "cos": self._cos, "sin": self._sin}.items()
        if self._head is not self._embed:
            yield "head", self._head
        yield from {"pool": self._pool, "eos": self._eos}.items()
        for name in ("table", "last_token", "done", "seen"):
            yield f"rows.{name}", getattr(self._rows, name)
        buffers = self._buffers[self._buckets[0]]
        for part in fields(buffers):
            value = getattr(buffers, part.name)
            if isinstance(value, torch.Tensor):
                yield part.name, value
            else:
                for name, tensor in value._asdict().items():
                    yield f"{part.name}.{name}", tensor

    def _listed_addresses(self) -> Iterator[tuple[str, int]]:
        for name, tensor in self.device_tensors():
            yield name, tensor.data_ptr()
        for bucket, buffers in self._buffers.items():
            yield f"bucket {bucket}", buffers.x.data_ptr()
        for name, array in vars(self._columns).items():
            yield f"columns.{name}", array.ctypes.data
        for i, slot in enumerate(self._slots):
            for name, array in vars(slot).items():
                yield f"slot {i}.{name}", array.ctypes.data

    def _places(self, bucket: int) -> int:
        return int(self._buffers[bucket].drawn.shape[0])

    def _bind(self, columns: RowColumns, n_rows: int) -> None:
        """Make tensors of the shared columns (no copy) and the device's own row state."""

        def host(name: str) -> torch.Tensor:
            return torch.from_numpy(getattr(columns, name))

        def state(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self._device)

        self._rows = Rows(
            host("page_table"), state(*columns.page_table.shape), host("prompt_ids"), host("prompt_len"),
            state(n_rows), state(n_rows, dtype=torch.uint8), state(n_rows, -(-self._shape.vocab // 32)),
        )  # fmt: skip
        self._row_sampling = RowSampling(
            host("temperature"), host("top_p"), host("penalty"), host("seed").view(torch.int64)
        )
        self._limits = RowLimits(host("prompt_len"), host("max_new"), host("row_flags"))
        self._host_slots = [
            {name: torch.from_numpy(getattr(slot, name)) for name in (*Plan._fields, *Results._fields)}
            for slot in self._slots
        ]
        self._last = [0] * len(self._slots)

    def _allocate(self, t: int, r: int) -> Buffers:
        s, device = self._shape, self._device

        def f32(*size: int) -> torch.Tensor:
            return torch.zeros(size, device=device)

        def bf16(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=BF16, device=device)

        draws = Draws(
            torch.zeros(r, dtype=torch.int64, device=device), f32(r), torch.zeros(r, dtype=torch.bool, device=device)
        )
        return Buffers(
            context=Context.allocate(t, r, device),
            x=f32(t, s.hidden),
            h=bf16(t, s.hidden),
            qkv=f32(t, (s.n_heads + 2 * s.n_kv_heads) * s.head_dim),
            q=bf16(t, s.n_heads, s.head_dim),
            attended=bf16(t, s.n_heads, s.head_dim),
            gate_up=f32(t, 2 * s.ffn),
            act=bf16(t, s.ffn),
            partials=Partials.allocate(r, self._max_len, s.n_heads, s.head_dim, device),
            last=bf16(r, s.hidden),
            logits=f32(r, s.vocab),
            scratch=f32(r, s.vocab),
            sampling=SegmentSampling.allocate(r, s.vocab, device),
            draws=draws,
            drawn=torch.full((r,), -1, dtype=torch.int32, device=device),
        )

    def _capture(self) -> None:
        """Warm up and capture every program; the columns must plan nothing yet."""
        # Zeros and uploads were ordered on other streams than the one that captures.
        torch.cuda.synchronize(self._device)  # sync
        pool = torch.cuda.graph_pool_handle()
        for t in self._buckets:
            for mixed in (True, False):
                for slot in range(len(self._slots)):
                    with torch.cuda.stream(self._stream):
                        # Compiles and loads the kernels: neither is allowed in a capture.
                        self._compute(slot, t, mixed)
                    self._stream.synchronize()  # sync
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(
                        graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
                    ):
                        self._compute(slot, t, mixed)
                    self._graphs[slot, t, mixed] = graph

    def _compute(self, slot: int, t: int, mixed: bool) -> None:
        """Launch one step's kernels for slot `slot` in bucket `t`. Every count is read on the device."""
        b, vocab = self._buffers[t], self._shape.vocab
        r = b.drawn.shape[0]
        host = {name: c if name == "n_segs" else c[:r] for name, c in self._host_slots[slot].items()}
        context = b.context
        load_context(Plan(*(host[name] for name in Plan._fields)), self._rows, context, vocab=vocab)
        embed_rows(context.token_ids, self._embed, b.x, context.n_tokens)
        segments = Segments(context.seg_row, context.seg_start, context.seg_tokens, context.seg_offset)
        for i, layer in enumerate(self._layers):
            self._layer(layer, self._pool[i], b, segments, mixed)
        norm_residual(b.x, self._norm, b.last, context.n_tokens, eps=self._shape.rms_eps, index=context.last_index)
        linear(b.last, self._head, b.logits, context.n_segs, capability=self._capability)
        gather_sampling(context, self._rows.prompt_len, self._row_sampling, self._rows.seen, b.sampling, vocab=vocab)
        s = b.sampling
        sample_triton(
            b.logits, s.seen, s.temperature, s.top_p, s.penalty, s.seed, s.place, b.scratch, *b.draws
        )  # fmt: skip
        results = Results(*(host[name] for name in Results._fields))
        stop_check(context, b.draws, self._limits, self._eos, self._rows.last_token, self._rows.done, b.drawn, results)
        filter_update(b.drawn, context.seg_row, self._rows.seen, vocab=vocab)

    def _layer(self, layer: Layer, pool: torch.Tensor, b: Buffers, segments: Segments, mixed: bool) -> None:
        context, eps = b.context, self._shape.rms_eps
        live, capability = context.n_tokens, self._capability
        norm_residual(b.x, layer.attn_norm, b.h, live, eps=eps)
        linear(b.h, layer.w_qkv, b.qkv, live, capability=capability)
        qkv_rope_write(
            b.qkv, self._cos, self._sin, context.positions, context.slot_of_token, context.tail_of_token, live, b.q,
            pool, bias=layer.b_qkv,
        )  # fmt: skip
        table = self._rows.table
        decode_attention(b.q, pool, table, segments, b.partials, b.attended, max_len=self._max_len)
        if mixed:
            prefill_attention(b.q, pool, table, segments, b.attended, max_len=self._max_len)
        linear(b.attended.flatten(1), layer.wo, b.x, live, bias=layer.bo, add=True, capability=capability)
        norm_residual(b.x, layer.mlp_norm, b.h, live, eps=eps)
        linear(b.h, layer.w_gate_up, b.gate_up, live, bias=layer.b_gate_up, capability=capability)
        silu_mul(b.gate_up, b.act, live)
        linear(b.act, layer.w_down, b.x, live, bias=layer.b_down, add=True, capability=capability)
