"""The process of ``bench round`` that holds the engine: asks it for each cell's batch, says when a cell is done."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path


def main(path: str) -> None:
    """Run the job in ``path`` (engine, cells, new_tokens, vocabulary); lines on stdout are the protocol."""
    import sglang

    job = json.loads(Path(path).read_text())
    started = time.monotonic()
    engine = sglang.Engine(**job["engine"])
    draw = random.Random(0)
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    prompt = [draw.randrange(job["vocabulary"]) for _ in range(64)]
    engine.generate(input_ids=[prompt], sampling_params=sampling)
    print("READY_TO_MEASURE", time.monotonic() - started, flush=True)
    time.sleep(1)
    rounds = Path(json.loads(Path(path).with_name("plan.json").read_text())["out"])
    rounds.unlink(missing_ok=True)
    for batch, context in job["cells"]:
        prompts = [[draw.randrange(job["vocabulary"]) for _ in range(context)] for _ in range(batch)]
        engine.generate(input_ids=prompts, sampling_params={**sampling, "max_new_tokens": job["new_tokens"]})
        for _ in range(100):  # the scheduler writes once it is idle
            if rounds.exists() and rounds.read_text().endswith('{"end": true}\n'):
                break
            time.sleep(0.1)
        print("CELL_DONE", batch, context, flush=True)
        while rounds.exists():
            time.sleep(0.05)
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
