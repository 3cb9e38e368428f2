"""``sglang-ext inspect`` and ``sglang-ext convert`` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import FEATURES, edit_config, make_drafter, make_sharded_drafter, make_target, set_tensor
from safetensors import safe_open
from safetensors.torch import load_file

from sglang_ext.checkpoints import CARRYOVER_CONFIG, read_contract, validate
from sglang_ext.cli import main

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *argv: object) -> str:
    """The one sentence a refused command prints."""
    assert main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"sglang-ext {argv[0]}: ") and err.endswith(".\n")
    return err


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_convert_keeps_every_weight_and_adds_a_zero_embedding(
    tmp_path: Path, kind: str, dtype: torch.dtype, capsys: Capture
) -> None:
    base = make_drafter(tmp_path / "base", kind, dtype=dtype)
    assert main(["convert", str(base), "--carryover", str(tmp_path / "new" / "out")]) == 0
    out = tmp_path / "new" / "out"
    assert f"--draft {out}" in capsys.readouterr().out
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    embedding = after.pop("carryover_embedding")
    assert (embedding.dtype, list(embedding.shape), bool(embedding.any())) == (dtype, [FEATURES], False)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((out / "config.json").read_text())
    changed = {"architectures", "carryover_config"}
    assert {k: v for k, v in config.items() if k not in changed} == {
        k: v for k, v in json.loads((base / "config.json").read_text()).items() if k not in changed
    }
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    contract = read_contract(out)
    assert (validate(contract), contract.algorithm) == ([], f"CARRYOVER_{kind.upper()}")
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_convert_of_shards_rewrites_one_and_the_index(tmp_path: Path) -> None:
    base = make_sharded_drafter(tmp_path / "base", "dspark")
    assert main(["convert", str(base), "--carryover", str(tmp_path / "out")]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    holder = index["weight_map"]["carryover_embedding"]
    assert holder == index["weight_map"]["fc.weight"]
    old = json.loads((base / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == old["metadata"]["total_size"] + 2 * FEATURES
    for file in base.glob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "out" / file.name)
        assert ("carryover_embedding" in after) == (file.name == holder)
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert validate(read_contract(tmp_path / "out")) == []


def test_convert_refuses(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_drafter(tmp_path / "base", "dspark")
    out = tmp_path / "out"
    assert main(["convert", str(base), "--carryover", str(out)]) == 0
    capsys.readouterr()
    assert "already exists" in refused(capsys, "convert", base, "--carryover", out)
    assert "already a Carryover drafter" in refused(capsys, "convert", out, "--carryover", tmp_path / "two")
    other = make_target(tmp_path / "other", hidden_size=16)
    assert "hidden size" in refused(capsys, "convert", base, "--carryover", tmp_path / "two", "--target", other)
    assert "is a target model" in refused(capsys, "convert", other, "--carryover", tmp_path / "two")
    sliding = make_drafter(tmp_path / "sliding", "dflash", layer_types=["sliding_attention", "full_attention"])
    assert "sliding-window" in refused(capsys, "convert", sliding, "--carryover", tmp_path / "two")
    double = make_drafter(tmp_path / "double", "dflash", dtype=torch.float64)
    assert "fc.weight as F64" in refused(capsys, "convert", double, "--carryover", tmp_path / "two")
    blocked = tmp_path / "file"
    blocked.touch()
    assert "cannot be written" in refused(capsys, "convert", base, "--carryover", blocked / "out")

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang_ext.checkpoints.conversion.write_with", full_disk)
    assert "No space left" in refused(capsys, "convert", base, "--carryover", tmp_path / "two")
    assert not [path for path in tmp_path.iterdir() if "two" in path.name], "nothing half-written may stay"


def test_inspect_tells_what_a_drafter_is(tmp_path: Path, capsys: Capture) -> None:
    base = make_drafter(tmp_path / "base", "dspark")
    target = make_target(tmp_path / "target")
    main(["convert", str(base), "--carryover", str(tmp_path / "out")])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--target", str(target)]) == 0
    text = capsys.readouterr().out
    for fact in (
        "DSpark drafter, Carryover (CarryoverDSparkModel)",
        "--speculative-algorithm CARRYOVER_DSPARK",
        "7 drafts from 7 rows",
        "8 rows of the target",
        "vanilla, rank 3",
        "1, 2 of 5",
        "2 x 8 = 16 values",
        "BF16",
        "zero: still untrained (embedding learned, rounds 1)",
        f"fits           {target}",
    ):
        assert fact in text, text


def test_inspect_tells_the_lookup_table_and_the_carried_rows(tmp_path: Path, capsys: Capture) -> None:
    main(["convert", str(make_drafter(tmp_path / "base", "dflash")), "--carryover", str(tmp_path / "out")])
    edit_config(tmp_path / "out", carryover_config={**CARRYOVER_CONFIG, "lookup": [0, 0.5, 1, 2, 3], "carried_rows": 0})
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "carried rows   none, and the embedding is not used" in text and "untrained" not in text
    assert "lookup         bonus 0, 0.5, 1, 2, 3 for matches of 0 to 4 tokens" in text
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["lookup"], facts["carried_rows_limit"]) == ([0.0, 0.5, 1.0, 2.0, 3.0], 0)
    edit_config(tmp_path / "out", carryover_config={**CARRYOVER_CONFIG, "lookup": [1], "carried_rows": 3})
    assert main(["inspect", str(tmp_path / "out")]) == 2
    text = capsys.readouterr().out
    assert "at most 3 of a round" in text and "bonus" not in text and "lookup is [1]" in text


def test_inspect_json_holds_the_same_facts(tmp_path: Path, capsys: Capture) -> None:
    assert main(["inspect", str(make_drafter(tmp_path / "d", "dflash")), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["algorithm"], facts["verify_width"], facts["feature_width"]) == ("DFLASH", 8, FEATURES)
    assert (facts["problems"], facts["embedding_is_zero"], facts["weights"]["dtype"]) == ([], None, "BF16")


def test_inspect_of_targets(tmp_path: Path, capsys: Capture) -> None:
    hybrid = make_target(tmp_path / "hybrid", layer_types=["linear_attention"] * 4 + ["full_attention"])
    assert main(["inspect", str(hybrid)]) == 0
    text = capsys.readouterr().out
    assert "hybrid target (Qwen3ForCausalLM)" in text and "1 attention and 4 recurrent" in text
    assert main(["inspect", str(make_target(tmp_path / "empty", weights=False))]) == 2
    assert "no safetensors weights" in capsys.readouterr().out
    assert "is itself a target" in refused(capsys, "inspect", hybrid, "--target", hybrid)


def test_inspect_lists_everything_wrong(tmp_path: Path, capsys: Capture) -> None:
    base = make_drafter(tmp_path / "base", "dspark")
    main(["convert", str(base), "--carryover", str(tmp_path / "out")])
    capsys.readouterr()
    set_tensor(tmp_path / "out", "carryover_embedding", None)
    edit_config(tmp_path / "out", carryover_config={"embeding": "learned"})
    target = make_target(tmp_path / "target", vocab_size=99)
    assert main(["inspect", str(tmp_path / "out"), "--target", str(target), "--json"]) == 2
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert len(problems) == 3
    assert main(["inspect", str(tmp_path / "out"), "--target", str(target)]) == 2
    text = capsys.readouterr().out
    assert text.count("    - ") == 3 and f"wrong with {target}:" in text and "unknown key embeding" in text
    assert "There is no checkpoint directory" in refused(capsys, "inspect", tmp_path / "nowhere")
