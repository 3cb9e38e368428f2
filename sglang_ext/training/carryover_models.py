"""Drafters that also read the rejected rows of a round: the second pass of draft-verify-draft training.

The rejected rows join the packed sequence as more context rows, with the learned embedding added and at their original
positions, so the drafter's own projections serve them; only the mask knows that each belongs to one block.
"""

from __future__ import annotations

from typing import Any

import torch
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from torch import Tensor, nn
from torch.nn.attention.flex_attention import or_masks

from sglang_ext.training.drafter_models import AnchoredDFlash, AnchoredDSpark


class _CarryingBlocks:
    """Mixin over the anchored drafters: one learned vector [K*H], and blocks that see carried rows."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)  # type: ignore[call-arg]
        self.carryover_embedding = nn.Parameter(torch.zeros(self.fc.in_features))  # type: ignore[attr-defined]
        self._carried: Tensor | None = None

    def forward(
        self,
        labels: Tensor,
        weights: Tensor,
        carried_features: Tensor | None = None,
        carried_positions: Tensor | None = None,
        carried: Tensor | None = None,
        **packed: Tensor,
    ) -> dict[str, Tensor]:
        """The objective's sums; with carried rows [A, C, K*H], at positions [A, C], visible where ``carried`` [A, C].

        Which of a round's rows are carried is the rule of ``carryover.rows.rejected_mask``.
        """
        if carried_features is None or carried_positions is None or carried is None:
            return super().forward(labels, weights, **packed)  # type: ignore[misc]
        rows = carried_features.shape[0] * carried_features.shape[1]
        marked = carried_features + self.carryover_embedding
        extended = {
            **packed,
            "hidden_states": _append(packed["hidden_states"], marked.view(1, rows, -1)),
            "position_ids": _append(packed["position_ids"], carried_positions.view(1, rows)),
            "document_ids": _append(packed["document_ids"], carried_positions.new_full((1, rows), -1)),
            "input_ids": _append(packed["input_ids"], carried_positions.new_zeros(1, rows)),
            "last_hidden": _append(
                packed["last_hidden"], packed["last_hidden"].new_zeros(1, rows, packed["last_hidden"].shape[-1])
            ),
        }
        self._carried = carried
        try:
            return super().forward(labels, weights, **extended)  # type: ignore[misc]
        finally:
            self._carried = None

    def attention_masks(self, document_ids: Tensor, anchors: Tensor) -> tuple[Any, Any, Tensor, Tensor]:
        """The base's masks; with carried rows at the end of the sequence, block j also sees its own visible ones."""
        if self._carried is None:
            return super().attention_masks(document_ids, anchors)  # type: ignore[misc]
        model: Any = self
        total, size = document_ids.shape[1], model.block_size
        visible = self._carried.reshape(-1)
        each, first = self._carried.shape[1], total - visible.shape[0]
        base, queries, keys = create_anchor_block_mask_mod(
            document_ids=document_ids.squeeze(0),
            total_seq_len=total,
            anchor_positions=anchors,
            block_size=size,
        )

        def own_carried_row(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            row = torch.clamp(key - first, 0, visible.shape[0] - 1)
            inside = (key >= first) & (key < total)
            return inside & (row // each == query // size) & visible[row]

        mask = _create(model, or_masks(base, own_carried_row), queries, keys, document_ids.device)
        return mask, None, anchors, torch.ones_like(anchors, dtype=torch.bool)

    def propose(self, **packed: Tensor) -> Tensor:
        """Greedy drafts [A, P] of every anchor, without gradients and with nothing carried."""
        raise NotImplementedError


class CarryingDFlash(_CarryingBlocks, AnchoredDFlash):
    """DFlash with carried rows."""

    @torch.no_grad()
    def propose(self, **packed: Tensor) -> Tensor:
        """The best token of every row but the anchor's."""
        _, logits = self.draft_blocks(**packed)
        return logits[:, 1:].argmax(-1)


class CarryingDSpark(_CarryingBlocks, AnchoredDSpark):
    """DSpark with carried rows."""

    @torch.no_grad()
    def propose(self, **packed: Tensor) -> Tensor:
        """The Markov chain's best tokens, each row biased by the token drafted before it."""
        hidden, logits = self.draft_blocks(**packed)
        previous = packed["input_ids"][0, packed["anchors"]]
        drafts = []
        for row in range(logits.shape[1]):
            bias = self.markov_head.block_bias(prev_token_ids=previous[:, None], hidden_states=hidden[:, row : row + 1])
            previous = (logits[:, row] + bias[:, 0]).argmax(-1)
            drafts.append(previous)
        return torch.stack(drafts, dim=1)


@torch.compiler.disable
def _create(model: Any, mask_mod: Any, queries: int, keys: int, device: Any) -> Any:
    return model._create_mask_fn(mask_mod, B=None, H=None, Q_LEN=queries, KV_LEN=keys, device=device)


def _append(sequence: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([sequence, rows.to(sequence.dtype)], dim=1)
