"""Which build of which server answers, by what it tells of itself, and whether that changed."""

from __future__ import annotations

import json
import re
from typing import Any

from draftproof.accuracy.client import Client, Reply
from draftproof.accuracy.reading import RequestFailed

# Where servers tell of themselves: SGLang's paths, then vLLM's.
TELLING_PATHS = ("/get_server_info", "/server_info", "/get_model_info", "/model_info", "/version")

# Headers that tell what answers.
_HEADER = re.compile(r"^(server|x-powered-by|via)$|version|build|revision", re.IGNORECASE)

# Of what a server tells, these change while it runs, or from start to start of the same build.
_UNSTEADY = re.compile(
    r"time|date|created|uptime|load|usage|memory|throughput|status|state|seed|port|host|addr|url"
    r"|uuid|(^|_)(id|ids|pid|rank|log|logs|dir|file)$|token_to_kv|max_total|max_req|num_(run|wait)"
    r"|api_key|secret|password|token$|permission|command|argv",
    re.IGNORECASE,
)
# Numbers are mostly measured or derived; these are chosen.
_CHOSEN_NUMBER = re.compile(r"version|_size$|speculative|spec_|context|max_model_len|topk|top_k")

# Drafts accepted by a coin instead of the model: an answer then says nothing about the model.
_SIMULATED = re.compile(r"simulat\w*acc|acc\w*simulat|synthetic_accept", re.IGNORECASE)


async def tell(client: Client) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask a server what it is.

    Returns
    -------
    told : dict
        What it says, by path; paths that it does not know are left out.
    build : dict
        See `build_of`.

    Raises
    ------
    RequestFailed
        If it answers nothing at all.
    """
    told: dict[str, Any] = {}
    first: Reply | None = None
    failure: RequestFailed | None = None
    for path in TELLING_PATHS:
        try:
            reply = await client.get(path)
        except RequestFailed as error:
            failure = error
            continue
        first = first or reply
        content = as_json(reply)
        if reply.status == 200 and content is not None:
            told[path] = content
    if first is None and failure is not None:
        raise failure
    return told, build_of(told, first.headers if first else {})


def build_of(told: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """Take what tells the build out of what a server says of itself.

    Parameters
    ----------
    told : dict
        By path, as `tell` gives it.
    headers : dict
        Of one of its answers.

    Returns
    -------
    dict
        Texts, truth values and chosen numbers by `path: field`; what is measured, counted or
        differs from start to start of the same build is left out.
    """
    build = {f"header: {name}": value for name, value in headers.items() if _HEADER.search(name)}
    for path, content in told.items():
        build.update(_steady(f"{path}: ", content))
    return dict(sorted(build.items()))


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Say in what two builds differ; nothing if they are the same."""
    return [
        f"{name}: {before.get(name)!r}, then {after.get(name)!r}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]


def simulated_acceptance(told: dict[str, Any]) -> str | None:
    """Say by which field a server tells that it simulates the acceptance of drafts, if it does."""
    for path, content in told.items():
        for name, value in _leaves("", content):
            if _SIMULATED.search(name) and value not in (None, False, 0, 0.0, "", "0", "-1", -1):
                return f"{path}: {name.lstrip('.')} = {value!r}"
    return None


def as_json(reply: Reply) -> Any:
    """Body of a reply as JSON, None if it is none."""
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError):
        return None


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]
    if isinstance(value, list):
        return [leaf for n, inner in enumerate(value) for leaf in _leaves(f"{name}.{n}", inner)]
    return [(name, value)]


def _steady(prefix: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        return {prefix + "(all)": content} if isinstance(content, str) else {}
    found: dict[str, Any] = {}
    for name, value in content.items():
        if _UNSTEADY.search(name):
            continue
        if isinstance(value, dict):
            found.update(_steady(f"{prefix}{name}.", value))
        elif isinstance(value, str | bool) or (
            isinstance(value, int | float) and _CHOSEN_NUMBER.search(name)
        ):
            found[prefix + name] = value
    return found
