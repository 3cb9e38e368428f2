"""Host time of Carryover's shift of the draft block, as served and as it was before its one launch, in one process.

    python benchmarks/gpu/shift_host.py --out benchmarks/gpu/shift-host-h200.json

``before``: torch on the device, some 25 small launches, and torch on the host's mirror (the code up to commit 641b1c8).
``mirror``: the host's mirror as served, the device as before. ``after``: as served. ``plan`` is the part of each that
is SGLang's own second plan of the block, ``admit`` what a round does beside the shift. Forms take turns, there and back
again, on the same inputs; each must give the same lengths and slots. ``host`` is the time until the call returns,
``done`` until the device has finished too; medians and quartiles in microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

from sglang_ext.carryover import rows, worker
from sglang_ext.compat import rebind_block
from sglang_ext.evaluation import record

SLOTS, COLUMNS = 65, 2048
WARM = 50  # rounds that are not counted
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(worker.CarryMixin):
    """A worker with nothing but what its shift touches; ``widths`` are (W, Q)."""

    def __init__(self, widths: tuple[int, int]) -> None:
        self.widths = widths
        self._slot_rows = torch.arange(SLOTS * COLUMNS, device=DEVICE).flip(0).to(torch.int32).view(SLOTS, COLUMNS)
        self.carry, self.carry_columns, self.carried_rows = rows.CarryState(SLOTS, DEVICE), COLUMNS, None
        pools: dict[str, Any] = {"token_to_kv_pool_allocator": object(), "token_to_kv_pool": object()}
        translator = KVIndexTranslator(
            req_to_token=self._slot_rows, page_size=1, device=DEVICE, is_draft_worker=True, **pools
        )
        self.draft_model_runner = SimpleNamespace(kv_index_translator=translator)
        self.generation = torch.ones(SLOTS, dtype=torch.int64)

    def carry_widths(self) -> tuple[int, int]:
        return self.widths


def tensor_rows(previous: torch.Tensor, committed: torch.Tensor, width: int, room: torch.Tensor) -> torch.Tensor:
    """``rows.carried_rows`` in the operations it had for tensors alone."""
    rejected = previous + width - committed
    valid = (previous >= 0) & (rejected >= 0) & (rejected < width)
    found = torch.where(valid, rejected, torch.zeros_like(rejected))
    return torch.minimum(found, room.clamp(min=0).to(found.dtype)).to(committed.dtype)


def before(block: Block, forward: Any, batch: Any) -> None:
    width, query = block.carry_widths()
    slots, committed = forward.req_pool_indices, forward.seq_lens
    previous = block.carry.advance(slots, committed)
    carried = tensor_rows(previous, committed, width, block.carry_columns - committed - query)
    stock = forward.out_cache_loc.view(-1, query)
    block_slots = rows.draft_slots(block._slot_rows, slots, committed, carried, stock)
    if batch.seq_lens_cpu is not None:
        lens, at = batch.seq_lens_cpu, batch.req_pool_indices_cpu.to(torch.int64)
        previous_cpu = block.carry.previous_cpu[at]
        block.carry.previous_cpu.index_copy_(0, at, lens.to(torch.int32))
        carried_cpu = tensor_rows(previous_cpu, lens, width, block.carry_columns - lens - query)
        forward.seq_lens_cpu = forward.seq_lens_cpu + carried_cpu
        forward.seq_lens_sum = int(forward.seq_lens_cpu.sum())
    forward.seq_lens = committed + carried
    rebind_block(block.draft_model_runner, forward, block_slots, query)


def mirror(block: Block, forward: Any, batch: Any) -> None:
    served, worker.shift = worker.shift, rows.shift
    try:
        block._shift(forward, batch)
    finally:
        worker.shift = served


def plan(block: Block, forward: Any, batch: Any) -> None:
    rebind_block(block.draft_model_runner, forward, forward.out_cache_loc, block.widths[1])


def admit(block: Block, forward: Any, batch: Any) -> None:
    block.carry.admit(batch.req_pool_indices_cpu, block.generation)


SHIFTS: dict[str, Callable[[Block, Any, Any], None]] = {"before": before, "mirror": mirror, "after": Block._shift}
FORMS = {**SHIFTS, "plan": plan, "admit": admit}


def measure(widths: tuple[int, int], requests: int, host: bool, rounds: int) -> dict[str, Any]:
    """Times of every form over so many rounds; ``host`` says whether SGLang knows the lengths there."""
    blocks = {name: Block(widths) for name in FORMS}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in FORMS}
    slots_cpu = torch.arange(1, requests + 1)
    slots, stock = slots_cpu.to(DEVICE), torch.arange(requests * widths[1], device=DEVICE)
    wait = torch.cuda.synchronize if DEVICE == "cuda" else (lambda: None)
    for number in range(rounds):
        lens_cpu = torch.full((requests,), 100 + 4 * (number % 400))
        lens, given = lens_cpu.to(DEVICE), lens_cpu if host else None
        made = {}
        for name in list(FORMS) if number % 2 else reversed(FORMS):
            forward = SimpleNamespace(
                req_pool_indices=slots, seq_lens=lens, out_cache_loc=stock, seq_lens_cpu=given, seq_lens_sum=0
            )
            batch = SimpleNamespace(req_pool_indices_cpu=slots_cpu, seq_lens_cpu=given)
            wait()
            start = time.perf_counter()
            FORMS[name](blocks[name], forward, batch)
            returned = time.perf_counter()
            wait()
            if number >= WARM:
                times[name][0].append(1e6 * (returned - start))
                times[name][1].append(1e6 * (time.perf_counter() - start))
            made[name] = forward
        if number % 50 == 1:
            lengths = [made[name].seq_lens.tolist() for name in SHIFTS]
            assert lengths[0] == lengths[1] == lengths[2] and lengths[0] != lens_cpu.tolist(), lengths
            written = [blocks[name].carry.previous.tolist() for name in SHIFTS]
            assert written[0] == written[1] == written[2]
            assert all(torch.equal(made[name].out_cache_loc, made["before"].out_cache_loc) for name in SHIFTS)
            if host:
                assert all(made[name].seq_lens_cpu.tolist() == lengths[0] for name in SHIFTS)
    return {
        name: {"host": quartiles(host_us), "done": quartiles(done_us)} for name, (host_us, done_us) in times.items()
    }


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [round(value, 1) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/bench/shift-host.json"), help="JSON file")
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--wait-for", type=Path, help="once compiled, wait until this file exists")
    args = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": record.environment() | {"cores": os.cpu_count(), "device": DEVICE},
        "rounds": args.rounds - WARM,
        "rows": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        measure((8, 7), 1, True, WARM + 10)
        while args.wait_for is not None and not args.wait_for.exists():
            time.sleep(0.2)
        for widths, requests, host in itertools.product(((16, 16), (8, 7)), (1, 4, 32), (True, False)):
            forms = measure(widths, requests, host, args.rounds)
            row = {"verify_width": widths[0], "query_width": widths[1], "requests": requests, "host_lengths": host}
            document["rows"].append(row | forms)
            args.out.write_text(json.dumps(document, indent=1) + "\n")
            print(row, {name: form["host"][1] for name, form in forms.items()}, flush=True)


if __name__ == "__main__":
    main()
