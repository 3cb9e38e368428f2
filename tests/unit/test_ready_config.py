"""``ready_config`` and the checkpoints that have one: every way to be wrong has its sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fixtures import edit_config, make_drafter, make_sharded_drafter, make_target, set_tensor
from safetensors.torch import load_file

from sglang_ext.checkpoints import read_contract, read_target, validate
from sglang_ext.cli import main
from sglang_ext.errors import UsageError
from sglang_ext.ready.config import ReadyConfig, RecurrentShape
from sglang_ext.ready.reader import StateReader

RECURRENT = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 6,
    "linear_key_head_dim": 5,
}
SHAPE = RecurrentShape(num_layers=5, layers=(0, 1, 3), value_heads=4, value_dim=6, key_dim=5)
GOOD: dict[str, Any] = {
    "source_layers": [1, 3],
    "value_heads": 4,
    "value_dim": 6,
    "key_dim": 5,
    "rank_k": 2,
    "rank_v": 3,
}
Capture = pytest.CaptureFixture[str]


def test_shapes_of_known_targets() -> None:
    config = {"num_hidden_layers": 5, **RECURRENT}
    assert RecurrentShape.of(config) == SHAPE
    sizes = {"linear_num_value_heads": 48, "linear_value_head_dim": 128, "linear_key_head_dim": 128}
    large = RecurrentShape.of({"num_hidden_layers": 64, "full_attention_interval": 4, **sizes})
    assert large is not None and len(large.layers) == 48 and large.default_sources() == (30, 62)
    assert RecurrentShape.of({"num_hidden_layers": 5}) is None
    assert RecurrentShape.of({**config, "layer_types": ["full_attention"] * 5}) is None
    assert RecurrentShape.of({"num_hidden_layers": 4, **sizes}) is None


def test_a_configuration_survives_json_and_keeps_defaults() -> None:
    config = ReadyConfig.for_target(SHAPE, rank_v=3, layers=[0, 2])
    assert (config.source_layers, config.rank_k, config.inject, config.query) == (
        (1, 3),
        5,
        "after_attention",
        "value_head",
    )
    assert ReadyConfig.of(json.loads(json.dumps(config.as_json()))) == config
    assert config.reading_layers(3) == (0, 2) and ReadyConfig.of(GOOD).reading_layers(3) == (2,)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ranks": 8}, "unknown key ranks; the known ones are source_layers"),
        ({"value_heads": None}, "ready_config.value_heads is None"),
        ({"rank_k": 0}, "ready_config.rank_k is 0; it must be an integer of at least 1"),
        ({"rank_k": True}, "ready_config.rank_k is True"),
        ({"rank_k": 6}, "ready_config.rank_k is 6, above the key_dim of 5"),
        ({"rank_v": 7}, "ready_config.rank_v is 7, above the value_dim of 6"),
        ({"source_layers": []}, "must rise strictly and name the recurrent target layers to read"),
        ({"source_layers": [3, 1]}, r"ready_config.source_layers is \[3, 1\]"),
        ({"source_layers": "last"}, "ready_config.source_layers is 'last'"),
        ({"layers": [1, 1]}, r"ready_config.layers is \[1, 1\]; it must rise strictly and name 'last' or the draft"),
        ({"layers": "all"}, "ready_config.layers is 'all'"),
        ({"inject": "after_mlp"}, "ready_config.inject is 'after_mlp'; it must be after_attention or before_attention"),
        ({"query": "layer"}, "ready_config.query is 'layer'; it must be value_head or source"),
    ],
)
def test_wrong_configurations(changes: dict[str, Any], told: str) -> None:
    ReadyConfig.of(GOOD)
    with pytest.raises(UsageError, match=told) as refusal:
        ReadyConfig.of({**GOOD, **changes})
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


def test_what_is_missing_or_does_not_fit() -> None:
    with pytest.raises(UsageError, match="must be an object"):
        ReadyConfig.of([1])
    with pytest.raises(UsageError, match="has no key_dim"):
        ReadyConfig.of({name: value for name, value in GOOD.items() if name != "key_dim"})
    with pytest.raises(UsageError, match="draft layer 4, but the drafter has layers 0 to 1"):
        ReadyConfig.of({**GOOD, "layers": [4]}).reading_layers(2)
    with pytest.raises(UsageError, match="has 2, which is no recurrent layer"):
        ReadyConfig.for_target(SHAPE, source_layers=[1, 2], rank_k=2, rank_v=2)
    config = ReadyConfig.of(GOOD)
    assert config.target_problems(SHAPE) == []
    assert "no Gated DeltaNet layers" in config.target_problems(None)[0]
    other = RecurrentShape(num_layers=5, layers=(0, 3), value_heads=2, value_dim=6, key_dim=4)
    assert [problem.split(" is ")[0] for problem in config.target_problems(other)[1:]] == [
        "ready_config.value_heads",
        "ready_config.key_dim",
    ]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", **RECURRENT)


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    """A sound ReaDy drafter."""
    out = tmp_path / "ready"
    words = ["--ready", out, "--target", target, "--rank-k", 2, "--rank-v", 3]
    assert main(["convert", *map(str, [make_drafter(tmp_path / "base", "dspark"), *words])]) == 0
    return out


def test_convert_adds_a_reader_that_is_zero(tmp_path: Path, target: Path, drafter: Path) -> None:
    contract = read_contract(drafter)
    assert validate(contract, read_target(target)) == []
    assert (contract.algorithm, contract.base_algorithm, contract.reader_is_zero()) == ("READY", "DSPARK", True)
    assert (contract.carries, contract.embedding_is_zero()) == (False, None)
    assert contract.reader() == ReadyConfig.of(GOOD)
    before, after = load_file(tmp_path / "base" / "model.safetensors"), load_file(drafter / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    reader = StateReader(contract.reader(), contract.hidden_size, contract.num_layers)
    own = {name.removeprefix("state_reader."): w for name, w in after.items() if name.startswith("state_reader.")}
    assert before.keys() | {f"state_reader.{name}" for name in own} == after.keys()
    reader.load_state_dict(own)
    assert {str(w.dtype) for name, w in own.items() if "down" in name} == {"torch.float32"}
    assert {str(w.dtype) for name, w in own.items() if "reads" in name} == {"torch.bfloat16"}
    gram = reader.key_down @ reader.key_down.transpose(-1, -2)
    assert torch.allclose(gram, torch.eye(2).expand_as(gram), atol=1e-5)


@pytest.mark.parametrize("first", ["carryover", "ready"])
def test_both_mechanisms_in_either_order(tmp_path: Path, target: Path, first: str) -> None:
    base = make_sharded_drafter(tmp_path / "base", "dspark")
    words = {"carryover": ["--carryover"], "ready": ["--target", str(target), "--rank-k=2", "--rank-v=2", "--ready"]}
    second = "ready" if first == "carryover" else "carryover"
    assert main(["convert", str(base), *words[first], str(tmp_path / "one")]) == 0
    assert main(["convert", str(tmp_path / "one"), *words[second], str(tmp_path / "both")]) == 0
    contract = read_contract(tmp_path / "both")
    assert validate(contract, read_target(target)) == []
    assert (contract.algorithm, contract.architecture) == ("READY_CARRYOVER", "ReadyCarryoverDSparkModel")
    assert contract.carries and contract.reads and contract.embedding_is_zero() and contract.reader_is_zero()
    index = json.loads((tmp_path / "both" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {
        name for file in (tmp_path / "both").glob("*.safetensors") for name in load_file(file)
    }
    assert main(["convert", str(tmp_path / "both"), *words[first], str(tmp_path / "again")]) == 2


def test_inspect_tells_what_is_read(drafter: Path, target: Path, capsys: Capture) -> None:
    assert main(["inspect", str(drafter), "--target", str(target)]) == 0
    text = capsys.readouterr().out
    for fact in (
        "DSpark drafter, ReaDy (ReadyDSparkModel)",
        "--speculative-algorithm READY",
        "of target layers 1, 3, 4 heads of 6 x 5 each",
        "rank 2 for keys and 3 for values, 4 queries a source, in draft layer 1, after attention",
        "output zero: still untrained",
    ):
        assert fact in text, text
    assert main(["inspect", str(drafter), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ready"]["rank_v"], facts["reader_is_zero"]) == (3, True)
    assert main(["inspect", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recurrent"]["layers"] == [0, 1, 3]
    assert main(["inspect", str(target)]) == 0
    assert "of layers 0, 1, 3: 4 heads of 6 x 5" in capsys.readouterr().out


def problems(drafter: Path, target: Path | None = None) -> list[str]:
    found = validate(read_contract(drafter), read_target(target) if target else None)
    assert all(problem.endswith(".") for problem in found)
    return found


def test_wrong_weights(drafter: Path) -> None:
    name = "state_reader.reads.0.out"
    set_tensor(drafter, name, torch.full((8, 2, 4, 3), float("nan"), dtype=torch.bfloat16))
    assert ["not finite" in problem for problem in problems(drafter)] == [True]
    set_tensor(drafter, name, torch.zeros(8, 2, 4, 2))
    assert "is [8, 2, 4, 2] where ready_config promises [8, 2, 4, 3]" in problems(drafter)[0]
    set_tensor(drafter, name, torch.zeros(8, 2, 4, 3, dtype=torch.float64))
    assert "has the dtype F64" in problems(drafter)[0]
    set_tensor(drafter, name, torch.ones(8, 2, 4, 3))
    assert problems(drafter) == [] and read_contract(drafter).reader_is_zero() is False
    set_tensor(drafter, "state_reader.key_down", torch.zeros(2, 4, 2, 5, dtype=torch.bfloat16))
    assert "key_down has the dtype BF16; it must be F32" in problems(drafter)[0]
    set_tensor(drafter, "state_reader.key_down", None)
    assert "the weights lack state_reader.key_down" in problems(drafter)[0]
    set_tensor(drafter, "state_reader.gate", torch.zeros(1))
    assert "state_reader.gate, which ready_config has no place for" in problems(drafter)[1]


def test_wrong_drafters_and_targets(tmp_path: Path, drafter: Path, target: Path) -> None:
    dense = make_target(tmp_path / "dense")
    assert "no Gated DeltaNet layers" in problems(drafter, dense)[0]
    edit_config(drafter, ready_config={**GOOD, "rank_k": 9})
    assert "above the key_dim" in problems(drafter, target)[0]
    edit_config(drafter, ready_config=None)
    assert "no ready_config" in problems(drafter, target)[0]
    edit_config(drafter, ready_config=GOOD, use_gemma_norm=True)
    assert "Gemma norms" in problems(drafter)[0]
    edit_config(drafter, use_gemma_norm=None, architectures=["DSparkDraftModel"])
    assert "must be ReadyDSparkModel" in problems(drafter)[0]
    edit_config(drafter, architectures=["ReadyDSparkModel"], carryover_config={"embedding": "learned", "rounds": 1})
    assert "must be ReadyCarryoverDSparkModel" in problems(drafter)[0]


def refused(capsys: Capture, *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith(".\n")
    return err


def test_convert_refuses(tmp_path: Path, drafter: Path, target: Path, capsys: Capture) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    assert "add --target T" in refused(capsys, "convert", base, "--ready", out)
    dense = make_target(tmp_path / "dense")
    assert "no recurrent layers" in refused(capsys, "convert", base, "--ready", out, "--target", dense)
    ready = ["--ready", out, "--target", target]
    assert "already a ReaDy drafter" in refused(capsys, "convert", drafter, *ready, "--rank-k", 2)
    assert "rank_k is 8, above the key_dim" in refused(capsys, "convert", base, *ready, "--rank-k", 8)
    assert "no recurrent layer" in refused(capsys, "convert", base, *ready, "--source-layers", 2, "--rank-k", 2)
    flash = make_drafter(tmp_path / "flash", "dflash")
    assert "plain DSpark drafters only" in refused(capsys, "convert", flash, *ready)
    assert "goes with --ready" in refused(capsys, "convert", base, "--carryover", out, "--rank-k", 2)
    assert not out.exists()
