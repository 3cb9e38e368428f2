"""A plugin that writes down every round of a DFLASH or DSPARK worker, stock ones included, also under CUDA graphs."""

from __future__ import annotations

import functools
import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch

VARIABLE = "SGLANG_EXT_TEST_ROUNDS_DUMP"


def environment(folder: Path) -> dict[str, str]:
    """Environment in which SGLang finds this module as a plugin and dumps into ``folder / "rounds_dump"``."""
    metadata = folder / "sglang_ext_rounds_dump-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-ext-rounds-dump\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nrounds_dump = tests.gpu.rounds_dump:register\n")
    rounds = folder / "rounds_dump"
    rounds.mkdir()
    root = Path(__file__).resolve().parents[2]
    return {VARIABLE: str(rounds), "PYTHONPATH": os.pathsep.join([str(folder), str(root)])}


def register() -> None:
    """Attach to every worker once its pools exist."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

    for worker in (DFlashWorkerV2, DSparkWorkerV2):
        _attach_after(worker)


def _attach_after(worker: Any) -> None:
    stock = worker.alloc_memory_pool

    @functools.wraps(stock)  # the plugin asks for its signature
    def alloc_memory_pool(self: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        from sglang_ext.carryover.observer import attach

        stock(self, *args, **kwargs)
        if get_parallel().tp_rank == 0:
            attach(self, _Writer(Path(os.environ[VARIABLE])))

    worker.alloc_memory_pool = alloc_memory_pool


class _Writer:
    """One line per request and round, and one file of hidden states per round."""

    batch: Any = None

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, itertools.count()
        self.log = (folder / "rounds.jsonl").open("a")
        self.rows: list[dict[str, Any]] = []

    def on_extend(self, features: torch.Tensor, positions: list[int]) -> None:
        pass

    def on_block(self, forward_batch: Any, hidden: torch.Tensor) -> None:
        from safetensors.torch import save_file

        bs = forward_batch.batch_size
        first = forward_batch.positions.view(bs, -1)[:, 0].tolist()
        lengths = forward_batch.seq_lens.tolist()
        file = f"{next(self.count):05d}.safetensors"
        save_file({"hidden": hidden.view(bs, -1, hidden.shape[-1]).cpu().contiguous()}, self.folder / file)
        self.rows = [
            {"rid": request.rid, "length": length, "carried": seen - length, "file": file, "row": row}
            for row, (request, length, seen) in enumerate(zip(self.batch.reqs, first, lengths, strict=True))
        ]

    def on_accept(self, candidates: torch.Tensor, commit_lens: torch.Tensor, predictions: torch.Tensor | None) -> None:
        for row, ids, committed in zip(self.rows, candidates.tolist(), commit_lens.tolist(), strict=True):
            self.log.write(json.dumps({**row, "candidates": ids, "committed": committed}) + "\n")
        self.log.flush()

    def on_verify(self, features: torch.Tensor, commit_lens: list[int]) -> None:
        pass
