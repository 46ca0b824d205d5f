"""Wrong and differently written implementations of `wo_a_mxfp8` and of its quantiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.engine.spec import Mutant, Variant
from draftproof.kernels import wo_a_mxfp8 as kernels
from draftproof.kernels.wo_a_mxfp8 import Mxfp8SwizzledInput, check_arguments, check_partials

SPLITS = 8
BLOCK = 32


class Pipeline:
    """A correct projection, one method a step; each mutant overrides the step that it gets wrong.

    Values are float32 tensors, codes int64.
    """

    def project(self, x: Tensor, weight: Tensor) -> Mxfp8SwizzledInput:
        self.check(x, weight)
        return self.quantise(self.partials(x, weight))

    def quantize_partials(self, partials: Tensor) -> Mxfp8SwizzledInput:
        self.check_partials(partials)
        return self.quantise(partials)

    def check(self, x: Any, weight: Any) -> None:
        check_arguments(x, weight)

    def check_partials(self, partials: Any) -> None:
        check_partials(partials)

    def partials(self, x: Tensor, weight: Tensor) -> Tensor:
        rows, groups, depth = x.shape
        x, weight = self.inputs(x, weight)
        split_x = x.double().reshape(rows, groups, SPLITS, depth // SPLITS)
        split_weight = weight.double().reshape(groups, -1, SPLITS, depth // SPLITS)
        return torch.einsum("tgsd,grsd->stgr", split_x, split_weight).float()

    def inputs(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x, weight

    def quantise(self, partials: Tensor) -> Mxfp8SwizzledInput:
        rows, blocks = partials.shape[1], partials.shape[2] * partials.shape[3] // BLOCK
        y = self.narrow(self.reduce(partials)).reshape(rows, blocks, BLOCK)
        code = self.code(self.amax(y))
        data = self.encode(self.scale(y, self.multiplier(code)))
        return Mxfp8SwizzledInput(
            self.data(data.reshape(rows, y.shape[1] * BLOCK)).view(torch.float8_e4m3fn),
            self.swizzle(self.emitted(code)),
        )

    def reduce(self, partials: Tensor) -> Tensor:
        total = partials[0].clone()
        for partial in partials[1:]:
            total += partial
        return total

    def narrow(self, total: Tensor) -> Tensor:
        """Round to bf16, by integers: nothing here relies on a library's conversion."""
        bits = total.contiguous().view(torch.int32).long() & 0xFFFFFFFF
        upper = self.upper_half(bits)
        wide = upper << 16
        wide = torch.where(wide >= 1 << 31, wide - (1 << 32), wide).int().view(torch.float32)
        return torch.where(total.isnan(), torch.nan, wide)

    def upper_half(self, bits: Tensor) -> Tensor:
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16

    def amax(self, y: Tensor) -> Tensor:
        return torch.where(y.isnan(), 0.0, y.abs()).amax(-1)

    def code(self, amax: Tensor) -> Tensor:
        bits = self.scaled_amax(amax).view(torch.int32).long()
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        code = (exponent + self.rounds_up(exponent, mantissa)).clamp(max=254)
        return torch.where(bits > 0, code, 0)

    def scaled_amax(self, amax: Tensor) -> Tensor:
        return amax * torch.tensor(1.0 / 448.0, dtype=torch.float32, device=amax.device)

    def rounds_up(self, exponent: Tensor, mantissa: Tensor) -> Tensor:
        return torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0).long()

    def multiplier(self, code: Tensor) -> Tensor:
        value = ((254 - code) << 23).int().view(torch.float32)
        return torch.where(code == 0, 0.0, value)[..., None]

    def scale(self, y: Tensor, multiplier: Tensor) -> Tensor:
        return torch.where(y.isinf(), y, y * multiplier)

    def encode(self, scaled: Tensor) -> Tensor:
        """E4M3 by counting steps in float64, which holds them all."""
        wide = scaled.double()
        magnitude = self.saturate(wide.abs())
        _, exponent = torch.frexp(magnitude.nan_to_num(1.0))
        step = torch.exp2((exponent.double() - 1).clamp(min=-6.0) - 3)
        rounded = self.to_steps(magnitude / step) * step
        table = self.grid(scaled.device)
        code = torch.searchsorted(table, rounded.nan_to_num(0.0).contiguous())
        code = code | (torch.signbit(scaled).long() << 7)
        return torch.where(scaled.isnan(), self.nan_byte(), code).to(torch.uint8)

    def grid(self, device: torch.device) -> Tensor:
        code = torch.arange(127, device=device)
        exponent, mantissa = (code >> 3).double(), (code & 7).double()
        normal = (8 + mantissa) * torch.exp2(exponent - 10)
        return torch.where(code < 8, mantissa * 2.0**-9, normal)

    def saturate(self, magnitude: Tensor) -> Tensor:
        return magnitude.clamp(max=448.0)

    def to_steps(self, steps: Tensor) -> Tensor:
        return torch.round(steps)

    def nan_byte(self) -> int:
        return 0x7F

    def data(self, data: Tensor) -> Tensor:
        return data

    def emitted(self, code: Tensor) -> Tensor:
        return code

    def swizzle(self, code: Tensor) -> Tensor:
        rows, groups = code.shape
        row_tiles, group_tiles = -(-rows // 128), -(-groups // 4)
        padded = self.padded(code, row_tiles * 128, group_tiles * 4)
        # A row's number within its tile is quarter * 32 + line; memory runs line, quarter, group.
        tiles = padded.reshape(row_tiles, 4, 32, group_tiles, 4)
        return tiles.permute(0, 3, 2, 1, 4).reshape(-1).to(torch.uint8).contiguous()

    def padded(self, code: Tensor, rows: int, groups: int) -> Tensor:
        padded = code.new_zeros(rows, groups)
        padded[: code.shape[0], : code.shape[1]] = code
        return padded


class ScaleRoundedDown(Pipeline):
    def rounds_up(self, exponent: Tensor, mantissa: Tensor) -> Tensor:
        return torch.zeros_like(exponent)


class ScaleRoundedToNearest(Pipeline):
    def rounds_up(self, exponent: Tensor, mantissa: Tensor) -> Tensor:
        return (mantissa >= 0x400000).long()


class ScaleThroughBf16(Pipeline):
    def scaled_amax(self, amax: Tensor) -> Tensor:
        return super().scaled_amax(amax).bfloat16().float()


class ScaleFromTheReciprocalOf512(Pipeline):
    def scaled_amax(self, amax: Tensor) -> Tensor:
        return amax / 512.0


class SubnormalScaleFlushed(Pipeline):
    def rounds_up(self, exponent: Tensor, mantissa: Tensor) -> Tensor:
        return torch.where(exponent == 0, 0, super().rounds_up(exponent, mantissa))


class SubnormalScaleAlwaysRoundedUp(Pipeline):
    def rounds_up(self, exponent: Tensor, mantissa: Tensor) -> Tensor:
        return (mantissa > 0).long()


class ZeroCodeMultiplies(Pipeline):
    def multiplier(self, code: Tensor) -> Tensor:
        return ((254 - code) << 23).int().view(torch.float32)[..., None]


class SwizzleWithLogicalWidth(Pipeline):
    def swizzle(self, code: Tensor) -> Tensor:
        rows, groups = code.shape
        r = torch.arange(rows, device=code.device)[:, None]
        g = torch.arange(groups, device=code.device)[None, :]
        # Tiles are placed groups * 128 bytes apart by row, where they are padded to whole words.
        place = (r // 128) * groups * 128 + (g // 4) * 512
        place = place + (r % 32) * 16 + (r % 128 // 32) * 4 + g % 4
        out = torch.zeros(
            -(-rows // 128) * -(-groups // 4) * 512, dtype=torch.uint8, device=code.device
        )
        out[place] = code.to(torch.uint8)
        return out


class ScalesLeftPlain(Pipeline):
    def swizzle(self, code: Tensor) -> Tensor:
        rows, groups = code.shape
        return (
            self.padded(code, -(-rows // 128) * 128, -(-groups // 4) * 4)
            .reshape(-1)
            .to(torch.uint8)
        )


class RowsSwapped(Pipeline):
    def swizzle(self, code: Tensor) -> Tensor:
        return super().swizzle(
            torch.cat([code[1:2], code[:1], code[2:]]) if len(code) > 1 else code
        )


class QuartersTransposed(Pipeline):
    """Row r of a tile is taken for line r // 4 of quarter r % 4."""

    def swizzle(self, code: Tensor) -> Tensor:
        rows, groups = code.shape
        row_tiles, group_tiles = -(-rows // 128), -(-groups // 4)
        tiles = self.padded(code, row_tiles * 128, group_tiles * 4)
        tiles = tiles.reshape(row_tiles, 32, 4, group_tiles, 4)
        return tiles.permute(0, 3, 1, 2, 4).reshape(-1).to(torch.uint8).contiguous()


class PaddingLeft(Pipeline):
    """Scale bytes without a block keep what the buffer held."""

    def swizzle(self, code: Tensor) -> Tensor:
        wanted = super().swizzle(code)
        there = super().swizzle(torch.ones_like(code)) > 0
        return torch.where(there, wanted, torch.empty_like(wanted))


class PaddingRepeatsTheLastRow(Pipeline):
    def padded(self, code: Tensor, rows: int, groups: int) -> Tensor:
        padded = super().padded(code, rows, groups)
        if len(code):
            padded[len(code) :] = padded[len(code) - 1]
        return padded


class PaddingOfOnes(Pipeline):
    """Groups that are missing in the last tile get the scale of 1."""

    def padded(self, code: Tensor, rows: int, groups: int) -> Tensor:
        padded = super().padded(code, rows, groups)
        padded[: len(code), code.shape[1] :] = 127
        return padded


class SumFromTheLastSplit(Pipeline):
    def reduce(self, partials: Tensor) -> Tensor:
        return super().reduce(partials.flip(0))


class SumInPairs(Pipeline):
    def reduce(self, partials: Tensor) -> Tensor:
        while len(partials) > 1:
            even, odd = partials[::2], partials[1::2]
            both = even[: len(odd)] + odd
            partials = torch.cat([both, even[len(odd) :]])
        return partials[0]


class SumInFloat64(Pipeline):
    def reduce(self, partials: Tensor) -> Tensor:
        return partials.double().sum(0).float()


class SumStartsFromZero(Pipeline):
    def reduce(self, partials: Tensor) -> Tensor:
        return super().reduce(torch.cat([torch.zeros_like(partials[:1]), partials]))


class LastSplitLost(Pipeline):
    def reduce(self, partials: Tensor) -> Tensor:
        return super().reduce(partials[: max(1, len(partials) - 1)])


class Bf16StepLeftOut(Pipeline):
    def narrow(self, total: Tensor) -> Tensor:
        return total


class Bf16Truncated(Pipeline):
    def upper_half(self, bits: Tensor) -> Tensor:
        return bits >> 16


class Bf16TiesAway(Pipeline):
    def upper_half(self, bits: Tensor) -> Tensor:
        return (bits + 0x8000) >> 16


class NanLaundered(Pipeline):
    def scale(self, y: Tensor, multiplier: Tensor) -> Tensor:
        return super().scale(y, multiplier).nan_to_num(-448.0, torch.inf, -torch.inf)


class NanSpreads(Pipeline):
    """A NaN takes part in the maximum, and its block becomes NaN."""

    def quantise(self, partials: Tensor) -> Mxfp8SwizzledInput:
        out = super().quantise(partials)
        blocks = out.data.shape[1] // BLOCK
        y = self.narrow(self.reduce(partials)).reshape(partials.shape[1], blocks, BLOCK)
        nan = y.isnan().any(-1, keepdim=True).expand(y.shape).reshape(out.data.shape)
        out.data.view(torch.uint8)[nan] = 0x7F
        return out


class InfinityTimesZero(Pipeline):
    def scale(self, y: Tensor, multiplier: Tensor) -> Tensor:
        return y * multiplier


class InfinityHasNoPart(Pipeline):
    """Infinities are left out of the maximum, as NaN is."""

    def amax(self, y: Tensor) -> Tensor:
        return super().amax(torch.where(y.isinf(), torch.nan, y))


class SaturationLost(Pipeline):
    """Infinities give NaN, as a cast without saturation does."""

    def encode(self, scaled: Tensor) -> Tensor:
        return super().encode(torch.where(scaled.abs() > 464.0, torch.nan, scaled))


class DataTruncated(Pipeline):
    def to_steps(self, steps: Tensor) -> Tensor:
        return steps.floor()


class DataTiesAway(Pipeline):
    def to_steps(self, steps: Tensor) -> Tensor:
        return (steps + 0.5).floor()


class SubnormalDataFlushed(Pipeline):
    def encode(self, scaled: Tensor) -> Tensor:
        code = super().encode(scaled)
        return torch.where((code & 0x7F) < 8, code & 0x80, code)


class SignOfZeroLost(Pipeline):
    def encode(self, scaled: Tensor) -> Tensor:
        code = super().encode(scaled)
        return torch.where(code == 0x80, 0, code)


class AmaxOverTheRow(Pipeline):
    def amax(self, y: Tensor) -> Tensor:
        return super().amax(y).amax(-1, keepdim=True).expand(y.shape[:2]).contiguous()


class AmaxWithoutSign(Pipeline):
    """The maximum is that of the values, not of the magnitudes."""

    def amax(self, y: Tensor) -> Tensor:
        return torch.where(y.isnan(), 0.0, y).amax(-1).clamp(min=0.0)


class RowStrideTakenForPacked(Pipeline):
    def inputs(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        step = x.shape[1] * x.shape[2]
        return x.as_strided(x.shape, (step, x.shape[2], 1)), weight


class GroupsShareAWeight(Pipeline):
    def inputs(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x, weight[:1].expand_as(weight)


class SubnormalInputsFlushed(Pipeline):
    def inputs(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.where(weight.abs() < 2.0**-126, 0, weight)


class LastColumnOfASplitLost(Pipeline):
    def inputs(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        x[..., x.shape[2] // SPLITS - 1 :: x.shape[2] // SPLITS] = 0
        return x, weight


class PartialsInBf16(Pipeline):
    def partials(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().partials(x, weight).bfloat16().float()


class SumOverAllOfD(Pipeline):
    """One sum over D, where the rule adds eight in their order."""

    def partials(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().partials(x, weight).double().sum(0, keepdim=True).float()


class ProjectionKept(Pipeline):
    """What the first call with an address gave is given again."""

    def __init__(self) -> None:
        self.kept: dict[Any, Mxfp8SwizzledInput] = {}

    def project(self, x: Tensor, weight: Tensor) -> Mxfp8SwizzledInput:
        self.check(x, weight)
        key = (x.data_ptr(), weight.data_ptr(), tuple(x.shape), tuple(weight.shape))
        if key not in self.kept:
            self.kept[key] = self.quantise(self.partials(x, weight))
        return Mxfp8SwizzledInput(*(tensor.clone() for tensor in self.kept[key]))


class NineRowsTaken(Pipeline):
    def check(self, x: Any, weight: Any) -> None:
        few = x[:8] if isinstance(x, Tensor) and x.dim() == 3 else x
        super().check(few, weight)


class AnyTypeTaken(Pipeline):
    def check(self, x: Any, weight: Any) -> None:
        if isinstance(weight, Tensor) and weight.is_floating_point():
            weight = weight.bfloat16()
        super().check(x, weight)


def _project(name: str, fault: str, kind: type[Pipeline], *checks: str) -> Mutant:
    return Mutant(name, "wo_a_mxfp8", fault, checks or ("eager",), kind().project)


def _quantise(name: str, fault: str, kind: type[Pipeline], *checks: str) -> Mutant:
    return Mutant(
        f"quantise_{name}",
        "quantize_partials",
        fault,
        checks or ("eager",),
        kind().quantize_partials,
    )


def _both(name: str, fault: str, kind: type[Pipeline], *checks: str) -> list[Mutant]:
    return [_project(name, fault, kind, *checks), _quantise(name, fault, kind, *checks)]


MUTANTS = [
    *_both("scale_rounded_down", "The scale's exponent is not rounded up.", ScaleRoundedDown),
    *_both("scale_rounded_to_nearest", "The scale is rounded to nearest.", ScaleRoundedToNearest),
    *_both("scale_through_bf16", "amax / 448 is rounded to bf16 first.", ScaleThroughBf16),
    *_both("scale_of_512", "The scale is amax / 512.", ScaleFromTheReciprocalOf512),
    *_both("subnormal_scale_flushed", "A subnormal scale is code 0.", SubnormalScaleFlushed),
    *_both(
        "subnormal_scale_rounded_up",
        "A subnormal scale up to 2^-127 becomes code 1.",
        SubnormalScaleAlwaysRoundedUp,
    ),
    *_both(
        "zero_code_multiplies", "Under code 0 elements are scaled by 2^127.", ZeroCodeMultiplies
    ),
    _quantise(
        "swizzle_with_logical_width",
        "The second tile of rows stands where the unpadded first one ends.",
        SwizzleWithLogicalWidth,
    ),
    *_both("scales_left_plain", "Scales are padded, and not swizzled.", ScalesLeftPlain),
    *_both("rows_swapped", "The scales of the first two rows are exchanged.", RowsSwapped),
    *_both("quarters_transposed", "Rows 4n to 4n + 3 share a line.", QuartersTransposed),
    *_both("padding_left", "Padding is not written.", PaddingLeft, "poison", "eager"),
    *_both("padding_repeats_a_row", "Padding rows repeat the last one.", PaddingRepeatsTheLastRow),
    *_both("padding_of_ones", "Padding groups get code 127.", PaddingOfOnes),
    *_both("sum_from_the_last_split", "Splits are added backwards.", SumFromTheLastSplit),
    *_both("sum_in_pairs", "Splits are added as a tree.", SumInPairs),
    *_both("sum_in_float64", "Splits are added in float64.", SumInFloat64),
    _quantise("sum_starts_from_zero", "-0 is added to +0.", SumStartsFromZero),
    *_both("last_split_lost", "The last split is left out.", LastSplitLost),
    *_both("bf16_step_left_out", "fp32 sums are quantised.", Bf16StepLeftOut),
    *_both("bf16_truncated", "Sums are truncated to bf16.", Bf16Truncated),
    _quantise("bf16_ties_away", "Ties of bf16 go away from zero.", Bf16TiesAway),
    *_both("nan_laundered", "NaN becomes -448.", NanLaundered),
    *_both("nan_spreads", "A NaN makes its whole block NaN.", NanSpreads),
    *_both("infinity_times_zero", "An infinity times the multiplier 0 is NaN.", InfinityTimesZero),
    *_both("infinity_has_no_part", "Infinities are left out of amax.", InfinityHasNoPart),
    *_both("saturation_lost", "What exceeds 464 becomes NaN.", SaturationLost),
    *_both("data_truncated", "Data are truncated to E4M3.", DataTruncated),
    *_both("data_ties_away", "Ties of E4M3 go away from zero.", DataTiesAway),
    *_both("subnormal_data_flushed", "E4M3 subnormals become 0.", SubnormalDataFlushed),
    *_both("sign_of_zero_lost", "-0 becomes +0.", SignOfZeroLost),
    *_both("amax_over_the_row", "All blocks of a row share a scale.", AmaxOverTheRow),
    *_both("amax_without_sign", "Negative values take no part in amax.", AmaxWithoutSign),
    _project("rows_taken_for_packed", "The row stride of x is ignored.", RowStrideTakenForPacked),
    _project("groups_share_a_weight", "Every group takes the first weight.", GroupsShareAWeight),
    _project("subnormal_weights_flushed", "Subnormal weights count as 0.", SubnormalInputsFlushed),
    _project("last_column_lost", "The last column of a split is left out.", LastColumnOfASplitLost),
    _project("partials_in_bf16", "Partial sums are rounded to bf16.", PartialsInBf16),
    _project("sum_over_all_of_d", "There is one sum, over all of D.", SumOverAllOfD),
    _project("projection_kept", "Results are kept by address.", ProjectionKept, "repeat", "graph"),
    _project("nine_rows_taken", "More than eight rows are computed.", NineRowsTaken, "invalid"),
    _project("any_type_taken", "A weight of any type is cast.", AnyTypeTaken, "invalid"),
]


class OneRowAtATime(Pipeline):
    """Every row alone, its sums in fp32 from the last column of a split to the first."""

    def partials(self, x: Tensor, weight: Tensor) -> Tensor:
        rows, groups, depth = x.shape
        length = depth // SPLITS
        flat = weight.float().reshape(groups, weight.shape[1], SPLITS, length)
        out = torch.empty(SPLITS, rows, groups, weight.shape[1], device=x.device)
        for t in range(rows):
            terms = x[t].float().reshape(groups, 1, SPLITS, length) * flat
            out[:, t] = terms.flip(-1).sum(-1).permute(2, 0, 1)
        return out


def _kernels_of_few_columns(x: Tensor, weight: Tensor) -> Mxfp8SwizzledInput:
    """Our partial sums, quantised by the parts in torch."""
    return Pipeline().quantise(kernels.wo_a_partials(x, weight))


def _nan_with_sign(function: Callable[..., Mxfp8SwizzledInput]) -> Callable[..., Any]:
    def emitted(*args: Tensor, **kwargs: Tensor) -> Mxfp8SwizzledInput:
        data, scales = function(*args, **kwargs)
        data = data.view(torch.uint8)
        data = torch.where(data == 0x7F, 0xFF, data).to(torch.uint8)
        return Mxfp8SwizzledInput(data.view(torch.float8_e4m3fn), scales)

    return emitted


VARIANTS = [
    Variant(
        "rows_alone",
        "wo_a_mxfp8",
        "each row alone, its columns in another order, and steps of E4M3 counted in float64",
        OneRowAtATime().project,
    ),
    Variant(
        "sums_in_float64",
        "wo_a_mxfp8",
        "partial sums in float64, rounded once",
        Pipeline().project,
    ),
    Variant(
        "quantised_in_torch",
        "wo_a_mxfp8",
        "the project's partial sums, quantised in plain torch",
        _kernels_of_few_columns,
    ),
    Variant(
        "steps_counted",
        "quantize_partials",
        "steps of E4M3 counted in float64, scales permuted as a tensor of five dimensions",
        Pipeline().quantize_partials,
    ),
    Variant(
        "nan_with_sign",
        "quantize_partials",
        "NaN is the byte 0xFF",
        _nan_with_sign(Pipeline().quantize_partials),
    ),
]
