"""Drafters that also read the rejected rows of a round: the second pass of draft-verify-draft training.

The rejected rows join the packed sequence as more context rows, with the learned embedding added and at their original
positions, so the drafter's own projections serve them; only the mask knows that each belongs to one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sglang_ext.training.drafter_models import AnchoredDFlash, AnchoredDSpark
from sglang_ext.training.masks import BlockRule, with_own_rows

DISTINCTIONS = ("embedding", "none", "projection")
"""The paper's ablation: a learned vector (what is served), no distinction, or a projection of their own."""


class _CarryingBlocks:
    """Mixin over the anchored drafters: one learned vector [K*H], and blocks that see carried rows."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)  # type: ignore[call-arg]
        self.carryover_embedding = nn.Parameter(torch.zeros(self.fc.in_features))  # type: ignore[attr-defined]
        self.carryover_projection: nn.Module = nn.Identity()
        self._carried: Tensor | None = None

    def distinguish(self, distinction: str) -> None:
        """How carried rows are told from committed ones; ``DISTINCTIONS`` has the choices.

        A projection [K*H, K*H] starts as the identity, the embedding as zero: either starts as no distinction.
        """
        self.carryover_embedding.requires_grad_(distinction == "embedding")
        if distinction == "projection":
            width = self.carryover_embedding.shape[0]
            self.carryover_projection = nn.Linear(width, width, bias=False)
            nn.init.eye_(self.carryover_projection.weight)

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
        with self._rows_appended(packed, carried_features, carried_positions, carried) as extended:
            return super().forward(labels, weights, **extended)  # type: ignore[misc]

    @torch.no_grad()
    def draft_blocks(
        self,
        carried_features: Tensor | None = None,
        carried_positions: Tensor | None = None,
        carried: Tensor | None = None,
        **packed: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As the base's; with carried rows as :meth:`forward` has them."""
        with self._rows_appended(packed, carried_features, carried_positions, carried) as extended:
            return super().draft_blocks(**extended)  # type: ignore[misc]

    @contextmanager
    def _rows_appended(
        self, packed: dict[str, Tensor], carried_features: Any, carried_positions: Any, carried: Any
    ) -> Iterator[dict[str, Tensor]]:
        """The packed sequence with the carried rows, if there are any, which :meth:`visibility` meanwhile shows."""
        if carried_features is None or carried_positions is None or carried is None:
            yield packed
            return
        rows = carried_features.shape[0] * carried_features.shape[1]
        marked = self.carryover_projection(carried_features) + self.carryover_embedding
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
            yield extended
        finally:
            self._carried = None

    def visibility(self, document_ids: Tensor, anchors: Tensor) -> BlockRule:
        """The base's rule; with carried rows at the end of the sequence, block j also sees its own visible ones."""
        rule: BlockRule = super().visibility(document_ids, anchors)  # type: ignore[misc]
        if self._carried is None:
            return rule
        return with_own_rows(rule, document_ids.shape[0] - self._carried.numel(), self._carried)

    def propose(self, **packed: Tensor) -> Tensor:
        """Greedy drafts [A, P] of every anchor, without gradients and with nothing carried. Each kind has its own."""
        raise NotImplementedError

    def draft_logits(self, previous: Tensor, **packed: Tensor) -> Tensor:
        """Logits [A, P, V] of every anchor's drafts, each behind the token of ``previous`` [A, P], without gradients.

        Takes carried rows as :meth:`forward` does. Each kind has its own.
        """
        raise NotImplementedError


class CarryingDFlash(_CarryingBlocks, AnchoredDFlash):
    """DFlash with carried rows."""

    @torch.no_grad()
    def propose(self, **packed: Tensor) -> Tensor:
        """The best token of every row but the anchor's."""
        _, logits = self.draft_blocks(**packed)
        return logits[:, 1:].argmax(-1)

    def draft_logits(self, previous: Tensor, **packed: Tensor) -> Tensor:
        """What is drafted before a row makes no difference to it."""
        return self.draft_blocks(**packed)[1][:, 1:]


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

    @torch.no_grad()
    def draft_logits(self, previous: Tensor, **packed: Tensor) -> Tensor:
        """The Markov head biases each row by the token before it."""
        hidden, logits = self.draft_blocks(**packed)
        bias: Tensor = self.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        return logits + bias


def _append(sequence: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([sequence, rows.to(sequence.dtype)], dim=1)
