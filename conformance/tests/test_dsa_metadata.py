"""The DSA metadata oracles against a second one and their laws; what the launchers promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.conformance.crosscheck import dsa_metadata as crosscheck
from draftproof.conformance.engine.calls import clone, leaves
from draftproof.conformance.ops import dsa_metadata as ops
from draftproof.kernels import dsa_metadata as kernels
from draftproof.kernels import runtime
from draftproof.oracles import dsa_metadata as oracles
from draftproof.oracles.dsa_metadata import StepTables

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SEEDS = st.integers(0, 0xFFFF)
SPECS = {spec.name: spec for spec in ops.SPECS}
OPS = tuple(SPECS)
every_op = pytest.mark.parametrize("op", OPS)
needs_triton = pytest.mark.skipif(
    not runtime.runs_triton(DEVICE), reason="no GPU, and Triton's interpreter is off"
)
many = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def after(function: Callable[..., None], call: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What a function leaves in a copy of a call, by path."""
    args = clone(call, DEVICE)
    function(**args)
    return {path: tensor.tolist() for path, tensor in leaves(args).items()}


def oracle(op: str) -> Callable[..., None]:
    return getattr(oracles, op)


def build(op: str, params: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    return SPECS[op].build(params, seed)


GOOD = {
    "dsa_decode_metadata": ops._params([5, 129, 0], 300),
    "dsa_target_verify_metadata": ops._verify_params([5, 129, 0], 300),
    "dsa_draft_extend_metadata": ops._extend_params([5, 129, 0], [2, 3, 1], 300),
    "dsa_draft_decode_metadata": ops._draft_params([5, 129, 0], 300, steps=[ops.ALIKE] * 3),
}
"""One ordinary call of each op."""


# ---------------------------------------------------------------- the oracle


@every_op
@given(data=st.data(), seed=SEEDS)
@many
def test_oracle_and_crosscheck_agree_on_drawn_calls(
    op: str, data: st.DataObject, seed: int
) -> None:
    call = build(op, data.draw(SPECS[op].strategy()), seed)
    assert after(oracle(op), call) == after(getattr(crosscheck, op), call)


@every_op
def test_oracle_and_crosscheck_agree_on_every_small_case(op: str) -> None:
    compared = 0
    for case in SPECS[op].cases:
        if case.params["huge"] or case.params["max_len"] > 700:
            continue
        call = build(op, case.params)
        assert after(oracle(op), call) == after(getattr(crosscheck, op), call), case.name
        compared += 1
    assert compared >= 20


@many
@given(params=ops._drawn(), seed=SEEDS)
def test_pages_are_every_page_size_th_slot(params: Any, seed: int) -> None:
    page = max(params["page"], 2)
    # Where nothing is live, both tables hold the same mark.
    call = build("dsa_decode_metadata", {**params, "page": page, "tables": "both"}, seed)
    call["page_table_1"].fill_(-page)
    call["real_page_table"].fill_(-1)
    oracles.dsa_decode_metadata(**call)
    pages = -(-params["max_len"] // page)
    slots = call["page_table_1"][:, : params["max_len"] : page]
    assert torch.equal(
        torch.div(slots, page, rounding_mode="floor"),
        call["real_page_table"][:, :pages],
    )


@many
@given(params=ops._drawn(), order=st.randoms(use_true_random=False), seed=SEEDS)
def test_permuting_requests_permutes_rows(params: Any, order: Any, seed: int) -> None:
    bs = len(params["seq_lens"])
    turn = list(range(bs))
    order.shuffle(turn)
    call = build("dsa_decode_metadata", params, seed)
    turned = clone(call)
    for name in ("seq_lens", "req_pool_indices", "page_table_1", "real_page_table"):
        if turned[name] is not None:
            turned[name][:bs] = call[name][turn]
    oracles.dsa_decode_metadata(**call)
    oracles.dsa_decode_metadata(**turned)
    for name in ("cache_seqlens", "dsa_cache_seqlens", "page_table_1", "real_page_table"):
        if call[name] is not None:
            assert torch.equal(turned[name][:bs], call[name][turn]), name
    assert torch.equal(turned["cu_seqlens_k"][bs], call["cu_seqlens_k"][bs])


@many
@given(params=ops._drawn(), seed=SEEDS)
def test_an_extend_by_one_token_is_a_decode(params: Any, seed: int) -> None:
    bs = len(params["seq_lens"])
    own = {"extends": [1] * bs, "total_len": bs, "max_extend_len": 1, "static": bool(seed & 1)}
    call = build("dsa_draft_extend_metadata", {**params, **own}, seed)
    decode = {
        name: value
        for name, value in clone(call).items()
        if name in build("dsa_decode_metadata", params, seed)
    }
    oracles.dsa_draft_extend_metadata(**call)
    oracles.dsa_decode_metadata(**decode)
    assert call["seqlens_expanded"][:bs].tolist() == params["seq_lens"]
    for path, tensor in leaves(decode).items():
        assert torch.equal(tensor, call[path]), path


@many
@given(params=ops._drawn_verify(), seed=SEEDS)
def test_a_verify_row_has_the_table_of_a_decode_that_counts_the_drafts(
    params: Any, seed: int
) -> None:
    call = build("dsa_target_verify_metadata", params, seed)
    before = clone(call)
    oracles.dsa_target_verify_metadata(**call)
    bs, next_n = len(params["seq_lens"]), params["next_n"]
    for offset in range(next_n):
        rows = slice(offset, bs * next_n, next_n)
        tables = {
            name: None if before[name] is None else before[name][rows].clone()
            for name in ("page_table_1", "real_page_table")
        }
        lengths = build("dsa_decode_metadata", params, seed)
        decode = {**lengths, **tables, "req_to_token": before["req_to_token"]}
        decode["seq_lens"] = before["seq_lens"] + next_n
        oracles.dsa_decode_metadata(**decode)
        for name, table in tables.items():
            assert table is None or torch.equal(table, call[name][rows]), name
        assert torch.equal(decode["cu_seqlens_k"][: bs + 1], call["cu_seqlens_k"][: bs + 1])


@many
@given(params=ops._drawn_draft(), seed=SEEDS)
def test_every_draft_step_is_what_decode_writes(params: Any, seed: int) -> None:
    call = build("dsa_draft_decode_metadata", params, seed)
    before = clone(call)
    oracles.dsa_draft_decode_metadata(**call)
    shared = {name: value for name, value in before.items() if name != "steps"}
    for number, step in enumerate(before["steps"]):
        oracles.dsa_decode_metadata(**shared, **vars(step))
        for name, tensor in leaves(vars(step)).items():
            assert torch.equal(tensor, getattr(call["steps"][number], name)), name


def test_a_padded_extend_sees_nothing_but_its_last_token() -> None:
    call = build("dsa_draft_extend_metadata", ops._extend_params([1], [6]))
    oracles.dsa_draft_extend_metadata(**call)
    assert call["seqlens_expanded"][:6].tolist() == [0, 0, 0, 0, 0, 1]
    assert call["dsa_cu_seqlens_k"][:7].tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_rows_past_the_last_request_count_as_a_decode_of_request_0() -> None:
    params = ops._extend_params([40, 7], [2, 1], total_len=5, topk=30)
    call = build("dsa_draft_extend_metadata", params)
    old = call["page_table_1"].clone()
    oracles.dsa_draft_extend_metadata(**call)
    assert call["seqlens_expanded"][:5].tolist() == [39, 40, 7, 40, 40]
    assert call["dsa_cache_seqlens"][:5].tolist() == [30, 30, 7, 30, 30]
    assert torch.equal(call["page_table_1"][3:], old[3:])
    assert not torch.equal(call["page_table_1"][2], old[2])


def test_the_drafts_past_a_full_table_touch_no_column_behind_it() -> None:
    call = build("dsa_target_verify_metadata", ops._verify_params([4095], 4096, next_n=5, excess=7))
    old = call["page_table_1"].clone()
    oracles.dsa_target_verify_metadata(**call)
    assert call["cache_seqlens"][0] == 4100
    assert torch.equal(call["page_table_1"][:5, :4096], call["req_to_token"][[1] * 5, :4096])
    assert torch.equal(call["page_table_1"][:, 4096:], old[:, 4096:])


# ---------------------------------------------------------------- dispatch rules


@pytest.mark.parametrize("device_type", ["cuda", "cpu", "meta"])
@pytest.mark.parametrize("kpool", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("switch", [None, "0", "1", "", "00", "false"])
def test_bounded_serves_cuda_without_kpool_unless_switched_off(
    device_type: str, kpool: int, fused: bool, switch: str | None
) -> None:
    environ = {} if switch is None else {kernels.BOUNDED_SWITCH: switch}
    served = kernels.use_bounded(
        device_type, kpool=kpool, kpool_metadata_fused=fused, environ=environ
    )
    assert served == ((device_type, kpool, fused) == ("cuda", 1, False) and switch != "0")


def test_the_switch_is_the_one_that_sglang_reads() -> None:
    assert kernels.BOUNDED_SWITCH == "SGLANG_DSA_BOUNDED_REPLAY_METADATA"


def step(
    rows: int = 2,
    slots: int | None = 300,
    pages: int | None = 5,
    dtype: torch.dtype = torch.int32,
    pad: int = 0,
) -> StepTables:
    """A step whose tables have these widths and `pad` columns between rows."""

    def table(width: int | None) -> Tensor | None:
        return None if width is None else torch.zeros(rows, width + pad, dtype=dtype)[:, :width]

    lengths = [torch.zeros(size, dtype=dtype) for size in (rows, rows + 1, rows, rows + 1)]
    return StepTables(*lengths, table(slots), table(pages))


@pytest.mark.parametrize(
    ("steps", "served"),
    [
        ([], False),
        ([step()], True),
        ([step()] * 2, True),
        ([step()] * 3, True),
        ([step()] * 4, True),
        ([step()] * 5, False),
        ([step(), step()], True),
        ([step(slots=None), step(slots=None)], True),
        ([step(pages=None), step(pages=None)], True),
        ([step(), step(slots=301)], False),
        ([step(), step(), step(pages=6)], False),
        ([step(), step(pad=4)], False),
        ([step(pad=4), step(pad=4)], True),
        ([step(), step(slots=None)], False),
        ([step(), step(pages=None)], False),
        ([step(), step(dtype=torch.int64)], False),
        # More rows than needed in one of them: neither width nor strides.
        ([step(), step(rows=7)], True),
    ],
)
def test_one_launch_serves_one_to_four_steps_of_one_layout(
    steps: list[StepTables], served: bool
) -> None:
    assert kernels.one_launch_serves(steps) == served


def test_only_seeded_draft_steps_skip_their_schedule() -> None:
    assert kernels.draft_step_refreshes_schedule(seeded_from_draft_extend_topk=False)
    assert not kernels.draft_step_refreshes_schedule(seeded_from_draft_extend_topk=True)


@pytest.mark.parametrize(
    ("rows", "width", "budget", "programs"),
    [
        (0, 1 << 20, 2048, 0),
        (1, 1 << 20, 2048, 256),
        (8, 1 << 20, 2048, 256),
        (9, 1 << 20, 2048, 227),
        (80, 1 << 20, 2048, 25),
        (2048, 1 << 20, 2048, 1),
        (4096, 1 << 20, 2048, 1),
        (4, 1 << 20, 3, 1),
        (1, 1 << 20, 10**9, 256),
        (1, 65536, 2048, 256),
        (1, 1, 2048, 1),
        (1, 256, 2048, 1),
        (1, 257, 2048, 2),
    ],
)
def test_programs_of_a_request_share_the_budget(
    rows: int, width: int, budget: int, programs: int
) -> None:
    assert kernels.programs_per_request(rows, width, budget) == programs


def test_the_budget_is_the_constant_unless_the_environment_says_otherwise() -> None:
    assert kernels.program_budget({}) == kernels.PROGRAM_BUDGET
    assert kernels.program_budget({kernels.PROGRAM_BUDGET_VARIABLE: "7"}) == 7


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", " 8", "1e3", "0x10", "\u0663"])
def test_a_bad_budget_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=kernels.PROGRAM_BUDGET_VARIABLE):
        kernels.program_budget({kernels.PROGRAM_BUDGET_VARIABLE: text})


def test_step_tables_are_one_class_everywhere() -> None:
    assert kernels.StepTables is StepTables


# ---------------------------------------------------------------- launchers


class Launches:
    """Stands in front of the kernels and keeps what they are launched with."""

    KERNELS = ("_decode_kernel", "_verify_kernel", "_extend_kernel", "_copy_step_kernel")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grids: list[tuple[str, tuple[int, ...]]] = []
        self.options: list[dict[str, Any]] = []
        for name in self.KERNELS:
            monkeypatch.setattr(kernels, name, self._catcher(name))
        monkeypatch.setattr(kernels, "runs_triton", lambda device: True)

    def _catcher(self, name: str) -> Any:
        outer = self

        class Catcher:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **options: Any) -> None:
                    outer.grids.append((name, grid))
                    outer.options.append(options)

                return launch

        return Catcher()


class NoValuesRead(TorchDispatchMode):
    """Lets tensors be viewed and allocated; whatever would look at their content is an error."""

    HARMLESS = ("empty", "view", "slice", "select", "as_strided", "expand", "detach", "alias")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if not any(name.startswith(("new_" + word, word)) for word in self.HARMLESS):
            raise AssertionError(f"a launcher ran {func.name()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    with monkeypatch.context() as patch:
        launches = Launches(patch)
        with NoValuesRead():
            yield launches


def test_the_watch_sees_a_value_that_is_read() -> None:
    lengths = torch.ones(2, dtype=torch.int32)
    for read in (Tensor.max, lambda tensor: tensor[0].item(), lambda tensor: tensor.to("meta")):
        with NoValuesRead(), pytest.raises(AssertionError, match="a launcher ran"):
            read(lengths)
    with pytest.raises((NotImplementedError, RuntimeError)):
        lengths.to("meta").tolist()


ARMS = ("", "_baseline")


@every_op
@pytest.mark.parametrize("arm", ARMS)
def test_no_value_of_a_tensor_is_read_on_the_host(
    op: str, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = build(op, GOOD[op])
    with watched(monkeypatch) as launches:
        getattr(kernels, op + arm)(**call)
    assert launches.grids
    # Tensors without any values will do as well.
    bare = build(op, GOOD[op])
    for name, value in bare.items():
        if isinstance(value, Tensor):
            bare[name] = value.to("meta")
    if "steps" in bare:
        bare["steps"] = [
            SimpleNamespace(**{name: tensor.to("meta") for name, tensor in vars(step).items()})
            for step in bare["steps"]
        ]
    with watched(monkeypatch) as without:
        getattr(kernels, op + arm)(**bare)
    assert without.grids == launches.grids


@every_op
@pytest.mark.parametrize("lengths", [[0, 0, 0], [1, 300, 299], [10**9, 0, 128]])
def test_the_grid_does_not_follow_the_lengths(
    op: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = []
    for params in (GOOD[op], {**GOOD[op], "seq_lens": lengths, "pool_rows": [0, 0, 1]}):
        if "extends" in params:
            params = {**params, "extends": lengths}
        call = build(op, params)
        with watched(monkeypatch) as launches:
            getattr(kernels, op)(**call)
        grids.append(launches.grids)
    assert grids[0] == grids[1]


@every_op
def test_the_grid_follows_rows_width_and_budget(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = build(op, GOOD[op])
    for budget in (1, 12, 2048):
        monkeypatch.setenv(kernels.PROGRAM_BUDGET_VARIABLE, str(budget))
        with watched(monkeypatch) as launches:
            getattr(kernels, op)(**call)
        rows = {"dsa_target_verify_metadata": 9, "dsa_draft_extend_metadata": 6}.get(op, 3)
        levels = {"dsa_decode_metadata": 1, "dsa_draft_decode_metadata": 3}.get(op, 2)
        programs = kernels.programs_per_request(rows, 300, budget)
        assert [grid for _, grid in launches.grids] == [(3, levels + programs)]


@every_op
@pytest.mark.parametrize("arm", ARMS)
def test_every_launch_states_warps_and_fusion(
    op: str, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = build(op, GOOD[op])
    with watched(monkeypatch) as launches:
        getattr(kernels, op + arm)(**call)
    for options in launches.options:
        assert options["num_warps"] > 0
        assert options["enable_fp_fusion"] is False


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_draft_steps_of_one_layout_take_one_launch(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = "dsa_draft_decode_metadata"
    call = build(op, ops._draft_params([5, 129], 300, steps=[ops.ALIKE] * count))
    with watched(monkeypatch) as launches:
        kernels.dsa_draft_decode_metadata(**call)
    assert [name for name, _ in launches.grids] == ["_decode_kernel"]
    with watched(monkeypatch) as launches:
        kernels.dsa_draft_decode_metadata_baseline(**call)
    assert [name for name, _ in launches.grids] == [
        "_decode_kernel",
        *["_copy_step_kernel"] * count,
    ]


def test_draft_steps_of_other_layouts_take_a_launch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    params = ops._draft_params([5, 129], 300, steps=[ops.ALIKE, (None, 2), ("pages", None)])
    call = build("dsa_draft_decode_metadata", params)
    with watched(monkeypatch) as launches:
        kernels.dsa_draft_decode_metadata(**call)
    assert [name for name, _ in launches.grids] == ["_decode_kernel"] * 3


@every_op
def test_a_bad_budget_stops_a_launch_before_it_writes(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.PROGRAM_BUDGET_VARIABLE, "none")
    call = build(op, GOOD[op])
    with (
        watched(monkeypatch) as launches,
        pytest.raises(ValueError, match=kernels.PROGRAM_BUDGET_VARIABLE),
    ):
        getattr(kernels, op)(**call)
    assert not launches.grids


@every_op
def test_tensors_where_triton_cannot_run_are_refused(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "runs_triton", lambda device: False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        getattr(kernels, op)(**build(op, GOOD[op]))


# ---------------------------------------------------------------- kernels


@needs_triton
@every_op
def test_small_tiles_and_budgets_change_no_bit(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths in several chunks, columns in several tiles of one program."""
    cases = {
        "dsa_decode_metadata": ops._params(range(3, 203, 5), 600),
        "dsa_target_verify_metadata": ops._verify_params([3, 500, 90, 128, 0, 7], 600, next_n=7),
        "dsa_draft_extend_metadata": ops._extend_params(
            list(range(3, 203, 5)), [1, 0, 3, 2] * 10, 600, total_len=64
        ),
        "dsa_draft_decode_metadata": ops._draft_params(range(3, 203, 5), 600),
    }
    call = build(op, cases[op])
    wanted = after(oracle(op), call)
    monkeypatch.setenv(kernels.PROGRAM_BUDGET_VARIABLE, "1")
    monkeypatch.setattr(kernels, "TILE", 128)
    monkeypatch.setattr(kernels, "LENGTHS_TILE", 16)
    monkeypatch.setattr(kernels, "OWNER_TILE", 16)
    monkeypatch.setattr(kernels, "OWNER_PAIRS", 256)
    assert after(getattr(kernels, op), call) == wanted


@needs_triton
@every_op
def test_pages_alone_take_several_tiles(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PAGE_TILE", 64)
    monkeypatch.setenv(kernels.PROGRAM_BUDGET_VARIABLE, "1")
    params = {
        **GOOD[op],
        "seq_lens": [700, 0, 385],
        "max_len": 700,
        "page": 2,
        "tables": "pages",
        "total_len": 4,
    }
    call = build(op, params)
    assert after(getattr(kernels, op), call) == after(oracle(op), call)


def promises(args: Mapping[str, Any]) -> dict[str, bool]:
    """What the numbers of a call keep to."""
    added = args.get("next_n", 0)
    kept = {"max_len": all(n + added <= args["max_len"] for n in args["seq_lens"].tolist())}
    if "extend_seq_lens" in args:
        extends = args["extend_seq_lens"].tolist()
        kept["max_extend_len"] = all(extend <= args["max_extend_len"] for extend in extends)
        kept["total_len"] = sum(extends) <= args["total_len"]
        kept["alike"] = not args.get("static_extend_len") or len(set(extends)) <= 1
    return kept


@every_op
def test_changed_inputs_keep_what_their_case_keeps_to(op: str) -> None:
    spec, changed = SPECS[op], set()
    for case in spec.cases:
        if case.profile != "quick" or case.params["huge"] or case.params["max_len"] > 5000:
            continue
        call = spec.build(case.params, 0)
        kept = {name for name, whether in promises(call).items() if whether}
        assert spec.replays is not None
        assert spec.rescale is not None
        others = [spec.build(params, 0) for params in spec.replays(case.params)]
        for other in [*others, spec.rescale(call)]:
            assert kept <= {name for name, whether in promises(other).items() if whether}, case.name
        changed |= {
            name
            for name in ("seq_lens", "extend_seq_lens")
            if name in call and not torch.equal(call[name], others[0][name])
        }
    # They change all the same.
    assert changed == {"seq_lens", *({"extend_seq_lens"} if op == EXTEND else ())}


EXTEND = "dsa_draft_extend_metadata"
