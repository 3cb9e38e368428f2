"""Record a running engine's rounds, so that drafters can be compared on them afterwards.

Set ``SGLANG_EXT_ROUNDS=DIR``. ``rounds.jsonl`` gets one line per request and step: ``kind`` (``extend`` or ``round``),
``rid``, ``row`` and ``rows`` (where its target features lie); an ``extend`` its ``start`` (position of the first row),
a ``round`` its ``committed`` rows, ``candidates`` and the target's first choices behind them, ``predictions``.
``features.f32`` holds the features: rows of float32, one after another. ``sglang_ext.evaluation.rounds`` reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

ROUNDS, FEATURES = "rounds.jsonl", "features.f32"


class Recorder:
    """An ``observer.Observer`` that writes down what it sees; both files are whole after every step."""

    def __init__(self, folder: Path, verify_width: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.verify_width = verify_width
        self.batch: Any = None
        self._log = (folder / ROUNDS).open("a", encoding="utf-8")
        self._features = (folder / FEATURES).open("ab")
        self._row = 0
        self._candidates: list[list[int]] = []
        self._predictions: list[list[int]] | None = None

    def on_extend(self, features: torch.Tensor, positions: list[int]) -> None:
        """One line for each request of a prefill."""
        at = 0
        for index, request in enumerate(self.batch.reqs):
            count = int(self.batch.extend_lens[index])
            if count:
                line = {"kind": "extend", "rid": request.rid, "start": positions[at]}
                self._write(line, features[at : at + count])
            at += count
        self._flush()

    def on_block(self, forward_batch: Any, hidden: torch.Tensor) -> None:
        """The block itself is computed again from what is recorded."""

    def on_accept(self, candidates: torch.Tensor, commit_lens: torch.Tensor, predictions: torch.Tensor | None) -> None:
        """Keep the round's tokens until its features come."""
        self._candidates = candidates.tolist()
        self._predictions = None if predictions is None else predictions.tolist()

    def on_verify(self, features: torch.Tensor, commit_lens: list[int]) -> None:
        """One line for each request of a verify step."""
        rows = features.view(-1, self.verify_width, features.shape[-1])
        for index, request in enumerate(self.batch.reqs):
            line = {
                "kind": "round",
                "rid": request.rid,
                "committed": commit_lens[index],
                "candidates": self._candidates[index],
                "predictions": None if self._predictions is None else self._predictions[index],
            }
            self._write(line, rows[index])
        self._flush()

    def _write(self, line: dict[str, Any], features: torch.Tensor) -> None:
        self._features.write(features.contiguous().numpy().tobytes())
        self._log.write(json.dumps({**line, "row": self._row, "rows": len(features)}) + "\n")
        self._row += len(features)

    def _flush(self) -> None:
        self._features.flush()
        self._log.flush()
