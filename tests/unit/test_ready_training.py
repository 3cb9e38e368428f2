"""Training a reader: zero start, gradients, parity with the reference drafter, the stages, resume, errors, export."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_fixtures import MASK, make_target, make_tokens
from hybrid_fixtures import LAYERS, hybrid_shape, make_hybrid_target
from safetensors.torch import load_file
from test_carryover_training import with_some_recorded

from sglang_ext.carryover.reference import ReferenceDrafter
from sglang_ext.checkpoints import check, read_contract, read_target
from sglang_ext.commands import inspect
from sglang_ext.errors import UsageError
from sglang_ext.ready.config import ReadyConfig
from sglang_ext.ready.reader import value_key_order
from sglang_ext.training import ready
from sglang_ext.training.anchor_states import anchor_states
from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.carryover_models import CarryingDSpark
from sglang_ext.training.drafter_models import build_drafter, pack
from sglang_ext.training.encode import TokenDataset
from sglang_ext.training.export import export_drafter, load_drafter
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.ready_models import ReadingDSpark, merge_lora, train_reader_only, train_with_lora
from sglang_ext.training.ready_trainer import ReadyTrainer, StateSource, rows_of_anchors
from sglang_ext.training.targets_model import load_target

GAMMA = 4.0
READER = ReadyConfig(source_layers=(1, 3), value_heads=4, value_dim=12, key_dim=8, rank_k=3, rank_v=5)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def features(target_path: Path) -> TargetFeatures:
    return TargetFeatures(load_target(target_path, "cpu", "float32"), LAYERS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def base(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter to start from, with random weights whose attention is strong enough to matter."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(4)
    model = build_drafter(hybrid_shape(), target_path)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.o_proj.weight.mul_(20)
    export_drafter(model, hybrid_shape(), target_path, folder, torch.float32)
    return folder


@pytest.fixture()
def batch(data: Path, features: TargetFeatures) -> tuple[dict[str, Any], torch.Tensor]:
    """A packed batch with its labels, and the states at its anchors."""
    block = hybrid_shape().block
    settings: dict[str, Any] = {"batch_tokens": 256, "max_length": 64, "anchors": 8, "gamma": GAMMA}
    inputs = AnchorBatches(TokenDataset(data / "train"), block, count=1, seed=3, **settings)[0]
    source = StateSource(READER.source_layers, rows=5)
    with source.at(features.model, *rows_of_anchors(inputs)) as states:
        captured, last_hidden = features(inputs["input_ids"])
    return pack(inputs, captured, last_hidden), states()


def reading(base: Path, target: Path, config: ReadyConfig = READER, output: float = 0.0, **options: Any) -> Any:
    """The base with a reader; its output weights are random of the given size, or zero."""
    torch.manual_seed(6)
    model, _ = load_drafter(base, target, "sdpa", config, model_class=ReadingDSpark, **options)
    with torch.no_grad():
        for read in model.state_reader.reads:
            assert not read.out.any()
            read.out.normal_(std=output) if output else None
    return model


def test_a_fresh_reader_leaves_the_drafter_as_it_is_bit_for_bit(base: Path, target_path: Path, batch: Any) -> None:
    packed, states = batch
    packed = {name: value for name, value in packed.items() if name not in ("labels", "weights")}
    stock, _ = load_drafter(base, target_path, "sdpa")
    hidden, logits = stock.draft_blocks(**packed)
    found_hidden, found_logits = reading(base, target_path).draft_blocks(**packed, states=states)
    assert torch.equal(found_hidden, hidden) and torch.equal(found_logits, logits)
    changed, _ = reading(base, target_path, output=0.1).draft_blocks(**packed, states=states)
    assert (changed - hidden).abs().max() > 1e-2


@pytest.mark.parametrize(
    "config",
    [
        READER,
        ReadyConfig((0, 1, 3), 4, 12, 8, rank_k=2, rank_v=2, inject="before_attention", layers=(0, 1), query="source"),
    ],
    ids=["last", "before-all"],
)
def test_training_blocks_equal_the_serving_reference(
    config: ReadyConfig, base: Path, target_path: Path, features: TargetFeatures, data: Path, tmp_path: Path
) -> None:
    """Design rule 1, with the state of the anchor taken from transformers' own cache on the tokens before it."""
    block = hybrid_shape().block
    settings: dict[str, Any] = {"batch_tokens": 256, "max_length": 64, "anchors": 8, "gamma": GAMMA}
    inputs = AnchorBatches(TokenDataset(data / "train"), block, count=1, seed=3, **settings)[0]
    with StateSource(config.source_layers, rows=5).at(features.model, *rows_of_anchors(inputs)) as states:
        captured, last_hidden = features(inputs["input_ids"])
    packed = pack(inputs, captured, last_hidden)
    model = reading(base, target_path, config, output=0.3)
    drafted, _ = model.draft_blocks(
        **{name: value for name, value in packed.items() if name not in ("labels", "weights")}, states=states()
    )
    export_drafter(model, hybrid_shape(), target_path, tmp_path / "drafter", torch.float32)
    reference = ReferenceDrafter(tmp_path / "drafter", target_path)
    width, compared = inputs["input_ids"].shape[1], 0
    for index in inputs["valid"].nonzero()[::3, 0].tolist():
        row, anchor = divmod(int(inputs["anchors"][index]), width)
        ids = inputs["input_ids"][row]
        cache = features.model(input_ids=ids[None, :anchor], use_cache=True).past_key_values
        committed = torch.stack([cache.layers[i].recurrent_states[0][0] for i in config.source_layers])
        context = reference.context(captured[row, :anchor], torch.arange(anchor))
        tokens = torch.tensor([int(ids[anchor])] + [MASK] * 3)
        at = torch.arange(anchor, anchor + 4)
        expected = reference.block(context, tokens, at, value_key_order(committed))
        assert (drafted[index] - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
        # Negative controls: without the read, and with the state of the wrong anchor, the block is another one.
        assert (expected - reference.block(context, tokens, at)).abs().max() > 1e-3
        assert (expected - reference.block(context, tokens, at, value_key_order(committed.flip(0)))).abs().max() > 1e-3
        compared += 1
    assert compared > 5


def test_gradients_reach_what_is_tuned_and_nothing_else(
    base: Path, target_path: Path, batch: Any, features: TargetFeatures
) -> None:
    packed, states = batch
    model = reading(base, target_path, output=0.1)
    train_reader_only(model)
    model(**packed, states=states)["loss"].backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == {f"state_reader.{name}" for name in READER.weight_shapes(32, 2)}
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in touched)
    train_with_lora(model, rank=2, alpha=4)
    model(**packed, states=states)["loss"].backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert sum(".lora_" in name for name in touched) == 2 * 7 * 2  # two matrices, seven projections, two layers
    assert all(".lora_" in name or name.startswith("state_reader.") for name in touched)
    assert all(parameter.grad is None for parameter in features.model.parameters()) and not states.requires_grad


def test_merged_lora_computes_the_same_and_leaves_no_adapter(base: Path, target_path: Path, batch: Any) -> None:
    packed, states = batch
    packed = {name: value for name, value in packed.items() if name not in ("labels", "weights")}
    model = reading(base, target_path, output=0.1)
    names = {name for name, _ in model.named_parameters()}
    before, _ = model.draft_blocks(**packed, states=states)
    train_with_lora(model, rank=2, alpha=4)
    assert torch.equal(model.draft_blocks(**packed, states=states)[0], before)  # adapters start at nothing
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    adapted, _ = model.draft_blocks(**packed, states=states)
    merge_lora(model)
    assert {name for name, _ in model.named_parameters()} == names
    merged, _ = model.draft_blocks(**packed, states=states)
    assert torch.allclose(merged, adapted, atol=1e-5) and (merged - before).abs().max() > 1e-2


def test_state_controls(features: TargetFeatures, data: Path) -> None:
    block = hybrid_shape().block
    settings: dict[str, Any] = {"batch_tokens": 256, "max_length": 64, "anchors": 8, "gamma": GAMMA}
    inputs = AnchorBatches(TokenDataset(data / "train"), block, count=1, seed=3, **settings)[0]
    anchors, valid = rows_of_anchors(inputs)

    def fed(state: str, rows: slice = slice(None)) -> torch.Tensor:
        with StateSource((1, 3), 5, state).at(features.model, anchors[rows], valid[rows]) as states:
            features(inputs["input_ids"][rows])
        return states().view(-1, anchors.shape[1], 2, 4, 12, 8)

    committed = fed("committed")
    assert not fed("zero").any()
    shuffled, alone = fed("shuffled"), fed("shuffled", slice(0, 1))
    for row in range(len(anchors)):
        donor = (row + 1) % len(anchors)
        for place in valid[row].nonzero()[:, 0].tolist():
            other = committed[donor, place % int(valid[donor].sum())]
            assert torch.equal(shuffled[row, place], other)
    assert all(not torch.equal(alone[0, place], committed[0, place]) for place in valid[0].nonzero()[:, 0].tolist())
    stale = fed("stale")
    with anchor_states(
        features.model, [3], torch.arange(inputs["input_ids"].shape[1]).expand(len(anchors), -1)
    ) as all_:
        features(inputs["input_ids"])
    lags = set()
    for row, place in valid.nonzero().tolist():
        anchor = int(anchors[row, place])
        lag = next(n for n in range(1, 6) if torch.allclose(
            stale[row, place, 1], value_key_order(all_[3].recurrent[row, max(anchor - n, 0)]), atol=1e-6
        ))  # fmt: skip
        lags.add(lag)
    assert lags == {1, 2, 3, 4, 5}  # what a round of five verified rows can commit


def stage(target: Path, base: Path, data: Path, out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ready.add_arguments(parser)
    line = f"--drafter {base} --target {target} --data {data} --out {out} --device cpu --max-length 64 --steps 12"
    line += " --batch-tokens 256 --anchors 16 --lr 1e-2 --log-every 1 --held-out-batches 1 --eval-every 100"
    return parser.parse_args([*line.split(), "--dtype", "float32", *more])


def launch(args: argparse.Namespace) -> Any:
    return ready.train(args, *ready.prepare(args))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_two_stages_and_the_control_learn_and_export(
    target_path: Path, base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, control = (tmp_path / name for name in ("first", "second", "control"))
    target = read_target(target_path)
    alone = losses(launch(stage(target_path, base, data, first, "--tune", "reader", "--rank", "4")))
    assert sum(alone[-3:]) < 0.99 * sum(alone[:3])
    contract = read_contract(first)
    check(contract, target)
    assert contract.method == "ready" and contract.reader().rank_k == 4 and contract.reader_is_zero() is False
    assert contract.reader().source_layers == (1, 3)  # the last recurrent layer of each half
    weights, start = load_file(first / "model.safetensors"), load_file(base / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in start.items())  # the drafter is untouched
    held_out = json.loads((first / "provenance.json").read_text())["held_out"]
    for state in ("stale", "shuffled", "zero"):
        assert held_out[f"loss_{state}_state"] != held_out["loss"] and f"expected_length_{state}_state" in held_out

    tuned = losses(launch(stage(target_path, first, data, second, "--tune", "lora", "--lora-rank", "2")))
    assert sum(tuned[-3:]) < 0.95 * sum(tuned[:3])
    check(read_contract(second), target)
    after = load_file(second / "model.safetensors")
    assert after.keys() == weights.keys()
    changed = {name for name in after if not torch.equal(after[name], weights[name])}
    assert {name.split(".")[0] for name in changed} == {"layers", "state_reader"}

    without = losses(launch(stage(target_path, base, data, control, "--tune", "lora", "--reader", "off")))
    assert sum(without[-3:]) < 0.95 * sum(without[:3])
    contract = read_contract(control)
    assert contract.method == "none" and contract.tensors.keys() == start.keys()

    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    capsys.readouterr()
    assert inspect.run(parser.parse_args([str(second), "--target", str(target_path)])) == 0
    shown = capsys.readouterr().out
    assert "READY" in shown and "rank 4 for keys and 4 for values" in shown and "output trained" in shown


def test_a_reader_on_top_of_carryover_trains_in_rounds_and_keeps_the_embedding(
    target_path: Path, base: Path, data: Path, tmp_path: Path
) -> None:
    carrying = tmp_path / "carrying"
    torch.manual_seed(4)
    model, shape = load_drafter(base, target_path, model_class=CarryingDSpark)
    with torch.no_grad():
        model.carryover_embedding.normal_()
    export_drafter(model, shape, target_path, carrying, torch.float32)
    embedding = load_file(carrying / "model.safetensors")["carryover_embedding"]
    kept = {}
    for name, options in (
        ("rounds", ["--tune", "reader"]),
        ("plain", ["--tune", "reader", "--carry", "off"]),
        ("joint", ["--tune", "lora"]),
    ):
        trainer = launch(stage(target_path, carrying, data, tmp_path / name, "--steps", "3", *options))
        contract = read_contract(tmp_path / name)
        check(contract, read_target(target_path))
        assert contract.algorithm == "READY_CARRYOVER" and contract.reader_is_zero() is False
        kept[name] = load_file(tmp_path / name / "model.safetensors")["carryover_embedding"], losses(trainer)
    assert torch.equal(kept["rounds"][0], embedding) and torch.equal(kept["plain"][0], embedding)
    assert not torch.equal(kept["joint"][0], embedding)  # LoRA trains it too
    assert kept["rounds"][1][0] == kept["joint"][1][0] != kept["plain"][1][0]  # rounds start from second drafts


def test_second_drafts_read_the_state_at_the_anchor_the_round_leads_to(
    target_path: Path, base: Path, features: TargetFeatures, data: Path, tmp_path: Path
) -> None:
    """Carried rows and states together: the trained block is the reference drafter's after this very round."""
    options = ("--tune", "lora", "--carry", "on", "--embedding-start", "4", "--steps", "1", "--lr", "1e-9")
    trainer = launch(stage(target_path, base, data, tmp_path / "out", *options))
    model, trainer.features = trainer.model, features
    with torch.no_grad():
        rms = features(trainer.train_dataset[0]["input_ids"])[0].square().mean().sqrt()
        assert model.carryover_embedding.square().mean().sqrt() / rms == pytest.approx(4, rel=0.4)
        model.carryover_embedding.normal_(std=2.0)
        model.state_reader.reads[0].out.normal_(std=0.3)
    export_drafter(model, hybrid_shape(), target_path, tmp_path / "drafter", torch.float32)
    reference = ReferenceDrafter(tmp_path / "drafter", target_path)
    inputs = trainer.train_dataset[0]
    calls: list[dict[str, torch.Tensor]] = []
    drafted: list[torch.Tensor] = []
    blocks, forward = model.blocks, model.forward
    model.blocks = lambda **call: drafted.append(blocks(**call)[0]) or blocks(**call)
    model.forward = lambda **call: calls.append(call) or forward(**call)
    model.propose = lambda **call: with_some_recorded(inputs, type(model).propose(model, **call))
    trainer.run_batch(model, inputs)
    call, width = calls[-1], inputs["input_ids"].shape[1]
    captured, _ = features(inputs["input_ids"])
    rounds, sources = set(), model.state_reader.config.source_layers
    for index in (call["weights"][:, 0] > 0).nonzero()[::3, 0].tolist():
        row, anchor = divmod(int(call["anchors"][index]), width)
        ids, carried = inputs["input_ids"][row], call["carried"][index]
        cache = features.model(input_ids=ids[None, :anchor], use_cache=True).past_key_values
        committed = torch.stack([cache.layers[i].recurrent_states[0][0] for i in sources])
        assert reference.embedding is not None
        context = reference.context(
            torch.cat([captured[row, :anchor], call["carried_features"][index][carried] + reference.embedding]),
            torch.cat([torch.arange(anchor), call["carried_positions"][index][carried]]),
        )
        tokens = torch.tensor([int(ids[anchor])] + [MASK] * 3)
        expected = reference.block(context, tokens, torch.arange(anchor, anchor + 4), value_key_order(committed))
        assert (drafted[-1][index] - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
        rounds.add(int(carried.sum()))
    assert rounds >= {0, 4}  # full acceptance, and nothing accepted


def test_a_killed_run_goes_on_with_the_same_weights(target_path: Path, base: Path, data: Path, tmp_path: Path) -> None:
    options = ("--tune", "lora", "--rank", "2", "--lora-rank", "2", "--save-every", "3", "--held-out-batches", "0")
    whole = stage(target_path, base, data, tmp_path / "whole", "--steps", "6", *options)
    expected = losses(launch(whole))
    broken = stage(target_path, base, data, tmp_path / "broken", "--steps", "6", *options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadyTrainer, "run_batch", _killed_at(5))
        with pytest.raises(KeyboardInterrupt):
            launch(broken)
    assert (tmp_path / "broken" / "settings.json").is_file()
    resumed = launch(argparse.Namespace(**{**vars(broken), "resume": True}))
    assert losses(resumed)[-3:] == expected[-3:]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken")]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


def _killed_at(step: int) -> Any:
    run_batch, calls = ReadyTrainer.run_batch, iter(range(1, 1000))

    def killed(self: Any, model: Any, inputs: Any) -> Any:
        if next(calls) == step:
            raise KeyboardInterrupt
        return run_batch(self, model, inputs)

    return killed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--tune reader --reader off", "nothing to train; give --tune lora"),
        ("--tune lora --reader off --rank 4", "without a reader's options"),
        ("--tune lora --reader off --state zero", "without a reader's options and --state"),
        (
            "--tune reader --source-layers 0 2",
            "which is no recurrent layer of the target; its recurrent layers are 0, 1, 3",
        ),
        ("--tune reader --rank 9", "above the key_dim of 8"),
        ("--tune reader --layers 2", "the drafter has layers 0 to 1; name layers among them"),
        ("--tune reader --carry on", "has no Carryover embedding"),
        ("--tune lora --embedding-start 3", "starts no embedding: give a positive scale, with --carry on"),
        ("--tune lora --lora-rank 0", "--lora-rank 0 is too small"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_sentence(
    options: str, sentence: str, target_path: Path, base: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)) as refused:
        ready.run(stage(target_path, base, data, tmp_path / "out", *options.split()))
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")
    assert not (tmp_path / "out").exists()


def test_drafters_and_targets_that_cannot_read_are_refused(
    target_path: Path, base: Path, data: Path, tmp_path: Path
) -> None:
    with_reader, dflash, dense = (tmp_path / name for name in ("ready", "dflash", "dense"))
    export_drafter(reading(base, target_path), hybrid_shape(), target_path, with_reader, torch.float32)
    for options, sentence in (
        ("--rank-k 4", "rank_k 3, which training cannot change"),
        ("--reader off", "has a reader"),
    ):
        with pytest.raises(UsageError, match=sentence):
            ready.run(stage(target_path, with_reader, data, tmp_path / "out", "--tune", "lora", *options.split()))
    assert ready.prepare(stage(target_path, with_reader, data, tmp_path / "out", "--tune", "lora"))[0] == READER
    export_drafter(build_drafter(hybrid_shape("dflash"), target_path), hybrid_shape("dflash"), target_path, dflash)
    with pytest.raises(UsageError, match="is a DFlash drafter, and a reader can be trained only in a DSpark"):
        ready.run(stage(target_path, dflash, data, tmp_path / "out", "--tune", "reader"))
    make_target(dense)
    with pytest.raises(UsageError, match="has no recurrent layers whose states could be read"):
        ready.run(stage(dense, base, data, tmp_path / "out", "--tune", "reader"))
