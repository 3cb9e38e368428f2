"""Training a reader of recurrent states: what it is fed, and the steps with and without carried rows.

The target's states at every anchor are captured in the pass that gives its features, or, when rejected rows are carried
too, at the anchor that a round leads to, in the pass that verifies the branches. Nothing of the target takes part in
the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from sglang_ext.ready.reader import value_key_order
from sglang_ext.training.anchor_states import anchor_states
from sglang_ext.training.carryover_trainer import CarryoverTrainer, carried_features, second_blocks
from sglang_ext.training.drafter_models import pack
from sglang_ext.training.drafter_trainer import DrafterTrainer
from sglang_ext.training.ready import STATES

_UNDER_CONTROLS = ("eval_loss", "eval_acceptance_length", "eval_expected_length")


@dataclass(frozen=True)
class StateSource:
    """What a reader is fed at anchors: the ``committed`` states, or a control.

    ``stale``: the state one round earlier, ``1 .. rows`` tokens before the anchor, spread evenly over the anchors;
    ``shuffled``: the state at an anchor of the next document of the batch (of another anchor, where it holds only one);
    ``zero``: no state at all.

    Memory: ``4 L HV K V`` bytes an anchor (half of it in bf16) until the end of the step, and as much again in fp32 for
    the gradient of the reader's projections: 4.2 MB each for two layers of the shape of Qwen3.5-4B.
    """

    layers: Sequence[int]  # recurrent target layers
    rows: int  # of a verify step
    state: str = "committed"
    dtype: torch.dtype = torch.float32

    @contextmanager
    def at(self, model: Any, anchors: Tensor, valid: Tensor) -> Iterator[Callable[[], Tensor]]:
        """Capture while the target reads rows [R, T] inside the context; the states are there once it has.

        ``anchors`` [R, n], of which those that are ``valid`` count. Yields a function that gives the states
        [R * n, L, HV, V, K], in the reader's order.
        """
        places = (anchors - 1 - anchors % self.rows).clamp(min=0) if self.state == "stale" else anchors
        with anchor_states(model, self.layers, places, self.dtype) as captured:
            yield lambda: self._fed([captured.pop(layer).recurrent for layer in self.layers], valid)

    def _fed(self, states: list[Tensor], valid: Tensor) -> Tensor:
        stacked = torch.stack(states, dim=2)  # [R, n, L, HV, K, V]
        if self.state == "zero":
            stacked = torch.zeros_like(stacked)
        if self.state == "shuffled":
            rows, count = valid.shape
            donor = torch.arange(1, rows + 1, device=valid.device) % rows
            usable = valid.sum(1)[donor].clamp(min=1)[:, None]
            place = torch.arange(count, device=valid.device) + (usable // 2 if rows == 1 else 0)
            valid_first = (~valid).long().argsort(dim=1, stable=True)[donor]
            stacked = stacked[donor[:, None], valid_first.gather(1, place % usable)]
        return value_key_order(stacked.flatten(0, 1))


class _ReadingSteps:
    """Mixin over the trainers: a source of states, and held-out figures under the wrong ones beside the right ones."""

    source: StateSource
    state: TrainerState

    def held_out_figures(self) -> dict[str, float]:
        """Loss and acceptance on the held-out batches; at the end a reader of committed states is also fed controls."""
        figures: dict[str, float] = super().held_out_figures()  # type: ignore[misc]
        source = self.source
        if source.state == "committed" and self.state.global_step >= self.state.max_steps:
            for state in STATES[1:]:
                self.source = replace(source, state=state)
                controls = super().held_out_figures()  # type: ignore[misc]
                figures |= {f"{name}_{state}_state": controls[name] for name in _UNDER_CONTROLS}
            self.source = source
        return figures


class ReadyTrainer(_ReadingSteps, DrafterTrainer):
    """Trains a drafter that reads the state at every anchor."""

    def __init__(self, *args: Any, source: StateSource, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.source = source

    def run_batch(self, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Features and states in one pass of the target, then the drafter's loss and metric sums."""
        autocast = torch.autocast(self.args.device.type, dtype=torch.bfloat16, enabled=self.args.bf16)
        with autocast, self.source.at(self.features.model, *rows_of_anchors(inputs)) as states:
            features, last_hidden = self.features(inputs["input_ids"])
        outputs: dict[str, Tensor] = model(**pack(inputs, features, last_hidden), states=states())
        return outputs


class ReadyCarryoverTrainer(_ReadingSteps, CarryoverTrainer):
    """Draft-verify-draft rounds of a drafter that reads states: both drafts of a round read those at their anchors."""

    def __init__(self, *args: Any, source: StateSource, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.source = source

    def run_batch(self, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """First drafts, their verification with the states at the anchors they lead to, then the second drafts."""
        drafter = self.accelerator.unwrap_model(model)
        anchors, valid = rows_of_anchors(inputs)
        with torch.autocast(self.args.device.type, dtype=torch.bfloat16, enabled=self.args.bf16):
            with self.source.at(self.features.model, anchors, valid) as states:
                features, last_hidden = self.features(inputs["input_ids"])
            packed = pack(inputs, features, last_hidden)
            recorded = {name: value for name, value in packed.items() if name not in ("labels", "weights")}
            proposals = drafter.propose(**recorded, states=states())
            second = second_blocks(inputs, proposals, self.gamma)
            shifted = rows_of_anchors({**inputs, "anchors": second["anchors"], "valid": second["weights"][:, 0] > 0})
            with self.source.at(self.features.model, *shifted) as states:
                rejected = carried_features(self.features, inputs, proposals, None)
        outputs: dict[str, Tensor] = model(**{**packed, **second}, carried_features=rejected, states=states())
        return outputs


def trainer_for(
    source: StateSource | None, carry: bool, gamma: float, embedding_start: float = 0.0
) -> Callable[..., DrafterTrainer]:
    """The trainer of a run with or without a reader's source of states, with or without carried rows."""
    if source is None:
        rounds = partial(CarryoverTrainer, gamma=gamma, embedding_start=embedding_start)
        return rounds if carry else DrafterTrainer
    if carry:
        return partial(ReadyCarryoverTrainer, gamma=gamma, embedding_start=embedding_start, source=source)
    return partial(ReadyTrainer, source=source)


def rows_of_anchors(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Anchors of a batch of :class:`AnchorBatches` as positions in their rows, and which are valid, [R, n] each."""
    rows, width = inputs["input_ids"].shape
    start = torch.arange(rows, device=inputs["anchors"].device)[:, None] * width
    valid = inputs["valid"].view(rows, -1)
    return torch.where(valid, inputs["anchors"].view(rows, -1) - start, 0), valid
