"""A small OpenAI-compatible and `/generate` server that answers faithfully, or fails as it is told.

Standard library only, and a process of its own, so that a test can kill it and its CPU time is not
the client's. `python server.py '{"right_share": 0.9}'` prints one line, `{"port": ...}`, and serves
127.0.0.1 until it is ended. Its behaviour is one JSON object, `DEFAULTS` below with changes;
`POST /_control` changes it while it runs and `GET /_log` tells what was asked.

It is no model: a token is up to four characters of a word. Arithmetic questions it works out, other
prompts it looks up in its `book`; of both it answers `right_share` rightly, always the same ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
from typing import Any

DEFAULTS: dict[str, Any] = {
    # What it tells of itself.
    "models": ["fake-model"],
    "max_model_len": 8192,
    "server_info": None,
    "api_key": None,
    # How it answers.
    "right_share": 1.0,
    "salt": "",
    "book": {},
    "default_reply": "I do not know.",
    "varied": True,
    "thinks": False,
    "events": 4,
    "first_delay_s": 0.0,
    "event_delay_s": 0.0,
    "usage": "right",
    "spec_verify": None,
    "incremental": False,
    # Which build it is, and how it writes what it says.
    "version": None,
    # From so many completion requests on it is another build.
    "version_after": None,
    "version_from": 0,
    # Said to every question, if it is not null.
    "reply": None,
    "listing_status": 200,
    "answering_model": None,
    "fingerprint": None,
    "extra_choice": False,
    "data_lines": 1,
    "line_end": "\n",
    # What it takes no notice of, and what it refuses.
    "ignored_fields": [],
    "rejected_fields": [],
    # How it fails: completion requests are counted from 0, and those from `from` on, `count` of
    # them (null: all), get the fault.
    "fault": None,
    "fault_from": 0,
    "fault_count": None,
    "fault_status": 500,
    "retry_after": None,
}

# Faults in the body of a whole answer, streamed or not.
_REASONS = {"content_filter": "content_filter", "cut_early": "length", "tool_end": "tool_calls"}

_TOKEN = re.compile(r"\s*\S{1,4}|\s+")
_SUM = re.compile(r"What is (\d+) ([-+*]) (\d+)\?")


def tokens(text: str) -> list[str]:
    return _TOKEN.findall(text)


class Server:
    def __init__(self, behaviour: dict[str, Any]) -> None:
        self.behaviour = {**DEFAULTS, **behaviour}
        self.completions = 0
        self.log: list[dict[str, Any]] = []
        self.under_way = 0
        self.most_under_way = 0

    async def serve(self) -> None:
        server = await asyncio.start_server(self.connection, "127.0.0.1", 0, backlog=1024)
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
                await self.answer(method, path, headers, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        writer: asyncio.StreamWriter,
    ) -> None:
        now = self.behaviour
        if path == "/_control":
            change = json.loads(body)
            if change.pop("reset", False):
                now = DEFAULTS
                self.completions, self.log, self.most_under_way = 0, [], 0
            self.behaviour = {**now, **change}
            if "fault" in change:
                self.completions = 0
            return await self.send_json(writer, 200, {})
        if path == "/_log":
            told = {"requests": self.log, "most_under_way": self.most_under_way}
            return await self.send_json(writer, 200, told)
        if now["fault"] == "hang_all" and self.completions > now["fault_from"]:
            return await asyncio.sleep(3600)
        if path == "/health":
            return await self.send_json(writer, 200, {})
        key = now["api_key"]
        if key is not None and headers.get("authorization") != f"Bearer {key}":
            return await self.send_json(writer, 401, {"error": {"message": "no such key"}})
        if path == "/version" and now["version"] is not None:
            is_after = now["version_after"] and self.completions >= now["version_from"]
            version = now["version_after"] if is_after else now["version"]
            return await self.send_json(writer, 200, {"version": version})
        if path == "/v1/models" and now["listing_status"] != 200:
            return await self.send_json(writer, now["listing_status"], {"detail": "no"})
        if path == "/v1/models":
            data = [
                {"id": name, "root": f"/models/{name}", "max_model_len": now["max_model_len"]}
                for name in now["models"]
            ]
            return await self.send_json(writer, 200, {"object": "list", "data": data})
        if path == "/get_server_info" and now["server_info"] is not None:
            return await self.send_json(writer, 200, now["server_info"])
        if method == "POST" and path in ("/v1/chat/completions", "/generate"):
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                return await self.complete(path, json.loads(body), writer)
            finally:
                self.under_way -= 1
        return await self.send_json(writer, 404, {"detail": "Not Found"})

    async def complete(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        now = self.behaviour
        number = self.completions
        self.completions += 1
        generate = path == "/generate"
        self.log.append({"path": path, "body": body})
        refused = self.refusal(body, generate)
        if refused:
            status, message = refused
            return await self.send_json(
                writer, status, {"error": {"message": message, "type": "BadRequestError"}}
            )
        last = (
            float("inf") if now["fault_count"] is None else now["fault_from"] + now["fault_count"]
        )
        fault = now["fault"] if now["fault_from"] <= number < last else None
        if fault == "status":
            message = {"error": {"message": "told to fail"}}
            again = now["retry_after"]
            headers = {} if again is None else {"retry-after": str(again)}
            return await self.send_json(writer, now["fault_status"], message, headers)
        if fault == "die":
            os._exit(1)
        if fault in ("hang", "hang_all"):
            return await asyncio.sleep(3600)
        if fault == "garbage":
            return await self.send(writer, 200, "text/html", b"<html>It works!</html>")
        prompt = body["text"] if generate else body["messages"][-1]["content"]
        sampling = body.get("sampling_params", {}) if generate else body
        text, reasoning = self.reply(prompt, sampling, number, thinking(body))
        if fault == "null_content":
            text = None
        limit = sampling.get("max_new_tokens" if generate else "max_tokens")
        if "max_tokens" in now["ignored_fields"]:
            limit = None
        answer = self.finish(text, reasoning, limit, sampling.get("stop") or [])
        prompt_tokens = len(tokens(prompt)) + 5
        if not generate and "chat_template_kwargs" not in now["ignored_fields"]:
            prompt_tokens += 3 * thinking(body)
        if "reasoning_effort" in body and "reasoning_effort" not in now["ignored_fields"]:
            prompt_tokens += 7
        answer["prompt_tokens"] = prompt_tokens
        if fault in _REASONS:
            answer["reason"] = _REASONS[fault]
        if fault == "other_model":
            answer["model"] = "another-model"
        if fault == "other_fingerprint":
            answer["fingerprint"] = "fp-2"
        if now["usage"] == "wrong":
            answer["completion_tokens"] = 999_999_999
        await asyncio.sleep(now["first_delay_s"])
        events = self.generate_events(answer) if generate else self.chat_events(answer, body)
        if not body.get("stream"):
            whole = events[-1] if generate else self.chat_whole(answer)
            if fault == "slow":
                await asyncio.sleep(3600)
            return await self.send_json(writer, 200, whole)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for index, event in enumerate(events):
            if index == 2 and fault == "drop":
                writer.close()
                return None
            if index == 2 and fault == "bad_framing":
                # Apart from what came before: a client that has it all at once sees it sooner.
                await writer.drain()
                await asyncio.sleep(0.1)
                writer.write(b"no size\r\n")
            if index == 2 and fault == "stall":
                await writer.drain()
                return await asyncio.sleep(3600)
            if index == 2 and fault in ("comments", "empty_deltas"):
                empty = {"choices": [{"index": 0, "delta": {"content": ""}}]}
                line = b": on it\n\n"
                if fault == "empty_deltas":
                    line = b"data: " + json.dumps(empty).encode() + b"\n\n"
                while not writer.is_closing():
                    self.chunk(writer, line)
                    await writer.drain()
                    await asyncio.sleep(0.1)
            if index == 2 and fault in ("cut_then_done", "cut_then_end"):
                break
            if fault == "trickle":
                await writer.drain()
                await asyncio.sleep(0.4)
            if index == 2 and fault == "garbage_in_stream":
                self.chunk(writer, b'data: {"choices": [{"del\n\n')
            if index == 2 and fault == "error_in_stream":
                self.chunk(writer, b'data: {"error": {"message": "out of memory"}}\n\n')
            self.chunk(writer, self.written(event))
            if now["event_delay_s"]:
                await writer.drain()
                await asyncio.sleep(now["event_delay_s"])
        if fault != "cut_then_end":
            self.chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return None

    def written(self, event: dict[str, Any]) -> bytes:
        """An event as bytes: its data in one line or several."""
        text = json.dumps(event, indent=0 if self.behaviour["data_lines"] > 1 else None)
        end = self.behaviour["line_end"]
        return ("".join(f"data: {line}{end}" for line in text.split("\n")) + end).encode()

    def refusal(self, body: dict[str, Any], generate: bool) -> tuple[int, str] | None:
        now = self.behaviour
        fields = body.get("sampling_params", {}) if generate else body
        for field in now["rejected_fields"]:
            if field in fields or field in body:
                return 422, f"Extra inputs are not permitted: {field}"
        if not generate and body["model"] not in now["models"]:
            return 404, f"The model `{body['model']}` does not exist."
        prompt = body["text"] if generate else body["messages"][-1]["content"]
        limit = fields.get("max_new_tokens" if generate else "max_tokens") or 1
        if len(tokens(prompt)) + 5 + limit > now["max_model_len"]:
            return 400, f"maximum context length is {now['max_model_len']} tokens"
        return None

    def reply(
        self, prompt: str, sampling: dict[str, Any], number: int, thinks: bool
    ) -> tuple[str, str | None]:
        now = self.behaviour
        share = int(hashlib.sha256((now["salt"] + prompt).encode()).hexdigest()[:8], 16) / 2**32
        right = share < now["right_share"]
        asked = _SUM.search(prompt)
        if asked:
            left, operation, other = int(asked[1]), asked[2], int(asked[3])
            value = {"+": left + other, "-": left - other, "*": left * other}[operation]
            text = str(value if right else value + 1)
        elif prompt in now["book"]:
            text = now["book"][prompt]["right" if right else "wrong"]
        else:
            text = now["default_reply"]
        if now["reply"] is not None:
            text = now["reply"]
        seed = sampling.get("seed", sampling.get("sampling_seed"))
        if sampling.get("temperature", 1.0) > 0 and now["varied"] and not asked:
            text = f"[{seed if seed is not None else number}] {text}"
        return text, "Let me think this through." if thinks or now["thinks"] else None

    def finish(
        self, text: str | None, reasoning: str | None, limit: int | None, stops: list[str]
    ) -> dict[str, Any]:
        matched: str | int | None = None
        found = [(text.index(stop), stop) for stop in stops if text and stop in text]
        if found:
            position, matched = min(found)
            text = text[:position]
        thought, said = tokens(reasoning or ""), tokens(text or "")
        reason = "stop"
        total = len(thought) + len(said) + 1
        if limit is not None and total > limit:
            thought, said = thought[:limit], said[: max(0, limit - len(thought))]
            reason, matched, total = "length", None, limit
        return {
            "text": None if text is None else "".join(said),
            "pieces": said,
            "reasoning": "".join(thought) or None,
            "reason": reason,
            "matched": matched,
            "completion_tokens": total,
            "reasoning_tokens": len(thought),
        }

    def usage(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {
            "prompt_tokens": answer["prompt_tokens"],
            "completion_tokens": answer["completion_tokens"],
            "total_tokens": answer["prompt_tokens"] + answer["completion_tokens"],
            "completion_tokens_details": {"reasoning_tokens": answer["reasoning_tokens"]},
        }

    def model(self, answer: dict[str, Any], asked: str) -> str:
        return answer.get("model") or self.behaviour["answering_model"] or asked

    def parts(self, pieces: list[str]) -> list[str]:
        size = max(1, -(-len(pieces) // self.behaviour["events"]))
        return ["".join(pieces[i : i + size]) for i in range(0, len(pieces), size)]

    def chat_whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": answer["text"],
                "reasoning_content": answer["reasoning"],
            },
            "finish_reason": answer["reason"],
            "stop_reason": answer["matched"],
        }
        choices = [choice]
        if self.behaviour["extra_choice"]:
            message = {"role": "assistant", "content": "not this one"}
            choices.insert(0, {**choice, "index": 1, "message": message})
        whole = {"id": "chatcmpl-0", "object": "chat.completion", "choices": choices}
        whole["model"] = self.model(answer, self.behaviour["models"][0])
        if self.behaviour["usage"] != "absent":
            whole["usage"] = self.usage(answer)
        return whole

    def chat_events(self, answer: dict[str, Any], body: dict[str, Any]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if answer["reasoning"]:
            deltas.append({"reasoning_content": answer["reasoning"], "content": None})
        deltas += [{"content": part} for part in self.parts(answer["pieces"])]
        head = {"id": "chatcmpl-0", "object": "chat.completion.chunk"}
        head["model"] = self.model(answer, body["model"])
        if self.behaviour["fingerprint"]:
            head["system_fingerprint"] = answer.get("fingerprint", self.behaviour["fingerprint"])
        other = {"index": 1, "delta": {"content": "not this one"}, "finish_reason": None}
        others = [other] if self.behaviour["extra_choice"] else []
        events = [
            {**head, "choices": [*others, {"index": 0, "delta": delta, "finish_reason": None}]}
            for delta in deltas
        ]
        last = {"index": 0, "delta": {}, "finish_reason": answer["reason"]}
        events.append({**head, "choices": [{**last, "stop_reason": answer["matched"]}]})
        asked = (body.get("stream_options") or {}).get("include_usage")
        if asked and self.behaviour["usage"] != "absent":
            events.append({**head, "choices": [], "usage": self.usage(answer)})
        return events

    def generate_events(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        parts = self.parts(answer["pieces"]) or [""]
        events, text = [], ""
        for index, part in enumerate(parts):
            text += part
            last = index == len(parts) - 1
            matched = 2 if answer["matched"] is None else answer["matched"]
            reason = {"type": answer["reason"]}
            if answer["reason"] == "stop":
                reason["matched"] = matched
            else:
                reason["length"] = answer["completion_tokens"]
            meta = {
                "id": "0",
                "finish_reason": reason if last else None,
                "prompt_tokens": answer["prompt_tokens"],
                "completion_tokens": answer["completion_tokens"] if last else index + 1,
            }
            if last and self.behaviour["spec_verify"]:
                meta["spec_verify_ct"] = self.behaviour["spec_verify"]
            shown = part if self.behaviour["incremental"] else text
            events.append({"text": shown, "meta_info": meta})
        return events

    def chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def send_json(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        value: Any,
        headers: dict[str, str] | None = None,
    ) -> None:
        await self.send(writer, status, "application/json", json.dumps(value).encode(), headers)

    async def send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        kind: str,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        told = {"content-type": kind, "content-length": str(len(body)), **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body)
        await writer.drain()


def thinking(body: dict[str, Any]) -> bool:
    return bool((body.get("chat_template_kwargs") or {}).get("thinking"))


if __name__ == "__main__":
    asyncio.run(Server(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}).serve())
