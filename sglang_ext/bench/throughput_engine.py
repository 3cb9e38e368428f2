"""The process of ``bench throughput`` that holds the engine: blocks of requests, one method after the other."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WARM = 2  # requests per concurrent one before anything is timed


def main(path: str) -> None:
    """Run the job in ``path`` (engine, methods, sampling, prompts, levels); lines on stdout are the protocol."""
    import sglang

    job = json.loads(Path(path).read_text())
    started = time.monotonic()
    engine = sglang.Engine(**job["engine"])
    seconds = time.monotonic() - started

    def block(name: str, number: str, concurrency: int, prompts: Sequence[list[int]]) -> dict[str, Any]:
        gc.collect()
        work = _block(engine, f"{name}/{number}", concurrency, prompts, job["sampling"])
        found: dict[str, Any] = engine.loop.run_until_complete(work)
        return found | (_counts(Path(job["counts"]), f"{name}/{number}") if job["counts"] else {})

    for concurrency in job["levels"]:
        prompts = [job["prompts"][index % len(job["prompts"])] for index in range(WARM * concurrency)]
        for name in job["methods"]:
            block(name, f"warm-{concurrency}", concurrency, prompts)
    print("READY_TO_MEASURE", seconds, flush=True)
    for concurrency in job["levels"]:
        size, order = job["requests"][str(concurrency)], _places(len(job["prompts"]), concurrency)
        for cycle in range(job["cycles"]):
            prompts = [job["prompts"][next(order)] for _ in range(size)]
            for name in job["methods"] if cycle % 2 == 0 else reversed(job["methods"]):
                found = block(name, f"{concurrency}-{cycle}", concurrency, prompts)
                about = {"method": name, "concurrency": concurrency, "cycle": cycle}
                with Path(job["out"]).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(about | found) + "\n")
                print("BLOCK_DONE", flush=True)
    engine.shutdown()


def _places(prompts: int, seed: int) -> Iterator[int]:
    """Places of prompts without end, each pass in an order of its own: which answers end together decides how many
    prefills fall between a block's rounds, so a block that came again in the same order would be no new measurement."""
    draw = random.Random(seed)
    while True:
        yield from draw.sample(range(prompts), prompts)


def _counts(path: Path, block: str, pause: float = 0.1, patience: float = 5.0) -> dict[str, int]:
    """Prefills and rounds of an ended block, which the scheduler writes whenever it is idle (``bench.probe``).

    Taken once nothing more comes in a ``pause``, in which an idle scheduler looks for work many times; empty where
    that does not happen within ``patience`` seconds, so that no wrong number is recorded.
    """
    end, before = time.monotonic() + patience, None
    while True:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        found = {name: sum(row[name] for row in rows if row["block"] == block) for name in ("prefills", "rounds")}
        if found == before and any(found.values()):
            return found
        if time.monotonic() > end:
            return {}
        before = found
        time.sleep(pause)


async def _block(
    engine: Any, ids: str, concurrency: int, prompts: Sequence[list[int]], sampling: dict[str, Any]
) -> dict[str, Any]:
    """Answer all prompts, so many at a time; seconds from the first request to the last answer, and what each gave."""
    free = asyncio.Semaphore(concurrency)

    async def one(index: int) -> dict[str, Any]:
        async with free:
            return dict(
                await engine.async_generate(
                    input_ids=prompts[index], sampling_params=sampling, rid=f"{ids}/{index}-{time.monotonic_ns()}"
                )
            )

    start = time.perf_counter()
    answers = await asyncio.gather(*(one(index) for index in range(len(prompts))))
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "outputs": [answer["output_ids"] for answer in answers],
        "histograms": [answer["meta_info"].get("spec_correct_drafts_histogram") or [] for answer in answers],
    }


if __name__ == "__main__":
    main(sys.argv[1])
