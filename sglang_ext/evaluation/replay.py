"""Matched-anchor recall: several drafters on the same recorded rounds (paper section 5.1 and appendix B.2).

Every drafter sees the same committed tokens and the same target features; only ``on`` also reads the rejected rows of
the round before. A round counts at position k where both ``on`` and the reference are right at every position before
k; so the token before k, which a Markov head reads, is the same for all. Drafts are computed by the dense reference
drafter (``carryover.reference``), not by the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_ext.carryover.reference import ReferenceDrafter
from sglang_ext.checkpoints import DraftContract
from sglang_ext.evaluation.bootstrap import Array, interval, resample
from sglang_ext.evaluation.rounds import Request, Round

RANKS = (1, 16)
KeyValues = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Variant:
    """One way to draft the recorded rounds."""

    name: str
    drafter: ReferenceDrafter
    contract: DraftContract
    carry: bool = False


def rank(logits: torch.Tensor, tokens: Sequence[int]) -> list[int]:
    """For each row of logits [n, vocabulary] how many tokens score higher than the given one; 0: it is first."""
    wanted = torch.tensor(list(tokens), device=logits.device)[:, None]
    return (logits > logits.gather(1, wanted)).sum(1).tolist()


@torch.inference_mode()
def replay(requests: Sequence[Request], variants: Sequence[Variant], done: Callable[[], None]) -> list[Array]:
    """Rank of the committed token in each variant's drafts.

    Args:
        variants: their drafters read the features that were recorded.
        done: called after each request.

    Returns:
        Per request an array [rounds, variants, drafts], NaN past the answer's end and past a variant's own drafts.
    """
    drafts = max(variant.contract.drafts for variant in variants)
    results = []
    for request in requests:
        ranks = np.full((len(request.rounds), len(variants), drafts), np.nan)
        contexts: dict[int, KeyValues] = {}  # of all committed rows, once per drafter
        for column, variant in enumerate(variants):
            if id(variant.drafter) not in contexts:
                contexts[id(variant.drafter)] = variant.drafter.context(*_placed(variant, request.features, 0))
            before = None
            for row, current in enumerate(request.rounds):
                context = [(k[: current.start], v[: current.start]) for k, v in contexts[id(variant.drafter)]]
                if variant.carry and before is not None and current.carried:
                    context = _joined(context, _carried(variant, before, current.carried))
                found = _ranks(variant, context, request.tokens, current.start)
                ranks[row, column, : len(found)] = found
                before = current
        results.append(ranks)
        done()
    return results


def _placed(variant: Variant, features: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = variant.drafter.embed.device
    return features.to(device), torch.arange(start, start + len(features), device=device)


def _carried(variant: Variant, before: Round, rows: int) -> KeyValues:
    chosen = before.rejected[:rows]
    features, positions = _placed(variant, before.features[chosen.start : chosen.stop], before.start + chosen.start)
    embedding = variant.drafter.embedding
    assert embedding is not None
    return variant.drafter.context(features + embedding, positions)


def _joined(context: KeyValues, more: KeyValues) -> KeyValues:
    return [
        (torch.cat([key, key_more]), torch.cat([value, value_more]))
        for (key, value), (key_more, value_more) in zip(context, more, strict=True)
    ]


def _ranks(variant: Variant, context: KeyValues, tokens: Sequence[int], start: int) -> list[int]:
    contract, device = variant.contract, variant.drafter.embed.device
    width = contract.query_width
    block = torch.full((width,), contract.mask_token_id, device=device)
    block[0] = tokens[start]
    hidden = variant.drafter.block(context, block, torch.arange(start, start + width, device=device))
    wanted = tokens[start + 1 : start + 1 + contract.drafts]
    return rank(variant.drafter.logits(hidden, list(tokens[start : start + len(wanted)])), wanted)


def recall(results: Sequence[Array], names: Sequence[str], reference: str, seed: int) -> dict[str, Any]:
    """Recall by position and over all, per variant, and what the carry adds.

    Args:
        results: what ``replay`` returned.
        names: the variants'; ``on`` and ``off`` are among them.
        reference: the variant that, with ``on``, decides which rounds count at a position.

    Returns:
        ``rounds`` that count at each position; per variant ``recall_at_1`` and ``recall_at_16`` by position, and over
        all positions in ``all``; ``on_minus_off`` and ``on_minus_REFERENCE`` as differences with their intervals.
    """
    on, other = names.index("on"), names.index(reference)
    right = [(ranks[:, (on, other)] == 0).all(1) for ranks in results]
    counted = [
        np.concatenate([np.ones((len(r), 1), bool), np.logical_and.accumulate(r, 1)[:, :-1]], 1)
        & np.isfinite(ranks).all(1)
        for r, ranks in zip(right, results, strict=True)
    ]
    rounds = np.array([c.sum(0) for c in counted], float)  # [requests, drafts]
    pooled = _with_total(rounds)
    document: dict[str, Any] = {"reference": reference, "rounds": rounds.sum(0).astype(int).tolist(), "variants": {}}
    draws = resample(len(results), seed) if len(results) > 1 else None
    for name in names:
        document["variants"][name] = {}
    for limit in RANKS:
        key = f"recall_at_{limit}"
        hits = [
            _with_total(
                np.array([((r[:, v] < limit) & c).sum(0) for r, c in zip(results, counted, strict=True)], float)
            )
            for v in range(len(names))
        ]
        for name, table in zip(names, hits, strict=True):
            shares = _ratio(table.sum(0), pooled.sum(0))
            document["variants"][name][key] = {"by_position": shares[:-1], "all": shares[-1]}
        for versus in dict.fromkeys(("off", reference)):
            difference = hits[on] - hits[names.index(versus)]
            shares = _ratio(difference.sum(0), pooled.sum(0))
            spans: list[Any] = [None] * len(shares)
            if draws is not None:
                with np.errstate(invalid="ignore", divide="ignore"):
                    spans = [interval(column) for column in (draws @ difference / (draws @ pooled)).T]
            document.setdefault(f"on_minus_{versus}", {})[key] = {
                "by_position": shares[:-1],
                "intervals": spans[:-1],
                "all": shares[-1],
                "interval": spans[-1],
            }
    return document


def _with_total(table: Array) -> Array:
    """A table [requests, positions] with the sum over positions as one column more."""
    return np.concatenate([table, table.sum(1, keepdims=True)], 1)


def _ratio(part: Array, whole: Array) -> list[float | None]:
    return [float(p / w) if w else None for p, w in zip(part, whole, strict=True)]
