"""The oracle of `c128_cleanup` against a second one and its laws; what its kernels promise."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.crosscheck import c128_cleanup as crosscheck
from draftproof.conformance.ops import c128_cleanup as ops
from draftproof.kernels import c128_cleanup as kernels
from draftproof.kernels import runtime
from draftproof.oracles.c128_cleanup import c128_cleanup as oracle

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SEEDS = st.integers(0, 0xFFFF)

needs_triton = pytest.mark.skipif(
    not runtime.runs_triton(DEVICE), reason="no GPU, and Triton's interpreter is off"
)
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")

many = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def bits(states: list[Tensor]) -> list[bytes]:
    """What the states hold, comparable with `==`."""
    return [bytes(state.contiguous().view(torch.uint8).cpu().numpy()) for state in states]


def after(function: Any, call: dict[str, Any], **changed: Any) -> list[bytes]:
    """What a function leaves in copies of a call's states."""
    states = [state.clone() for state in changed.pop("states", call["states"])]
    function(**{**call, **changed, "states": states})
    return bits(states)


def small_call(seed: int = 0, **changed: Any) -> dict[str, Any]:
    """Two layers, two requests, of which one wraps, on the device under test."""
    params = ops._params([(0, 7, 1), (1, 3, 2)], 4)
    call = ops.build({**params, **changed}, seed)
    return {
        name: [state.to(DEVICE) for state in value]
        if name == "states"
        else value.to(DEVICE)
        if isinstance(value, Tensor)
        else value
        for name, value in call.items()
    }


# ---------------------------------------------------------------- the oracle


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_oracle_and_crosscheck_leave_the_same_bits(params: Any, seed: int) -> None:
    call = ops.build(params, seed)
    assert after(oracle, call) == after(crosscheck.c128_cleanup, call)


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_spec_region_is_what_the_oracle_writes(params: Any, seed: int) -> None:
    call = ops.build(params, seed)
    # One is neither of the values that are written.
    states = [torch.ones_like(state) for state in call["states"]]
    oracle(**{**call, "states": states})
    for layer, state in enumerate(states):
        assert torch.equal(state != 1, ops.rejected_region(call, f"states[{layer}]"))


@many
@given(params=ops.strategy(), seed=SEEDS, data=st.data())
def test_order_of_requests_does_not_matter(params: Any, seed: int, data: st.DataObject) -> None:
    call = ops.build(params, seed)
    order = data.draw(st.permutations(range(len(params["requests"]))))
    shuffled = {name: call[name][list(order)] for name in ops.INDEX_ARGUMENTS}
    assert after(oracle, call, **shuffled) == after(oracle, call)


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_accepting_everything_changes_nothing(params: Any, seed: int) -> None:
    call = ops.build(params, seed)
    accepted = torch.full_like(call["accept_lens"], params["num_draft_tokens"])
    assert after(oracle, call, accept_lens=accepted) == bits(call["states"])


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_layers_are_independent(params: Any, seed: int) -> None:
    call = ops.build(params, seed)
    alone = [after(oracle, call, states=[state])[0] for state in call["states"]]
    assert alone == after(oracle, call)


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_clearing_twice_is_clearing_once(params: Any, seed: int) -> None:
    call = ops.build(params, seed)
    once = after(oracle, call)
    oracle(**call)
    assert after(oracle, call) == once


@many
@given(params=ops.strategy(), seed=SEEDS, cut=st.integers(0, 4))
def test_a_batch_is_its_parts_one_after_another(params: Any, seed: int, cut: int) -> None:
    call = ops.build(params, seed)
    together = after(oracle, call)
    for part in (slice(None, cut), slice(cut, None)):
        oracle(**{**call, **{name: call[name][part] for name in ops.INDEX_ARGUMENTS}})
    assert bits(call["states"]) == together


@many
@given(params=ops.strategy(), seed=SEEDS, turns=st.integers(0, 1000))
def test_a_turn_of_the_ring_changes_nothing(params: Any, seed: int, turns: int) -> None:
    call = ops.build(params, seed)
    later = call["seq_lens"].long() + turns * params["ring_size"]
    assert after(oracle, call, seq_lens=later) == after(oracle, call)


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_pool_does_not_depend_on_the_dtype(params: Any, seed: int) -> None:
    cleared = []
    for dtype in ("float32", "bfloat16"):
        call = ops.build({**params, "dtype": dtype}, seed)
        states = [torch.ones_like(state) for state in call["states"]]
        oracle(**{**call, "states": states})
        cleared.append([state.to(torch.float32) for state in states])
    assert all(torch.equal(one, other) for one, other in zip(*cleared, strict=True))


# ---------------------------------------------------------------- dispatch and tables


@pytest.mark.parametrize(
    "device_type, interpreted, table_possible, path",
    [
        ("cuda", False, True, "fused"),
        ("cuda", False, False, "loop"),
        ("cuda", True, True, "loop"),
        ("cuda", True, False, "loop"),
        ("cpu", True, True, "fused"),
        ("cpu", True, False, "loop"),
        ("cpu", False, True, "oracle"),
        ("cpu", False, False, "oracle"),
        ("xpu", False, True, "oracle"),
        ("xpu", True, True, "oracle"),
        ("mps", False, False, "oracle"),
    ],
)
def test_dispatch_truth_table(
    device_type: str, interpreted: bool, table_possible: bool, path: str
) -> None:
    chosen = kernels.choose_path(
        device_type, interpreted=interpreted, table_possible=table_possible
    )
    assert chosen == path


def test_pointer_table_keeps_addresses_above_2_63() -> None:
    addresses = [0, 1, 2**63 - 1, 2**63, 2**63 + 0x10, 2**64 - 1]
    table = kernels.pack_addresses(addresses)
    assert table.dtype is torch.uint64
    assert table.tolist() == addresses


@pytest.mark.parametrize(
    "shifts, alignment", [((0,), 16), ((0, 4), 8), ((0, 0, 2), 4), ((1, 0), 2), ((3, 4), 2)]
)
def test_stores_are_as_wide_as_the_worst_base_allows(
    shifts: tuple[int, ...], alignment: int
) -> None:
    memory = [torch.zeros(256, dtype=torch.bfloat16) for _ in shifts]
    states = [
        whole[-whole.data_ptr() % 16 // 2 + shift :][:128].view(8, 16)
        for whole, shift in zip(memory, shifts, strict=True)
    ]
    assert kernels._plan(states, ring_size=8).alignment == alignment


def test_more_layers_than_a_grid_can_have_are_refused() -> None:
    call = small_call()
    call["states"] = call["states"][:1] * (kernels.MAX_LAYERS + 1)
    before = bits(call["states"][:1])
    with pytest.raises(ValueError, match=r"states: 65536 layers .* 65535"):
        kernels.c128_cleanup(**call)
    with pytest.raises(ValueError, match=r"states: 65536 layers .* 65535"):
        kernels.C128DraftCleanup(call["states"], ring_size=call["ring_size"])
    assert bits(call["states"][:1]) == before


def test_more_requests_than_a_grid_can_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_REQUESTS", 1)
    call = small_call()
    before = bits(call["states"])
    for function in (kernels.c128_cleanup, kernels.c128_cleanup_baseline):
        with pytest.raises(ValueError, match=r"req_pool_indices: 2 requests"):
            function(**call)
    assert bits(call["states"]) == before


def test_a_device_without_triton_gets_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    call = ops.build(ops._params([(0, 7, 1)], 4), 0)
    wanted = after(oracle, call)
    assert after(kernels.c128_cleanup, call) == wanted
    assert after(kernels.c128_cleanup_baseline, call) == wanted
    assert after(through_helper, call) == wanted


# ---------------------------------------------------------------- launches


class Counted:
    """A kernel that counts how often it is launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


def through_helper(
    states: list[Tensor], *indices: Tensor, ring_size: int, num_draft_tokens: int, **named: Tensor
) -> None:
    helper = kernels.C128DraftCleanup(states, ring_size=ring_size)
    helper.clear(*indices, **named, num_draft_tokens=num_draft_tokens)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> tuple[Counted, Counted]:
    """The fused and the single-state kernel, counted; no plan that has compiled one already."""
    monkeypatch.setattr(kernels, "_plans", {})
    counted = Counted(kernels._clear_every_layer), Counted(kernels._clear_layer)
    monkeypatch.setattr(kernels, "_clear_every_layer", counted[0])
    monkeypatch.setattr(kernels, "_clear_layer", counted[1])
    return counted


@needs_triton
@pytest.mark.parametrize("function", [kernels.c128_cleanup, through_helper])
def test_all_layers_take_one_launch(function: Any, launches: tuple[Counted, Counted]) -> None:
    call = small_call(layers=5)
    wanted = after(oracle, call)
    assert after(function, call) == wanted
    assert (launches[0].launches, launches[1].launches) == (1, 0)


@needs_triton
def test_baseline_takes_a_launch_per_layer(launches: tuple[Counted, Counted]) -> None:
    call = small_call(layers=5)
    assert after(kernels.c128_cleanup_baseline, call) == after(oracle, call)
    assert (launches[0].launches, launches[1].launches) == (0, 5)


@needs_triton
@pytest.mark.parametrize(
    "function", [kernels.c128_cleanup, kernels.c128_cleanup_baseline, through_helper]
)
@pytest.mark.parametrize("changed", [{"num_draft_tokens": 1}, {"requests": []}])
def test_nothing_to_do_is_no_launch(
    function: Any, changed: dict[str, Any], launches: tuple[Counted, Counted]
) -> None:
    call = small_call(**changed)
    assert after(function, call) == bits(call["states"])
    assert (launches[0].launches, launches[1].launches) == (0, 0)


@needs_triton
def test_single_state_kernel_clears_one_state() -> None:
    call = small_call()
    state = call.pop("states")[0]
    wanted = after(oracle, {**call, "states": [state]})
    kernels.clear_unaccepted_c128_draft_states(state, **call)
    assert bits([state]) == wanted


# ---------------------------------------------------------------- lifetimes


@needs_triton
def test_helper_keeps_states_alive_that_the_caller_lets_go() -> None:
    call = small_call()
    states = call.pop("states")
    wanted = after(oracle, {**call, "states": states})
    ring_size = call.pop("ring_size")
    helper = kernels.C128DraftCleanup(states, ring_size=ring_size)
    alive = [weakref.ref(state) for state in states]
    del states
    gc.collect()
    # Whatever the caller allocates now must not land where the table points.
    others = [torch.ones(64, 8, device=DEVICE) for _ in range(16)]
    helper.clear(**call)
    assert bits([state() for state in alive]) == wanted
    assert all(bool((other == 1).all()) for other in others)


@needs_triton
def test_op_keeps_no_state_alive() -> None:
    call = small_call()
    kernels.c128_cleanup(**call)
    alive = [weakref.ref(state) for state in call.pop("states")]
    gc.collect()
    assert [state() for state in alive] == [None, None]


@needs_triton
def test_op_is_right_where_other_states_come_to_live_at_the_same_addresses() -> None:
    memory = torch.zeros(3, 1024, dtype=torch.uint8, device=DEVICE)
    for seed, (dtype, layers, half, ring_size) in enumerate(
        (
            ("float32", 2, 4, 8),
            ("bfloat16", 2, 4, 8),
            ("bfloat16", 2, 8, 4),
            ("float32", 3, 4, 8),
            ("float32", 2, 4, 8),
        )
    ):
        call = small_call(seed, dtype=dtype, layers=layers, half=half, ring_size=ring_size)
        states = []
        for layer, state in enumerate(call["states"]):
            place = memory[layer].view(state.dtype)[: state.numel()].view(state.shape)
            states.append(place.copy_(state))
        wanted = after(oracle, call)
        kernels.c128_cleanup(**{**call, "states": states})
        assert bits(states) == wanted, (dtype, layers, half, ring_size)


@needs_triton
def test_remembered_tables_are_bounded_but_for_captured_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_plans", {})
    monkeypatch.setattr(kernels, "MAX_CACHED_PLANS", 3)
    kept = [small_call(seed) for seed in range(8)]
    kernels.c128_cleanup(**kept[0])
    (captured,) = kernels._plans.values()
    captured.captured = True
    for call in kept[1:]:
        wanted = after(oracle, call)
        kernels.c128_cleanup(**call)
        assert bits(call["states"]) == wanted
        assert len(kernels._plans) <= 1 + 3
    assert captured in kernels._plans.values()


# ---------------------------------------------------------------- CUDA graphs


@needs_cuda
@pytest.mark.parametrize("warm", [True, False])
def test_capture_is_right_with_and_without_a_first_call_on_these_states(warm: bool) -> None:
    other = small_call(1)
    kernels.c128_cleanup(**other)
    kernels.c128_cleanup_baseline(**other)
    call = small_call(2)
    fresh = [state.clone() for state in call["states"]]
    if warm:
        kernels.c128_cleanup(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.c128_cleanup(**call)
    for accepted in (0, 2, 4):
        for state, original in zip(call["states"], fresh, strict=True):
            state.copy_(original)
        call["accept_lens"].fill_(accepted)
        wanted = after(oracle, call)
        graph.replay()
        assert bits(call["states"]) == wanted


@needs_cuda
def test_helper_replays_with_changed_lengths_and_padded_rows() -> None:
    call = small_call(3, requests=[[0, 7, 1], [1, 3, 2], [1, 3, 2], [1, 3, 2]])
    fresh = [state.clone() for state in call["states"]]
    helper = kernels.C128DraftCleanup(call["states"], ring_size=call["ring_size"])
    indices = [call[name] for name in ops.INDEX_ARGUMENTS]
    helper.clear(*indices, num_draft_tokens=4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        helper.clear(*indices, num_draft_tokens=4)
    for requests in ([[1, 6, 0]] * 4, [[0, 2, 3], [1, 5, 1], [1, 5, 1], [1, 5, 1]]):
        for state, original in zip(call["states"], fresh, strict=True):
            state.copy_(original)
        for index, column in zip(indices, zip(*requests, strict=True), strict=True):
            index.copy_(torch.tensor(column))
        wanted = after(oracle, call)
        graph.replay()
        assert bits(call["states"]) == wanted
