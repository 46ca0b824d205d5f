"""A small server with a toy greedy model: tokens, log probabilities, prefix cache, tools, schemas.

Standard library only, a process of its own. `python model_server.py '{"step_s": 0.001}'` prints one
line, `{"port": ...}`, and serves 127.0.0.1 until it is ended. Its behaviour is one JSON object,
`DEFAULTS` with changes; `POST /_control` changes it while it runs.

A token is a word with the space before it. The model sums, copies a line, finds a planted key,
calls the tool that fits, and otherwise says words drawn from a hash of the prompt. Log
probabilities follow from the same hash; `ties` makes a text part at a place, as rounding would.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import sys
from typing import Any

DEFAULTS: dict[str, Any] = {
    "models": ["toy"],
    "next_version_after": None,
    "max_model_len": 4096,
    "server_info": None,  # with it, the server is SGLang's kind
    "tells_cached": True,
    "flushes": True,
    "block": 16,
    "step_s": 0.0,
    "tokens_an_event": 1,
    "tells_each": True,
    "short_by": 0,  # tokens fewer than asked for
    "accept_length": None,
    # Per part of a prompt: [word, gap, jitter, runner-up]: at that word both tokens are likely, the
    # gap between them varies by the jitter from request to request, and the likelier is said.
    "ties": {},
    # Per part of a prompt: what is answered.
    "book": {},
    "tools": True,
    "schemas": True,
    "leaks": "",  # said before each tool call
    "calls": 1,
    "stale_cache": False,  # answers another prompt's key once the pool has been full
    "fails_after": None,
    "dies_after": None,
}

_WORDS = ("the", "river", "stone", "light", "wind", "over", "under", "slow", "bright", "grass")
_TOKEN = re.compile(r"\s*\S+")
_SUM = re.compile(r"What is (\d+) ([-+*]) (\d+)\?")


def tokens(text: str) -> list[str]:
    return _TOKEN.findall(text)


class ModelServer:
    def __init__(self, behaviour: dict[str, Any]) -> None:
        self.now = {**DEFAULTS, **behaviour}
        self.noise = random.Random(0)
        self.cache: dict[str, list[list[Any]]] = {}
        self.completions = 0
        self.flushed = 0
        self.keys: list[str | None] = []

    async def serve(self) -> None:
        server = await asyncio.start_server(self.connection, "127.0.0.1", 0, limit=2**24)
        print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
        await server.serve_forever()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                request_line, *lines = head.split("\r\n")
                method, path, _ = request_line.split(" ")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.keys.append(headers.get("authorization"))
                await self.answer(method, path, json.loads(body or b"{}"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(
        self, method: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        now = self.now
        if path == "/_control":
            self.now = {**now, **body}
            return await self.send(writer, 200, {})
        if path == "/_log":
            told = {"completions": self.completions, "flushed": self.flushed, "keys": self.keys}
            return await self.send(writer, 200, told)
        if path == "/health":
            return await self.send(writer, 200, {})
        if path == "/v1/models":
            cards = [{"id": one, "max_model_len": now["max_model_len"]} for one in now["models"]]
            return await self.send(writer, 200, {"object": "list", "data": cards})
        if path == "/version":
            after = now["next_version_after"]
            is_next = after is not None and self.completions > after
            return await self.send(writer, 200, {"version": "2" if is_next else "1"})
        if path == "/get_server_info" and now["server_info"] is not None:
            return await self.send(writer, 200, now["server_info"])
        if path == "/flush_cache" and method == "POST" and now["flushes"]:
            self.cache.clear()
            self.flushed += 1
            return await self.send(writer, 200, {})
        if method == "POST" and path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            return await self.complete(path, body, writer)
        return await self.send(writer, 404, {"detail": "Not Found"})

    async def complete(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        now = self.now
        self.completions += 1
        if now["fails_after"] is not None and self.completions > now["fails_after"]:
            return await self.send(writer, 500, {"error": {"message": "told to fail"}})
        if now["dies_after"] is not None and self.completions > now["dies_after"]:
            os._exit(1)
        chat = path == "/v1/chat/completions"
        sampling = body.get("sampling_params", body)
        limit = sampling.get("max_new_tokens", sampling.get("max_tokens", 16))
        messages = body.get("messages", [])
        said_before = ""
        if chat and body.get("continue_final_message"):
            said_before, messages = messages[-1]["content"], messages[:-1]
        if chat:
            prompt: Any = "\n".join(str(one.get("content")) for one in messages)
        else:
            prompt = body.get("prompt", body.get("text", body.get("input_ids")))
        ids = prompt if isinstance(prompt, list) else tokens(prompt)
        ids = ids if not chat else ["<user>", *ids, "<assistant>"]
        if len(ids) + limit > now["max_model_len"]:
            message = f"maximum context length is {now['max_model_len']} tokens"
            return await self.send(writer, 400, {"error": {"message": message}})
        cached = self.reuse(ids, body.get("cache_salt", ""))
        call = self.call(messages, body) if body.get("tools") else None
        if body.get("tools") and not now["tools"]:
            message = {"error": {"message": "tools are not enabled"}}
            return await self.send(writer, 400, message)
        if body.get("response_format") and not now["schemas"]:
            message = {"error": {"message": "response_format is not supported"}}
            return await self.send(writer, 400, message)
        text = now["leaks"] if call else self.reply(prompt)
        said = self.say(prompt, text, limit, bool(sampling.get("ignore_eos")), bool(call))
        skip = len(tokens(said_before))
        said = said[skip : skip + limit]
        total = max(len(said), 1) - now["short_by"]
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": total,
            "total_tokens": len(ids) + total,
        }
        if now["tells_cached"]:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        reason = "length" if len(said) >= limit and not call else "stop"
        reason = "tool_calls" if call else reason
        finished = {"call": call, "said": said, "usage": usage, "reason": reason}
        if path == "/generate":
            return await self.stream(writer, self.generate_events(finished))
        if not body.get("stream"):
            return await self.send(writer, 200, self.whole(chat, body, finished))
        return await self.stream(writer, self.events(chat, body, finished))

    def reuse(self, ids: list[Any], salt: str) -> int:
        """Whole blocks shared with an earlier prompt of this namespace, without the last token."""
        best = 0
        for earlier in self.cache.setdefault(salt, []):
            common = 0
            for left, right in zip(earlier, ids, strict=False):
                if left != right:
                    break
                common += 1
            best = max(best, common)
        self.cache[salt].append(ids)
        block = self.now["block"]
        return min(best, len(ids) - 1) // block * block

    def reply(self, prompt: Any) -> str:
        if isinstance(prompt, list):
            return ""
        for part, text in self.now["book"].items():
            if part in prompt:
                return str(text)
        asked = _SUM.search(prompt)
        if asked:
            left, operation, other = int(asked[1]), asked[2], int(asked[3])
            return str({"+": left + other, "-": left - other, "*": left * other}[operation])
        copied = re.search(r"following line and nothing else: (.*)$", prompt)
        if copied:
            return copied[1]
        planted = re.findall(r"The key is (\d+)\.", prompt)
        if planted and not self.now["stale_cache"]:
            return str(planted[0])
        return ""

    def say(
        self, prompt: Any, text: str, limit: int, ignores_end: bool, is_call: bool
    ) -> list[tuple[str, float, list[tuple[str, float]]]]:
        """Tokens with log probabilities: the reply's, or words of a hash."""
        draw = random.Random(hashlib.sha256(json.dumps(prompt).encode()).hexdigest())
        words = tokens(text)
        if (not words and not is_call) or ignores_end:
            words += [" " + draw.choice(_WORDS) for _ in range(64)]
            words += [" " + draw.choice(_WORDS) for _ in range(limit - len(words))]
        tie = next((one for part, one in self.now["ties"].items() if part in str(prompt)), None)
        said: list[tuple[str, float, list[tuple[str, float]]]] = []
        for index, word in enumerate(words):
            gap, other = 2.0 + draw.random(), " otherwise"
            if tie is not None and index == tie[0]:
                gap, other = tie[1] + self.noise.uniform(-tie[2], tie[2]), tie[3]
            top = sorted([(word, -0.1), (other, -0.1 - gap)], key=lambda one: -one[1])
            said.append((*top[0], top))
            if top[0][0] != word:
                # Once parted, the rest is another text.
                words[index + 1 :] = [" " + draw.choice(_WORDS) for _ in words[index + 1 :]]
                said += [(one, -0.1, [(one, -0.1)]) for one in words[index + 1 :]]
                break
        return said

    def call(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> list[Any] | None:
        """The calls of a message that asks for the weather, unless a tool has answered."""
        if messages[-1]["role"] == "tool" or body.get("tool_choice") == "none":
            return None
        city = re.search(r"weather in (\w+)", str(messages[-1]["content"]))
        forced = isinstance(body.get("tool_choice"), dict)
        if city is None and not forced:
            return None
        arguments = json.dumps({"city": city[1] if city else "Nowhere"})
        function = {"name": body["tools"][0]["function"]["name"], "arguments": arguments}
        return [
            {"index": n, "id": f"call-{n}", "type": "function", "function": function}
            for n in range(self.now["calls"])
        ]

    def logprobs(self, some: list[Any]) -> dict[str, Any]:
        return {
            "content": [
                {
                    "token": text,
                    "logprob": value,
                    "top_logprobs": [{"token": one, "logprob": p} for one, p in top],
                }
                for text, value, top in some
            ]
        }

    def whole(self, chat: bool, body: dict[str, Any], finished: dict[str, Any]) -> dict[str, Any]:
        text = "".join(one[0] for one in finished["said"]).lstrip()
        choice: dict[str, Any] = {"index": 0, "finish_reason": finished["reason"]}
        if chat:
            choice["message"] = {"role": "assistant", "content": text or None}
            if finished["call"]:
                choice["message"]["tool_calls"] = finished["call"]
            if body.get("logprobs"):
                choice["logprobs"] = self.logprobs(finished["said"])
        else:
            choice["text"] = text
        return {"model": body["model"], "choices": [choice], "usage": finished["usage"]}

    def groups(self, said: list[Any]) -> list[list[Any]]:
        size = self.now["tokens_an_event"]
        return [said[i : i + size] for i in range(0, len(said), size)]

    def events(
        self, chat: bool, body: dict[str, Any], finished: dict[str, Any]
    ) -> list[dict[str, Any]]:
        head = {"model": body["model"]}
        events, done = [], 0
        for some in self.groups(finished["said"]):
            text = "".join(one[0] for one in some)
            text = text.lstrip() if done == 0 and not body.get("continue_final_message") else text
            done += len(some)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if body.get("logprobs"):
                choice["logprobs"] = self.logprobs(some)
            event = {**head, "choices": [choice]}
            asked = (body.get("stream_options") or {}).get("continuous_usage_stats")
            if asked and self.now["tells_each"]:
                event["usage"] = {**finished["usage"], "completion_tokens": done}
            events.append(event)
        for call in finished["call"] or ():
            # Arguments come in pieces, as servers send them.
            for piece in (
                {**call, "function": {**call["function"], "arguments": ""}},
                *(
                    {"index": call["index"], "function": {"arguments": part}}
                    for part in (
                        call["function"]["arguments"][:5],
                        call["function"]["arguments"][5:],
                    )
                ),
            ):
                choice = {"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}
                events.append({**head, "choices": [choice]})
        last: dict[str, Any] = {"index": 0, "finish_reason": finished["reason"]}
        last |= {"delta": {}} if chat else {"text": ""}
        events.append({**head, "choices": [last]})
        events.append({**head, "choices": [], "usage": finished["usage"]})
        return events

    def generate_events(self, finished: dict[str, Any]) -> list[dict[str, Any]]:
        events, text, done = [], "", 0
        groups = self.groups(finished["said"])
        for number, some in enumerate(groups):
            text += "".join(one[0] for one in some)
            done += len(some)
            is_last = number == len(groups) - 1
            meta: dict[str, Any] = {
                "finish_reason": {"type": finished["reason"]} if is_last else None,
                "prompt_tokens": finished["usage"]["prompt_tokens"],
                "completion_tokens": done - (self.now["short_by"] if is_last else 0),
            }
            if self.now["accept_length"] and is_last:
                meta["spec_verify_ct"] = round(done / self.now["accept_length"])
            events.append({"text": text.lstrip(), "meta_info": meta})
        return events

    async def stream(self, writer: asyncio.StreamWriter, events: list[dict[str, Any]]) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for event in events:
            if self.now["step_s"]:
                await asyncio.sleep(self.now["step_s"])
            self.chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            if self.now["step_s"]:
                await writer.drain()
        self.chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def send(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()


if __name__ == "__main__":
    asyncio.run(ModelServer(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}).serve())
