"""The published training objectives of DFlash and DSpark, as sums to be divided by one global weight sum.

Every term is a weighted sum over drafted tokens; dividing by the sum of the weights over the whole optimizer step (all
micro-batches, all ranks) gives the published normalisation, and makes accumulated and parallel steps equal one big one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from speculators.models.metrics import compute_accepted_length_counts
from torch import Tensor

# DSpark's mixture (arXiv 2607.05147): cross-entropy, L1 between the distributions, confidence.
DSPARK_CE, DSPARK_L1, DSPARK_CONFIDENCE = 0.1, 0.9, 1.0


def default_gamma(block_size: int) -> float:
    """Decay length of DFlash's position weights by block size: 7 for 16, 5 for 10, 4 for 8 (and below)."""
    return 7.0 if block_size >= 16 else 5.0 if block_size >= 10 else 4.0


def position_weights(drafts: int, gamma: float) -> Tensor:
    """Weights [drafts] of the drafted tokens: ``exp(-j / gamma)`` for the j-th draft, counted from 0.

    In both papers the first draft weighs 1: DFlash counts block rows from the unused anchor row, exp(-(k - 1) / gamma),
    DSpark from the anchor row that drafts, exp(-k / gamma).
    """
    return torch.exp(-torch.arange(drafts, dtype=torch.float32) / gamma)


def dflash_objective(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted cross-entropy of the recorded tokens.

    ``logits`` [A, S, V], ``labels`` [A, S] token ids, ``weights`` [A, S] (0: not supervised). Returns the weighted sum
    and the metrics of :func:`greedy_metrics`.
    """
    ce = _cross_entropy(logits, labels)
    total = (ce * weights).sum()
    return total, {"ce_sum": total.detach(), **greedy_metrics(logits, labels, weights)}


# Compiled for CUDA by torch 2.11 with Triton 3.6, two softmaxes over one tensor come out wrong: the L1 sum of a batch
# was 0.4 % off, gradients up to 90 %, and drafters slowly got worse. The cross-entropy alone compiles right.
@torch.compiler.disable
def dspark_objective(
    logits: Tensor, target_logits: Tensor, confidence: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """DSpark's three terms: 0.1 CE(recorded token) + 0.9 |p_draft - p_target|_1 + 1.0 BCE(confidence, overlap).

    ``logits`` [A, S, V] (with the Markov bias), ``target_logits`` [A, S, V], ``confidence`` [A, S] (logits), ``labels``
    and ``weights`` [A, S]. The L1 is the full sum, not half of it; the confidence target, the overlap
    ``1 - L1 / 2``, is detached. Returns the weighted sum and metrics, among them the sum over blocks of the expected
    acceptance length under rejection sampling, ``1 + sum_j prod_{i <= j} overlap_i``.
    """
    ce = _cross_entropy(logits, labels)
    target = target_logits.detach().float().softmax(-1)
    l1 = (logits.float().softmax(-1) - target).abs().sum(-1)
    overlap = (1 - l1.detach() / 2).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(confidence.float(), overlap, reduction="none")
    total = ((DSPARK_CE * ce + DSPARK_L1 * l1 + DSPARK_CONFIDENCE * bce) * weights).sum()
    with torch.no_grad():
        supervised = (weights > 0).float()
        expected = ((overlap * supervised).cumprod(-1).sum(-1) + 1) * supervised[:, 0]
        metrics = {
            "ce_sum": (ce * weights).sum(),
            "l1_sum": (l1 * weights).sum(),
            "bce_sum": (bce * weights).sum(),
            "expected_sum": expected.sum(),
        }
    return total, {**metrics, **greedy_metrics(logits, labels, weights)}


@torch.no_grad()
def greedy_metrics(logits: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Sums for the acceptance length of argmax drafts on the recorded text, bonus token included.

    ``accepted_sum / blocks`` is what serving accepts at these anchors when the target writes this very text. (A DSpark
    draft here follows the recorded previous token, which is its own choice as long as the block is still accepted.)
    """
    supervised = weights > 0
    accepted, blocks = compute_accepted_length_counts(logits.argmax(-1) == labels, supervised)
    return {"accepted_sum": accepted, "blocks": blocks, "weight_sum": weights.sum()}


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
