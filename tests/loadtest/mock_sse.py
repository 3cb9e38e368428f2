"""A server of the OpenAI chat API whose timing is known: it writes down when it received and sent what.

Run as ``python mock_sse.py LOG``; prints its port. A request is scripted by its last user message, a JSON object:

    ttft, gap     seconds before the first event and between events
    tokens        tokens of each event, in order
    reasoning     how many of the events carry reasoning instead of content
    usage         "continuous" (default), "final" or "none"
    histogram     what sglext reports, or absent
    fault         one of FAULTS

All times are time.monotonic(), which processes of one Linux machine share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

QUICK = {"ttft": 0.02, "gap": 0.02, "tokens": [1, 2, 3]}  # the script of a prompt whose timing is of no matter
FAULTS = ("not_streaming", "broken", "not_json", "error_event", "empty", "http_500", "http_429", "silent")
MODEL, KEY = "mock-model", "secret"


def event(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


class Mock:
    def __init__(self, log: TextIO, capacity: int | None) -> None:
        self.log, self.slots = log, asyncio.Semaphore(capacity or 10_000)
        self.tokens = self.steps = self.accepted = self.finished = self.number = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                at = time.monotonic()
                if not await self.answer(writer, lines[0].split()[1], headers, body, at):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(
        self, out: asyncio.StreamWriter, path: str, headers: dict[str, str], body: bytes, at: float
    ) -> bool:
        if path == "/v1/models":
            return await self.plain(out, 200, {"data": [{"id": MODEL}]})
        if path == "/v1/loads?include=core":
            return await self.plain(out, 200, {"accelerator": "Mock H200", "num_accelerators": 2, "version": "0"})
        if path == "/server_info":
            return await self.plain(out, 200, {"version": "mock", "speculative_algorithm": "DSPARK", "api_key": KEY})
        if path == "/flush_cache":
            return await self.plain(out, 200, {})
        if path == "/metrics":
            return await self.plain(out, 200, self.metrics(), "text/plain; version=0.0.4")
        request = json.loads(body)
        if headers.get("authorization") == "Bearer wrong":
            return await self.plain(out, 401, {"error": {"message": "invalid API key"}})
        if request["model"] != MODEL:
            return await self.plain(out, 404, {"error": {"message": f"the model {request['model']} does not exist"}})
        script = json.loads(request["messages"][-1]["content"])
        async with self.slots:
            return await self.stream(out, request, script, at)

    def metrics(self) -> str:
        values = {
            "sglang:generation_tokens_total": self.tokens,
            "sglang:spec_verify_calls_total": self.steps,
            "sglang_ext_accepted_tokens_total": self.accepted,
            "sglang:num_requests_total": self.finished,
        }
        lines = [f'# TYPE {name[:-6]} counter\n{name}{{model_name="mock"}} {value}' for name, value in values.items()]
        return "\n".join([*lines, "# TYPE sglang:num_running_reqs gauge", "sglang:num_running_reqs 1.0", ""])

    async def plain(self, out: asyncio.StreamWriter, status: int, value: Any, kind: str = "application/json") -> bool:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
        out.write(head.encode() + data)
        await out.drain()
        return True

    async def stream(
        self, out: asyncio.StreamWriter, request: dict[str, Any], script: dict[str, Any], at: float
    ) -> bool:
        fault = script.get("fault")
        if fault == "not_streaming":
            return await self.plain(out, 200, {"choices": [{"message": {"content": "all at once"}}]})
        if fault in ("http_500", "http_429"):
            return await self.plain(out, int(fault[5:]), {"error": {"message": "scripted"}})
        if fault == "silent":
            await asyncio.sleep(60)
        out.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        sends: list[tuple[float, int]] = []
        self.number += 1
        name = f"mock-{self.number}"

        async def send(data: bytes, tokens: int = 0) -> None:
            out.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await out.drain()
            if tokens:
                sends.append((time.monotonic(), tokens))

        def chunk(**more: Any) -> bytes:
            return event({"id": name, "object": "chat.completion.chunk", "choices": [], **more})

        usage = script.get("usage", "continuous")
        await send(chunk(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]))
        counts = [] if fault == "empty" else script["tokens"]
        total, due = 0, time.monotonic() + script["ttft"]
        for index, count in enumerate(counts):
            await asyncio.sleep(max(due - time.monotonic(), 0))
            due += script["gap"]
            total += count
            field = "reasoning_content" if index < script.get("reasoning", 0) else "content"
            more = {"usage": {"prompt_tokens": 7, "completion_tokens": total}} if usage == "continuous" else {}
            text = "".join(f"w{total - count + number} " for number in range(count))
            await send(chunk(choices=[{"delta": {field: text}, "finish_reason": None}], **more), count)
            if fault == "broken" and index == 1:
                return False
            if fault == "not_json" and index == 1:
                await send(event("{not json"))
            if fault == "error_event" and index == 1:
                await send(event({"error": {"message": "scripted", "code": 500}}))
        await send(chunk(choices=[{"delta": {}, "finish_reason": "stop"}]))
        histogram = script.get("histogram", [])
        self.accepted += sum(accepted * steps for accepted, steps in enumerate(histogram))
        if histogram and request.get("return_spec_tokens_details"):
            await send(chunk(sglext={"spec_tokens_details": {"spec_correct_drafts_histogram": histogram}}))
        if usage != "none":
            await send(chunk(usage={"prompt_tokens": 7, "completion_tokens": total}))
        await send(event("[DONE]"))
        end = time.monotonic()
        out.write(b"0\r\n\r\n")
        await out.drain()
        self.tokens, self.steps, self.finished = self.tokens + total, self.steps + sum(histogram), self.finished + 1
        entry = {"id": name, "received": at, "sends": sends, "end": end, "messages": request["messages"]}
        self.log.write(json.dumps(entry) + "\n")
        self.log.flush()
        return True


async def main(log: Path, capacity: int | None) -> None:
    with log.open("w") as file:
        server = await asyncio.start_server(Mock(file, capacity).connection, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None))
