"""A plugin that writes down every draft block the server computes: positions and hidden states before the head."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

VARIABLE = "SGLANG_EXT_TEST_DRAFT_DUMP"


def environment(folder: Path) -> dict[str, str]:
    """Environment in which SGLang finds this module as a plugin and dumps into ``folder / "blocks"``."""
    metadata = folder / "sglang_ext_draft_dump-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-ext-draft-dump\nVersion: 1\n")
    entry = "[sglang.srt.plugins]\ndraft_dump = tests.engine.draft_dump:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    blocks = folder / "blocks"
    blocks.mkdir()
    root = Path(__file__).resolve().parents[2]
    return {VARIABLE: str(blocks), "PYTHONPATH": os.pathsep.join([str(folder), str(root)])}


def register() -> None:
    """Wrap the forward pass that both draft models share (srt/models/dflash.py:848)."""
    from safetensors.torch import save_file
    from sglang.srt.models.dflash import DFlashDraftModel

    stock, count = DFlashDraftModel.forward, itertools.count()

    def forward(self: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, input_ids, positions, *args, **kwargs)
        tensors = {"positions": positions.clone(), "hidden": output.hidden_states.clone()}
        save_file(tensors, Path(os.environ[VARIABLE]) / f"{next(count):05d}.safetensors")
        return output

    DFlashDraftModel.forward = forward
