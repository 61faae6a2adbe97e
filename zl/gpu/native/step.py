"""The CPU engine: one native call is one step, on native threads of its own, without the interpreter's lock.

State: a native context with packed weights, KV pool, scratch and worker threads; freed by `close`.
Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zl.errors import CapacityError, DeviceError, InvariantError, ModelError, ShapeError, TransferError
from zl.gpu.native import abi
from zl.gpu.native.build import library, pick_level, request_amx
from zl.gpu.native.needs import config_of, kinds_of, pool_bytes
from zl.gpu.native.packed import Packed, body_begin, read_head, write_head
from zl.sampling.filter import Filter
from zl.shapes import INT8_MODEL_LEN, PAGE, ModelShape

if TYPE_CHECKING:
    import torch  # loaded only where tensors are packed: a start from packed weights saves its seconds

_PROBLEMS = {
    1: "more tokens than max_step_tokens",
    2: "a segment with a row, start or length out of range",
    3: "a segment whose page table does not cover its tokens",
    4: "a row whose prompt does not lie within its own ids and the arena",
}

STAGES = (
    "plan", "embed", "norm", "qkv", "insert", "attention", "out", "mlp_norm", "gate_up", "down", "final_norm", "head",
    "sample", "total",
)  # fmt: skip
"""Names of `NativeStep.times()`."""
_PLAN, _EMBED, _SAMPLE = (STAGES.index(name) for name in ("plan", "embed", "sample"))


class NativeStep:
    """Compute steps of a Llama-family model on the CPU.

    weights          canonical names; matrices all bf16 or all f32 (this decides the engine's dtype), read once, one
                     after another, and not kept. Or a Packed file, which decides dtype, level and library
    columns          gpu.pinned.RowColumns, or anything with the same arrays
    slots            two gpu.pinned.StepSlot
    max_step_tokens  most tokens one step may hold
    level            auto, amx, avx512, avx512f or avx2
    penalty_filter   a kind of zl.sampling.filter, "exact" or "bloom"
    kv               "int8" keeps keys and values in eight bits (bf16 engines only); "auto" in the engine's dtype
    blocks           gives a tensor's quantised blocks as WeightSource.blocks does. A bf16 engine keeps those of Q4_0,
                     Q4_1 and Q8_0 and unpacks them at each use, to the same bits that the tensor in bf16 has
    Raises           DeviceError, CapacityError, ShapeError; ModelError: a Packed file of another mould
    """

    fallback = False

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, torch.Tensor] | Packed,
        columns: Any,
        slots: Sequence[Any],
        n_pages: int,
        max_step_tokens: int,
        n_threads: int,
        level: str = "auto",
        blocks: Callable[[str], tuple[str, np.ndarray] | None] | None = None,
        kv: str = "auto",
        penalty_filter: str = "exact",
    ):
        self.shape = shape
        self.n_pages = n_pages
        packed = weights if isinstance(weights, Packed) else None
        self.level = packed.level if packed is not None else pick_level(level)
        self.dtype = _dtype_of(weights)
        if shape.head_dim % 2 or shape.head_dim > 128 or shape.n_heads % shape.n_kv_heads:
            raise ShapeError("head_dim", shape.head_dim, "an even number up to 128, n_heads a multiple of n_kv_heads")
        self.kv = self.dtype if kv == "auto" else kv
        if self.kv not in (self.dtype, "int8") or (self.kv == "int8" and self.dtype != "bfloat16"):
            raise ShapeError("kv", kv, f"auto in {self.dtype}" + (", or int8" if self.dtype == "bfloat16" else ""))
        self.filter = Filter(penalty_filter, shape.vocab)
        kept = ", int8 KV" if self.kv == "int8" else ""
        self.name = f"native {self.level} {self.dtype}{kept}{self.filter.note}"
        if self.level == "amx":
            request_amx()  # before the worker threads start
        self._lib = abi.load(packed.library if packed is not None else library(self.level))
        self._keep = (columns, list(slots))  # the context holds addresses of their arrays
        self._max_rows, self._model_len = columns.own_ids.shape
        if self.kv == "int8" and self._model_len > INT8_MODEL_LEN:
            raise ShapeError("max_model_len", self._model_len, f"at most {INT8_MODEL_LEN} with int8 keys and values")
        self._eos = np.array(shape.eos_ids, np.int32)
        self._blocks = blocks if self.dtype == "bfloat16" else None
        self._kinds = read_head(packed.weights)[0] if packed is not None else kinds_of(shape, self._blocks)
        config = config_of(
            shape, self.dtype, self._kinds, self._eos, rows=self._max_rows, model_len=self._model_len,
            table=columns.page_table.shape[1], n_pages=n_pages, step_tokens=max_step_tokens, threads=n_threads,
            kv=self.kv, bloom=self.filter.bloom,
        )  # fmt: skip
        self._context: int | None = self._lib.zl_open(
            ctypes.byref(config), ctypes.byref(abi.columns(columns)), abi.slots(slots)
        )
        if not self._context:
            raise CapacityError(
                f"no memory for the native step: {n_pages} KV pages take "
                f"{pool_bytes(shape, n_pages, self.kv) / 2**30:.2f} GiB beside the weights; lower pages or rows"
            )
        self._views()
        try:
            if isinstance(weights, Packed):
                with weights.weights.open("rb") as file:
                    self._import(file.fileno(), weights.weights)
            else:
                self._load(weights)
        except BaseException:
            self.close()
            raise
        self._blocks = None  # read; a mapped file may go now
        self._lib.zl_start(self._context)

    def launch(self, slot: int) -> int:
        """Start the step planned in slot 0 or 1; at most two may be in flight. Returns its sequence number."""
        return int(self._lib.zl_launch(self._handle, slot))

    def wait(self, seq: int) -> None:
        """Block, without the interpreter's lock, until step `seq` has ended. # sync

        Raises  InvariantError: the slot broke a rule and nothing of it was computed
        """
        status = self._lib.zl_wait(self._handle, seq)
        if status:
            raise InvariantError(f"step {seq}: {_PROBLEMS.get(status, status)}")

    def close(self) -> None:
        """End the threads and free the memory; steps in flight are finished first. Idempotent."""
        context, self._context = self._context, None
        if context:
            self._lib.zl_close(context)
            del self.last_token, self.done, self.seen, self.prompt_ids, self._times  # views of memory that is gone

    def export(self, path: Path) -> None:
        """Write the packed weights to a file that `Packed` names.

        Raises  TransferError: the file cannot be written
        """
        with path.open("wb") as file:
            write_head(file, self._kinds)
            file.flush()  # the library writes to the descriptor
            if not self._lib.zl_export(self._handle, file.fileno()):
                raise TransferError(f"{path}: cannot write {self.packed_bytes >> 20} MiB of weights: free some space")

    @property
    def packed_bytes(self) -> int:
        """Count the bytes that `export` writes."""
        return int(self._lib.zl_packed_bytes(self._handle))

    def read_kv(self, layer: int, row: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Copy keys and values of `count` positions, f32 [count, n_kv_heads, head_dim]; no step in flight."""
        k, v = (np.empty((count, self.shape.n_kv_heads, self.shape.head_dim), np.float32) for _ in range(2))
        if not self._lib.zl_read_kv(self._handle, layer, row, start, count, k.ctypes.data, v.ctypes.data):
            raise ShapeError("read_kv", (layer, row, start, count), "a layer, row and positions that have pages")
        return k, v

    def write_kv(self, layer: int, row: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """Store keys and values, f32 [count, n_kv_heads, head_dim], from position `start` on; no step in flight.

        A page is cleared when its first position is written.
        """
        k, v = (np.ascontiguousarray(x, np.float32) for x in (k, v))
        want = (k.shape[0], self.shape.n_kv_heads, self.shape.head_dim)
        if k.shape != want or v.shape != want:
            raise ShapeError("k and v", (k.shape, v.shape), want)
        if not self._lib.zl_write_kv(self._handle, layer, row, start, k.shape[0], k.ctypes.data, v.ctypes.data):
            raise ShapeError("write_kv", (layer, row, start, k.shape[0]), "a layer, row and positions that have pages")

    def packed(self) -> np.ndarray:
        """Lay an array over the packed weights and rope tables, uint8 [n]; not to be used after `close`."""
        size = ctypes.c_size_t()
        at = ctypes.c_void_p(self._lib.zl_packed(self._handle, ctypes.byref(size)))
        return abi.view(at, (size.value,), np.uint8)

    def reload(
        self,
        weights: Mapping[str, torch.Tensor],
        blocks: Callable[[str], tuple[str, np.ndarray] | None] | None = None,
    ) -> None:
        """Pack the weights again, in place, from nothing; no step in flight, and none until it has returned.

        blocks  as at the start
        """
        self._lib.zl_unload(self._handle)
        self._blocks = blocks if self.dtype == "bfloat16" else None
        try:
            self._load(weights)
        finally:
            self._blocks = None

    def reimport(self, descriptor: int, path: Path) -> None:
        """Read the packed weights again, in place, from an open file that `export` wrote; as `reload`."""
        self._lib.zl_unload(self._handle)
        self._import(descriptor, path)

    def unpack(self, name: str, layer: int, out: np.ndarray) -> bool:
        """Copy one tensor out of the packed weights, in its canonical orientation, for the fallback.

        name  one of abi.WEIGHTS
        out   matrices: uint16 (bf16) or float32 [rows, cols]; norms and biases: float32 [n]
        Returns False where the model has no such bias
        """
        rows, cols = out.shape if out.ndim == 2 else (1, len(out))
        number = abi.WEIGHTS.index(name)
        return bool(self._lib.zl_unpack(self._handle, number, layer, out.ctypes.data, rows, cols, out.ndim == 2))

    def settle(self) -> None:
        """Block until no worker looks at any launched step. # sync"""
        self._lib.zl_settle(self._handle)

    def pool(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lay an array over the KV pool; not to be used after `close`.

        Returns  pool, uint16 (bf16), float32 or int8 [n_layers, n_pages, n_kv_heads, page_elems]. In int8 the last axis
                 begins with bf16 scales, PAGE of the keys and PAGE of the values;
                 k_at and v_at, int32 [PAGE, head_dim]: a token's and dimension's place within page_elems
        """
        shape = self.shape
        dtype = np.dtype({"bfloat16": np.uint16, "float32": np.float32, "int8": np.int8}[self.kv])
        k_at, v_at = (np.empty((PAGE, shape.head_dim), np.int32) for _ in range(2))
        at = ctypes.c_void_p(self._lib.zl_pool(self._handle, k_at.ctypes.data, v_at.ctypes.data))
        heads = (shape.n_layers, self.n_pages, shape.n_kv_heads)
        elems = pool_bytes(shape, self.n_pages, self.kv) // dtype.itemsize // int(np.prod(heads))
        return abi.view(at, (*heads, elems), dtype), k_at, v_at

    def first_logits(self, out: np.ndarray) -> bool:
        """Copy the raw logits of the last step's first draw to `out`, f32 [vocab]; False where it drew nothing."""
        seg = ctypes.c_int32()
        return bool(self._lib.zl_logits(self._handle, 1, ctypes.byref(seg), out.ctypes.data))

    def logits(self) -> dict[int, np.ndarray]:
        """Copy the raw logits of the last step: segment number -> f32 [vocab]; no step in flight."""
        segs = np.empty(self._max_rows, np.int32)
        out = np.empty((self._max_rows, self.shape.vocab), np.float32)
        count = self._lib.zl_logits(self._handle, self._max_rows, segs.ctypes.data, out.ctypes.data)
        return {int(segs[i]): out[i].copy() for i in range(count)}

    def batches(self) -> list[tuple[int, int]]:
        """List rows and shared pages of each batch that the last step's decoding rows made; no step in flight."""
        rows, shared = np.empty((2, self._max_rows), np.int32)
        count = self._lib.zl_batches(self._handle, rows.ctypes.data, shared.ctypes.data)
        return list(zip(rows[:count].tolist(), shared[:count].tolist(), strict=True))

    def times(self) -> dict[str, float]:
        """Give the last step's microseconds by stage, as the first worker saw them (waiting included)."""
        self._lib.zl_times(self._handle)  # sync
        return dict(zip(STAGES, self._times.tolist(), strict=True))

    def inner_ns(self) -> tuple[int, int]:
        """Tell what the last step spent on its context (plan, embeddings) and on sampling, in nanoseconds.

        A look at memory, no foreign call. The first worker writes there when it leaves a stage; it may leave the last
        one a moment after another worker has ended the step: sampling is then 0 here, and part of the rest.
        """
        times = self._times
        return int(1e3 * (times[_PLAN] + times[_EMBED])), int(1e3 * times[_SAMPLE])

    @property
    def memory(self) -> dict[str, int]:
        """Count what is held, bytes by component."""
        return {"weights": self.packed_bytes, "kv_pool": pool_bytes(self.shape, self.n_pages, self.kv)}

    @property
    def _handle(self) -> int:
        if self._context is None:
            raise DeviceError("the native step is closed", call="NativeStep")
        return self._context

    def _views(self) -> None:
        """Lay numpy arrays over the device state; they die with `close`."""
        pointers = [ctypes.c_void_p() for _ in range(4)]
        self._lib.zl_state(self._handle, *(ctypes.byref(p) for p in pointers))
        self.last_token = abi.view(pointers[0], (self._max_rows,), np.int32)
        self.done = abi.view(pointers[1], (self._max_rows,), np.uint8)
        self.seen = abi.view(pointers[2], (self._max_rows, self.filter.words), np.uint32)
        self.prompt_ids = abi.view(pointers[3], (self._max_rows, self._model_len), np.int32)
        times = ctypes.c_void_p(self._lib.zl_times(self._handle))
        self._times = abi.view(times, (len(STAGES),), np.float64)

    def _import(self, descriptor: int, path: Path) -> None:
        if not self._lib.zl_import(self._handle, descriptor, body_begin(self._kinds)):
            raise ModelError(f"{path}: no packed weights of this model and layout, or cut short; build it again")

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        from zl.gpu.kernels.rope import rope_table

        cos, sin = (t.contiguous().float() for t in rope_table(self.shape, self._model_len))
        if not self._lib.zl_rope(self._handle, cos.data_ptr(), sin.data_ptr(), cos.shape[0]):
            raise ShapeError("rope table", tuple(cos.shape), f"at least {self._model_len} positions")
        self._put("embed", 0, weights["embed"])
        self._put("norm", 0, weights["norm"])
        self._matrix("head", 0, self._head, weights, self._kinds[-1])
        for layer in range(self.shape.n_layers):
            at = f"layers.{layer}."
            kinds = self._kinds[4 * layer :]
            for names, kind in zip(abi.PACKED, kinds, strict=False):
                for name in names:
                    self._matrix(name, layer, at + name, weights, kind)
            for name in abi.LAYER_WEIGHTS:
                if name.endswith("norm") or (name.startswith("b") and at + name in weights):
                    self._put(name, layer, weights[at + name])

    @property
    def _head(self) -> str:
        return "embed" if self.shape.tied else "head"

    def _matrix(self, name: str, layer: int, full: str, weights: Mapping[str, torch.Tensor], kind: int) -> None:
        self._put(name, layer, weights[full])
        found = self._blocks(full) if kind and self._blocks else None
        if found is None:
            return
        data, number = np.ascontiguousarray(found[1]), abi.BLOCK_FORMATS[found[0]][0]
        if not self._lib.zl_blocks(
            self._handle, abi.WEIGHTS.index(name), layer, number, data.ctypes.data, data.shape[0], data.shape[1]
        ):
            raise ShapeError(f"blocks of {full}", (found[0], data.shape), f"what {self.shape} implies")

    def _put(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        import torch

        is_matrix = tensor.dim() == 2
        dtype = torch.bfloat16 if is_matrix and self.dtype == "bfloat16" else torch.float32
        data = tensor.detach().to(dtype).contiguous()
        rows, cols = data.shape if is_matrix else (1, data.shape[0])
        number, at = abi.WEIGHTS.index(name), data.data_ptr()
        if not self._lib.zl_weight(self._handle, number, layer, at, rows, cols, is_matrix):
            raise ShapeError(f"weight {name} of layer {layer}", tuple(tensor.shape), f"what {self.shape} implies")


def _dtype_of(weights: Mapping[str, torch.Tensor] | Packed) -> str:
    """Name the matrices' dtype."""
    name = weights.dtype if isinstance(weights, Packed) else str(weights["embed"].dtype).removeprefix("torch.")
    if name not in ("bfloat16", "float32"):
        raise ShapeError("weights['embed'].dtype", name, "bfloat16 or float32")
    return name
