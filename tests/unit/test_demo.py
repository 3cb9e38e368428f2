"""The demo without a server: prompts, figures, the table, and what it refuses."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import make_drafter, make_target
from rich.console import Console
from safetensors.torch import load_file, save_file

from sglang_ext.checkpoints import read_contract, read_target
from sglang_ext.checkpoints.conversion import convert, convert_ready
from sglang_ext.demo import report
from sglang_ext.demo.__main__ import main
from sglang_ext.demo.measure import figures
from sglang_ext.demo.suites import MECHANISMS, Suite, suite
from sglang_ext.errors import UsageError
from sglang_ext.evaluation import record
from sglang_ext.evaluation.client import Answer
from sglang_ext.evaluation.prompts import Prompt, read_prompts
from sglang_ext.ready.config import ReadyConfig

MODELS = Path(__file__).parents[2] / "models"
HYBRID = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
PROMPTS = [Prompt("code-1", "code", "a"), Prompt("qa-1", "qa", "b"), Prompt("code-2", "code", "c")]
PLAIN = [Answer(prompt, "", (1, 2, 3, 4, 5), ()) for prompt in PROMPTS]


def train(drafter: Path) -> None:
    """Ones in the place of what is zero before training."""
    tensors = load_file(drafter / "model.safetensors")
    save_file({n: t if t.any() else torch.ones_like(t) for n, t in tensors.items()}, drafter / "model.safetensors")


def write_prompts(path: Path) -> Path:
    path.write_text("\n".join(json.dumps({"id": p.id, "category": p.category, "turns": [p.text]}) for p in PROMPTS))
    return path


def test_prompts_are_taken_evenly_and_in_order(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "prompts.jsonl")
    assert [prompt.id for prompt in read_prompts(path, 1)] == ["code-1", "qa-1"]
    assert [prompt.id for prompt in read_prompts(path, 9)] == ["code-1", "code-2", "qa-1"]
    path.write_text('{"id": "x", "turns": []}')
    with pytest.raises(UsageError, match=r"Line 1 of .* is no prompt"):
        read_prompts(path, 1)


def test_plain_decoding_is_its_own_reference() -> None:
    row = figures("plain decoding", PLAIN, PLAIN)
    assert (row["acceptance_length"], row["verify_steps"], row["identical"]) == (1.0, 12, True)
    assert row["by_category"] == {"code": 1.0, "qa": 1.0}


def test_a_method_is_judged_by_its_histograms_and_its_tokens() -> None:
    histograms = [(1, 0, 1), (0, 2), (0, 0, 0, 1)]
    answers = [Answer(p, "", (1, 2, 3, 4, 5), h) for p, h in zip(PROMPTS, histograms, strict=True)]
    row = figures("DSPARK", answers, PLAIN)
    assert (row["verify_steps"], row["acceptance_length"]) == (5, 1 + 7 / 5)
    assert row["by_category"] == {"code": 1 + 5 / 3, "qa": 2.0}
    assert row["identical"] and row["different"] == []
    answers[1] = Answer(PROMPTS[1], "", (1, 2, 3, 4, 6), (0, 2))
    row = figures("DSPARK", answers, PLAIN)
    assert (row["identical"], row["different"]) == (False, ["qa-1"])


def test_the_table_names_what_differs() -> None:
    rows = [figures("plain decoding", PLAIN, PLAIN)]
    wrong = [Answer(p, "", (9,), (1, 2)) for p in PROMPTS]
    rows.append(figures("CARRYOVER_DSPARK", wrong, PLAIN))
    console = Console(width=80, record=True)
    console.print(report.table("dense-target", rows))
    text = console.export_text()
    for part in ("dense-target", "CARRYOVER_DSPARK", "overall", "1.67", "no: code-1, qa-1, code-2", "yes"):
        assert part in text, text


def test_figures_are_written_whole(tmp_path: Path) -> None:
    document = report.document([{"methods": [figures("plain decoding", PLAIN, PLAIN)]}], {"max_tokens": 5})
    record.write(tmp_path / "build" / "demo.json", document)
    read = json.loads((tmp_path / "build" / "demo.json").read_text())
    assert read["targets"][0]["methods"][0]["verify_steps"] == 12 and read["environment"]["sglang"]
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["demo.json"]


def test_what_is_missing_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: object) -> str:
        out = tmp_path / "build" / "demo.json"
        assert main(["--models", str(tmp_path), "--out", str(out), *map(str, words)]) == 2
        printed, error = capsys.readouterr()
        assert printed == "" and error.count("\n") == 1 and error.startswith("sglang-ext demo: ")
        return error

    assert "dense-target is missing" in refused()
    make_target(tmp_path / "dense-target")
    assert "dspark-dense is missing" in refused()
    base = read_contract(make_drafter(tmp_path / "dspark-dense", "dspark"))
    assert "carryover-dspark-dense is missing" in refused()
    form = convert(base, tmp_path / "carryover-dspark-dense").path
    assert "carryover-dspark-dense is still untrained" in refused()
    train(form)
    assert "hybrid-target is missing" in refused()
    assert "There are no prompts" in refused("--only", "dense")
    write_prompts(tmp_path / "prompts.jsonl")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert "is in use" in refused("--only", "dense", "--port", listener.getsockname()[1])
    make_target(tmp_path / "other", hidden_size=16)
    assert "add --only" in refused("--target", "other")
    assert "hidden size" in refused("--only", "dense", "--target", "other")


def test_each_target_shows_its_mechanisms(tmp_path: Path) -> None:
    recurrent = read_target(make_target(tmp_path / "hybrid-target", **HYBRID)).recurrent
    assert recurrent is not None
    config = ReadyConfig.for_target(recurrent)
    base = read_contract(make_drafter(tmp_path / "dspark-hybrid", "dspark"))
    train(convert_ready(base, tmp_path / "ready-dspark-hybrid", config).path)
    both = convert(read_contract(tmp_path / "ready-dspark-hybrid"), tmp_path / "ready-carryover-dspark-hybrid").path

    def served() -> Suite:
        return suite(tmp_path, "hybrid-target", "dspark-hybrid", MECHANISMS["hybrid"])

    with pytest.raises(UsageError, match="ready-carryover-dspark-hybrid is still untrained"):
        served()  # its reader is trained, its embedding is not
    train(both)
    words = served().words
    assert list(words) == ["plain decoding", "DSPARK", "READY", "READY_CARRYOVER"]
    assert words["DSPARK"][-2:] == ["--method", "none"]
    assert words["READY"][-1] == str(tmp_path / "ready-dspark-hybrid")
    assert words["READY_CARRYOVER"][-1] == str(both)
    assert served().last.algorithm == "READY_CARRYOVER"


@pytest.mark.parametrize(
    ("kind", "methods"), [("dense", ["CARRYOVER_DSPARK"]), ("hybrid", ["READY", "READY_CARRYOVER"])]
)
def test_the_reference_models_are_all_there_and_trained(kind: str, methods: list[str]) -> None:
    shipped = suite(MODELS, f"{kind}-target", f"dspark-{kind}", MECHANISMS[kind])
    assert list(shipped.words) == ["plain decoding", "DSPARK", *methods]
