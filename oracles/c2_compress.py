"""Golden oracle of `c2_decode` and `c2_verify`: two positions pooled into one latent, and stored.

Each stage is a function of its own: pool, normalise, rotate, fake FP4, KV store. The first two pass
through exp and rsqrt, so that an implementation may choose within bounds; everything behind them is
exact, given the latent that it chose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.oracles.numerics import (
    amax_without_nan,
    encode_e4m3,
    fake_fp4,
    fma32,
    fp4_scale,
    kv_code,
    kv_multiplier,
    round_bf16,
    scale_by_multiplier,
    widen_bf16,
)

LATENT_DIM = 512
"""Features of a latent; a row of input or ring holds so many kv, then so many scores."""
ROPE_DIM = 64
"""Features at the end of a latent that are rotated, as neighbouring pairs."""
FP4_GROUP = 16
"""Features that share an FP4 scale."""

UNIT = 2.0**-24
"""Half the distance of 1 to the next fp32: the largest relative error of one rounding."""
POOL_UNITS = 10
"""Error of the pooled value in units of the terms' magnitude."""
EXP_UNITS = 3
"""Error of exp(-d) in units of d: what its argument may be off by."""
SMALLEST_NORMAL = 2.0**-126
"""fp32's; an exp, or a result, below it may be flushed to zero."""
NORM_UNITS = 270
"""Error of the norm in units of the result: 512 squares summed in any order, a root, products."""
SMALLEST_STEP = 2.0**-149
"""fp32's: twice the error of a product below the normal range."""
LARGEST_KV = 2.0**59
"""The squares of 512 values below it add up to a finite fp32."""

INDEX_DTYPES = (torch.int32, torch.int64)


class KvLayout(NamedTuple):
    """How a token lies in a page of the KV cache: one row of the table of layouts.

    A page holds the data of all its tokens, then the scale bytes of all of them, then padding.

    Attributes
    ----------
    e4m3 : int
        Features stored as E4M3, one byte each, from the first on.
    bf16 : int
        Features stored behind them as bf16.
    tile : int
        E4M3 features that share a UE8M0 code.
    scale_bytes : int
        Bytes of a token's codes; those behind the last code are not written.
    alignment : int
        A page's bytes are a multiple of it.
    """

    e4m3: int
    bf16: int
    tile: int
    scale_bytes: int
    alignment: int

    @property
    def data_bytes(self) -> int:
        """Bytes of a token's features."""
        return self.e4m3 + 2 * self.bf16

    @property
    def codes(self) -> int:
        """Scale codes of a token."""
        return self.e4m3 // self.tile

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of so many tokens."""
        used = (self.data_bytes + self.scale_bytes) * page_size
        return -(-used // self.alignment) * self.alignment


LAYOUTS = {
    584: KvLayout(e4m3=448, bf16=64, tile=64, scale_bytes=8, alignment=576),
}
"""Layouts by the bytes that a token takes."""
LAYOUT = LAYOUTS[584]


def c2_decode(
    kv_input: Tensor,
    kv_state: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    req: Tensor,
    raw_out_loc: Tensor,
    freqs_cis: Tensor,
    k_cache: Tensor,
    *,
    eps: float,
    page_size: int,
    ring_size: int,
    out: Tensor,
) -> None:
    """Park even positions in their ring; pool odd ones with their ring's partner and store them.

    Parameters
    ----------
    kv_input : Tensor, [n, 1024], float32
        One row a request: 512 kv, then 512 scores.
    kv_state : Tensor, [slots * ring_size, 1024], float32
        Rings; row `req * ring_size + position % ring_size` is that of a position. **Written** at
        even positions, bit for bit.
    norm_weight : Tensor, [512], bfloat16
    positions, raw_out_loc : Tensor, [n], int32 or int64, each its own
        A row whose raw_out_loc is 0 is padded: it parks nothing and stores nothing.
    req : Tensor, [n], int64
        Ring of each row; no two live rows share one.
    freqs_cis : Tensor, [max_pos, 64], float32
        Rotation of each pair at each position: cosine and sine, interleaved.
    k_cache : Tensor, [pages, page_bytes or more], uint8
        **Written** at slot `raw_out_loc // 2` for odd positions.
    eps : float
        Added to the mean square.
    page_size : int
        Tokens of a page, a power of two.
    ring_size : int
        Rows of a request's ring, 2 at least.
    out : Tensor, [n, 512], bfloat16
        **Written** at odd positions: the normalised latent before rotation. Unspecified where an
        odd row is padded, untouched elsewhere.

    Raises
    ------
    ValueError
        On arguments outside this description, before anything is written.

    Notes
    -----
    Source: the published rule of the op. `out_bounds` says what else `out` may be; the cache is
    exact, given `out`.
    """
    validate(
        kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache,
        eps=eps, page_size=page_size, ring_size=ring_size, out=out,
    )  # fmt: skip
    _compress(
        kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache,
        eps, page_size, ring_size, 1, out,
    )  # fmt: skip


def c2_verify(
    kv_input: Tensor,
    kv_state: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    req: Tensor,
    raw_out_loc: Tensor,
    freqs_cis: Tensor,
    k_cache: Tensor,
    *,
    eps: float,
    page_size: int,
    ring_size: int,
    draft_len: int,
    out: Tensor,
) -> None:
    """Do what draft_len calls of `c2_decode` would, one position of every request at a time.

    The partner of a block's first row waits in the ring; that of any other is the row before it.

    Parameters
    ----------
    draft_len : int
        Rows of a request: row `b * draft_len + j` is row j of block b. Positions of a block are
        consecutive, and a block is live or padded as a whole.
    ring_size : int
        Above draft_len, so that no row parks where the block's first one reads.
    kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache, out
        As `c2_decode`; no two live blocks share a ring.
    eps, page_size
        As `c2_decode`.

    Raises
    ------
    ValueError
        On arguments outside this description, before anything is written.
    """
    validate(
        kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache,
        eps=eps, page_size=page_size, ring_size=ring_size, draft_len=draft_len, out=out,
    )  # fmt: skip
    _compress(
        kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache,
        eps, page_size, ring_size, draft_len, out,
    )  # fmt: skip


def _compress(
    kv_input: Tensor,
    kv_state: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    req: Tensor,
    raw_out_loc: Tensor,
    freqs_cis: Tensor,
    k_cache: Tensor,
    eps: float,
    page_size: int,
    ring_size: int,
    draft_len: int,
    out: Tensor,
) -> None:
    # All partners are read before anything is parked.
    rows = completing(positions, raw_out_loc).nonzero().flatten()
    partner = partners(kv_input, kv_state, positions, req, ring_size, draft_len)[rows]
    own = kv_input[rows]
    parked = ((positions % 2 == 0) & (raw_out_loc != 0)).nonzero().flatten()
    ring_rows = req[parked] * ring_size + positions[parked].long() % ring_size
    # As integers, so that no conversion can touch a NaN's payload.
    kv_state.view(torch.int32)[ring_rows] = kv_input.view(torch.int32)[parked]

    pooled = round_bf16(pool(partner, own))
    latent = round_bf16(normalise(widen_bf16(pooled).double(), norm_weight, eps))
    out[rows] = latent
    data, codes = encode(latent, freqs_cis[positions[rows].long() - 1])
    store(k_cache, raw_out_loc[rows].long() // 2, data, codes, page_size)


# ---------------------------------------------------------------- which rows, and their partners


def completing(positions: Tensor, raw_out_loc: Tensor) -> Tensor:
    """Say which rows yield a latent: bool [n], those at odd positions that are not padded."""
    return (positions % 2 == 1) & (raw_out_loc != 0)


def partners(
    kv_input: Tensor,
    kv_state: Tensor,
    positions: Tensor,
    req: Tensor,
    ring_size: int,
    draft_len: int,
) -> Tensor:
    """Give the row of the position before each row's own.

    Parameters
    ----------
    kv_input, kv_state, positions, req, ring_size, draft_len
        As `c2_verify`; draft_len is 1 for `c2_decode`. What the ring holds before the call counts.

    Returns
    -------
    Tensor
        float32 ``[n, 1024]``. Meaningless in rows that do not complete a pair.
    """
    row = torch.arange(len(kv_input), device=kv_input.device)
    first = row % draft_len == 0
    found = kv_input[(row - 1).clamp(min=0)]
    # Only where a ring is read is req known to name one.
    read = (first & (positions % 2 == 1)).nonzero().flatten()
    ring_rows = req[read] * ring_size + (positions[read].long() - 1) % ring_size
    found[read] = kv_state[ring_rows]
    return found


# ---------------------------------------------------------------- pool


def pool(partner: Tensor, own: Tensor) -> Tensor:
    """Weigh two rows by the softmax of their scores, element by element.

    Parameters
    ----------
    partner, own : Tensor
        float32 ``[m, 1024]``.

    Returns
    -------
    Tensor
        float64 ``[m, 512]``, not rounded. NaN where a score is NaN, where both are the same
        infinity, and where a kv is infinite that weighs nothing.
    """
    kv0, kv1, w0, w1, _ = _weighed(partner, own)
    return (kv0 * w0 + kv1 * w1) / (w0 + w1)


def pool_bounds(partner: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Give the least and the greatest pooled value that a correct implementation can round to.

    Parameters
    ----------
    partner, own : Tensor
        float32 ``[m, 1024]``.

    Returns
    -------
    lower, upper : Tensor
        float64 ``[m, 512]``, bf16 values; both NaN, or both the same infinity, where every
        implementation gives that.
    """
    kv0, kv1, w0, w1, d = _weighed(partner, own)
    value = (kv0 * w0 + kv1 * w1) / (w0 + w1)
    magnitude = (kv0.abs() * w0 + kv1.abs() * w1) / (w0 + w1)
    smaller = torch.where(w0 < w1, kv0, kv1).abs()
    e = torch.minimum(w0, w1)
    # A distance that is infinite leaves no weight that its error could change.
    from_exp = torch.where(e == 0, 0.0, d * (smaller * e / (1 + e)))
    error = POOL_UNITS * UNIT * magnitude + EXP_UNITS * UNIT * from_exp + SMALLEST_NORMAL
    # An exp below the normal range may be 0.
    error = error + smaller * SMALLEST_NORMAL
    exact = ~torch.isfinite(value)
    lower = round_bf16(torch.where(exact, value, value - error))
    upper = round_bf16(torch.where(exact, value, value + error))
    return widen_bf16(lower).double(), widen_bf16(upper).double()


def _weighed(partner: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Split two rows into kv and weights, in float64, with the distance of the scores."""
    kv0, s0 = partner.double().split(LATENT_DIM, dim=1)
    kv1, s1 = own.double().split(LATENT_DIM, dim=1)
    d = (s0 - s1).abs()
    e = torch.exp(-d)
    return kv0, kv1, torch.where(s0 < s1, e, 1.0), torch.where(s0 < s1, 1.0, e), d


# ---------------------------------------------------------------- norm


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square, and multiply by the weight.

    Parameters
    ----------
    x : Tensor
        float64 ``[m, 512]``, bf16 values.
    weight : Tensor
        bfloat16 ``[512]``.
    eps : float

    Returns
    -------
    Tensor
        float64 ``[m, 512]``, not rounded.
    """
    mean = (x * x).mean(dim=1, keepdim=True)
    return x * (1.0 / torch.sqrt(mean + eps)) * widen_bf16(weight).double()


def norm_bounds(lower: Tensor, upper: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Give the least and the greatest element that some row between two others normalises to.

    Parameters
    ----------
    lower, upper : Tensor
        float64 ``[m, 512]``, from `pool_bounds`.
    weight : Tensor
        bfloat16 ``[512]``.
    eps : float

    Returns
    -------
    lower, upper : Tensor
        float64 ``[m, 512]``, not rounded. Both are what `normalise` gives in rows that hold a NaN
        or an infinity.
    """
    w = widen_bf16(weight).double()
    least_square = torch.where(
        (lower <= 0) & (upper >= 0), 0.0, torch.minimum(lower.abs(), upper.abs()) ** 2
    )
    greatest_square = torch.maximum(lower.abs(), upper.abs()) ** 2
    fewest = least_square.sum(1, keepdim=True) - least_square
    most = greatest_square.sum(1, keepdim=True) - greatest_square

    def extreme(x: Tensor, others: Tensor) -> Tensor:
        return x / torch.sqrt((others + x * x) / LATENT_DIM + eps)

    # x / rms grows with x; the squares of the others pull it towards 0.
    least = extreme(lower, torch.where(lower < 0, fewest, most).clamp(min=0)) * w
    greatest = extreme(upper, torch.where(upper < 0, most, fewest).clamp(min=0)) * w
    least, greatest = torch.minimum(least, greatest), torch.maximum(least, greatest)

    def error(end: Tensor) -> Tensor:
        return NORM_UNITS * UNIT * end.abs() + SMALLEST_STEP * (1 + w.abs())

    settled = ~torch.isfinite(lower).all(1, keepdim=True) | ~torch.isfinite(w)
    natural = normalise(lower, weight, eps)
    return (
        torch.where(settled, natural, least - error(least)),
        torch.where(settled, natural, greatest + error(greatest)),
    )


def out_bounds(
    kv_input: Tensor,
    kv_state: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    req: Tensor,
    ring_size: int,
    draft_len: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Give the least and the greatest `out` that a correct implementation can round to.

    Parameters
    ----------
    kv_input, kv_state, norm_weight, positions, req, ring_size, draft_len, eps
        As `c2_verify`, before the call; draft_len is 1 for `c2_decode`.

    Returns
    -------
    lower, upper : Tensor
        float64 ``[n, 512]``. Meaningless in rows that do not complete a pair.
    """
    partner = partners(kv_input, kv_state, positions, req, ring_size, draft_len)
    return norm_bounds(*pool_bounds(partner, kv_input), norm_weight, eps)


def undefined(
    kv_input: Tensor,
    kv_state: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    req: Tensor,
    ring_size: int,
    draft_len: int,
) -> Tensor:
    """Say which rows' `out` the rule leaves open, because they leave the domain of the op.

    Parameters
    ----------
    kv_input, kv_state, norm_weight, positions, req, ring_size, draft_len
        As `out_bounds`.

    Returns
    -------
    Tensor
        bool ``[n]``. True where a finite kv reaches 2^59, where an infinite kv weighs so little
        that its weight may be 0, or where a pooled value that may be 0 meets an infinite weight.
    """
    partner = partners(kv_input, kv_state, positions, req, ring_size, draft_len)
    kv0, kv1, w0, w1, _ = _weighed(partner, kv_input)
    large = torch.maximum(
        torch.where(torch.isfinite(kv0), kv0.abs(), 0.0),
        torch.where(torch.isfinite(kv1), kv1.abs(), 0.0),
    )
    smaller, e = torch.where(w0 < w1, kv0, kv1), torch.minimum(w0, w1)
    fading = torch.isinf(smaller) & (e > 0) & (e < 2 * SMALLEST_NORMAL)
    lower, upper = pool_bounds(partner, kv_input)
    meets = torch.isinf(widen_bf16(norm_weight)) & (lower <= 0) & (upper >= 0)
    return ((large >= LARGEST_KV) | fading | meets).any(1)


# ---------------------------------------------------------------- rotate, quantise, store


def rotate(latent: Tensor, rotation: Tensor) -> Tensor:
    """Turn the last 64 features as adjacent pairs x, y by c + si.

        even = bf16(fma32(x, c, -fl32(y * s)))
        odd  = bf16(fma32(x, s,  fl32(y * c)))

    Parameters
    ----------
    latent : Tensor
        bfloat16 ``[m, 512]``.
    rotation : Tensor
        float32 ``[m, 64]``: c and s of each pair, interleaved.

    Returns
    -------
    Tensor
        bfloat16 ``[m, 512]``.
    """
    kept = LATENT_DIM - ROPE_DIM
    x, y = widen_bf16(latent[:, kept:]).unflatten(1, (ROPE_DIM // 2, 2)).unbind(-1)
    c, s = rotation.unflatten(1, (ROPE_DIM // 2, 2)).unbind(-1)
    even, odd = fma32(x, c, -(y * s)), fma32(x, s, y * c)
    turned = torch.stack((even, odd), dim=-1).flatten(1)
    turned = torch.where(torch.isnan(turned), torch.nan, turned)
    return torch.cat((latent[:, :kept], round_bf16(turned)), dim=1)


def fake_fp4_latent(latent: Tensor) -> Tensor:
    """Quantise all features to FP4, in groups of 16 with an E4M3 scale each, and give them back.

    Parameters
    ----------
    latent : Tensor
        bfloat16 ``[m, 512]``.

    Returns
    -------
    Tensor
        float32 ``[m, 512]``, every value exact in bf16. A NaN stays one, and takes no part in its
        group's scale.
    """
    groups = widen_bf16(latent).unflatten(1, (-1, FP4_GROUP))
    scale = fp4_scale(amax_without_nan(groups))[..., None]
    return fake_fp4(groups, scale).flatten(1)


def encode(latent: Tensor, rotation: Tensor, layout: KvLayout = LAYOUT) -> tuple[Tensor, Tensor]:
    """Make the bytes of tokens: rotated, quantised to FP4 and back, then in the cache's types.

    Parameters
    ----------
    latent : Tensor
        bfloat16 ``[m, 512]``: `out` as it was emitted.
    rotation : Tensor
        float32 ``[m, 64]``: the row of freqs_cis of the position before each.
    layout : KvLayout

    Returns
    -------
    data : Tensor
        uint8 ``[m, layout.data_bytes]``.
    codes : Tensor
        uint8 ``[m, layout.codes]``.
    """
    values = fake_fp4_latent(rotate(latent, rotation))
    tiles = values[:, : layout.e4m3].unflatten(1, (layout.codes, layout.tile))
    codes = kv_code(amax_without_nan(tiles))
    scaled = scale_by_multiplier(tiles, kv_multiplier(codes)[..., None])
    tail = round_bf16(values[:, layout.e4m3 :].contiguous()).view(torch.uint8)
    return torch.cat((encode_e4m3(scaled).flatten(1), tail), dim=1), codes


def store(
    k_cache: Tensor,
    slots: Tensor,
    data: Tensor,
    codes: Tensor,
    page_size: int,
    layout: KvLayout = LAYOUT,
) -> None:
    """Write tokens into their places in the paged cache, and nothing else.

    Parameters
    ----------
    k_cache : Tensor
        uint8 ``[pages, layout.page_bytes(page_size) or more]``. **Written**.
    slots : Tensor
        int64 ``[m]``: token of the cache.
    data, codes : Tensor
        From `encode`.
    page_size : int
    layout : KvLayout
    """
    for content, columns in zip((data, codes), places(slots, page_size, layout), strict=True):
        k_cache[(slots // page_size)[:, None], columns] = content


def places(slots: Tensor, page_size: int, layout: KvLayout = LAYOUT) -> tuple[Tensor, Tensor]:
    """Give the columns of the cache that tokens' data and codes take.

    Parameters
    ----------
    slots : Tensor
        int64 ``[m]``.
    page_size : int
    layout : KvLayout

    Returns
    -------
    data : Tensor
        int64 ``[m, layout.data_bytes]``.
    codes : Tensor
        int64 ``[m, layout.codes]``.
    """
    token = (slots % page_size)[:, None]
    byte = torch.arange(layout.data_bytes, device=slots.device)
    first_scale = layout.data_bytes * page_size
    return (
        token * layout.data_bytes + byte,
        first_scale + token * layout.scale_bytes + byte[: layout.codes],
    )


# ---------------------------------------------------------------- arguments


def validate(
    kv_input: Tensor,
    kv_state: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    req: Tensor,
    raw_out_loc: Tensor,
    freqs_cis: Tensor,
    k_cache: Tensor,
    *,
    eps: float,
    page_size: int,
    ring_size: int,
    out: Tensor,
    draft_len: int | None = None,
) -> None:
    """Raise ValueError unless the arguments are as `c2_decode` and `c2_verify` describe them.

    Parameters
    ----------
    kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache, out
        As `c2_decode`. No value of a tensor is read.
    eps, page_size, ring_size
        As `c2_decode`.
    draft_len : int, optional
        That of `c2_verify`; None for `c2_decode`.

    Raises
    ------
    ValueError
        Naming the argument, what was found and what is wanted.
    """
    fp32, bf16 = torch.float32, torch.bfloat16
    rows = kv_input.shape[0] if kv_input.dim() else 0
    # (name, tensor, types, shape): None is any length.
    expected: list[tuple[str, Tensor, tuple[torch.dtype, ...], tuple[int | None, ...]]] = [
        ("kv_input", kv_input, (fp32,), (None, 2 * LATENT_DIM)),
        ("kv_state", kv_state, (fp32,), (None, 2 * LATENT_DIM)),
        ("norm_weight", norm_weight, (bf16,), (LATENT_DIM,)),
        ("positions", positions, INDEX_DTYPES, (rows,)),
        ("req", req, (torch.int64,), (rows,)),
        ("raw_out_loc", raw_out_loc, INDEX_DTYPES, (rows,)),
        ("freqs_cis", freqs_cis, (fp32,), (None, ROPE_DIM)),
        ("k_cache", k_cache, (torch.uint8,), (None, None)),
        ("out", out, (bf16,), (rows, LATENT_DIM)),
    ]
    for name, tensor, dtypes, shape in expected:
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"{name} must be {wanted}, got {tensor.dtype}")
        if tensor.dim() != len(shape) or any(
            due is not None and due != found for due, found in zip(shape, tensor.shape, strict=True)
        ):
            due = ", ".join("any" if length is None else str(length) for length in shape)
            raise ValueError(f"{name} must be of shape [{due}], got {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tensor.device != kv_input.device:
            raise ValueError(
                f"{name} must be on {kv_input.device} as kv_input is, got {tensor.device}"
            )

    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")
    if draft_len is None:
        if ring_size < 2:
            raise ValueError(f"ring_size must be at least 2, got {ring_size}")
    else:
        if draft_len < 1:
            raise ValueError(f"draft_len must be at least 1, got {draft_len}")
        if rows % draft_len:
            raise ValueError(
                f"draft_len is {draft_len}: kv_input must have whole blocks, got {rows} rows"
            )
        if ring_size <= draft_len:
            raise ValueError(
                f"ring_size must be above draft_len {draft_len}, or a block overwrites the ring "
                f"row that its first row reads; got {ring_size}"
            )
    if kv_state.shape[0] % ring_size:
        raise ValueError(
            f"kv_state must hold whole rings of {ring_size} rows, got {kv_state.shape[0]} rows"
        )
    if k_cache.shape[1] < LAYOUT.page_bytes(page_size):
        raise ValueError(
            f"k_cache needs rows of {LAYOUT.page_bytes(page_size)} bytes for pages of "
            f"{page_size} tokens, got {k_cache.shape[1]}"
        )
