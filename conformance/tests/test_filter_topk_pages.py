"""The oracle of `filter_topk_pages` against a second one and its laws; what its kernel promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.crosscheck.filter_topk_pages import filter_topk_pages as crosscheck
from draftproof.conformance.engine.calls import clone
from draftproof.conformance.ops import filter_topk_pages as ops
from draftproof.kernels import filter_topk_pages as kernels
from draftproof.kernels import runtime
from draftproof.oracles.filter_topk_pages import filter_topk_pages as oracle

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SEEDS = st.integers(0, 0xFFFF)

needs_triton = pytest.mark.skipif(
    not runtime.runs_triton(DEVICE), reason="no GPU, and Triton's interpreter is off"
)
many = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def outputs(function: Any, call: dict[str, Any], **changed: Any) -> list[Any]:
    """What a function leaves in copies of a call's outputs."""
    args = clone({**call, **changed})
    function(**args)
    raw = args["raw_indices"]
    return [args["page_indices"].tolist(), None if raw is None else raw.tolist()]


def small_call(seed: int = 0, **changed: Any) -> dict[str, Any]:
    """Two rows, some of whose entries are valid, on the device under test."""
    call = ops.build({**ops._call(2, 33, 40, 8), **changed}, seed)
    return clone(call, DEVICE)


# ---------------------------------------------------------------- the oracle


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_oracle_and_crosscheck_leave_the_same_bits(params: Any, seed: int) -> None:
    call = ops.build(params, seed)
    assert outputs(oracle, call) == outputs(crosscheck, call)


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_filtering_what_was_filtered_changes_nothing(params: Any, seed: int) -> None:
    call = ops.build({**params, "raw": "own"}, seed)
    slots, raw = outputs(oracle, call)
    again = torch.tensor(raw, dtype=call["indices"].dtype).view(call["indices"].shape)
    assert outputs(oracle, call, indices=again) == [slots, raw]


@many
@given(params=ops.strategy(), seed=SEEDS, data=st.data())
def test_permuting_places_permutes_the_outputs(params: Any, seed: int, data: Any) -> None:
    call = ops.build({**params, "raw": "own"}, seed)
    order = data.draw(st.permutations(range(params["k"])))
    permuted = outputs(oracle, call, indices=call["indices"][:, order])
    wanted = [[[row[at] for at in order] for row in output] for output in outputs(oracle, call)]
    assert permuted == wanted


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_rows_are_independent(params: Any, seed: int) -> None:
    call = ops.build({**params, "raw": "own"}, seed)
    together = outputs(oracle, call)
    names = ("scores", "indices", "page_table", "page_indices", "raw_indices")
    for row in range(params["rows"]):
        one = {name: call[name][row : row + 1] for name in names}
        assert outputs(oracle, call, **one) == [output[row : row + 1] for output in together]


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_pages_in_order_give_the_positions_back(params: Any, seed: int) -> None:
    call = ops.build({**params, "raw": "own"}, seed)
    table = call["page_table"]
    identity = torch.arange(table.shape[1], dtype=torch.int32).expand(table.shape)
    slots, raw = outputs(oracle, call, page_table=identity)
    assert slots == raw


def test_every_entry_is_minus_1_or_the_slot_of_a_number_above_minus_infinity() -> None:
    call = ops.build(ops._call(3, 65, 200, 16), 5)
    slots, raw = outputs(oracle, call)
    flat = [entry for row in raw for entry in row]
    assert -1 in flat
    assert any(entry >= 0 for entry in flat)
    for row, entries in enumerate(raw):
        for entry, slot in zip(entries, slots[row], strict=True):
            assert (entry == -1) == (slot == -1)
            assert entry == -1 or float(call["scores"][row, entry]) > float("-inf")


# ---------------------------------------------------------------- dispatch and guards


@pytest.mark.parametrize(
    "device_type, interpreted, path",
    [
        ("cuda", False, "fused"),
        ("cuda", True, "fused"),
        ("cpu", True, "fused"),
        ("cpu", False, "oracle"),
        ("xpu", False, "oracle"),
        ("xpu", True, "oracle"),
        ("mps", False, "oracle"),
    ],
)
def test_dispatch_truth_table(device_type: str, interpreted: bool, path: str) -> None:
    assert kernels.choose_path(device_type, interpreted=interpreted) == path


@pytest.mark.parametrize("limit, text", [("MAX_ROWS", "2 rows"), ("MAX_BLOCKS", "300 entries")])
def test_more_than_a_grid_can_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str, text: str
) -> None:
    monkeypatch.setattr(kernels, limit, 1)
    call = small_call(k=300)
    before = call["page_indices"].clone()
    with pytest.raises(ValueError, match=f"indices: {text}"):
        kernels.filter_topk_pages(**call)
    assert torch.equal(call["page_indices"], before)


def test_a_device_without_triton_gets_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(kernels, "_filter_kernel", None)
    call = ops.build(ops._call(2, 33, 40, 8), 0)
    assert outputs(kernels.filter_topk_pages, call) == outputs(oracle, call)


@pytest.mark.parametrize("bad", ops.SPECS[0].bad_inputs, ids=lambda bad: bad.name)
def test_quick_look_and_named_fault_agree(bad: Any) -> None:
    call = ops.build(bad.params or ops.SPECS[0].bad_input_params, 0)
    names = ("scores", "indices", "page_table", "page_indices", "page_size", "raw_indices")
    kernels._check(*(call[name] for name in names))
    spoiled = bad.edit(call)
    with pytest.raises(ValueError, match=bad.names):
        kernels._check(*(spoiled[name] for name in names))


# ---------------------------------------------------------------- launches


class Recorded:
    """A kernel that notes its launches, and does them."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> Any:
            self.launches.append(constants)
            return self.kernel[grid](*args, **constants)

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    recorded = Recorded(kernels._filter_kernel)
    monkeypatch.setattr(kernels, "_filter_kernel", recorded)
    return recorded.launches


@needs_triton
def test_a_call_is_one_launch(launches: list[dict[str, Any]]) -> None:
    kernels.filter_topk_pages(**small_call())
    assert len(launches) == 1


@needs_triton
@pytest.mark.parametrize("nothing", [{"rows": 0}, {"k": 0}])
def test_nothing_to_do_is_no_launch(nothing: Any, launches: list[dict[str, Any]]) -> None:
    kernels.filter_topk_pages(**small_call(**nothing))
    assert not launches


@needs_triton
def test_no_geometry_compiles_another_kernel(launches: list[dict[str, Any]]) -> None:
    for case in ops.SPECS[0].cases:
        if case.profile == "quick" and case.params["width"] < 10_000:
            kernels.filter_topk_pages(**clone(ops.build(case.params, 0), DEVICE))
    assert len({str(sorted(constants.items())) for constants in launches}) == 2


@needs_triton
def test_raw_may_be_the_indices_themselves() -> None:
    call = small_call(raw="indices")
    assert call["raw_indices"].data_ptr() == call["indices"].data_ptr()
    wanted = outputs(oracle, call, raw_indices=call["indices"].clone())
    kernels.filter_topk_pages(**call)
    indices: Tensor = call["indices"]
    assert [call["page_indices"].tolist(), indices.tolist()] == wanted
