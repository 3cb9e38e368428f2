"""The lookup table: fitted on second drafts by coordinate ascent, and judged on those of other documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_ext.carryover.lookup import LONGEST
from sglang_ext.evaluation.bootstrap import METHOD, Counts, gain
from sglang_ext.training.carryover_trainer import WEIGHTINGS
from sglang_ext.training.lookup_rounds import SecondDrafts

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
"""Bonuses that are tried, in logits."""
FOLDS = 5
_SWEEPS = 10  # over the table, at most; it stands still after two or three


def drafts_with(seen: SecondDrafts, table: Sequence[float]) -> Tensor:
    """Tokens [N, P] with the lookup, as ``carryover.lookup.look_up`` gives them once those before are right."""
    bonus = torch.tensor([0.0, *table])
    best, row = (seen.choice_logits + bonus[seen.entries]).max(-1)
    return torch.where(best > seen.logits, seen.choices.gather(1, row), seen.tokens)


def accepted(seen: SecondDrafts, right: Tensor) -> Tensor:
    """Leading drafts [N] that are ``right`` [N, P], as far as there are recorded tokens."""
    return ((right | ~seen.supervised).long().cumprod(1) * seen.supervised).sum(1)


def weights(seen: SecondDrafts, weighting: str) -> Tensor:
    """How much each second draft [N] counts, float64; ``carryover_trainer.WEIGHTINGS`` has the choices."""
    return 1.0 / seen.committed.double() if weighting == "rounds" else torch.ones(len(seen), dtype=torch.float64)


def fit(seen: SecondDrafts) -> list[float]:
    """The table [LONGEST + 1] from ``GRID`` with which second drafts are longest, rounds counted alike.

    One bonus after the other, those of long matches first, is set to the best of the grid (the lowest of equally good
    ones) until none changes. The same second drafts give the same table.
    """
    weight = weights(seen, "rounds")
    table = [0.0] * (LONGEST + 1)
    for _ in range(_SWEEPS):
        before = list(table)
        for entry in reversed(range(len(table))):
            table[entry] = _best_bonus(seen, table, entry, weight)
        if table == before:
            break
    return table


def _best_bonus(seen: SecondDrafts, table: list[float], entry: int, weight: Tensor) -> float:
    """The best bonus of one entry while the others stay: it decides between its own best choice and all the rest."""
    mine = seen.entries == entry + 1
    raised = seen.choice_logits + torch.tensor([0.0, *table])[seen.entries]
    best, row = raised.masked_fill(mine, -torch.inf).max(-1)
    rest = torch.where(best > seen.logits, seen.choices.gather(1, row), seen.tokens)
    level = torch.maximum(best, seen.logits)
    own, row = seen.choice_logits.masked_fill(~mine, -torch.inf).max(-1)
    choice = seen.choices.gather(1, row)

    def length(bonus: float) -> float:
        right = torch.where(own + bonus > level, choice, rest) == seen.labels
        return float((accepted(seen, right) * weight).sum())

    return max(GRID, key=length)


def cross_fit(seen: SecondDrafts) -> tuple[Tensor, list[list[float]]]:
    """Tokens [N, P] with the lookup, those of each of ``FOLDS`` parts of the documents by a table fitted on the others.

    Also gives the tables.
    """
    drafted, tables = seen.tokens.clone(), []
    for part in range(FOLDS):
        judged = seen.document % FOLDS == part
        tables.append(fit(seen.only(~judged)))
        drafted[judged] = drafts_with(seen.only(judged), tables[-1])
    return drafted, tables


def judge(seen: SecondDrafts, drafted: Tensor, controlled: Tensor) -> dict[str, Any]:
    """Acceptance lengths of second drafts with and without the lookup, by what counts alike, and how much it changes.

    ``drafted`` [N, P] are the tokens with the lookup, ``controlled`` those of the control, which proposes what was
    drafted before (``SecondDrafts.with_stale_drafts``). ``ceiling`` is the gain if one always knew whom to follow: the
    drafter, or which of the choices with an entry.
    """
    alone = seen.tokens == seen.labels
    right, controlled = drafted == seen.labels, controlled == seen.labels
    entered = ((seen.choices[:, None] == seen.labels[:, :, None]) & (seen.entries > 0)).any(-1)
    found: dict[str, Any] = {"second_drafts": len(seen), "documents": len(seen.document.unique()), "interval": METHOD}
    for weighting in WEIGHTINGS:
        weight = weights(seen, weighting)
        reference, method, control, best = (
            _counts(seen, each, weight) for each in (alone, right, controlled, alone | entered)
        )
        value, interval = gain(method, reference, seed=0)
        of_control = gain(control, reference, seed=0)
        found[weighting] = {
            "without": 1 + reference.accepted.sum() / reference.steps.sum(),
            "with": 1 + method.accepted.sum() / method.steps.sum(),
            "gain": value,
            "gain_interval": interval,
            "stale_drafts": {"gain": of_control[0], "gain_interval": of_control[1]},
            "ceiling": gain(best, reference, seed=0)[0],
        }
    reached = _reached(seen, right)
    changed = reached & (drafted != seen.tokens)
    count = max(int(changed.sum()), 1)
    found["positions"] = {
        "reached": int(reached.sum()),
        "changed": int(changed.sum()),
        "changed_to_the_right_token": int((changed & right).sum()) / count,
        "changed_from_the_right_token": int((changed & alone).sum()) / count,
    }
    return found


def _reached(seen: SecondDrafts, right: Tensor) -> Tensor:
    """Positions [N, P] with a recorded token and nothing but right drafts before them."""
    before = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1].long().cumprod(1).bool()], 1)
    return before & seen.supervised


def _counts(seen: SecondDrafts, right: Tensor, weight: Tensor) -> Counts:
    """Accepted drafts of every document's second drafts, each as heavy as its ``weight`` [N]."""
    drafts = right.shape[1]
    tables = torch.zeros(int(seen.document.max()) + 1, drafts + 1, dtype=torch.float64)
    tables.index_put_((seen.document, accepted(seen, right)), weight, accumulate=True)
    return Counts([table for table in tables.tolist() if sum(table)], drafts)
