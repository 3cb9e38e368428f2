"""What the verify steps of a scheduler add up to, in plain Python: no tensors, no Prometheus, no SGLang.

A verify step belongs to one request: a batch of 32 requests makes 32 steps. ``W`` is the verify width (rows of one
step, the anchor's included), ``n`` the accepted drafts of a step (0 <= n < W).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

REASONS = ("first_round", "full_acceptance", "mixed_chunk", "slot_reuse", "row_end", "off")
"""Why a draft read no carried rows: it is its request's first after a prefill; the step before accepted all drafts; the
step before was a one-token extend in a mixed chunk; the prefill was not seen here, so the slot may hold what its last
tenant left; the slot row has no room; the carry is switched off."""

_FIRST_ROUND, _FULL_ACCEPTANCE, _MIXED_CHUNK, _SLOT_REUSE, _ROW_END, _OFF = range(len(REASONS))
_ROUND = -1

# ``_sglang_ext_before`` and ``_sglang_ext_rejected`` are kept on SGLang's request objects: they end with the request,
# whatever ends it.


@dataclass(frozen=True)
class Carry:
    """What decides how many rejected rows a draft reads, as ``sglang_ext.carryover.rows.carried_rows`` does on tensors.

    Args:
        query_width: Q, rows of one draft block.
        columns: usable columns of a slot row.
        limit: at most this many rows; None for all.
    """

    query_width: int
    columns: int
    limit: int | None


class Tally:
    """Sums since the last ``clear``; the scheduler's thread is the only user."""

    def __init__(self, verify_width: int, carry: Carry | None = None, state_layers: int = 0) -> None:
        self.verify_width = verify_width
        self.carry = carry
        self.state_layers = state_layers
        self.clear()

    def clear(self) -> None:
        """Start at nothing."""
        self.steps = [0] * self.verify_width  # by accepted drafts
        self.drafted = 0
        self.overshoot = 0
        self.carried_steps = 0
        self.carried_rows = 0
        self.uncarried = [0] * len(REASONS)

    def __bool__(self) -> bool:
        return any(self.steps) or self.overshoot > 0

    @property
    def verify_steps(self) -> int:
        """Steps of requests that were still running."""
        return sum(self.steps)

    @property
    def accepted(self) -> int:
        """Drafts the target agreed with."""
        return sum(n * count for n, count in enumerate(self.steps))

    @property
    def emitted(self) -> int:
        """Accepted drafts and one token of the target's own per step, before stop strings and limits cut any."""
        return self.accepted + self.verify_steps

    def accepted_by_position(self) -> list[int]:
        """[W - 1] steps that accepted at least 1, 2, ... drafts."""
        counts, beyond = [], 0
        for count in reversed(self.steps[1:]):
            beyond += count
            counts.append(beyond)
        return counts[::-1]

    def add(
        self, requests: Sequence[Any], correct: Sequence[int], before: Sequence[int] | None, caps: Sequence[int] | None
    ) -> None:
        """Add one round.

        Args:
            requests: SGLang's requests, before this round is committed to them.
            correct: accepted drafts of each.
            before: what ``on_decode`` returned when the round was launched, None where that was not seen.
            caps: rows verified of each, where a ragged verify took fewer than W.
        """
        carry = self.carry
        running = []
        for index, request in enumerate(requests):
            # With overlap a round is launched before the end of a request in the one before is known.
            if not (request.is_retracted or request.finished()):
                running.append(index)
        self.overshoot += len(requests) - len(running)
        steps, last = self.steps, self.verify_width - 1
        for index in running:
            steps[correct[index]] += 1
        self.drafted += len(running) * last if caps is None else sum(caps[index] - 1 for index in running)
        if carry is None:
            return
        if carry.limit == 0:
            self.uncarried[_OFF] += len(running)
            return
        if before is None:
            before = [_SLOT_REUSE] * len(requests)
        uncarried, end, limit = self.uncarried, carry.columns - carry.query_width, carry.limit or last
        for index in running:
            request = requests[index]
            if (earlier := before[index]) != _ROUND:
                uncarried[earlier] += 1
            elif (rows := getattr(request, "_sglang_ext_rejected", 0)) == 0:
                uncarried[_FULL_ACCEPTANCE] += 1
            elif (room := end - request.kv.kv_committed_len) <= 0:
                uncarried[_ROW_END] += 1
            else:
                self.carried_steps += 1
                self.carried_rows += min(rows, room, limit)
            request._sglang_ext_rejected = last - correct[index]


def on_decode(requests: Sequence[Any]) -> list[int]:
    """Note that a decode round of these requests is launched; return what came before it for each."""
    before = [getattr(request, "_sglang_ext_before", _SLOT_REUSE) for request in requests]
    for request in requests:
        request._sglang_ext_before = _ROUND
    return before


def on_extend(requests: Iterable[Any], decoding: Iterable[Any]) -> None:
    """Note a prefill of these requests; those in ``decoding`` were running and are mixed into it."""
    mixed = {id(request) for request in decoding}
    for request in requests:
        request._sglang_ext_before = _MIXED_CHUNK if id(request) in mixed else _FIRST_ROUND
