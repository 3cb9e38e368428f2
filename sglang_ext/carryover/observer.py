"""Follow a running worker's rounds from outside: what the oracle and the recorder stand on.

Off unless asked for. It wraps what the worker and its model call on themselves, on this one object, and copies target
features to the host, which is slow: for tests, diagnosis and evaluation, not for serving.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Observer(Protocol):
    """Called in this order in a decode round: ``on_block``, ``on_accept``, ``on_verify``; a prefill: ``on_extend``."""

    batch: Any  # SGLang's batch of the present step, set before anything else

    def on_extend(self, features: torch.Tensor, positions: list[int]) -> None:
        """A prefill's rows: features [tokens, D] on the host, flat over requests, and their positions."""

    def on_block(self, forward_batch: Any, hidden: torch.Tensor) -> None:
        """The draft block as it was run, and its final hidden states [bs * Q, hidden]."""

    def on_accept(self, candidates: torch.Tensor, commit_lens: torch.Tensor, predictions: torch.Tensor | None) -> None:
        """Verified candidates [bs, W] (anchor first), committed rows [bs], and the target's first choice behind each
        candidate [bs, W]; None where SGLang keeps the target's logits to itself (CUDA graphs)."""

    def on_verify(self, features: torch.Tensor, commit_lens: list[int]) -> None:
        """The verify step's rows: features [bs * W, D] on the host, before any is marked."""


def attach(worker: Any, observer: Observer) -> None:
    """Let ``observer`` follow a Carryover or ReaDy worker; it sees each block after it was shifted."""
    step = worker.forward_batch_generation

    def forward_batch_generation(batch: Any, *args: Any, **kwargs: Any) -> Any:
        observer.batch = batch
        return step(batch, *args, **kwargs)

    # A worker that shifts the block calls SGLang's forward through an attribute of its own.
    owner, name = worker, "_stock_draft_forward"
    if not hasattr(worker, name):
        owner, name = worker.draft_model_runner, "forward"
    block_forward = getattr(owner, name)

    def draft_forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = block_forward(forward_batch, *args, **kwargs)
        if forward_batch.batch_size > 0:
            observer.on_block(forward_batch, output.logits_output.hidden_states)
        return output

    def features(call: dict[str, Any]) -> None:
        rows = call["target_hidden"].detach().float().cpu().clone()
        if call.get("commit_lens") is None:
            observer.on_extend(rows, call["positions"].tolist())
        else:
            observer.on_verify(rows, call["commit_lens"].tolist())

    worker.forward_batch_generation = forward_batch_generation
    setattr(owner, name, draft_forward)
    if hasattr(worker, "_verify_executor"):  # DSPARK

        def accepted(call: dict[str, Any], outcome: Any) -> None:
            candidates = call["verify_ids_2d"]
            first = _first_choices(candidates, call["target_logits"], None)
            observer.on_accept(candidates, outcome.commit_lens, first)

        _watch(worker.draft_model, "write_target_hidden_kv", before=features)
        _watch(worker._verify_executor, "accept_and_finalize", after=accepted)
    else:

        def accepted(call: dict[str, Any], outcome: Any) -> None:
            candidates = call["candidates"]
            first = _first_choices(candidates, call["next_token_logits"], call.get("target_predict"))
            observer.on_accept(candidates, outcome[1], first)

        _watch(worker, "_append_target_hidden_to_draft_kv_by_loc", before=features)
        _watch(worker, "_accept_block", after=accepted)


def _first_choices(candidates: torch.Tensor, logits: Any, predictions: Any) -> torch.Tensor | None:
    if predictions is None and logits is not None:
        predictions = logits.argmax(-1)
    return None if predictions is None else predictions.reshape(candidates.shape)


def _watch(owner: Any, name: str, before: Any = None, after: Any = None) -> None:
    """Wrap a method of one object that is called with keywords only."""
    method = getattr(owner, name)

    def watched(**call: Any) -> Any:
        if before is not None:
            before(call)
        outcome = method(**call)
        if after is not None:
            after(call, outcome)
        return outcome

    setattr(owner, name, watched)
