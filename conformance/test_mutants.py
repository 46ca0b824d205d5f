"""Mutants must be caught by the checks that they name; correct variants must pass every check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftproof.conformance.engine.checks import run_target, targets
from draftproof.conformance.engine.registry import load_mutants, load_specs
from draftproof.conformance.engine.running import Subject
from draftproof.conformance.engine.spec import Mutant, Variant
from draftproof.conformance.plugin import MUTANT_PROPERTY, settings_of


def _subject(settings: Any, subject: Mutant | Variant) -> Subject:
    reason = None
    if isinstance(subject, Variant) and not subject.capturable:
        reason = f"the variant cannot be captured: {subject.difference}"
    return Subject(
        spec=load_specs()[subject.op],
        function=subject.function,
        implementation=subject.name,
        device=torch.device(settings.device),
        profile=settings.profile,
        seed=settings.seed,
        graph_reason=reason,
        peers=lambda op: _peer(subject, op),
    )


def _peer(subject: Mutant | Variant, op: str) -> Callable[..., Any] | None:
    """What a law calls beside a subject.

    The variants of one name are one implementation. Beside a mutant stands the oracle: it is one
    fault that is to be seen.
    """
    if isinstance(subject, Variant):
        for variant in load_mutants()[1]:
            if (variant.op, variant.name) == (op, subject.name):
                return variant.function
    return load_specs()[op].oracle if op in load_specs() else None


def test_mutant(
    dp_mutant: Mutant,
    record_property: Callable[[str, Any], None],
    request: pytest.FixtureRequest,
) -> None:
    """The suite catches this fault by at least one of the checks that should."""
    settings = settings_of(request.config)
    subject = _subject(settings, dp_mutant)
    killers, reasons, ran, faults = [], [], set(), []
    for target in targets(subject.spec, settings.profile, cuda=settings.device == "cuda"):
        if target.check not in dp_mutant.killed_by or target.check in killers:
            continue
        outcome = run_target(subject, target)
        if outcome.status == "failed":
            killers.append(target.check)
        elif outcome.status == "error":
            faults.append(outcome.detail)
        elif outcome.status in ("skipped", "not_provided"):
            reasons.append(f"{target.check}: {outcome.detail}")
        if outcome.status in ("passed", "failed"):
            ran.add(target.check)
    record_property(
        MUTANT_PROPERTY,
        {
            "op": dp_mutant.op,
            "name": dp_mutant.name,
            "fault": dp_mutant.fault,
            "should": list(dp_mutant.killed_by),
            "killers": killers,
            "survived": not killers and bool(ran),
        },
    )
    if not killers and not ran and not faults:
        pytest.skip(f"none of its checks can run here: {'; '.join(sorted(set(reasons)))}")
    if not killers:
        pytest.fail(
            f"{dp_mutant.op}: mutant {dp_mutant.name} survived ({dp_mutant.fault}); its checks "
            f"{', '.join(dp_mutant.killed_by)} passed\n" + "\n".join(faults),
            pytrace=False,
        )


def test_variant(dp_variant: tuple[Variant, str], request: pytest.FixtureRequest) -> None:
    """A correct implementation that is written differently passes this check on every case."""
    settings = settings_of(request.config)
    variant, check = dp_variant
    subject = _subject(settings, variant)
    outcomes = [
        run_target(subject, target)
        for target in targets(subject.spec, settings.profile, cuda=settings.device == "cuda")
        if target.check == check
    ]
    wrong = [outcome.detail for outcome in outcomes if outcome.status in ("failed", "error")]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)
    if not any(outcome.status == "passed" for outcome in outcomes):
        pytest.skip("; ".join(sorted({outcome.detail for outcome in outcomes}) or ["no cases"]))
