"""Golden vectors: case files with the oracle's outputs, for ports that have no Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from draftproof.conformance.engine import casefile
from draftproof.conformance.engine.calls import clone, geometry, leaves, patterns, scalars
from draftproof.conformance.engine.compare import effect_of, kind_of, oracle_outputs
from draftproof.conformance.engine.judges import Bits, Look, RoundedInterval, differing
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.running import case_seed
from draftproof.conformance.engine.spec import OpSpec

SCHEMA = "draftproof.golden/1"
FOLDER = Path(__file__).resolve().parent.parent / "golden"
MAX_CALL_BYTES = 48 * 1024
"""Largest call that becomes a golden vector: each is to be read by eye or by a small port."""
MAX_SPREAD_BYTES = 1 << 20
"""Memory that the strides of a golden vector's tensors may span: a port must allocate it."""
MAX_TOLD = 16
"""Elements of a tensor of a bad input that are written out."""
MAX_OP_BYTES = 280 * 1024
"""Room for one op; all of them stay under 4 MB."""


def wanted_outputs(spec: OpSpec, call: dict[str, Any]) -> dict[str, Tensor]:
    """The oracle's outputs by path; both bounds, `path.lower` and `path.upper`, for intervals."""
    outputs = oracle_outputs(spec, call)
    found: dict[str, Tensor] = {}
    for path, tensor in outputs.items():
        effect = effect_of(spec, path)
        if effect is not None and isinstance(effect.judge, RoundedInterval):
            look = Look(clone(call), path, tensor, tensor, outputs, outputs)
            found[f"{path}.lower"], found[f"{path}.upper"] = effect.judge.ends(look)
        else:
            found[path] = tensor
    return found


def export(folder: Path, ops: Iterable[str]) -> int:
    """Write the vectors of some ops under `folder/<op>/`, with a manifest each.

    Small quick cases are taken in the order of the spec until an op's room is used up.
    """
    for name in ops:
        spec = load_specs()[name]
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        for old in [*target.glob("*.json"), *target.glob("*.safetensors")]:
            old.unlink()
        entries, used = [], 0
        for case in spec.cases:
            if case.profile != "quick" or case.device is not None:
                continue
            seed = case_seed(0, case.name)
            call = spec.build(case.params, seed)
            if sum(storage.size for storage in geometry(call)) > MAX_SPREAD_BYTES:
                continue
            wanted = wanted_outputs(spec, call)
            size = casefile.call_bytes(call) + sum(
                tensor.numel() * tensor.element_size() for tensor in wanted.values()
            )
            if casefile.call_bytes(call) > MAX_CALL_BYTES or used + size > MAX_OP_BYTES:
                continue
            used += size
            path = casefile.write(
                target / f"{case.name}.json",
                casefile.CaseFile(
                    op=name,
                    check="eager",
                    case=case.name,
                    calls=[call],
                    wanted=wanted,
                    about={"params": dict(case.params), "seed": seed, "tags": list(case.tags)},
                ),
            )
            entries.append(
                {
                    "case": case.name,
                    "tags": list(case.tags),
                    "files": {
                        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                        for file in (path, path.with_suffix(".safetensors"))
                    },
                }
            )
        manifest = {
            "schema": SCHEMA,
            "op": name,
            "rules": _rules(spec),
            "vectors": entries,
            "bad_inputs": bad_inputs(spec),
        }
        (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        print(f"{name}: {len(entries)} vectors, {used / 1024:.0f} KiB, in {target}")
    return 0


def _rules(spec: OpSpec) -> list[dict[str, str]]:
    return [
        {
            "paths": effect.paths,
            "judge": type(part.judge).__name__,
            # Whether a NaN may have any payload ("any") or must be copied bit for bit ("payload").
            **({"nan": part.judge.nan} if isinstance(part.judge, Bits) else {}),
            "rule": part.rule,
        }
        for effect in spec.effects
        for part in effect.all_parts
    ]


def bad_inputs(spec: OpSpec) -> list[dict[str, Any]]:
    """Every bad input of an op: the good call, what is spoilt in it, and the argument to name."""
    found = []
    for bad in spec.bad_inputs:
        params = spec.bad_input_params if bad.params is None else bad.params
        seed = case_seed(0, bad.name)
        good = spec.build(params, seed)
        found.append(
            {
                "name": bad.name,
                "params": dict(params),
                "seed": seed,
                "fault": faults_of(good, bad.edit(dict(good))),
                "argument": bad.names,
                "error": bad.error.__name__,
            }
        )
    return found


def faults_of(good: dict[str, Any], bad: dict[str, Any]) -> dict[str, list[str]]:
    """What an edit changed: by path, what a good call has there and what the bad one has.

    Tensors are told by type, shape, stride and device, and where these are equal by their content.
    """
    before, after = _told(good), _told(bad)
    return {
        path: [before.get(path, "absent"), after.get(path, "absent")]
        for path in sorted({**before, **after})
        if before.get(path) != after.get(path)
    }


def _told(call: dict[str, Any]) -> dict[str, str]:
    told = {path: repr(value) for path, value in scalars(call).items()}
    where: dict[int, str] = {}
    for path, tensor in leaves(call).items():
        text = f"{kind_of(tensor)}, stride {list(tensor.stride())}, on {tensor.device}"
        if tensor.numel() and not tensor.is_meta:
            first = where.setdefault(tensor.untyped_storage().data_ptr(), path)
            text += f", in the memory of {first}" if first != path else ""
            if tensor.numel() <= MAX_TOLD:
                text += f", holds {patterns(tensor).tolist()}"
        told[path] = text
    return told


def check(ops: Iterable[str], folder: Path = FOLDER) -> int:
    """Hold every vector against its manifest's digests and the oracle; 0 if all agree."""
    problems = []
    count = 0
    for name in ops:
        spec = load_specs()[name]
        found, faults = _check_op(spec, folder / name)
        count += found
        problems += faults
        if not found and not faults:
            problems.append(f"{name}: no golden vectors in {folder / name}")
    for problem in problems:
        print(problem)
    print(f"{count} golden vectors held against the oracles, {len(problems)} problems")
    return 1 if problems else 0


def _check_op(spec: OpSpec, folder: Path) -> tuple[int, list[str]]:
    path = folder / "manifest.json"
    if not path.is_file():
        return 0, []
    try:
        manifest = json.loads(path.read_text())
        if manifest["schema"] != SCHEMA or manifest["op"] != spec.name:
            return 0, [f"{path}: not a manifest of {spec.name} in schema {SCHEMA}"]
        entries = [(entry["case"], dict(entry["files"])) for entry in manifest["vectors"]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        return 0, [f"{path}: truncated or altered ({error!r})"]
    listed = {name for _, files in entries for name in files} | {"manifest.json"}
    present = {file.name for file in folder.iterdir() if file.is_file()}
    problems = [f"{folder / name}: not in the manifest" for name in sorted(present - listed)]
    if manifest.get("bad_inputs") != json.loads(json.dumps(bad_inputs(spec))):
        problems.append(f"{path}: other bad inputs than those of the spec")
    count = 0
    for case, files in entries:
        altered = [name for name, digest in files.items() if _digest(folder / name) != digest]
        if altered:
            problems += [f"{folder / name}: missing or altered" for name in altered]
            continue
        count += 1
        problems += _check_vector(spec, casefile.read(folder / f"{case}.json"), folder)
    return count, problems


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _check_vector(spec: OpSpec, content: casefile.CaseFile, folder: Path) -> list[str]:
    now = wanted_outputs(spec, content.calls[0])
    label = f"{folder.name}/{content.case}"
    if set(now) != set(content.wanted):
        return [f"{label}: other outputs: {sorted(set(now) ^ set(content.wanted))}"]
    problems = []
    for path, wanted in content.wanted.items():
        got = now[path]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            problems.append(f"{label}: {path} is {got.dtype}{list(got.shape)}")
        elif bool(differing(wanted, got).any()):
            problems.append(f"{label}: the oracle gives other bits in {path}")
    return problems
