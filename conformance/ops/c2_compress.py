"""Specs of `c2_decode` and `c2_verify`: rings, pages, scores and roundings at their worst."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftproof.conformance.engine.compare import viewed
from draftproof.conformance.engine.judges import (
    Anything,
    Bits,
    Look,
    RoundedInterval,
    differing,
    show,
)
from draftproof.conformance.engine.laws import LawRun
from draftproof.conformance.engine.spec import (
    Args,
    BadInput,
    BenchPoint,
    Case,
    Effect,
    Law,
    OpSpec,
    Params,
    Part,
)
from draftproof.oracles import c2_compress as oracle

OPS = ("c2_decode", "c2_verify")

LATENT = oracle.LATENT_DIM
WIDTH = 2 * LATENT
ROPE = oracle.ROPE_DIM
KEPT = LATENT - ROPE
GROUP = oracle.FP4_GROUP
LAYOUT = oracle.LAYOUT

INDEX_DTYPES = {"int32": torch.int32, "int64": torch.int64}

SPECIAL_BITS = {
    "0": 0x00000000,
    "-0": 0x80000000,
    "tiny": 0x00000001,
    "-subnormal_max": 0x807FFFFF,
    "normal_min": 0x00800000,
    "1": 0x3F800000,
    "-1": 0xBF800000,
    "2^58": 0x5C800000,
    "-88": 0xC2B00000,
    "104": 0x42D00000,
    "-1e30": 0xF149F2CA,
    "largest": 0x7F7FFFFF,
    "inf": 0x7F800000,
    "-inf": 0xFF800000,
    "nan": 0x7FC00000,
    "-nan": 0xFFC12345,
    "signalling_nan": 0x7F800001,
}
"""fp32 bit patterns by name."""

NONFINITE = ("nonfinite",)

SMALLEST_NORMAL = 2.0**-126

CANCELLING_X = (0x3F81, 0x3FFF, 0x3F95, 0x3FAB, 0x3FB3, 0x3F8D, 0x40D5, 0x3E0B)
"""bf16 with many digits, so that their products with a float32 are not exact. x = y."""

CANCELLING_C = (
    0x3F3504F3, 0x3F7FFFFF, 0x3F000001, 0x3EAAAAAB, 0x3E4CCCCD, 0x3DCCCCCD, 0x3F2AAAAB, 0x3F19999A,
    0x3ECCCCCD, 0x3D2AAAAB, 0x3E99999A, 0x3F666666, 0x3F5DB3D7, 0x3F1E3779, 0x3EB504F3, 0x3F490FDB,
)  # fmt: skip
"""float32 with a full mantissa, c = s: the even result is only what one product's rounding lost,
and after FP4 only the sign of a zero shows it."""

E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Quotients half way between two E2M1 values."""

E4M3_VALUES = [m / 512 for m in range(1, 8)] + [
    (8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)
][:-1]
"""Positive values of E4M3, in ascending order."""


# ---------------------------------------------------------------- building a call


def _params(starts: Sequence[int], draft_len: int = 1, **changed: Any) -> dict[str, Any]:
    """Params of one call.

    Parameters
    ----------
    starts : sequence of int
        Position of each request's first row.
    draft_len : int
        Rows of a request; 1 for `c2_decode`.
    **changed
        `padded`: requests at the end that are padded: raw_out_loc 0, req 0, which may be live too.
        `padded_positions`: "zero", or "kept": their positions as they would be.
        `ring_size`; `slots`: rings; `reqs`: ring of each request, None: random.
        `page_size`, `pages`; `extra_bytes`: by which a row of the cache is wider than a page.
        `tokens`: raw_out_loc of each row, None: random ones.
        `content`: what rows hold, a key of `ROWS`; `weight`: a key of `WEIGHTS`.
        `rotations`: "circle", "cancelling" or "specials".
        `eps`; `position_dtype`, `loc_dtype`; `max_pos`: rows of freqs_cis.
        `pokes`: [argument, row, column, special]: into kv_input, the rings or freqs_cis.
    """
    known = {
        "padded": 0,
        "padded_positions": "zero",
        "ring_size": draft_len + 1,
        "slots": len(starts) + 1,
        "reqs": None,
        "page_size": 2,
        "pages": None,
        "extra_bytes": 0,
        "tokens": None,
        "content": "selected",
        "weight": "spread",
        "rotations": "circle",
        "eps": 1e-6,
        "position_dtype": "int64",
        "loc_dtype": "int64",
        "max_pos": None,
        "pokes": [],
    }
    if unknown := set(changed) - set(known):
        raise TypeError(f"unknown params: {sorted(unknown)}")
    made = {"starts": list(starts), "draft_len": draft_len, **known, **changed}
    if made["max_pos"] is None:
        made["max_pos"] = max([0, *starts]) + draft_len
    if made["pages"] is None:
        # One token more than there are rows.
        made["pages"] = len(starts) * draft_len // made["page_size"] + 1
    return made


def build(params: Params, seed: int) -> Args:
    """Make the arguments of one call of `c2_verify` on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    starts, draft_len, ring_size = params["starts"], params["draft_len"], params["ring_size"]
    requests = len(starts)
    rows, live = requests * draft_len, requests - params["padded"]
    positions = torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(draft_len)
    req = (
        torch.randperm(params["slots"], generator=generator)[:requests]
        if params["reqs"] is None
        else torch.tensor(params["reqs"], dtype=torch.int64)
    )
    req[live:] = 0
    if params["padded_positions"] == "zero":
        positions[live:] = 0

    tokens = params["pages"] * params["page_size"]
    if params["tokens"] is None:
        slot = torch.randperm(tokens, generator=generator)[:rows]
        raw = 2 * slot + torch.randint(0, 2, (rows,), generator=generator)
        # 0 means padding: of the two locations of token 0 only the second serves.
        raw = raw.clamp(min=1)
    else:
        raw = torch.tensor(params["tokens"], dtype=torch.int64)
    raw[live * draft_len :] = 0

    kv_input = _noise((rows, WIDTH), generator)
    kv_state = _noise((params["slots"] * ring_size, WIDTH), generator)
    # What is pooled, and nothing else, holds numbers; rows that are only parked keep noise.
    content = ROWS[params["content"]]
    for b in range(live):
        rounds = content(draft_len + 1, int(starts[b]) - 1, generator)
        if starts[b] % 2 == 1:
            kv_state[req[b] * ring_size + (starts[b] - 1) % ring_size] = rounds[0]
        for j in range(draft_len):
            odd = (starts[b] + j) % 2 == 1
            if odd or j + 1 < draft_len:
                kv_input[b * draft_len + j] = rounds[j + 1]

    args = {
        "kv_input": kv_input,
        "kv_state": kv_state,
        "norm_weight": WEIGHTS[params["weight"]](generator),
        "positions": positions.flatten().to(INDEX_DTYPES[params["position_dtype"]]),
        "req": req.repeat_interleave(draft_len),
        "raw_out_loc": raw.to(INDEX_DTYPES[params["loc_dtype"]]),
        "freqs_cis": _rotations(params["rotations"], params["max_pos"], generator),
        "k_cache": torch.randint(
            0,
            256,
            (params["pages"], LAYOUT.page_bytes(params["page_size"]) + params["extra_bytes"]),
            dtype=torch.uint8,
            generator=generator,
        ),
        "eps": params["eps"],
        "page_size": params["page_size"],
        "ring_size": ring_size,
        "draft_len": draft_len,
        "out": _bf16_noise((rows, LATENT), generator),
    }
    for name, row, column, special in params["pokes"]:
        tensor = args[name]
        if tensor.numel():
            at = (row % tensor.shape[0], column % tensor.shape[1])
            tensor.view(torch.int32)[at] = _signed(SPECIAL_BITS[special], 32)
    return args


def build_decode(params: Params, seed: int) -> Args:
    """Make the arguments of one call of `c2_decode` on the CPU."""
    args = build(params, seed)
    del args["draft_len"]
    return args


def _signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) else bits


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random fp32 bits, one in four a special pattern: it must be copied, and never pooled."""
    bits = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).int()
    specials = torch.tensor([_signed(bits, 32) for bits in SPECIAL_BITS.values()]).int()
    strewn = bits.view(-1)[::4]
    strewn.copy_(specials[strewn.long() % len(specials)])
    return bits.view(torch.float32)


def _bf16_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
    return bits.view(torch.bfloat16)


def _rotations(kind: str, max_pos: int, generator: torch.Generator) -> Tensor:
    if kind == "cancelling":
        # The same c and s in a pair, other ones at every position.
        turn = torch.arange(max_pos)[:, None] + torch.arange(ROPE // 2)
        bits = torch.tensor(CANCELLING_C)[turn % len(CANCELLING_C)].int()
        return bits.view(torch.float32).repeat_interleave(2, dim=1)
    if kind == "specials":
        specials = torch.tensor([_signed(bits, 32) for bits in SPECIAL_BITS.values()]).int()
        index = torch.randint(len(specials), (max_pos, ROPE), generator=generator)
        return specials[index].view(torch.float32)
    # Without a cosine, whose last bit depends on the library.
    half = torch.rand((max_pos, ROPE // 2), dtype=torch.float64, generator=generator) * 2 - 1
    c, s = (1 - half**2) / (1 + half**2), 2 * half / (1 + half**2)
    left = torch.rand((max_pos, ROPE // 2), generator=generator) < 0.5
    return torch.stack((torch.where(left, -c, c), s), dim=-1).flatten(1).float()


# What rows hold: `(count, first position, generator) -> [count, 1024]`, consecutive positions.


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).float() * 2 - 1


def _even(count: int, first: int) -> Tensor:
    return (torch.arange(first, first + count) % 2 == 0)[:, None]


def _selected(count: int, first: int, generator: torch.Generator) -> Tensor:
    """kv of 1 or -1; the even row's scores lie far above or far below the odd one's.

    Each element of `out` is then the weight with the sign of the chosen kv, in every bit.
    """
    chosen = torch.randint(0, 2, (count, LATENT), generator=generator) * 2000.0
    score = torch.where(_even(count, first), chosen, 1000.0)
    return torch.cat((_signs((count, LATENT), generator), score), dim=1)


def _equal(count: int, first: int, generator: torch.Generator) -> Tensor:
    """The same kv of 1 or -1 in all rows, and the same scores: `out` is the weight with that sign.

    Both zeros are one score.
    """
    kv = _signs((1, LATENT), generator).expand(count, -1)
    score = torch.randn((1, LATENT), generator=generator).repeat(count, 1)
    score[:, ::3] = torch.where(_even(count, first), 0.0, -0.0)
    return torch.cat((kv, score), dim=1)


def _paired(count: int, first: int, generator: torch.Generator) -> Tensor:
    """As `_equal`, the two features of a rotated pair with one sign."""
    row = _equal(count, first, generator)
    row[:, 1:LATENT:2] = row[:, 0:LATENT:2]
    return row


def _normal(count: int, first: int, generator: torch.Generator) -> Tensor:
    row = torch.randn((count, WIDTH), generator=generator)
    row[:, LATENT:] *= 2
    return row


def _tied(count: int, first: int, generator: torch.Generator) -> Tensor:
    """Equal scores and any kv: the mean of two."""
    row = _normal(count, first, generator)
    row[:, LATENT:] = row[:1, LATENT:]
    return row


def _opposed(count: int, first: int, generator: torch.Generator) -> Tensor:
    """kv that nearly cancel, with scores that are nearly equal, in half of the features."""
    row = _normal(count, first, generator)
    sign = torch.where(_even(count, first), 1.0, -1.0)
    near = 1 + torch.randn((count, LATENT // 2), generator=generator) * 2.0**-10
    row[:, :LATENT:2] = row[:1, :LATENT:2] * sign * near
    row[:, LATENT::2] = row[:1, LATENT::2] + (near - 1)
    return row


def _steep(count: int, first: int, generator: torch.Generator) -> Tensor:
    """Score distances up to where exp, and its fp32 result, end; kv so large that it shows."""
    row = _normal(count, first, generator)
    d = torch.rand((count, LATENT), generator=generator) * 120
    row[:, LATENT:] = torch.where(_even(count, first), d * _signs(d.shape, generator), 0.0)
    # The smaller score's kv is up to 2^50 times the other one's.
    scale = torch.randint(0, 51, (count, LATENT), generator=generator)
    row[:, :LATENT] *= torch.where(_even(count, first), 2.0**scale, 1.0)
    return row


def _huge_scores(count: int, first: int, generator: torch.Generator) -> Tensor:
    row = _normal(count, first, generator)
    values = torch.tensor([3e38, -3e38, 1e30, -1e30, 1e10, -88.0, 104.0, 0.0, 1.0])
    index = torch.randint(len(values), (count, LATENT), generator=generator)
    row[:, LATENT:] = values[index]
    return row


def _tiny(count: int, first: int, generator: torch.Generator) -> Tensor:
    """Subnormal scores, and a few kv that are subnormal or zero among those that are not."""
    row = _normal(count, first, generator)
    row[:, LATENT:] *= 1e-40
    row[:, :LATENT:4] *= 1e-39
    row[:, 1:LATENT:8] = 0.0
    row[:, 5:LATENT:8] = -0.0
    return row


def _all_tiny(count: int, first: int, generator: torch.Generator) -> Tensor:
    row = _normal(count, first, generator)
    row[:, :LATENT] *= 1e-36
    return row


def _large(count: int, first: int, generator: torch.Generator) -> Tensor:
    """kv up to the edge of the domain."""
    row = _normal(count, first, generator)
    row[:, :LATENT] = _signs((count, LATENT), generator) * 2.0**58
    row[:, :LATENT:2] *= 1 + torch.rand((count, LATENT // 2), generator=generator)
    row[:, :LATENT] = row[:, :LATENT].clamp(-(2.0**59) * 0.999, 2.0**59 * 0.999)
    return row


def _masked(count: int, first: int, generator: torch.Generator) -> Tensor:
    """A partner that was cleared, kv 0 and score -inf, in some features; and the reverse."""
    row = _selected(count, first, generator)
    even = _even(count, first)
    third = torch.arange(LATENT) % 3
    row[:, LATENT:][(even & (third == 0)).expand(count, -1)] = -torch.inf
    row[:, LATENT:][(~even & (third == 1)).expand(count, -1)] = -torch.inf
    row[:, :LATENT][(even & (third == 0)).expand(count, -1)] = 0.0
    return row


def _zeros(count: int, first: int, generator: torch.Generator) -> Tensor:
    return torch.zeros(count, WIDTH)


ROWS: Mapping[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "selected": _selected,
    "equal": _equal,
    "paired": _paired,
    "masked": _masked,
    "zeros": _zeros,
    "normal": _normal,
    "tied": _tied,
    "opposed": _opposed,
    "steep": _steep,
    "huge_scores": _huge_scores,
    "tiny": _tiny,
    "all_tiny": _all_tiny,
    "large": _large,
}

EXACT = ("selected", "equal", "paired", "masked", "zeros")
"""Contents that give every implementation one `out`: the weight, with a sign, or 0."""


# Weights: what `out` is, up to the sign, under exact rows.


def _from_bits(bits: Tensor) -> Tensor:
    """bf16 of integers 0 to 65535."""
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16)


def _spread(generator: torch.Generator) -> Tensor:
    """Values within one group's reach of each other, groups up to 2^8 apart."""
    exponent = 120 + torch.randint(0, 9, (LATENT // GROUP,), generator=generator)
    exponent = exponent.repeat_interleave(GROUP)
    exponent = exponent - torch.randint(0, 4, (LATENT,), generator=generator)
    return _from_bits(exponent << 7 | torch.randint(0, 128, (LATENT,), generator=generator))


def _wide(generator: torch.Generator) -> Tensor:
    """Groups up to 2^26 apart in one tile: E4M3 subnormals, and FP4 scales at both ends."""
    exponent = 110 + torch.randint(0, 27, (LATENT // GROUP,), generator=generator)
    exponent = exponent.repeat_interleave(GROUP)
    exponent = exponent - torch.randint(0, 3, (LATENT,), generator=generator)
    return _from_bits(exponent << 7 | torch.randint(0, 128, (LATENT,), generator=generator))


def _fp4_ties(generator: torch.Generator) -> Tensor:
    """Groups with a scale that E4M3 holds, and quotients at every tie or one bf16 beside it."""
    scales = torch.tensor(E4M3_VALUES)[
        torch.randint(len(E4M3_VALUES), (LATENT // GROUP, 1), generator=generator)
    ]
    ties = torch.tensor((6.0, *E2M1_TIES, *E2M1_TIES, 6.0))
    beside = torch.randint(-1, 2, (LATENT // GROUP, GROUP), generator=generator)
    beside[:, :8] = 0
    beside[:, -1] = 0
    bits = (ties * scales).bfloat16().view(torch.int16) + beside
    # One scale has all its groups in another order than its neighbour.
    turn = (torch.arange(LATENT // GROUP)[:, None] + torch.arange(GROUP)) % GROUP
    return bits.gather(1, turn).to(torch.int16).view(torch.bfloat16).flatten().contiguous()


def _scale_edges(generator: torch.Generator) -> Tensor:
    """Groups whose largest is 6 times a midpoint of E4M3 or its end, or one bf16 beside it."""
    values = torch.tensor(E4M3_VALUES, dtype=torch.float64)
    tops = 6 * torch.cat(((values[1:] + values[:-1]) / 2, values[:1], values[-1:]))
    index = torch.randint(len(tops), (LATENT // GROUP,), generator=generator)
    index[:2] = torch.tensor([len(tops) - 2, len(tops) - 1])
    beside = torch.arange(LATENT // GROUP) % 3 - 1
    top = tops[index].float().bfloat16().view(torch.int16).long() + beside
    bits = top.repeat_interleave(GROUP) - torch.randint(1, 512, (LATENT,), generator=generator)
    place = torch.arange(0, LATENT, GROUP) + torch.randint(
        GROUP, (LATENT // GROUP,), generator=generator
    )
    bits[place] = top
    return _from_bits(bits.clamp(min=0))


def _few_groups(generator: torch.Generator) -> Tensor:
    """Zeros of both signs, whole tiles of them too, and one small number a group elsewhere."""
    weight = torch.zeros(LATENT)
    weight[::2] = -0.0
    weight[128::GROUP] = torch.rand(24, generator=generator) * 0.004
    return weight.bfloat16()


def _anything_finite(generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 0x7F80, (LATENT,), generator=generator)
    return _from_bits(bits | torch.randint(0, 2, (LATENT,), generator=generator) << 15)


def _subnormals(generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 0x100, (LATENT,), generator=generator)
    return _from_bits(bits | torch.randint(0, 2, (LATENT,), generator=generator) << 15)


def _nonfinite(generator: torch.Generator) -> Tensor:
    """Groups with one NaN, NaN alone, one infinity, both; the rotated features too."""
    weight = _spread(generator)
    group = torch.arange(LATENT) // GROUP % 6
    place = torch.arange(LATENT) % GROUP
    weight[(group == 0) & (place == 5)] = torch.nan
    weight[group == 1] = torch.nan
    weight[(group == 2) & (place == 9)] = torch.inf
    weight[(group == 3) & (place == 0)] = -torch.inf
    weight[(group == 3) & (place == 15)] = torch.nan
    # A whole tile of NaN.
    weight[128:192] = torch.nan
    return weight


def _near_one(generator: torch.Generator) -> Tensor:
    return (1 + 0.3 * torch.randn(LATENT, generator=generator)).bfloat16()


def _cancelling(generator: torch.Generator) -> Tensor:
    weight = _spread(generator)
    turn = torch.arange(ROPE // 2) // 4
    pairs = _from_bits(torch.tensor(CANCELLING_X)[turn % len(CANCELLING_X)])
    weight[KEPT:] = pairs.repeat_interleave(2)
    return weight


WEIGHTS: Mapping[str, Callable[[torch.Generator], Tensor]] = {
    "spread": _spread,
    "wide": _wide,
    "fp4_ties": _fp4_ties,
    "scale_edges": _scale_edges,
    "few_groups": _few_groups,
    "anything_finite": _anything_finite,
    "subnormals": _subnormals,
    "nonfinite": _nonfinite,
    "near_one": _near_one,
    "cancelling": _cancelling,
}


# ---------------------------------------------------------------- judges and regions


def _place(before: Args) -> dict[str, Any]:
    """The arguments that say which row is whose partner."""
    return {
        **{name: before[name] for name in ("kv_input", "kv_state", "positions", "req")},
        "ring_size": before["ring_size"],
        "draft_len": before.get("draft_len", 1),
    }


def _completing(before: Args) -> Tensor:
    return oracle.completing(before["positions"], before["raw_out_loc"])


def _undefined(before: Args) -> Tensor:
    return oracle.undefined(norm_weight=before["norm_weight"], **_place(before))


def _out_ends(before: Args, got: Mapping[str, Tensor], path: str) -> tuple[Tensor, Tensor]:
    return oracle.out_bounds(norm_weight=before["norm_weight"], eps=before["eps"], **_place(before))


def emitted_region(before: Args, path: str) -> Tensor:
    """Rows of `out` that complete a pair within the domain of the op."""
    rows = _completing(before) & ~_undefined(before)
    return rows[:, None].expand(before["out"].shape)


def open_region(before: Args, path: str) -> Tensor:
    """Rows of `out` that the rule leaves open: padded odd ones, and those beyond the domain."""
    padded = (before["positions"] % 2 == 1) & (before["raw_out_loc"] == 0)
    rows = padded | (_completing(before) & _undefined(before))
    return rows[:, None].expand(before["out"].shape)


def _slots(before: Args) -> Tensor:
    return before["raw_out_loc"][_completing(before)].long() // 2


def _cache_region(before: Args, columns: Tensor, width: int) -> Tensor:
    region = torch.zeros((before["k_cache"].shape[0], width), dtype=torch.bool)
    region[(_slots(before) // before["page_size"]).cpu()[:, None], columns.cpu()] = True
    return region


def e4m3_region(before: Args, path: str) -> Tensor:
    """Bytes of the cache that hold E4M3 features of the stored tokens."""
    data, _ = oracle.places(_slots(before), before["page_size"])
    return _cache_region(before, data[:, : LAYOUT.e4m3], before["k_cache"].shape[1])


def bf16_region(before: Args, path: str) -> Tensor:
    """Elements of the cache, read as bf16, that hold the last features of the stored tokens."""
    data, _ = oracle.places(_slots(before), before["page_size"])
    columns = data[:, LAYOUT.e4m3 :: 2] // 2
    return _cache_region(before, columns, before["k_cache"].shape[1] // 2)


def code_region(before: Args, path: str) -> Tensor:
    """Bytes of the cache that hold scale codes of the stored tokens."""
    _, codes = oracle.places(_slots(before), before["page_size"])
    return _cache_region(before, codes, before["k_cache"].shape[1])


@dataclass(frozen=True)
class GivenOut:
    """Bits of what the rule makes of the `out` that was emitted; a NaN matches any NaN."""

    def due(self, look: Look) -> Tensor:
        """The cache that follows from the emitted latents, as the part reads it."""
        before = look.before
        rows = _completing(before)
        latent = look.got_all["out"].to(before["out"].device)[rows]
        cache = before["k_cache"].clone()
        rotation = before["freqs_cis"][before["positions"][rows].long() - 1]
        oracle.store(cache, _slots(before), *oracle.encode(latent, rotation), before["page_size"])
        return viewed(cache, look.got.dtype).to(look.got.device)

    def wrong(self, look: Look) -> Tensor:
        return differing(self.due(look), look.got, any_nan=True)

    def wants(self, look: Look, index: tuple[int, ...]) -> str:
        return f"{show(self.due(look)[index])}, given the emitted out"


EFFECTS = (
    Effect(
        "kv_state",
        "a live row at an even position is copied to ring row req * ring_size + position % "
        "ring_size, bit for bit; every other row of the rings stays",
        Bits(nan="payload"),
        reads=True,
    ),
    Effect(
        "out",
        parts=(
            Part(
                "at odd positions out is bf16 of RMSNorm of the pooled pair, which is rounded to "
                "bf16 before; the partner is the row of the position before",
                RoundedInterval(_out_ends),
                emitted_region,
            ),
            Part("out of a padded odd row is unspecified", Anything(), open_region),
        ),
    ),
    Effect(
        "k_cache",
        parts=(
            Part(
                "features 0-447 are E4M3 of out in fake FP4, scaled by their tile's code; NaN is "
                "a NaN",
                GivenOut(),
                e4m3_region,
                torch.float8_e4m3fn,
            ),
            Part(
                "features 448-511 are bf16 of out, rotated at position - 1, in fake FP4",
                GivenOut(),
                bf16_region,
                torch.bfloat16,
            ),
            Part(
                "code t is the UE8M0 code of features 64 * t to 64 * t + 63 in fake FP4",
                GivenOut(),
                code_region,
            ),
        ),
    ),
)


# ---------------------------------------------------------------- cases

_EVERY = ("eager", "guards", "poison", "strided", "graph", "repeat")
_VALUES = ("eager", "graph")


def _case(name: str, params: Params, *checks: str, **more: Any) -> Case:
    return Case(name, params, checks=checks or _VALUES, **more)


def _value_cases(draft_len: int) -> list[Case]:
    """Cases that differ in what rows, weights and rotations hold."""
    rows = {"draft_len": draft_len}
    # One pair, as small as can be: these become golden vectors.
    few = [3 if draft_len == 1 else 2]
    tiny = {**rows, "slots": 1}
    more = [3, 2 if draft_len > 1 else 5]
    case = _case
    return [
        case("fp4_ties", _params(few, weight="fp4_ties", **tiny)),
        case("fp4_scale_edges", _params(few, weight="scale_edges", content="equal", **tiny)),
        case("cancelling_rotation",
             _params(few, weight="cancelling", rotations="cancelling", content="paired", **tiny)),
        case("nonfinite_latent", _params(few, weight="nonfinite", **tiny), tags=NONFINITE),
        case("zeros_and_small_numbers", _params(few, weight="few_groups", content="equal", **tiny)),
        case("scales_far_apart", _params(few, weight="wide", **tiny)),
        case("masked_partner", _params(few, content="masked", **tiny)),
        case("any_finite_latent", _params(few, weight="anything_finite", **tiny)),
        case("subnormal_latent", _params(few, weight="subnormals", **tiny)),
        case("fp4_ties_of_equal_rows", _params(few, weight="fp4_ties", content="equal", **tiny)),
        case("zero_rows", _params(few, content="zeros", **tiny)),
        case("special_rotations", _params(few, rotations="specials", **tiny), tags=NONFINITE),
        # From here on exp, or the norm, rounds.
        case("random_rows", _params([7, 5, 4], ring_size=16, content="normal",
                                    weight="near_one", **rows), *_EVERY),
        case("tied_scores", _params(more, ring_size=16, content="tied", weight="near_one", **rows)),
        case("opposed_rows", _params(more, ring_size=16, content="opposed", weight="near_one",
                                     **rows)),
        case("steep_scores", _params(more, ring_size=16, content="steep", weight="near_one",
                                     **rows)),
        case("huge_scores", _params(more, ring_size=16, content="huge_scores", weight="near_one",
                                    **rows)),
        case("tiny_rows", _params(more, ring_size=16, content="tiny", weight="near_one", **rows)),
        case("tiny_rows_large_weights", _params(more, ring_size=16, content="all_tiny",
                                                weight="anything_finite", **rows)),
        case("kv_at_the_edge", _params(more, ring_size=16, content="large", weight="near_one",
                                       **rows)),
        case("eps_of_one", _params(more, ring_size=16, content="normal", weight="near_one", eps=1.0,
                                   **rows)),
        case("eps_the_smallest_normal", _params(more, ring_size=16, content="normal", eps=
                                                SMALLEST_NORMAL, weight="near_one", **rows)),
        case("eps_of_a_thousandth_with_tiny_rows",
             _params(more, ring_size=16, content="all_tiny", eps=1e-3, weight="near_one", **rows)),
        case(
            "nan_and_infinite_scores",
            _params(
                [5, 3, 9, 7, 11], ring_size=16, slots=5, reqs=[4, 3, 2, 1, 0], content="normal",
                weight="near_one",
                # The partners of the first rows; a score of theirs, or both, or a kv is special.
                pokes=[
                    ["kv_state", 4 * 16 + 4, LATENT + 7, "nan"],
                    ["kv_state", 3 * 16 + 2, LATENT + 450, "-inf"],
                    ["kv_input", draft_len, LATENT + 450, "-inf"],
                    ["kv_state", 2 * 16 + 8, LATENT + 3, "inf"],
                    ["kv_input", 2 * draft_len, LATENT + 3, "inf"],
                    ["kv_input", 3 * draft_len, 500, "signalling_nan"],
                    ["kv_state", 10, 40, "-inf"],
                    ["kv_state", 10, LATENT + 40, "1"],
                    ["kv_input", 4 * draft_len, LATENT + 40, "-1"],
                ],
                **rows,
            ),
            tags=NONFINITE,
        ),
        case(
            "one_infinite_score",
            _params(
                [5], ring_size=16, slots=2, reqs=[1], content="normal", weight="near_one",
                pokes=[
                    ["kv_state", 20, LATENT + 1, "inf"],
                    ["kv_state", 20, LATENT + 2, "-inf"],
                    ["kv_input", 0, LATENT + 3, "inf"],
                    ["kv_input", 0, LATENT + 4, "-inf"],
                ],
                **rows,
            ),
            "eager",
        ),
    ]  # fmt: skip


def _dtype_cases(starts: Sequence[int], draft_len: int) -> list[Case]:
    return [
        _case(
            f"positions_{position}_locations_{loc}",
            _params(starts, draft_len, position_dtype=position, loc_dtype=loc),
            *_VALUES,
            "guards",
        )
        for position, loc in itertools.product(INDEX_DTYPES, repeat=2)
    ]


def _decode_cases() -> list[Case]:
    return [
        _case("one_odd_row", _params([3]), *_EVERY),
        _case("one_even_row", _params([4], slots=1), *_EVERY),
        *_value_cases(1),
        _case("mixed_parities", _params([5, 8, 1, 2]), *_EVERY),
        _case("first_positions", _params([0, 1])),
        _case("ring_of_5", _params([9, 10, 5, 4], ring_size=5)),
        _case("ring_of_16_wraps", _params([31, 32, 33, 16, 17], ring_size=16), "eager", "guards",
              "graph"),
        # The location 0 is padding, and 1 is token 0.
        _case("tokens_around_a_page",
              _params([7, 3, 5, 9], page_size=4, pages=3, tokens=[1, 7, 8, 23])),
        _case("even_locations", _params([7, 3, 5], page_size=4, pages=2, tokens=[2, 6, 14])),
        _case("pages_of_1", _params([7, 3], page_size=1, pages=3)),
        _case("pages_of_128", _params([7, 3, 5], page_size=128, pages=2, tokens=[255, 256, 1]),
              "eager", "guards"),
        _case("wide_cache_rows", _params([7, 4, 3], page_size=4, pages=3, tokens=[9, 2, 17],
                                         extra_bytes=46), "eager", "guards", "strided"),
        _case("padded_tail", _params([7, 4, 3, 9, 8], padded=2, slots=5, reqs=[0, 4, 1, 0, 0]),
              *_EVERY),
        _case("padded_odd_rows",
              _params([7, 4, 3, 9, 7], padded=2, padded_positions="kept", slots=5,
                      reqs=[0, 2, 1, 0, 0]), "eager", "guards", "graph"),
        _case("all_padded", _params([7, 3, 1], padded=3), noop=True),
        _case("all_padded_odd", _params([7, 3], padded=2, padded_positions="kept"), noop=True),
        _case("no_rows", _params([], max_pos=2), "eager", noop=True),
        *_dtype_cases([7, 4], 1),
        _case("rows_8", _params([3, 5, 7, 9, 30, 31, 32, 33], ring_size=16, content="normal",
                                weight="near_one", page_size=128)),
        _case("rows_64", _params(range(64), ring_size=16, slots=64, content="normal",
                                 weight="near_one", page_size=128, pages=2), "eager", "graph"),
        _case("rows_1000", _params(range(1000), ring_size=16, slots=1000, content="normal",
                                   weight="near_one", page_size=128), "eager", profile="full"),
        *_far_cases(1),
    ]  # fmt: skip


def _far_cases(draft_len: int) -> list[Case]:
    """Rings and pages that lie beyond 2^31."""
    return [
        _case(
            "rings_past_2_31",
            _params([7, 9], draft_len, ring_size=1 << 20, slots=3, reqs=[2, 1]),
            "eager", profile="soak", device="cuda", seconds=600.0,
        ),
        _case(
            "pages_past_2_31",
            _params([7, 9], draft_len, pages=5, page_size=1 << 20,
                    tokens=[2 * (4 << 20) + 2 * row + 1 for row in range(2 * draft_len)]),
            "eager", profile="soak", device="cuda", seconds=600.0,
        ),
    ]  # fmt: skip


def _verify_cases() -> list[Case]:
    return [
        _case("two_rows_odd_start", _params([3], 2, slots=1), *_EVERY),
        *_value_cases(2),
        _case("two_rows_even_start", _params([4], 2), *_EVERY),
        _case("one_row", _params([3, 4], 1, ring_size=2), "eager", "guards", "graph"),
        _case("four_rows", _params([5], 4, slots=1), *_EVERY),
        _case("five_rows", _params([7, 8], 5, ring_size=6)),
        _case("six_rows", _params([9, 4, 1], 6, ring_size=8), *_EVERY),
        _case("nine_rows", _params([11, 2], 9, ring_size=16), "eager", "guards", "graph"),
        _case("nine_rows_in_a_ring_of_10", _params([19, 20, 21], 9, ring_size=10)),
        _case("first_positions", _params([0, 1], 3)),
        # The first row's partner lies at the end of the ring, the block's own rows at its start.
        _case("ring_of_16_wraps", _params([31, 32, 33, 16, 15], 6, ring_size=16), "eager",
              "guards", "graph"),
        _case("ring_one_above_the_block", _params([6, 7, 13, 14], 6, ring_size=7)),
        _case("tokens_around_a_page",
              _params([7, 4], 3, page_size=4, pages=3, tokens=[1, 7, 8, 22, 23, 12])),
        _case("pages_of_1", _params([7], 3, page_size=1, pages=4)),
        _case("pages_of_128", _params([7, 4], 3, page_size=128, pages=2,
                                      tokens=[255, 3, 256, 5, 1, 8]), "eager", "guards"),
        _case("wide_cache_rows", _params([7, 4], 3, page_size=4, pages=3,
                                         tokens=[9, 2, 17, 11, 21, 3], extra_bytes=46), "eager",
              "guards", "strided"),
        _case("padded_tail", _params([7, 4, 3, 9], 3, padded=2, slots=4, reqs=[0, 1, 0, 0]),
              *_EVERY),
        _case("padded_odd_rows",
              _params([7, 4, 3, 7], 3, padded=2, padded_positions="kept", slots=4,
                      reqs=[0, 1, 0, 0]), "eager", "guards", "graph"),
        _case("all_padded", _params([7, 3], 3, padded=2), noop=True),
        _case("all_padded_odd", _params([7, 3], 2, padded=2, padded_positions="kept"), noop=True),
        _case("no_rows", _params([], 6, max_pos=8), "eager", noop=True),
        *_dtype_cases([7, 4], 2),
        _case("requests_8", _params([3, 4, 7, 8, 30, 31, 32, 33], 6, ring_size=16, content="normal",
                                    weight="near_one", page_size=128)),
        _case("requests_64", _params([(17 * b) % 90 for b in range(64)], 6, ring_size=16, slots=64,
                                     content="normal", weight="near_one", page_size=128, padded=3),
              "eager", profile="full"),
        *_far_cases(2),
    ]  # fmt: skip


# ---------------------------------------------------------------- laws


def _rows_of(args: Args, rows: Tensor, **changed: Any) -> Args:
    """The call of `c2_decode` that some rows of a call are."""
    per_row = ("kv_input", "positions", "req", "raw_out_loc", "out")
    made = {
        name: value[rows].contiguous() if name in per_row else value
        for name, value in args.items()
        if name != "draft_len"
    }
    return {**made, **changed}


def verify_equals_decodes(run: LawRun, args: Args) -> None:
    """Hold a block against its rows one at a time."""
    draft_len = args["draft_len"]
    whole = run.call("c2_verify", args).args
    ring, cache, out = args["kv_state"], args["k_cache"], whole["out"].clone()
    first = torch.arange(0, len(out), draft_len)
    for j in range(draft_len):
        left = run.call("c2_decode", _rows_of(args, first + j, kv_state=ring, k_cache=cache)).args
        ring, cache = left["kv_state"], left["k_cache"]
        out[first.to(out.device) + j] = left["out"]
    # A padded odd row may leave anything.
    free = (args["positions"] % 2 == 1) & (args["raw_out_loc"] == 0)
    kept = (~free).to(out.device)
    run.same("out", whole["out"][kept], out[kept], nan="any")
    run.same("kv_state", whole["kv_state"], ring)
    run.same("k_cache", whole["k_cache"], cache)


def rejected_rows_leave_no_trace(run: LawRun, args: Args) -> None:
    """Continue after every accepted prefix, and hold it against a history without the rest."""
    draft_len = args["draft_len"]
    first = torch.arange(0, len(args["positions"]), draft_len)
    after = run.call("c2_verify", args).args
    ring, cache = args["kv_state"], args["k_cache"]
    for accepted in range(1, draft_len + 1):
        # The history that saw the accepted rows alone grows by one.
        rows = _rows_of(args, first + accepted - 1, kv_state=ring, k_cache=cache)
        left = run.call("c2_decode", rows).args
        ring, cache = left["kv_state"], left["k_cache"]
        # Other rows, each of which goes where a rejected row of its position went.
        following = {
            **args,
            "kv_input": args["kv_input"].roll(1, 0),
            "positions": args["positions"] + accepted,
            "raw_out_loc": args["raw_out_loc"].roll(-accepted),
        }
        one, other = (
            run.call("c2_verify", {**following, "kv_state": rings, "k_cache": caches}).args
            for rings, caches in ((after["kv_state"], after["k_cache"]), (ring, cache))
        )
        for name in ("out", "kv_state", "k_cache"):
            label = f"{name} of the step after {accepted} of {draft_len} accepted"
            run.same(label, one[name], other[name])


def only_first_rows_read_the_ring(run: LawRun, args: Args) -> None:
    """Move every float of each ring row that is read by 1, then every other ring row."""
    draft_len, ring_size = args["draft_len"], args["ring_size"]
    first = torch.arange(len(args["positions"])) % draft_len == 0
    reading = first & (args["positions"] % 2 == 1)
    rows = args["req"][reading] * ring_size + (args["positions"][reading].long() - 1) % ring_size
    base = run.call("c2_verify", args).args
    moved_ring = args["kv_state"].clone()
    moved_ring[rows] += 1.0
    moved = run.call("c2_verify", {**args, "kv_state": moved_ring}).args
    run.same("out of rows that do not read the ring", base["out"][~reading], moved["out"][~reading])
    for row in reading.nonzero().flatten().tolist():
        if torch.equal(base["out"][row], moved["out"][row]):
            run.wrong(f"row {row} does not see that its partner in the ring was moved by 1.0")
    unread = torch.ones(len(args["kv_state"]), dtype=torch.bool)
    unread[rows] = False
    others = args["kv_state"].clone()
    others[unread] = -1.0
    left = run.call("c2_verify", {**args, "kv_state": others}).args
    run.same("out where unread ring rows were changed", base["out"], left["out"])
    run.same("k_cache where unread ring rows were changed", base["k_cache"], left["k_cache"])


def requests_keep_their_rings(run: LawRun, args: Args) -> None:
    """Park a step of decode, swap rows in the batch, and complete the pairs."""
    order = torch.arange(len(args["positions"])).flip(0)
    parked = run.call("c2_decode", args).args
    following = {
        **args,
        "positions": args["positions"] + 1,
        "kv_input": args["kv_input"].roll(1, 0).contiguous(),
        "kv_state": parked["kv_state"],
        "k_cache": parked["k_cache"],
    }
    straight = run.call("c2_decode", following).args
    swapped = run.call("c2_decode", _rows_of(following, order)).args
    back = order.to(swapped["out"].device)
    run.same("out", straight["out"], swapped["out"][back], nan="any")
    run.same("kv_state", straight["kv_state"], swapped["kv_state"])
    run.same("k_cache", straight["k_cache"], swapped["k_cache"])


def _law_case(name: str, starts: Sequence[int], draft_len: int, **changed: Any) -> Case:
    changed = {"content": "normal", "weight": "near_one", "ring_size": 16, **changed}
    return Case(name, _params(starts, draft_len, **changed))


VERIFY_LAWS = (
    Law(
        "verify_equals_decodes",
        "c2_verify leaves what draft_len calls of c2_decode do, one position at a time: the same "
        "out, rings and cache",
        verify_equals_decodes,
        [
            _law_case("two_rows", [3, 4], 2, ring_size=4),
            _law_case("six_rows_at_a_wrap", [31, 32, 11], 6),
            _law_case("nine_rows_in_a_ring_of_10", [9, 10], 9, ring_size=10),
            _law_case(
                "five_rows_padded_tail", [7, 8, 3, 5], 5, padded=2, slots=3, reqs=[1, 2, 0, 0]
            ),
            _law_case("steep_scores", [7, 8], 3, content="steep"),
            _law_case("opposed_rows", [5, 2], 3, content="opposed"),
        ],
        ops=("c2_decode",),
    ),
    Law(
        "rejected_rows_leave_no_trace",
        "after any accepted prefix, the next verify gives what it gives after a history that "
        "never saw the rejected rows",
        rejected_rows_leave_no_trace,
        [
            _law_case("two_rows", [3, 4], 2, ring_size=4, max_pos=10),
            _law_case("five_rows_at_a_wrap", [30, 31, 13], 5, max_pos=48),
            _law_case("six_rows_in_a_ring_of_7", [6, 7], 6, ring_size=7, max_pos=24),
        ],
        ops=("c2_decode",),
    ),
    Law(
        "only_first_rows_read_the_ring",
        "moving the ring row of a block's first partner changes that row alone",
        only_first_rows_read_the_ring,
        [
            _law_case("odd_and_even_starts", [5, 8, 3], 3),
            _law_case("six_rows_at_a_wrap", [31, 33, 16], 6),
        ],
    ),
)

DECODE_LAWS = (
    Law(
        "requests_keep_their_rings",
        "rows that change their places in the batch between two steps find their own partners",
        requests_keep_their_rings,
        [
            _law_case("two_requests", [4, 6], 1, content="selected", max_pos=12, ring_size=4),
            _law_case("five_requests_at_a_wrap", [14, 30, 32, 16, 2], 1, max_pos=48),
        ],
    ),
)


# ---------------------------------------------------------------- fuzz and replays


def _strategy(draft_lens: Sequence[int]) -> Callable[[], st.SearchStrategy[Params]]:
    @st.composite
    def strategy(draw: st.DrawFn) -> Params:
        draft_len = draw(st.sampled_from(draft_lens))
        starts = draw(st.lists(st.integers(0, 40), max_size=4 if draft_len < 4 else 2))
        poke = st.tuples(
            st.sampled_from(("kv_input", "kv_state", "freqs_cis")),
            st.integers(0, 63),
            st.integers(0, WIDTH - 1),
            st.sampled_from(sorted(SPECIAL_BITS)),
        )
        return _params(
            starts,
            draft_len,
            padded=draw(st.integers(0, len(starts))),
            padded_positions=draw(st.sampled_from(("zero", "kept"))),
            ring_size=draft_len + 1 + draw(st.integers(0, 7)),
            slots=len(starts) + draw(st.integers(1, 2)),
            page_size=draw(st.sampled_from((1, 2, 8, 128))),
            extra_bytes=draw(st.sampled_from((0, 2, 64))),
            content=draw(st.sampled_from(sorted(ROWS))),
            weight=draw(st.sampled_from(sorted(WEIGHTS))),
            rotations=draw(st.sampled_from(("circle", "cancelling", "specials"))),
            eps=draw(st.sampled_from((1e-6, 1e-3, 1.0, SMALLEST_NORMAL))),
            position_dtype=draw(st.sampled_from(sorted(INDEX_DTYPES))),
            loc_dtype=draw(st.sampled_from(sorted(INDEX_DTYPES))),
            max_pos=48 + draft_len,
            pokes=[list(each) for each in draw(st.lists(poke, max_size=2))],
        )

    return strategy


def replays(params: Params) -> list[Params]:
    """Calls of the same geometry: the other parity, other rings, a padded tail, all padded."""
    most = params["max_pos"] - params["draft_len"]
    count = len(params["starts"])
    other = {**params, "reqs": None, "tokens": None, "pokes": [], "content": "selected"}

    def moved(by: int) -> list[int]:
        return [(start + by) % (most + 1) for start in params["starts"]]

    return [
        {**other, "starts": moved(1), "padded": 0},
        {**other, "starts": moved(2), "padded": min(count, max(1, count // 2)), "reqs": None},
        {**other, "starts": moved(0), "padded": 0, "content": "equal", "weight": "wide"},
        {**other, "starts": moved(1), "padded": count},
    ]


def rescale(args: Args) -> Args:
    """The same tensors with another eps, which shows."""
    return {**args, "eps": args["eps"] + 1.0}


# ---------------------------------------------------------------- bad inputs

PER_ROW = ("positions", "req", "raw_out_loc")


def _of(name: str, change: Callable[[Tensor], Any]) -> Callable[[Args], Args]:
    return lambda args: {**args, name: change(args[name])}


def _scalar(name: str, value: Any) -> Callable[[Args], Args]:
    return lambda args: {**args, name: value}


def _columns_apart(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def _rows_apart(t: Tensor) -> Tensor:
    return torch.cat([t, t], dim=-1)[..., : t.shape[-1]]


def _bad_inputs(verify: bool) -> list[BadInput]:
    faults: dict[str, dict[str, Callable[[Tensor], Any]]] = {
        "kv_input": {
            "of_bf16": lambda t: t.bfloat16(),
            "of_float64": lambda t: t.double(),
            "of_int32": lambda t: t.view(torch.int32),
            "1d": lambda t: t[0],
            "3d": lambda t: t[None],
            "of_kv_alone": lambda t: t[:, :LATENT].contiguous(),
            "of_1025_columns": lambda t: t.new_zeros(t.shape[0], WIDTH + 1),
            "rows_apart": _rows_apart,
            "columns_apart": _columns_apart,
        },
        "kv_state": {
            "of_bf16": lambda t: t.bfloat16(),
            "of_int32": lambda t: t.view(torch.int32),
            "1d": lambda t: t[0],
            "3d": lambda t: t[None],
            "of_kv_alone": lambda t: t[:, :LATENT].contiguous(),
            "rows_apart": _rows_apart,
            "columns_apart": _columns_apart,
            "on_another_device": lambda t: t.to("meta"),
        },
        "norm_weight": {
            "of_float32": lambda t: t.float(),
            "of_float16": lambda t: t.half(),
            "2d": lambda t: t[None],
            "of_511": lambda t: t[:-1].contiguous(),
            "of_1024": lambda t: t.repeat(2),
            "two_apart": _columns_apart,
            "on_another_device": lambda t: t.to("meta"),
        },
        "freqs_cis": {
            "of_bf16": lambda t: t.bfloat16(),
            "of_complex64": lambda t: torch.view_as_complex(t.unflatten(1, (-1, 2))),
            "1d": lambda t: t[0],
            "3d": lambda t: t.unflatten(1, (-1, 2)),
            "of_32": lambda t: t[:, :32].contiguous(),
            "of_128": lambda t: torch.cat([t, t], dim=1),
            "rows_apart": _rows_apart,
            "columns_apart": _columns_apart,
            "on_another_device": lambda t: t.to("meta"),
        },
        "k_cache": {
            "of_int8": lambda t: t.view(torch.int8),
            "of_e4m3": lambda t: t.view(torch.float8_e4m3fn),
            "1d": lambda t: t[0],
            "3d": lambda t: t[None],
            "row_too_small": lambda t: t[:, : LAYOUT.page_bytes(2) - 1].contiguous(),
            "row_of_data_alone": lambda t: t[:, : 2 * LAYOUT.data_bytes].contiguous(),
            "rows_apart": _rows_apart,
            "columns_apart": _columns_apart,
            "on_another_device": lambda t: t.to("meta"),
        },
        "out": {
            "of_float32": lambda t: t.float(),
            "of_float16": lambda t: t.half(),
            "1d": lambda t: t[0],
            "3d": lambda t: t[None],
            "too_few_rows": lambda t: t[:-1],
            "too_many_rows": lambda t: torch.cat([t, t]),
            "of_448": lambda t: t[:, :KEPT].contiguous(),
            "rows_apart": _rows_apart,
            "columns_apart": _columns_apart,
            "on_another_device": lambda t: t.to("meta"),
        },
    }
    for name in PER_ROW:
        faults[name] = {
            "of_int16": lambda t: t.to(torch.int16),
            "of_float32": lambda t: t.float(),
            "2d": lambda t: t[:, None],
            "too_short": lambda t: t[:-1],
            "too_long": lambda t: torch.cat([t, t]),
            "two_apart": _columns_apart,
            "on_another_device": lambda t: t.to("meta"),
        }
    faults["req"]["of_int32"] = lambda t: t.int()
    bad = [
        BadInput(f"{name}_{fault}", _of(name, change), names=name)
        for name, changes in faults.items()
        for fault, change in changes.items()
    ]
    bad += [
        BadInput("eps_of_zero", _scalar("eps", 0.0), names="eps"),
        BadInput("eps_negative", _scalar("eps", -1e-6), names="eps"),
        BadInput("page_size_of_3", _scalar("page_size", 3), names="page_size"),
        BadInput("page_size_of_0", _scalar("page_size", 0), names="page_size"),
        BadInput("page_size_negative", _scalar("page_size", -2), names="page_size"),
        # A page of 4 needs longer rows than one of 2.
        BadInput("page_size_of_larger_pages", _scalar("page_size", 4), names="k_cache"),
    ]
    if not verify:
        return [
            *bad,
            BadInput("ring_size_of_1", _scalar("ring_size", 1), names="ring_size"),
            BadInput("ring_size_of_0", _scalar("ring_size", 0), names="ring_size"),
            BadInput("ring_size_negative", _scalar("ring_size", -2), names="ring_size"),
        ]
    return [
        *bad,
        BadInput("draft_len_of_0", _scalar("draft_len", 0), names="draft_len"),
        BadInput("draft_len_negative", _scalar("draft_len", -2), names="draft_len"),
        BadInput("draft_len_no_divisor", _scalar("draft_len", 3), names="draft_len"),
        # Rings of 4 rows; of blocks of 4, and of rings of 2 and 1 with blocks of 2.
        BadInput("draft_len_of_a_ring", _scalar("draft_len", 4), names="ring_size"),
        BadInput("ring_size_of_a_block", _scalar("ring_size", 2), names="ring_size"),
        BadInput("ring_size_below_a_block", _scalar("ring_size", 1), names="ring_size"),
        BadInput("ring_size_of_0", _scalar("ring_size", 0), names="ring_size"),
    ]


BAD_DECODE = _params([3, 4, 5, 7], ring_size=4)
BAD_VERIFY = _params([3, 4], 2, ring_size=4)


# ---------------------------------------------------------------- benchmark

DRAFT_LEN = 6
"""Rows of a request in the published measurements."""

PUBLISHED_VERIFY_US = {1: 2.62, 8: 2.83, 64: 3.73}
"""Graph replay of the published kernel, rebuilt for an H200, by requests of 6 rows."""

PUBLISHED_DECODE_US = {1: 1.52, 6: 2.91}
"""The same of decode, by rows."""


def _bytes_moved(requests: int, draft_len: int) -> int:
    """Input rows, partners from the ring, parked rows, latents, tokens and indices."""
    rows = requests * draft_len
    stored = rows // 2
    parked = rows - stored
    ring = requests if draft_len % 2 == 0 else stored
    return 4 * WIDTH * (rows + parked + ring) + stored * (2 * LATENT + 583) + 24 * rows


def _verify_reach(requests: int) -> Callable[[Mapping[str, float]], tuple[bool, str]]:
    published = PUBLISHED_VERIFY_US[requests]

    def reach(us: Mapping[str, float]) -> tuple[bool, str]:
        met = us["triton"] <= published and 3 * us["triton"] <= us["decode_calls"]
        return met, f"at most the published {published} us, and a third of {DRAFT_LEN} decode calls"

    return reach


def _decode_reach(rows: int) -> Callable[[Mapping[str, float]], tuple[bool, str]]:
    published = PUBLISHED_DECODE_US[rows]
    return lambda us: (us["triton"] <= published, f"at most the published {published} us")


def _bench_params(requests: int, draft_len: int) -> dict[str, Any]:
    return _params(
        [101 + 2 * b for b in range(requests)],
        draft_len,
        ring_size=16,
        page_size=128,
        content="normal",
        weight="near_one",
        max_pos=4096,
        position_dtype="int64",
        loc_dtype="int64",
    )


def _prepare(function: str) -> Callable[[Args], Callable[[], object]]:
    def prepare(args: Args) -> Callable[[], object]:
        # Here, not at the top: a spec is read before it is known how Triton is to run.
        from draftproof.kernels import c2_compress as kernels

        launcher = getattr(kernels, function)
        return lambda: launcher(**args)

    return prepare


def _bench_verify() -> list[BenchPoint]:
    return [
        BenchPoint(
            f"requests_{requests}_rows_{DRAFT_LEN}",
            _bench_params(requests, DRAFT_LEN),
            arms={
                "triton": _prepare("c2_verify"),
                "decode_calls": _prepare("c2_verify_steps"),
                "unfused": _prepare("c2_verify_baseline"),
            },
            baseline="decode_calls",
            bytes_moved=_bytes_moved(requests, DRAFT_LEN),
            published_us={"triton": published},
            reach=_verify_reach(requests),
        )
        for requests, published in PUBLISHED_VERIFY_US.items()
    ]


def _bench_decode() -> list[BenchPoint]:
    return [
        BenchPoint(
            f"rows_{rows}",
            _bench_params(rows, 1),
            bytes_moved=_bytes_moved(rows, 1),
            published_us={"triton": published},
            reach=_decode_reach(rows),
        )
        for rows, published in PUBLISHED_DECODE_US.items()
    ]


# ---------------------------------------------------------------- the specs

SPECS = [
    OpSpec(
        name="c2_decode",
        family="c2_compress",
        summary="ratio-2 compression of one row a request, with its partner from the ring",
        build=build_decode,
        effects=EFFECTS,
        cases=_decode_cases(),
        strategy=_strategy((1,)),
        bad_inputs=_bad_inputs(verify=False),
        bad_input_params=BAD_DECODE,
        replays=replays,
        rescale=rescale,
        bench=_bench_decode,
        laws=DECODE_LAWS,
    ),
    OpSpec(
        name="c2_verify",
        family="c2_compress",
        summary="ratio-2 compression of blocks of draft_len rows in one launch, equal to decode",
        build=build,
        effects=EFFECTS,
        cases=_verify_cases(),
        strategy=_strategy((1, 2, 3, 5, 6)),
        bad_inputs=_bad_inputs(verify=True),
        bad_input_params=BAD_VERIFY,
        replays=replays,
        rescale=rescale,
        bench=_bench_verify,
        laws=VERIFY_LAWS,
    ),
]
