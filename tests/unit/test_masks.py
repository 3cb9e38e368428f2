"""One pass over all blocks of packed documents equals drafting block by block with a growing cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_fixtures import LAYERS, VOCABULARY, make_target, shape
from hypothesis import given, settings
from hypothesis import strategies as st
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import repeat_kv

from sglang_ext.drafting import DraftBlock
from sglang_ext.training.drafter_models import build_drafter, pack
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.masks import TILE, anchored_blocks, dense_mask, flex_mask, with_own_rows


def block_mask(document_ids: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """What the rows of many blocks may attend to, as one boolean mask [A * size, T + A * size].

    ``document_ids`` [T] names the document of every context row of a packed sequence (-1: padding), ``anchors`` [A] are
    indices into it. Keys are the context rows followed by all block rows. A block row sees the context of its own
    document strictly before its anchor, and every row of its own block (no causal order inside a block).
    """
    rows = torch.arange(anchors.shape[0], device=anchors.device).repeat_interleave(block_size)
    anchor = anchors[rows][:, None]
    context = torch.arange(document_ids.shape[0], device=anchors.device)[None, :]
    same_document = (document_ids[anchor] == document_ids[None, :]) & (document_ids[None, :] >= 0)
    return torch.cat([same_document & (context < anchor), rows[:, None] == rows[None, :]], dim=1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_mask_is_the_rule_of_the_draft_block_and_the_librarys(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    padding = data.draw(st.integers(0, 4))
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    anchors = torch.tensor(data.draw(st.lists(st.integers(0, sum(lengths) - 1), min_size=1, max_size=5)))
    size = data.draw(st.integers(2, 5))
    for causal in (False, True):
        rule = anchored_blocks(documents, anchors, size, causal)
        # The library orders a block's rows only beside a window; one as wide as the sequence hides nothing.
        order = {"sliding_window": len(documents)} if causal else {}
        mod, queries, keys = create_anchor_block_mask_mod(documents, len(documents), anchors, size, **order)
        assert (rule.queries, rule.keys) == (queries, keys)
        library = create_mask(mod, B=None, H=None, Q_LEN=queries, KV_LEN=keys, device="cpu")
        assert torch.equal(dense_mask(rule, "cpu"), library)
    assert torch.equal(
        dense_mask(anchored_blocks(documents, anchors, size), "cpu")[0, 0], block_mask(documents, anchors, size)
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_sparse_mask_has_every_visible_key_and_no_other(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((TILE,), -1)])
    anchors = torch.tensor(data.draw(st.lists(st.integers(0, sum(lengths) - 1), min_size=1, max_size=40)))
    size, each = data.draw(st.integers(1, 160)), data.draw(st.integers(1, 20))
    begin = torch.randint(0, each + 1, (len(anchors), 1), generator=torch.Generator().manual_seed(1))
    carried = torch.arange(each) >= begin
    rows = torch.cat([documents, torch.full((carried.numel(),), -1)])
    rule = with_own_rows(anchored_blocks(rows, anchors, size), len(documents), carried)
    dense = dense_mask(rule, "cpu")[0, 0]
    own = (torch.arange(carried.numel()) // each == torch.arange(rule.queries)[:, None] // size) & carried.flatten()
    assert torch.equal(dense[:, len(documents) : len(rows)], own)

    mask = flex_mask(rule)
    shape = (-(-rule.queries // TILE), -(-rule.keys // TILE))
    padded = torch.zeros(shape[0] * TILE, shape[1] * TILE, dtype=torch.bool)
    padded[: rule.queries, : rule.keys] = dense
    tiles = padded.view(shape[0], TILE, shape[1], TILE)
    listed = {name: torch.zeros(shape, dtype=torch.bool) for name in ("full", "partial")}
    for row in range(shape[0]):
        for name, counts, numbers in (
            ("full", mask.full_kv_num_blocks, mask.full_kv_indices),
            ("partial", mask.kv_num_blocks, mask.kv_indices),
        ):
            listed[name][row, numbers[0, 0, row, : counts[0, 0, row]].long()] = True
    assert not (listed["full"] & listed["partial"]).any()
    assert tiles.permute(0, 2, 1, 3)[listed["full"]].all()  # a full tile is not masked any further
    assert torch.equal(listed["full"] | listed["partial"], tiles.any(3).any(1))
    assert mask.seq_lengths == (rule.queries, rule.keys)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


class StepwiseDrafter:
    """A drafter as a server runs it: context rows enter a cache one by one, a block attends to cache and itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.layers]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.model.rotary_emb(x, positions[None])
        half = x.shape[-1] // 2
        return x * cos[0, :, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[0, :, None]

    def _key_value(self, layer: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        attention = layer.self_attn
        key = attention.k_norm(attention.k_proj(x).view(len(x), -1, attention.head_dim))
        return self._rotate(key, positions), attention.v_proj(x).view(len(x), -1, attention.head_dim)

    def append(self, feature: Tensor, position: int) -> None:
        """Add one committed row's target feature [K*H]."""
        context = self.model.hidden_norm(self.model.fc(feature[None]))
        for layer, cache in zip(self.model.layers, self.cache, strict=True):
            cache.append(self._key_value(layer, context, torch.tensor([position])))

    def draft(self, block: DraftBlock, anchor_token: Tensor, position: int) -> Tensor:
        """Hidden states [B, H] of the block whose anchor stands at ``position``."""
        positions = block.positions(torch.tensor([position]))[0]
        x = self.model.embed_tokens(block.input_ids(anchor_token[None], self.model.mask_token_id)[0])
        for layer, cache in zip(self.model.layers, self.cache, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            query = attention.q_norm(attention.q_proj(normed).view(len(x), -1, attention.head_dim))
            own = self._key_value(layer, normed, positions)
            key, value = (torch.cat([*(row[i] for row in cache), own[i]]) for i in (0, 1))
            query = self._rotate(query, positions).transpose(0, 1)
            key, value = (repeat_kv(t.transpose(0, 1)[None], query.shape[0] // t.shape[1])[0] for t in (key, value))
            weights = (query @ key.transpose(1, 2) * attention.scaling).softmax(-1)
            x = x + attention.o_proj((weights @ value).transpose(0, 1).reshape(len(x), -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_blocks_under_the_mask_equal_step_by_step_drafting(kind: str, attention: str, target: Path) -> None:
    torch.manual_seed(5)
    model = build_drafter(shape(kind), target, attention).eval()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dim() == 2:
            parameter.mul_(8)  # away from the small initialisation, so that a wrong row shows
    lengths = torch.tensor([20, 13])
    ids = torch.randint(VOCABULARY, (2, 24))
    anchors = torch.tensor([0, 3, 11, 19, 24 + 1, 24 + 12, 0])
    with TargetFeatures(Qwen3ForCausalLM.from_pretrained(target), LAYERS) as target_features:
        features, last_hidden = target_features(ids)
    labels = torch.zeros(len(anchors), 1, dtype=torch.long)
    packed = pack(
        {"input_ids": ids, "lengths": lengths, "anchors": anchors, "labels": labels, "weights": labels},
        features,
        last_hidden,
    )
    del packed["labels"], packed["weights"]
    hidden, logits = model.draft_blocks(**packed)
    block = shape(kind).block
    for number, anchor in enumerate(anchors.tolist()):
        row, position = divmod(anchor, 24)
        stepwise = StepwiseDrafter(model)
        for t in range(position):
            stepwise.append(features[row, t], t)
        wanted = stepwise.draft(block, ids[row, position], position)
        torch.testing.assert_close(hidden[number], wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits[number], model.lm_head(wanted), atol=1e-4, rtol=0)
    # Negative control: a context one row too long (the anchor's own feature) gives other states.
    stepwise = StepwiseDrafter(model)
    for t in range(12):
        stepwise.append(features[0, t], t)
    assert (stepwise.draft(block, ids[0, 11], 11) - hidden[2]).abs().max() > 1e-2
