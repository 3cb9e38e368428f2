"""A server, a Prometheus that watches it with the rules of this folder, the dashboards drawn from it, and a trickle of
prompts, until Ctrl-C.

python -m dashboards.observe
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from dashboards import preview, prom
from sglang_ext.demo.__main__ import SERVER_FLAGS
from sglang_ext.demo.suites import suite
from sglang_ext.errors import UsageError
from sglang_ext.evaluation.client import ask
from sglang_ext.evaluation.prompts import Prompt, read_prompts
from sglang_ext.evaluation.servers import interrupt_on_terminate, serving
from sglang_ext.server import check_port
from sglang_ext.settings import EXPECTED_METHOD

WORK = Path("build/observe")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until Ctrl-C; 2 with one sentence where something is missing."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.observe", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", type=Path, default=Path("models"), help="directory of the reference models")
    parser.add_argument("--target", default="dense-target", help="the target in it")
    parser.add_argument("--draft", default="dspark-dense", help="the stock drafter in it, served in its Carryover form")
    parser.add_argument("--port", type=int, default=30000, help="of the server on 127.0.0.1")
    parser.add_argument("--prometheus-port", type=int, default=9090, help="of Prometheus on 127.0.0.1")
    parser.add_argument("--preview-port", type=int, default=9091, help="of the drawn dashboards on 127.0.0.1")
    parser.add_argument("--baseline", type=Path, default=Path("baseline.yaml"), help="baseline rules, where recorded")
    parser.add_argument("--concurrency", type=int, default=2, help="prompts in flight; 0 for none")
    args = parser.parse_args(argv)
    try:
        with observed(args) as server:
            print("Everything runs until Ctrl-C.", flush=True)
            try:
                code = server.wait()
            except KeyboardInterrupt:
                print("\nStopping, which may take 20 seconds", flush=True)
                raise
            raise UsageError(f"The server ended with code {code}; read {WORK / str(args.port) / 'server.log'}.")
    except UsageError as error:
        print(f"sglang-ext: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped; nothing is left running.")
    return 0


@contextlib.contextmanager
def observed(args: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """Start everything and print where it is; yields the server."""
    work = WORK / str(args.port)  # another one, on another port, keeps its own
    drafter = suite(args.models, args.target, args.draft, ("carryover",)).last
    ports = {"--port": args.port, "--prometheus-port": args.prometheus_port, "--preview-port": args.preview_port}
    if len(set(ports.values())) < len(ports):
        raise UsageError(f"{', '.join(ports)} are the same in part; give three different ports.")
    for flag, port in ports.items():
        try:
            check_port("127.0.0.1", port)
        except UsageError as error:
            raise UsageError(str(error).replace("--port", flag)) from None
    words = [str(args.models / args.target), "--draft", str(drafter.path), *SERVER_FLAGS]
    env = {**os.environ, EXPECTED_METHOD: drafter.algorithm}
    print(f"Starting a {drafter.algorithm} server (about 20 seconds on a CPU)", flush=True)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(words, port=args.port, log=work / "server.log", env=env))
        rules = prom.rule_files(args.baseline)
        targets = [f"127.0.0.1:{args.port}"]
        url = stack.enter_context(prom.running(work, targets, port=args.prometheus_port, rules=rules))
        print(f"  chat        http://127.0.0.1:{args.port}/v1/chat/completions")
        print(f"  metrics     http://127.0.0.1:{args.port}/metrics")
        drawn = stack.enter_context(preview.serving(url, args.preview_port))
        print(f"  Prometheus  {url} (alerts: {url}/api/v1/alerts)")
        print(f"  dashboards  {drawn} draws them; for Grafana import dashboards/*.json, data source {url}")
        if args.concurrency:
            print(f"Prompts of {args.models}/prompts.jsonl are asked over and over, {args.concurrency} at a time.")
            ended = threading.Event()
            stack.callback(ended.set)
            prompts = read_prompts(args.models / "prompts.jsonl")
            threading.Thread(target=trickle, args=(args.port, prompts, args.concurrency, ended), daemon=True).start()
        yield server


def trickle(port: int, prompts: Sequence[Prompt], concurrency: int, ended: threading.Event) -> None:
    """Ask the prompts over and over until ``ended`` is set or the server is gone."""
    for start in itertools.count(0, concurrency):
        if ended.is_set():
            return
        some = [prompts[(start + index) % len(prompts)] for index in range(concurrency)]
        try:
            ask(port, some, max_tokens=96, concurrency=concurrency, done=lambda answer: None)
        except UsageError:
            return


if __name__ == "__main__":
    interrupt_on_terminate()
    sys.exit(main())
