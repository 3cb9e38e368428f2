"""One draft-verify-draft step per micro-batch (arXiv 2609.14717, section 2.2).

At every anchor the drafter drafts without gradients, the frozen target verifies all branches in one pass, and the
second draft, at the anchor the round leads to, reads the recorded prefix and the round's rejected rows. Only the second
draft has a loss: the base drafter's objective on the recorded continuation.

The round is verified against the recorded text: a draft is accepted while it equals the recorded token. On text that
the target wrote greedily that is greedy verification; on sampled text it keeps the accepted branch and the recorded
prefix one and the same, which the target's own argmax would not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sglang_ext.carryover.rows import rejected_mask
from sglang_ext.training.anchor_states import recurrent_layers
from sglang_ext.training.branches import accepted_drafts, verify_branches
from sglang_ext.training.drafter_models import pack
from sglang_ext.training.drafter_trainer import DrafterTrainer
from sglang_ext.training.hybrid_branches import verify_hybrid_branches
from sglang_ext.training.objectives import position_weights

WEIGHTINGS = ("anchors", "rounds")
"""What counts alike: every anchor's second draft, or every round that serving would begin."""


class CarryoverTrainer(DrafterTrainer):
    """Trains second drafts; ``carry=False`` is the control: the same drafts without the rejected rows.

    ``embedding_start`` is the learned embedding's scale at the first step, in units of the features' RMS. Zero starts
    with rejected rows read as if they were committed, which costs a trained drafter much at first; several times the
    features start with rows that look alike.

    ``weighting`` "anchors" counts every second draft alike. Anchors are drawn evenly, so a round that commits many
    tokens is found from each of its anchors, where serving meets it once; "rounds" makes up for that.
    """

    def __init__(
        self,
        *args: Any,
        gamma: float,
        carry: bool = True,
        embedding_start: float = 0.0,
        weighting: str = WEIGHTINGS[0],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.gamma, self.carry, self.weighting = gamma, carry, weighting
        if carry and embedding_start:
            self._start_embedding(embedding_start)

    @torch.no_grad()
    def _start_embedding(self, scale: float) -> None:
        """Draw the embedding; every process measures the same batch and draws the same numbers."""
        first = self.train_dataset[0]
        features, _ = self.features(first["input_ids"].to(self.args.device))
        written = torch.arange(features.shape[1]) < first["lengths"][:, None]
        rms = features[written.to(features.device)].float().square().mean().sqrt().item()
        embedding = self.model.carryover_embedding
        generator = torch.Generator().manual_seed(self.args.seed)
        embedding.copy_(torch.randn(embedding.shape, generator=generator) * scale * rms)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean loss of a micro-batch over all ranks, each micro-batch of a step with the same weight.

        Which second drafts are supervised is known only once the first drafts are verified, so the step has no common
        denominator in advance, as the base drafter's has.
        """
        outputs = self.run_batch(model, inputs)
        self._add(outputs)
        weight = self.accelerator.reduce(outputs["weight_sum"], "sum") * self.args.gradient_accumulation_steps
        loss = outputs["loss"] * self.accelerator.num_processes / weight.clamp(min=1e-9)
        return (loss, outputs) if return_outputs else loss

    def run_batch(self, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Features, first drafts, verification, then the second drafts' loss and metric sums."""
        drafter = self.accelerator.unwrap_model(model)
        with torch.autocast(self.args.device.type, dtype=torch.bfloat16, enabled=self.args.bf16):
            # A recurrent layer keeps no rows: its branches start from states, which a pass of their own captures.
            recorded_rows = None if recurrent_layers(self.features.model) else DynamicCache()
            features, last_hidden = self.features(inputs["input_ids"], past_key_values=recorded_rows)
            packed = pack(inputs, features, last_hidden)
            recorded = {name: value for name, value in packed.items() if name not in ("labels", "weights")}
            proposals = drafter.propose(**recorded)
            if self.carry:
                second = second_drafts(self.features, inputs, proposals, self.gamma, recorded_rows, self.weighting)
            else:  # where a round leads to is known without the target's rows
                blocks = second_blocks(inputs, proposals, self.gamma, self.weighting)
                second = {name: blocks[name] for name in ("anchors", "labels", "weights")}
        outputs: dict[str, Tensor] = model(**{**packed, **second})
        return outputs


def second_drafts(
    features: Any,
    inputs: dict[str, Tensor],
    proposals: Tensor,
    gamma: float,
    recorded_rows: DynamicCache | None,
    weighting: str = WEIGHTINGS[0],
) -> dict[str, Tensor]:
    """What the second draft of every anchor [A] reads and is supervised on.

    ``features`` is the target (:class:`TargetFeatures`). Returns what :func:`second_blocks` does and, as
    ``carried_features``, what :func:`carried_features` does.
    """
    carried = carried_features(features, inputs, proposals, recorded_rows)
    return {**second_blocks(inputs, proposals, gamma, weighting), "carried_features": carried}


def carried_features(
    features: Any, inputs: dict[str, Tensor], proposals: Tensor, recorded_rows: DynamicCache | None
) -> Tensor:
    """The target's features [A, P, K*H] of the first drafts [A, P], each behind its anchor and the drafts before it."""
    return verified_rows(features, inputs, proposals, recorded_rows)[0][:, 1:]


def verified_rows(
    features: Any, inputs: dict[str, Tensor], proposals: Tensor, recorded_rows: DynamicCache | None
) -> tuple[Tensor, Tensor]:
    """The target's features [A, P + 1, K*H] and last hidden states of every anchor [A] and its first drafts [A, P].

    ``recorded_rows`` holds the target's keys and values of the batch; None for a target with recurrent layers.
    """
    rows, drafts = len(inputs["input_ids"]), proposals.shape[1]
    start, _ = _starts(inputs)
    each = (features, inputs["input_ids"], start.view(rows, -1), proposals.view(rows, -1, drafts))
    verified = verify_hybrid_branches(*each) if recorded_rows is None else verify_branches(*each, recorded_rows)
    return verified[0].flatten(0, 1), verified[1].flatten(0, 1)


def second_blocks(
    inputs: dict[str, Tensor], proposals: Tensor, gamma: float, weighting: str = WEIGHTINGS[0]
) -> dict[str, Tensor]:
    """Where the second draft of every anchor [A] starts, what it is supervised on, and which rows it is carried.

    Args:
        inputs: a batch of :class:`AnchorBatches`.
        proposals: first drafts [A, P].
        gamma: decay of the position weights.
        weighting: one of ``WEIGHTINGS``.

    Returns:
        ``anchors`` [A] (packed index of the token the round ends with), ``labels`` and ``weights`` [A, P],
        ``carried_positions`` [A, P] and ``carried`` [A, P] bool: rejected rows, all False after full acceptance.
    """
    ids, lengths, valid = inputs["input_ids"], inputs["lengths"], inputs["valid"]
    width, drafts = ids.shape[1], proposals.shape[1]
    start, row = _starts(inputs)

    def recorded(first: Tensor) -> tuple[Tensor, Tensor]:
        """Recorded tokens [A, P] from positions ``first`` [A] on, and which of them exist."""
        position = first[:, None] + torch.arange(drafts, device=ids.device)
        exists = position < lengths[row][:, None]
        return ids[row[:, None], position.clamp(max=width - 1)], exists

    continuation, exists = recorded(start + 1)
    accepted = accepted_drafts(torch.where(exists, proposals, -1), continuation)
    anchor = start + accepted + 1
    labels, exists = recorded(anchor + 1)
    usable = valid & (anchor < lengths[row])
    weights = (exists & usable[:, None]) * position_weights(drafts, gamma).to(ids.device)
    if weighting == "rounds":
        weights = weights / (accepted[:, None] + 1)
    return {
        "anchors": torch.where(usable, anchor + row * width, 0),
        "labels": labels,
        "weights": weights,
        "carried_positions": start[:, None] + 1 + torch.arange(drafts, device=ids.device),
        "carried": rejected_mask(accepted + 1, drafts + 1)[:, 1:] & usable[:, None],
    }


def _starts(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Position of every anchor [A] in its row, and the row; unused anchors stand at the start."""
    rows, width = inputs["input_ids"].shape
    row = torch.arange(rows, device=inputs["anchors"].device).repeat_interleave(inputs["valid"].shape[0] // rows)
    return torch.where(inputs["valid"], inputs["anchors"] - row * width, 0), row
