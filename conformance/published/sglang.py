"""SGLang's kernels under the names of our ops: what each is called there, and how it is called.

An adapter hands over what it is given. It prepares only what SGLang's own caller prepares (the
gathered logits, the mask behind a row's length), checks nothing, and repairs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.engine.implementations import BadImplementation, Implementation
from draftproof.conformance.published.package import Package, Unavailable

C128 = "sglang.kernels.ops.kvcache.dsv4_c128_cleanup"
DSA = "sglang.kernels.ops.attention.dsa.metadata"
TOP1 = "sglang.kernels.ops.speculative.topk1"
BLOCKS = "sglang.kernels.ops.attention.dsv4.candidate_blocks"
WO_A = "sglang.kernels.ops.gemm.dsv4_wo_a"

Function = Callable[..., Any]


@dataclass(frozen=True)
class Adapter:
    """How one op is put together from SGLang's functions.

    Parameters
    ----------
    make : callable
        `make(package) -> function` with our op's signature. It raises `Unavailable` where
        something is missing.
    cuda_only : bool
        Whether SGLang's launcher refuses tensors that are not on a CUDA device.
    """

    make: Callable[[Package], Function]
    cuda_only: bool = False


def _c128_cleanup(package: Package) -> Function:
    clear = package.function(f"{C128}:clear_unaccepted_c128_draft_states")
    fused = package.optional(f"{C128}:C128DraftCleanup")

    def c128_cleanup(
        states: list[Tensor],
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        accept_lens: Tensor,
        *,
        ring_size: int,
        num_draft_tokens: int,
    ) -> None:
        indices = (req_pool_indices, seq_lens, accept_lens)
        if fused is not None:
            owner = fused(states, ring_size=ring_size)
            owner.clear(*indices, num_draft_tokens=num_draft_tokens)
            return
        for state in states:
            clear(state, *indices, ring_size=ring_size, num_draft_tokens=num_draft_tokens)

    return c128_cleanup


def _dsa_decode_metadata(package: Package) -> Function:
    fill = package.function(f"{DSA}:fused_dsa_decode_metadata")

    def dsa_decode_metadata(
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        *,
        max_len: int,
        dsa_index_topk: int,
        physical_page_size: int,
        **outputs: Tensor | None,
    ) -> None:
        fill(
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            req_to_token=req_to_token,
            bs=seq_lens.shape[0],
            max_len=max_len,
            dsa_index_topk=dsa_index_topk,
            physical_page_size=physical_page_size,
            **outputs,
        )

    return dsa_decode_metadata


STEP_OUTPUTS = (
    "cache_seqlens",
    "cu_seqlens_k",
    "dsa_cache_seqlens",
    "dsa_cu_seqlens_k",
    "page_table_1",
    "real_page_table",
)


def _dsa_draft_decode_metadata(package: Package) -> Function:
    decode = _dsa_decode_metadata(package)

    def dsa_draft_decode_metadata(
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        *,
        steps: list[Any],
        **sizes: int,
    ) -> None:
        for step in steps:
            outputs = {name: getattr(step, name) for name in STEP_OUTPUTS}
            decode(seq_lens, req_pool_indices, req_to_token, **outputs, **sizes)

    return dsa_draft_decode_metadata


def _dsa_target_verify_metadata(package: Package) -> Function:
    fill = package.function(f"{DSA}:fused_dsa_target_verify_metadata")

    def dsa_target_verify_metadata(
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        *,
        max_len: int,
        dsa_index_topk: int,
        physical_page_size: int,
        next_n: int,
        paged_mqa_ctx_lens_2d: Tensor | None = None,
        **outputs: Tensor | None,
    ) -> None:
        bs = seq_lens.shape[0]
        if paged_mqa_ctx_lens_2d is not None:
            # SGLang keeps larger buffers too, and hands over as much of them as the batch needs.
            paged_mqa_ctx_lens_2d = paged_mqa_ctx_lens_2d[:bs, :next_n]
        fill(
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            req_to_token=req_to_token,
            bs=bs,
            max_seqlen_k=max_len,
            dsa_index_topk=dsa_index_topk,
            physical_page_size=physical_page_size,
            next_n=next_n,
            paged_mqa_ctx_lens_2d=paged_mqa_ctx_lens_2d,
            **outputs,
        )

    return dsa_target_verify_metadata


def _dsa_draft_extend_metadata(package: Package) -> Function:
    fill = package.function(f"{DSA}:fused_dsa_draft_extend_metadata")

    def dsa_draft_extend_metadata(
        seq_lens: Tensor,
        extend_seq_lens: Tensor,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        *,
        total_len: int,
        max_extend_len: int,
        max_len: int,
        dsa_index_topk: int,
        physical_page_size: int,
        static_extend_len: bool = False,
        cache_seqlens: Tensor,
        **outputs: Tensor | None,
    ) -> None:
        bs = seq_lens.shape[0]
        fill(
            seq_lens=seq_lens,
            extend_seq_lens=extend_seq_lens,
            req_pool_indices=req_pool_indices,
            req_to_token=req_to_token,
            bs=bs,
            total_len=total_len,
            max_seqlen_k=max_len,
            dsa_index_topk=dsa_index_topk,
            physical_page_size=physical_page_size,
            max_extend_len=max_extend_len,
            # What SGLang sizes its block of rows by: as many as a batch can have.
            max_total_len=bs * max_extend_len,
            static_extend_len=static_extend_len,
            # As much of a larger buffer as the batch needs, as SGLang's caller has it.
            cache_seqlens=cache_seqlens[:bs],
            **outputs,
        )

    return dsa_draft_extend_metadata


def _draft_argmax(package: Package) -> Function:
    top1 = package.function(f"{TOP1}:draft_topk1_postprocess")

    def draft_argmax(
        logits_shards: list[Tensor],
        *,
        vocab_size: int,
        positions: Tensor,
        draft_tokens: Tensor | None = None,
        draft_token_column: int = 0,
        nan_policy: str = "sink",
    ) -> Any:
        if nan_policy != "sink":
            raise NotImplementedError(f"nan_policy {nan_policy!r}: SGLang has no such policy")
        # SGLang gathers the shards of all ranks first, and cuts the padding off.
        gathered = logits_shards[0] if len(logits_shards) == 1 else torch.cat(logits_shards, dim=1)
        return top1(gathered[:, :vocab_size], positions, draft_tokens, draft_token_column)

    return draft_argmax


def _candidate_blocks(package: Package) -> Function:
    select = package.function(f"{BLOCKS}:select_candidate_block_ids")
    mask = package.function(f"{BLOCKS}:candidate_block_mask")

    def candidate_blocks(
        logits: Tensor,
        seq_lens: Tensor,
        *,
        topk_blocks: int,
        block_size: int,
        published: Tensor | None = None,
    ) -> Any:
        if published is not None:
            raise NotImplementedError("published: SGLang masks a consumer's scores by block ids")
        columns = torch.arange(logits.shape[1], device=logits.device)
        # The kernel that makes the logits leaves -inf behind each row's length.
        masked = torch.where(columns < seq_lens[:, None], logits.float(), -torch.inf)
        ids = select(masked, seq_lens[:, None], topk_blocks, block_size)
        return masked, mask(ids, logits.shape[1], block_size)

    return candidate_blocks


def _projection(name: str) -> Callable[[Package], Function]:
    """For one of the functions that take the rows, then the weight."""

    def make(package: Package) -> Function:
        function = package.function(f"{WO_A}:{name}")
        return lambda x, weight: function(x, weight)

    return make


ADAPTERS: Mapping[str, Adapter] = {
    "c128_cleanup": Adapter(_c128_cleanup),
    "dsa_decode_metadata": Adapter(_dsa_decode_metadata, cuda_only=True),
    "dsa_target_verify_metadata": Adapter(_dsa_target_verify_metadata, cuda_only=True),
    "dsa_draft_extend_metadata": Adapter(_dsa_draft_extend_metadata, cuda_only=True),
    "dsa_draft_decode_metadata": Adapter(_dsa_draft_decode_metadata, cuda_only=True),
    "draft_argmax": Adapter(_draft_argmax),
    "candidate_blocks": Adapter(_candidate_blocks),
    "wo_a_mxfp8": Adapter(_projection("wo_a_bf16_small_batch_mxfp8"), cuda_only=True),
    "wo_a": Adapter(_projection("wo_a_bf16_small_batch"), cuda_only=True),
}

WITHOUT: Mapping[str, str] = {
    "filter_topk_pages": "SGLang's kernel sorts the positions and reads a request's token map, "
    "where this op keeps their order and reads a page table",
    "q_rope_store": "SGLang's is CUDA C++ that a compiler builds at the first call "
    "(sglang.kernels.ops.attention.dsv4.norm_rope:fused_q_norm_rope); there is no Triton kernel",
    "wo_a_partials": "SGLang's partial sums are no function's result",
    "quantize_partials": "SGLang's quantisation takes no partial sums but its own",
    "c2_decode": "SGLang's is CUDA C++ that a compiler builds at the first call "
    "(sglang.kernels.ops.attention.dsv4.low_ratio_compress:c2_decode_norm_rope_store)",
    "c2_verify": "SGLang's is CUDA C++ that a compiler builds at the first call "
    "(sglang.kernels.ops.attention.dsv4.low_ratio_compress:c2_decode_norm_rope_store)",
}
"""Why an op has no adapter."""


def implementation() -> Implementation:
    """The kernels of the SGLang that is installed here.

    Raises
    ------
    BadImplementation
        If none is installed.
    """
    package = Package("sglang")
    if not package.installed:
        raise BadImplementation("--impl sglang: no package sglang is installed here")
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    functions: dict[str, Function] = {}
    lacking = dict(WITHOUT)
    for op, adapter in ADAPTERS.items():
        try:
            function = adapter.make(package)
        except Unavailable as reason:
            lacking[op] = str(reason)
            continue
        if adapter.cuda_only and interpreted:
            lacking[op] = "SGLang's launcher takes tensors on a CUDA device only"
        else:
            functions[op] = function
    return Implementation("sglang", True, functions.get, lacking=lacking, about=package.describe())
