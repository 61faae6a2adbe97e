"""zl/gpu/cuda_guard.py around the CUDA step's dry mode: damage in weights, KV and graphs, and what is mended of it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.gpu.kernel_kit import DEVICE, exact_dots
from tests.gpu.test_cuda_step import PROMPT, SHAPE, make_tensors, on_device
from zl.errors import DeviceError, InvariantError
from zl.gpu import cuda_memory
from zl.gpu.cuda_guard import RETRY_S, CudaGuard
from zl.gpu.cuda_step import CudaStep
from zl.gpu.heartbeat import N_STEPS, with_canary
from zl.gpu.pinned import FIRST, NUMERIC, SAMPLE, RowColumns, StepSlot
from zl.gpu.pool import KVPool
from zl.shapes import PAGE, Shapes

pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

# One head and narrow steps: the interpreter's time goes by programs launched.
TINY = replace(SHAPE, n_layers=1, n_heads=1, ffn=32, attention_bias=False, tied=False)
SHAPES = Shapes(max_rows=2, max_model_len=64, step_tokens=18, n_pages=6)
BEAT_S = 60.0


class House:
    """A guarded step, three slots, and a clock of our own."""

    def __init__(self):
        self.now = 1000.0
        self.wide = with_canary(SHAPES)
        self.columns = RowColumns(self.wide, lambda shape, dtype: on_device(np.zeros(shape, dtype)))
        self.slots = [StepSlot(self.wide, lambda shape, dtype: on_device(np.zeros(shape, dtype))) for _ in range(3)]
        self.tensors = {name: t for name, t in make_tensors().items() if ".b" not in name and ".1." not in name}
        self.tensors |= {
            "head": (make_tensors(1)["embed"] * 0.2).bfloat16(),  # logits then tell one computation from another
            "layers.0.wq": self.tensors["layers.0.wq"][:64], "layers.0.wo": self.tensors["layers.0.wo"][:, :64],
            "layers.0.w_gate": self.tensors["layers.0.w_gate"][:32],
            "layers.0.w_up": self.tensors["layers.0.w_up"][:32],
            "layers.0.w_down": self.tensors["layers.0.w_down"][:, :32].contiguous(),
        }  # fmt: skip
        place = "cpu" if DEVICE == "cpu" else "cuda:0"
        self.step = CudaStep(TINY, self.tensors, self.columns, self.slots, self.wide, device=place, canary=True)
        self.read = 0
        self.guard = CudaGuard(
            self.step, self.columns, self.slots, self.wide, self, beat_s=BEAT_S, clock=lambda: self.now
        )
        self.retired = 0
        self.guard.on_retire(self.told)
        self.turn = 0
        self.before: list[tuple[int, bytes, int]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read += 1
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def told(self) -> None:
        self.retired += 1

    def seat(self, row: int, prompt: list[int], pages: list[int]) -> None:
        c = self.columns
        c.put_ids(row, prompt)
        c.max_new[row], c.row_flags[row] = 50, 1
        c.page_table[row] = pages
        c.temperature[row], c.top_p[row], c.penalty[row] = 0.0, 1.0, 1.0

    def run(self, *segments: tuple[int, int, int, int]) -> list[tuple[int, bytes, int]]:
        index, self.turn = self.turn, 1 - self.turn
        slot = self.slots[index]
        slot.n_segs[0] = len(segments)
        for s, segment in enumerate(segments):
            slot.seg_row[s], slot.seg_start[s], slot.seg_len[s], slot.seg_flags[s] = segment
        self.guard.wait(self.guard.launch(index))
        return [(int(slot.out_token[s]), slot.out_logprob[s].tobytes(), int(slot.out_flags[s]))
                for s in range(len(segments))]  # fmt: skip

    def answer(self, prompt: list[int] = PROMPT[:9], n: int = 2) -> list[tuple[int, bytes, int]]:
        self.seat(0, prompt, [0, 2])
        found = self.run((0, 0, len(prompt), FIRST | SAMPLE))
        for i in range(n - 1):
            found += self.run((0, len(prompt) + i, 1, SAMPLE))
        return found

    def beat(self) -> None:
        """Let a period pass and do what is due until nothing is."""
        self.now += BEAT_S + 0.001
        for _ in range(60):
            if not self.guard.due():
                return
            self.guard.between()
        raise AssertionError("something is always due")


def flip(tensor: torch.Tensor, bit: int = 30) -> None:
    words = tensor.view(-1).view(torch.int32)
    words[words.numel() // 2] ^= 1 << bit


@pytest.fixture(scope="module")
def shared() -> House:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        made = House()
        made.before = made.answer()
    return made


@pytest.fixture
def h(shared):
    """The house, as it was: what a test breaks must be mended when it ends. Counts begin anew."""
    shared.guard.counters = type(shared.guard.counters)()
    shared.retired = shared.read = 0
    yield shared
    assert not shared.guard.fallback
    assert shared.answer() == shared.before


def test_the_memory_plan_counts_the_canarys_row_page_slot_and_programs(shared):
    sizes = {name: tensor.nbytes for name, tensor in shared.step.device_tensors()}
    assert sizes.pop("pool") == (SHAPES.n_pages + 1) * KVPool.page_bytes(TINY, torch.bfloat16)
    assert sum(sizes.values()) == cuda_memory.weight_bytes(TINY) + cuda_memory.buffer_bytes(
        TINY, shared.wide, canary=True
    )
    assert shared.guard.memory["weights"] == cuda_memory.weight_bytes(TINY)
    assert len(shared.step._graphs) == cuda_memory.n_programs(shared.wide, 3, canary=True)


def through(h: House) -> None:
    """Go on until the program serves again."""
    while h.guard.fallback:
        h.guard.between()


def test_a_quiet_program_beats_one_step_a_boundary_out_of_everybodys_way(h):
    assert {key.bucket for key in h.step._graphs._graphs if key.slot == 2} == {16}
    assert h.step._places(18) == SHAPES.max_rows, "no place in a step is kept for the canary"
    undisturbed = h.answer(n=5)
    pool = dict(h.step.device_tensors())["pool"]
    pool[:, :, : SHAPES.n_pages] = 0
    h.now += BEAT_S + 0.001
    boundaries, found = 0, []
    h.seat(0, PROMPT[:9], [0, 2])
    while h.guard.due() and boundaries < 5:
        h.guard.between()
        assert boundaries or not pool[:, :, : SHAPES.n_pages].any(), "the canary writes into its own page only"
        found += h.run((0, 8 + boundaries, 1, SAMPLE) if boundaries else (0, 0, 9, FIRST | SAMPLE))
        boundaries += 1
    assert boundaries >= N_STEPS
    assert found == undisturbed[: len(found)]
    counters = h.guard.counters
    assert (counters.beats, counters.beats_failed, counters.retired, h.read) == (1, 0, 0, 0)
    assert h.guard.beat_age_s < 1


@pytest.mark.parametrize("where", ["embed", "cos"])
def test_a_flipped_bit_anywhere_in_the_weights_is_found_within_a_period_and_mended(h, where):
    damaged = dict(h.step.device_tensors())[where]
    address, whole = damaged.data_ptr(), damaged.clone()
    flip(damaged, 12)
    h.beat()
    counters = h.guard.counters
    assert (counters.retired, counters.recaptured, counters.recaptures_failed, h.retired) == (1, 1, 0, 1)
    assert h.guard.serving == h.guard.name
    assert torch.equal(damaged, whole), "mended"
    assert dict(h.step.device_tensors())[where].data_ptr() == address, "in place"


def test_steps_go_on_uncaptured_while_programs_are_captured_one_a_boundary(h):
    flip(dict(h.step.device_tensors())["layers.0.w_down"], 12)
    h.now += BEAT_S + 0.001
    while not h.guard.fallback:
        h.guard.between()
    assert h.guard.serving.endswith("uncaptured")
    n = len(h.step._graphs._wanted)
    with pytest.raises(InvariantError):
        h.step.launch(0)
    assert h.answer() == h.before, "uncaptured steps have the same bits"
    for slot in h.slots[:2]:
        slot.out_token[0] = -77  # a step that ran again would write it
    kept = [{name: array.copy() for name, array in vars(slot).items()} for slot in h.slots[:2]]
    captures = 0
    while h.guard.fallback:
        h.step._stream.warms = captures == 0  # as on a GPU: the work runs, and then its graph
        h.guard.between()
        captures += 1
    assert captures == n
    for slot, old in zip(h.slots, kept, strict=False):
        for name, array in vars(slot).items():
            np.testing.assert_array_equal(array, old[name], err_msg=f"a capture wrote {name}")
    assert h.guard.counters.recaptured == 1


def test_a_graph_that_computes_something_else_is_caught_by_the_canary(h):
    """Nothing in the weights has changed: only what a replay does."""
    graphs = h.step._graphs
    for key, work in list(graphs._graphs.items()):

        def wrong(work=work) -> None:
            work()
            h.step._buffers[h.step._buckets[0]].logits[0, 3] += 1e-3

        graphs._graphs[key] = wrong
    h.beat()
    assert (h.guard.counters.retired, h.guard.counters.recaptured) == (1, 1)


def test_a_device_that_computes_wrong_with_fresh_weights_ends_the_engine(h):
    compute = h.step._compute

    def wrong(*key) -> None:
        compute(*key)
        h.step._buffers[h.step._buckets[0]].logits[0, 3] += 1.0

    h.step._compute = wrong
    h.now += BEAT_S + 0.001
    with pytest.raises(DeviceError, match="nvidia-smi"):
        for _ in range(10):
            h.guard.between()
    assert h.guard.counters.recaptured == 0
    h.step._compute = compute
    through(h)


def test_a_row_that_is_not_finite_has_the_program_checked_before_the_next_beat(h):
    norm = dict(h.step.device_tensors())["layers.0.attn_norm"]
    norm[5] = float("nan")
    h.seat(1, PROMPT[:4], [1, 3])
    h.now += RETRY_S
    ((_, _, flags),) = h.run((1, 0, 4, FIRST | SAMPLE))
    assert flags & NUMERIC
    assert h.guard.due()
    h.guard.between()
    assert h.guard.counters.retired == 1
    assert bool(torch.isfinite(norm).all())
    through(h)
    norm[5] = float("nan")
    h.run((1, 0, 4, FIRST | SAMPLE))
    assert not h.guard._must_check(h.now), f"one check in {RETRY_S} s"
    h.now += RETRY_S
    assert h.guard._must_check(h.now), "put off, not forgotten"
    h.guard.between()
    assert h.guard.counters.retired == 2
    through(h)


def fill_a_constant_page(h):
    """Have row 0 write page 0, on which others may begin; give its prompt and its first result."""
    prompt = PROMPT[: PAGE + 4]
    h.seat(0, prompt, [0, 2])
    h.run((0, 0, 18, FIRST))
    h.run((0, 18, PAGE - 18, 0))
    (wanted,) = h.run((0, PAGE, 4, SAMPLE))
    return prompt, wanted


def test_rows_that_begin_on_constant_pages_of_a_damaged_program_have_them_computed_again(h):
    with exact_dots():
        prompt, wanted = fill_a_constant_page(h)
        named = dict(h.step.device_tensors())
        named["pool"][:, :, 0] += 1.0  # finite and wrong, as a damaged program leaves it
        h.seat(1, prompt, [0, 3])  # page 0 is shared
        h.guard._suspect[:] = False
        assert h.run((1, PAGE, 4, FIRST | SAMPLE)) != [wanted]
        h.guard._suspect[:-1] = True  # what a retirement does
        h.guard._sound_pages.clear()
        h.seat(1, prompt, [0, 3])
        assert h.run((1, PAGE, 4, FIRST | SAMPLE)) == [wanted]
        assert h.guard.counters.rebuilt_rows == 1
        h.seat(0, prompt, [0, 2])
        assert h.run((0, PAGE, 4, FIRST | SAMPLE)) == [wanted]
        assert h.guard.counters.rebuilt_rows == 1, "a page once is enough"


def test_constant_pages_that_are_not_finite_fail_one_row_and_not_the_next(h):
    """The program is sound, so the pages stayed as they were: every row that began on them ended with NUMERIC."""
    with exact_dots():
        prompt, wanted = fill_a_constant_page(h)
        h.guard._suspect[:] = False
        dict(h.step.device_tensors())["pool"][0, 0, 0, 5] = float("nan")
        h.seat(1, prompt, [0, 3])  # page 0 is shared
        h.now += RETRY_S
        ((_, _, flags),) = h.run((1, PAGE, 4, FIRST | SAMPLE))
        assert flags & NUMERIC
    while h.guard.due():
        h.guard.between()
    with exact_dots():
        h.seat(1, prompt, [0, 3])
        assert h.run((1, PAGE, 4, FIRST | SAMPLE)) == [wanted]
        assert (h.guard.counters.retired, h.guard.counters.rebuilt_rows) == (0, 1)
