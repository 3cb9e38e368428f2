"""Branch verification: what the frozen target makes of every anchor's proposals, all in one pass.

Draft-verify-draft training (arXiv 2609.14717, section 2.2) needs, for each anchor of a recorded sequence, the target's
hidden states on the recorded prefix followed by the drafter's proposals. The target reads ``[recorded sequence; all
branches]`` once, under a mask that lets a branch see its own prefix and itself only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.training.features import TargetFeatures


def branch_mask(anchors: Tensor, length: int, width: int) -> Tensor:
    """Boolean [R, 1, N, N] with N = length + n * width: what each row of ``[sequence; branches]`` may attend to.

    ``anchors`` [R, n] are positions in sequences of ``length`` tokens; a branch has ``width`` rows, the anchor first. A
    recorded row sees the sequence up to itself; a branch row sees the recorded tokens before its anchor and the rows of
    its own branch up to itself.
    """
    count = anchors.shape[1]
    device = anchors.device
    order = torch.arange(length, device=device)
    branch = torch.arange(count * width, device=device) // width
    row = torch.arange(count * width, device=device) % width
    recorded = (order[None, :] <= order[:, None]).expand(anchors.shape[0], -1, -1)
    prefix = order[None, None, :] < anchors.repeat_interleave(width, dim=1)[:, :, None]
    own = (branch[:, None] == branch[None, :]) & (row[None, :] <= row[:, None])
    top = torch.cat([recorded, recorded.new_zeros(anchors.shape[0], length, count * width)], dim=2)
    bottom = torch.cat([prefix, own.expand(anchors.shape[0], -1, -1)], dim=2)
    return torch.cat([top, bottom], dim=1)[:, None]


@torch.no_grad()
def verify_branches(target: TargetFeatures, input_ids: Tensor, anchors: Tensor, proposals: Tensor) -> Tensor:
    """Target features [R, n, W, K*H] of every branch row (row 0 is the anchor).

    Runs the target over recorded rows [R, T] and the branches of their anchors [R, n] with proposals [R, n, W - 1].
    Full attention only: a recurrent layer carries state from row to row and would run through the branches.
    """
    rows, length = input_ids.shape
    count, width = anchors.shape[1], proposals.shape[2] + 1
    branches = torch.cat([input_ids.gather(1, anchors)[:, :, None], proposals], dim=2)
    positions = anchors[:, :, None] + torch.arange(width, device=anchors.device)
    order = torch.arange(length, device=anchors.device).expand(rows, -1)
    features, _ = target(
        torch.cat([input_ids, branches.flatten(1)], dim=1),
        position_ids=torch.cat([order, positions.flatten(1)], dim=1),
        attention_mask=branch_mask(anchors, length, width),
    )
    return features[:, length:].view(rows, count, width, -1)


def accepted_drafts(proposals: Tensor, continuation: Tensor) -> Tensor:
    """How many leading proposals [..., P] equal the continuation [..., P]: the round commits one row more."""
    return (proposals == continuation).long().cumprod(-1).sum(-1)
