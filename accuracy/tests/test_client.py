"""The client's reading of events and of its environment."""

from __future__ import annotations

import pytest

from draftproof.accuracy.client import _proxy
from draftproof.accuracy.reading import ChatReader, RequestFailed

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, ("http", "host:80"), None),
        ({"http_proxy": "http://p:1"}, ("http", "host:80"), "http://p:1"),
        ({"http_proxy": "p:1"}, ("http", "host:80"), "http://p:1"),
        ({"http_proxy": "http://p:1"}, ("https", "host"), None),
        ({"all_proxy": "http://p:1"}, ("https", "host"), "http://p:1"),
        ({"all_proxy": "http://p:1", "no_proxy": "host"}, ("http", "u:w@host:80"), None),
        ({"all_proxy": "http://p:1", "no_proxy": "other"}, ("http", "host"), "http://p:1"),
    ],
)
def test_the_environments_proxy_is_used(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    url: tuple[str, str],
    proxy: str | None,
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _proxy(*url) == proxy


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices": [{"delta": {"content": "\\ud83d"}}]}',
        b'{"choices": [{"delta": {"content": "\xff"}}]}',
        b'{"choices": [{"delta": {"content": 7}}]}',
        b'{"choices": 7}',
        b'{"choices": []} {}',
        b"[" * 100_000,
        b"",
    ],
)
def test_what_is_no_event_or_fits_into_no_file_is_garbage(data: bytes) -> None:
    with pytest.raises(RequestFailed, match=r"^garbage: "):
        ChatReader().event(data)
