"""What tests change in a running engine, as an SGLang plugin of its own: faults, and stricter surroundings.

Neither output nor acceptance shows any of the faults, so each control asks whether the oracle does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

VARIABLE = "SGLANG_EXT_TEST_FAULT"
FAULTS = ("carry_dropped", "embedding_dropped", "positions_shifted", "resets_off")
STALE_LOOKUP = "stale_lookup"  # what a slot's former tenant had verified is looked up
STRICT_ROWS = "strict_rows"  # reading or writing a column past a request's slot row raises, as no GPU kernel would
ROWS_NOT_WIDENED = "rows_not_widened"  # compat.widen_slot_rows does nothing
NO_HOST_LENGTHS = "no_host_lengths"  # the attention backend wants no lengths on the host, like triton and fa3


def environment(folder: Path, *changes: str) -> dict[str, str]:
    """Environment in which SGLang finds this module as a plugin; writes its entry point below ``folder``."""
    metadata = folder / "sglang_ext_faults-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-ext-faults\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaults = tests.engine.faults:register\n")
    root = Path(__file__).resolve().parents[2]
    return {VARIABLE: ",".join(changes), "PYTHONPATH": os.pathsep.join([str(folder), str(root)])}


def register() -> None:
    """Change what ``environment`` was asked for, in every process that loads plugins."""
    for change in os.environ[VARIABLE].split(","):
        CHANGES[change]()


def _drop_carry() -> None:
    from sglang_ext.carryover import rows

    rows.carried_rows = lambda previous, committed, *rest: committed * 0


def _drop_embedding() -> None:
    from sglang_ext.carryover import draft_model, rows, worker

    def unmarked(hidden: Any, commit_lens: Any, width: int, embedding: Any) -> Any:
        return rows.write_all_rows(hidden, commit_lens, width, torch.zeros_like(embedding))

    worker.write_all_rows = draft_model.write_all_rows = unmarked


def _shift_positions() -> None:
    from sglang_ext.carryover import draft_model

    stock = draft_model.CarryoverDSparkModel.write_target_hidden_kv

    def shifted(self: Any, *, positions: Any, commit_lens: Any = None, **call: Any) -> None:
        if commit_lens is not None:  # all rows of a verify step, so the committed ones move too
            positions = positions + 1
        stock(self, positions=positions, commit_lens=commit_lens, **call)

    draft_model.CarryoverDSparkModel.write_target_hidden_kv = shifted  # type: ignore[method-assign]


def _keep_state() -> None:
    from sglang_ext.carryover import rows

    rows.CarryState.forget = lambda self, slots, slots_cpu: None  # type: ignore[method-assign]


def _keep_verified() -> None:
    from sglang_ext.carryover import lookup_serving

    lookup_serving.Lookup.forget = lambda self, slots: None  # type: ignore[method-assign]


def _be_strict_about_rows() -> None:
    from sglang.srt.mem_cache import allocation

    from sglang_ext import cpu
    from sglang_ext.cpu import slots

    cpu.install()  # plugins are called in no order that counts, and a patch wants SGLang's own code
    gather, assign = slots.gather_slots, allocation.assign_req_to_token_pool_func

    def strict_gather(table: Any, rows: Any, start: Any, width: int) -> Any:
        assert int(start.max()) + width <= table.shape[1], "a window reaches past its slot row"
        return gather(table, rows, start, width)

    def strict_assign(rows: Any, table: Any, start: Any, end: Any, *rest: Any) -> None:
        assert int(end.max()) <= table.shape[1], "a reservation reaches past its slot row"
        assign(rows, table, start, end, *rest)

    slots.gather_slots, allocation.assign_req_to_token_pool_func = strict_gather, strict_assign


def _leave_rows_narrow() -> None:
    from sglang_ext import compat

    compat.widen_slot_rows = lambda: None


def _want_no_host_lengths() -> None:
    from sglang_ext.cpu import attention

    attention.TorchAttentionBackend.needs_cpu_seq_lens = False


CHANGES = {
    "carry_dropped": _drop_carry,
    "embedding_dropped": _drop_embedding,
    "positions_shifted": _shift_positions,
    "resets_off": _keep_state,
    STALE_LOOKUP: _keep_verified,
    STRICT_ROWS: _be_strict_about_rows,
    ROWS_NOT_WIDENED: _leave_rows_narrow,
    NO_HOST_LENGTHS: _want_no_host_lengths,
}
