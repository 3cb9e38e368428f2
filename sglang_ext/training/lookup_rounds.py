"""Second drafts, and what the lookup rule could make of them: what the table is fitted on and judged by.

Draft-verify-draft rounds as :mod:`carryover_trainer` runs them, on recorded answers. Every position of a second draft
is seen behind the recorded tokens, as it is in serving once all drafts before it are right; others do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from sglang_ext.carryover.lookup import LONGEST, VerifiedRound
from sglang_ext.training.anchor_states import recurrent_layers
from sglang_ext.training.batches import AnchorBatches, Documents
from sglang_ext.training.carryover_trainer import second_blocks, verified_rows
from sglang_ext.training.drafter_models import pack
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.ready_trainer import StateSource, rows_of_anchors

_PART = 4096  # rows whose logits over the vocabulary are held at once
_SAY_EVERY = 15  # seconds


class OtherPrompts:
    """The documents (:class:`batches.Documents`) whose prompt is none of those given as token ids."""

    def __init__(self, documents: Documents, prompts: Collection[tuple[int, ...]]) -> None:
        self.documents = documents
        beginnings = (ids[:start].tolist() for ids, start in map(documents.document, range(len(documents))))
        self.kept = [index for index, prompt in enumerate(beginnings) if tuple(prompt) not in prompts]

    def __len__(self) -> int:
        return len(self.kept)

    def document(self, index: int) -> tuple[np.ndarray, int]:
        """Token ids and the index of the first response token."""
        return self.documents.document(self.kept[index])


@dataclass(frozen=True)
class SecondDrafts:
    """N second drafts of P positions, each after a verify step of W rows. No logits but these are kept."""

    tokens: Tensor  # [N, P], the drafter's own
    logits: Tensor  # [N, P], of these
    choices: Tensor  # [N, W]: the target's most likely token behind each row
    choice_logits: Tensor  # [N, P, W], the second draft's
    stale: Tensor  # [N, W]: the first draft's token behind each row, -1 behind the last
    stale_logits: Tensor  # [N, P, W]
    entries: Tensor  # [N, P, W] int32, see lookup_entries
    labels: Tensor  # [N, P], recorded tokens
    supervised: Tensor  # [N, P] bool: there is one
    committed: Tensor  # [N], rows of the verify step
    document: Tensor  # [N]

    def __len__(self) -> int:
        return len(self.committed)

    @classmethod
    def join(cls, parts: list[SecondDrafts]) -> SecondDrafts:
        """All of several."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def only(self, which: Tensor) -> SecondDrafts:
        """Those that ``which`` [N] (bool) selects."""
        return SecondDrafts(*(getattr(self, field.name)[which] for field in fields(self)))

    def with_stale_drafts(self) -> SecondDrafts:
        """The control: the same rule over what was drafted before instead of the target's choices."""
        return replace(self, choices=self.stale, choice_logits=self.stale_logits)


def lookup_entries(verified: VerifiedRound, anchor: Tensor, written: Tensor) -> Tensor:
    """Which bonus each row's choice has at each position, [bs, P, W] int32: 1 + entry of the table, 0 for none.

    The rule is serving's (:mod:`sglang_ext.carryover.lookup`). ``anchor`` [bs] is the last committed token and
    ``written`` [bs, P] what stands at the positions of the draft.
    """
    numbers = torch.arange(1, LONGEST + 2, device=anchor.device, dtype=torch.int32)
    matched, entries = verified.follow(verified.begin(), anchor), []
    for draft in range(written.shape[1]):
        entries.append(verified.bonus(matched, draft, numbers).int())
        matched = verified.follow(matched, written[:, draft])
    return torch.stack(entries, 1)


def number_documents(inputs: dict[str, Tensor], numbers: dict[bytes, int]) -> Tensor:
    """The number of each row's document [R]; one that came before keeps the number that it got in ``numbers``."""
    rows = zip(inputs["input_ids"], inputs["lengths"], strict=True)
    texts = [ids[:length].numpy().tobytes() for ids, length in rows]
    return torch.tensor([numbers.setdefault(text, len(numbers)) for text in texts])


class Rounds(NamedTuple):
    """N rounds of a batch: what was verified, and the second drafts behind it with all their logits."""

    verified: VerifiedRound
    anchor: Tensor  # [N], the token that the round ends with
    logits: Tensor  # [N, P, V] fp32, of the second drafts
    labels: Tensor  # [N, P], recorded tokens
    supervised: Tensor  # [N, P] bool: there is one
    last_hidden: Tensor  # [N, P, H], the target's before its final norm, where it predicts the labels
    document: Tensor  # [N]

    def second_drafts(self) -> SecondDrafts:
        """What of it the lookup is fitted on, on the CPU."""
        block, choices, committed = self.verified.inputs, self.verified.choices, self.verified.committed
        entries = lookup_entries(self.verified, self.anchor, self.labels)
        stale = torch.cat([block[:, 1:], torch.full_like(block[:, :1], -1)], 1)
        own = self.logits.max(-1)

        def of(candidates: Tensor) -> Tensor:
            """The logits [N, P, W] of tokens [N, W]."""
            found = self.logits.gather(2, candidates.clamp(min=0)[:, None].expand(-1, self.logits.shape[1], -1))
            return found.masked_fill((candidates < 0)[:, None], -torch.inf)

        seen = SecondDrafts(
            tokens=own.indices,
            logits=own.values,
            choices=choices,
            choice_logits=of(choices),
            stale=stale,
            stale_logits=of(stale),
            entries=entries,
            labels=self.labels,
            supervised=self.supervised,
            committed=committed,
            document=self.document,
        )
        return SecondDrafts(*(getattr(seen, field.name).cpu() for field in fields(SecondDrafts)))


@dataclass(frozen=True)
class Observer:
    """Drafts, verifies and drafts again as a drafter does when it is served without a lookup.

    ``carried_rows`` is how many rejected rows the second draft reads at most (None: all). ``source`` are the states of
    a drafter with a reader.
    """

    drafter: Any  # one of the carrying classes
    features: TargetFeatures
    carried_rows: int | None
    source: StateSource | None = None

    def gather(self, batches: AnchorBatches) -> SecondDrafts:
        """Second drafts of all batches, on the CPU; says now and then how far it is."""
        device = self.drafter.fc.weight.device
        numbers: dict[bytes, int] = {}
        parts: list[SecondDrafts] = []
        began = said = time.monotonic()
        for number in range(len(batches)):
            inputs = batches[number]
            document = number_documents(inputs, numbers)
            seen = self.observe({name: value.to(device) for name, value in inputs.items()})
            parts.append(replace(seen, document=document[seen.document]))
            now = time.monotonic()
            if now - said > _SAY_EVERY or number + 1 == len(batches):
                said, count = now, sum(map(len, parts))
                print(
                    f"batch {number + 1} of {len(batches)}, {count:,} second drafts, {now - began:.0f} s",
                    flush=True,
                )
        return SecondDrafts.join(parts)

    @torch.no_grad()
    def observe(self, inputs: dict[str, Tensor]) -> SecondDrafts:
        """Second drafts of the rounds of one batch that go on, on the CPU; ``document`` numbers its rows."""
        return self.rounds(inputs).second_drafts()

    @torch.no_grad()
    def rounds(self, inputs: dict[str, Tensor]) -> Rounds:
        """The rounds of one batch that go on, with all logits of their second drafts."""
        drafter, ids = self.drafter, inputs["input_ids"]
        model = self.features.model
        recorded_rows = None if recurrent_layers(model) else DynamicCache()
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
            with self._states(*rows_of_anchors(inputs)) as states:
                packed = pack(inputs, *self.features(ids, past_key_values=recorded_rows))
            given = {name: value for name, value in packed.items() if name not in ("labels", "weights")}
            proposals = drafter.propose(**given, **states())
            second = second_blocks(inputs, proposals, gamma=1.0)
            supervised = second["weights"] > 0
            shifted = {"input_ids": ids, "anchors": second["anchors"], "valid": supervised[:, 0]}
            with self._states(*rows_of_anchors(shifted)) as states:
                features, last_hidden = verified_rows(self.features, inputs, proposals, recorded_rows)
            anchor = ids.flatten()[second["anchors"]]
            logits = drafter.draft_logits(
                torch.cat([anchor[:, None], second["labels"][:, :-1]], 1),
                **{**given, "anchors": second["anchors"]},
                **self._carried(features[:, 1:], second),
                **states(),
            )
            kept = supervised[:, 0].nonzero()[:, 0]
            start = ids.flatten()[torch.where(inputs["valid"], inputs["anchors"], 0)]
            committed = (second["anchors"] - inputs["anchors"])[kept]
            choices = self._choices(last_hidden[kept], committed)
        block = torch.cat([start[:, None], proposals], 1)[kept]
        behind = second["anchors"][kept, None] + torch.arange(proposals.shape[1], device=ids.device)
        return Rounds(
            verified=VerifiedRound(block, choices, committed),
            anchor=anchor[kept],
            logits=logits[kept].float(),
            labels=second["labels"][kept],
            supervised=supervised[kept],
            last_hidden=packed["last_hidden"][0, behind.clamp(max=packed["last_hidden"].shape[1] - 1)],
            document=kept // (len(proposals) // len(ids)),
        )

    @contextmanager
    def _states(self, anchors: Tensor, valid: Tensor) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """What the drafter is given besides: the states at ``anchors`` [R, n] of what the target reads inside."""
        if self.source is None:
            yield dict
            return
        with self.source.at(self.features.model, anchors, valid) as states:
            yield lambda: {"states": states()}

    def _carried(self, features: Tensor, second: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rejected rows that the second drafts read; the first ones where there is a limit."""
        if self.carried_rows == 0:
            return {}
        carried = second["carried"]
        if self.carried_rows is not None:
            carried = carried & (carried.cumsum(1) <= self.carried_rows)
        return {"carried_features": features, "carried_positions": second["carried_positions"], "carried": carried}

    def _choices(self, last_hidden: Tensor, committed: Tensor) -> Tensor:
        """The target's most likely tokens [N, W] behind rejected rows with hidden states [N, W, H]; 0 behind others."""
        rejected = torch.arange(last_hidden.shape[1], device=committed.device) >= committed[:, None]
        choices = torch.zeros_like(rejected, dtype=torch.long)
        parts = [self.features.logits(part).argmax(-1) for part in last_hidden[rejected].split(_PART)]
        choices[rejected] = torch.cat(parts)
        return choices
