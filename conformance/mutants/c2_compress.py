"""Wrong and differently written implementations of `c2_decode` and `c2_verify`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.engine.spec import Mutant, Variant
from draftproof.oracles.c2_compress import validate
from draftproof.oracles.numerics import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    fma32,
    round_bf16,
    widen_bf16,
)

DATA, TAIL, SCALES = 448, 64, 8
"""Bytes of a token's E4M3, features behind them, bytes of its scales."""
TOKEN = DATA + 2 * TAIL


class Pipeline:
    """A correct op in fp32, one method a step; each mutant overrides the one it gets wrong."""

    def decode(
        self,
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
        tensors = (kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache)
        numbers = {"eps": eps, "page_size": page_size, "ring_size": ring_size, "out": out}
        self.check(*tensors, **numbers)
        self.run(*tensors, **numbers, draft_len=1)

    def verify(
        self,
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
        tensors = (kv_input, kv_state, norm_weight, positions, req, raw_out_loc, freqs_cis, k_cache)
        numbers = {"eps": eps, "page_size": page_size, "ring_size": ring_size, "out": out}
        self.check(*tensors, **numbers, draft_len=draft_len)
        self.run(*tensors, **numbers, draft_len=draft_len)

    def check(self, *tensors: Any, **numbers: Any) -> None:
        validate(*tensors, **numbers)

    def run(
        self,
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
        positions, raw = positions.long(), raw_out_loc.long()
        live = self.is_live(raw)
        odd = (positions % 2 == 1) & live
        rows = torch.nonzero(odd).flatten()
        partner = self.partner(kv_input, kv_state, positions, req, ring_size, draft_len, rows)
        parked = torch.nonzero(self.parks(positions, draft_len) & live).flatten()
        self.park(
            kv_state, self.ring_rows(req[parked], positions[parked], ring_size), kv_input[parked]
        )
        own = kv_input[rows]
        x = self.narrow_pooled(self.pool(partner[:, :512], partner[:, 512:], own[:, :512],
                                         own[:, 512:]))  # fmt: skip
        latent = self.norm(x, widen_bf16(norm_weight), eps)
        rotation = freqs_cis[self.turn_of(positions[rows])]
        self.emit(out, rows, latent, rotation)
        values = self.quantise(latent, rotation)
        self.store(k_cache, self.token_of(raw[rows]), values, page_size)

    # Which rows, and where they wait.

    def is_live(self, raw: Tensor) -> Tensor:
        return raw != 0

    def parks(self, positions: Tensor, draft_len: int) -> Tensor:
        return positions % 2 == 0

    def ring_rows(self, req: Tensor, positions: Tensor, ring_size: int) -> Tensor:
        return req * ring_size + positions % ring_size

    def reads_ring(self, rows: Tensor, draft_len: int) -> Tensor:
        return rows % draft_len == 0

    def partner(
        self,
        kv_input: Tensor,
        kv_state: Tensor,
        positions: Tensor,
        req: Tensor,
        ring_size: int,
        draft_len: int,
        rows: Tensor,
    ) -> Tensor:
        waits = self.ring_rows(req[rows], self.partner_position(positions[rows]), ring_size)
        before = kv_input[(rows - 1) % max(len(kv_input), 1)]
        return torch.where(self.reads_ring(rows, draft_len)[:, None], kv_state[waits], before)

    def partner_position(self, positions: Tensor) -> Tensor:
        return positions - 1

    def park(self, kv_state: Tensor, ring_rows: Tensor, content: Tensor) -> None:
        kv_state.view(torch.int32)[ring_rows] = content.view(torch.int32)

    # The latent.

    def pool(self, kv0: Tensor, s0: Tensor, kv1: Tensor, s1: Tensor) -> Tensor:
        e = self.exp(-(s0 - s1).abs())
        w0, w1 = self.weights(s0, s1, e)
        return (kv0 * w0 + kv1 * w1) / (1 + e)

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def weights(self, s0: Tensor, s1: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(e)
        return torch.where(s0 >= s1, one, e), torch.where(s0 >= s1, e, one)

    def narrow_pooled(self, pooled: Tensor) -> Tensor:
        return widen_bf16(round_bf16(pooled))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return widen_bf16(self.narrow_latent(self.scaled(x, self.root(x, eps)) * weight))

    def root(self, x: Tensor, eps: float) -> Tensor:
        return torch.sqrt(self.sum(x * x) / 512 + eps)

    def sum(self, squares: Tensor) -> Tensor:
        return squares.sum(1, keepdim=True)

    def scaled(self, x: Tensor, root: Tensor) -> Tensor:
        return x * (1 / root)

    def narrow_latent(self, y: Tensor) -> Tensor:
        return round_bf16(y)

    def emit(self, out: Tensor, rows: Tensor, latent: Tensor, rotation: Tensor) -> None:
        out[rows] = round_bf16(latent)

    # Behind it all is exact.

    def turn_of(self, positions: Tensor) -> Tensor:
        return positions - 1

    def quantise(self, latent: Tensor, rotation: Tensor) -> Tensor:
        return self.fp4(self.rotate(latent, rotation))

    def rotate(self, latent: Tensor, rotation: Tensor) -> Tensor:
        x, y = latent[:, DATA::2].contiguous(), latent[:, DATA + 1 :: 2].contiguous()
        c, s = rotation[:, ::2].contiguous(), rotation[:, 1::2].contiguous()
        turned = torch.stack(self.turn(x, y, c, s), dim=2).flatten(1)
        return torch.cat((latent[:, :DATA], self.narrow_turned(turned)), dim=1)

    def turn(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return fma32(x, c, -(y * s)), fma32(x, s, y * c)

    def narrow_turned(self, turned: Tensor) -> Tensor:
        return widen_bf16(round_bf16(torch.where(turned.isnan(), torch.nan, turned)))

    def fp4(self, values: Tensor) -> Tensor:
        groups = values.unflatten(1, (-1, self.group()))
        scale = self.fp4_scale(self.amax(groups))[..., None]
        return self.fp4_values(groups, scale).flatten(1)

    def group(self) -> int:
        return 16

    def amax(self, groups: Tensor) -> Tensor:
        return torch.where(groups.isnan(), 0.0, groups.abs()).amax(-1)

    def fp4_scale(self, amax: Tensor) -> Tensor:
        sixth = torch.tensor(1 / 6, dtype=torch.float32, device=amax.device)
        return self.narrow_scale(self.clamp_scale(amax * sixth))

    def clamp_scale(self, scale: Tensor) -> Tensor:
        return scale.clamp(2.0**-9, 448.0)

    def narrow_scale(self, scale: Tensor) -> Tensor:
        return decode_e4m3(encode_e4m3(scale))

    def fp4_values(self, groups: Tensor, scale: Tensor) -> Tensor:
        q = self.clear_zero(self.divide(groups, scale))
        nan = q.isnan()
        rounded = self.round_e2m1(torch.where(nan, 0.0, q))
        return torch.where(nan, torch.nan, rounded * scale)

    def divide(self, groups: Tensor, scale: Tensor) -> Tensor:
        return (groups.double() / scale.double()).float()

    def clear_zero(self, q: Tensor) -> Tensor:
        return q + 0.0

    def round_e2m1(self, q: Tensor) -> Tensor:
        return decode_e2m1(encode_e2m1(q))

    # The cache.

    def token_of(self, raw: Tensor) -> Tensor:
        return raw // 2

    def tile(self) -> int:
        return 64

    def store(self, k_cache: Tensor, token: Tensor, values: Tensor, page_size: int) -> None:
        tiles = values[:, :DATA].unflatten(1, (-1, self.tile()))
        code = self.code(self.amax(tiles))
        multiplier = ((254 - code) << 23).int().view(torch.float32)[..., None]
        data = self.encode(tiles * multiplier).flatten(1)
        tail = self.tail(values[:, DATA:])
        line = k_cache[:, self.first_byte() :]
        page, index = self.page_of(token, page_size), token % page_size
        self.put(line, page, index, torch.cat((data, tail), dim=1), page_size)
        self.put_codes(line, page, index, self.spread(code).to(torch.uint8), page_size)

    def first_byte(self) -> int:
        return 0

    def code(self, amax: Tensor) -> Tensor:
        x = (self.floor(amax).double() / 448.0).float().view(torch.int32).long()
        return (x >> 23) + self.rounds_up(x & 0x7FFFFF)

    def floor(self, amax: Tensor) -> Tensor:
        return amax.clamp(min=torch.tensor(1e-4, dtype=torch.float32).item())

    def rounds_up(self, mantissa: Tensor) -> Tensor:
        return (mantissa > 0).long()

    def spread(self, code: Tensor) -> Tensor:
        return code.repeat_interleave(7 // code.shape[1], dim=1) if code.shape[1] < 7 else code

    def encode(self, scaled: Tensor) -> Tensor:
        return encode_e4m3(scaled)

    def tail(self, values: Tensor) -> Tensor:
        return round_bf16(values.contiguous()).view(torch.uint8)

    def page_of(self, token: Tensor, page_size: int) -> Tensor:
        return token // page_size

    def put(self, line: Tensor, page: Tensor, index: Tensor, data: Tensor, page_size: int) -> None:
        byte = torch.arange(TOKEN, device=line.device)
        line[page[:, None], (index * TOKEN)[:, None] + byte] = data

    def put_codes(
        self, line: Tensor, page: Tensor, index: Tensor, codes: Tensor, page_size: int
    ) -> None:
        byte = torch.arange(codes.shape[1], device=line.device)
        first = self.first_code(page_size) + index * self.code_bytes()
        line[page[:, None], first[:, None] + byte] = codes

    def first_code(self, page_size: int) -> int:
        return page_size * TOKEN

    def code_bytes(self) -> int:
        return SCALES


# ---------------------------------------------------------------- rings


class RingMasked(Pipeline):
    def ring_rows(self, req: Tensor, positions: Tensor, ring_size: int) -> Tensor:
        return req * ring_size + positions % (1 << (ring_size - 1).bit_length() >> 1)


class OwnSlotRead(Pipeline):
    def partner_position(self, positions: Tensor) -> Tensor:
        return positions


class SlotBeforeRead(Pipeline):
    def partner_position(self, positions: Tensor) -> Tensor:
        return positions - 2


class RingOfTheBatchRow(Pipeline):
    """Rings are taken in the order of the batch."""

    def run(self, *tensors: Any, draft_len: int, **numbers: Any) -> None:
        kv_input, kv_state, weight, positions, req, *rest = tensors
        place = torch.arange(len(req), device=req.device) // draft_len
        super().run(
            kv_input, kv_state, weight, positions, place, *rest, draft_len=draft_len, **numbers
        )


class EveryRowReadsTheRing(Pipeline):
    def reads_ring(self, rows: Tensor, draft_len: int) -> Tensor:
        return torch.ones_like(rows, dtype=torch.bool)


class NoRowReadsTheRing(Pipeline):
    def reads_ring(self, rows: Tensor, draft_len: int) -> Tensor:
        return torch.zeros_like(rows, dtype=torch.bool)


class OnlyTheFirstBlockReads(Pipeline):
    def reads_ring(self, rows: Tensor, draft_len: int) -> Tensor:
        return rows == 0


class OddRowsParkToo(Pipeline):
    def parks(self, positions: Tensor, draft_len: int) -> Tensor:
        return torch.ones_like(positions, dtype=torch.bool)


class OnlyTheLastRowsPark(Pipeline):
    """The last two rows of a block park, as if all drafts were accepted."""

    def parks(self, positions: Tensor, draft_len: int) -> Tensor:
        place = torch.arange(len(positions), device=positions.device) % draft_len
        return (positions % 2 == 0) & (place >= draft_len - 2)


class PairedRowsNotParked(Pipeline):
    """An even row whose partner stands in the same block is not parked."""

    def parks(self, positions: Tensor, draft_len: int) -> Tensor:
        place = torch.arange(len(positions), device=positions.device) % draft_len
        return (positions % 2 == 0) & (place == draft_len - 1)


class PaddedRowsPark(Pipeline):
    def is_live(self, raw: Tensor) -> Tensor:
        return torch.ones_like(raw, dtype=torch.bool)


class NanParkedAsOne(Pipeline):
    def park(self, kv_state: Tensor, ring_rows: Tensor, content: Tensor) -> None:
        super().park(kv_state, ring_rows, torch.where(content.isnan(), torch.nan, content))


class NanParkedAsZero(Pipeline):
    def park(self, kv_state: Tensor, ring_rows: Tensor, content: Tensor) -> None:
        super().park(kv_state, ring_rows, torch.where(content.isnan(), 0.0, content))


class SubnormalsParkedAsZero(Pipeline):
    def park(self, kv_state: Tensor, ring_rows: Tensor, content: Tensor) -> None:
        tiny = content.abs() < 2.0**-126
        super().park(kv_state, ring_rows, torch.where(tiny, content * 0, content))


class ScoresNotParked(Pipeline):
    def park(self, kv_state: Tensor, ring_rows: Tensor, content: Tensor) -> None:
        kept = kv_state[ring_rows, 512:]
        super().park(kv_state, ring_rows, torch.cat((content[:, :512], kept), dim=1))


class RingClearedAfterUse(Pipeline):
    """A partner that was read is cleared."""

    def partner(self, kv_input: Tensor, kv_state: Tensor, *rest: Any) -> Tensor:
        found = super().partner(kv_input, kv_state, *rest)
        positions, req, ring_size, draft_len, rows = rest
        rows = rows[self.reads_ring(rows, draft_len)]
        kv_state[self.ring_rows(req[rows], positions[rows] - 1, ring_size)] = 0.0
        return found


class LocationOfOneIsPadding(Pipeline):
    def is_live(self, raw: Tensor) -> Tensor:
        return raw // 2 != 0


# ---------------------------------------------------------------- the latent


class WeightsExchanged(Pipeline):
    def weights(self, s0: Tensor, s1: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        w0, w1 = super().weights(s0, s1, e)
        return w1, w0


class ScoresIgnored(Pipeline):
    def pool(self, kv0: Tensor, s0: Tensor, kv1: Tensor, s1: Tensor) -> Tensor:
        return (kv0 + kv1) / 2


class LargerScoreWins(Pipeline):
    def exp(self, x: Tensor) -> Tensor:
        return torch.where(x == 0, 1.0, x * 0)


class ExpOfTheScores(Pipeline):
    def pool(self, kv0: Tensor, s0: Tensor, kv1: Tensor, s1: Tensor) -> Tensor:
        w0, w1 = torch.exp(s0), torch.exp(s1)
        return (kv0 * w0 + kv1 * w1) / (w0 + w1)


class ExpInHalfPrecision(Pipeline):
    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x.half()).float()


class ExpOfTwo(Pipeline):
    def exp(self, x: Tensor) -> Tensor:
        return torch.exp2(x)


class ExpCutOff(Pipeline):
    """Score distances above 20 count as infinite."""

    def exp(self, x: Tensor) -> Tensor:
        return torch.where(x < -20, torch.exp(x) * 0, torch.exp(x))


class MaskedScoresGiveZero(Pipeline):
    """Two scores of -inf give 0."""

    def pool(self, kv0: Tensor, s0: Tensor, kv1: Tensor, s1: Tensor) -> Tensor:
        masked = (s0 == -torch.inf) & (s1 == -torch.inf)
        return torch.where(masked, 0.0, super().pool(kv0, s0, kv1, s1))


class InfiniteScoresTie(Pipeline):
    """Two equal infinite scores weigh the same."""

    def pool(self, kv0: Tensor, s0: Tensor, kv1: Tensor, s1: Tensor) -> Tensor:
        tied = (s0 == s1) & s0.isinf()
        return torch.where(tied, (kv0 + kv1) / 2, super().pool(kv0, s0, kv1, s1))


class NanScoreLoses(Pipeline):
    def pool(self, kv0: Tensor, s0: Tensor, kv1: Tensor, s1: Tensor) -> Tensor:
        low = torch.tensor(-3e38, device=s0.device)
        return super().pool(
            kv0, torch.where(s0.isnan(), low, s0), kv1, torch.where(s1.isnan(), low, s1)
        )


class MaskedPartnerSpoils(Pipeline):
    """The weight is exp of the difference to a weighted mean, which -inf makes NaN."""

    def pool(self, kv0: Tensor, s0: Tensor, kv1: Tensor, s1: Tensor) -> Tensor:
        mean = (s0 + s1) / 2
        return super().pool(kv0, s0 - mean, kv1, s1 - mean)


class PooledNotRounded(Pipeline):
    def narrow_pooled(self, pooled: Tensor) -> Tensor:
        return pooled


class PooledTruncated(Pipeline):
    def narrow_pooled(self, pooled: Tensor) -> Tensor:
        return (pooled.view(torch.int32) & ~0xFFFF).view(torch.float32)


class EpsLeftOut(Pipeline):
    def root(self, x: Tensor, eps: float) -> Tensor:
        return super().root(x, 0.0)


class EpsOutsideTheRoot(Pipeline):
    def root(self, x: Tensor, eps: float) -> Tensor:
        return super().root(x, 0.0) + eps


class EpsFixed(Pipeline):
    def root(self, x: Tensor, eps: float) -> Tensor:
        return super().root(x, 1e-6)


class MeanOfTheUnrotated(Pipeline):
    def sum(self, squares: Tensor) -> Tensor:
        return squares[:, :DATA].sum(1, keepdim=True) * (512 / 448)


class SquaresTruncated(Pipeline):
    def sum(self, squares: Tensor) -> Tensor:
        return super().sum((squares.view(torch.int32) & ~0xFFFF).view(torch.float32))


class MeanInBf16(Pipeline):
    def sum(self, squares: Tensor) -> Tensor:
        total = super().sum(squares)
        return (total.view(torch.int32) & ~0xFFFF).view(torch.float32)


class RoundedBeforeTheWeight(Pipeline):
    def scaled(self, x: Tensor, root: Tensor) -> Tensor:
        return widen_bf16(round_bf16(super().scaled(x, root)))


class WeightPlusOne(Pipeline):
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().norm(x, 1 + weight, eps)


class LatentTruncated(Pipeline):
    def narrow_latent(self, y: Tensor) -> Tensor:
        return round_bf16((y.view(torch.int32) & ~0xFFFF).view(torch.float32))


class LatentSubnormalsFlushed(Pipeline):
    def narrow_latent(self, y: Tensor) -> Tensor:
        return round_bf16(torch.where(y.abs() < 2.0**-126, y * 0, y))


class OutIsRotated(Pipeline):
    def emit(self, out: Tensor, rows: Tensor, latent: Tensor, rotation: Tensor) -> None:
        out[rows] = round_bf16(self.rotate(latent, rotation))


class OutIsQuantised(Pipeline):
    def emit(self, out: Tensor, rows: Tensor, latent: Tensor, rotation: Tensor) -> None:
        out[rows] = round_bf16(torch.cat((self.fp4(latent)[:, :DATA], latent[:, DATA:]), dim=1))


class EvenRowsCleared(Pipeline):
    """`out` of even rows becomes 0."""

    def emit(self, out: Tensor, rows: Tensor, latent: Tensor, rotation: Tensor) -> None:
        out.zero_()
        super().emit(out, rows, latent, rotation)


class CacheOfTheUnroundedLatent(Pipeline):
    """The cache is made from the fp32 result, `out` from its rounding."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.scaled(x, self.root(x, eps)) * weight


# ---------------------------------------------------------------- rotation


class TurnedAtItsOwnPosition(Pipeline):
    def turn_of(self, positions: Tensor) -> Tensor:
        return positions


class TurnedByThePair(Pipeline):
    def turn_of(self, positions: Tensor) -> Tensor:
        return positions // 2


class HalvesTurned(Pipeline):
    """Feature k of the last 64 is paired with feature k + 32."""

    def rotate(self, latent: Tensor, rotation: Tensor) -> Tensor:
        x, y = latent[:, DATA : DATA + 32].contiguous(), latent[:, DATA + 32 :].contiguous()
        c, s = rotation[:, ::2].contiguous(), rotation[:, 1::2].contiguous()
        turned = torch.cat(self.turn(x, y, c, s), dim=1)
        return torch.cat((latent[:, :DATA], self.narrow_turned(turned)), dim=1)


class TurnedBackwards(Pipeline):
    def turn(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return super().turn(x, y, c, -s)


class BothProductsRounded(Pipeline):
    def turn(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return x * c - y * s, x * s + y * c


class OtherProductRounded(Pipeline):
    def turn(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return fma32(-y, s, x * c), fma32(y, c, x * s)


class NoProductRounded(Pipeline):
    def turn(self, x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        wide = [each.double() for each in (x, y, c, s)]
        x, y, c, s = wide
        return (x * c - y * s).float(), (x * s + y * c).float()


class TurnedNotRounded(Pipeline):
    def narrow_turned(self, turned: Tensor) -> Tensor:
        return turned


class NotTurned(Pipeline):
    def rotate(self, latent: Tensor, rotation: Tensor) -> Tensor:
        return latent


class QuantisedBeforeTurning(Pipeline):
    def quantise(self, latent: Tensor, rotation: Tensor) -> Tensor:
        return self.rotate(self.fp4(latent), rotation)


# ---------------------------------------------------------------- FP4


class TailNotQuantised(Pipeline):
    def quantise(self, latent: Tensor, rotation: Tensor) -> Tensor:
        turned = self.rotate(latent, rotation)
        return torch.cat((self.fp4(turned)[:, :DATA], turned[:, DATA:]), dim=1)


class NothingQuantised(Pipeline):
    def fp4(self, values: Tensor) -> Tensor:
        return values


class GroupsOf32(Pipeline):
    def group(self) -> int:
        return 32


class ScaleNotRounded(Pipeline):
    def narrow_scale(self, scale: Tensor) -> Tensor:
        return scale


class ScaleRoundedDown(Pipeline):
    def narrow_scale(self, scale: Tensor) -> Tensor:
        code = encode_e4m3(scale)
        above = decode_e4m3(code) > scale
        return decode_e4m3((code.long() - above.long()).to(torch.uint8))


class ScaleRoundedUp(Pipeline):
    def narrow_scale(self, scale: Tensor) -> Tensor:
        code = encode_e4m3(scale)
        below = decode_e4m3(code) < scale
        return decode_e4m3((code.long() + below.long()).to(torch.uint8))


class ScaleAPowerOfTwo(Pipeline):
    def narrow_scale(self, scale: Tensor) -> Tensor:
        bits = scale.view(torch.int32)
        return ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


class ScaleMayBeZero(Pipeline):
    def clamp_scale(self, scale: Tensor) -> Tensor:
        return scale.clamp(2.0**-20, 448.0)

    def narrow_scale(self, scale: Tensor) -> Tensor:
        return torch.where(scale < 2.0**-9, scale, super().narrow_scale(scale))


class ScaleUpTo256(Pipeline):
    def clamp_scale(self, scale: Tensor) -> Tensor:
        return scale.clamp(2.0**-9, 256.0)


class Fp4TiesAway(Pipeline):
    def round_e2m1(self, q: Tensor) -> Tensor:
        return super().round_e2m1((q.view(torch.int32) + 1).view(torch.float32))


class Fp4TiesToZero(Pipeline):
    def round_e2m1(self, q: Tensor) -> Tensor:
        below = (q.view(torch.int32) - (q != 0).int()).view(torch.float32)
        return super().round_e2m1(below)


class Fp4Truncated(Pipeline):
    def round_e2m1(self, q: Tensor) -> Tensor:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=q.device)
        index = torch.searchsorted(grid, q.abs().contiguous(), right=True) - 1
        return torch.copysign(grid[index], q)


class MultipliedByTheReciprocal(Pipeline):
    def divide(self, groups: Tensor, scale: Tensor) -> Tensor:
        return groups * (1 / scale)


class SignOfSmallNegativesLost(Pipeline):
    def round_e2m1(self, q: Tensor) -> Tensor:
        return super().round_e2m1(q) + 0.0


class ExactZeroKeepsItsSign(Pipeline):
    def clear_zero(self, q: Tensor) -> Tensor:
        return q


class NanLaundered(Pipeline):
    def fp4_values(self, groups: Tensor, scale: Tensor) -> Tensor:
        return super().fp4_values(groups.nan_to_num(-3e38, torch.inf, -torch.inf), scale)


class NanSpreads(Pipeline):
    """A NaN makes its whole group NaN."""

    def fp4_values(self, groups: Tensor, scale: Tensor) -> Tensor:
        nan = groups.isnan().any(-1, keepdim=True)
        return torch.where(nan, torch.nan, super().fp4_values(groups, scale))


class InfinityGivesNan(Pipeline):
    def fp4_values(self, groups: Tensor, scale: Tensor) -> Tensor:
        return torch.where(groups.isinf(), torch.nan, super().fp4_values(groups, scale))


class AmaxWithoutSign(Pipeline):
    """The maximum is that of the values, not of the magnitudes."""

    def amax(self, groups: Tensor) -> Tensor:
        return torch.where(groups.isnan(), 0.0, groups).amax(-1).clamp(min=0.0)


# ---------------------------------------------------------------- the cache


class TilesOf448(Pipeline):
    def tile(self) -> int:
        return 448


class CodeRoundedDown(Pipeline):
    def rounds_up(self, mantissa: Tensor) -> Tensor:
        return torch.zeros_like(mantissa)


class CodeRoundedToNearest(Pipeline):
    def rounds_up(self, mantissa: Tensor) -> Tensor:
        return (mantissa >= 0x400000).long()


class FloorLeftOut(Pipeline):
    def floor(self, amax: Tensor) -> Tensor:
        return amax


class FloorOfOneHundredth(Pipeline):
    def floor(self, amax: Tensor) -> Tensor:
        return amax.clamp(min=1e-2)


class DataTruncated(Pipeline):
    def encode(self, scaled: Tensor) -> Tensor:
        code = super().encode(scaled)
        above = decode_e4m3(code).abs() > scaled.abs()
        return (code.long() - above.long()).to(torch.uint8)


class DataTiesAway(Pipeline):
    def encode(self, scaled: Tensor) -> Tensor:
        beside = (scaled.view(torch.int32) + (scaled != 0).int()).view(torch.float32)
        return super().encode(torch.where(scaled.isnan(), scaled, beside))


class SubnormalDataFlushed(Pipeline):
    def encode(self, scaled: Tensor) -> Tensor:
        code = super().encode(scaled)
        return torch.where((code & 0x7F) < 8, code & 0x80, code)


class SignOfZeroLost(Pipeline):
    def encode(self, scaled: Tensor) -> Tensor:
        code = super().encode(scaled)
        return torch.where(code == 0x80, 0, code)


class LocationRoundedUp(Pipeline):
    def token_of(self, raw: Tensor) -> Tensor:
        # Never beyond the cache, whose end a GPU does not survive.
        return ((raw + 1) // 2).clamp(max=int(raw.max()) // 2 if len(raw) else 0)


class AllInTheFirstPage(Pipeline):
    def page_of(self, token: Tensor, page_size: int) -> Tensor:
        return token * 0


class CodesSevenApart(Pipeline):
    def code_bytes(self) -> int:
        return 7


class CodesBehindTheFullPage(Pipeline):
    """Codes end a page, behind its padding."""

    def first_code(self, page_size: int) -> int:
        used = -(-584 * page_size // TOKEN) * TOKEN
        return used - SCALES * page_size


class EighthCodeWritten(Pipeline):
    def spread(self, code: Tensor) -> Tensor:
        return torch.cat((code, code[:, :1] * 0), dim=1)


class CodesOfNeighboursSwapped(Pipeline):
    def spread(self, code: Tensor) -> Tensor:
        return torch.cat((code[:, 1:2], code[:, :1], code[:, 2:]), dim=1)


class TailBytesSwapped(Pipeline):
    def tail(self, values: Tensor) -> Tensor:
        return super().tail(values).unflatten(1, (-1, 2)).flip(2).flatten(1)


class PagesTakenForPacked(Pipeline):
    """Rows of the cache are taken to be as long as a page."""

    def store(self, k_cache: Tensor, token: Tensor, values: Tensor, page_size: int) -> None:
        length = -(-584 * page_size // TOKEN) * TOKEN
        packed = k_cache.flatten()[: len(k_cache) * length].view(len(k_cache), length)
        super().store(packed, token, values, page_size)


class PaddingCleared(Pipeline):
    """What a page holds behind its codes is cleared."""

    def store(self, k_cache: Tensor, token: Tensor, values: Tensor, page_size: int) -> None:
        super().store(k_cache, token, values, page_size)
        k_cache[self.page_of(token, page_size), 584 * page_size :] = 0


class LatentKept(Pipeline):
    """What the first call with an address gave is given again."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        key = (self.address, tuple(x.shape))
        if key not in self.kept:
            self.kept[key] = super().norm(x, weight, eps)
        return self.kept[key]

    def run(self, kv_input: Tensor, *tensors: Any, **numbers: Any) -> None:
        self.address = kv_input.data_ptr()
        super().run(kv_input, *tensors, **numbers)


class EpsKept(Pipeline):
    """The first eps that comes with an address is used from then on."""

    def __init__(self) -> None:
        self.kept: dict[int, float] = {}

    def run(self, kv_input: Tensor, *tensors: Any, eps: float, **numbers: Any) -> None:
        kept = self.kept.setdefault(kv_input.data_ptr(), eps)
        super().run(kv_input, *tensors, eps=kept, **numbers)


# ---------------------------------------------------------------- verify beside decode, arguments


class RoundsOtherwise(Pipeline):
    """The root is larger by what the norm's budget allows: right alone, no replay of decode."""

    def root(self, x: Tensor, eps: float) -> Tensor:
        return super().root(x, eps) * (1 + 200 * 2.0**-24)


class UncheckedRing(Pipeline):
    def check(self, *tensors: Any, **numbers: Any) -> None:
        spare = {**numbers, "ring_size": max(numbers["ring_size"], numbers.get("draft_len", 1) + 1)}
        rows = tensors[1].shape[0] // spare["ring_size"] * spare["ring_size"]
        super().check(tensors[0], tensors[1][:rows], *tensors[2:], **spare)


class AnyPageSizeTaken(Pipeline):
    def check(self, *tensors: Any, **numbers: Any) -> None:
        super().check(*tensors, **{**numbers, "page_size": 1})


class EpsUnchecked(Pipeline):
    def check(self, *tensors: Any, **numbers: Any) -> None:
        super().check(*tensors, **{**numbers, "eps": 1.0})


def _verify(name: str, fault: str, kind: type[Pipeline], *checks: str) -> Mutant:
    return Mutant(name, "c2_verify", fault, checks or ("eager",), kind().verify)


def _decode(name: str, fault: str, kind: type[Pipeline], *checks: str) -> Mutant:
    return Mutant(name, "c2_decode", fault, checks or ("eager",), kind().decode)


def _both(name: str, fault: str, kind: type[Pipeline], *checks: str) -> list[Mutant]:
    return [_decode(name, fault, kind, *checks), _verify(name, fault, kind, *checks)]


MUTANTS = [
    *_both("ring_wraps_at_a_power_of_two", "Positions wrap at the half of a power.", RingMasked),
    *_both("own_slot_read", "The partner is read from the row's own slot.", OwnSlotRead),
    *_both("slot_before_read", "The partner is read from position - 2.", SlotBeforeRead),
    *_both("ring_of_the_batch_row", "Rings are taken in the batch's order.", RingOfTheBatchRow),
    _verify("every_row_reads_the_ring", "All rows read the ring.", EveryRowReadsTheRing),
    _verify("no_row_reads_the_ring", "First rows take the row before them.", NoRowReadsTheRing),
    _decode("no_ring_read", "The partner is the batch row before.", NoRowReadsTheRing),
    _verify("only_the_first_block_reads", "Other blocks do not read.", OnlyTheFirstBlockReads),
    *_both("odd_rows_park_too", "Odd rows overwrite their slot.", OddRowsParkToo),
    _verify("only_the_last_rows_park", "Rows that may be accepted do not park.",
            OnlyTheLastRowsPark),
    _verify("paired_rows_not_parked", "Even rows with a partner do not park.", PairedRowsNotParked),
    *_both("padded_rows_park", "Padded rows park and store.", PaddedRowsPark),
    *_both("location_1_is_padding", "raw_out_loc 1 counts as padding.", LocationOfOneIsPadding),
    *_both("nan_parked_as_one", "Payloads of parked NaN are lost.", NanParkedAsOne),
    *_both("nan_parked_as_zero", "Parked NaN becomes 0.", NanParkedAsZero),
    *_both("subnormals_parked_as_zero", "Parked subnormals become 0.", SubnormalsParkedAsZero),
    *_both("scores_not_parked", "Only kv is parked.", ScoresNotParked),
    *_both("ring_cleared_after_use", "A partner is cleared once it was read.", RingClearedAfterUse),
    *_both("weights_exchanged", "The smaller score gets the larger weight.", WeightsExchanged),
    *_both("scores_ignored", "The pooled value is the mean.", ScoresIgnored),
    *_both("larger_score_wins", "The smaller score weighs nothing.", LargerScoreWins),
    *_both("exp_of_the_scores", "exp(s) overflows.", ExpOfTheScores),
    *_both("exp_in_half_precision", "exp is one of fp16.", ExpInHalfPrecision),
    *_both("exp_of_two", "Weights are powers of 2.", ExpOfTwo),
    *_both("exp_cut_off", "A distance above 20 weighs nothing.", ExpCutOff),
    *_both("masked_scores_give_zero", "Two scores of -inf give 0.", MaskedScoresGiveZero),
    *_both("infinite_scores_tie", "Equal infinite scores weigh the same.", InfiniteScoresTie),
    *_both("nan_score_loses", "A NaN score counts as the lowest.", NanScoreLoses),
    *_both("masked_partner_spoils", "One score of -inf gives NaN.", MaskedPartnerSpoils),
    *_both("pooled_not_rounded", "The norm takes unrounded values.", PooledNotRounded),
    *_both("pooled_truncated", "Pooled values are truncated to bf16.", PooledTruncated),
    *_both("eps_left_out", "eps is not added.", EpsLeftOut),
    *_both("eps_outside_the_root", "eps is added to the root.", EpsOutsideTheRoot),
    *_both("eps_fixed", "eps is 1e-6, whatever is given.", EpsFixed),
    *_both("mean_of_the_unrotated", "The mean square is that of 448.", MeanOfTheUnrotated),
    *_both("squares_truncated", "Squares are truncated to bf16.", SquaresTruncated),
    *_both("mean_in_bf16", "The mean square is truncated to bf16.", MeanInBf16),
    *_both("rounded_before_the_weight", "bf16 comes before the weight.", RoundedBeforeTheWeight),
    *_both("weight_plus_one", "The weight is an offset to 1.", WeightPlusOne),
    *_both("latent_truncated", "The latent is truncated to bf16.", LatentTruncated),
    *_both("latent_subnormals_flushed", "Subnormal latents become 0.", LatentSubnormalsFlushed),
    *_both("out_is_rotated", "out is written behind the rotation.", OutIsRotated),
    *_both("out_is_quantised", "out is written behind FP4.", OutIsQuantised),
    *_both("even_rows_cleared", "out of even rows is cleared.", EvenRowsCleared),
    *_both("cache_of_the_unrounded", "The cache is made from fp32.", CacheOfTheUnroundedLatent),
    *_both("turned_at_its_own_position", "The rotation is that of position.",
           TurnedAtItsOwnPosition),
    *_both("turned_by_the_pair", "The rotation is that of position / 2.", TurnedByThePair),
    *_both("halves_turned", "Pairs are 32 features apart.", HalvesTurned),
    *_both("turned_backwards", "Sines have the other sign.", TurnedBackwards),
    *_both("both_products_rounded", "There is no fused multiply-add.", BothProductsRounded),
    *_both("other_product_rounded", "The product with x is rounded.", OtherProductRounded),
    *_both("no_product_rounded", "Neither product is rounded.", NoProductRounded),
    *_both("turned_not_rounded", "Rotated features stay fp32.", TurnedNotRounded),
    *_both("not_turned", "There is no rotation.", NotTurned),
    *_both("quantised_before_turning", "FP4 comes before the rotation.", QuantisedBeforeTurning),
    *_both("tail_not_quantised", "The last 64 features skip FP4.", TailNotQuantised),
    *_both("nothing_quantised", "FP4 is left out.", NothingQuantised),
    *_both("groups_of_32", "FP4 groups have 32 features.", GroupsOf32),
    *_both("scale_not_rounded", "FP4 scales stay fp32.", ScaleNotRounded),
    *_both("scale_rounded_down", "FP4 scales are rounded down.", ScaleRoundedDown),
    *_both("scale_rounded_up", "FP4 scales are rounded up.", ScaleRoundedUp),
    *_both("scale_a_power_of_two", "FP4 scales are powers of two.", ScaleAPowerOfTwo),
    *_both("scale_may_be_small", "FP4 scales may lie below 2^-9.", ScaleMayBeZero),
    *_both("scale_up_to_256", "FP4 scales end at 256.", ScaleUpTo256),
    *_both("fp4_ties_away", "Ties of E2M1 go away from zero.", Fp4TiesAway),
    *_both("fp4_ties_to_zero", "Ties of E2M1 go to zero.", Fp4TiesToZero),
    *_both("fp4_truncated", "E2M1 is truncated.", Fp4Truncated),
    *_both("multiplied_by_the_reciprocal", "x * (1 / s) replaces x / s.",
           MultipliedByTheReciprocal),
    *_both("sign_of_small_negatives_lost", "A small negative gives +0.", SignOfSmallNegativesLost),
    *_both("exact_zero_keeps_its_sign", "-0 stays -0.", ExactZeroKeepsItsSign),
    *_both("nan_laundered", "NaN becomes a number.", NanLaundered),
    *_both("nan_spreads", "A NaN makes its whole group NaN.", NanSpreads),
    *_both("infinity_gives_nan", "An infinity becomes NaN.", InfinityGivesNan),
    *_both("amax_without_sign", "Negative values take no part in amax.", AmaxWithoutSign),
    *_both("tiles_of_448", "All E4M3 features share a code.", TilesOf448),
    *_both("code_rounded_down", "Codes are rounded down.", CodeRoundedDown),
    *_both("code_rounded_to_nearest", "Codes are rounded to nearest.", CodeRoundedToNearest),
    *_both("floor_left_out", "A tile of zeros has code 0.", FloorLeftOut),
    *_both("floor_of_a_hundredth", "amax is at least 0.01.", FloorOfOneHundredth),
    *_both("data_truncated", "E4M3 is truncated.", DataTruncated),
    *_both("data_ties_away", "Ties of E4M3 go away from zero.", DataTiesAway),
    *_both("subnormal_data_flushed", "E4M3 subnormals become 0.", SubnormalDataFlushed),
    *_both("sign_of_zero_lost", "-0 becomes +0 in E4M3.", SignOfZeroLost),
    *_both("location_rounded_up", "The token is raw_out_loc / 2, rounded up.", LocationRoundedUp),
    *_both("all_in_the_first_page", "Tokens of all pages go to the first.", AllInTheFirstPage),
    *_both("codes_seven_apart", "A token's codes take 7 bytes.", CodesSevenApart),
    *_both("codes_at_the_end", "Codes stand at a page's end.", CodesBehindTheFullPage),
    *_both("eighth_code_written", "The byte behind the codes is written.", EighthCodeWritten),
    *_both("codes_swapped", "The first two codes are exchanged.", CodesOfNeighboursSwapped),
    *_both("tail_bytes_swapped", "bf16 is stored big-endian.", TailBytesSwapped),
    *_both("pages_taken_for_packed", "Rows of the cache are taken for pages.", PagesTakenForPacked),
    *_both("padding_cleared", "Bytes behind a page's codes are cleared.", PaddingCleared),
    *_both("latent_kept", "Latents are kept by address.", LatentKept, "repeat", "graph"),
    *_both("eps_kept", "eps is kept by address.", EpsKept, "repeat"),
    _verify("rounds_otherwise", "Legal results that decode does not give.", RoundsOtherwise,
            "laws"),
    _verify("short_ring_taken", "A ring of draft_len rows is accepted.", UncheckedRing, "invalid"),
    _decode("ring_of_1_taken", "A ring of one row is accepted.", UncheckedRing, "invalid"),
    *_both("any_page_size_taken", "page_size is not checked.", AnyPageSizeTaken, "invalid"),
    *_both("any_eps_taken", "eps is not checked.", EpsUnchecked, "invalid"),
]  # fmt: skip


class SquaresInPairs(Pipeline):
    """Squares are added as a tree of neighbours, the root is that of the mean in float64."""

    def sum(self, squares: Tensor) -> Tensor:
        while squares.shape[1] > 1:
            squares = squares[:, ::2] + squares[:, 1::2]
        return squares


class SquaresOneByOne(Pipeline):
    """Squares are added from the last to the first; the quotient by the root is rounded once."""

    def sum(self, squares: Tensor) -> Tensor:
        total = squares[:, 511:]
        for column in range(510, -1, -1):
            total = total + squares[:, column : column + 1]
        return total

    def scaled(self, x: Tensor, root: Tensor) -> Tensor:
        return x / root


class ExpOfTwoFlushed(Pipeline):
    """exp is 2 to the power of the distance times log2(e), and 0 below the normal range."""

    def exp(self, x: Tensor) -> Tensor:
        e = torch.exp2(x * 1.4426950408889634)
        return torch.where(e < 2.0**-126, e * 0, e)


class Sigmoid(Pipeline):
    """Both weights are sigmoids of the scores' difference."""

    def pool(self, kv0: Tensor, s0: Tensor, kv1: Tensor, s1: Tensor) -> Tensor:
        return kv0 * torch.sigmoid(s0 - s1) + kv1 * torch.sigmoid(s1 - s0)


class DoublePrecision(Pipeline):
    """Pool and norm in float64; the FP4 scale by a division."""

    def pool(self, kv0: Tensor, s0: Tensor, kv1: Tensor, s1: Tensor) -> Tensor:
        return super().pool(kv0.double(), s0.double(), kv1.double(), s1.double())

    def root(self, x: Tensor, eps: float) -> Tensor:
        return super().root(x.double(), eps)

    def fp4_scale(self, amax: Tensor) -> Tensor:
        return self.narrow_scale(self.clamp_scale((amax.double() / 6).float()))


def _variant(name: str, difference: str, kind: type[Pipeline]) -> list[Variant]:
    # Rows are chosen by value, which a capture cannot do.
    return [
        Variant(name, "c2_decode", difference, kind().decode, capturable=False),
        Variant(name, "c2_verify", difference, kind().verify, capturable=False),
    ]


VARIANTS = [
    *_variant("squares_in_pairs", "squares are added as a tree", SquaresInPairs),
    *_variant("squares_one_by_one", "squares are added backwards, then divided", SquaresOneByOne),
    *_variant("exp2_flushed", "exp by exp2, flushed below the normal range", ExpOfTwoFlushed),
    *_variant("sigmoids", "weights are two sigmoids", Sigmoid),
    *_variant("float64", "pool and norm in float64, the scale by a division", DoublePrecision),
]
