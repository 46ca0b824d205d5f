"""Ratio-2 compression of KV rows, one at a time or a block of draft rows, in one launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.numerics import (
    bits_float,
    div32,
    encode_e4m3,
    fake_fp4,
    fma32,
    fp4_scale,
    kv_code,
    kv_multiplier,
    magnitude_bits,
    round_bf16,
    scale_by_multiplier,
    widen_bf16,
)
from draftproof.kernels.runtime import INTERPRETED, runs_triton
from draftproof.oracles import numerics as exact

LATENT_DIM = tl.constexpr(512)
"""Features of a latent; an input row holds as many values and then as many scores."""
ROPE_DIM = tl.constexpr(64)
"""Features at its end that are rotated."""
FP4_GROUP = tl.constexpr(16)
"""Features that share an E4M3 scale before they are stored."""
RATIO = 2
"""Positions that are pooled into one latent."""

WARPS = 4
"""Warps of a program: each thread then holds 4 features, one load of 16 bytes."""
WIDE_BYTES = 16
"""Bytes of the widest load: whole ones need bases and page strides that are multiples of it."""
MAX_ROWS = 2**21
"""Rows of a call whose elements the kernel counts in 32 bits."""

_INDEX_DTYPES = (torch.int32, torch.int64)


# ---------------------------------------------------------------------------------------------
# How a token lies in a page


@dataclass(frozen=True)
class KvLayout:
    """How the tokens of a page lie in its bytes: all their data, then all their scale codes.

    Attributes
    ----------
    fp8_features : int
        Features at the start of a latent that are stored as E4M3; those behind them are bf16.
    block : int
        Features that share a UE8M0 code.
    code_bytes : int
        Bytes of a token's codes, unused ones at their end included.
    page_multiple : int
        Bytes of a page are a multiple of it.
    """

    fp8_features: int
    block: int
    code_bytes: int
    page_multiple: int

    @property
    def data_bytes(self) -> int:
        """Bytes of a token's E4M3 and bf16 values."""
        return self.fp8_features + 2 * (LATENT_DIM.value - self.fp8_features)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all."""
        return self.data_bytes + self.code_bytes

    @property
    def blocks(self) -> int:
        """Codes of a token that are in use."""
        return self.fp8_features // self.block

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of `page_size` tokens, padding included."""
        return -(-self.token_bytes * page_size // self.page_multiple) * self.page_multiple


KV_LAYOUTS = {
    "fp8_448_bf16_64": KvLayout(fp8_features=448, block=64, code_bytes=8, page_multiple=576),
}
"""Layouts by name."""

LAYOUT = "fp8_448_bf16_64"
"""The layout that `c2_decode` and `c2_verify` store."""


def ring_size_for(num_draft_tokens: int) -> int:
    """Choose the rows of a request's ring.

    Parameters
    ----------
    num_draft_tokens : int
        Tokens that a target verify step checks at once; 0 without speculation.

    Returns
    -------
    int
        A power of two above `num_draft_tokens`, so that no block overwrites what its first row
        reads; 2 without speculation.

    Raises
    ------
    ValueError
        If the number is negative.
    """
    if not _is_int(num_draft_tokens) or num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be an int of at least 0, not {num_draft_tokens!r}")
    return 1 << (num_draft_tokens + 1).bit_length()


# ---------------------------------------------------------------------------------------------
# The kernel


@triton.jit
def _pool(kv0, score0, kv1, score1):
    """Weigh two values by the softmax of their scores."""
    e = tl.exp(-tl.abs(score0 - score1))
    # Where a score is NaN, and of two -inf, both weights are NaN.
    weight0 = tl.where(score0 >= score1, 1.0 + (e - e), e)
    weight1 = tl.where(score1 >= score0, 1.0 + (e - e), e)
    return div32(kv0 * weight0 + kv1 * weight1, 1.0 + e)


@triton.jit
def _places(base, offsets, WIDE: tl.constexpr):
    """Give pointers to consecutive elements; with WIDE the first is at a multiple of 16 bytes."""
    pointers = base + offsets
    # A hint about an argument would be lost: it must be about the sum.
    return tl.multiple_of(pointers, 16) if WIDE else pointers


# Neither a size nor a stride nor an address makes a kernel of its own: a server that meets a new
# one must not compile in the middle of decoding.
@triton.jit(
    do_not_specialize=[
        "first_row",
        "row_step",
        "draft_len",
        "ring_size",
        "page_shift",
        "page_stride",
    ],
    do_not_specialize_on_alignment=[
        "kv_input",
        "kv_state",
        "norm_weight",
        "positions",
        "req",
        "raw_out_loc",
        "freqs_cis",
        "k_cache",
        "out",
    ],
)
def _compress_kernel(
    kv_input,
    kv_state,
    norm_weight,
    positions,
    req,
    raw_out_loc,
    freqs_cis,
    k_cache,
    out,
    eps: tl.float32,
    first_row: tl.int32,
    row_step: tl.int32,
    draft_len: tl.int32,
    ring_size: tl.int32,
    page_shift: tl.int32,
    page_stride: tl.int64,
    VERIFY: tl.constexpr,
    WIDE: tl.constexpr,
    FP8_FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Park an even row, or pool an odd one with its partner and store the latent.

    With VERIFY the rows of a block of `draft_len` follow each other, and only the first of a block
    reads the ring. Both forms compute a row in one program of the same shape, hence the same bits.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = first_row + tl.program_id(0) * row_step
    in_block = row % draft_len if VERIFY else 0

    # All that does not depend on another load is under way before anything is waited for.
    position = tl.load(positions + row)
    slot_of_request = tl.load(req + row)
    location = tl.load(raw_out_loc + row).to(tl.int64)
    feature = tl.arange(0, LATENT_DIM)
    own = _places(kv_input + row.to(tl.int64) * (2 * LATENT_DIM), feature, WIDE)
    kv1 = tl.load(own)
    score1 = tl.load(own + LATENT_DIM)
    weight = widen_bf16(tl.load(_places(norm_weight, feature, WIDE)))
    if VERIFY:
        behind = own - 2 * LATENT_DIM
        within = feature < in_block * LATENT_DIM
        kv0 = tl.load(behind, mask=within, other=0.0)
        score0 = tl.load(behind + LATENT_DIM, mask=within, other=0.0)

    if location != 0:
        first_of_ring = slot_of_request * ring_size
        if position % 2 == 0:
            place = (first_of_ring + position % ring_size) * (2 * LATENT_DIM)
            parked = _places(kv_state + place, feature, WIDE)
            tl.store(parked, kv1)
            tl.store(parked + LATENT_DIM, score1)
        else:
            partner = position.to(tl.int64) - 1
            place = (first_of_ring + partner % ring_size) * (2 * LATENT_DIM)
            from_ring = feature >= in_block * LATENT_DIM
            parked = _places(kv_state + place, feature, WIDE)
            ring_kv = tl.load(parked, mask=from_ring, other=0.0)
            ring_score = tl.load(parked + LATENT_DIM, mask=from_ring, other=0.0)
            in_tail = feature >= LATENT_DIM - ROPE_DIM
            turns = freqs_cis + partner * ROPE_DIM - (LATENT_DIM - ROPE_DIM)
            turn = tl.load(_places(turns, feature, WIDE), mask=in_tail, other=0.0)
            if VERIFY:
                kv0 = tl.where(from_ring, ring_kv, kv0)
                score0 = tl.where(from_ring, ring_score, score0)
            else:
                kv0 = ring_kv
                score0 = ring_score

            x = widen_bf16(round_bf16(_pool(kv0, score0, kv1, score1)))
            mean = tl.sum(x * x, axis=0) * (1.0 / LATENT_DIM)
            latent = round_bf16(x * tl.rsqrt(mean + eps) * weight)
            tl.store(_places(out + row.to(tl.int64) * LATENT_DIM, feature, WIDE), latent)

            # The product with y is rounded on its own; that with x is not.
            x, y = tl.split(tl.reshape(widen_bf16(latent), [LATENT_DIM // 2, 2]))
            c, s = tl.split(tl.reshape(turn, [LATENT_DIM // 2, 2]))
            in_tail = tl.arange(0, LATENT_DIM // 2) >= (LATENT_DIM - ROPE_DIM) // 2
            even = tl.where(in_tail, widen_bf16(round_bf16(fma32(x, c, -(y * s)))), x)
            odd = tl.where(in_tail, widen_bf16(round_bf16(fma32(x, s, y * c))), y)

            blocks: tl.constexpr = LATENT_DIM // BLOCK
            shape: tl.constexpr = [blocks, BLOCK // FP4_GROUP, FP4_GROUP]
            value = tl.reshape(tl.join(even, odd), shape)
            amax = bits_float(tl.max(magnitude_bits(value), axis=2, keep_dims=True))
            value = fake_fp4(value, fp4_scale(amax))
            # Only integer maxima: NaN takes part in none.
            amax = tl.max(magnitude_bits(value), axis=2, keep_dims=True)
            code = kv_code(bits_float(tl.max(amax, axis=1, keep_dims=True)))
            scaled = scale_by_multiplier(value, kv_multiplier(code))

            slot = location >> 1
            page = k_cache + (slot >> page_shift) * (page_stride * (16 if WIDE else 1))
            token = slot & ((1 << page_shift) - 1)
            data_bytes: tl.constexpr = 2 * LATENT_DIM - FP8_FEATURES
            data = page + token * data_bytes
            coded = tl.reshape(encode_e4m3(scaled), [LATENT_DIM])
            tl.store(_places(data, feature, WIDE), coded, mask=feature < FP8_FEATURES)
            # bf16 values of even byte addresses may stand at any byte where bases are not aligned.
            tail = tl.reshape(round_bf16(value), [LATENT_DIM])
            behind_fp8 = feature - FP8_FEATURES
            if WIDE:
                tails = (data + FP8_FEATURES).to(tl.pointer_type(tl.bfloat16), bitcast=True)
                tl.store(_places(tails, behind_fp8, WIDE), tail, mask=behind_fp8 >= 0)
            else:
                halves = tail.to(tl.int16, bitcast=True)
                tails = data + FP8_FEATURES + 2 * behind_fp8
                tl.store(tails, (halves & 255).to(tl.uint8), mask=behind_fp8 >= 0)
                upper = ((halves >> 8) & 255).to(tl.uint8)
                tl.store(tails + 1, upper, mask=behind_fp8 >= 0)
            block = tl.arange(0, blocks)[:, None, None]
            codes = page + (data_bytes << page_shift) + token * CODE_BYTES
            tl.store(codes + block, code, mask=block < FP8_FEATURES // BLOCK)


# ---------------------------------------------------------------------------------------------
# Launchers


@functools.cache
def launches_overlap(device: torch.device) -> bool:
    """Say whether a kernel may be put in place while the one before it ends (Hopper and later).

    The kernel waits for that end before it touches memory; what is hidden is launch latency.
    """
    return (
        device.type == "cuda"
        and not INTERPRETED
        and torch.version.hip is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


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
    """Compress one row a request: park an even position, complete and store an odd one.

    One launch, which can be captured in a CUDA graph; call once before, so that the kernel is
    compiled. On a device without Triton the unfused path does it. A call without rows launches
    nothing. All tensors are contiguous.

    Parameters
    ----------
    kv_input : Tensor, [n, 1024], float32
        512 values, then their 512 scores.
    kv_state : Tensor, [slots * ring_size, 1024], float32
        Written. Position p of request q lies in row q * ring_size + p % ring_size.
    norm_weight : Tensor, [512], bfloat16
    positions : Tensor, [n], int32 or int64
    req : Tensor, [n], int64
        Request slots; two rows that are not padding never share one.
    raw_out_loc : Tensor, [n], int32 or int64
        Twice the slot in the cache that a completed latent goes to, or one more; 0 is padding.
    freqs_cis : Tensor, [max_pos, 64], float32
        cos and sin of each pair of features, interleaved.
    k_cache : Tensor, [pages, page_bytes], uint8
        Written, in the layout `LAYOUT`; rows may be wider than a page needs.
    eps : float
        Of the RMS norm, above 0.
    page_size : int
        Tokens of a page, a power of two.
    ring_size : int
        Rows of a request's ring, 2 at least.
    out : Tensor, [n, 512], bfloat16
        Written in rows that complete: the latent before it is rotated.

    Raises
    ------
    ValueError
        Naming what is wrong, before anything is written.

    Notes
    -----
    Source: the published rule of the op, see `draftproof.oracles.c2_compress`.
    """
    call = _Call(
        *(kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache),
        *(out, eps, page_size, ring_size),
    )
    check_arguments(call)
    if not runs_triton(kv_input.device):
        _decode_unfused(call)
    elif kv_input.shape[0]:
        _launch(call, kv_input.shape[0])


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
    """Compress blocks of draft rows as that many calls of `c2_decode` would, in one launch.

    Rows but the first of a block find their partner in the row before them; the first reads the
    ring. On a device without Triton it is done step by step.

    Parameters
    ----------
    kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache, out
        As `c2_decode`. Row b * draft_len + j is row j of block b. Positions follow each other in a
        block, which is of one request and padding as a whole or not at all.
    eps, page_size
        As `c2_decode`.
    ring_size : int
        Above `draft_len`, so that no row parks where the first of its block reads.
    draft_len : int
        Rows of a block, 1 at least; n is a multiple of it.

    Raises
    ------
    ValueError
        Naming what is wrong, before anything is written.

    Notes
    -----
    Source: the published rule of the op, see `draftproof.oracles.c2_compress`.
    """
    call = _Call(
        *(kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache),
        *(out, eps, page_size, ring_size),
    )
    check_arguments(call, draft_len)
    if not runs_triton(kv_input.device):
        _step_by_step(call, draft_len)
    elif kv_input.shape[0]:
        _launch(call, kv_input.shape[0], draft_len=draft_len)


class _Call(NamedTuple):
    """The arguments that both ops have."""

    kv_input: Tensor
    kv_state: Tensor
    norm_weight: Tensor
    positions: Tensor
    req: Tensor
    raw_out_loc: Tensor
    freqs_cis: Tensor
    k_cache: Tensor
    out: Tensor
    eps: float
    page_size: int
    ring_size: int


def moves_wide(call: _Call) -> bool:
    """Say whether bases and page stride allow 16-byte loads and stores."""
    mask = 0
    for tensor in (call.kv_input, call.kv_state, call.norm_weight, call.freqs_cis, call.out):
        mask |= tensor.data_ptr()
    return (mask | call.k_cache.data_ptr() | call.k_cache.stride(0)) % WIDE_BYTES == 0


def _launch(
    call: _Call, programs: int, *, first_row: int = 0, row_step: int = 1, draft_len: int = 0
) -> None:
    """Compress `programs` rows: blocks of `draft_len`, or single rows where that is 0."""
    device = call.kv_input.device
    # Triton launches on the current device, which need not be the tensors'.
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(call, programs, first_row=first_row, row_step=row_step, draft_len=draft_len)
        return
    layout = KV_LAYOUTS[LAYOUT]
    wide = moves_wide(call)
    overlaps = launches_overlap(device)
    page_stride = call.k_cache.stride(0)
    _compress_kernel[programs,](
        call.kv_input,
        call.kv_state,
        call.norm_weight,
        call.positions,
        call.req,
        call.raw_out_loc,
        call.freqs_cis,
        call.k_cache,
        call.out,
        call.eps,
        first_row,
        row_step,
        draft_len,
        call.ring_size,
        call.page_size.bit_length() - 1,
        page_stride // WIDE_BYTES if wide else page_stride,
        VERIFY=draft_len > 0,
        WIDE=wide,
        FP8_FEATURES=layout.fp8_features,
        BLOCK=layout.block,
        CODE_BYTES=layout.code_bytes,
        OVERLAPS=overlaps,
        num_warps=WARPS,
        enable_fp_fusion=False,
        # Only NVIDIA's backend knows the option.
        **({"launch_pdl": True} if overlaps else {}),
    )


# ---------------------------------------------------------------------------------------------
# What they replace: single steps, and those without a fused kernel


def c2_verify_steps(
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
    """Compress blocks of draft rows position by position: `draft_len` launches of `c2_decode`.

    Parameters, effect and errors are those of `c2_verify`, and so is every bit.
    """
    call = _Call(
        *(kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache),
        *(out, eps, page_size, ring_size),
    )
    check_arguments(call, draft_len)
    _step_by_step(call, draft_len)


def c2_verify_baseline(
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
    """Compress blocks of draft rows position by position, without a kernel of its own.

    Parameters, effect and errors are those of `c2_verify`; it is draft_len calls of
    `c2_decode_baseline`, bit for bit.
    """
    call = _Call(
        *(kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache),
        *(out, eps, page_size, ring_size),
    )
    check_arguments(call, draft_len)
    _steps_unfused(call, draft_len)


def _step_by_step(call: _Call, draft_len: int) -> None:
    blocks = call.kv_input.shape[0] // draft_len
    if not runs_triton(call.kv_input.device):
        _steps_unfused(call, draft_len)
        return
    for step in range(draft_len if blocks else 0):
        _launch(call, blocks, first_row=step, row_step=draft_len)


def _steps_unfused(call: _Call, draft_len: int) -> None:
    rows = ("kv_input", "positions", "req", "raw_out_loc", "out")
    for step in range(draft_len):
        taken = {name: getattr(call, name)[step::draft_len] for name in rows}
        _decode_unfused(call._replace(**taken))


def c2_decode_baseline(
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
    """Compress one row a request without a kernel of its own: one PyTorch operation a step.

    Parameters, effect and errors are those of `c2_decode`. It can be captured as well.
    """
    call = _Call(
        *(kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache),
        *(out, eps, page_size, ring_size),
    )
    check_arguments(call)
    _decode_unfused(call)


def _decode_unfused(call: _Call) -> None:
    if not call.kv_input.shape[0]:
        return
    live = call.raw_out_loc != 0
    position = torch.where(live, call.positions, 0).long()
    request = torch.where(live, call.req, 0)
    even = position % RATIO == 0
    completes = live & ~even
    partner = torch.where(even, position, position - 1)
    place = request * call.ring_size + partner % call.ring_size
    if call.kv_state.shape[0]:
        # Read before anything is parked; a row that parks takes what it reads nowhere.
        earlier = call.kv_state[place]
        _store_rows(call.kv_state.view(torch.int32), place, call.kv_input, live & even)
    else:
        earlier = torch.zeros_like(call.kv_input)

    pooled = _pool_unfused(earlier, call.kv_input)
    mean = (pooled * pooled).mean(dim=-1, keepdim=True)
    latent = exact.round_bf16(
        pooled * torch.rsqrt(mean + call.eps) * exact.widen_bf16(call.norm_weight)
    )
    call.out.copy_(
        torch.where(completes[:, None], latent.view(torch.int16), call.out.view(torch.int16)).view(
            torch.bfloat16
        )
    )
    if call.freqs_cis.shape[0] and call.k_cache.shape[0]:
        store_latents(call, latent, partner, completes)


def _pool_unfused(earlier: Tensor, own: Tensor) -> Tensor:
    (kv0, score0), (kv1, score1) = earlier.chunk(2, dim=-1), own.chunk(2, dim=-1)
    e = torch.exp(-(score0 - score1).abs())
    one = torch.where(e.isnan(), e, 1.0)
    weighed = kv0 * torch.where(score0 >= score1, one, e) + kv1 * torch.where(
        score1 >= score0, one, e
    )
    return exact.widen_bf16(exact.round_bf16(exact.div32(weighed, 1.0 + e)))


def store_latents(call: _Call, latent: Tensor, turn: Tensor, completes: Tensor) -> None:
    """Rotate, quantise and store latents, one PyTorch operation a step.

    Parameters
    ----------
    call : _Call
        Gives `freqs_cis`, `raw_out_loc`, `k_cache`, which is written, and `page_size`.
    latent : Tensor, [n, 512], bfloat16
    turn : Tensor, [n], int64
        Positions that latents are rotated at.
    completes : Tensor, [n], bool
        Which rows are stored.
    """
    layout = KV_LAYOUTS[LAYOUT]
    rows = latent.shape[0]
    value = exact.widen_bf16(latent)
    tail = value[:, -ROPE_DIM.value :].unflatten(-1, (-1, 2))
    x, y = tail.unbind(-1)
    c, s = call.freqs_cis[turn].unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((exact.fma32(x, c, -(y * s)), exact.fma32(x, s, y * c)), dim=-1)
    rotated = exact.widen_bf16(exact.round_bf16(rotated.flatten(1)))
    value = torch.cat((value[:, : -ROPE_DIM.value], rotated), dim=-1)

    groups = value.unflatten(-1, (-1, FP4_GROUP.value))
    scale = (exact.amax_without_nan(groups) * (1.0 / 6.0)).clamp(2.0**-9, exact.E4M3_MAX)
    scale = exact.decode_e4m3(exact.encode_e4m3(scale))[..., None]
    value = (_round_e2m1(exact.div32(groups, scale) + 0.0) * scale).flatten(1)

    blocks = value[:, : layout.fp8_features].unflatten(-1, (-1, layout.block))
    floor = torch.full((), exact.KV_AMAX_FLOOR, device=value.device)
    amax = torch.maximum(exact.amax_without_nan(blocks), floor)
    bits = exact.div32(amax, torch.full((), 448.0, device=value.device)).view(torch.int32)
    code = (bits >> 23) + ((bits & 0x7FFFFF) > 0)
    multiplier = ((254 - code) << 23).to(torch.int32).view(torch.float32)[..., None]
    coded = exact.encode_e4m3(blocks * multiplier).flatten(1)
    tails = exact.round_bf16(value[:, layout.fp8_features :]).view(torch.uint8)
    content = torch.cat((coded, tails, code.to(torch.uint8)), dim=-1)

    slot = torch.where(completes, call.raw_out_loc, 0).long() // RATIO
    page, token = slot // call.page_size, slot % call.page_size
    byte = torch.arange(layout.data_bytes, device=value.device)
    number = torch.arange(layout.blocks, device=value.device)
    data = token[:, None] * layout.data_bytes + byte
    codes = layout.data_bytes * call.page_size + token[:, None] * layout.code_bytes + number
    place = page[:, None] * call.k_cache.stride(0) + torch.cat((data, codes), dim=-1)
    _store_rows(call.k_cache.view(-1), place.view(rows, -1), content, completes)


def _round_e2m1(x: Tensor) -> Tensor:
    """Round to E2M1, to nearest with ties to even, keeping sign and NaN."""
    magnitude = x.abs().clamp(max=6.0)
    step = torch.where(magnitude < 4.0, 1.0, 2.0)
    step = torch.where(magnitude < 2.0, 0.5, step)
    # torch.round takes ties to even, and so does the grid's last bit.
    return torch.copysign(torch.round(magnitude / step) * step, x)


def _store_rows(target: Tensor, place: Tensor, content: Tensor, stored: Tensor) -> None:
    """Store some rows of `content` without asking the device which: [n, ...] at [n] or [n, k].

    The other rows store once more what one of these does, or, where there is none, what is there.
    """
    content = content.view(target.dtype)
    like = stored.int().argmax()
    chosen = stored if place.dim() == 1 else stored[:, None]
    place = torch.where(chosen, place, place[like])
    kept = target[place]
    content = torch.where(stored[:, None], content, content[like])
    target[place] = torch.where(stored.any(), content, kept)


# ---------------------------------------------------------------------------------------------
# Dispatch: when blocks are verified in one launch, and when rows go step by step


class Route(NamedTuple):
    """Whether `c2_verify` serves a batch, and the rule that decided it."""

    fused: bool
    reason: str


@dataclass(frozen=True)
class Batch:
    """What decides about a forward batch.

    Attributes
    ----------
    target_verify : bool
        The target model checks draft tokens; a prefill or a decode does not.
    draft_worker : bool
        The draft model's own worker runs it.
    compact_ragged : bool
        Requests have different numbers of rows, without padding between them.
    device : torch.device
        Where its tensors are.
    """

    target_verify: bool
    draft_worker: bool
    compact_ragged: bool
    device: torch.device


def c2_route(batch: Batch) -> Route:
    """Choose between `c2_verify` and the step-by-step path, which leaves the same bytes.

    Parameters
    ----------
    batch : Batch

    Returns
    -------
    Route
        `c2_verify` only if no rule forbids it; else the first rule that does.
    """
    forbids = (
        (not runs_triton(batch.device), f"Triton does not run on {batch.device.type} here"),
        (batch.draft_worker, "the draft worker has no blocks of consecutive draft rows"),
        (not batch.target_verify, "only target verify has a block of rows a request"),
        (batch.compact_ragged, "blocks of a compact ragged batch differ in length"),
    )
    for applies, reason in forbids:
        if applies:
            return Route(fused=False, reason=reason)
    return Route(fused=True, reason="a target verify batch of fixed width")


# ---------------------------------------------------------------------------------------------
# Arguments


def check_arguments(call: _Call, draft_len: Any = None) -> None:
    """Raise the ValueError of `c2_decode`, or with `draft_len` of `c2_verify`."""
    kv_input = call.kv_input
    _check_tensor("kv_input", kv_input, (torch.float32,), ("n", 2 * LATENT_DIM.value))
    rows = kv_input.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"kv_input must have at most {MAX_ROWS} rows, not {_shown(kv_input)}")
    f32, bf16 = (torch.float32,), (torch.bfloat16,)
    _check_tensor("kv_state", call.kv_state, f32, ("slots * ring_size", 2 * LATENT_DIM.value))
    _check_tensor("norm_weight", call.norm_weight, bf16, (LATENT_DIM.value,))
    _check_tensor("positions", call.positions, _INDEX_DTYPES, (rows,))
    _check_tensor("req", call.req, (torch.int64,), (rows,))
    _check_tensor("raw_out_loc", call.raw_out_loc, _INDEX_DTYPES, (rows,))
    _check_tensor("freqs_cis", call.freqs_cis, f32, ("max_pos", ROPE_DIM.value))
    _check_tensor("k_cache", call.k_cache, (torch.uint8,), ("pages", "page_bytes"))
    _check_tensor("out", call.out, bf16, (rows, LATENT_DIM.value))
    for name in call._fields[1:9]:
        tensor = getattr(call, name)
        if tensor.device != kv_input.device:
            raise ValueError(
                f"{name} must be on {kv_input.device}, as kv_input, not {_shown(tensor)}"
            )

    if not isinstance(call.eps, int | float) or isinstance(call.eps, bool) or not call.eps > 0:
        raise ValueError(f"eps must be a number above 0, not {call.eps!r}")
    page_size, ring_size = call.page_size, call.ring_size
    if not _is_int(page_size) or not 0 < page_size < 2**31 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two below 2^31, not {page_size!r}")
    if draft_len is None:
        least = 2
    elif not _is_int(draft_len) or draft_len < 1:
        raise ValueError(f"draft_len must be an int of at least 1, not {draft_len!r}")
    elif rows % draft_len:
        raise ValueError(f"draft_len must divide the {rows} rows of kv_input, not {draft_len}")
    else:
        least = draft_len + 1
    if not _is_int(ring_size) or not least <= ring_size < 2**31:
        above = "" if draft_len is None else f", above draft_len {draft_len}"
        raise ValueError(f"ring_size must be an int in {least}..2^31 - 1{above}, not {ring_size!r}")
    if call.kv_state.shape[0] % ring_size:
        raise ValueError(
            f"kv_state must have a multiple of ring_size {ring_size} rows, "
            f"not {_shown(call.kv_state)}"
        )
    needed = KV_LAYOUTS[LAYOUT].page_bytes(page_size)
    if call.k_cache.shape[1] < needed:
        raise ValueError(
            f"k_cache must have rows of at least {needed} bytes for {page_size} tokens, "
            f"not {_shown(call.k_cache)}"
        )


def _check_tensor(
    name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int | str, ...]
) -> None:
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype not in dtypes
        or tensor.dim() != len(shape)
        or any(
            isinstance(want, int) and want != got
            for want, got in zip(shape, tensor.shape, strict=True)
        )
        or not tensor.is_contiguous()
    ):
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        lengths = ", ".join(map(str, shape))
        raise ValueError(f"{name} must be contiguous {kinds} [{lengths}], not {_shown(tensor)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)} with strides {value.stride()} on {value.device}"
    return repr(value)
