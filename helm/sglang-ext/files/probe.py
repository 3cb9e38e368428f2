"""Asks a server for many tokens and checks that it speculates. Python's standard library only.

    probe.py gate URL [--above 1.0]       startup probe: a greedy answer of many tokens, and accepted drafts
    probe.py test URL --model NAME        helm test: a streamed answer, and counters in /metrics that moved

Ends with 0, or with 1 and one sentence, which Kubernetes shows in the pod's events.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.parse
from typing import Any

COUNTERS = ("sglang_ext_verify_steps_total", "sglang_ext_accepted_tokens_total")


class Failed(Exception):
    """One sentence: what was expected and what came."""


class Server:
    """One connection, kept open: behind a Service all its requests reach the same pod."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self.deadline = time.monotonic() + timeout
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout)

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """The response, not read yet; Failed for any status but 200."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("SGLANG_EXT_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        left = max(self.deadline - time.monotonic(), 0.1)
        self.connection.timeout = left
        if self.connection.sock is not None:
            self.connection.sock.settimeout(left)
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self.connection.getresponse()
        if response.status in (301, 302, 307, 308):
            response.read()
            return self.send(method, urllib.parse.urlsplit(response.headers["Location"]).path, body)
        if response.status != 200:
            text = response.read(300).decode("utf-8", "replace").strip()
            raise Failed(f"{path} answered {response.status} {text}".rstrip() + ".")
        return response

    def counters(self) -> dict[str, float]:
        """The counters of speculation, summed over their labels; a missing one is left out."""
        sums: dict[str, float] = {}
        for line in self.send("GET", "/metrics").read().decode().splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in COUNTERS:
                sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return sums


def gate(server: Server, args: argparse.Namespace) -> str:
    """Before /ready says yes nothing is asked, so a loading server is not disturbed."""
    server.send("GET", "/ready").read()
    sampling = {"temperature": 0.0, "max_new_tokens": args.tokens, "ignore_eos": True}
    answer = json.load(server.send("POST", "/generate", {"text": args.prompt, "sampling_params": sampling}))
    info = answer["meta_info"]
    if info["completion_tokens"] != args.tokens:
        raise Failed(f"{args.tokens} tokens were asked for and {info['completion_tokens']} came.")
    if args.above is None:
        return f"{args.tokens} tokens, plain decoding"
    steps = info.get("spec_correct_drafts_histogram") or []
    if not sum(steps):
        raise Failed("The answer was decoded without a verify step, so the server does not speculate.")
    length = 1 + sum(accepted * count for accepted, count in enumerate(steps)) / sum(steps)
    if length <= args.above:
        raise Failed(
            f"The acceptance length is {length:.2f} over {sum(steps)} verify steps and must be above {args.above:g}; "
            "the drafter does not fit the target, or the draft is broken."
        )
    return f"{args.tokens} tokens, acceptance length {length:.2f}"


def test(server: Server, args: argparse.Namespace) -> str:
    """What a client sees, and what Prometheus sees."""
    names = [model["id"] for model in json.load(server.send("GET", "/v1/models"))["data"]]
    if args.model not in names:
        raise Failed(f"The server has {', '.join(names)} and not {args.model}.")
    before = server.counters()
    body = {"model": args.model, "prompt": args.prompt, "max_tokens": args.tokens, "temperature": 0.0}
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    text, events, tokens, done = "", 0, 0, False
    with server.send("POST", "/v1/completions", body | options) as stream:
        for line in stream:
            data = line.decode().strip().removeprefix("data:").strip()
            if data == "[DONE]":
                done = True
            elif data:
                event = json.loads(data)
                if "error" in event:
                    raise Failed(f"The stream brought an error: {event['error']}.")
                piece = "".join(choice.get("text") or "" for choice in event.get("choices", []))
                text, events = text + piece, events + bool(piece)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not done:
        raise Failed("The stream ended without [DONE].")
    if not text.strip() or tokens != args.tokens:
        raise Failed(f"{args.tokens} tokens were asked for; {tokens} came with the text {text[:80]!r}.")
    said = f"{tokens} tokens in {events} events"
    if not args.speculative:
        return said
    moved: dict[str, float] = {}
    while time.monotonic() < server.deadline:
        after = server.counters()
        moved = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in COUNTERS}
        if all(difference > 0 for difference in moved.values()):
            steps, accepted = (int(moved[name]) for name in COUNTERS)
            return f"{said}, {steps} verify steps, {accepted} drafts accepted"
        time.sleep(0.5)
    still = " and ".join(name for name in COUNTERS if moved.get(name, 0.0) <= 0)
    raise Failed(f"{said}, but {still} did not move: the server does not speculate, or the drafter does not fit.")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("gate", "test"))
    parser.add_argument("url")
    parser.add_argument("--prompt", default="Count from one to fifty: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for everything together")
    parser.add_argument("--above", type=float, help="gate: acceptance length that must be exceeded")
    parser.add_argument("--model", default="", help="test: name in the API")
    parser.add_argument("--speculative", action="store_true", help="test: counters must move")
    args = parser.parse_args(argv)
    try:
        print((gate if args.check == "gate" else test)(Server(args.url, args.timeout), args))
    except Failed as error:
        print(error)
        return 1
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        print(f"The server at {args.url} did not answer as expected ({type(error).__name__}: {error}).")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
