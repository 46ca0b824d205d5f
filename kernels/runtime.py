"""Where Triton kernels run in this process: on the GPU, or on CPU tensors under the interpreter."""

from __future__ import annotations

import torch
import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""True where Triton's interpreter executes the kernels (TRITON_INTERPRET=1 before the import)."""


def runs_triton(device: torch.device) -> bool:
    """Say whether a Triton kernel can be launched on tensors of `device` in this process.

    Parameters
    ----------
    device : torch.device
        The device that all tensors of the call lie on.

    Returns
    -------
    bool
        True for a CUDA (or ROCm) device of compiled Triton, and for the CPU under the interpreter.
        Under the interpreter a CUDA tensor also runs: Triton moves it to the host and back.
    """
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")
