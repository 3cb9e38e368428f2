"""The lookup rule: what the target chose in rejected rows gets a bonus in the next draft's logits.

Pure tensor arithmetic, used by serving and by training alike; it imports neither SGLang nor a trainer. Not in the paper
(arXiv 2609.14717), which carries rejected rows as context alone.

Row k of a verify step, whose input is token k of the block, holds the target's own choice for the token after it. From
the first rejected draft on it was made behind wrong words, but where the new draft comes to write the same tokens
again, the choice is often right again. So, at each position of the draft, a rejected row whose inputs end in the last
m tokens written before that position raises the logit of its choice by ``table[min(m, LONGEST)]`` (the highest bonus
where several rows choose the same token). A row without a match counts, with ``table[0]``, at its own position alone.

Notation as in ``rows``: W rows a verify step, c of them committed, P drafts of one block, whose draft j (from 0) takes
the position that row c + j predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

LONGEST = 4
"""Matches of this many tokens and longer have one bonus."""
WIDEST = 64
"""Rows of a verify step, at most."""


@dataclass
class VerifiedRound:
    """What is kept of each request's last verify step."""

    inputs: Tensor  # [bs, W] int64: the anchor and the drafts behind it
    choices: Tensor  # [bs, W] int64: the target's most likely token behind each
    committed: Tensor  # [bs] int64: rows committed; 0 where there is no round to look up

    def begin(self) -> Tensor:
        """Matched lengths [bs, W] before the new anchor: of the last committed tokens, ending at each row."""
        matched = torch.zeros_like(self.inputs)
        for back in range(LONGEST - 1, 0, -1):
            at = self.committed[:, None] - back
            token = self.inputs.gather(1, at.clamp(min=0))
            matched = torch.where(at >= 0, self.follow(matched, token[:, 0]), matched)
        return matched

    def follow(self, matched: Tensor, token: Tensor) -> Tensor:
        """Matched lengths [bs, W], ending at each row, once ``token`` [bs] is written."""
        before = pad(matched[:, :-1], (1, 0))
        return torch.where(self.inputs == token[:, None], before + 1, 0)

    def bonus(self, matched: Tensor, draft: int, table: Tensor) -> Tensor:
        """Bonus [bs, W] of each row's choice at the draft's position ``draft``, from ``table`` [LONGEST + 1]."""
        row = torch.arange(self.inputs.shape[1], device=matched.device)
        first = self.committed[:, None]
        counts = (first > 0) & (row >= first) & ((matched > 0) | (row == first + draft))
        return torch.where(counts, table[matched.clamp(max=LONGEST)], torch.zeros((), device=table.device))


def new_rounds(slots: int, width: int, device: torch.device | str) -> Tensor:
    """No round in any of ``slots`` request slots: [slots, 2 W + 1] int32, a slot's inputs, choices, rows committed.

    ValueError for verify steps wider than ``WIDEST``.
    """
    if not 1 <= width <= WIDEST:
        raise ValueError(f"A verify step of {width} rows is not within 1 to {WIDEST}.")
    return torch.zeros(slots, 2 * width + 1, dtype=torch.int32, device=device)


def look_up(tokens: Tensor, logits: Tensor, anchor: Tensor, verified: VerifiedRound, table: Tensor) -> Tensor:
    """Drafts of a drafter whose positions do not depend on each other (DFlash), with the bonus.

    Args:
        tokens: [bs, P] the drafter's own.
        logits: [bs, P, 1 + W] of each position's own token and of the rows' choices.
        anchor: [bs] the last committed token.
        verified: the last verify step of each request.
        table: [LONGEST + 1] float, zero or more.

    Returns:
        [bs, P] tokens; at each position the highest logit with its bonus, the drafter's own where it ties.
    """
    matched, written, drafts = verified.begin(), anchor, []
    for draft in range(tokens.shape[1]):
        matched = verified.follow(matched, written)
        raised = logits[:, draft, 1:] + verified.bonus(matched, draft, table)
        best, row = raised.max(-1)
        choice = verified.choices.gather(1, row[:, None])[:, 0]
        written = torch.where(best > logits[:, draft, 0], choice, tokens[:, draft])
        drafts.append(written)
    return torch.stack(drafts, 1)


def raise_choices(bias: Tensor, choices: Tensor, bonus: Tensor, start: int = 0) -> Tensor:
    """Add to logits [bs, V] the highest ``bonus`` [bs, W] of each token among ``choices`` [bs, W].

    ``start`` is the first token of this rank's part of the vocabulary.
    """
    at = choices - start
    inside = (at >= 0) & (at < bias.shape[1])
    extra = torch.zeros_like(bias).scatter_reduce(
        1, torch.where(inside, at, 0), torch.where(inside, bonus, 0).to(bias.dtype), "amax"
    )
    return bias + extra
