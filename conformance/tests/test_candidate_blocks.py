"""The oracle of `candidate_blocks` against a second one and its laws; what its kernels promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.crosscheck.candidate_blocks import candidate_blocks as crosscheck
from draftproof.conformance.engine.calls import clone
from draftproof.conformance.engine.judges import Look, differing
from draftproof.conformance.ops import candidate_blocks as ops
from draftproof.kernels import candidate_blocks as kernels
from draftproof.kernels import runtime
from draftproof.oracles.candidate_blocks import block_scores
from draftproof.oracles.candidate_blocks import candidate_blocks as oracle

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


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two results agree in every bit; a NaN agrees with any NaN."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and not bool(differing(one, other, any_nan=True).any())


def wrong_flags(call: dict[str, Any], keep: Tensor) -> int:
    """How many flags the contract of `keep` refuses."""
    (judge,) = (effect.judge for effect in ops.SPECS[0].effects if effect.paths == "return[1]")
    return int(judge.wrong(Look(call, "return[1]", keep, keep, {}, {})).sum())


def source(params: Any, seed: int) -> dict[str, Any]:
    return ops.build({**params, "published": None}, seed)


# ---------------------------------------------------------------- the oracle


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_oracle_and_crosscheck_give_the_same_bits(params: Any, seed: int) -> None:
    call = ops.build(params, seed)
    for ours, theirs in zip(oracle(**call), crosscheck(**call), strict=True):
        assert same(ours, theirs)


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_oracle_meets_the_contract_of_keep(params: Any, seed: int) -> None:
    call = source(params, seed)
    _, keep = oracle(**call)
    assert wrong_flags(call, keep) == 0


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_contract_refuses_a_block_too_few_and_one_too_many(params: Any, seed: int) -> None:
    call = source(params, seed)
    _, keep = oracle(**call)
    scores = block_scores(call["logits"], call["seq_lens"], call["block_size"])
    size = min(call["block_size"], keep.shape[1])
    for row in range(keep.shape[0]):
        for block in range(scores.shape[1]):
            columns = slice(block * size, (block + 1) * size)
            turned = keep.clone()
            turned[row, columns] = ~turned[row, columns]
            assert wrong_flags(call, turned) > 0


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_a_consumer_sees_what_its_source_kept(params: Any, seed: int) -> None:
    call = source(params, seed)
    masked, keep = oracle(**call)
    consumed, nothing = oracle(**call, published=keep)
    assert nothing is None
    assert same(consumed, masked.masked_fill(~keep, float("-inf")))


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_places_for_all_blocks_keep_all_that_score(params: Any, seed: int) -> None:
    call = {**source(params, seed), "topk_blocks": 10**6}
    _, keep = oracle(**call)
    scores = block_scores(call["logits"], call["seq_lens"], call["block_size"])
    kept = keep[:, :: min(call["block_size"], keep.shape[1])]
    assert torch.equal(kept, scores > float("-inf"))


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_rows_are_independent(params: Any, seed: int) -> None:
    call = source(params, seed)
    together = oracle(**call)
    for row in range(len(params["lens"])):
        part = slice(row, row + 1)
        alone = oracle(
            **{**call, "logits": call["logits"][part], "seq_lens": call["seq_lens"][part]}
        )
        assert all(same(one, all_[part]) for one, all_ in zip(alone, together, strict=True))


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_what_lies_behind_the_length_changes_nothing(params: Any, seed: int) -> None:
    call = source(params, seed)
    hidden = torch.arange(call["logits"].shape[1]) >= call["seq_lens"][:, None]
    other = {**call, "logits": call["logits"].masked_fill(hidden, float("nan"))}
    assert all(same(one, two) for one, two in zip(oracle(**call), oracle(**other), strict=True))


@pytest.mark.parametrize("length", [1, 8, 9, 23])
def test_newest_block_is_kept_though_it_holds_a_nan(length: int) -> None:
    logits = torch.randn(1, 24)
    logits[0, length - 1] = float("nan")
    lens = torch.tensor([length], dtype=torch.int32)
    _, keep = oracle(logits, lens, topk_blocks=1, block_size=8)
    first = (length - 1) // 8 * 8
    assert keep.nonzero()[:, 1].tolist() == list(range(first, first + 8))


# ---------------------------------------------------------------- dispatch and guards


@pytest.mark.parametrize(
    "device_type, interpreted, consumer, everything, path",
    [
        ("cuda", False, False, False, "select"),
        ("cuda", False, False, True, "everything"),
        ("cuda", False, True, False, "consume"),
        ("cuda", False, True, True, "consume"),
        ("cuda", True, False, False, "select"),
        ("cpu", True, False, False, "select"),
        ("cpu", True, False, True, "everything"),
        ("cpu", True, True, True, "consume"),
        ("cpu", False, False, False, "oracle"),
        ("cpu", False, True, True, "oracle"),
        ("xpu", False, False, True, "oracle"),
        ("xpu", True, True, False, "oracle"),
    ],
)
def test_dispatch_truth_table(
    device_type: str, interpreted: bool, consumer: bool, everything: bool, path: str
) -> None:
    chosen = kernels.choose_path(
        device_type, interpreted=interpreted, consumer=consumer, everything=everything
    )
    assert chosen == path


@pytest.mark.parametrize(
    "block_size, lanes",
    [(1, 8), (8, 8), (9, 64), (64, 64), (65, 1024), (1024, 1024), (1025, 1024), (2**40, 1024)],
)
def test_block_sizes_share_few_kernels(block_size: int, lanes: int) -> None:
    assert kernels.lanes_of(block_size) == lanes


@pytest.mark.parametrize(
    "width, stride, offset, dtype, aligned",
    [
        (64, 64, 0, torch.float32, True),
        (64, 68, 0, torch.float32, True),
        (64, 66, 0, torch.float32, False),
        (64, 64, 1, torch.float32, False),
        (64, 64, 4, torch.float32, True),
        (61, 64, 0, torch.float32, False),
        (64, 72, 0, torch.bfloat16, True),
        (64, 68, 0, torch.bfloat16, False),
        (64, 64, 8, torch.int8, True),
        (64, 64, 4, torch.int8, False),
        (64, 72, 0, torch.int8, True),
        (64, 76, 0, torch.int8, False),
    ],
)
def test_wide_access_truth_table(
    width: int, stride: int, offset: int, dtype: torch.dtype, aligned: bool
) -> None:
    memory = torch.zeros(1024, dtype=dtype)
    base = -memory.data_ptr() % 16 // dtype.itemsize
    rows = memory.as_strided((2, width), (stride, 1), base + offset)
    assert kernels.rows_aligned(width, rows) == aligned


def test_columns_two_apart_are_not_wide() -> None:
    assert not kernels.rows_aligned(64, torch.zeros(2, 128, dtype=torch.int8)[:, ::2])


@pytest.mark.parametrize("limit, text", [("MAX_ROWS", "2 rows"), ("MAX_TILES", "40000 columns")])
@pytest.mark.parametrize("published", [None, "all"])
def test_more_than_a_grid_can_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str, text: str, published: str | None
) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    monkeypatch.setattr(kernels, limit, 1)
    call = ops.build(ops._call([9, 40000], 40000, 8, 2, published=published), 0)
    with pytest.raises(ValueError, match=f"logits: {text}"):
        kernels.candidate_blocks(**call)


@pytest.mark.parametrize("published", [None, "some"])
def test_a_device_without_triton_gets_the_oracle(
    monkeypatch: pytest.MonkeyPatch, published: str | None
) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    for name in ("_source_kernel", "_publish_kernel", "_consumer_kernel"):
        monkeypatch.setattr(kernels, name, None)
    call = ops.build(ops._call([64, 9], 64, 8, 2, published=published), 0)
    for ours, theirs in zip(kernels.candidate_blocks(**call), oracle(**call), strict=True):
        assert same(ours, theirs)


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
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorded]:
    found = {}
    for name in ("_source_kernel", "_publish_kernel", "_consumer_kernel"):
        found[name] = Recorded(getattr(kernels, name))
        monkeypatch.setattr(kernels, name, found[name])
    return found


@needs_triton
@pytest.mark.parametrize(
    "params, launched",
    [
        (ops._call([64, 9], 64, 8, 2), (1, 1, 0)),
        (ops._call([64, 9], 64, 8, 8), (1, 0, 0)),
        (ops._call([64, 9], 64, 8, 2, published="some"), (0, 0, 1)),
        (ops._call([], 64, 8, 2), (0, 0, 0)),
        (ops._call([], 64, 8, 2, published="some"), (0, 0, 0)),
    ],
)
def test_launches_of_a_call(
    params: Any, launched: tuple[int, ...], recorded: dict[str, Recorded]
) -> None:
    kernels.candidate_blocks(**clone(ops.build(params, 0), DEVICE))
    assert tuple(len(kernel.launches) for kernel in recorded.values()) == launched


@needs_triton
def test_all_geometries_share_few_kernels(recorded: dict[str, Recorded]) -> None:
    for case in ops.SPECS[0].cases:
        if case.profile == "quick" and case.params["width"] < 10_000:
            kernels.candidate_blocks(**clone(ops.build(case.params, 0), DEVICE))
    kinds = {
        name: len({str(sorted(constants.items())) for constants in kernel.launches})
        for name, kernel in recorded.items()
    }
    assert kinds == {"_source_kernel": 8, "_publish_kernel": 4, "_consumer_kernel": 2}


@needs_triton
@pytest.mark.parametrize("row_stride", [64, 67])
def test_wide_and_narrow_kernels_agree(row_stride: int) -> None:
    params = ops._call([64, 33, 0], 64, 8, 3, fill="mixed", row_stride=row_stride)
    call = clone(ops.build(params, 1), DEVICE)
    masked, keep = kernels.candidate_blocks(**call)
    wanted, _ = oracle(**call)
    assert same(masked, wanted)
    assert wrong_flags(call, keep) == 0
