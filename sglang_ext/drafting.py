"""The draft block: which rows it has, where they stand, which token each one predicts.

The definition that training uses; tests hold serving to it (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147). Pure
torch: neither SGLang nor a trainer is imported. The *anchor* is the last committed token; its target feature does not
exist yet, so the context of a block ends one row before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["dflash", "dspark"]
KINDS: tuple[Kind, ...] = ("dflash", "dspark")


@dataclass(frozen=True)
class DraftBlock:
    """Shape of one draft block of ``size`` rows: the anchor's embedding, then ``size - 1`` mask embeddings.

    DFlash leaves the anchor's row unused (row k drafts token anchor + k), DSpark samples from it too (row k drafts
    token anchor + k + 1). Both names follow the checkpoints: ``size`` is what their ``block_size`` says.
    """

    kind: Kind
    size: int

    @property
    def samples_anchor(self) -> bool:
        """Whether the anchor's own row drafts a token (``sample_from_anchor`` in checkpoints)."""
        return self.kind == "dspark"

    @property
    def first_draft_row(self) -> int:
        """Index of the first row whose output drafts a token."""
        return 0 if self.samples_anchor else 1

    @property
    def drafts(self) -> int:
        """Tokens drafted per block."""
        return self.size - self.first_draft_row

    def input_ids(self, anchor_tokens: Tensor, mask_token_id: int) -> Tensor:
        """Block inputs [A, size] for the anchors' tokens [A]."""
        ids = anchor_tokens.new_full((anchor_tokens.shape[0], self.size), mask_token_id)
        ids[:, 0] = anchor_tokens
        return ids

    def positions(self, anchors: Tensor) -> Tensor:
        """Absolute positions [A, size] of the block rows of anchors at positions [A]."""
        return anchors[:, None] + torch.arange(self.size, device=anchors.device)

    def drafted(self, anchors: Tensor) -> Tensor:
        """Positions [A, drafts] of the tokens that the block drafts: anchor + 1 onwards, for both kinds."""
        return anchors[:, None] + torch.arange(1, self.drafts + 1, device=anchors.device)
