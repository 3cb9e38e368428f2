"""The anchor rule, as properties over random documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.drafting import DraftBlock
from sglang_ext.errors import UsageError
from sglang_ext.training.anchors import anchor_candidates, draw_anchors, supervised_drafts
from sglang_ext.training.batches import AnchorBatches

masks = st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4).map(torch.tensor)
blocks = st.builds(DraftBlock, st.sampled_from(["dflash", "dspark"]), st.integers(2, 9))


def drawn(supervised: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw_anchors(supervised, count, torch.Generator().manual_seed(seed))


@settings(max_examples=100, deadline=None)
@given(masks, st.integers(1, 16), st.integers(0, 2**31))
def test_anchors_are_valid_distinct_sorted_and_as_many_as_possible(
    supervised: torch.Tensor, count: int, seed: int
) -> None:
    anchors, valid = drawn(supervised, count, seed)
    assert anchors.shape == valid.shape == (len(supervised), count)
    for row, chosen, usable in zip(supervised.tolist(), anchors, valid, strict=True):
        candidates = [i for i in range(len(row) - 1) if row[i] and row[i + 1]]
        places = chosen[usable].tolist()
        assert places == sorted(set(places)) and set(places) <= set(candidates)
        assert len(places) == min(count, len(candidates))
        assert chosen[~usable].eq(0).all() and usable.tolist() == sorted(usable.tolist(), reverse=True)


def test_every_candidate_is_equally_likely_and_draws_differ() -> None:
    supervised = torch.zeros(1, 12, dtype=torch.bool)
    supervised[0, 3:12] = True  # candidates 3 .. 10
    hits = torch.zeros(12)
    for seed in range(2000):
        anchors, valid = drawn(supervised, 2, seed)
        assert valid.all()
        hits[anchors[0]] += 1
    assert hits[:3].sum() == 0 and hits[11] == 0
    # 4000 hits on 8 candidates: 500 each, standard deviation about 19; five of them on either side.
    assert (hits[3:11] - 500).abs().max() < 95


@settings(max_examples=100, deadline=None)
@given(masks, blocks, st.integers(0, 2**31))
def test_drafts_are_supervised_as_the_longest_prefix(supervised: torch.Tensor, block: DraftBlock, seed: int) -> None:
    anchors, valid = drawn(supervised, 4, seed)
    found = supervised_drafts(supervised, anchors, valid, block)
    assert found.shape == (*anchors.shape, block.drafts)
    for row in range(len(supervised)):
        for place, anchor in enumerate(anchors[row].tolist()):
            wanted, going = [], bool(valid[row, place])
            for j in range(block.drafts):
                position = anchor + 1 + j
                going = going and position < supervised.shape[1] and bool(supervised[row, position])
                wanted.append(going)
            assert found[row, place].tolist() == wanted


class Made:
    """Documents of given (length, response start); tokens name their document and position."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self.spans = spans

    def __len__(self) -> int:
        return len(self.spans)

    def document(self, index: int) -> tuple[np.ndarray, int]:
        length, start = self.spans[index]
        return np.arange(length) + 1000 * (index + 1), start


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(3, 150), st.integers(0, 20)), min_size=1, max_size=12), blocks, st.integers(0, 99)
)
def test_batches_label_blocks_inside_their_document(spans: list[tuple[int, int]], block: DraftBlock, seed: int) -> None:
    if not any(start + 2 <= min(length, 128) for length, start in spans):
        spans.append((10, 2))
    options = {"batch_tokens": 256, "max_length": 128, "anchors": 8, "gamma": 4.0}
    batches = AnchorBatches(Made(spans), block, count=6, seed=seed, **options)
    again = AnchorBatches(Made(spans), block, count=6, seed=seed, **options)
    twins = [again[i] for i in reversed(range(len(batches)))][::-1]  # a batch depends on its number alone
    for i in range(len(batches)):
        batch = batches[i]
        assert all(torch.equal(batch[name], twins[i][name]) for name in batch)
        flat = batch["input_ids"].flatten()
        width = batch["input_ids"].shape[1]
        assert batch["input_ids"].numel() == 256 and batch["anchors"].shape == (16,)
        for anchor, valid, labels, weights in zip(
            batch["anchors"].tolist(), batch["valid"], batch["labels"], batch["weights"], strict=True
        ):
            if not valid:
                assert weights.sum() == 0
                continue
            row, position = divmod(anchor, width)
            document = int(flat[anchor]) // 1000 - 1
            length, start = min(spans[document][0], 128), spans[document][1]
            assert start <= position and position + 1 < length
            kept = min(block.drafts, length - 1 - position)
            assert (weights > 0).tolist() == [j < kept for j in range(block.drafts)]
            assert labels[:kept].tolist() == (flat[anchor] + 1 + torch.arange(kept)).tolist()
            assert int(batch["lengths"][row]) == length


def test_an_epoch_visits_every_document_and_anchors_change() -> None:
    spans = [(20 + i, 5) for i in range(30)]
    batches = AnchorBatches(
        Made(spans), DraftBlock("dflash", 8), count=99, batch_tokens=128, max_length=64, anchors=8, gamma=4.0, seed=3
    )
    epochs = [range(n * batches.batches_per_epoch, (n + 1) * batches.batches_per_epoch) for n in (0, 1)]
    assert len(list(batches)) == len(batches) == 99
    seen = []
    for epoch in epochs:
        items = [batches[i] for i in epoch]
        assert {int(ids) // 1000 - 1 for item in items for ids in item["input_ids"][:, 0]} == set(range(30))
        seen.append(torch.cat([item["input_ids"].flatten()[item["anchors"]] for item in items]).tolist())
    assert seen[0] != seen[1]


def test_nothing_to_train_on_is_refused() -> None:
    options = {"count": 1, "batch_tokens": 128, "max_length": 64, "anchors": 8, "gamma": 4.0, "seed": 0}
    with pytest.raises(UsageError, match="nothing to train on"):
        AnchorBatches(Made([(80, 63), (5, 4)]), DraftBlock("dflash", 8), **options)


def test_candidates_need_the_next_token_too() -> None:
    supervised = torch.tensor([[False, True, True, False, True]])
    assert anchor_candidates(supervised).tolist() == [[False, True, False, False, False]]
