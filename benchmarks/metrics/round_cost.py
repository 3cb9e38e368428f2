"""What metrics cost a scheduler per round: host microseconds, without an engine and without an accelerator.

    python benchmarks/metrics/round_cost.py [--out benchmarks/metrics/round_cost.json]

One round is what ``sglang_ext.metrics.scheduler`` adds to it: noting the launch, adding up the results of a batch (with
carried rows, the dearest case), and every 250 ms an update of the shared counters. Requests are stand-ins with the
attributes that SGLang's have; the counters are real ones in multiprocess mode.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_ext.evaluation import record
from sglang_ext.metrics.rounds import Carry, Tally, on_decode
from sglang_ext.metrics.scheduler import FLUSH_SECONDS

WIDTH = 8


class Request(SimpleNamespace):
    """A running request."""

    def finished(self) -> bool:
        """As SGLang's."""
        return self.finished_reason is not None


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128], help="batch sizes")
    parser.add_argument("--rounds", type=int, default=20000, help="rounds at each batch size")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        from sglang_ext.metrics.series import SpeculationSeries

        labels = dict.fromkeys(("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "method"), "x")
        series = SpeculationSeries(labels, WIDTH)
        rows = [measure(batch, args.rounds, series) for batch in args.batches]
    print("batch   median us   p99 us   update us (each 250 ms)")
    for row in rows:
        print("{batch:5}   {round_median_us:9.1f}   {round_p99_us:6.1f}   {update_median_us:9.1f}".format(**row))
    if args.out:
        command = " ".join(["python", *sys.argv])
        figures = {"command": command, "verify_width": WIDTH, "flush_seconds": FLUSH_SECONDS, "rows": rows}
        record.write(args.out, {**figures, "environment": record.environment()})
    return 0


def measure(batch: int, rounds: int, series: Any) -> dict[str, float]:
    """Microseconds of one round, and of one update of the counters."""
    tally = Tally(WIDTH, Carry(query_width=WIDTH - 1, columns=4096, limit=None), state_layers=2)
    kv = SimpleNamespace(kv_committed_len=100)
    requests = [Request(is_retracted=False, finished_reason=None, kv=kv) for _ in range(batch)]
    draw = random.Random(0)
    correct = [[draw.randrange(WIDTH) for _ in range(batch)] for _ in range(64)]
    on_decode(requests)
    tally.add(requests, correct[0], [0] * batch, None)
    seconds, updates = [], []
    for index in range(rounds):
        started = time.perf_counter()
        before = on_decode(requests)
        tally.add(requests, correct[index % 64], before, None)
        time.monotonic()
        seconds.append(time.perf_counter() - started)
        if index % 50 == 0:
            started = time.perf_counter()
            series.add(tally)
            tally.clear()
            updates.append(time.perf_counter() - started)
    seconds.sort()
    return {
        "batch": batch,
        "round_median_us": round(statistics.median(seconds) * 1e6, 2),
        "round_p99_us": round(seconds[int(len(seconds) * 0.99)] * 1e6, 2),
        "update_median_us": round(statistics.median(updates) * 1e6, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
