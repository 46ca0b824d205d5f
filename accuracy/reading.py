"""Read answers: server-sent events out of a byte stream, and one whole answer out of events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

# How much of a server's own error text is kept, in characters.
_DETAIL_CHARACTERS = 300


class RequestFailed(Exception):
    """A request that brought no answer.

    Attributes
    ----------
    kind : str
        `http_<status>`, `connect`, `dropped`, `stalled`, `timeout`, `garbage` or `server_error`.
    detail : str
        One line.
    is_transport : bool
        Whether the connection failed rather than the server refused.
    retry_after_s : float or None
        When the server would be asked again, where it says so.
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        is_transport: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = " ".join(detail.split())[:_DETAIL_CHARACTERS]
        self.is_transport = is_transport
        self.retry_after_s = retry_after_s

    @property
    def is_overload(self) -> bool:
        """Whether the server has too much to do, and would be asked again later."""
        return self.kind in ("http_429", "http_503")


@dataclass
class Answer:
    """What a server answered; figures that it does not tell are None.

    Attributes
    ----------
    matched : str or None
        The stop word that ended the answer.
    model, fingerprint : str or None
        The model that the answer names, and its `system_fingerprint`; several names in one answer
        stand in it all, with " / " between them.
    events : int
        The stream's events with text or reasoning.
    first_s, total_s : float
        Seconds since the request was sent: to the first such event, and to the end.
    kept : list of dict
        The events as they came (one, of an answer that is not streamed), if that was asked for.
    """

    text: str | None = None
    reasoning: str | None = None
    finish_reason: str | None = None
    matched: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    prompt_tokens: Any = None
    completion_tokens: Any = None
    total_tokens: Any = None
    reasoning_tokens: Any = None
    spec_verify_ct: Any = None
    events: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    kept: list[dict[str, Any]] = field(default_factory=list)


class EventSplitter:
    """Cut a byte stream into server-sent events, as the HTML standard says.

    An event ends at a blank line; the data of its several `data:` lines are joined by line feeds,
    comments and other fields are left out, and what no blank line ends is no event.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take what has come, and give the data of the events that are now whole."""
        text = self._rest + chunk
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # perhaps the first half of a line end
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *blocks, rest = text.split(b"\n\n")
        self._rest = rest + held
        events = []
        for block in blocks:
            if block.startswith(b"data:") and b"\n" not in block:
                events.append(block[5:].strip())
            else:
                lines = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    events.append(b"\n".join(lines).strip())
        return events


class Reader:
    """Collects one answer from a stream's events or from one whole body.

    `moves` counts the events that bring the answer forward: content, reasoning, a tool call, a
    finish reason. `keeps` keeps every event in `answer.kept`.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.answer = Answer()
        self.moves = 0
        self._keeps = keeps
        self._said: list[str] = []
        self._thought: list[str] = []

    def event(self, data: bytes) -> None:
        """Take one event's data."""
        if data == b"[DONE]":
            return
        try:
            self._take_object(_object(data), is_whole=False)
        except (TypeError, AttributeError, KeyError, IndexError):
            raise _garbage(data) from None

    def whole(self, data: bytes) -> Answer:
        """Take an answer that was not streamed."""
        try:
            self._take_object(_object(data), is_whole=True)
        except (TypeError, AttributeError, KeyError, IndexError):
            raise _garbage(data) from None
        if self.answer.finish_reason is None:
            raise RequestFailed("dropped", "the answer has no finish reason")
        return self._checked()

    def end(self) -> Answer:
        """Take the stream's end; `[DONE]` alone does not make an answer whole."""
        if self.answer.finish_reason is None:
            raise RequestFailed(
                "dropped",
                f"the stream ended after {self.answer.events} events without a finish reason",
                is_transport=True,
            )
        return self._checked()

    def _checked(self) -> Answer:
        reason = self.answer.finish_reason
        if reason in ("abort", "error"):
            raise RequestFailed("server_error", f"finish_reason {reason!r}")
        if not isinstance(reason, str):
            raise RequestFailed("garbage", f"finish_reason {reason!r}")
        self.answer.text = "".join(self._said) if self._said else None
        self.answer.reasoning = "".join(self._thought) if self._thought else None
        return self.answer

    def _take_object(self, value: dict[str, Any], is_whole: bool) -> None:
        if self._keeps:
            self.answer.kept.append(value)
        self._take(value, is_whole)

    def _take(self, value: dict[str, Any], is_whole: bool) -> None:
        raise NotImplementedError


class ChatReader(Reader):
    """Reads chat completions: the choice of index 0, in whatever place it stands."""

    def _take(self, value: dict[str, Any], is_whole: bool) -> None:
        answer = self.answer
        if value.get("model") != answer.model:
            answer.model = _both(answer.model, value.get("model"))
        if value.get("system_fingerprint") != answer.fingerprint:
            answer.fingerprint = _both(answer.fingerprint, value.get("system_fingerprint"))
        usage = value.get("usage")
        if usage:
            answer.prompt_tokens = usage.get("prompt_tokens")
            answer.completion_tokens = usage.get("completion_tokens")
            answer.total_tokens = usage.get("total_tokens")
            details = usage.get("completion_tokens_details") or usage
            answer.reasoning_tokens = details.get("reasoning_tokens")
        choices = value["choices"] if is_whole else value.get("choices")
        for choice in choices or ():
            if not choice.get("index"):
                break
        else:
            if is_whole:
                raise KeyError("choices")
            return
        said = choice["message"] if is_whole else choice.get("delta") or {}
        content = _text(said.get("content"))
        # vLLM renamed the field; SGLang keeps the older name.
        thought = _text(said.get("reasoning_content") or said.get("reasoning"))
        if content:
            self._said.append(content)
        if thought:
            self._thought.append(thought)
        answer.events += bool(content or thought)
        ends = choice.get("finish_reason") is not None
        self.moves += bool(content or thought or ends or said.get("tool_calls"))
        if ends:
            answer.finish_reason = choice["finish_reason"]
            matched = choice.get("matched_stop", choice.get("stop_reason"))
            # An end-of-text token matches as its number: no stop word.
            answer.matched = matched if isinstance(matched, str) else None


class CompletionReader(Reader):
    """Reads raw completions (`/v1/completions`): the choice of index 0.

    An event without a text is one all the same if the server counts more tokens at it: a token may
    be part of a character.
    """

    def _take(self, value: dict[str, Any], is_whole: bool) -> None:
        answer = self.answer
        before = answer.completion_tokens or 0
        answer.model = _both(answer.model, value.get("model"))
        answer.fingerprint = _both(answer.fingerprint, value.get("system_fingerprint"))
        usage = value.get("usage") or {}
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
        answer.completion_tokens = usage.get("completion_tokens", answer.completion_tokens)
        answer.total_tokens = usage.get("total_tokens", answer.total_tokens)
        choices = value["choices"] if is_whole else value.get("choices")
        for choice in choices or ():
            if not choice.get("index"):
                break
        else:
            if is_whole:
                raise KeyError("choices")
            return
        text = _text(choice.get("text"))
        if text:
            self._said.append(text)
        is_event = bool(text) or (answer.completion_tokens or 0) > before
        answer.events += is_event
        reason = choice.get("finish_reason")
        self.moves += is_event or reason is not None
        if reason is not None:
            answer.finish_reason = reason
            matched = choice.get("matched_stop", choice.get("stop_reason"))
            answer.matched = matched if isinstance(matched, str) else None


class GenerateReader(Reader):
    """Reads SGLang's `/generate`, whose events carry all text so far, or the new piece of it."""

    def __init__(self, is_cumulative: bool, keeps: bool = False) -> None:
        super().__init__(keeps)
        self._is_cumulative = is_cumulative

    def _take(self, value: dict[str, Any], is_whole: bool) -> None:
        answer, meta = self.answer, value["meta_info"]
        text = _text(value["text"]) or ""
        if self._is_cumulative and self._said:
            before = self._said.pop()
            if not text.startswith(before):
                raise TypeError("an event does not carry the text so far")
            is_new = text != before
        else:
            is_new = bool(text)
        answer.events += is_new
        self._said.append(text)
        reason = meta.get("finish_reason")
        self.moves += is_new or reason is not None
        if reason is not None:
            answer.finish_reason = reason["type"]
            matched = reason.get("matched")
            answer.matched = matched if isinstance(matched, str) else None
        answer.prompt_tokens = meta.get("prompt_tokens")
        answer.completion_tokens = meta.get("completion_tokens")
        answer.spec_verify_ct = meta.get("spec_verify_ct")


def _both(before: str | None, now: Any) -> str | None:
    """Add a name to the names so far; an event that names nothing changes nothing."""
    if now is None:
        return before
    name = _text(now)
    if before is None or name is None:
        return name
    return before if name in before.split(" / ") else f"{before} / {name}"


def _garbage(data: bytes) -> RequestFailed:
    return RequestFailed("garbage", data[:_DETAIL_CHARACTERS].decode("utf-8", "replace"))


def _object(data: bytes) -> dict[str, Any]:
    """Read one JSON object, or fail as the server did."""
    try:
        # pydantic's parser: a third of json's time, and no lone surrogates, which no file can hold.
        value = from_json(data)
    except ValueError:
        raise _garbage(data) from None
    if not isinstance(value, dict):
        raise _garbage(data)
    if value.get("error") or value.get("object") == "error":
        raise RequestFailed("server_error", json.dumps(value.get("error") or value))
    return value


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"not a text: {value!r}")
    return value
