"""Wrong implementations of `q_rope_store`, one fault each, and right ones written differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.conformance.engine.spec import Mutant, Variant
from draftproof.kernels.numerics import fma32 as fma32_in_triton
from draftproof.kernels.numerics import round_bf16 as round_bf16_in_triton
from draftproof.kernels.numerics import widen_bf16 as widen_bf16_in_triton
from draftproof.kernels.q_rope_store import q_rope_store_baseline
from draftproof.oracles.numerics import fma32, round_bf16, widen_bf16
from draftproof.oracles.q_rope_store import validate

OP = "q_rope_store"
HEAD_DIM = 512
ROPE_DIM = 64
COPIED = HEAD_DIM - ROPE_DIM
SMALLEST_NORMAL = 2.0**-126


# ---------------------------------------------------------------- one right way, in parts


class Store:
    """A correct implementation, one method a step; each mutant overrides the one it gets wrong."""

    def __call__(self, q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
        self.check(q, output, freqs_cis, positions)
        if q.numel() == 0:
            return
        source = self.read(q)
        turns = self.turns(freqs_cis, positions)
        x, y = self.pairs(source)
        even, odd = self.rotate(x, y, turns[:, None, :, 0], turns[:, None, :, 1])
        tail = self.tail(self.rounded(even), self.rounded(odd), source, positions)
        self.write(output, self.copied(source), tail)

    def check(self, *arguments: Tensor) -> None:
        validate(*arguments)

    def read(self, q: Tensor) -> Tensor:
        return q

    def turns(self, freqs_cis: Tensor, positions: Tensor) -> Tensor:
        """c and s of every query's pairs, [T, 32, 2]."""
        return torch.view_as_real(freqs_cis)[self.rows(positions, len(freqs_cis))]

    def rows(self, positions: Tensor, max_pos: int) -> Tensor:
        return positions.long()

    def pairs(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """x and y of every pair as float32, [T, H, 32] each."""
        tail = widen_bf16(q[..., COPIED:])
        return tail[..., 0::2], tail[..., 1::2]

    def rotate(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return self.fma(x, c, -self.product(y, s)), self.fma(x, s, self.product(y, c))

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def fma(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return fma32(a, b, c)

    def rounded(self, x: Tensor) -> Tensor:
        return round_bf16(x)

    def tail(self, even: Tensor, odd: Tensor, source: Tensor, positions: Tensor) -> Tensor:
        return torch.stack((even, odd), dim=-1).flatten(-2)

    def copied(self, q: Tensor) -> Tensor:
        """Bit patterns of the elements that are copied."""
        return q[..., :COPIED].view(torch.int16)

    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        output[..., :COPIED].view(torch.int16).copy_(copied)
        output[..., COPIED:] = tail


# ---------------------------------------------------------------- wrong roundings


class TwoRoundings(Store):
    def fma(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a * b + c


class OtherOperandOrder(Store):
    def rotate(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return fma32(-y, s, x * c), fma32(y, c, x * s)


class OtherOperandOrderInTheOddOne(Store):
    def rotate(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(x, y, c, s)[0], fma32(y, c, x * s)


class OneRounding(Store):
    def rotate(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x, y, c, s = x.double(), y.double(), c.double(), s.double()
        return (x * c - y * s).float(), (x * s + y * c).float()


class StraightToBf16(Store):
    def fma(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a.double() * b.double() + c.double()


class ProductRoundedToBf16(Store):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return widen_bf16(round_bf16(a * b))


class ProductTruncated(Store):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        rounded, exact = a * b, a.double() * b.double()
        beyond = torch.isfinite(rounded) & (rounded.double().abs() > exact.abs())
        return (rounded.view(torch.int32) - beyond.int()).view(torch.float32)


class RotationInBf16(Store):
    def turns(self, freqs_cis: Tensor, positions: Tensor) -> Tensor:
        return widen_bf16(round_bf16(super().turns(freqs_cis, positions).contiguous()))


class Truncated(Store):
    def rounded(self, x: Tensor) -> Tensor:
        cut = (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
        return torch.where(torch.isnan(x), round_bf16(x), cut)


class HalfAwayFromZero(Store):
    def rounded(self, x: Tensor) -> Tensor:
        up = ((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        return torch.where(torch.isfinite(x), up, round_bf16(x))


class SubnormalsFlushed(Store):
    """What a compiler's fast mode does to float32 arithmetic."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return self.flushed(self.flushed(a) * self.flushed(b))

    def fma(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self.flushed(fma32(self.flushed(a), self.flushed(b), self.flushed(c)))

    def flushed(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() < SMALLEST_NORMAL, x * 0.0, x)


class ProductFlushed(Store):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        exact = a * b
        return torch.where(exact.abs() < SMALLEST_NORMAL, exact * 0.0, exact)


class DifferenceTurnedRound(Store):
    """-(y * s - x * c) is the same number, but where it is zero."""

    def rotate(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return -fma32(-x, c, y * s), super().rotate(x, y, c, s)[1]


class NegativeZeroLost(Store):
    def fma(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return fma32(a, b, c) + 0.0


class InfinitiesClamped(Store):
    def rounded(self, x: Tensor) -> Tensor:
        largest = torch.finfo(torch.bfloat16).max
        return round_bf16(torch.where(torch.isinf(x), x.clamp(-largest, largest), x))


class NanBecomesZero(Store):
    def rounded(self, x: Tensor) -> Tensor:
        return round_bf16(torch.where(torch.isnan(x), 0.0, x))


# ---------------------------------------------------------------- wrong pairs, wrong rotations


class HalvesArePaired(Store):
    def pairs(self, q: Tensor) -> tuple[Tensor, Tensor]:
        tail = widen_bf16(q[..., COPIED:])
        return tail[..., : ROPE_DIM // 2], tail[..., ROPE_DIM // 2 :]

    def tail(self, even: Tensor, odd: Tensor, source: Tensor, positions: Tensor) -> Tensor:
        return torch.cat((even, odd), dim=-1)


class TurnedBackwards(Store):
    def turns(self, freqs_cis: Tensor, positions: Tensor) -> Tensor:
        turns = super().turns(freqs_cis, positions)
        return torch.stack((turns[..., 0], -turns[..., 1]), dim=-1)


class PartsSwapped(Store):
    def turns(self, freqs_cis: Tensor, positions: Tensor) -> Tensor:
        return super().turns(freqs_cis, positions).flip(-1)


class LastPairLeft(Store):
    def tail(self, even: Tensor, odd: Tensor, source: Tensor, positions: Tensor) -> Tensor:
        tail = super().tail(even, odd, source, positions)
        tail[..., -2:] = source[..., -2:]
        return tail


class PositionZeroIsCopied(Store):
    """A rotation by nothing is left out, which keeps -0 and inf as no rotation does."""

    def tail(self, even: Tensor, odd: Tensor, source: Tensor, positions: Tensor) -> Tensor:
        tail = super().tail(even, odd, source, positions)
        return torch.where((positions == 0)[:, None, None], source[..., COPIED:], tail)


class RowsAreTakenForPositions(Store):
    def rows(self, positions: Tensor, max_pos: int) -> Tensor:
        return torch.arange(len(positions), device=positions.device) % max_pos


class FirstPositionServesAll(Store):
    def rows(self, positions: Tensor, max_pos: int) -> Tensor:
        return positions[:1].long().expand(positions.shape)


class LastRotationIsNeverUsed(Store):
    def rows(self, positions: Tensor, max_pos: int) -> Tensor:
        return positions.long().clamp(max=max(max_pos - 2, 0))


class PositionsHave11Bits(Store):
    def rows(self, positions: Tensor, max_pos: int) -> Tensor:
        return positions.long() & 0x7FF


# ---------------------------------------------------------------- wrong copies, wrong places


class CopiedThroughFloat32(Store):
    def copied(self, q: Tensor) -> Tensor:
        return round_bf16(widen_bf16(q[..., :COPIED])).view(torch.int16)


class CopyLosesNegativeZero(Store):
    def copied(self, q: Tensor) -> Tensor:
        patterns = q[..., :COPIED].view(torch.int16)
        return torch.where(patterns == -(2**15), 0, patterns)


class OnlyTheTailIsWritten(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        output[..., COPIED:] = tail


class OnlyTheHeadIsWritten(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        output[..., :COPIED].view(torch.int16).copy_(copied)


class OneElementTooFewCopied(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        output[..., : COPIED - 1].view(torch.int16).copy_(copied[..., :-1])
        output[..., COPIED:] = tail


class HeadsBeyond16Skipped(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        super().write(output[:, :16], copied[:, :16], tail[:, :16])


class HeadsBeyond32Skipped(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        super().write(output[:, :32], copied[:, :32], tail[:, :32])


class RowsBeyond4096Skipped(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        super().write(output[:4096], copied[:4096], tail[:4096])


class OutputRowsTakenForPacked(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        heads = output.shape[1]
        packed = output.as_strided(output.shape, (heads * HEAD_DIM, HEAD_DIM, 1))
        super().write(packed, copied, tail)


class QRowsTakenForPacked(Store):
    def read(self, q: Tensor) -> Tensor:
        return q.as_strided(q.shape, (q.shape[1] * HEAD_DIM, HEAD_DIM, 1))


class PaddingHeadsZeroed(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        rows, heads, _ = output.shape
        stride = output.stride(0)
        gap = stride - heads * HEAD_DIM
        if rows > 1 and 0 < gap < 2**20:
            start = output.storage_offset() + heads * HEAD_DIM
            output.as_strided((rows - 1, gap), (stride, 1), start).zero_()
        super().write(output, copied, tail)


class OutputOffsetsHave32Bits(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        rows = min(len(output), 1 + (2**31 - 1) // max(output.stride(0), 1))
        super().write(output[:rows], copied[:rows], tail[:rows])


class QOffsetsHave32Bits(Store):
    def read(self, q: Tensor) -> Tensor:
        # A row whose offset does not fit reads the first one, not whatever memory.
        rows = torch.arange(len(q), device=q.device)
        return q[torch.where(rows * q.stride(0) < 2**31, rows, 0)]


class RotatedInPlace(Store):
    def write(self, output: Tensor, copied: Tensor, tail: Tensor) -> None:
        self.q[..., COPIED:] = tail
        super().write(output, copied, tail)

    def read(self, q: Tensor) -> Tensor:
        self.q = q
        return q


# ---------------------------------------------------------------- wrong checks, wrong memory


class OverlapNotChecked(Store):
    def check(self, q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
        beside = torch.empty_like(output) if output.numel() else output
        validate(q, beside, freqs_cis, positions)


class ExtentsTakenForOverlap(Store):
    def check(self, q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
        validate(q, output, freqs_cis, positions)
        ends = [
            tensor.data_ptr() + 2 * ((tensor.shape[0] - 1) * tensor.stride(0) + tensor[0].numel())
            for tensor in (q, output)
            if tensor.numel()
        ]
        if ends and q.data_ptr() < ends[1] and output.data_ptr() < ends[0]:
            raise ValueError("output lies where q does")


class EmptyCallsNotChecked(Store):
    def check(self, q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
        if q.numel():
            validate(q, output, freqs_cis, positions)


class StridesOfOneRowChecked(Store):
    def check(self, q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
        validate(q, output, freqs_cis, positions)
        if min(q.stride(0), output.stride(0)) < q.shape[1] * HEAD_DIM:
            raise ValueError("the row stride is too small")


class AnyHeadStrideTaken(Store):
    def check(self, q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
        q, output = (
            tensor.contiguous() if tensor.dim() == 3 and tensor.stride(-1) == 1 else tensor
            for tensor in (q, output)
        )
        validate(q, output, freqs_cis, positions)


class AnyPositionTypeTaken(Store):
    def check(self, q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
        validate(q, output, freqs_cis, positions.long())


class WritesBeforeItChecks(Store):
    def check(self, q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
        if output.numel() and not output.is_meta:
            output.view(-1)[:1].zero_() if output.is_contiguous() else output[:1].zero_()
        validate(q, output, freqs_cis, positions)


class RotationsKeptByAddress(Store):
    """Looks up the rotations of some positions once."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], Tensor] = {}

    def turns(self, freqs_cis: Tensor, positions: Tensor) -> Tensor:
        key = (freqs_cis.data_ptr(), positions.data_ptr(), positions.shape, positions.dtype)
        if key not in self.kept:
            self.kept[key] = super().turns(freqs_cis, positions)
        return self.kept[key]


_positions: dict[int, Tensor] = {}


def _capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _graph_reads_stale_positions(q, output, freqs_cis, positions):
    if _capturing(positions):
        positions = _positions.get(positions.data_ptr(), positions)
    elif not positions.is_meta and positions.numel():
        _positions[positions.data_ptr()] = positions.clone()
    q_rope_store_baseline(q, output, freqs_cis, positions)


def _graph_does_nothing(q, output, freqs_cis, positions):
    if not _capturing(q):
        q_rope_store_baseline(q, output, freqs_cis, positions)


# ---------------------------------------------------------------- wrong kernels


@triton.jit
def _whole_rows_kernel(
    q,
    output,
    freqs,
    positions,
    q_stride,
    output_stride,
    rows,
    heads,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    FAULT: tl.constexpr,
):
    line = tl.arange(0, ROWS * HEADS)[:, None]
    row = tl.program_id(0).to(tl.int64) * ROWS + line // HEADS
    head = line % HEADS
    position = tl.load(positions + row, mask=row < rows, other=0).to(tl.int64)
    if FAULT == "next_position_read":
        # One past the end for the last row; elsewhere simply another position.
        position = tl.load(positions + row + 1, mask=row < rows, other=0).to(tl.int64) & 3
    there = (row < rows) & (head < heads)
    if FAULT == "heads_rounded_up":
        there = row < rows
    element = tl.arange(0, 512)[None, :]
    source = q + row * q_stride + head * 512
    target = output + row * output_stride + head * 512
    block = tl.load(source + element, mask=there & (head < heads) & (element < 448), other=0.0)
    tl.store(target + element, block, mask=there & (element < 448))
    tail = tl.arange(0, 64)[None, :]
    x, y = tl.split(
        tl.load(source + 448 + tail, mask=there & (head < heads) & (tail >= 0), other=0.0).reshape(
            ROWS * HEADS, 32, 2
        )
    )
    pair = tl.arange(0, 32)[None, :] + tl.zeros([ROWS * HEADS, 1], tl.int32)
    c = tl.load(freqs + position * 64 + 2 * pair)
    s = tl.load(freqs + position * 64 + 2 * pair + 1)
    x, y = widen_bf16_in_triton(x), widen_bf16_in_triton(y)
    even = round_bf16_in_triton(fma32_in_triton(x, c, -(y * s)))
    odd = round_bf16_in_triton(fma32_in_triton(x, s, y * c))
    pairs = target + 448 + 2 * pair
    rotated = there & (pair >= 0)
    tl.store(pairs, even, mask=rotated)
    tl.store(pairs + 1, odd, mask=rotated)


def _in_triton(fault: str) -> Callable[..., None]:
    def function(q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
        validate(q, output, freqs_cis, positions)
        rows, heads, _ = q.shape
        if not q.numel():
            return
        # A row a program on a GPU; many under the interpreter, whose programs are slow to begin.
        block = 1 if q.is_cuda else 16
        _whole_rows_kernel[(triton.cdiv(rows, block),)](
            q,
            output,
            torch.view_as_real(freqs_cis),
            positions,
            q.stride(0),
            output.stride(0),
            rows,
            heads,
            block,
            triton.next_power_of_2(heads),
            fault,
            num_warps=4,
            enable_fp_fusion=False,
        )

    return function


def _mutant(name: str, fault: str, function: Callable[..., None], *checks: str) -> Mutant:
    return Mutant(name, OP, fault, checks or ("eager",), function)


MUTANTS = [
    _mutant("two_roundings", "Both products are rounded before they are added.", TwoRoundings()),
    _mutant(
        "other_operand_order",
        "The product with x is rounded, and that with y is not.",
        OtherOperandOrder(),
    ),
    _mutant(
        "other_operand_order_in_the_odd_one",
        "The product with x is rounded in the odd element only.",
        OtherOperandOrderInTheOddOne(),
    ),
    _mutant("one_rounding", "No product is rounded before they are added.", OneRounding()),
    _mutant("straight_to_bf16", "The sum is rounded to bfloat16 without a stop.", StraightToBf16()),
    _mutant(
        "product_rounded_to_bf16", "The product with y is rounded to bf16.", ProductRoundedToBf16()
    ),
    _mutant("product_truncated", "The product with y is rounded toward zero.", ProductTruncated()),
    _mutant("rotation_in_bf16", "c and s are rounded to bfloat16.", RotationInBf16()),
    _mutant("truncated", "bfloat16 is cut off, not rounded.", Truncated()),
    _mutant("half_away_from_zero", "bfloat16 ties go away from zero.", HalfAwayFromZero()),
    _mutant("subnormals_flushed", "float32 subnormals are zeros.", SubnormalsFlushed()),
    _mutant("product_flushed", "A subnormal product with y is a zero.", ProductFlushed()),
    _mutant(
        "difference_turned_round",
        "The even element is -(y * s - x * c): -0 where both are equal.",
        DifferenceTurnedRound(),
    ),
    _mutant("negative_zero_lost", "A rotated -0 becomes +0.", NegativeZeroLost()),
    _mutant("infinities_clamped", "A rotated infinity becomes finite.", InfinitiesClamped()),
    _mutant("nan_becomes_zero", "A rotated NaN becomes 0.", NanBecomesZero()),
    _mutant("halves_are_paired", "Element i turns with element i + 32.", HalvesArePaired()),
    _mutant("turned_backwards", "s has the other sign.", TurnedBackwards()),
    _mutant("parts_swapped", "c and s are swapped.", PartsSwapped()),
    _mutant("last_pair_left", "The last pair is copied.", LastPairLeft()),
    _mutant(
        "position_zero_is_copied", "Queries at position 0 are not rotated.", PositionZeroIsCopied()
    ),
    _mutant("rows_taken_for_positions", "Row t turns by rotation t.", RowsAreTakenForPositions()),
    _mutant("first_position_serves_all", "All rows turn as the first.", FirstPositionServesAll()),
    _mutant("last_rotation_never_used", "Positions end one too early.", LastRotationIsNeverUsed()),
    _mutant("positions_have_11_bits", "Positions wrap at 2048.", PositionsHave11Bits()),
    _mutant(
        "copied_through_float32", "The copy rewrites the payloads of NaN.", CopiedThroughFloat32()
    ),
    _mutant("copy_loses_negative_zero", "A copied -0 becomes +0.", CopyLosesNegativeZero()),
    _mutant("only_the_tail_written", "Nothing is copied.", OnlyTheTailIsWritten()),
    _mutant("only_the_copy_written", "The tails are left.", OnlyTheHeadIsWritten()),
    _mutant("one_element_too_few_copied", "Element 447 is left.", OneElementTooFewCopied()),
    _mutant("heads_beyond_16_skipped", "There is room for 16 heads.", HeadsBeyond16Skipped()),
    _mutant("heads_beyond_32_skipped", "There is room for 32 heads.", HeadsBeyond32Skipped()),
    _mutant("rows_beyond_4096_skipped", "There is room for 4096 rows.", RowsBeyond4096Skipped()),
    _mutant(
        "output_rows_taken_for_packed",
        "The output's row stride is ignored.",
        OutputRowsTakenForPacked(),
        "eager",
        "guards",
        "strided",
    ),
    _mutant(
        "q_rows_taken_for_packed",
        "The queries' row stride is ignored.",
        QRowsTakenForPacked(),
        "eager",
        "guards",
        "strided",
    ),
    _mutant(
        "padding_heads_zeroed",
        "The buffer's other heads are cleared.",
        PaddingHeadsZeroed(),
        "guards",
    ),
    _mutant(
        "output_offsets_have_32_bits",
        "A row that lies 2^31 elements on is not written.",
        OutputOffsetsHave32Bits(),
    ),
    _mutant(
        "q_offsets_have_32_bits",
        "A row that lies 2^31 elements on is not the one that is read.",
        QOffsetsHave32Bits(),
    ),
    _mutant("rotated_in_place", "q itself is rotated too.", RotatedInPlace()),
    _mutant("overlap_not_checked", "q and output may share.", OverlapNotChecked(), "invalid"),
    _mutant(
        "extents_taken_for_overlap",
        "Heads that interlock in one buffer are refused.",
        ExtentsTakenForOverlap(),
    ),
    _mutant(
        "empty_calls_not_checked",
        "Arguments of a call without rows are not looked at.",
        EmptyCallsNotChecked(),
        "invalid",
    ),
    _mutant(
        "strides_of_one_row_checked",
        "The stride of a dimension of size 1 must be right.",
        StridesOfOneRowChecked(),
    ),
    _mutant(
        "any_head_stride_taken",
        "Heads need not lie one behind the other.",
        AnyHeadStrideTaken(),
        "invalid",
    ),
    _mutant(
        "any_position_type_taken", "Positions may have any type.", AnyPositionTypeTaken(), "invalid"
    ),
    _mutant(
        "writes_before_checking",
        "A row is cleared before the arguments are checked.",
        WritesBeforeItChecks(),
        "invalid",
    ),
    _mutant(
        "rotations_kept_by_address",
        "The rotations that were first seen at an address are kept.",
        RotationsKeptByAddress(),
        "repeat",
        "graph",
    ),
    _mutant(
        "graph_reads_stale_positions",
        "A graph captures a copy of the positions that was made before.",
        _graph_reads_stale_positions,
        "graph",
    ),
    _mutant(
        "graph_does_nothing",
        "It works when called, but leaves nothing in a captured graph.",
        _graph_does_nothing,
        "graph",
    ),
    _mutant(
        "heads_rounded_up",
        "As many heads are written as the next power of two.",
        _in_triton("heads_rounded_up"),
        "guards",
    ),
    _mutant(
        "next_position_read",
        "Row t turns by the position of row t + 1, which the last row reads behind the end.",
        _in_triton("next_position_read"),
        "guards",
        "eager",
    ),
]


# ---------------------------------------------------------------- right, but different


class AnotherNan(Store):
    def rounded(self, x: Tensor) -> Tensor:
        return torch.where(torch.isnan(x), self.negative_nan(x), round_bf16(x))

    def negative_nan(self, x: Tensor) -> Tensor:
        patterns = torch.full(x.shape, -1, dtype=torch.int16, device=x.device)
        return patterns.view(torch.bfloat16)


def _head_by_head(q: Tensor, output: Tensor, freqs_cis: Tensor, positions: Tensor) -> None:
    validate(q, output, freqs_cis, positions)
    if q.numel() == 0:
        return
    # y * -s is -(y * s) to the bit: rounding does not know the sign.
    c, s = freqs_cis.real[positions.long()], freqs_cis.imag[positions.long()]
    for head in reversed(range(q.shape[1])):
        source, target = q[:, head].view(torch.int16), output[:, head].view(torch.int16)
        tail = source[:, COPIED:].int().unflatten(1, (-1, 2))
        x, y = ((tail[..., part] << 16).view(torch.float32) for part in (0, 1))
        for part, (first, second) in enumerate(((c, y * -s), (s, c * y))):
            bits = round_bf16(fma32(first, x, second)).view(torch.int16)
            target[:, COPIED + part :: 2] = bits
        target[:, :COPIED] = source[:, :COPIED]


VARIANTS = [
    Variant(
        "another_nan", OP, "a NaN in the tail is negative and has a full payload", AnotherNan()
    ),
    Variant(
        "head_by_head",
        OP,
        "walks heads from the last to the first, in integers, operands of each product swapped",
        _head_by_head,
    ),
    Variant(
        "programs_of_whole_rows",
        OP,
        "Triton programs of whole rows whose block spans all heads, tails split as floats",
        _in_triton(""),
    ),
]
