"""Wrong states for a reader, on purpose: what a drafter's gain is worth shows against them.

Off unless ``SGLANG_EXT_READ_STATES`` asks for one. They act on the reduced states, so nothing else of a round differs:
``zero`` reads nothing; ``stale`` reads what the request's previous round did (its first round: the right state);
``shuffled`` reads what the next request of the batch should (alone in its batch: the right state).
"""

from __future__ import annotations

import torch
from torch import Tensor


class WrongStates:
    """One control; its buffers keep their addresses, so it can live in a CUDA graph.

    Args:
        kind: zero, stale or shuffled.
        request_slots: rows of SGLang's request table.
        shape: one request's reduced states, [L, HV, r_v, r_k].
    """

    def __init__(self, kind: str, request_slots: int, shape: tuple[int, ...], device: torch.device) -> None:
        self.kind = kind
        rows = request_slots if kind == "stale" else 0
        self.before = torch.full((rows, *shape), torch.nan, device=device)

    def __call__(self, reduced: Tensor, request_slots: Tensor) -> Tensor:
        """What is read instead of ``reduced`` [bs, L, HV, r_v, r_k] by the requests in these slots [bs]."""
        if self.kind == "zero":
            return torch.zeros_like(reduced)
        if self.kind == "shuffled":
            return reduced.roll(-1, 0)
        before = self.before[request_slots]
        self.before[request_slots] = reduced
        return torch.where(before.isnan(), reduced, before)

    def forget(self, request_slots: Tensor) -> None:
        """A prefill ends what these slots' requests [n] have read before."""
        if self.kind == "stale" and request_slots.numel():
            self.before[request_slots] = torch.nan
