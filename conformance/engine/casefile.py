"""Case files: one call (and what it should give) as JSON beside safetensors, executing nothing."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.conformance.engine.calls import attributes, copy_bits, geometry, leaves
from draftproof.conformance.names import Refused

SCHEMA = "draftproof.case/1"
MAX_BYTES = 64 * 1024 * 1024
"""Largest failing call that is written to disk."""


class BadCaseFile(Refused, ValueError):
    """A case file that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class CaseFile:
    """What a case file holds.

    Parameters
    ----------
    op, check, case : str
        Where it came from; a replay runs `check`.
    calls : list of dict
        Arguments by name. More than one: the calls of a replay, in order, on the same memory.
    wanted : dict of str to Tensor
        The oracle's outputs by leaf path, for golden vectors.
    about : dict
        Whatever else was recorded: params, seed, implementation, bad input.
    """

    op: str
    check: str
    case: str
    calls: list[dict[str, Any]]
    wanted: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


def call_bytes(call: Mapping[str, Any]) -> int:
    """Bytes of tensor content in a call, expanded dimensions counted once."""
    return sum(_packed(tensor).numel() * tensor.element_size() for tensor in leaves(call).values())


def write(path: Path, content: CaseFile) -> Path:
    """Write `path` (`.json`) and the tensors beside it (`.safetensors`); return `path`."""
    tensors: dict[str, Tensor] = {}
    document = {
        "schema": SCHEMA,
        "op": content.op,
        "check": content.check,
        "case": content.case,
        "tensors": path.with_suffix(".safetensors").name,
        "calls": [
            _describe(call, f"call{index}", tensors) for index, call in enumerate(content.calls)
        ],
        "wanted": {
            where: _entry(f"wanted.{where}", tensor, tensors)
            for where, tensor in content.wanted.items()
        },
        "about": content.about,
    }
    document["sha256"] = _seal(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path.with_suffix(".safetensors"))
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def read(path: Path) -> CaseFile:
    """Read a case file, checking every tensor against its digest.

    Raises
    ------
    BadCaseFile
        If a file is missing, truncated, altered, or of another schema.
    """
    document = _document(path)
    data = path.parent / str(document["tensors"])
    if not data.is_file():
        raise BadCaseFile(f"{path}: its tensors {data.name} are missing")
    try:
        stored = load_file(data)
    except (SafetensorError, OSError, ValueError) as error:
        raise BadCaseFile(f"{data}: truncated or not safetensors ({error})") from error
    try:
        return CaseFile(
            op=document["op"],
            check=document["check"],
            case=document["case"],
            calls=[_rebuild(call, stored, data) for call in document["calls"]],
            wanted={
                where: _fetch(entry, stored, data).reshape(entry["shape"])
                for where, entry in document["wanted"].items()
            },
            about=document["about"],
        )
    except (KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        raise BadCaseFile(f"{path}: altered or incomplete ({error!r})") from error


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadCaseFile(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadCaseFile(f"{path}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise BadCaseFile(f"{path}: truncated or not JSON ({error})") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise BadCaseFile(f"{path}: schema {schema!r}, expected {SCHEMA!r}")
    missing = {"op", "check", "case", "tensors", "calls", "wanted", "about"} - set(document)
    if missing:
        raise BadCaseFile(f"{path}: incomplete, without {', '.join(sorted(missing))}")
    if document.get("sha256") != _seal(document):
        raise BadCaseFile(f"{path}: was altered (its own SHA-256 differs)")
    return document


def _seal(document: Mapping[str, Any]) -> str:
    """SHA-256 of the document without its seal, keys sorted, no white space."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _packed(tensor: Tensor) -> Tensor:
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def digest(tensor: Tensor) -> str:
    """SHA-256 of the contiguous little-endian content."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.tobytes()).hexdigest()


def _entry(name: str, tensor: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    packed = _packed(tensor.detach().cpu())
    if packed.is_complex():
        packed = torch.view_as_real(packed.resolve_conj())
    # A clone: safetensors refuses tensors that share memory.
    tensors[name] = packed.clone(memory_format=torch.contiguous_format)
    return {
        "tensor": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": digest(tensors[name]),
    }


def _describe(call: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    found = leaves(call)
    storages = []
    for storage in geometry(call):
        members = []
        for leaf in storage.leaves:
            entry = _entry(f"{prefix}.{leaf.path}", found[leaf.path], tensors)
            members.append(
                {
                    "path": leaf.path,
                    **entry,
                    "stride": list(leaf.stride),
                    "offset_bytes": leaf.offset,
                }
            )
        storages.append({"bytes": storage.size, "align": storage.align, "leaves": members})
    return {
        "storages": storages,
        "arguments": {name: _encode(value, name) for name, value in call.items()},
    }


def _encode(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return {"leaf": path}
    if value is None or isinstance(value, (bool, str)):
        return {"value": value}
    if isinstance(value, int):
        return {"int": str(value)}
    if isinstance(value, float):
        return {"float64": struct.pack(">d", value).hex(), "about": repr(value)}
    if isinstance(value, complex):
        parts = struct.pack(">dd", value.real, value.imag).hex()
        return {"complex128": parts, "about": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return {
            "object": {name: _encode(item, f"{path}.{name}") for name, item in named},
            "class": type(value).__name__,
            "fields": list(value._fields),
        }
    if isinstance(value, (list, tuple)):
        return {"list": [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    return {
        "object": {
            name: _encode(item, f"{path}.{name}") for name, item in attributes(value).items()
        },
        "class": type(value).__name__,
    }


def _decode(node: dict[str, Any], found: Mapping[str, Tensor]) -> Any:
    if "leaf" in node:
        return found[node["leaf"]]
    if "int" in node:
        return int(node["int"])
    if "float64" in node:
        return struct.unpack(">d", bytes.fromhex(node["float64"]))[0]
    if "complex128" in node:
        return complex(*struct.unpack(">dd", bytes.fromhex(node["complex128"])))
    if "bytes" in node:
        return bytes.fromhex(node["bytes"])
    if "dtype" in node:
        return _dtype(node["dtype"])
    if "list" in node:
        return [_decode(item, found) for item in node["list"]]
    if "fields" in node:
        named = [_decode(node["object"][name], found) for name in node["fields"]]
        # Iterated, indexed and unpacked like the caller's own, and its attributes have the names.
        return namedtuple(node["class"], node["fields"])(*named)
    if "object" in node:
        fields = {name: _decode(item, found) for name, item in node["object"].items()}
        return SimpleNamespace(**fields)
    return node["value"]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"no dtype {name!r}")
    return found


def _fetch(entry: Mapping[str, Any], stored: Mapping[str, Tensor], data: Path) -> Tensor:
    tensor = stored[entry["tensor"]]
    if digest(tensor) != entry["sha256"]:
        raise BadCaseFile(f"{data}: tensor {entry['tensor']} was altered (SHA-256 differs)")
    dtype = _dtype(entry["dtype"])
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    if tensor.dtype is not dtype:
        raise BadCaseFile(f"{data}: tensor {entry['tensor']} is {tensor.dtype}, expected {dtype}")
    return tensor


def _rebuild(call: Mapping[str, Any], stored: Mapping[str, Tensor], data: Path) -> dict[str, Any]:
    found: dict[str, Tensor] = {}
    for storage in call["storages"]:
        align = int(storage["align"])
        # NumPy's zeros are made when they are touched: strides may span far more than is there.
        memory = torch.from_numpy(np.zeros(align + int(storage["bytes"]) + 16, dtype=np.uint8))
        for leaf in storage["leaves"]:
            content = _fetch(leaf, stored, data)
            size = content.element_size()
            typed = memory[: memory.numel() // size * size].view(content.dtype)
            shape, stride = leaf["shape"], leaf["stride"]
            view = typed.as_strided(shape, stride, (align + int(leaf["offset_bytes"])) // size)
            copy_bits(_packed(view), content.reshape(_packed(view).shape))
            found[leaf["path"]] = view
    return {name: _decode(node, found) for name, node in call["arguments"].items()}


def same(left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two lists of calls have the same geometry and bits."""
    if len(left) != len(right):
        return False
    for one, other in zip(left, right, strict=True):
        if geometry(one) != geometry(other):
            return False
        mine, theirs = leaves(one), leaves(other)
        if any(digest(_packed(mine[path])) != digest(_packed(theirs[path])) for path in mine):
            return False
    return True
