"""Draft-verify-draft training on a target with recurrent layers: its branches, the stage, the exported drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafter_fixtures import make_tokens
from hybrid_fixtures import LAYERS, hybrid_shape, make_hybrid_target
from safetensors.torch import load_file
from test_carryover_training import GAMMA, stage, with_some_recorded

from sglang_ext.checkpoints import check, read_contract, read_target
from sglang_ext.errors import UsageError
from sglang_ext.ready.config import ReadyConfig
from sglang_ext.training import carryover
from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.carryover_trainer import second_drafts
from sglang_ext.training.drafter_models import build_drafter
from sglang_ext.training.encode import TokenDataset
from sglang_ext.training.export import export_drafter
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.ready_models import ReadingDSpark
from sglang_ext.training.targets_model import load_target


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid_target(tmp_path_factory.mktemp("target"))


def test_carried_rows_are_what_the_target_makes_of_the_branch_alone(target_path: Path, tmp_path: Path) -> None:
    tokens = TokenDataset(make_tokens(tmp_path) / "train")
    block = hybrid_shape().block
    inputs = AnchorBatches(tokens, block, count=1, batch_tokens=256, max_length=64, anchors=8, gamma=GAMMA, seed=3)[0]
    proposals = torch.randint(0, 60, (len(inputs["anchors"]), block.drafts))
    proposals = with_some_recorded(inputs, proposals)
    width, compared = inputs["input_ids"].shape[1], 0
    with TargetFeatures(load_target(target_path, "cpu", "float32"), LAYERS) as features:
        second = second_drafts(features, inputs, proposals, GAMMA, None)
        for index in range(len(proposals)):
            row, first = divmod(int(inputs["anchors"][index]), width)
            carried = second["carried"][index]
            if carried.any():
                alone = features(torch.cat([inputs["input_ids"][row, : first + 1], proposals[index]])[None])[0][0]
                found, wanted = second["carried_features"][index], alone[first + 1 :]
                assert (found - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
                compared += 1
    assert compared > 10


def test_the_stage_learns_on_a_hybrid_target_and_exports(target_path: Path, tmp_path: Path) -> None:
    torch.manual_seed(4)
    base = tmp_path / "base"
    export_drafter(build_drafter(hybrid_shape(), target_path), hybrid_shape(), target_path, base, torch.float32)
    tokens = make_tokens(tmp_path / "tokens")
    trainer = carryover.train(stage(target_path, base, tokens, tmp_path / "out"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    contract = read_contract(tmp_path / "out")
    check(contract, read_target(target_path))
    assert contract.method == "carryover"
    assert load_file(tmp_path / "out" / "model.safetensors")["carryover_embedding"].abs().max() > 0
    assert carryover.run(stage(target_path, tmp_path / "out", tokens, tmp_path / "more", "--steps", "1")) == 0


def test_a_drafter_with_a_reader_is_sent_to_its_own_stage(target_path: Path, tmp_path: Path) -> None:
    model = build_drafter(hybrid_shape(), target_path, model_class=ReadingDSpark)
    model.add_reader(ReadyConfig(source_layers=(3,), value_heads=4, value_dim=12, key_dim=8))
    export_drafter(model, hybrid_shape(), target_path, tmp_path / "base", torch.float32)
    with pytest.raises(UsageError, match="has a reader of states; use train ready"):
        carryover.run(stage(target_path, tmp_path / "base", tmp_path, tmp_path / "out"))
