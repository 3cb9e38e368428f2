"""Jobs that the harness runs, each in a process of its own; arguments and results are JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

META = ("spec_correct_drafts_histogram", "spec_verify_ct", "cached_tokens", "completion_tokens", "finish_reason")


def generate(engine: dict[str, Any], steps: list[dict[str, Any]], metrics: bool = False) -> dict[str, Any]:
    """Start one engine and run steps in it, each on what the ones before left in its caches.

    A step has ``generate`` (prompts: texts or lists of token ids) or ``go_on`` (the number of an earlier step: its
    prompts with their outputs and three tokens more), ``sampling`` (one for all, or one each), optionally
    ``abort`` (indices of requests to abort once they have streamed a little) and ``stagger`` (seconds between the
    requests' starts, which mixes prefills into running batches).

    Returns the seconds the start took and per step the requests' ``output_ids`` (None where aborted) and ``meta``; with
    ``metrics`` also the engine's Prometheus samples (name, labels, value) behind the last step.
    """
    import sglang as sgl

    from sglang_ext import cpu

    platform = cpu.SERVER_DEFAULTS if engine.get("device", "cpu") == "cpu" else {}
    defaults = {**platform, "context_length": 512, "max_total_tokens": 4096, "max_running_requests": 4}
    started = time.monotonic()
    running = sgl.Engine(**{**defaults, "log_level": "warning", "random_seed": 1, "enable_metrics": metrics, **engine})
    seconds = time.monotonic() - started
    results: list[list[dict[str, Any]]] = []
    try:
        for step in steps:
            if "go_on" in step:
                before = results[step.pop("go_on")]
                step["generate"] = [request["prompt_ids"] + request["output_ids"] + [7, 8, 9] for request in before]
            results.append(running.loop.run_until_complete(_step(running, **step)))
        samples = _samples() if metrics else []
    finally:
        running.shutdown()
    return {"start_seconds": seconds, "steps": results, "metrics": samples}


def _samples() -> list[tuple[str, dict[str, str], float]]:
    """What /metrics would show once the engine has been idle for a moment."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    time.sleep(1)
    return [(s.name, dict(s.labels), s.value) for family in registry.collect() for s in family.samples]


async def _step(
    engine: Any, generate: list[Any], sampling: Any, abort: list[int] | None = None, stagger: float = 0.0
) -> list[dict[str, Any]]:
    each = sampling if isinstance(sampling, list) else [sampling] * len(generate)

    async def one(index: int) -> dict[str, Any]:
        await asyncio.sleep(index * stagger)
        prompt = generate[index]
        if isinstance(prompt, str):
            prompt = engine.tokenizer_manager.tokenizer.encode(prompt)
        stream = await engine.async_generate(
            input_ids=prompt, sampling_params=each[index], rid=f"{index}-{time.monotonic_ns()}", stream=True
        )
        last: dict[str, Any] = {}
        output_ids: list[int] | None = []
        async for last in stream:
            if output_ids is None:
                continue  # aborted: the last message has what it did until then
            output_ids = last["output_ids"]
            if index in (abort or []) and len(output_ids) >= 4:
                engine.tokenizer_manager.abort_request(rid=last["meta_info"]["id"])
                output_ids = None
        meta = {name: last["meta_info"].get(name) for name in META}
        return {"rid": last["meta_info"]["id"], "prompt_ids": prompt, "output_ids": output_ids, "meta": meta}

    return list(await asyncio.gather(*(one(index) for index in range(len(generate)))))


def run(name: str, request: str, answer: str) -> None:
    """Run the job whose arguments are in the file ``request`` and write its result to the file ``answer``."""
    result = globals()[name](**json.loads(Path(request).read_text()))
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    run(*sys.argv[1:])
