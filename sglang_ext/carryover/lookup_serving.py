"""The lookup rule (``lookup``) in SGLang's draft samplers, eagerly and inside captured graphs.

A graph reads the rounds of all request slots where they lie; before a replay only the batch's slots are put in place.
On CUDA the kernels of ``lookup_kernels`` do it, each in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_ext.carryover.lookup import VerifiedRound, look_up, new_rounds, raise_choices


class Lookup:
    """Every request slot's last verify step (``lookup.new_rounds``), and which slots the present batch has.

    Every update must be issued on the stream that runs the forwards, in their order. Row 0 belongs to padding.
    """

    def __init__(self, table: list[float], slots: int, width: int, device: torch.device | str) -> None:
        self.table = torch.tensor(table, dtype=torch.float32, device=device)
        self.width = width
        self.rounds = new_rounds(slots, width, device)
        self.slots = torch.zeros(slots, dtype=torch.int64, device=device)  # of the batch that drafts

    def bytes_per_slot(self) -> int:
        """What a request slot takes on the device."""
        return self.rounds[0].nbytes + self.slots.element_size()

    def begin(self, slots: Tensor) -> None:
        """These request slots [bs] draft next, in this order."""
        self.slots[: slots.shape[0]].copy_(slots)

    def last(self, batch_size: int) -> VerifiedRound:
        """The last verify steps of the batch that drafts; a captured graph reads them anew at each replay."""
        rounds = self.rounds[self.slots[:batch_size]].long()
        return VerifiedRound(rounds[:, : self.width], rounds[:, self.width : -1], rounds[:, -1])

    def remember(self, slots: Tensor, inputs: Tensor, choices: Tensor, commit_lens: Tensor) -> None:
        """Keep a verify step of the slots [bs]: its inputs and the target's choices behind them [bs, W] or [bs * W]."""
        if choices.is_cuda:
            return kernels().remember(self.rounds, slots, inputs, choices, commit_lens)
        shape = (slots.shape[0], self.width)
        parts = [inputs.view(shape), choices.view(shape), commit_lens[:, None]]
        self.rounds.index_copy_(0, slots.long(), torch.cat([part.to(torch.int32) for part in parts], 1))
        return None

    def forget(self, slots: Tensor) -> None:
        """Drop what these slots [n] hold."""
        self.rounds[:, -1].index_fill_(0, slots.long(), 0)


def kernels() -> Any:
    """The Triton kernels, which only a process with CUDA imports."""
    from sglang_ext.carryover import lookup_kernels

    return lookup_kernels


def choose(lookup: Lookup, lm_head: Any, hidden: Tensor, tokens: Tensor, anchor: Tensor) -> Tensor:
    """Drafts [bs, P] of a DFlash block: its own ``tokens`` [bs, P], or choices that the bonus lifts above them.

    ``hidden`` [bs, P, H] are the rows that draft, ``anchor`` [bs] the tokens before them.
    """
    verified = lookup.last(tokens.shape[0])
    hidden = hidden.float()
    own = _rows(lm_head, tokens)
    choices = _rows(lm_head, verified.choices)
    logits = torch.cat([(hidden * own).sum(-1, keepdim=True), hidden @ choices.mT], -1)
    if get_parallel().tp_size > 1:
        logits = tensor_model_parallel_all_reduce(logits)
    if logits.is_cuda:
        chosen: Tensor = kernels().look_up(tokens, logits, anchor, lookup.rounds, lookup.slots, lookup.table)
        return chosen
    return look_up(tokens, logits, anchor, verified, lookup.table)


def _rows(lm_head: Any, tokens: Tensor) -> Tensor:
    """The head's rows of tokens [..., H]; zero for those of another rank's part of the vocabulary."""
    shard = getattr(lm_head, "shard_indices", None)
    if shard is None:
        rows: Tensor = lm_head.weight[tokens].float()
        return rows
    at = tokens - int(shard.org_vocab_start_index)
    inside = (at >= 0) & (at < int(shard.num_org_elements))
    rows = lm_head.weight[torch.where(inside, at, 0)].float()
    return rows * inside[..., None]


class LookupDraftSampler:
    """SGLang's sampler at the end of the captured DFlash block, and the lookup behind it."""

    def __init__(self, stock: Any, lookup: Lookup, lm_head: Any) -> None:
        self.stock, self.lookup, self.lm_head = stock, lookup, lm_head
        self.out: Tensor = stock.out

    def __call__(self, hidden_states: Tensor, input_ids: Tensor) -> None:
        """Draft the blocks [bs * Q, H] into ``out``; their anchors are the first of each Q ``input_ids``."""
        self.stock(hidden_states, input_ids)
        width = self.stock.block_size
        blocks = hidden_states.view(-1, width, hidden_states.shape[-1])
        drafts = blocks.shape[0] * (width - 1)
        own = self.out[:drafts].view(-1, width - 1)
        chosen = choose(self.lookup, self.lm_head, blocks[:, 1:], own, input_ids.view(-1, width)[:, 0])
        self.out[:drafts].copy_(chosen.flatten())


class _Chain(NamedTuple):
    """Where a block's Markov chain stands."""

    stock: Any  # the head's own state
    matched: Tensor  # [bs, W]
    draft: int


class MarkovLookup:
    """A DSpark drafter's Markov head whose bias holds the bonus too, so that what it samples from does as well."""

    def __init__(self, head: Any, lookup: Lookup) -> None:
        self.lookup = lookup
        self.shard_start = 0 if head.vocab_shard is None else int(head.vocab_shard.start)
        self._init_state: Callable[..., Any] = head.init_state
        self._step_bias: Callable[..., Any] = head.step_bias
        head.init_state, head.step_bias = self.init_state, self.step_bias
        head.greedy_w2_weight = lambda: None  # a kernel that knows no other bias than the head's

    def init_state(self, hidden_states: Tensor) -> _Chain:
        """The chain of blocks [bs, P, H] before their first draft."""
        stock = self._init_state(hidden_states)
        if hidden_states.is_cuda:  # the kernel begins by itself
            shape = (hidden_states.shape[0], self.lookup.width)
            return _Chain(stock, torch.empty(shape, dtype=torch.int32, device=hidden_states.device), 0)
        return _Chain(stock, self.lookup.last(hidden_states.shape[0]).begin(), 0)

    def step_bias(self, prev_tokens: Tensor, *, hidden_states: Tensor | None, state: _Chain) -> tuple[Tensor, _Chain]:
        """What the tokens before [bs] add to the logits of the next drafts [bs, V]."""
        bias, stock = self._step_bias(prev_tokens, hidden_states=hidden_states, state=state.stock)
        lookup, matched = self.lookup, state.matched
        if bias.is_cuda:
            kept = lookup.rounds, lookup.slots, lookup.table
            kernels().follow_and_raise(bias, matched, prev_tokens, state.draft, *kept, self.shard_start)
        else:
            verified = lookup.last(len(prev_tokens))
            matched = verified.follow(matched, prev_tokens)
            bonus = verified.bonus(matched, state.draft, lookup.table)
            bias = raise_choices(bias, verified.choices, bonus, self.shard_start)
        return bias, _Chain(stock, matched, state.draft + 1)
