"""The step program of the CUDA device: Triton kernels over static buffers, captured once a bucket and replayed.

Owns weights, KV pool, row state, buffers and graphs. Not yet run on a GPU (docs/gpu-status.md); the dry mode
runs the same code in Triton's interpreter, where a graph is the work itself. Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import numpy as np
import torch
from triton.runtime import driver

from zl.errors import DeviceError, InvariantError, ShapeError
from zl.gpu.addresses import Addresses
from zl.gpu.cuda_buffers import BF16, Buffers, Layer, Tables, load_layer
from zl.gpu.cuda_memory import check_device, token_buckets
from zl.gpu.graphs import CudaStream, Graphs, Key, PlainStream, Stream, Work, keys
from zl.gpu.kernels.context_loader import Pieces, Plan, Rows, load_context
from zl.gpu.kernels.decode_attention import Segments, decode_attention
from zl.gpu.kernels.embed_rows import embed_rows
from zl.gpu.kernels.filter_update import filter_update
from zl.gpu.kernels.launch import INTERPRETED
from zl.gpu.kernels.linear import linear
from zl.gpu.kernels.norm_residual import norm_residual
from zl.gpu.kernels.prefill_attention import prefill_attention
from zl.gpu.kernels.qkv_rope_write import qkv_rope_write
from zl.gpu.kernels.rope import rope_table
from zl.gpu.kernels.sampling_columns import RowSampling, gather_sampling
from zl.gpu.kernels.silu_mul import silu_mul
from zl.gpu.kernels.stop_check import Results, RowLimits, stop_check
from zl.gpu.nvtx import Mark, unmarked
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.pool import KVPool
from zl.gpu.upload import Progress, Uploader
from zl.sampling.filter import Filter
from zl.sampling.sampler import sample_triton
from zl.shapes import ModelShape, Shapes


class CudaStep:
    """Run steps over the shared columns; an `Engine` (gpu.programs).

    tensors  a model's tensors by canonical name, each read once
    columns, slots   host memory that the device maps (pinned or registered); plain memory in the dry mode
    device   "cuda:0", or "cpu": the dry mode, where kernels are interpreted
    Capture  thread-local, so that other threads may use the device meanwhile; widest bucket first, one pool; each
             bucket once for steps of single tokens and once for mixed ones, for either slot
    progress called with the bytes uploaded so far
    debug_addresses  check before each step that nothing which the program points at has moved since capture
    canary   the last row, page and slot are the heartbeat's: its steps are alone, and fit the narrowest bucket
    penalty_filter  a kind of zl.sampling.filter
    mark     wraps the captures in ranges (gpu.nvtx)
    Raises   ShapeError for a model that the kernels do not take; DeviceError for a device that they do not run on, or
             in the dry mode without the interpreter
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
        canary: bool = False,
        mark: Mark = unmarked,
        penalty_filter: str = "exact",
    ):
        if shape.head_dim not in (64, 128):
            raise ShapeError("head_dim", shape.head_dim, "64 or 128: serve this model with --device cpu")
        self._device = torch.device(device)
        dry = self._device.type == "cpu"
        if dry and not INTERPRETED:
            raise DeviceError("the dry mode needs TRITON_INTERPRET=1 set before triton is imported", call="CudaStep")
        if dry:
            self.name, self._capability = "cuda, dry: interpreted", 80
        else:
            seen = torch.cuda.get_device_properties(self._device)
            shared = driver.active.utils.get_device_properties(self._device.index)["max_shared_mem"]
            self._capability = check_device(seen.name, seen.major, seen.minor, shared)
            self.name = f"cuda graphs on {seen.name}"
        self._filter = Filter(penalty_filter, shape.vocab)
        self.name += self._filter.note
        self.shape = shape
        self._columns = columns
        self._slots = slots
        self._max_len = shapes.max_model_len
        self._layers: list[Layer] = []
        self._tables: Tables | None = None
        self._load(tensors, progress)
        cos, sin = rope_table(shape, shapes.max_model_len)
        self._cos, self._sin = cos.contiguous().to(self._device), sin.contiguous().to(self._device)
        # Zeroed: a page is cleared by its first token, but what was never written must be no NaN either.
        self._pool = KVPool(shape, shapes.n_pages, BF16, self._device).data.zero_()
        self._eos = torch.tensor(sorted(shape.eos_ids) or [-1], dtype=torch.int32, device=self._device)
        self._bind(columns, shapes.max_rows)
        self._launched = 0
        self._buckets = token_buckets(shapes.step_tokens)
        # Every bucket is the front of the widest one's buffers: steps never overlap on the stream.
        places = shapes.max_rows - canary
        widest = Buffers.allocate(shape, self._buckets[0], min(self._buckets[0], places), self._max_len, self._device)
        self._buffers = {t: widest.front(t, min(t, places)) for t in self._buckets}
        self._stream: Stream = PlainStream() if dry else CudaStream(self._device, len(slots))
        self._stream.settle()  # zeros and uploads were ordered on other streams
        self._graphs = Graphs(self._stream, list(keys(self._buckets, len(slots), canary=canary)), self._work)
        self._capture_next = mark("capture", self._graphs.capture_next)
        while self._graphs.missing:
            self._capture_next()
        self._addresses = Addresses(self._listed_addresses) if debug_addresses else None

    def launch(self, slot: int) -> int:
        """Start the step that slot `slot` plans; return its sequence number. One graph launch, no allocation.

        Raises InvariantError for a plan wider than the build, or, in the debug mode, for an address that moved.
        """
        if self._addresses is not None:
            self._addresses.check()
        self._graphs.launch(self._program(slot))
        return self._count(slot)

    def launch_uncaptured(self, slot: int) -> int:
        """Start the same step kernel by kernel: what serves while graphs are captured anew, to the same bits."""
        self._graphs.launch_uncaptured(self._program(slot))
        return self._count(slot)

    def _program(self, slot: int) -> Key:
        """Pick the narrowest bucket for a plan, and whether it has segments of more than one token."""
        plan = self._slots[slot]
        n = int(plan.n_segs[0])
        lengths = plan.seg_len[:n]
        total = int(lengths.sum())
        bucket = next((t for t in reversed(self._buckets) if t >= total and self._places(t) >= n), None)
        if bucket is None:
            raise InvariantError(f"a step of {total} tokens in {n} segments was planned for buckets {self._buckets}")
        return Key(slot, bucket, n > 0 and int(lengths.max()) > 1)

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
        # A slot that was launched again meanwhile had to be waited for before, so that step has ended.
        for slot, last in enumerate(self._last):
            if last == seq:
                self._stream.wait(slot)  # sync

    def close(self) -> None:
        """Give the graphs and buffers back; no step may be in flight."""
        self._stream.settle()  # sync
        self._graphs.drop()
        self._buffers.clear()
        self._layers.clear()

    # -- for the heartbeat and the guard -------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """The stream that steps run in."""
        return self._stream

    def first_logits(self, out: np.ndarray) -> bool:
        """Copy the raw logits of the last step's first draw to `out`, f32 [vocab]; the first segment drew. # sync

        A copy call, which no step of a request has.
        """
        source = self._buffers[self._buckets[0]].logits[0]
        target = torch.from_numpy(out)

        def work() -> None:
            target.copy_(source)

        self._stream.run(work)
        return True

    @property
    def memory(self) -> dict[str, int]:
        """Count what the tensors hold, bytes by component; captured programs are not among them."""
        sizes = {name: tensor.nbytes for name, tensor in self.device_tensors()}
        weights = sum(n for name, n in sizes.items() if name.startswith("layers.") or name in ("embed", "norm", "head"))
        return {"weights": weights, "kv_pool": sizes["pool"], "buffers": sum(sizes.values()) - weights - sizes["pool"]}

    def weights(self) -> Iterator[torch.Tensor]:
        """List everything on the device that no step writes."""
        for name, tensor in self.device_tensors():
            if name.startswith("layers.") or name in ("embed", "norm", "head", "cos", "sin"):
                yield tensor

    def reload(self, tensors: Mapping[str, torch.Tensor], progress: Progress | None = None) -> None:
        """Upload all weights again, in place; no step in flight. # sync"""
        self._load(tensors, progress)
        for target, table in zip((self._cos, self._sin), rope_table(self.shape, self._max_len), strict=True):
            target.copy_(table)
        self._stream.settle()

    def drop_programs(self) -> None:
        """Forget the captured programs: from here on only `launch_uncaptured` works; no step in flight. # sync"""
        self._stream.settle()
        self._graphs.drop()

    def recapture_one(self) -> bool:
        """Capture one program that is missing; tell whether all are there. No step in flight, no slot in use. # sync"""
        if self._graphs.missing:
            plans = [(slot.n_segs, int(slot.n_segs[0])) for slot in self._slots]
            for count, _ in plans:
                count[0] = 0  # the warm-up and the first replay run whatever is planned
            self._capture_next()
            for count, n in plans:
                count[0] = n
        return not self._graphs.missing

    def device_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """List what the program owns on the device, by name; the narrower buckets' buffers are fronts of these."""
        for i, layer in enumerate(self._layers):
            for part in fields(layer):
                tensor = getattr(layer, part.name)
                if tensor is not None:
                    yield f"layers.{i}.{part.name}", tensor
        top = self._top
        yield from {"embed": top.embed, "norm": top.norm, "cos": self._cos, "sin": self._sin}.items()
        if top.head is not top.embed:
            yield "head", top.head
        yield from {"pool": self._pool, "eos": self._eos}.items()
        for name in ("table", "prompt_ids", "last_token", "done", "seen"):
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

        arena = host("arena").view(torch.int32)
        self._pieces = Pieces(host("own_ids"), host("n_pieces"), host("piece_at"), host("piece_source"), arena)
        self._rows = Rows(
            host("page_table"), state(*columns.page_table.shape), state(*columns.own_ids.shape), host("prompt_len"),
            state(n_rows), state(n_rows, dtype=torch.uint8), state(n_rows, self._filter.words),
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

    def _load(self, tensors: Mapping[str, torch.Tensor], progress: Progress | None) -> None:
        """Upload the weights; where they are on the device already, in place."""
        upload, old = Uploader(self._device, progress=progress), self._tables
        layers = [load_layer(tensors, i, upload, self._layers[i] if old else None) for i in range(self.shape.n_layers)]
        embed = upload.tensor([tensors["embed"]], BF16, into=old.embed if old else None)
        norm = upload.tensor([tensors["norm"]], torch.float32, into=old.norm if old else None)
        head = embed if self.shape.tied else upload.tensor([tensors["head"]], BF16, into=old.head if old else None)
        upload.close()
        self._layers, self._tables = layers, Tables(embed, norm, head)

    @property
    def _top(self) -> Tables:
        assert self._tables is not None
        return self._tables

    def _work(self, key: Key) -> Work:
        return lambda: self._compute(*key)

    def _compute(self, slot: int, t: int, mixed: bool) -> None:
        """Launch one step's kernels for slot `slot` in bucket `t`. Every count is read on the device."""
        b, form, top = self._buffers[t], self._filter, self._top
        r = b.drawn.shape[0]
        host = {name: c if name == "n_segs" else c[:r] for name, c in self._host_slots[slot].items()}
        context = b.context
        load_context(Plan(*(host[name] for name in Plan._fields)), self._pieces, self._rows, context, form)
        embed_rows(context.token_ids, top.embed, b.x, context.n_tokens)
        segments = Segments(context.seg_row, context.seg_start, context.seg_tokens, context.seg_offset)
        for i, layer in enumerate(self._layers):
            self._layer(layer, self._pool[i], b, segments, mixed)
        norm_residual(b.x, top.norm, b.last, context.n_tokens, eps=self.shape.rms_eps, index=context.last_index)
        linear(b.last, top.head, b.logits, context.n_segs, capability=self._capability)
        gather_sampling(context, self._rows.prompt_len, self._row_sampling, self._rows.seen, b.sampling, form)
        s = b.sampling
        sample_triton(
            b.logits, s.seen, s.temperature, s.top_p, s.penalty, s.seed, s.place, b.scratch, *b.draws
        )  # fmt: skip
        results = Results(*(host[name] for name in Results._fields))
        stop_check(context, b.draws, self._limits, self._eos, self._rows.last_token, self._rows.done, b.drawn, results)
        filter_update(b.drawn, context.seg_row, self._rows.seen, form)

    def _layer(self, layer: Layer, pool: torch.Tensor, b: Buffers, segments: Segments, mixed: bool) -> None:
        context, eps = b.context, self.shape.rms_eps
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
