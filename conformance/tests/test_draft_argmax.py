"""The oracle of `draft_argmax` against a second one and its laws; what travels, and when."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.crosscheck.draft_argmax import draft_argmax as crosscheck
from draftproof.conformance.engine.checks import check_invalid
from draftproof.conformance.engine.running import Subject
from draftproof.conformance.engine.spec import BadInput
from draftproof.conformance.ops import draft_argmax as ops
from draftproof.kernels import draft_argmax as kernels
from draftproof.kernels import runtime
from draftproof.oracles.draft_argmax import draft_argmax as oracle

DEVICE = torch.device("cpu" if runtime.INTERPRETED else "cuda")
SPEC = ops.SPECS[0]
PARAMS = SPEC.strategy()
SEEDS = st.integers(0, 0xFFFF)
POLICIES = ("sink", "first")
LANE_LIMIT = 2**24
"""Every integer below it is an fp32, and so is every sum of one of them and zeros."""

quick = settings(
    max_examples=15,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
many = settings(quick, max_examples=120)


def on_device(value: Any) -> Any:
    if isinstance(value, list):
        return [on_device(item) for item in value]
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def outcome(function: Callable[..., Any], call: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """What a function returns and leaves in copies of a call's outputs."""
    args = {**call, **changed}
    for name in ("positions", "draft_tokens"):
        if args.get(name) is not None:
            args[name] = args[name].clone()
    probability, index = function(**args)
    left = {
        name: args[name] for name in ("positions", "draft_tokens") if args.get(name) is not None
    }
    return {
        name: (tensor.dtype, tensor.tolist())
        for name, tensor in {"topk_p": probability, "topk_index": index, **left}.items()
    }


def tokens(function: Callable[..., Any], call: dict[str, Any], **changed: Any) -> list[int]:
    return outcome(function, call, **changed)["topk_index"][1]


# ---------------------------------------------------------------- oracles


@many
@given(params=PARAMS, seed=SEEDS)
def test_oracle_and_second_oracle_agree(params: dict[str, Any], seed: int) -> None:
    call = ops.build(params, seed)
    assert outcome(oracle, call) == outcome(crosscheck, call)


@pytest.mark.parametrize("policy", POLICIES)
def test_both_oracles_order_every_bf16_against_the_scores_that_matter(policy: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for special in ("-0", "-1e30"):
        pattern = ops.SPECIALS[special]["bf16"]
        other = torch.tensor(pattern - (pattern >> 15 << 16), dtype=torch.int16)
        pairs = torch.stack([every, other.view(torch.bfloat16).expand_as(every)], dim=1)
        call = {
            "logits_shards": [pairs],
            "vocab_size": 2,
            "positions": torch.zeros(len(every), dtype=torch.int64),
            "nan_policy": policy,
        }
        assert tokens(oracle, call) == tokens(crosscheck, call)


@pytest.mark.parametrize("function", [oracle, kernels.draft_argmax_baseline])
@pytest.mark.parametrize("bad", SPEC.bad_inputs, ids=lambda bad: bad.name)
def test_a_bad_input_is_named_before_anything_is_written(
    bad: BadInput, function: Callable[..., Any]
) -> None:
    check_invalid(Subject(SPEC, function, function.__name__, DEVICE, named_errors=True), bad)


# ---------------------------------------------------------------- laws


@many
@given(params=PARAMS, seed=SEEDS, cuts=st.lists(st.integers(0, 2100), max_size=7))
def test_splitting_the_vocabulary_over_other_ranks_changes_nothing(
    params: dict[str, Any], seed: int, cuts: list[int]
) -> None:
    call = ops.build(params, seed)
    whole = torch.cat(call["logits_shards"], dim=1)
    ends = sorted(min(cut, whole.shape[1]) for cut in cuts)
    shards = list(whole.tensor_split(ends, dim=1))
    assert outcome(oracle, call, logits_shards=shards) == outcome(oracle, call)


@many
@given(params=PARAMS, seed=SEEDS, order=st.randoms(use_true_random=False))
def test_permuting_rows_permutes_tokens(
    params: dict[str, Any], seed: int, order: random.Random
) -> None:
    call = ops.build(params, seed)
    rows = list(range(params["rows"]))
    order.shuffle(rows)
    shards = [shard[rows] for shard in call["logits_shards"]]
    found = tokens(oracle, call)
    assert tokens(oracle, call, logits_shards=shards) == [found[row] for row in rows]


@many
@given(params=PARAMS, seed=SEEDS, padding=st.sampled_from(list(ops.SPECIALS)))
def test_what_padding_holds_changes_nothing(
    params: dict[str, Any], seed: int, padding: str
) -> None:
    pokes = [poke for poke in params["pokes"] if poke[1] < params["vocab"]]
    one, other = (
        ops.build({**params, "pokes": pokes, "padding": held}, seed) for held in ("-inf", padding)
    )
    assert outcome(oracle, one) == outcome(oracle, other)


@many
@given(params=PARAMS, seed=SEEDS)
def test_widening_the_scores_changes_nothing(params: dict[str, Any], seed: int) -> None:
    call = ops.build(params, seed)
    wide = [shard.float() for shard in call["logits_shards"]]
    assert outcome(oracle, call, logits_shards=wide) == outcome(oracle, call)


@many
@given(params=PARAMS, seed=SEEDS)
def test_the_policies_differ_only_in_rows_with_nan(params: dict[str, Any], seed: int) -> None:
    call = ops.build(params, seed)
    logits = torch.cat(call["logits_shards"], dim=1)[:, : call["vocab_size"]]
    sink, first = (tokens(oracle, call, nan_policy=policy) for policy in POLICIES)
    for row, nan in enumerate(logits.isnan()):
        if not nan.any():
            assert sink[row] == first[row]
        else:
            assert first[row] == [nan.tolist().index(True)]


# ---------------------------------------------------------------- kernels


@quick
@given(params=PARAMS, seed=SEEDS)
def test_the_gather_has_the_oracle_s_bits(params: dict[str, Any], seed: int) -> None:
    call = ops.build(params, seed)
    moved = {name: on_device(value) for name, value in call.items()}
    assert outcome(kernels.draft_argmax_baseline, moved) == outcome(oracle, call)


@pytest.mark.parametrize("pick_tile", [kernels.PICK_TILE, 2])
def test_a_vocabulary_of_many_tiles_gathers_right(
    pick_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five candidates a row, picked from at once or two at a time."""
    monkeypatch.setattr(kernels, "MAX_TILE", 128)
    monkeypatch.setattr(kernels, "PICK_TILE", pick_tile)
    for policy in POLICIES:
        call = ops.build(
            {
                "rows": 2,
                "widths": [300, 217],
                "vocab": 516,
                "fill": "ties",
                "nan_policy": policy,
                "pokes": [[0, 130, "nan"], [0, 400, "-nan"]],
            },
            3,
        )
        moved = {name: on_device(value) for name, value in call.items()}
        assert outcome(kernels.draft_argmax_baseline, moved) == outcome(oracle, call)


def partials(call: dict[str, Any], splits: int, *, clear_others: bool) -> Iterator[Tensor]:
    """Buffers: one a rank where the others' slots are cleared, else one that all share."""
    shards = call["logits_shards"]
    count = len(shards)
    rows = shards[0].shape[0]
    shared = kernels.exchange_buffer(rows, count, splits, DEVICE)
    first_id = 0
    for rank, shard in enumerate(shards):
        buffer = shared
        if clear_others:
            # Nothing of what was there may stay: it would be summed.
            buffer = torch.full_like(shared, torch.nan)
        kernels.argmax_partials(
            shard.to(DEVICE),
            buffer,
            rank=rank,
            first_id=first_id,
            vocab_size=call["vocab_size"],
            nan_policy=call["nan_policy"],
            clear_others=clear_others,
        )
        first_id += shard.shape[1]
        if clear_others:
            yield buffer
    if not clear_others:
        yield shared


@quick
@given(params=PARAMS, seed=SEEDS, splits=st.integers(1, 5))
def test_every_lane_that_travels_is_a_natural_number_below_2_24(
    params: dict[str, Any], seed: int, splits: int
) -> None:
    call = ops.build(params, seed)
    for rank, buffer in enumerate(partials(call, splits, clear_others=True)):
        lanes = buffer.cpu().double()
        assert bool(((lanes >= 0) & (lanes < LANE_LIMIT) & (lanes == lanes.floor())).all())
        others = [other for other in range(buffer.shape[1]) if other != rank]
        # +0 by its bits: a -0 would be a number too, and change the sum's zeros.
        assert not bool(buffer[:, others].contiguous().view(torch.int32).any())


@quick
@given(
    params=PARAMS,
    seed=SEEDS,
    splits=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_a_sum_over_ranks_in_any_order_has_the_same_bits_and_the_oracle_s_tokens(
    params: dict[str, Any], seed: int, splits: int, order: random.Random
) -> None:
    call = ops.build(params, seed)
    parts = list(partials(call, splits, clear_others=True))
    (emulated,) = partials(call, splits, clear_others=False)
    for _ in range(3):
        terms = list(parts)
        while len(terms) > 1:
            # Any tree of sums: rings, halving and doubling, one rank after another.
            order.shuffle(terms)
            terms.append(terms.pop() + terms.pop())
        assert torch.equal(terms[0].view(torch.int32), emulated.view(torch.int32))
    wanted = outcome(oracle, call)
    outputs = {name: on_device(call[name]) for name in ("positions", "draft_tokens")}
    column = call["draft_token_column"]
    _, index = kernels.finalize_argmax(emulated, **outputs, draft_token_column=column)
    assert index.tolist() == wanted["topk_index"][1]
    for name, tensor in outputs.items():
        if tensor is not None:
            assert tensor.tolist() == wanted[name][1]


def candidate(scores: list[float], first_id: int, nan_policy: str) -> tuple[int, int, int, int]:
    """The four lanes of a split by the published layout, in scalar arithmetic."""
    best: tuple[int, int] | None = None
    for offset, score in enumerate(scores):
        if score != score:
            bits = 0x7FC00000 if nan_policy == "first" else 0xF149F2CA
        else:
            (bits,) = struct.unpack("<I", struct.pack("<f", score + 0.0))
        key = bits ^ (0xFFFFFFFF if bits >> 31 else 0x80000000)
        if best is None or key > best[0]:
            best = (key, first_id + offset)
    if best is None:
        return 0, 0, 0, 0
    key, token = best
    return key >> 16, key & 0xFFFF, token & 0xFFFF, 1 + (token >> 16)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first_id", [0, 65530, 2**24 - 3, 2**31 - 12])
def test_lanes_hold_key_and_id_as_the_layout_says(first_id: int, policy: str) -> None:
    specials = list(ops.SPECIALS)
    params = {
        "rows": len(specials[::2]),
        "widths": [11],
        "vocab": 11,
        "dtype": "fp32",
        "fill": "-inf",
        "pokes": [[row, 1 + row % 9, name] for row, name in enumerate(specials[::2])]
        + [[row, 4, name] for row, name in enumerate(specials[1::2])],
    }
    (shard,) = ops.build(params, 0)["logits_shards"]
    vocab = first_id + 10
    buffer = kernels.exchange_buffer(params["rows"], 1, 1, DEVICE)
    kernels.argmax_partials(
        shard.to(DEVICE), buffer, rank=0, first_id=first_id, vocab_size=vocab, nan_policy=policy
    )
    for row, scores in enumerate(shard[:, :10].tolist()):
        assert tuple(buffer[row, 0, 0].tolist()) == candidate(scores, first_id, policy)


@pytest.mark.parametrize("token", [0, 65535, 65536, 2**24 - 1, 2**24 + 1, 2**31 - 2])
def test_every_id_survives_the_exchange(token: int) -> None:
    shard = torch.tensor([[1.0]], device=DEVICE)
    buffer = kernels.exchange_buffer(1, 2, 1, DEVICE)
    kernels.argmax_partials(
        shard, buffer, rank=1, first_id=token, vocab_size=2**31 - 1, clear_others=True
    )
    positions = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert kernels.finalize_argmax(buffer, positions=positions)[1].tolist() == [[token]]


def test_shards_without_a_real_column_offer_nothing() -> None:
    for shard, first_id in (
        (torch.ones(2, 0), 3),
        (torch.ones(2, 9), 9),
        (torch.ones(2, 9), 2**31),
    ):
        buffer = torch.full((2, 2, 3, 4), torch.nan, device=DEVICE)
        kernels.argmax_partials(
            shard.to(DEVICE), buffer, rank=1, first_id=first_id, vocab_size=9, clear_others=True
        )
        assert not bool(buffer.view(torch.int32).any())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_any_number_of_splits_and_tiles_gives_the_same_tokens(
    splits: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_TILE", 128)
    params = {
        "rows": 3,
        "widths": [700],
        "vocab": 641,
        "fill": "negative",
        "padding": "nan",
        "nan_policy": policy,
        # Equal winners in tiles of one split, and a NaN behind +inf.
        "pokes": [[0, 127, "1"], [0, 128, "1"], [0, 640, "1"], [1, 5, "inf"], [1, 300, "nan"]],
    }
    call = ops.build(params, 0)
    (buffer,) = partials(call, splits, clear_others=False)
    _, index = kernels.finalize_argmax(buffer, positions=on_device(call["positions"]))
    assert index.tolist() == tokens(oracle, call)


@given(rows=st.integers(0, 4096), width=st.integers(0, 2**31))
def test_splits_stay_within_what_the_last_kernel_takes(rows: int, width: int) -> None:
    assert 1 <= kernels.exchange_splits(rows, width) <= kernels.MAX_SPLITS


@pytest.mark.parametrize(
    "buffer, says",
    [
        (torch.zeros(2, 1, 1, 3, device=DEVICE), "buffer"),
        (torch.zeros(3, 1, 1, 4, device=DEVICE), "buffer"),
        (torch.zeros(2, 1, 0, 4, device=DEVICE), "buffer"),
        (torch.zeros(2, 1, 1, 4, dtype=torch.float64, device=DEVICE), "buffer"),
        (torch.zeros(2, 1, 1, 8, device=DEVICE)[..., ::2], "buffer"),
        (torch.zeros(2, 1, 4, device=DEVICE), "buffer"),
        (torch.zeros(2, 1, 1, 4, device=DEVICE), "rank"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kernels.argmax_partials(
            torch.zeros(2, 5, device=DEVICE), buffer, rank=1, first_id=0, vocab_size=5
        )
    if says == "buffer":
        positions = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        with pytest.raises(ValueError, match=r"buffer|positions"):
            kernels.finalize_argmax(buffer, positions=positions)
        assert positions.tolist() == [0, 0]


# ---------------------------------------------------------------- a group of one rank


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo with CUDA tensors: see the tests of ranks")
class TestOneRank:
    """What a rank checks by itself; the tests of ranks have the rest."""

    def test_a_step_is_the_oracle_s(self) -> None:
        call = ops.build({"rows": 3, "widths": [40], "vocab": 33, "fill": "mixed"}, 5)
        exchange = kernels.DraftArgmaxExchange(None, 33, 40, device=DEVICE)

        def step(logits_shards: list[Tensor], vocab_size: int, nan_policy: str, **outputs: Any):
            return exchange.step(logits_shards[0], **outputs)

        assert outcome(step, call) == outcome(oracle, call)

    @pytest.mark.parametrize(
        "vocab_size, shard_width, policy, says",
        [
            (0, 8, "sink", "vocab_size"),
            (9, 8, "sink", "vocab_size"),
            (2**31, 8, "sink", "vocab_size"),
            (8, -1, "sink", "shard_width"),
            (8, 8, "last", "nan_policy"),
        ],
    )
    def test_what_cannot_be_exchanged_is_refused(
        self, vocab_size: int, shard_width: int, policy: str, says: str
    ) -> None:
        with pytest.raises(ValueError, match=says):
            kernels.DraftArgmaxExchange(
                None, vocab_size, shard_width, device=DEVICE, nan_policy=policy
            )

    def test_a_shard_of_another_width_is_refused_before_anything_is_written(self) -> None:
        exchange = kernels.DraftArgmaxExchange(None, 8, 8, device=DEVICE)
        positions = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(ValueError, match="shard"):
            exchange.step(torch.zeros(2, 7), positions=positions)
        with pytest.raises(ValueError, match="positions"):
            exchange.step(torch.zeros(3, 8), positions=positions)
        assert positions.tolist() == [0, 0]


# ---------------------------------------------------------------- dispatch

EXCHANGES = kernels.DraftHead(
    opts_in=True,
    topk=1,
    vocab_parallel=True,
    soft_caps_logits=False,
    data_parallel_attention=False,
    all_reduce_on_nccl=False,
)


def test_the_exchange_takes_exactly_one_of_all_combinations() -> None:
    values = {field.name: (True, False) for field in fields(kernels.DraftHead)}
    values["topk"] = (1, 2)
    taken = []
    for switch in ("1", "0"):
        for combination in itertools.product(*values.values()):
            head = kernels.DraftHead(**dict(zip(values, combination, strict=True)))
            route = kernels.draft_argmax_route(head, {kernels.KILL_SWITCH: switch})
            assert route.reason
            if route.exchange:
                taken.append((switch, head))
    assert taken == [("1", EXCHANGES)]


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"opts_in": False}, "opt in"),
        ({"topk": 2}, "more than one draft token"),
        ({"topk": 0}, "more than one draft token"),
        ({"vocab_parallel": False}, "not split over the vocabulary"),
        ({"soft_caps_logits": True}, "soft-capping"),
        ({"data_parallel_attention": True}, "data-parallel attention"),
        ({"all_reduce_on_nccl": True}, "NCCL"),
    ],
)
def test_each_fallback_says_why(changed: dict[str, Any], reason: str) -> None:
    route = kernels.draft_argmax_route(replace(EXCHANGES, **changed), {})
    assert not route.exchange
    assert reason in route.reason


@pytest.mark.parametrize(
    "environment, enabled",
    [
        ({}, True),
        ({kernels.KILL_SWITCH: "1"}, True),
        ({kernels.KILL_SWITCH: "true"}, True),
        ({kernels.KILL_SWITCH: "0"}, False),
        ({kernels.KILL_SWITCH: " False "}, False),
        ({"UNRELATED": "0"}, True),
    ],
)
def test_the_kill_switch_keeps_the_gather(environment: dict[str, str], enabled: bool) -> None:
    assert kernels.exchange_enabled(environment) is enabled
    route = kernels.draft_argmax_route(EXCHANGES, environment)
    assert route.exchange is enabled
    assert enabled or kernels.KILL_SWITCH in route.reason


@pytest.mark.parametrize("value", ["", "off", "2", "no"])
def test_a_kill_switch_of_another_value_is_an_error(value: str) -> None:
    with pytest.raises(ValueError, match=kernels.KILL_SWITCH):
        kernels.draft_argmax_route(EXCHANGES, {kernels.KILL_SWITCH: value})


def test_only_a_model_that_says_true_opts_in() -> None:
    class Model:
        """A draft model."""

    assert not kernels.opts_in(Model())
    for value, opted in ((True, True), (False, False), (1, False), (lambda: True, False)):
        model = Model()
        model.draft_argmax_exchange = value  # type: ignore[attr-defined]
        assert kernels.opts_in(model) is opted
