"""The reader's kernels against their plain forms, on whatever device Triton runs on; prints one JSON line a case.

Run with TRITON_INTERPRET=1 where there is no GPU (``test_ready_kernels``), or on a GPU (``tests/gpu``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from sglang_ext.ready import kernels
from sglang_ext.ready.config import ReadyConfig
from sglang_ext.ready.reader import StateReader, read_reduced
from sglang_ext.ready.states import CommittedStates

SMALL = {"value_heads": 3, "value_dim": 20, "key_dim": 12, "rank_k": 5, "rank_v": 3}
SQUARE = {"value_heads": 2, "value_dim": 32, "key_dim": 32, "rank_k": 8, "rank_v": 8}
CASES: dict[str, dict[str, Any]] = {
    "odd-sizes": SMALL,
    "shared-query": {**SMALL, "query": "source"},
    "square": SQUARE,
    "two-tiles": {**SQUARE, "value_dim": 128, "key_dim": 128},
    "full-rank": {**SQUARE, "rank_k": 32, "rank_v": 32},
    "bf16-states": {**SQUARE, "state_dtype": torch.bfloat16},
    "bf16-queries": {**SQUARE, "query_dtype": torch.bfloat16},
    "tuned-sums": {**SQUARE, "value_dim": 128, "key_dim": 128, "tuning": {"precision": "sums", "rows": 32}},
    "tuned-one-warp": {**SQUARE, "value_dim": 64, "key_dim": 64, "tuning": asdict(kernels.MANY)},
    "tuned-odd": {**SMALL, "tuning": {"precision": "sums", "eviction": ""}},
}
# So many requests that the way for many is taken.
LARGE = {
    "repeats": 2,
    "value_heads": 48,
    "value_dim": 128,
    "key_dim": 128,
    "rank_k": 8,
    "rank_v": 8,
    "query_dtype": torch.bfloat16,
}


@torch.no_grad()
def compare(
    device: str, state_dtype: Any = None, query_dtype: Any = None, tuning: Any = None, repeats: int = 1, **shape: Any
) -> dict[str, float]:
    """Largest differences of the kernels from the plain forms, and what a transposed state would differ by."""
    generator = torch.Generator().manual_seed(0)
    config = ReadyConfig(source_layers=(0, 2), **shape)
    reader = StateReader(config, 16, 2)
    reader.reset_parameters(generator)
    torch.nn.init.normal_(reader.reads[0].out, generator=generator)  # type: ignore[arg-type]
    # Strided as SGLang's page-major pools are; slot 0 is padding's, as is the last request.
    whole = torch.randn(4, config.value_heads, 5, config.value_dim, config.key_dim, generator=generator)
    temporal = whole.transpose(1, 2).to(device, state_dtype or torch.float32)
    slots = torch.tensor([0, 3, 1, 4], dtype=torch.int32, device=device)
    states = CommittedStates(temporal, slots, (3, 1))
    request_slots = torch.tensor([2, 1, 3, 0, 0] * repeats, device=device)
    reader.to(device)
    expected = reader.reduce(states.gather(request_slots))
    layers = torch.tensor(states.layers, device=device)
    how = kernels.Tuning(**tuning) if tuning else None
    reduced = kernels.reduce_states(states, layers, request_slots, reader.value_down, reader.key_down, how)
    query_heads = 1 if config.query == "source" else config.value_heads
    queries = torch.randn(5 * repeats, 7, 2, query_heads, config.rank_k, generator=generator)
    queries = queries.to(device, query_dtype or torch.float32)
    reads = kernels.read_reduced(queries, expected)
    fused = kernels.read_states(states, layers, request_slots, reader.value_down, reader.key_down, queries, how)
    hidden = torch.randn(5 * repeats, 7, 16, generator=generator).to(device)
    delta = reader.read(hidden, reduced, 0, kernels.read_reduced)
    wanted = read_reduced(queries, expected).to(queries.dtype).float()
    found = {
        "delta": float((delta - reader.read(hidden, expected)).abs().max()),
        "reduce": float((reduced - expected).abs().max()),
        "read": float((reads.float() - wanted).abs().max()),
        "fused": float((fused.float() - wanted).abs().max()),
    }
    if config.value_dim == config.key_dim:
        swapped = CommittedStates(temporal.transpose(-1, -2), slots, states.layers)
        wrong = kernels.reduce_states(swapped, layers, request_slots, reader.value_down, reader.key_down)
        found["transposed"] = float((wrong - expected).abs().amax((1, 2, 3, 4)).min())
    return found


if __name__ == "__main__":
    on = sys.argv[1]
    for name, case in {**CASES, **({"large": LARGE} if on == "cuda" else {})}.items():
        print(json.dumps({"case": name, **compare(on, **case)}), flush=True)
