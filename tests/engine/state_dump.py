"""A plugin that writes down which states a reader was given, and what the request had committed by then.

Or, asked for it, one that gives the reader transposed states.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER, TRANSPOSED = "SGLANG_EXT_TEST_STATE_DUMP", "SGLANG_EXT_TEST_STATES_TRANSPOSED"


def environment(folder: Path, transposed: bool = False) -> dict[str, str]:
    """Environment in which SGLang finds this module as a plugin; it fills ``folder / "rounds"``, or transposes."""
    metadata = folder / "sglang_ext_state_dump-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-ext-state-dump\nVersion: 1\n")
    entry = "[sglang.srt.plugins]\nstate_dump = tests.engine.state_dump:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    rounds = folder / "rounds"
    rounds.mkdir()
    root = Path(__file__).resolve().parents[2]
    return {
        FOLDER: str(rounds),
        TRANSPOSED: str(int(transposed)),
        "PYTHONPATH": os.pathsep.join([str(folder), str(root)]),
    }


def register() -> None:
    """Attach to every reading worker once its pools exist."""
    scheduler = sys.modules.get("sglang.srt.managers.scheduler")
    if scheduler is not None:  # a forked process has read the variable already
        scheduler.TEST_RETRACT = os.environ.get("SGLANG_TEST_RETRACT") == "1"  # type: ignore[attr-defined]
    from sglang_ext.ready.worker import ReadMixin

    stock = ReadMixin.alloc_memory_pool

    def alloc_memory_pool(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if os.environ[TRANSPOSED] == "1":
            _transpose(self.draft_model.state_reader)
        else:
            _follow(self, Path(os.environ[FOLDER]))

    ReadMixin.alloc_memory_pool = alloc_memory_pool  # type: ignore[method-assign]


def _transpose(reader: Any) -> None:
    stock = reader.reduce
    reader.reduce = lambda states: stock(states.transpose(-1, -2).reshape(states.shape))


class _Follower:
    """Keeps each request's committed tokens; one file of states and one of facts per draft block."""

    batch: Any = None

    def __init__(self, worker: Any, folder: Path) -> None:
        self.worker, self.folder, self.count = worker, folder, itertools.count()
        self.tokens: dict[str, list[int]] = {}
        self.reached: dict[str, str] = {}
        self.read: torch.Tensor | None = None

    def on_extend(self, features: torch.Tensor, positions: list[int]) -> None:
        ids, at = self.batch.input_ids.tolist(), 0
        for index, request in enumerate(self.batch.reqs):
            count, start = int(self.batch.extend_lens[index]), positions[at]
            first = request.rid not in self.tokens
            tokens = self.tokens.setdefault(request.rid, [])
            known = [*request.origin_input_ids, *request.output_ids]
            taken_back = not first and start < len(tokens)
            how = ("radix" if start else "prefill") if first else "mixed" if count == 1 else "chunk"
            how = "retracted" if taken_back else how
            tokens[:] = [*tokens[:start], *known[len(tokens) : start], *ids[at : at + count]]
            kept = self.reached.get(request.rid)
            self.reached[request.rid] = "radix" if how == "chunk" and kept == "radix" else how
            at += count

    def on_block(self, forward_batch: Any, hidden: torch.Tensor) -> None:
        from safetensors.torch import save_file

        name = f"{next(self.count):05d}"
        if self.read is None:  # kernels read the pool themselves; nothing has changed it since
            self.read = self.worker.draft_model.states.gather(forward_batch.req_pool_indices)
        save_file({"states": self.read.cpu().contiguous()}, self.folder / f"{name}.safetensors")
        mapping = self.worker.draft_model.states.state_slots
        rows = [
            {
                "rid": request.rid,
                "tokens": self.tokens[request.rid],
                "reached": self.reached[request.rid],
                "state_slot": int(mapping[slot]),
            }
            for request, slot in zip(self.batch.reqs, forward_batch.req_pool_indices.tolist(), strict=True)
        ]
        (self.folder / f"{name}.json").write_text(json.dumps(rows))
        self.read = None

    def on_accept(self, candidates: torch.Tensor, commit_lens: torch.Tensor, predictions: torch.Tensor | None) -> None:
        width = candidates.shape[1]
        for request, row, committed in zip(self.batch.reqs, candidates.tolist(), commit_lens.tolist(), strict=True):
            self.tokens[request.rid].extend(row[:committed])
            self.reached[request.rid] = {1: "none accepted", width: "all accepted"}.get(committed, "some accepted")

    def on_verify(self, features: torch.Tensor, commit_lens: list[int]) -> None:
        pass


def _follow(worker: Any, folder: Path) -> None:
    from sglang_ext.carryover.observer import attach

    follower = _Follower(worker, folder)
    reader = worker.draft_model.state_reader
    stock = reader.reduce

    def reduce(states: torch.Tensor) -> torch.Tensor:
        follower.read = states.clone()
        return stock(states)

    reader.reduce = reduce
    attach(worker, follower)
