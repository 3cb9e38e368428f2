"""Batches of documents with anchors, each a pure function of (seed, number).

One document stands in one row, alone: the target then sees exactly what it sees when serving that document, for full
attention and recurrent layers alike. Rows of a batch share one width (a power-of-two fraction of the longest), and a
batch always holds the same number of tokens and of anchor places, so that every step has the same shapes on a GPU.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sglang_ext.drafting import DraftBlock
from sglang_ext.errors import UsageError
from sglang_ext.training.anchors import draw_anchors, supervised_drafts
from sglang_ext.training.objectives import position_weights

_NARROWEST = 32  # tokens; shorter documents share this width


class Documents(Protocol):
    """Tokenised documents: ``document(i) -> (ids [n], response_start)``; tokens from there on are supervised."""

    def __len__(self) -> int: ...

    def document(self, index: int) -> tuple[np.ndarray, int]:
        """Token ids and the index of the first response token."""
        ...


class AnchorBatches(Dataset[dict[str, Tensor]]):
    """``count`` batches; item ``i`` is the whole i-th micro-batch, the same on every machine and after every resume.

    A batch has R rows of width T with ``R * T == batch_tokens``, and ``A = anchors * batch_tokens / max_length`` anchor
    places: up to ``anchors`` per document of full width, proportionally fewer on narrower ones. Documents longer than
    ``max_length`` are cut at their end; those without an anchor before the cut are left out. An epoch visits every
    document once, in an order drawn anew.

    Items: ``input_ids`` [R, T], ``lengths`` [R], ``anchors`` [A] (indices into the flattened rows), ``valid`` [A],
    ``labels`` [A, drafts] (recorded tokens) and ``weights`` [A, drafts] (position weights, 0 where not supervised).
    """

    def __init__(
        self,
        documents: Documents,
        block: DraftBlock,
        *,
        count: int,
        batch_tokens: int,
        max_length: int,
        anchors: int,
        gamma: float,
        seed: int,
    ) -> None:
        if max_length < _NARROWEST or batch_tokens % max_length:
            raise UsageError(
                f"{batch_tokens} tokens a batch do not divide into rows of {max_length}; give a batch size that is a "
                f"multiple of the longest document, which must have at least {_NARROWEST} tokens."
            )
        self.documents, self.block, self.count, self.seed = documents, block, count, seed
        self.batch_tokens, self.max_length, self.anchors = batch_tokens, max_length, anchors
        self.decay = position_weights(block.drafts, gamma)
        self.widths = _widths(max_length, anchors)
        spans = np.array([(len(ids), start) for ids, start in map(documents.document, range(len(documents)))])
        spans = spans.reshape(-1, 2)
        lengths = np.minimum(spans[:, 0], max_length)
        usable = spans[:, 1] + 2 <= lengths
        places = np.searchsorted(self.widths, lengths)
        self._buckets = [np.flatnonzero(usable & (places == b)) for b in range(len(self.widths))]
        self.batches_per_epoch = sum(
            -(-len(b) // (batch_tokens // w)) for b, w in zip(self._buckets, self.widths, strict=True)
        )
        self.usable = int(usable.sum())
        if not self.usable:
            raise UsageError(
                f"none of the {len(documents)} documents has two response tokens within {max_length} tokens, so there "
                "is nothing to train on; give longer documents or a larger maximum length."
            )
        self._epoch = -1
        self._plan: list[tuple[int, np.ndarray]] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        width, rows = self._batch(index)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        lengths, starts = torch.zeros(len(rows), dtype=torch.long), torch.zeros(len(rows), dtype=torch.long)
        for row, document in enumerate(rows):
            tokens, start = self.documents.document(int(document))
            tokens = tokens[:width]
            ids[row, : len(tokens)] = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
            lengths[row], starts[row] = len(tokens), start
        position = torch.arange(width)
        supervised = (position >= starts[:, None]) & (position < lengths[:, None])
        generator = torch.Generator().manual_seed(_mix(self.seed, 1, index))
        anchors, valid = draw_anchors(supervised, self.anchors * width // self.max_length, generator)
        drafted = self.block.drafted(anchors.flatten()).view(len(rows), -1).clamp(max=width - 1)
        labels = ids.gather(1, drafted).view(-1, self.block.drafts)
        weights = supervised_drafts(supervised, anchors, valid, self.block).flatten(0, 1) * self.decay
        packed = anchors + torch.arange(len(rows))[:, None] * width
        return {
            "input_ids": ids,
            "lengths": lengths,
            "anchors": torch.where(valid, packed, 0).flatten(),
            "valid": valid.flatten(),
            "labels": labels,
            "weights": weights,
        }

    def _batch(self, index: int) -> tuple[int, np.ndarray]:
        """Width and document numbers of batch ``index``; the epoch's order is drawn once and kept."""
        epoch, place = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng(_mix(self.seed, 0, epoch))
            plan = []
            for width, bucket in zip(self.widths, self._buckets, strict=True):
                rows = self.batch_tokens // width
                order = rng.permutation(bucket)
                # The last batch of a width is filled up from the front of the same order.
                full = np.resize(order, -(-len(order) // rows) * rows) if len(order) else order
                plan += [(width, full[i : i + rows]) for i in range(0, len(full), rows)]
            self._plan = [plan[i] for i in rng.permutation(len(plan))]
            self._epoch = epoch
        return self._plan[place]


def _widths(max_length: int, anchors: int) -> list[int]:
    """Row widths, rising: halves of ``max_length`` while they stay whole, wide enough and worth an anchor."""
    widths = [max_length]
    while widths[0] % 2 == 0 and widths[0] // 2 >= _NARROWEST and anchors * (widths[0] // 2) % max_length == 0:
        widths.insert(0, widths[0] // 2)
    return widths


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
