"""`q_rope_store`: its oracle against a second one, the pairs that were searched, guards, paths."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.crosscheck import numerics as exact
from draftproof.conformance.crosscheck import q_rope_store as crosscheck
from draftproof.conformance.ops import q_rope_store as ops
from draftproof.kernels import q_rope_store as kernels
from draftproof.kernels import runtime
from draftproof.oracles import q_rope_store as oracles

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SEEDS = st.integers(0, 0xFFFF)
FUNCTIONS = (
    oracles.q_rope_store,
    kernels.q_rope_store,
    kernels.q_rope_store_baseline,
)
REFUSING = (oracles.validate, lambda *arguments: refused(*arguments))
PADDING_BITS = (0x40E0, 0x7FC5)
"""7.0 and a NaN."""

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


def bits(heads: Tensor) -> bytes:
    """What a tensor holds, comparable with `==`; any NaN of a tail is 0x7FC0."""
    heads = heads.clone(memory_format=torch.contiguous_format)
    tails = heads[..., ops.COPIED :]
    tails.view(torch.int16).masked_fill_(torch.isnan(tails), 0x7FC0)
    return bytes(heads.view(torch.uint8).cpu().numpy())


def after(function: Callable[..., None], call: dict[str, Any], **changed: Tensor) -> bytes:
    """What a function leaves in an output of its own."""
    call = {**call, **changed}
    output = torch.zeros(call["q"].shape, dtype=torch.bfloat16, device=call["q"].device)
    function(**{**call, "output": output})
    return bits(output)


def small_call(rows: int = 3, heads: int = 2, seed: int = 0, **changed: Any) -> dict[str, Tensor]:
    """A call on the device under test."""
    call = ops.build(ops._params(rows, heads, max_pos=8, **changed), seed)
    return {name: tensor.to(DEVICE) for name, tensor in call.items()}


# ---------------------------------------------------------------- the oracle


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_oracle_and_crosscheck_leave_the_same_bits(params: Any, seed: int) -> None:
    call = ops.build(params, seed)
    assert after(oracles.q_rope_store, call) == after(crosscheck.q_rope_store, call)


@pytest.mark.parametrize(
    "name",
    [
        *("kept_pairs", "cancelling_pairs", "exact_cancellation", "subnormal_results"),
        *("specials_by_units", "specials_by_specials", "noise_by_noise"),
    ],
)
def test_oracle_and_crosscheck_agree_on_the_rounding_cases(name: str) -> None:
    (case,) = [case for case in ops.SPECS[0].cases if case.name == name]
    call = ops.build(case.params, 0)
    assert after(oracles.q_rope_store, call) == after(crosscheck.q_rope_store, call)


@many
@given(params=ops.strategy(), seed=SEEDS, data=st.data())
def test_order_of_rows_does_not_matter(params: Any, seed: int, data: st.DataObject) -> None:
    call = ops.build(params, seed)
    order = data.draw(st.permutations(range(params["rows"])))
    shuffled = {name: call[name][list(order)] for name in ("q", "positions")}
    output = torch.zeros_like(shuffled["q"])
    oracles.q_rope_store(**{**call, **shuffled, "output": output})
    ordered = torch.zeros_like(output)
    ordered[list(order)] = output
    assert bits(ordered) == after(oracles.q_rope_store, call)


@many
@given(params=ops.strategy(), seed=SEEDS, data=st.data())
def test_order_of_rotations_does_not_matter(params: Any, seed: int, data: st.DataObject) -> None:
    call = ops.build(params, seed)
    order = data.draw(st.permutations(range(params["max_pos"])))
    place = torch.tensor([order.index(row) for row in range(len(order))])
    moved = {
        "freqs_cis": call["freqs_cis"][list(order)],
        "positions": place[call["positions"].long()].to(call["positions"].dtype),
    }
    assert after(oracles.q_rope_store, call, **moved) == after(oracles.q_rope_store, call)


@many
@given(params=ops.strategy(), seed=SEEDS)
def test_every_element_is_written_whatever_the_output_held(params: Any, seed: int) -> None:
    call = ops.build(params, seed)
    one, other = (torch.full_like(call["output"], fill) for fill in (7.0, math.nan))
    for output in (one, other):
        oracles.q_rope_store(**{**call, "output": output})
    assert bits(one) == bits(other)


def test_a_quarter_turn_moves_x_to_the_odd_element() -> None:
    call = small_call(1, 1)
    call["freqs_cis"].fill_(1j)
    call["q"][..., ops.COPIED :] = torch.arange(1, 65)
    kernels.q_rope_store(**call)
    tail = call["output"][0, 0, ops.COPIED :].tolist()
    assert tail[0::2] == [-value for value in range(2, 65, 2)]
    assert tail[1::2] == list(range(1, 65, 2))


# ---------------------------------------------------------------- the pairs that were searched


def value32(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


def toward_zero(value: Fraction) -> float:
    """Round to float32 toward zero; normal numbers, which the kept pairs give."""
    rounded = exact.round_to(value, exact.FLOAT32, 1.0)
    if abs(Fraction(rounded)) > abs(value):
        (pattern,) = struct.unpack("<I", struct.pack("<f", rounded))
        rounded = value32(pattern - 1)
    return rounded


def half_away(value: float) -> float:
    (pattern,) = struct.unpack("<I", struct.pack("<f", value))
    return value32((pattern + 0x8000) & 0xFFFF0000)


def cut_off(value: float) -> float:
    (pattern,) = struct.unpack("<I", struct.pack("<f", value))
    return value32(pattern & 0xFFFF0000)


def sum_of(a: float, b: float, c: float) -> Fraction:
    """a * b + c without any rounding."""
    return Fraction(a) * Fraction(b) + Fraction(c)


def straight(value: Fraction) -> float:
    return exact.round_to(value, exact.BFLOAT16, 1.0)


# What each wrong way makes of first * b + second * d, which is x * c + y * -s or x * s + y * c.
WRONG_WAYS: dict[str, Callable[[float, float, float, float], float]] = {
    "two_roundings": lambda x, b, y, d: exact.round_bf16(
        exact.fma32(1.0, exact.multiply32(x, b), exact.multiply32(y, d))
    ),
    "other_operand_order": lambda x, b, y, d: exact.round_bf16(
        exact.fma32(y, d, exact.multiply32(x, b))
    ),
    "one_rounding": lambda x, b, y, d: exact.round_bf16(
        exact.round_to(Fraction(x) * Fraction(b) + Fraction(y) * Fraction(d), exact.FLOAT32, 1.0)
    ),
    "product_truncated": lambda x, b, y, d: exact.round_bf16(
        exact.fma32(x, b, toward_zero(Fraction(y) * Fraction(d)))
    ),
    "sum_truncated": lambda x, b, y, d: exact.round_bf16(
        toward_zero(sum_of(x, b, exact.multiply32(y, d)))
    ),
    "straight_to_bf16": lambda x, b, y, d: straight(sum_of(x, b, exact.multiply32(y, d))),
    "half_away": lambda x, b, y, d: half_away(exact.fma32(x, b, exact.multiply32(y, d))),
    "truncated": lambda x, b, y, d: cut_off(exact.fma32(x, b, exact.multiply32(y, d))),
}


def both_ways(way: str, pair: tuple[int, int, int, int]) -> tuple[list[float], list[float]]:
    """Even and odd by the rule, and by a wrong way."""
    x, y = map(crosscheck.value_of, pair[:2])
    c, s = map(value32, pair[2:])
    wrong = WRONG_WAYS[way]
    return list(crosscheck.rotate(x, y, c, s)), [wrong(x, c, y, -s), wrong(x, s, y, c)]


def test_pairs_are_kept_for_every_wrong_way() -> None:
    assert ops.KEPT_PAIRS.keys() == WRONG_WAYS.keys()


@pytest.mark.parametrize("way", ops.KEPT_PAIRS)
def test_the_kept_pairs_change_their_bits_if_rounded_the_wrong_way(way: str) -> None:
    changed = []
    for pair in ops.KEPT_PAIRS[way]:
        right, wrong = both_ways(way, pair)
        changed.append([one != other for one, other in zip(right, wrong, strict=True)])
    assert [even for even, _ in changed[:2]] == [True, True]
    assert [odd for _, odd in changed[2:]] == [True, True]


@pytest.mark.parametrize("way", ["two_roundings", "other_operand_order"])
def test_cancelling_pairs_change_their_bits_if_rounded_the_wrong_way(way: str) -> None:
    changed = 0
    for x, c in itertools.product(ops.CANCELLING_X, ops.CANCELLING_C):
        for turned, sign in enumerate((0, 0x80000000)):
            right, wrong = both_ways(way, (x, x, c, c ^ sign))
            # Even cancels at c = s, odd at c = -s.
            changed += right[turned] != wrong[turned]
    assert changed > len(ops.CANCELLING_X) * len(ops.CANCELLING_C)


# ---------------------------------------------------------------- padding heads


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("padding", PADDING_BITS)
@pytest.mark.parametrize("first", [0, 7, 13])
def test_padding_heads_hold_what_they_held(
    function: Callable[..., None], padding: int, first: int
) -> None:
    call = small_call(3, 3)
    buffer = torch.full((3, 16, ops.HEAD_DIM), padding, dtype=torch.int16, device=DEVICE)
    heads = buffer.view(torch.bfloat16)[:, first : first + 3]
    function(**{**call, "output": heads})
    assert bits(heads) == after(oracles.q_rope_store, call)
    others = torch.cat((buffer[:, :first], buffer[:, first + 3 :]), dim=1)
    assert bool((others == padding).all())


# ---------------------------------------------------------------- guards: what is refused


def refused(q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
    """The kernels' guard in the form of the oracle's."""
    if reason := kernels.refusal(q, output, freqs_cis, positions):
        raise ValueError(reason)


def refuses(function: Callable[..., None], call: dict[str, Tensor]) -> bool:
    try:
        function(*call.values())
    except ValueError:
        return True
    return False


def stretched(shape: tuple[int, int, int], stride: tuple[int, int, int]) -> Tensor:
    """A tensor that lies as told, in memory of its own."""
    room = 1 + sum(max(n - 1, 0) * s for n, s in zip(shape, stride, strict=True))
    return torch.zeros(room, dtype=torch.bfloat16, device=DEVICE).as_strided(shape, stride)


@pytest.mark.parametrize("guard", REFUSING)
@pytest.mark.parametrize("name", ["q", "output"])
@pytest.mark.parametrize(
    ("rows", "heads", "stride", "taken"),
    [
        (3, 2, (1024, 512, 1), True),
        (3, 2, (1025, 512, 1), True),
        (3, 2, (2**20, 512, 1), True),
        (3, 2, (1023, 512, 1), False),
        (3, 2, (0, 512, 1), False),
        (3, 2, (2048, 513, 1), False),
        (3, 2, (2048, 0, 1), False),
        (3, 2, (2048, 1024, 2), False),
        # A dimension of size 1 is never stepped along.
        (1, 2, (0, 512, 1), True),
        (1, 2, (7, 512, 1), True),
        (3, 1, (512, 99, 1), True),
        (3, 1, (511, 99, 1), False),
        (1, 1, (1, 1, 1), True),
        (1, 2, (7, 511, 1), False),
        (1, 1, (1, 1, 2), False),
        # Rows that do not exist have no stride either; a row of no heads no length.
        (0, 2, (0, 512, 1), True),
        (0, 2, (1024, 511, 1), False),
        (3, 0, (0, 512, 1), True),
    ],
)
def test_truth_table_of_strides(
    guard: Callable[..., None],
    name: str,
    rows: int,
    heads: int,
    stride: tuple[int, int, int],
    taken: bool,
) -> None:
    call = small_call(rows, heads)
    call[name] = stretched((rows, heads, 512), stride)
    assert refuses(guard, call) is not taken


@pytest.mark.parametrize("guard", REFUSING)
@pytest.mark.parametrize(
    ("rows", "max_pos", "taken"), [(0, 0, True), (0, 1, True), (1, 0, False), (1, 1, True)]
)
def test_truth_table_of_tables_without_rows(
    guard: Callable[..., None], rows: int, max_pos: int, taken: bool
) -> None:
    call = small_call(rows, 2)
    call["freqs_cis"] = call["freqs_cis"][:max_pos]
    assert refuses(guard, call) is not taken


@pytest.mark.parametrize("guard", REFUSING)
@pytest.mark.parametrize(
    "change",
    [lambda t: t.to(torch.complex128), lambda t: t.conj(), lambda t: t.conj().resolve_conj()],
    ids=["complex128", "lazy_conjugate", "conjugate"],
)
def test_tables_are_complex64_and_their_values_are_in_memory(
    guard: Callable[..., None], change: Callable[[Tensor], Tensor]
) -> None:
    call = small_call()
    call["freqs_cis"] = change(call["freqs_cis"])
    table = call["freqs_cis"]
    assert refuses(guard, call) is (table.is_conj() or table.dtype != torch.complex64)


def test_more_heads_than_the_kernels_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call = small_call(3, 2)
    monkeypatch.setattr(kernels, "MAX_HEADS", 6)
    kernels.q_rope_store(**call)
    monkeypatch.setattr(kernels, "MAX_HEADS", 5)
    for function in FUNCTIONS[1:]:
        with pytest.raises(ValueError, match=r"q: 3 x 2 heads are beyond the limit of 5"):
            function(**call)


def bytes_of(tensor: SimpleNamespace | Tensor) -> set[int]:
    """Every element's place that a tensor uses, in elements."""
    rows, heads, width = tensor.shape
    start = tensor.data_ptr() // 2
    return {
        start + row * tensor.stride(0) + place
        for row in range(rows)
        for place in range(heads * width)
    }


class Laid:
    """As much of a tensor as a question about overlap asks for, with heads of 2 elements."""

    is_meta = False

    def __init__(self, start: int, rows: int, stride: int, length: int) -> None:
        self.start, self.row_stride = start, stride
        self.shape = (rows, length // 2, 2)

    def data_ptr(self) -> int:
        return 2 * self.start

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return math.prod(self.shape)

    def stride(self, dim: int) -> int:
        return self.row_stride

    def __getitem__(self, row: int) -> Laid:
        return Laid(self.start, 1, self.row_stride, self.shape[1] * 2)


@settings(many, max_examples=400)
@given(
    rows=st.integers(1, 5),
    gaps=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    same=st.booleans(),
    heads=st.integers(1, 2),
    distance=st.integers(-40, 40),
)
def test_overlap_is_what_counting_every_element_finds(
    rows: int, gaps: tuple[int, int], same: bool, heads: int, distance: int
) -> None:
    length = 2 * heads
    strides = [length + gap for gap in (gaps[0], gaps[0] if same else gaps[1])]
    q = Laid(100, rows, strides[0], length)
    output = Laid(100 + distance, rows, strides[1], length)
    shared = bool(bytes_of(q) & bytes_of(output))
    assert oracles._share_a_byte(q, output) is shared
    assert kernels._share_a_byte(q, output) is shared


# ---------------------------------------------------------------- dispatch


@pytest.mark.parametrize(
    ("device_type", "interpreted", "path"),
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


def test_a_device_without_triton_gets_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    call = {name: tensor.cpu() for name, tensor in small_call().items()}
    for function in FUNCTIONS[1:]:
        assert after(function, call) == after(oracles.q_rope_store, call)


@pytest.mark.parametrize(
    ("q_shift", "output_shift", "q_pad", "output_pad", "rows", "wide"),
    [
        (0, 0, 0, 0, 3, True),
        (8, 16, 0, 0, 3, True),
        (0, 0, 8, 24, 3, True),
        (4, 0, 0, 0, 3, False),
        (0, 4, 0, 0, 3, False),
        (1, 0, 0, 0, 1, False),
        (0, 0, 4, 0, 3, False),
        (0, 0, 0, 4, 3, False),
        # The stride of a single row is never used.
        (0, 0, 4, 3, 1, True),
        (0, 0, 1, 1, 2, False),
    ],
)
def test_truth_table_of_wide_loads(
    q_shift: int, output_shift: int, q_pad: int, output_pad: int, rows: int, wide: bool
) -> None:
    def laid(shift: int, pad: int) -> Tensor:
        memory = torch.zeros(4 * (1024 + pad) + 64, dtype=torch.bfloat16)
        start = -memory.data_ptr() % 16 // 2 + shift
        return memory.as_strided((rows, 2, 512), (1024 + pad, 512, 1), start)

    freqs_cis = torch.zeros(4, 32, dtype=torch.complex64)
    assert kernels.moves_wide(laid(q_shift, q_pad), laid(output_shift, output_pad), freqs_cis) is (
        wide
    )


def test_small_calls_get_a_program_a_head_and_large_ones_more() -> None:
    few = kernels.FEW_HEADS
    assert [kernels.heads_per_program(total) for total in (1, few)] == [1, 1]
    assert {kernels.heads_per_program(total) for total in (few + 1, 2**22)} == {
        kernels.MANY_HEADS_PER_PROGRAM
    }


@needs_triton
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("heads", [0, 1])
def test_a_call_with_nothing_to_do_is_no_launch(
    rows: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []

    class Counted:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            launched.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(kernels, "_rotate_and_store_kernel", Counted())
    kernels.q_rope_store(**small_call(rows, heads))
    assert len(launched) == (1 if rows and heads else 0)


# ---------------------------------------------------------------- CUDA graphs


@needs_cuda
def test_replays_read_new_queries_and_new_positions() -> None:
    call = small_call(6, 16)
    kernels.q_rope_store(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.q_rope_store(**call)
    for seed in range(1, 4):
        other = small_call(6, 16, seed)
        for name in ("q", "positions"):
            call[name].copy_(other[name])
        call["output"].zero_()
        graph.replay()
        assert bits(call["output"]) == after(oracles.q_rope_store, call)
