"""Held-out loss of a target by category of text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel,
    documents: Iterable[tuple[str, np.ndarray]],
    *,
    max_length: int = 1024,
    batch_tokens: int = 65536,
) -> dict[str, dict[str, float]]:
    """Mean loss in nats per token over (category, token ids) pairs, for each category and for all ("overall").

    Every token but the first of a document counts; documents are cut at ``max_length``. Right padding needs no mask:
    both architectures are causal.
    """
    ordered = sorted(((c, ids[:max_length]) for c, ids in documents if len(ids) > 1), key=lambda entry: len(entry[1]))
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    device = next(model.parameters()).device
    start = 0
    while start < len(ordered):
        # Sorted by length: as many documents as fit at the width of the longest of the batch.
        stop = start + 1
        while stop < len(ordered) and (stop + 1 - start) * len(ordered[stop][1]) <= batch_tokens:
            stop += 1
        batch = ordered[start:stop]
        width = len(batch[-1][1])
        ids = np.zeros((len(batch), width), np.int64)
        for row, (_, tokens) in enumerate(batch):
            ids[row, : len(tokens)] = tokens
        inputs = torch.from_numpy(ids).to(device)
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1].float()
        losses = functional.cross_entropy(logits.transpose(1, 2), inputs[:, 1:], reduction="none").cpu()
        for row, (category, tokens) in enumerate(batch):
            sums[category] += float(losses[row, : len(tokens) - 1].double().sum())
            counts[category] += len(tokens) - 1
        start = stop
    if not counts:
        return {}
    sums["overall"], counts["overall"] = math.fsum(sums.values()), sum(counts.values())
    return {
        name: {"loss": sums[name] / count, "perplexity": math.exp(sums[name] / count), "tokens": count}
        for name, count in counts.items()
    }
