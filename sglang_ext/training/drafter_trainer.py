"""transformers.Trainer over a drafter: target features online, one loss denominator per optimizer step.

The Trainer brings the loop, gradient accumulation, clipping, mixed precision with fp32 weights, schedules, checkpoints
with optimizer and random states, resume, and data parallelism under torchrun. What is added here: the target runs in
the process and hands over its features, losses are sums divided by the weight sum of the whole step, acceptance lengths
are logged next to the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from sglang_ext.training.drafter_models import pack
from sglang_ext.training.features import TargetFeatures


class DrafterTrainer(Trainer):
    """Trains a drafter on batches that are whole dataset items (see ``AnchorBatches``).

    ``heldout`` are batches evaluated without gradients. Logged besides the Trainer's own figures:
    ``acceptance_length`` (argmax drafts against the recorded text, bonus token included) and, for DSpark,
    ``expected_length`` (under rejection sampling).
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        *,
        batches: Dataset[dict[str, Tensor]],
        heldout: Dataset[dict[str, Tensor]] | None,
        features: TargetFeatures,
    ) -> None:
        super().__init__(model=model, args=args, train_dataset=batches, eval_dataset=heldout, data_collator=_only_item)
        self.model_accepts_loss_kwargs = True  # the loss below is divided by the whole step's weights already
        self.features = features
        self.heldout = heldout
        self._sums: dict[str, Tensor] = {}

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one optimizer step, and the sum of their loss weights over all ranks."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples:
            return samples, None
        total = torch.stack([sample["weights"].sum() for sample in samples]).sum().to(device)
        return samples, self.accelerator.reduce(total, "sum")

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Loss of one micro-batch; the losses of a step's micro-batches and the mean over ranks add up to the loss."""
        outputs = self.run_batch(model, inputs)
        self._add(outputs)
        loss = outputs["loss"] * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def run_batch(self, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Target features of a batch, then the drafter's loss and metric sums."""
        with torch.autocast(self.args.device.type, dtype=torch.bfloat16, enabled=self.args.bf16):
            features, last_hidden = self.features(inputs["input_ids"])
        return model(**pack(inputs, features, last_hidden))

    def evaluate(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """Log and return :meth:`held_out_figures`."""
        figures = self.held_out_figures()
        self.log(dict(figures))
        return figures

    def held_out_figures(self) -> dict[str, float]:
        """Loss and acceptance on the held-out batches, shared out over the ranks."""
        assert self.heldout is not None
        self.model_wrapped.eval()
        kept, self._sums = self._sums, {}
        with torch.no_grad(), torch.autocast(self.args.device.type, dtype=torch.bfloat16, enabled=self.args.bf16):
            for i in range(self.args.process_index, len(self.heldout), self.args.world_size):  # type: ignore[arg-type]
                inputs = {name: value.to(self.args.device) for name, value in self.heldout[i].items()}
                self._add(self.run_batch(self.model, inputs))
        figures = self._means("eval_")
        self._sums = kept
        self.model_wrapped.train()
        return figures

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the acceptance figures since the last log to the Trainer's own."""
        if "loss" in logs:
            logs.update(self._means(""))
            self._sums = {}
        super().log(logs, start_time)

    def _add(self, outputs: dict[str, Tensor]) -> None:
        for name, value in outputs.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _means(self, prefix: str) -> dict[str, float]:
        """Means over all ranks of the gathered sums."""
        names = list(self._sums)
        totals = self.accelerator.reduce(torch.stack([self._sums[name] for name in names]), "sum").tolist()
        sums = dict(zip(names, totals, strict=True))
        blocks, weight = max(sums["blocks"], 1.0), max(sums["weight_sum"], 1e-9)
        figures = {"loss": sums["loss"] / weight, "acceptance_length": sums["accepted_sum"] / blocks}
        for name, figure, count in (("expected_sum", "expected_length", blocks), ("ce_sum", "ce", weight)):
            if name in sums:
                figures[figure] = sums[name] / count
        if not prefix:
            del figures["loss"]  # the Trainer has logged it
        return {prefix + name: value for name, value in figures.items()}


def _only_item(items: list[Any]) -> Any:
    (item,) = items
    return item
