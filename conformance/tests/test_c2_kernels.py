"""Kernels of the `c2_compress` family: rings, the layout table, dispatch and step-by-step paths."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.kernels import c2_compress as kernels
from draftproof.kernels import runtime

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

needs_triton = pytest.mark.skipif(
    not runtime.runs_triton(DEVICE), reason="no GPU, and Triton's interpreter is off"
)


# ---------------------------------------------------------------- rings and layouts


@pytest.mark.parametrize(
    ("draft_tokens", "size"), [(0, 2), (1, 4), (2, 4), (3, 8), (5, 8), (6, 8), (7, 16), (9, 16)]
)
def test_ring_size_is_the_published_power_of_two(draft_tokens: int, size: int) -> None:
    assert kernels.ring_size_for(draft_tokens) == size


def test_no_block_fills_its_ring() -> None:
    sizes = {count: kernels.ring_size_for(count) for count in range(200)}
    assert all(size > count and size.bit_count() == 1 for count, size in sizes.items())


@pytest.mark.parametrize("count", [-1, 2.0, True, None])
def test_ring_size_refuses_what_is_no_count(count: Any) -> None:
    with pytest.raises(ValueError, match=rf"num_draft_tokens.*{count}"):
        kernels.ring_size_for(count)


def test_layout_in_use_has_584_bytes_a_token() -> None:
    layout = kernels.KV_LAYOUTS[kernels.LAYOUT]
    assert (layout.data_bytes, layout.code_bytes, layout.token_bytes) == (576, 8, 584)
    assert layout.blocks == 7


@pytest.mark.parametrize(
    ("page_size", "size"), [(1, 1152), (2, 1728), (4, 2880), (64, 37440), (128, 74880)]
)
def test_pages_are_padded_to_576_bytes(page_size: int, size: int) -> None:
    assert kernels.KV_LAYOUTS[kernels.LAYOUT].page_bytes(page_size) == size


def test_every_layout_holds_its_codes() -> None:
    for layout in kernels.KV_LAYOUTS.values():
        assert layout.fp8_features == layout.blocks * layout.block
        assert layout.blocks <= layout.code_bytes


# ---------------------------------------------------------------- dispatch

FLAGS = list(itertools.product((False, True), repeat=3))


@needs_triton
@pytest.mark.parametrize(("target_verify", "draft_worker", "compact_ragged"), FLAGS)
def test_only_fixed_width_target_verify_is_fused(
    target_verify: bool, draft_worker: bool, compact_ragged: bool
) -> None:
    batch = kernels.Batch(target_verify, draft_worker, compact_ragged, DEVICE)
    route = kernels.c2_route(batch)
    assert route.fused is ((target_verify, draft_worker, compact_ragged) == (True, False, False))
    named = {
        "draft worker": draft_worker,
        "only target verify": not target_verify,
        "compact ragged": compact_ragged,
        "fixed width": route.fused,
    }
    (reason,) = [words for words in named if words in route.reason]
    assert named[reason]


@pytest.mark.parametrize(("target_verify", "draft_worker", "compact_ragged"), FLAGS)
def test_a_device_without_triton_is_never_fused(
    target_verify: bool, draft_worker: bool, compact_ragged: bool
) -> None:
    device = torch.device("meta")
    route = kernels.c2_route(kernels.Batch(target_verify, draft_worker, compact_ragged, device))
    assert route == (False, "Triton does not run on meta here")


# ---------------------------------------------------------------- the paths

BLOCKS, DRAFT_LEN, RING, PAGE = 3, 5, 8, 2


def call() -> dict[str, Any]:
    """Two live blocks, one odd and one even at its start, and a padded one that aliases one."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = BLOCKS * DRAFT_LEN
    starts = torch.tensor([15, 6, 0])
    positions = starts[:, None] + torch.arange(DRAFT_LEN)
    positions[2] = 0
    locations = 3 + 2 * torch.arange(rows).view(BLOCKS, DRAFT_LEN)
    locations[2] = 0
    page_bytes = kernels.KV_LAYOUTS[kernels.LAYOUT].page_bytes(PAGE)
    tensors = {
        "kv_input": noise(rows, 1024),
        "kv_state": noise(2 * RING, 1024),
        "norm_weight": (1 + noise(512) / 8).bfloat16(),
        "positions": positions.flatten(),
        "req": torch.tensor([1, 0, 1]).repeat_interleave(DRAFT_LEN),
        "raw_out_loc": locations.flatten().int(),
        "freqs_cis": noise(32, 64),
        "k_cache": torch.arange(8 * page_bytes).view(8, page_bytes).to(torch.uint8),
        "out": noise(rows, 512).bfloat16(),
    }
    moved = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    return {**moved, "eps": 1e-6, "page_size": PAGE, "ring_size": RING}


def after(function: Any, **more: Any) -> dict[str, bytes]:
    """What a function leaves in the tensors of the call."""
    arguments = {**call(), **more}
    function(**arguments)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    return {
        name: bytes(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        for name, tensor in tensors.items()
    }


@needs_triton
def test_one_launch_leaves_the_bytes_of_the_step_by_step_path() -> None:
    before = after(lambda **arguments: None)
    fused = after(kernels.c2_verify, draft_len=DRAFT_LEN)
    assert fused == after(kernels.c2_verify_steps, draft_len=DRAFT_LEN)
    changed = {name for name in before if before[name] != fused[name]}
    assert changed == {"kv_state", "k_cache", "out"}


def test_a_device_without_triton_is_served_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "runs_triton", lambda device: False)
    before = after(lambda **arguments: None)
    unfused = after(kernels.c2_verify, draft_len=DRAFT_LEN)
    assert unfused == after(kernels.c2_verify_baseline, draft_len=DRAFT_LEN)
    changed = {name for name in before if before[name] != unfused[name]}
    assert changed == {"kv_state", "k_cache", "out"}
