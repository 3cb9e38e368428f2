"""How long the reader takes with its kernels and with their plain forms, at the shape of a Qwen3.8-27B target.

    python benchmarks/ready/kernels.py --out benchmarks/ready/kernels.json

Each form is captured in a CUDA graph, as it is served, and replayed; a time is the median over repeats. Needs a CUDA
device, and nothing but torch and Triton otherwise.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_ext.evaluation import record
from sglang_ext.ready.config import ReadyConfig
from sglang_ext.ready.reader import StateReader, read_reduced
from sglang_ext.ready.states import CommittedStates

HIDDEN, DRAFT_LAYERS, BLOCK = 5120, 5, 7
SHAPE: dict[str, int] = {"value_heads": 48, "value_dim": 128, "key_dim": 128}


def graph_time(call: Callable[[], object], replays: int = 100, repeats: int = 9) -> float:
    """Microseconds of one replay of ``call`` in a CUDA graph: the median of the repeats' means."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    means = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        means.append(1000 * start.elapsed_time(end) / replays)
    return statistics.median(means)


@torch.no_grad()
def measure(
    batch: int, rank: int, time: Callable[[Callable[[], object]], float] = graph_time, device: str = "cuda"
) -> list[dict[str, Any]]:
    """One row per operator: microseconds in the plain form and with the kernel."""
    from sglang_ext.ready import kernels

    config = ReadyConfig(source_layers=(30, 62), **SHAPE, rank_k=rank, rank_v=rank)
    reader = StateReader(config, HIDDEN, DRAFT_LAYERS).to(device)
    reader.reads.bfloat16()
    temporal = torch.randn(2, batch + 1, *SHAPE.values(), device=device)
    slots = torch.arange(1, batch + 1, device=device)
    states = CommittedStates(temporal, torch.arange(batch + 1, dtype=torch.int32, device=device), (0, 1))
    layers = torch.tensor(states.layers, device=device)
    hidden = torch.randn(batch, BLOCK, HIDDEN, device=device, dtype=torch.bfloat16)
    reduced = reader.reduce(states.gather(slots))
    queries = reader.reads[0].queries(hidden)  # type: ignore[operator]

    def with_kernel() -> torch.Tensor:
        return kernels.reduce_states(states, layers, slots, reader.value_down, reader.key_down)

    forms: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "gather and reduce": (lambda: reader.reduce(states.gather(slots)), with_kernel),
        "read": (lambda: read_reduced(queries, reduced), lambda: kernels.read_reduced(queries, reduced)),
        "reader of one layer": (
            lambda: reader.read(hidden, reader.reduce(states.gather(slots))),
            lambda: reader.read(hidden, with_kernel(), 0, kernels.read_reduced),
        ),
    }
    head = {"batch": batch, "rank": rank}
    return [
        {**head, "operator": name, "plain_us": time(plain), "kernel_us": time(kernel)}
        for name, (plain, kernel) in forms.items()
    ]


def main() -> int:
    """Measure every batch size and rank, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rank", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, and this times GPU kernels; run it on a GPU.")
    rows = [row for rank in args.rank for batch in args.batch for row in measure(batch, rank)]
    for row in rows:
        print(
            "{batch:4d} requests, rank {rank:3d}, {operator:20}: {plain_us:8.1f} -> {kernel_us:8.1f} us".format(**row)
        )
    settings = {"hidden_size": HIDDEN, "block": BLOCK, "sources": 2, **SHAPE, "states": "float32", "model": "bfloat16"}
    command = shlex.join(["python", *sys.argv])
    record.write(args.out, {"command": command, "environment": record.environment(), **settings, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
