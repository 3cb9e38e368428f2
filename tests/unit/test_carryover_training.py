"""Draft-verify-draft training: branches equal one-by-one verification, second drafts equal what serving computes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_fixtures import MASK, make_target, make_tokens, shape
from safetensors.torch import load_file
from transformers import DynamicCache

from sglang_ext.carryover.reference import ReferenceDrafter
from sglang_ext.checkpoints import check, read_contract, read_target
from sglang_ext.errors import UsageError
from sglang_ext.training import carryover
from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.branches import accepted_drafts, verify_branches
from sglang_ext.training.carryover_models import CarryingDFlash, CarryingDSpark
from sglang_ext.training.carryover_trainer import second_blocks, second_drafts
from sglang_ext.training.drafter_models import build_drafter, pack
from sglang_ext.training.encode import TokenDataset
from sglang_ext.training.export import export_drafter
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.masks import anchored_blocks, dense_mask
from sglang_ext.training.targets_model import load_target

GAMMA = 4.0
KINDS = ("dflash", "dspark")


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def features(target_path: Path) -> TargetFeatures:
    return TargetFeatures(load_target(target_path, "cpu", "float32"), shape("dflash").feature_layers)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return TokenDataset(make_tokens(tmp_path_factory.mktemp("tokens")) / "train")


def batch(tokens: TokenDataset, kind: str) -> dict[str, torch.Tensor]:
    block = shape(kind).block
    return AnchorBatches(tokens, block, count=1, batch_tokens=256, max_length=64, anchors=8, gamma=GAMMA, seed=3)[0]


@pytest.fixture()
def drafter(request: pytest.FixtureRequest, target_path: Path) -> Any:
    """A random carrying drafter whose attention and embedding are strong enough to matter."""
    torch.manual_seed(2)
    model_class = CarryingDFlash if request.param == "dflash" else CarryingDSpark
    model = build_drafter(shape(request.param), target_path, "sdpa", model_class=model_class)
    with torch.no_grad():
        model.carryover_embedding.normal_(std=2.0)
        for layer in model.layers:
            layer.self_attn.o_proj.weight.mul_(20)
    return model


def with_some_recorded(inputs: dict[str, torch.Tensor], proposals: torch.Tensor) -> torch.Tensor:
    """Make every second anchor's proposals agree with the record for 1, 2, 3 or all tokens."""
    proposals = proposals.clone()
    for anchor in range(0, len(proposals), 2):
        agree = 1 + (anchor // 2) % proposals.shape[1]
        proposals[anchor, :agree] = inputs["labels"][anchor, :agree]
    return proposals


def test_branches_are_isolated_and_causal() -> None:
    rule = anchored_blocks(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([1, 4]), 2, causal=True)
    mask = dense_mask(rule, "cpu")[0, 0]
    assert mask[0].tolist() == [True, False, False, False, False, True, False, False, False]  # branch 0, its anchor
    assert mask[1].tolist() == [True, False, False, False, False, True, True, False, False]  # branch 0, row 1
    assert mask[3].tolist() == [False, False, False, True, False, False, False, True, True]  # branch 1: its document


def test_accepted_drafts_counts_the_leading_agreement() -> None:
    proposals, recorded = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3]]), torch.tensor([[1, 2, 3]] * 3)
    assert accepted_drafts(proposals, recorded).tolist() == [3, 1, 0]


def test_branches_equal_one_by_one_verification(features: TargetFeatures, tokens: TokenDataset) -> None:
    inputs = batch(tokens, "dflash")
    ids = inputs["input_ids"]
    rows, width = ids.shape
    start = (inputs["anchors"].view(rows, -1) - torch.arange(rows)[:, None] * width).clamp(min=0)
    proposals = torch.randint(0, 60, (rows, start.shape[1], 3), generator=torch.Generator().manual_seed(5))
    recorded = DynamicCache()
    features(ids, past_key_values=recorded)
    verified, last_hidden = verify_branches(features, ids, start, proposals, recorded)
    compared = 0
    for row in range(rows):
        for branch in range(0, start.shape[1], 3):
            anchor = int(start[row, branch])
            alone = torch.cat([ids[row, : anchor + 1], proposals[row, branch]])[None]
            wanted = features(alone)
            assert (verified[row, branch] - wanted[0][0, anchor:]).abs().max() < 1e-5
            assert (last_hidden[row, branch] - wanted[1][0, anchor:]).abs().max() < 1e-5
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("drafter", KINDS, indirect=True)
def test_second_draft_equals_the_serving_reference(
    drafter: Any, features: TargetFeatures, tokens: TokenDataset, target_path: Path, tmp_path: Path
) -> None:
    """Design rule 1: the block that training supervises is the block that serving drafts after this very round."""
    kind = "dspark" if isinstance(drafter, CarryingDSpark) else "dflash"
    inputs = batch(tokens, kind)
    rows = DynamicCache()
    captured, last_hidden = features(inputs["input_ids"], past_key_values=rows)
    packed = pack(inputs, captured, last_hidden)
    recorded = {name: value for name, value in packed.items() if name not in ("labels", "weights")}
    proposals = with_some_recorded(inputs, drafter.propose(**recorded))
    second = second_drafts(features, inputs, proposals, GAMMA, rows)

    seen: list[torch.Tensor] = []
    blocks = drafter.blocks
    drafter.blocks = lambda **call: seen.append(blocks(**call)[0]) or blocks(**call)
    drafter(**{**packed, **second})

    export_drafter(drafter, shape(kind), target_path, tmp_path / "drafter", torch.float32)
    reference = ReferenceDrafter(tmp_path / "drafter", target_path)
    assert reference.embedding is not None
    width, count, rounds, shifts = inputs["input_ids"].shape[1], proposals.shape[1], set(), []
    for index in range(len(proposals)):
        if not bool(second["weights"][index].any()):
            continue
        row, first = divmod(int(inputs["anchors"][index]), width)
        anchor = int(second["anchors"][index]) - row * width
        carried = second["carried"][index]
        rounds.add(int(carried.sum()))
        assert int(carried.sum()) == count - (anchor - first - 1)  # all rows that the round did not commit
        alone = torch.cat([inputs["input_ids"][row, : first + 1], proposals[index]])[None]
        rejected = features(alone)[0][0, first + 1 :][carried] + reference.embedding
        rejected_at = torch.arange(first + 1, first + 1 + count)[carried]
        context = reference.context(
            torch.cat([captured[row, :anchor], rejected]), torch.cat([torch.arange(anchor), rejected_at])
        )
        block = torch.tensor([int(inputs["input_ids"][row, anchor])] + [MASK] * (drafter.block_size - 1))
        at = torch.arange(anchor, anchor + drafter.block_size)
        expected = reference.block(context, block, at)
        assert (seen[0][index] - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
        without = reference.block(reference.context(captured[row, :anchor], torch.arange(anchor)), block, at)
        shifts.append(float((expected - without).abs().max()) if carried.any() else 1.0)
    assert rounds >= {0, 1, count}  # full acceptance (an empty carry), one rejected row, all of them
    assert min(shifts) > 1e-3  # negative control: leaving the carried rows out would have shown


@pytest.mark.parametrize("drafter", KINDS, indirect=True)
def test_gradients_reach_what_serves_the_carried_rows_and_nothing_else(
    drafter: Any, features: TargetFeatures, tokens: TokenDataset
) -> None:
    kind = "dspark" if isinstance(drafter, CarryingDSpark) else "dflash"
    inputs = batch(tokens, kind)
    rows = DynamicCache()
    packed = pack(inputs, *features(inputs["input_ids"], past_key_values=rows))
    recorded = {name: value for name, value in packed.items() if name not in ("labels", "weights")}
    proposals = drafter.propose(**recorded)
    assert not proposals.requires_grad and all(parameter.grad is None for parameter in drafter.parameters())
    second = second_drafts(features, inputs, proposals, GAMMA, rows)
    assert not second["carried_features"].requires_grad
    drafter(**{**packed, **second})["loss"].backward()
    for name in ("carryover_embedding", "fc.weight", "layers.0.self_attn.k_proj.weight"):
        gradient = dict(drafter.named_parameters())[name].grad
        assert gradient is not None and gradient.abs().max() > 0, name
    assert all(parameter.grad is None for parameter in features.model.parameters())


@pytest.mark.parametrize("drafter", KINDS, indirect=True)
def test_without_carried_rows_the_second_draft_is_the_base_drafters(
    drafter: Any, features: TargetFeatures, tokens: TokenDataset
) -> None:
    kind = "dspark" if isinstance(drafter, CarryingDSpark) else "dflash"
    inputs = batch(tokens, kind)
    rows = DynamicCache()
    packed = pack(inputs, *features(inputs["input_ids"], past_key_values=rows))
    proposals = drafter.propose(**{n: v for n, v in packed.items() if n not in ("labels", "weights")})
    second = second_drafts(features, inputs, proposals, GAMMA, rows)
    plain = {name: second[name] for name in ("anchors", "labels", "weights")}
    off = drafter(**{**packed, **second, "carried": torch.zeros_like(second["carried"])})["loss"]
    on = drafter(**{**packed, **second})["loss"]
    assert torch.allclose(off, drafter(**{**packed, **plain})["loss"], rtol=1e-5)
    assert abs(float(on - off)) > 1e-3 * float(off)


def test_rounds_count_alike_however_many_anchors_find_them(tokens: TokenDataset) -> None:
    """In a chain of rounds each commits ``c`` tokens, so ``c`` anchors find it; their weights add up to one round's."""
    inputs = batch(tokens, "dflash")
    recorded = with_some_recorded(inputs, torch.full_like(inputs["labels"], MASK))
    alike, rounds = (second_blocks(inputs, recorded, GAMMA, weighting) for weighting in ("anchors", "rounds"))
    committed = alike["anchors"] - inputs["anchors"]
    counted = alike["weights"][:, 0] > 0
    assert set(committed[counted].tolist()) >= {1, 2}
    assert torch.allclose(rounds["weights"][counted] * committed[counted, None], alike["weights"][counted])
    assert torch.equal(rounds["weights"][~counted], alike["weights"][~counted])


@pytest.fixture(scope="module")
def base(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter to start from, with random weights."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(4)
    export_drafter(build_drafter(shape("dspark"), target_path), shape("dspark"), target_path, folder, torch.float32)
    return folder


def stage(target: Path, base: Path, data: Path, out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    carryover.add_arguments(parser)
    line = f"--drafter {base} --target {target} --data {data} --out {out} --device cpu --max-length 64 --steps 30"
    line += " --batch-tokens 256 --anchors 16 --lr 3e-3 --log-every 1 --held-out-batches 1 --eval-every 100"
    return parser.parse_args([*line.split(), "--dtype", "float32", *more])


def test_the_stage_learns_and_exports_a_carryover_drafter_or_its_control(
    target_path: Path, base: Path, tmp_path: Path
) -> None:
    data = make_tokens(tmp_path / "tokens")
    losses = {}
    for carry, method in (("on", "carryover"), ("off", "none")):
        out = tmp_path / carry
        trainer = carryover.train(stage(target_path, base, data, out, "--carry", carry))
        losses[carry] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert sum(losses[carry][-5:]) < 0.9 * sum(losses[carry][:5])
        contract = read_contract(out)
        check(contract, read_target(target_path))
        assert contract.method == method
        weights = load_file(out / "model.safetensors")
        assert ("carryover_embedding" in weights) == (carry == "on")
    assert load_file(tmp_path / "on" / "model.safetensors")["carryover_embedding"].abs().max() > 0
    assert losses["on"][0] != losses["off"][0]  # the first batch already reads the carried rows


def test_the_embedding_starts_at_the_scale_of_the_features(target_path: Path, base: Path, tmp_path: Path) -> None:
    data = make_tokens(tmp_path / "tokens")
    first, starts = {}, {}
    for scale in ("0", "4"):
        out = tmp_path / scale
        trainer = carryover.train(
            stage(target_path, base, data, out, "--embedding-start", scale, "--steps", "1", "--lr", "1e-9")
        )
        first[scale] = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        starts[scale] = load_file(out / "model.safetensors")["carryover_embedding"]
    with TargetFeatures(load_target(target_path, "cpu", "float32"), shape("dspark").feature_layers) as features:
        inputs = trainer.train_dataset[0]
        rows = torch.arange(inputs["input_ids"].shape[1]) < inputs["lengths"][:, None]
        rms = features(inputs["input_ids"])[0][rows].square().mean().sqrt()
    assert starts["0"].abs().max() < 1e-6 and first["0"] != first["4"]
    assert starts["4"].square().mean().sqrt() / rms == pytest.approx(4, rel=0.3)
    for wrong in ("-1",), ("1", "--carry", "off"), ("1", "--distinction", "none"):
        with pytest.raises(UsageError, match="starts no embedding"):
            carryover.run(stage(target_path, base, data, tmp_path / "wrong", "--embedding-start", *wrong))


def test_distinctions_of_the_ablation(target_path: Path, base: Path, tmp_path: Path) -> None:
    data = make_tokens(tmp_path / "tokens")
    starts = {}
    for distinction in ("embedding", "none", "projection"):
        out = tmp_path / distinction
        trainer = carryover.train(stage(target_path, base, data, out, "--distinction", distinction, "--steps", "3"))
        starts[distinction] = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        assert (out / "provenance.json").is_file()
    assert starts["none"] == starts["embedding"] and abs(starts["projection"] - starts["none"]) < 1e-5
    # Without a distinction it is a Carryover drafter all the same; one with a projection could not be served.
    assert read_contract(tmp_path / "none").method == "carryover"
    assert load_file(tmp_path / "none" / "model.safetensors")["carryover_embedding"].abs().max() == 0
    assert not (tmp_path / "projection" / "model.safetensors").exists()
