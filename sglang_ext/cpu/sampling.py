"""Rejection sampling for chain drafts in torch: the verify that keeps the target's distribution at temperature > 0.

Position by position, a draft token x is accepted with probability min(1, p(x) / q(x)); the first rejected position
takes a token from the normalised residual max(p - q, 0), and a block accepted whole takes one more token from p
(Leviathan et al., arXiv 2211.17192). A drafter that proposes its argmax is the case where q is one-hot.
"""

from __future__ import annotations

import torch


def verify_chain(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of each draft block and draw the token after it.

    Args:
        candidates: [bs, n + 1] int, the anchor and the n drafted tokens.
        target_probs: [bs, n + 1, vocab], row i given the anchor and i drafted tokens; draft_probs: [bs, >= n, vocab].
        coins: [bs, >= n] and final_coins: [bs], uniform on [0, 1).
        threshold_single, threshold_acc: below 1 they accept more than the target's distribution allows (SGLang's
            ``--speculative-accept-threshold-*``).

    Returns:
        Accepted drafts [bs] int64 and the token after them [bs] int64.
    """
    bs, width = candidates.shape
    drafted = candidates[:, 1:, None].long()
    p = target_probs[:, : width - 1].gather(-1, drafted)[..., 0]
    q = draft_probs[:, : width - 1].gather(-1, drafted)[..., 0]
    accepted = (coins[:, : width - 1] * q < p / threshold_acc) | (p >= threshold_single)
    # A token the drafter says it could not have drawn proves nothing about its distribution.
    accepted &= (q > 0) & (q <= 1)
    length = accepted.long().cumprod(-1).sum(-1)
    rows = torch.arange(bs)
    weights = target_probs[rows, length].float()
    rejected = length < width - 1
    draft = draft_probs[rows[rejected], length[rejected]].float()
    residual = (weights[rejected] - draft).clamp(min=0)
    # p == q to the last bit leaves no residual: p itself is then what the rejected token was drawn from.
    weights[rejected] = torch.where(residual.sum(-1, keepdim=True) > 0, residual, weights[rejected])
    mass = weights.double().cumsum(-1)
    token = torch.searchsorted(mass, (final_coins.double() * mass[:, -1])[:, None], right=True)[:, 0]
    # A coin that rounds up to 1 must not pass the last token that has any mass.
    last = (weights > 0).long().cumsum(-1).argmax(-1)
    return length, torch.minimum(token, last)


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """DSPARK's verify (kernels/ops/speculative/reject_sampling.py:242), writing the same outputs.

    ``predicts`` [bs * width] holds, at the row of each accepted token, the token after it; ``accept_index`` [bs, width]
    the rows of the accepted tokens; ``accept_token_num`` [bs] how many drafts were accepted.
    """
    if block_verification:
        raise NotImplementedError("the CPU platform verifies token by token; leave block verification off")
    length, token = verify_chain(
        candidates,
        target_probs,
        draft_probs,
        uniform_samples,
        uniform_samples_for_final_sampling,
        threshold_single,
        threshold_acc,
    )
    accept_token_num.copy_(length)
    accept_index.copy_(retrive_index)
    following = torch.cat([candidates[:, 1:], candidates[:, :1]], 1).long()
    following[torch.arange(len(length)), length] = token
    predicts[retrive_index.flatten()] = following.flatten().to(predicts.dtype)


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """DFLASH's verify (kernels/ops/speculative/sampling.py:33): the drafts are argmaxes of a chain, so q is one-hot."""
    one_hot = torch.zeros_like(target_probs[:, :-1]).scatter_(-1, candidates[:, 1:, None].long(), 1.0)
    chain_speculative_sampling(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        one_hot,
        threshold_single,
        threshold_acc,
        deterministic,
    )
