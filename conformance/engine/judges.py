"""How the elements of one output are held against what the oracle wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from draftproof.conformance.engine.calls import patterns
from draftproof.oracles.numerics import encode_e4m3, odd_float32, round_bf16, round_fp16

CHUNK_ELEMENTS = 1 << 26
"""Elements compared at a time, so that a comparison needs little memory beside the tensors."""


@dataclass(frozen=True)
class Look:
    """What a judge may look at.

    Parameters
    ----------
    before : dict
        The call's arguments as they were.
    path : str
        The leaf that is judged.
    wanted, got : Tensor
        The oracle's leaf and the implementation's: same shape, dtype and device.
    wanted_all, got_all : mapping of str to Tensor
        Every leaf by path, so that a late stage can be judged given the earlier ones as emitted.
    """

    before: dict[str, Any]
    path: str
    wanted: Tensor
    got: Tensor
    wanted_all: Mapping[str, Tensor]
    got_all: Mapping[str, Tensor]


class Judge(Protocol):
    """Decides which elements are wrong."""

    def wrong(self, look: Look) -> Tensor:
        """Bool mask of the wrong elements, in the leaf's shape."""

    def wants(self, look: Look, index: tuple[int, ...]) -> str:
        """What would have been right at `index`, for a failure report."""


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size: what a bit pattern comparison compares.

    An element of 16 bytes (complex128) becomes two, in a last dimension of its own.
    """
    return patterns(tensor)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit for bit."""
    return torch.equal(bits(one), bits(other))


def is_nan(tensor: Tensor) -> Tensor:
    """Bool mask of NaNs, False for types that have none."""
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.isnan(tensor)
    return torch.zeros_like(tensor, dtype=torch.bool)


def differing(wanted: Tensor, got: Tensor, *, any_nan: bool = False) -> Tensor:
    """Bool mask of elements whose bit patterns differ, worked out in chunks.

    Parameters
    ----------
    wanted, got : Tensor
        Same shape and dtype.
    any_nan : bool
        Whether a NaN equals every other NaN.
    """
    mask = torch.zeros(wanted.shape, dtype=torch.bool, device=wanted.device)
    if wanted.numel() == 0:
        return mask
    rows = max(1, CHUNK_ELEMENTS // max(1, wanted[0].numel())) if wanted.dim() else 1
    if not wanted.dim():
        wanted, got, mask = wanted[None], got[None], mask[None]
    for start in range(0, wanted.shape[0], rows):
        part = slice(start, start + rows)
        unequal = bits(wanted[part]) != bits(got[part])
        if unequal.dim() > wanted.dim():
            unequal = unequal.any(-1)
        if any_nan and bool(unequal.any()):
            unequal &= ~(is_nan(wanted[part]) & is_nan(got[part]))
        mask[part] = unequal
    return mask


def show(value: Tensor) -> str:
    """One element as value and hex bits: `-inf (0xff800000)`."""
    if value.dtype is torch.bool:
        return str(bool(value)).lower()
    digits = value.element_size() * 2
    width = 4 * digits if digits <= 16 else 64
    pattern = 0
    for word in bits(value.reshape(1).cpu()).flatten().tolist():
        pattern = pattern << width | int(word) & ((1 << width) - 1)
    if value.is_complex():
        number = str(complex(value))
    elif value.is_floating_point():
        number = repr(float(value))
    else:
        number = str(int(value))
    return f"{number} (0x{pattern:0{digits}x})"


@dataclass(frozen=True)
class Bits:
    """Equal bit patterns: +0 and -0 differ.

    Parameters
    ----------
    nan : "any" or "payload"
        "any": a NaN matches any NaN. "payload": NaNs are compared bit for bit too, as they must
        be where an op copies or keeps them.
    """

    nan: Literal["any", "payload"] = "any"

    def wrong(self, look: Look) -> Tensor:
        return differing(look.wanted, look.got, any_nan=self.nan == "any")

    def wants(self, look: Look, index: tuple[int, ...]) -> str:
        return show(look.wanted[index])


@dataclass(frozen=True)
class Anything:
    """For outputs that the rule leaves unspecified: nothing is wrong."""

    def wrong(self, look: Look) -> Tensor:
        return torch.zeros(look.got.shape, dtype=torch.bool, device=look.got.device)

    def wants(self, look: Look, index: tuple[int, ...]) -> str:
        return "anything"


def _e4m3(bound: Tensor) -> Tensor:
    return encode_e4m3(odd_float32(bound)).view(torch.float8_e4m3fn)


ROUNDINGS: Mapping[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float64: lambda bound: bound,
    torch.float32: lambda bound: bound.to(torch.float32),
    torch.bfloat16: round_bf16,
    torch.float16: round_fp16,
    torch.float8_e4m3fn: _e4m3,
}
"""How a float64 bound becomes a number of a leaf's type: once, to nearest even; E4M3 saturates."""


@dataclass(frozen=True)
class RoundedInterval:
    """Between two bounds, for values that pass through exp, rsqrt or a long fp32 sum.

    Parameters
    ----------
    bounds : callable
        `bounds(before, got_all, path) -> (lower, upper)`: float64 Tensors of the leaf's shape,
        what the rule's error budget allows. Both are rounded to the leaf's type; the element must
        lie between, ends included. Where both are NaN the element must be NaN; elsewhere it must
        not. A zero of either sign is the same point of the interval.
    rounding : callable, optional
        `rounding(bound) -> Tensor` of the leaf's type, or of its view's, from float64: any rounding
        that never turns a larger bound into a smaller number (UE8M0 codes in uint8, for one).
        None: the type's own in `ROUNDINGS`.
    """

    bounds: Callable[[dict[str, Any], Mapping[str, Tensor], str], tuple[Tensor, Tensor]]
    rounding: Callable[[Tensor], Tensor] | None = None

    def ends(self, look: Look) -> tuple[Tensor, Tensor]:
        """Both bounds, rounded to the leaf's type."""
        lower, upper = self.bounds(look.before, look.got_all, look.path)
        return self._rounded(lower, look.got), self._rounded(upper, look.got)

    def _rounded(self, bound: Tensor, like: Tensor) -> Tensor:
        rounding = self.rounding or ROUNDINGS.get(like.dtype)
        if bound.dtype is not torch.float64 or rounding is None:
            raise TypeError(f"no interval of {bound.dtype} bounds for a {like.dtype} output")
        if bound.shape != like.shape:
            raise TypeError(f"bounds of shape {list(bound.shape)} for {list(like.shape)}")
        rounded = rounding(bound.to(like.device))
        if rounded.dtype is not like.dtype:
            raise TypeError(f"bounds rounded to {rounded.dtype} for a {like.dtype} output")
        return rounded

    def wrong(self, look: Look) -> Tensor:
        lower, upper = self.ends(look)
        got = look.got.to(torch.float64)
        inside = (got >= lower.to(torch.float64)) & (got <= upper.to(torch.float64))
        due = is_nan(lower) & is_nan(upper)
        return torch.where(due, ~is_nan(look.got), ~inside)

    def wants(self, look: Look, index: tuple[int, ...]) -> str:
        lower, upper = self.ends(look)
        return f"between {show(lower[index])} and {show(upper[index])}"


@dataclass(frozen=True)
class TopKSet:
    """Membership in the best k, where ties at the boundary may be broken either way.

    Items strictly above the k-th score are chosen, strictly below are not, and the ties at the
    boundary fill exactly the places that remain. NaN orders above +inf, as `torch.topk` has it;
    -0 and +0 tie. A chosen item is kept if its score is above -inf; a NaN takes a place and is
    not kept. The leaf is `[rows, width]` bool: every column of a kept item is true, every other
    column false.

    Parameters
    ----------
    scores : callable
        `scores(before) -> Tensor [rows, items]` fp32.
    places : callable
        `places(before) -> int`: k, clamped here to the number of items.
    item_width : callable
        `item_width(before) -> int`: columns of an item; the last one is cut at the leaf's width.
    """

    scores: Callable[[dict[str, Any]], Tensor]
    places: Callable[[dict[str, Any]], int]
    item_width: Callable[[dict[str, Any]], int]

    def wrong(self, look: Look) -> Tensor:
        wrong = torch.zeros_like(look.got)
        if look.got.numel() == 0:
            return wrong
        scores = self.scores(look.before).to(look.got.device, torch.float64)
        each = self.item_width(look.before)
        items = scores.shape[1]
        width = look.got.shape[1]
        item_of = torch.arange(width, device=scores.device) // each
        first = torch.arange(items, device=scores.device) * each
        kept = look.got[:, first]
        wrong |= look.got != kept[:, item_of]

        # One number per item in which NaN, +inf and the finite scores stand in their order.
        order = torch.where(torch.isnan(scores), torch.inf, scores.clamp(-1e300, 1e300))
        order = torch.where(torch.isneginf(scores), -torch.inf, order)
        places = min(self.places(look.before), items)
        boundary = order.topk(places, dim=1).values[:, -1:]
        above, tied = order > boundary, order == boundary
        can_be_kept = scores > -torch.inf
        item_wrong = (above & can_be_kept) != kept
        free = places - above.sum(1)
        settled = tied & ~can_be_kept
        item_wrong = torch.where(tied, settled & kept, item_wrong)
        open_ties = tied & can_be_kept
        count_wrong = (kept & open_ties).sum(1) != torch.minimum(free, open_ties.sum(1))
        item_wrong |= open_ties & count_wrong[:, None]
        return wrong | item_wrong[:, item_of]

    def wants(self, look: Look, index: tuple[int, ...]) -> str:
        return f"one of the best {self.places(look.before)} (the oracle's choice: " + (
            f"{show(look.wanted[index])})"
        )
