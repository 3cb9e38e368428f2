"""Exported drafters: the fields and names the server reads, conversions between conventions, and the way back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_fixtures import LAYERS, MASK, VOCABULARY, make_target, shape
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from sglang_ext.drafting import DraftBlock
from sglang_ext.errors import UsageError
from sglang_ext.training.drafter_models import build_drafter
from sglang_ext.training.export import export_drafter, load_drafter, read_shape
from sglang_ext.training.features import TargetFeatures


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("target"))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def exported(kind: str, target: Path, out: Path, dtype: torch.dtype = torch.float32) -> dict:  # type: ignore[type-arg]
    export_drafter(build_drafter(shape(kind), target), shape(kind), target, out, dtype)
    return json.loads((out / "config.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_config_is_what_the_server_parses(kind: str, target: Path, tmp_path: Path) -> None:
    config = exported(kind, target, tmp_path)
    assert config["architectures"] == [{"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}[kind]]
    assert config["model_type"] == "qwen3" and config["rope_theta"] == 10000.0 and "rope_parameters" not in config
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": list(LAYERS)}
    assert config["block_size"] == 4 and config["num_target_layers"] == 4 and config["num_hidden_layers"] == 1
    assert config["layer_types"] == ["full_attention"] and config["vocab_size"] == VOCABULARY
    assert config.get("sample_from_anchor", False) is (kind == "dspark")
    if kind == "dspark":
        assert (config["markov_rank"], config["markov_head_type"]) == (8, "vanilla")
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_weights_are_the_trained_tensors_alone(kind: str, target: Path, tmp_path: Path) -> None:
    exported(kind, target, tmp_path, torch.bfloat16)
    weights = load_file(tmp_path / "model.safetensors")
    layer = {f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    layer |= {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {f"layers.0.{name}.weight" for name in layer}
    if kind == "dspark":
        names |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
        names |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert set(weights) == names
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert weights["fc.weight"].shape == (32, 3 * 32)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_reading_back_gives_the_same_drafter(kind: str, target: Path, tmp_path: Path) -> None:
    model = build_drafter(shape(kind), target)
    export_drafter(model, shape(kind), target, tmp_path, torch.float32)
    again, found = load_drafter(tmp_path, target)
    assert found == shape(kind)
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_nested_fields_of_published_configs_are_read(target: Path, tmp_path: Path) -> None:
    config = exported("dspark", target, tmp_path)
    for name in ("block_size", "markov_rank", "markov_head_type"):
        config["dflash_config"][name] = config.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path) == shape("dspark")


def test_layer_ids_mean_the_output_of_that_layer(target: Path) -> None:
    """Id i is transformers' hidden_states[i + 1]; the library stores i + 1. One off gives other features."""
    assert build_drafter(shape("dflash"), target).target_layer_ids == [i + 1 for i in LAYERS]
    model = Qwen3ForCausalLM.from_pretrained(target).eval()
    ids = torch.randint(VOCABULARY, (1, 9))
    with torch.no_grad(), TargetFeatures(model, [1]) as features:
        feature, _ = features(ids)
        states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(feature, states[2])
    assert (feature - states[1]).abs().max() > 0.1 and (feature - states[3]).abs().max() > 0.1


def test_block_sizes_count_rows_and_drafts() -> None:
    dflash, dspark = DraftBlock("dflash", 8), DraftBlock("dspark", 7)
    assert (dflash.drafts, dflash.samples_anchor) == (7, False)
    assert (dspark.drafts, dspark.samples_anchor) == (7, True)
    # Both draft the token after the anchor first: row 1 of DFlash, row 0 of DSpark.
    anchors = torch.tensor([5])
    assert dflash.drafted(anchors).tolist() == dspark.drafted(anchors).tolist() == [[6, 7, 8, 9, 10, 11, 12]]
    assert dflash.positions(anchors).tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]


def test_weights_that_do_not_fit_are_refused(target: Path, tmp_path: Path) -> None:
    exported("dspark", target, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "fc.weight": weights["fc.weight"][:, :64].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"fc\.weight"):
        load_drafter(tmp_path, target)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UsageError, match="no block_size"):
        read_shape(tmp_path)
    with pytest.raises(UsageError, match="Markov"):
        build_drafter(replace(shape("dspark"), markov_rank=0), target)
