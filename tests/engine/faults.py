"""Faults that the oracle must notice: a plugin of its own, loaded only by the negative controls.

Neither output nor acceptance shows any of them, so each control asks whether the oracle does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

VARIABLE = "SGLANG_EXT_TEST_FAULT"
FAULTS = ("carry_dropped", "embedding_dropped", "positions_shifted", "resets_off")


def environment(fault: str, folder: Path) -> dict[str, str]:
    """Environment in which SGLang finds this module as a plugin; writes its entry point below ``folder``."""
    metadata = folder / "sglang_ext_faults-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-ext-faults\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaults = tests.engine.faults:register\n")
    root = Path(__file__).resolve().parents[2]
    return {VARIABLE: fault, "PYTHONPATH": os.pathsep.join([str(folder), str(root)])}


def register() -> None:
    """Break one thing in every process that loads plugins."""
    from sglang_ext.carryover import draft_model, rows, worker

    fault = os.environ[VARIABLE]
    if fault == "carry_dropped":
        worker.carried_rows = lambda previous, committed, *rest: torch.zeros_like(committed)
    elif fault == "embedding_dropped":

        def unmarked(hidden: Any, commit_lens: Any, width: int, embedding: Any) -> Any:
            return rows.write_all_rows(hidden, commit_lens, width, torch.zeros_like(embedding))

        worker.write_all_rows = draft_model.write_all_rows = unmarked
    elif fault == "positions_shifted":
        stock = draft_model.CarryoverDSparkModel.write_target_hidden_kv

        def shifted(self: Any, *, positions: Any, commit_lens: Any = None, **call: Any) -> None:
            if commit_lens is not None:  # all rows of a verify step, so the committed ones move too
                positions = positions + 1
            stock(self, positions=positions, commit_lens=commit_lens, **call)

        draft_model.CarryoverDSparkModel.write_target_hidden_kv = shifted  # type: ignore[method-assign]
    elif fault == "resets_off":
        rows.CarryState.forget = lambda self, slots, slots_cpu: None  # type: ignore[method-assign]
    else:
        raise ValueError(f"unknown fault {fault}")
