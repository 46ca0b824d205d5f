"""Wrong and differently written implementations of `draft_argmax`, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.engine.spec import Mutant, Variant
from draftproof.kernels.draft_argmax import check_arguments

NO_CANDIDATE = -(2**40)
NAN_KEY = 2**40
SINK_SCORE = -1e30
SPLITS = 64


class Exchange:
    """A correct exchange, one method a step; each mutant overrides the step that it gets wrong."""

    def __call__(
        self,
        logits_shards: Sequence[Tensor],
        *,
        vocab_size: int,
        positions: Tensor,
        draft_tokens: Tensor | None = None,
        draft_token_column: int = 0,
        nan_policy: str = "sink",
    ) -> tuple[Tensor, Tensor]:
        self.check(
            logits_shards, vocab_size, positions, draft_tokens, draft_token_column, nan_policy
        )
        offers = []
        for rank, shard in enumerate(logits_shards):
            if shard.shape[1]:
                offers.append(self.offer(logits_shards, rank, vocab_size, nan_policy))
        keys, ids = (torch.cat(part, dim=1) for part in zip(*offers, strict=True))
        _, tokens = self.across_ranks(keys, ids)
        self.advance(positions, len(logits_shards), draft_tokens)
        if draft_tokens is not None:
            self.write_draft(draft_tokens, draft_token_column, tokens[:, 0])
        return self.probability(logits_shards, vocab_size, tokens), tokens

    def check(self, *arguments: Any) -> None:
        check_arguments(*arguments)

    def offer(
        self, shards: Sequence[Tensor], rank: int, vocab_size: int, nan_policy: str
    ) -> tuple[Tensor, Tensor]:
        """The best key and its id, each [rows, 1], of one rank."""
        shard = self.read(shards, rank)
        keys = self.keys(shard, nan_policy)
        columns = torch.arange(shard.shape[1], device=shard.device)
        ids = self.ids(self.first_id(shards, rank) + columns)
        offers = []
        width = -(-shard.shape[1] // SPLITS)
        for split_keys, split_ids in zip(
            keys.split(width, 1), ids.expand(keys.shape).split(width, 1), strict=True
        ):
            real = self.real(split_ids, vocab_size, rank == len(shards) - 1)
            masked = torch.where(real, split_keys, self.nothing())
            offers.append(self.within_split(masked, split_ids))
        best, chosen = (torch.cat(part, dim=1) for part in zip(*offers, strict=True))
        return self.across_splits(best, chosen)

    def read(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        return shards[rank]

    def first_id(self, shards: Sequence[Tensor], rank: int) -> int:
        return sum(shard.shape[1] for shard in shards[:rank])

    def ids(self, ids: Tensor) -> Tensor:
        return ids

    def real(self, ids: Tensor, vocab_size: int, last_rank: bool) -> Tensor:
        return ids < vocab_size

    def nothing(self) -> int:
        return NO_CANDIDATE

    def keys(self, shard: Tensor, nan_policy: str) -> Tensor:
        """An integer per score, of the same order."""
        scores = self.widen(shard)
        nan = torch.isnan(scores)
        scores = torch.where(nan, self.sink(shard), scores)
        keys = self.order(scores)
        return self.place_nan(keys, nan, scores, shard) if nan_policy == "first" else keys

    def widen(self, shard: Tensor) -> Tensor:
        return shard.float()

    def sink(self, shard: Tensor) -> Tensor:
        return torch.full((), SINK_SCORE, device=shard.device)

    def order(self, scores: Tensor) -> Tensor:
        bits = scores.view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    def place_nan(self, keys: Tensor, nan: Tensor, scores: Tensor, shard: Tensor) -> Tensor:
        return keys.masked_fill(nan, NAN_KEY)

    def best(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The highest key, and the lowest id that has it."""
        best = keys.amax(1, keepdim=True)
        return best, torch.where(keys == best, ids, 2**31).amin(1, keepdim=True)

    def within_split(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.best(keys, ids)

    def across_splits(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.best(keys, ids)

    def across_ranks(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.best(keys, ids)

    def advance(self, positions: Tensor, ranks: int, draft_tokens: Tensor | None) -> None:
        positions += 1

    def write_draft(self, draft_tokens: Tensor, column: int, tokens: Tensor) -> None:
        draft_tokens[:, column] = tokens

    def probability(self, shards: Sequence[Tensor], vocab_size: int, tokens: Tensor) -> Tensor:
        return torch.ones(tokens.shape, device=tokens.device)


def _highest_id(keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    best = keys.amax(1, keepdim=True)
    return best, torch.where(keys == best, ids, -1).amax(1, keepdim=True)


class TieTakesLast(Exchange):
    def best(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _highest_id(keys, ids)


class TieWithinSplitTakesLast(Exchange):
    def within_split(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _highest_id(keys, ids)


class TieAcrossSplitsTakesLast(Exchange):
    def across_splits(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _highest_id(keys, ids)


class TieAcrossRanksTakesLast(Exchange):
    def across_ranks(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _highest_id(keys, ids)


class PaddingCompetes(Exchange):
    def real(self, ids: Tensor, vocab_size: int, last_rank: bool) -> Tensor:
        return torch.ones_like(ids, dtype=torch.bool)


class PaddingIsOnlyInTheLastShard(Exchange):
    def real(self, ids: Tensor, vocab_size: int, last_rank: bool) -> Tensor:
        return (ids < vocab_size) | (not last_rank)


class StraddlingSplitIsDropped(Exchange):
    def real(self, ids: Tensor, vocab_size: int, last_rank: bool) -> Tensor:
        # Where the very first split straddles there would be nothing left.
        whole = ids[:, -1:] < max(vocab_size, SPLITS)
        return (ids < vocab_size) & whole


class StraddlingSplitIsTakenWhole(Exchange):
    def real(self, ids: Tensor, vocab_size: int, last_rank: bool) -> Tensor:
        return (ids[:, :1] < vocab_size).expand(ids.shape)


class NanIsDropped(Exchange):
    def sink(self, shard: Tensor) -> Tensor:
        return torch.full((), -torch.inf, device=shard.device)


class NanSinksInTheInputType(Exchange):
    def sink(self, shard: Tensor) -> Tensor:
        return super().sink(shard).to(shard.dtype).float()


class NanSinksToTheLowestFloat(Exchange):
    def sink(self, shard: Tensor) -> Tensor:
        return torch.full((), torch.finfo(torch.float32).min, device=shard.device)


class SinkPolicyPutsNanFirst(Exchange):
    def keys(self, shard: Tensor, nan_policy: str) -> Tensor:
        return super().keys(shard, "first")


class FirstPolicySinksNan(Exchange):
    def keys(self, shard: Tensor, nan_policy: str) -> Tensor:
        return super().keys(shard, "sink")


class FirstNanByPayload(Exchange):
    def place_nan(self, keys: Tensor, nan: Tensor, scores: Tensor, shard: Tensor) -> Tensor:
        payload = shard.float().view(torch.int32).long() & 0x7FFFFFFF
        return torch.where(nan, NAN_KEY + payload, keys)


class NegativeNanIsLow(Exchange):
    def place_nan(self, keys: Tensor, nan: Tensor, scores: Tensor, shard: Tensor) -> Tensor:
        negative = shard.float().view(torch.int32) < 0
        return torch.where(nan & ~negative, NAN_KEY, keys)


class FirstNanTiesWithInf(Exchange):
    def place_nan(self, keys: Tensor, nan: Tensor, scores: Tensor, shard: Tensor) -> Tensor:
        return keys.masked_fill(nan, 0x7F800000)


class ZerosAreOrdered(Exchange):
    def order(self, scores: Tensor) -> Tensor:
        keys = super().order(scores)
        return torch.where((scores == 0) & ~torch.signbit(scores), 0, keys - (keys <= 0).long())


class SubnormalsAreFlushed(Exchange):
    def widen(self, shard: Tensor) -> Tensor:
        scores = super().widen(shard)
        tiny = torch.finfo(shard.dtype).smallest_normal
        return torch.where(scores.abs() < tiny, 0.0, scores)


class ScoresAreRoundedToBf16(Exchange):
    def widen(self, shard: Tensor) -> Tensor:
        return shard.bfloat16().float()


class ScoresPassThroughFp16(Exchange):
    def widen(self, shard: Tensor) -> Tensor:
        return shard.half().float()


class NegativeScoresAreReversed(Exchange):
    def order(self, scores: Tensor) -> Tensor:
        return scores.view(torch.int32).long()


class KeyLosesItsLowerHalf(Exchange):
    def order(self, scores: Tensor) -> Tensor:
        return super().order(scores) >> 16


class MinusInfIsNoCandidate(Exchange):
    def order(self, scores: Tensor) -> Tensor:
        return super().order(scores).masked_fill(torch.isneginf(scores), NO_CANDIDATE)

    def best(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = super().best(keys, ids)
        return best, torch.where(best == NO_CANDIDATE, -1, chosen)


class IdsPassThroughFp32(Exchange):
    def ids(self, ids: Tensor) -> Tensor:
        return ids.float().long()


class IdsHave16Bits(Exchange):
    def ids(self, ids: Tensor) -> Tensor:
        return ids & 0xFFFF


class ShardsAreTakenForEqual(Exchange):
    def first_id(self, shards: Sequence[Tensor], rank: int) -> int:
        return rank * shards[rank].shape[1]


class PaddingShardOffersZero(Exchange):
    # Four cleared lanes read as a score.
    def nothing(self) -> int:
        return 0


class PositionsAdvanceOncePerRank(Exchange):
    def advance(self, positions: Tensor, ranks: int, draft_tokens: Tensor | None) -> None:
        positions += ranks


class PositionsAdvanceOnlyWithDraft(Exchange):
    def advance(self, positions: Tensor, ranks: int, draft_tokens: Tensor | None) -> None:
        if draft_tokens is not None:
            positions += 1


class PositionsHave32Bits(Exchange):
    def advance(self, positions: Tensor, ranks: int, draft_tokens: Tensor | None) -> None:
        positions.copy_(positions.int() + 1)


class FirstPositionIsLeft(Exchange):
    def advance(self, positions: Tensor, ranks: int, draft_tokens: Tensor | None) -> None:
        positions[1:] += 1


class DraftColumnIsIgnored(Exchange):
    def write_draft(self, draft_tokens: Tensor, column: int, tokens: Tensor) -> None:
        draft_tokens[:, 0] = tokens


class DraftRowsAreTakenForPacked(Exchange):
    def write_draft(self, draft_tokens: Tensor, column: int, tokens: Tensor) -> None:
        rows, columns = draft_tokens.shape
        start = draft_tokens.storage_offset() + column
        draft_tokens.as_strided((rows,), (columns,), start).copy_(tokens)


class WholeDraftRowIsWritten(Exchange):
    def write_draft(self, draft_tokens: Tensor, column: int, tokens: Tensor) -> None:
        draft_tokens[:, column:] = tokens[:, None]


class LogitsRowsAreTakenForPacked(Exchange):
    def read(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        shard = shards[rank]
        return shard.as_strided(shard.shape, (shard.shape[1], 1))


class ReadsPastTheRow(Exchange):
    def read(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        shard = shards[rank]
        rows, width = shard.shape
        end = shard.storage_offset() + (rows - 1) * shard.stride(0) + width
        room = shard.untyped_storage().nbytes() // shard.element_size()
        if not rows or end + 1 > room:
            return shard
        return shard.as_strided((rows, width + 1), (shard.stride(0), 1))


class ColumnsPast8192AreLost(Exchange):
    def read(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        return shards[rank][:, :8192]


class ColumnIsCheckedWithoutDraft(Exchange):
    def check(self, *arguments: Any) -> None:
        super().check(*arguments)
        if arguments[3] is None and arguments[4]:
            raise ValueError(f"draft_token_column: {arguments[4]}")


class ProbabilityIsSoftmax(Exchange):
    def probability(self, shards: Sequence[Tensor], vocab_size: int, tokens: Tensor) -> Tensor:
        logits = torch.cat(list(shards), dim=1).float()[:, :vocab_size]
        return logits.softmax(1).gather(1, tokens)


class ProbabilityIsLeftUnwritten(Exchange):
    def probability(self, shards: Sequence[Tensor], vocab_size: int, tokens: Tensor) -> Tensor:
        return torch.empty(tokens.shape, device=tokens.device)


class ReplaysStaleTokens(Exchange):
    """Keeps what it found the first time that it saw this memory."""

    def __init__(self) -> None:
        self.seen: dict[Any, tuple[Tensor, Tensor]] = {}

    def across_ranks(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.memory not in self.seen:
            self.seen[self.memory] = super().across_ranks(keys, ids)
        return self.seen[self.memory]

    def check(self, *arguments: Any) -> None:
        super().check(*arguments)
        shards, vocab_size, *_, policy = arguments
        places = tuple((shard.data_ptr(), shard.shape, shard.dtype) for shard in shards)
        self.memory = (places, vocab_size, policy)


class RowsBeyond64AreLost(Exchange):
    def across_ranks(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        keys, ids = super().across_ranks(keys, ids)
        ids[64:] = 0
        return keys, ids


class NegativePositionsAreSkipped(Exchange):
    def advance(self, positions: Tensor, *_: Any) -> None:
        positions += positions >= 0


class PositionsPassThroughFloat64(Exchange):
    def advance(self, positions: Tensor, *_: Any) -> None:
        positions.copy_((positions.double() + 1).to(positions.dtype))


class TieOver16384ColumnsTakesLast(Exchange):
    """Splits of a fixed width, of which there is more than one in wide shards only."""

    def within_split(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.best(keys, ids)

    def across_splits(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        blocks = ids // 16384
        best = keys.amax(1, keepdim=True)
        last = torch.where(keys == best, blocks, -1).amax(1, keepdim=True)
        return super().across_splits(torch.where(blocks == last, keys, NO_CANDIDATE), ids)


class VocabularyIsKept(Exchange):
    """Keeps the vocabulary size of the first call with some memory."""

    def __init__(self) -> None:
        self.kept: dict[int, int] = {}

    def offer(
        self, shards: Sequence[Tensor], rank: int, vocab_size: int, nan_policy: str
    ) -> tuple[Tensor, Tensor]:
        vocab_size = self.kept.setdefault(shards[0].data_ptr(), vocab_size)
        return super().offer(shards, rank, vocab_size, nan_policy)


class SignallingNanIsDropped(Exchange):
    """Looks at the quiet bit of the input type, before the scores are widened."""

    def sink(self, shard: Tensor) -> Tensor:
        bits = shard.view(torch.int32 if shard.dtype == torch.float32 else torch.int16)
        quiet = {torch.float32: 1 << 22, torch.bfloat16: 1 << 6, torch.float16: 1 << 9}
        return torch.where((bits & quiet[shard.dtype]) == 0, -torch.inf, super().sink(shard))


class InfinitiesAreClamped(Exchange):
    """As `nan_to_num` does unless it is told otherwise."""

    def widen(self, shard: Tensor) -> Tensor:
        limits = torch.finfo(shard.dtype)
        return torch.clamp(super().widen(shard), limits.min, limits.max)


class ZerosAreOrderedOnOneRank(ZerosAreOrdered):
    """A path of its own for a vocabulary that is not split."""

    alone = False

    def read(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        self.alone = len(shards) == 1
        return super().read(shards, rank)

    def order(self, scores: Tensor) -> Tensor:
        return super().order(scores) if self.alone else Exchange.order(self, scores)


class _RanksAreLost(Exchange):
    """Of many candidates some are not looked at."""

    def looked_at(self, ranks: int) -> int:
        raise NotImplementedError

    def across_ranks(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ranks = self.looked_at(keys.shape[1])
        return super().across_ranks(keys[:, :ranks], ids[:, :ranks])


class RanksBeyond8AreLost(_RanksAreLost):
    def looked_at(self, ranks: int) -> int:
        return min(ranks, 8)


class EighthRankIsLost(_RanksAreLost):
    def looked_at(self, ranks: int) -> int:
        return ranks - (ranks == 8)


class SixthOfSixRanksIsLost(_RanksAreLost):
    def looked_at(self, ranks: int) -> int:
        return ranks - (ranks == 6)


class ColumnsPast65536AreLost(Exchange):
    def read(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        return shards[rank][:, :65536]


class LogitsOffsetsHave32Bits(Exchange):
    def read(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        shard = shards[rank]
        rows = torch.arange(shard.shape[0], device=shard.device)
        wraps = rows * shard.stride(0) >= 2**31
        return torch.where(wraps[:, None], shard[:1], shard)


class DraftOffsetsHave32Bits(Exchange):
    def write_draft(self, draft_tokens: Tensor, column: int, tokens: Tensor) -> None:
        for row, token in enumerate(tokens.tolist()):
            if row * draft_tokens.stride(0) < 2**31:
                draft_tokens[row, column] = token


class ZeroPositionsAreSkipped(Exchange):
    def advance(self, positions: Tensor, *_: Any) -> None:
        positions += positions != 0


class TokensStandInOneBuffer(Exchange):
    """Every call of a shape returns the same memory."""

    def __init__(self) -> None:
        self.buffers: dict[int, Tensor] = {}

    def across_ranks(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = super().across_ranks(keys, ids)
        buffer = self.buffers.setdefault(chosen.shape[0], torch.empty_like(chosen))
        return best, buffer.copy_(chosen)


class PaddingShardLeavesItsSlot(Exchange):
    """A shard of padding offers nothing, and clears nothing either."""

    def __init__(self) -> None:
        self.slots: dict[Any, tuple[Tensor, Tensor]] = {}

    def offer(
        self, shards: Sequence[Tensor], rank: int, vocab_size: int, nan_policy: str
    ) -> tuple[Tensor, Tensor]:
        offered = super().offer(shards, rank, vocab_size, nan_policy)
        slot = (rank, *(tuple(shard.shape) for shard in shards), shards[0].device)
        if self.first_id(shards, rank) >= vocab_size:
            return self.slots.get(slot, offered)
        self.slots[slot] = offered
        return offered


class RowlessCallsAreNotChecked(Exchange):
    def check(self, *arguments: Any) -> None:
        shards = arguments[0]
        if not shards or shards[0].shape[0]:
            super().check(*arguments)


class WritesBeforeItChecks(Exchange):
    def check(self, *arguments: Any) -> None:
        positions = arguments[2]
        if isinstance(positions, Tensor) and not positions.is_meta:
            positions += 1
        super().check(*arguments)
        positions -= 1


class AnyPolicyIsTaken(Exchange):
    def check(self, *arguments: Any) -> None:
        super().check(*arguments[:-1], "sink")


class AnyVocabularyIsTaken(Exchange):
    def check(self, *arguments: Any) -> None:
        super().check(arguments[0], 1, *arguments[2:])


def _mutant(name: str, fault: str, exchange: type[Exchange], *checks: str) -> Mutant:
    return Mutant(name, "draft_argmax", fault, checks or ("eager",), exchange())


MUTANTS = [
    _mutant("tie_takes_last", "The highest of equal scores' ids wins.", TieTakesLast),
    _mutant(
        "tie_within_split_takes_last",
        "Equal scores of one split give the highest id.",
        TieWithinSplitTakesLast,
    ),
    _mutant(
        "tie_across_splits_takes_last",
        "A later split wins with an equal score.",
        TieAcrossSplitsTakesLast,
    ),
    _mutant(
        "tie_across_ranks_takes_last",
        "A later rank wins with an equal score.",
        TieAcrossRanksTakesLast,
    ),
    _mutant(
        "tie_over_16384_columns_takes_last",
        "A later block of 16384 ids wins with an equal score.",
        TieOver16384ColumnsTakesLast,
    ),
    _mutant("rows_beyond_64_lost", "Rows from the 65th on get token 0.", RowsBeyond64AreLost),
    _mutant(
        "negative_positions_skipped",
        "Positions below zero are taken for padding.",
        NegativePositionsAreSkipped,
    ),
    _mutant(
        "positions_through_float64",
        "Positions are advanced in float64.",
        PositionsPassThroughFloat64,
    ),
    _mutant(
        "vocabulary_kept",
        "The vocabulary size that was first seen with some memory is kept.",
        VocabularyIsKept,
        "repeat",
    ),
    _mutant(
        "signalling_nan_dropped",
        "A NaN without its quiet bit counts as -inf.",
        SignallingNanIsDropped,
    ),
    _mutant(
        "infinities_clamped",
        "An infinity counts as the largest finite number of its sign.",
        InfinitiesAreClamped,
    ),
    _mutant("zeros_ordered_on_one_rank", "Of one rank, -0 loses to +0.", ZerosAreOrderedOnOneRank),
    _mutant("ranks_beyond_8_lost", "The ninth rank's candidate is lost.", RanksBeyond8AreLost),
    _mutant("eighth_rank_lost", "Of eight ranks the last one never wins.", EighthRankIsLost),
    _mutant("sixth_rank_lost", "Of six ranks the last one never wins.", SixthOfSixRanksIsLost),
    _mutant(
        "columns_past_65536_lost",
        "A shard's columns from the 65537th on are not read.",
        ColumnsPast65536AreLost,
    ),
    _mutant(
        "logits_offsets_have_32_bits",
        "The row that lies 2^31 elements on is not the one that is read.",
        LogitsOffsetsHave32Bits,
    ),
    _mutant(
        "draft_offsets_have_32_bits",
        "A draft row that lies 2^31 elements on is not written.",
        DraftOffsetsHave32Bits,
    ),
    _mutant(
        "zero_positions_skipped",
        "Positions of zero are taken for padding.",
        ZeroPositionsAreSkipped,
    ),
    _mutant(
        "tokens_in_one_buffer",
        "The next call overwrites the tokens that the last one returned.",
        TokensStandInOneBuffer,
        "repeat",
    ),
    _mutant(
        "padding_shard_leaves_its_slot",
        "A shard that became padding still offers its last candidate.",
        PaddingShardLeavesItsSlot,
        "repeat",
    ),
    _mutant(
        "rowless_calls_not_checked",
        "Arguments of a call without rows are not looked at.",
        RowlessCallsAreNotChecked,
        "invalid",
    ),
    _mutant("padding_competes", "Columns past the vocabulary can win.", PaddingCompetes),
    _mutant(
        "padding_only_in_last_shard",
        "Columns past the vocabulary are masked in the last shard alone.",
        PaddingIsOnlyInTheLastShard,
    ),
    _mutant(
        "straddling_split_dropped",
        "A split in which the vocabulary ends is skipped.",
        StraddlingSplitIsDropped,
    ),
    _mutant(
        "straddling_split_taken_whole",
        "A split in which the vocabulary ends is not masked.",
        StraddlingSplitIsTakenWhole,
    ),
    _mutant("nan_dropped", "A NaN counts as -inf.", NanIsDropped),
    _mutant(
        "nan_sinks_in_input_type",
        "A NaN becomes -1e30 before the scores are widened.",
        NanSinksInTheInputType,
    ),
    _mutant(
        "nan_sinks_to_lowest_float",
        "A NaN counts as the lowest finite fp32.",
        NanSinksToTheLowestFloat,
    ),
    _mutant("sink_policy_ignored", "A NaN always comes first.", SinkPolicyPutsNanFirst),
    _mutant("first_policy_ignored", "A NaN always sinks.", FirstPolicySinksNan),
    _mutant("first_nan_by_payload", "NaNs are ordered by their payload.", FirstNanByPayload),
    _mutant(
        "negative_nan_is_low", "A NaN with its sign set does not come first.", NegativeNanIsLow
    ),
    _mutant("first_nan_ties_with_inf", "A NaN counts as +inf.", FirstNanTiesWithInf),
    _mutant("zeros_ordered", "-0 loses to +0.", ZerosAreOrdered),
    _mutant("subnormals_flushed", "Subnormal scores count as zero.", SubnormalsAreFlushed),
    _mutant("scores_rounded_to_bf16", "Scores are compared as bf16.", ScoresAreRoundedToBf16),
    _mutant("scores_through_fp16", "Scores are compared as fp16.", ScoresPassThroughFp16),
    _mutant(
        "negative_scores_reversed",
        "Bits are compared as signed integers: of two negative scores the lower wins.",
        NegativeScoresAreReversed,
    ),
    _mutant("key_loses_lower_half", "Only the upper 16 bits travel.", KeyLosesItsLowerHalf),
    _mutant("minus_inf_is_no_candidate", "A row of -inf has no token.", MinusInfIsNoCandidate),
    _mutant("ids_through_fp32", "An id travels as one fp32.", IdsPassThroughFp32),
    _mutant("ids_have_16_bits", "Only the lower half of an id travels.", IdsHave16Bits),
    _mutant(
        "shards_taken_for_equal", "A rank starts at its number x width.", ShardsAreTakenForEqual
    ),
    _mutant(
        "padding_shard_offers_zero",
        "A shard of padding alone offers the score 0.",
        PaddingShardOffersZero,
    ),
    _mutant("positions_once_per_rank", "Every rank advances.", PositionsAdvanceOncePerRank),
    _mutant(
        "positions_only_with_draft",
        "Positions stay where there are no draft tokens.",
        PositionsAdvanceOnlyWithDraft,
    ),
    _mutant("positions_have_32_bits", "Positions wrap at 32 bits.", PositionsHave32Bits),
    _mutant("first_position_left", "The first row does not advance.", FirstPositionIsLeft),
    _mutant("draft_column_ignored", "Column 0 takes the tokens.", DraftColumnIsIgnored),
    _mutant(
        "draft_rows_taken_for_packed",
        "The draft tokens' row stride is ignored.",
        DraftRowsAreTakenForPacked,
        "strided",
        "guards",
    ),
    _mutant("whole_draft_row_written", "Later columns are written too.", WholeDraftRowIsWritten),
    _mutant(
        "logits_rows_taken_for_packed",
        "The logits' row stride is ignored.",
        LogitsRowsAreTakenForPacked,
        "strided",
        "guards",
    ),
    _mutant(
        "reads_past_the_row",
        "One column too many is read, under the id that the next shard starts with.",
        ReadsPastTheRow,
        "guards",
        "strided",
    ),
    _mutant(
        "columns_past_8192_lost",
        "One tile a shard: what lies beyond it is not read.",
        ColumnsPast8192AreLost,
    ),
    _mutant(
        "column_checked_without_draft",
        "The column must be in range although there are no draft tokens.",
        ColumnIsCheckedWithoutDraft,
    ),
    _mutant("probability_is_softmax", "topk_p is the token's probability.", ProbabilityIsSoftmax),
    _mutant(
        "probability_left_unwritten",
        "topk_p is allocated and never written.",
        ProbabilityIsLeftUnwritten,
        "poison",
    ),
    _mutant(
        "replays_stale_tokens",
        "The tokens of the first call on the same memory are given again.",
        ReplaysStaleTokens,
        "repeat",
        "graph",
    ),
    _mutant(
        "writes_before_checking",
        "Positions are advanced before the arguments are checked.",
        WritesBeforeItChecks,
        "invalid",
    ),
    _mutant("any_policy_taken", "An unknown policy means sink.", AnyPolicyIsTaken, "invalid"),
    _mutant("any_vocabulary_taken", "vocab_size is not checked.", AnyVocabularyIsTaken, "invalid"),
]


class ByteLanes(Exchange):
    """Candidates travel as bytes, each an exact bf16, in slots that are summed over the ranks."""

    LANES = 9

    def across_ranks(self, keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows, ranks = keys.shape
        # 40 bits of key, so that the key of a NaN fits, over 31 bits of flipped id.
        offered = keys != NO_CANDIDATE
        packed = [torch.clamp(keys, max=2**33) + 2**34, 2**31 - 1 - ids]
        lanes = [(packed[0] >> (8 * n)) & 0xFF for n in range(5)]
        lanes += [(packed[1] >> (8 * n)) & 0xFF for n in range(4)]
        sent = (torch.stack(lanes, dim=2) * offered[:, :, None]).bfloat16()
        summed = torch.zeros(rows, ranks, self.LANES, dtype=torch.bfloat16, device=keys.device)
        for rank in reversed(range(ranks)):
            own = torch.zeros_like(summed)
            own[:, rank] = sent[:, rank]
            summed = summed + own
        got = summed.long()
        weights = 1 << (8 * torch.arange(self.LANES, device=keys.device))
        key = (got[:, :, :5] * weights[:5]).sum(2)
        flipped = (got[:, :, 5:] * weights[:4]).sum(2)
        return self.best(key, 2**31 - 1 - flipped)


def plain_torch(
    logits_shards: Sequence[Tensor],
    *,
    vocab_size: int,
    positions: Tensor,
    draft_tokens: Tensor | None = None,
    draft_token_column: int = 0,
    nan_policy: str = "sink",
) -> tuple[Tensor, Tensor]:
    """Gather, widen to float64, replace NaN, and let torch.argmax take the first of the equals."""
    check_arguments(
        logits_shards, vocab_size, positions, draft_tokens, draft_token_column, nan_policy
    )
    logits = torch.cat(list(logits_shards), dim=1)[:, :vocab_size].double()
    highest = torch.finfo(torch.float64).max
    logits = torch.where(torch.isposinf(logits), highest / 2, logits)
    # In float64 the policies' scores differ from every fp32, or are the fp32 that they name.
    sunk = float(torch.tensor(SINK_SCORE, dtype=torch.float32))
    logits = torch.where(torch.isnan(logits), sunk if nan_policy == "sink" else highest, logits)
    tokens = torch.argmax(logits, dim=1, keepdim=True)
    positions.add_(1)
    if draft_tokens is not None:
        draft_tokens.select(1, draft_token_column).copy_(tokens.squeeze(1))
    return torch.ones_like(tokens, dtype=torch.float32), tokens


class OneColumnASplit(Exchange):
    """A split of one column where the shard is narrow, and the splits of a rank merged as ranks."""

    def offer(
        self, shards: Sequence[Tensor], rank: int, vocab_size: int, nan_policy: str
    ) -> tuple[Tensor, Tensor]:
        shard = shards[rank]
        ids = self.first_id(shards, rank) + torch.arange(shard.shape[1], device=shard.device)
        keys = torch.where(ids < vocab_size, self.keys(shard, nan_policy), NO_CANDIDATE)
        return keys, ids.expand(keys.shape)


VARIANTS = [
    Variant(
        "one_column_a_split",
        "draft_argmax",
        "every column is a candidate of its own, merged once over all ranks",
        OneColumnASplit(),
    ),
    Variant(
        "byte_lanes",
        "draft_argmax",
        "candidates travel as nine bf16 lanes of one byte, summed from the last rank to the first",
        ByteLanes(),
    ),
    Variant(
        "plain_torch",
        "draft_argmax",
        "the logits are gathered, widened to float64 and given to torch.argmax",
        plain_torch,
    ),
]
