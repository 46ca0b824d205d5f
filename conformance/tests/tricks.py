"""Implementations that try to pass without being right, each by one trick."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.conformance.engine import casefile, checks, judges, registry
from draftproof.conformance.tests.toys import double_live
from draftproof.oracles import c128_cleanup as oracle_module

DELAY = 0.2
"""Seconds: far longer than a comparison of a toy's result takes."""


def wrong(out: Tensor, counter: Tensor, lens: Tensor, **_: Any) -> Tensor:
    """What all of them really do: nothing to `out`."""
    counter += 1
    return lens.clone()


# ---------------------------------------------------------------- work that lands later

THREADS: list[threading.Thread] = []
"""Started by the tricks, for the tests to wait for."""


def _later(work: Callable[[], object]) -> None:
    def run() -> None:
        time.sleep(DELAY)
        work()

    THREADS.append(threading.Thread(target=run, daemon=True))
    THREADS[-1].start()


def lands_from_a_thread(**args: Any) -> Tensor:
    """Return at once, and let a thread write the result."""
    given = {name: value.clone() for name, value in args.items() if isinstance(value, Tensor)}
    double_live(**{**args, **given})
    out, counter = args["out"], args["counter"]
    _later(lambda: (out.copy_(given["out"]), counter.copy_(given["counter"])))
    return args["lens"].clone()


def lands_from_another_stream(**args: Any) -> Tensor:
    """Return at once, and let another stream write the result, for which nobody waits."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)  # type: ignore[attr-defined]
        return double_live(**args)


def borrows_its_input(x: Tensor, **rest: Any) -> Tensor:
    """Overwrite an input, and let a thread put it back."""
    was = x.clone()
    returned = double_live(x, **rest)
    x.zero_()
    _later(lambda: x.copy_(was))
    return returned


# ---------------------------------------------------------------- what was seen before


class Remembers:
    """Give again what a call of the same address, or of the same shape, gave the first time.

    Parameters
    ----------
    key : callable
        What it knows a call by.
    """

    def __init__(self, key: Callable[[Tensor], object]) -> None:
        self._key = key
        self._seen: dict[object, Tensor] = {}

    def __call__(self, x: Tensor, **rest: Any) -> Tensor:
        return double_live(self._seen.setdefault(self._key(x), x.clone()), **rest)


class ReadsCaseFiles:
    """Look a call up in case files that hold what is due, and give that.

    Parameters
    ----------
    folder : Path
        Of golden vectors.
    """

    def __init__(self, folder: Path) -> None:
        self._answers = {}
        for path in folder.glob("*.json"):
            if path.name == "manifest.json":
                continue
            case = casefile.read(path)
            self._answers[_digest(case.calls[0]["x"])] = case.wanted

    def __call__(self, x: Tensor, out: Tensor, **rest: Any) -> Tensor:
        due = self._answers.get(_digest(x))
        if due is not None:
            out.copy_(due["out"])
        return wrong(out=out, **rest)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


# ---------------------------------------------------------------- what judges it


def _patches_equal() -> None:
    torch.equal = lambda *_: True


def _patches_ne() -> None:
    torch.ne = lambda one, other: torch.zeros_like(one, dtype=torch.bool)


def _patches_a_method() -> None:
    torch.Tensor.any = lambda *_, **__: torch.tensor(False)


def _patches_an_operator() -> None:
    torch.Tensor.__ne__ = lambda one, other: torch.zeros_like(one, dtype=torch.bool)


def _replaces_a_judge() -> None:
    judges.Bits.wrong = lambda self, look: torch.zeros_like(look.got, dtype=torch.bool)


def _replaces_the_comparison() -> None:
    checks.hold = lambda *_, **__: None


def _replaces_an_oracle() -> None:
    oracle_module.c128_cleanup = lambda *_, **__: None


def _replaces_the_registry() -> None:
    registry.load_specs = dict


def _replaces_the_oracle_of_a_spec() -> None:
    spec = registry.load_specs()["c128_cleanup"]
    vars(spec)["oracle"] = lambda **_: None


def _replaces_what_it_finds_by_its_type() -> None:
    for found in object.__subclasses__():
        if found.__name__ == "TopKSet":
            found.wrong = lambda self, look: torch.zeros_like(look.got)  # type: ignore[attr-defined]


PATCHES: dict[str, tuple[Callable[[], None], str]] = {
    "equal": (_patches_equal, "torch.equal"),
    "ne": (_patches_ne, "torch.ne"),
    "method": (_patches_a_method, "torch.Tensor.any"),
    "operator": (_patches_an_operator, "torch.Tensor.__ne__"),
    "judge": (_replaces_a_judge, "engine.judges.Bits.wrong"),
    "comparison": (_replaces_the_comparison, "engine.checks.hold"),
    "oracle": (_replaces_an_oracle, "oracles.c128_cleanup.c128_cleanup"),
    "registry": (_replaces_the_registry, "engine.registry.load_specs"),
    "spec": (_replaces_the_oracle_of_a_spec, "the oracle of c128_cleanup"),
    "search": (_replaces_what_it_finds_by_its_type, "engine.judges.TopKSet.wrong"),
}
"""What is replaced, by name, and how a report calls it."""


def patching(name: str) -> Callable[..., Tensor]:
    """A wrong implementation that replaces what would see it."""

    def function(**args: Any) -> Tensor:
        PATCHES[name][0]()
        return wrong(**args)

    return function
