"""The compile gate's child: notes what launchers launch, compiles it, and reads the machine code.

It runs in a process of its own, where Triton compiles and no GPU is visible. Launchers are called
as they are, on CPU tensors that say they lie on a GPU; instead of launching, Triton's entry point
notes the kernel, its arguments and its options. Triton's own specialisation then decides, per
target, what is compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from draftproof.conformance.engine.calls import replace
from draftproof.conformance.engine.implementations import resolve
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.spec import Case, OpSpec
from draftproof.conformance.gate.compile_gate import Compiled

PROCESSES = 2
"""Compilations at a time."""

_GPU = torch.device("cuda", 0)
_DEVICE_OF = Tensor.device.__get__
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_WARP_SIZE = {"cuda": 32, "hip": 64}


@dataclass(frozen=True)
class Launch:
    """A launch that was noted instead of done."""

    op: str
    implementation: str
    case: str
    aligned: bool
    function: JITFunction[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    features: frozenset[Any]
    """What shapes the code, as pairs of a name and a value."""

    size: int
    """Product of the compile-time integers: how much a program does at once, roughly."""


class PretendGpu(TorchFunctionMode):
    """Makes CPU tensors say that they lie on a GPU, and makes new GPU tensors on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _DEVICE_OF:
            device = func(*args)
            return _GPU if device.type == "cpu" else device
        if func == _IS_CUDA:
            return True
        if func == Tensor.get_device:
            return _GPU.index
        args = tuple(_on_cpu(value) for value in args)
        if func == torch.bmm and kwargs and "out_dtype" in kwargs:
            # Only GPUs have it; what it gives decides nothing here.
            return func(*args).to(kwargs["out_dtype"])
        return func(*args, **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return "cpu" if torch.device(value).type == "cuda" else value
    return value


_capability = (9, 0)
"""What launchers are told of the device; set by the request that this process serves."""

Noted = tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]
"""A kernel, what it was to be launched with, and by which keywords."""


@contextlib.contextmanager
def noting() -> Iterator[list[Noted]]:
    """Note what Triton would launch, while what a launcher asks of CUDA is answered."""
    noted: list[Noted] = []

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        noted.append((self, args, kwargs))

    answers = {
        "is_available": lambda: True,
        "current_device": lambda: _GPU.index,
        "device": lambda device: contextlib.nullcontext(),
        "device_of": lambda tensor: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "get_device_capability": lambda device=None: _capability,
        "get_device_properties": lambda device=None: SimpleNamespace(
            multi_processor_count=132, major=_capability[0], minor=_capability[1], warp_size=32
        ),
    }
    kept = {name: getattr(torch.cuda, name) for name in answers}
    launcher = JITFunction.run
    JITFunction.run = run
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    try:
        with PretendGpu():
            yield noted
    finally:
        JITFunction.run = launcher
        for name, function in kept.items():
            setattr(torch.cuda, name, function)


def misaligned(tensor: Tensor) -> Tensor:
    """Give a tensor of the same geometry whose base is not at a multiple of 16 bytes.

    Its elements are copied, but not what lies between them: a storage may be huge and hardly used.
    """
    item, offset = tensor.element_size(), tensor.storage_offset()
    if (offset * item) % 16 == 0:
        offset += 1
    room = torch.empty(tensor.untyped_storage().nbytes() + item, dtype=torch.uint8)
    moved = torch.empty(0, dtype=tensor.dtype).set_(
        room.untyped_storage(), offset, tensor.size(), tensor.stride()
    )
    # An expanded dimension is one element in memory, and is written once.
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    moved[once].copy_(tensor[once])
    return moved


def _cases(spec: OpSpec) -> list[Case]:
    """Give the cases whose arguments are small enough to be made wherever the gate runs.

    A case tagged "beyond_range" has more of something than the op is meant for: it must be right,
    not quick.
    """
    return [
        case
        for case in spec.cases
        if case.profile == "quick" and case.device is None and "beyond_range" not in case.tags
    ]


def note_launches(
    ops: list[str], implementations: list[str]
) -> tuple[list[Launch], list[Compiled]]:
    """Run the launchers of ops on their cases, aligned and not.

    Returns
    -------
    launches : list of Launch
        One of each kind: kernel, constants, dtypes, options, alignment.
    failures : list of Compiled
        Calls in which a launcher raised, told in `error`.
    """
    launches: dict[Any, Launch] = {}
    failures = []
    for op, implementation in itertools.product(ops, implementations):
        spec, function = load_specs()[op], resolve(implementation).get(op)
        if function is None:
            continue
        for case, aligned in itertools.product(_cases(spec), (True, False)):
            call = spec.build(case.params, 0)
            if not aligned:
                call = replace(call, lambda path, tensor: misaligned(tensor))
            try:
                with noting() as noted:
                    function(**call)
            except Exception:
                told = traceback.format_exc(limit=-2)
                failures.append(Compiled(op, implementation, case.name, aligned, error=told))
            for kernel, args, kwargs in noted:
                launch = _launch(op, implementation, case.name, aligned, kernel, args, kwargs)
                launches.setdefault((kernel, launch.features), launch)
    return list(launches.values()), failures


CONSTANT = "constexpr"
"""What marks a feature as a constant of the code, before its name and value."""


def _launch(
    op: str,
    implementation: str,
    case: str,
    aligned: bool,
    kernel: JITFunction[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Launch:
    """Keep of a launch what is needed to compile it, and tell what shapes its code."""
    args = tuple(map(_stand_in, args))
    kwargs = {name: _stand_in(value) for name, value in kwargs.items()}
    named = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    features: set[Any] = {("aligned", aligned)}
    features |= {(name, repr(value)) for name, value in kwargs.items() if name not in named}
    size = 1
    bound = kernel.signature.bind(*args, **named)
    bound.apply_defaults()
    for param, value in zip(kernel.params, bound.arguments.values(), strict=True):
        if param.is_constexpr:
            features.add((CONSTANT, param.name, repr(value)))
        else:
            features.add((param.name, _runtime_kind(value)))
        if param.is_constexpr and isinstance(value, int):
            size *= max(1, value)
    return Launch(
        op, implementation, case, aligned, kernel, args, kwargs, frozenset(features), size
    )


def _stand_in(value: Any) -> Any:
    """Give a small tensor for a large one, of its dtype and as well aligned."""
    if isinstance(value, Tensor):
        return torch.empty(17, dtype=value.dtype)[int(value.data_ptr() % 16 != 0) :]
    return tuple(map(_stand_in, value)) if isinstance(value, tuple) else value


def _runtime_kind(value: Any) -> Any:
    """Give what of an argument shapes the code: a dtype, or whether a number is 1."""
    if isinstance(value, tuple):
        return tuple(map(_runtime_kind, value))
    return value.dtype if isinstance(value, Tensor) else (type(value), value in (None, 1))


def representatives(launches: list[Launch], limit: int) -> list[Launch]:
    """Choose few launches of each kernel that show as many of its features as can be.

    Parameters
    ----------
    launches : list of Launch
    limit : int
        Most launches of one kernel.

    Returns
    -------
    list of Launch
        Of each kernel those with the largest constants, aligned and not, then whichever adds most
        that none before it has, until nothing is new: constants first, since they choose code, then
        dtypes and options.
    """
    chosen = []
    for kernel in dict.fromkeys(launch.function for launch in launches):
        rest = [launch for launch in launches if launch.function is kernel]
        seen: set[Any] = set()
        for turn in range(limit):
            alike = [launch for launch in rest if launch.aligned == (turn == 0)]
            best = max(
                alike if turn < 2 and alike else rest,
                key=lambda launch: (
                    *_news(launch, seen if turn > 1 else launch.features),
                    launch.size,
                ),
            )
            if best.features <= seen:
                break
            seen |= best.features
            chosen.append(best)
    return chosen


def _news(launch: Launch, seen: Set[Any]) -> tuple[int, int]:
    """How many constants of a launch, and how many features in all, are not among those seen."""
    new = launch.features - seen
    return sum(feature[0] == CONSTANT for feature in new), len(new)


def specialise(launch: Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """Let Triton decide what of a launch is compiled for a target.

    Returns
    -------
    source : ASTSource
    options : dict
        What `triton.compile` takes beside it.
    """
    kernel = launch.function
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = {**launch.kwargs, "debug": False}
    bound, specialization, given = binder(*launch.args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(
        backend, kwargs, bound, specialization, given
    )
    return ASTSource(kernel, signature, constants, attributes), options.__dict__


def compile_launch(launch: Launch, target: GPUTarget, *, disassemble: bool) -> Compiled:
    """Compile one launch for one target and read what the machine code needs.

    Parameters
    ----------
    launch : Launch
    target : GPUTarget
    disassemble : bool
        Whether to look for spills on NVIDIA also where no stack is used. That takes longer than
        to compile, so one launch of each kernel and target is enough.
    """
    source, options = specialise(launch, target)
    names = launch.function.arg_names
    result = Compiled(
        op=launch.op,
        implementation=launch.implementation,
        case=launch.case,
        aligned=launch.aligned,
        kernel=launch.function.fn.__qualname__,
        constants=", ".join(
            f"{names[first]}{''.join(f'[{i}]' for i in inner)}={getattr(value, '__name__', value)}"
            for (first, *inner), value in sorted(source.constants.items())
        ),
        target=f"{target.backend}:{target.arch}",
        warps=options["num_warps"],
        unstated=[name for name in ("num_warps", "enable_fp_fusion") if name not in launch.kwargs],
    )
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
        return result
    result.shared = compiled.metadata.shared
    if target.backend == "cuda":
        _read_cuda(compiled.asm["cubin"], result, disassemble=disassemble)
    else:
        _read_hip(compiled.asm["amdgcn"], result)
    return result


def _read_cuda(cubin: bytes, result: Compiled, *, disassemble: bool) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        if found is None:
            raise RuntimeError(f"cuobjdump said nothing of registers and stack: {usage!r}")
        result.registers, result.stack = int(found[1]), int(found[2])
        if disassemble or result.stack:
            code = _tool(triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name)
            result.spills = len(re.findall(r"\b(?:STL|LDL)\b", code))


def _read_hip(assembly: str, result: Compiled) -> None:
    def number(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)$", assembly, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"the code object's metadata has no .{name}")
        return int(found[1])

    result.registers = number("vgpr_count")
    result.stack = number("private_segment_fixed_size")
    result.spills = number("vgpr_spill_count") + number("sgpr_spill_count")


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _uncompiled(ops: list[str], launches: list[Launch]) -> list[str]:
    """Name the kernels of whole families that no launch and no other kernel reaches."""
    specs = load_specs().values()
    families = {spec.family for spec in specs} - {s.family for s in specs if s.name not in ops}
    launched = {launch.function for launch in launches}
    names = []
    for family in sorted(families):
        module = importlib.import_module(f"draftproof.kernels.{family}")
        own = [f for f in vars(module).values() if isinstance(f, JITFunction)]
        own = [function for function in own if function.fn.__module__ == module.__name__]
        for function in own:
            name = function.fn.__name__
            called = any(re.search(rf"\b{name}\b", f.src) for f in own if f is not function)
            if function not in launched and not called:
                names.append(f"{family}.{name}")
    return names


@dataclass(frozen=True)
class _Job:
    launch: Launch
    target: GPUTarget
    disassemble: bool


_jobs: list[_Job] = []


def _plan_jobs(launches: list[Launch], targets: list[str]) -> None:
    """List what differs, once Triton has specialised it, and disassemble each kernel once."""
    seen = set()
    for launch, name in itertools.product(launches, targets):
        backend, _, arch = name.partition(":")
        target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, _WARP_SIZE[backend])
        source, options = specialise(launch, target)
        code = (name, source.hash(), str(sorted(options.items(), key=str)))
        kernel = (name, launch.function)
        if code not in seen:
            _jobs.append(_Job(launch, target, disassemble=kernel not in seen))
        seen |= {code, kernel}


def _compile_job(index: int) -> Compiled:
    job = _jobs[index]
    return compile_launch(job.launch, job.target, disassemble=job.disassemble)


def main(request_file: str) -> None:
    """Serve one request: JSON in a file, which the results as JSON replace."""
    file = Path(request_file)
    global _capability
    request = json.loads(file.read_text())
    _capability = tuple(request["capability"])
    launches, results = note_launches(request["ops"], request["implementations"])
    _plan_jobs(representatives(launches, request["variants"]), request["targets"])
    # Forked, so that the jobs, which cannot be pickled, are already there.
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as pool:
        results += pool.map(_compile_job, range(len(_jobs)))
    answer = {
        "triton": triton.__version__,
        "kernels": [asdict(result) for result in results],
        "uncompiled": _uncompiled(request["ops"], launches) if request["own"] else [],
    }
    file.write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
