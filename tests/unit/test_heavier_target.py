"""``benchmarks/gpu/heavier.py``: more work, the same function; and its drafters fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import load

from sglang_ext.checkpoints import check, read_contract, read_target

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def heavier() -> Any:
    return load("heavier")


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_more_work_computes_the_same(heavier: Any, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    given = ROOT / f"models/{name}-target"
    drafter = ROOT / {"dense": "models/dspark-dense", "hybrid": "models/ready-carryover-dspark-hybrid"}[name]
    words = ["--layers", "12", "--width", "900", "--drafters", str(drafter), "--out", str(tmp_path / "out")]
    heavier.main([str(given), *words])
    made = tmp_path / f"out/{name}-target"
    ids = torch.randint(4, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    found, weights = [], []
    for path in (given, made):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            found.append(model(ids, output_hidden_states=True))
        weights.append(sum(parameter.numel() for parameter in model.parameters()))
    assert weights[1] > 2 * weights[0]
    trained, more = found
    assert len(more.hidden_states) == 13 and (trained.logits - more.logits).abs().max() < 1e-3 < trained.logits.std()
    features = read_contract(drafter).target_layer_ids
    for layer in features:
        expected = trained.hidden_states[layer + 1]
        assert (more.hidden_states[layer + 1] - expected).abs().max() < 1e-3 * expected.abs().max()
    contract = read_contract(tmp_path / "out" / drafter.name)
    check(contract, read_target(made))
    assert contract.target_layer_ids == features and contract.num_target_layers == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--layers 10 --out made", "10 layers of width 393216 are fewer or narrower than the target's 8 of 256"),
        ("--width 200 --out made", "or no multiple of its period of 4 layers; give larger numbers"),
        ("--out models", "models/hybrid-target would be written over; name another --out"),
        ("--out made --drafters none", "none has no config.json; name checkpoint directories"),
        ("--out made --drafters DRAFTER DRAFTER", "would be written over; name another --out, and each directory once"),
    ],
)
def test_wrong_use_is_refused_in_a_sentence(
    heavier: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    said: str,
) -> None:
    (tmp_path / "models/hybrid-target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given = words.replace("DRAFTER", str(ROOT / "models/dspark-hybrid")).split()
    with pytest.raises(SystemExit) as error:
        heavier.main([str(ROOT / "models/hybrid-target"), *given])
    assert error.value.code == 2 and said in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["models", "hybrid-target"]
