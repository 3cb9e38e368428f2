"""Recorded rounds (``carryover.recorder``) put together into requests, and what their rejected rows say.

Carried rows and re-convergence are properties of the rounds themselves; no drafter is needed for them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_ext.carryover.recorder import FEATURES, ROUNDS


@dataclass(frozen=True)
class Round:
    """One decode round of one request; row j of its verify step stands at position ``start + j``."""

    start: int  # committed tokens before it, and the anchor's position
    committed: int  # rows it committed, the anchor's included
    features: torch.Tensor  # [W, D] of all verified rows
    predictions: tuple[int, ...] | None  # [W] the target's first choice behind each row
    carried: int  # rejected rows of the round before, as many as its draft read

    @property
    def rejected(self) -> range:
        """Row numbers of the rejected rows."""
        return range(self.committed, len(self.features))


@dataclass
class Request:
    """One recorded request: committed rows' features, and its rounds in their order."""

    category: str
    tokens: tuple[int, ...]  # prompt and answer
    features: torch.Tensor  # [positions, D]
    rounds: list[Round]


@dataclass
class _Rows:
    rows: list[torch.Tensor] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    rejected: int = 0


def read(
    folder: Path, answers: Mapping[str, tuple[str, Sequence[int]]], width: int, limit: int | None = None
) -> list[Request]:
    """Requests of a recording.

    Args:
        folder: where the recorder wrote.
        answers: for every request id its category and its tokens, the prompt's and the answer's.
        width: D, values of one row of features.
        limit: at most this many rejected rows were carried.

    A round that began at the end of its answer (the scheduler runs one ahead) is left out. Within a block of the
    end of the context a server carries fewer rows than were rejected, for want of room; that is not followed here.
    """
    features = torch.from_numpy(np.fromfile(folder / FEATURES, dtype=np.float32).reshape(-1, width))
    found: dict[str, _Rows] = {}
    for text in (folder / ROUNDS).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        rows = features[line["row"] : line["row"] + line["rows"]]
        request = found.setdefault(line["rid"], _Rows())
        if line["kind"] == "extend":
            del request.rows[line["start"] :]
            request.rows += rows
            # A request that was retracted computes its rows again; a round that it lost comes again too.
            request.rounds = [r for r in request.rounds if r.start < len(request.rows)]
            request.rejected = 0
            continue
        carried = request.rejected if limit is None else min(limit, request.rejected)
        predictions = line["predictions"]
        request.rounds.append(
            Round(
                len(request.rows),
                line["committed"],
                rows,
                None if predictions is None else tuple(predictions),
                carried,
            )
        )
        request.rows += rows[: line["committed"]]
        request.rejected = len(rows) - line["committed"]
    requests = []
    for rid, (category, tokens) in answers.items():
        if rid in found:
            rounds = [r for r in found[rid].rounds if r.start + 1 < len(tokens)]
            requests.append(Request(category, tuple(tokens), torch.stack(found[rid].rows), rounds))
    return requests


def reconverged(predictions: Sequence[int], round_start: int, rejected: Sequence[int], tokens: Sequence[int]) -> int:
    """Rejected rows behind which the target's first choice is a token that was committed after all.

    Row j predicts position ``round_start + j + 1``; the committed token there or at a neighbouring position counts
    (paper section 5.2: a tolerance of one position). Rows that predict past the answer's end do not.
    """
    count = 0
    for row in rejected:
        position = round_start + row + 1
        if position < len(tokens) and predictions[row] in tokens[position - 1 : position + 2]:
            count += 1
    return count


def carry_figures(requests: Sequence[Request]) -> dict[str, Any]:
    """Carried rows and re-convergence over a set of requests; None where there is nothing to divide by."""
    rounds = [(request, r) for request in requests for r in request.rounds]
    rejected = [(request, r) for request, r in rounds if r.rejected]
    counts = Counter(r.carried for _, r in rounds)
    seen = [
        reconverged(r.predictions, r.start, r.rejected, request.tokens)
        for request, r in rejected
        if r.predictions is not None
    ]
    return {
        "requests": len(requests),
        "rounds": len(rounds),
        "carried_rows_per_round": sum(r.carried for _, r in rounds) / len(rounds) if rounds else None,
        "rounds_by_carried_rows": {str(rows): counts[rows] for rows in sorted(counts)},
        "rejected_rounds": len(rejected),
        "rejected_rows_per_rejected_round": sum(len(r.rejected) for _, r in rejected) / len(rejected)
        if rejected
        else None,
        "reconverged_per_rejected_round": sum(seen) / len(seen) if seen else None,
    }


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's r; None for fewer than three pairs or a constant."""
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return None
    return float(np.corrcoef(x, y)[0, 1])
