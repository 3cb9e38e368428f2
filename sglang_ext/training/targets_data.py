"""Rows of equal length for language model training, made from documents of any length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


def pack_rows(documents: Iterable[np.ndarray], length: int) -> np.ndarray:
    """Pack token arrays into rows [N, ``length``] (uint16), losing less than one row of tokens.

    The first ``length`` tokens of a long document are a row of their own, so that the model sees beginnings where the
    server has them, at position 0. What follows them, and the short documents, are packed end to end.
    """
    heads: list[np.ndarray] = []
    rest: list[np.ndarray] = []
    for tokens in documents:
        tokens = tokens.astype(np.uint16)
        if len(tokens) >= length:
            heads.append(tokens[:length])
            tokens = tokens[length:]
        rest.append(tokens)
    stream = np.concatenate(rest) if rest else np.empty(0, np.uint16)
    packed = stream[: len(stream) // length * length].reshape(-1, length)
    return np.concatenate([np.stack(heads), packed]) if heads else packed


class PackedRows(Dataset[Tensor]):
    """Rows as int64 tensors [T]; whole batches [B, T] are gathered in one step."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.rows[index].astype(np.int64))

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """What torch's loader calls with a batch of indices."""
        return torch.from_numpy(self.rows[np.asarray(indices)].astype(np.int64))


def collate(rows: Tensor) -> dict[str, Tensor]:
    """A batch [B, T] as the model's arguments; the model shifts the labels itself."""
    return {"input_ids": rows, "labels": rows}
