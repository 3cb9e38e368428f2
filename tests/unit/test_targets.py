"""Target training on the CPU: it learns, survives a kill, records where the model comes from, and refuses wrong use."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from target_fixtures import VOCABULARY, make_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_ext.cli import main
from sglang_ext.training.targets_data import PackedRows, collate, pack_rows
from sglang_ext.training.targets_model import PRESETS, build_config


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def command(corpus: Path, out: Path, *more: str) -> list[str]:
    line = (
        f"train target --preset dense-tiny --tokens {corpus / 'tokens'} --tokenizer {corpus / 'tokenizer'} --out {out}"
    )
    line += " --steps 24 --batch-size 8 --sequence-length 64 --save-every 4 --device cpu --dtype float32"
    return [*line.split(), *more]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("models") / "target"
    assert main(command(corpus, out)) == 0
    return out


def test_training_lowers_the_loss_and_records_its_origin(trained: Path) -> None:
    losses = [entry["loss"] for entry in json.loads((trained / "training.json").read_text()) if "loss" in entry]
    assert len(losses) == 24 and np.mean(losses[-3:]) < np.mean(losses[:3]) - 1.0
    record = json.loads((trained / "provenance.json").read_text())
    assert record["settings"]["steps"] == 24 and record["training"]["tokens_seen"] == 24 * 8 * 64
    held_out = record["held_out_loss"]
    assert set(held_out) == {"math", "prose", "overall"}
    assert 0 < held_out["overall"]["loss"] < np.log(VOCABULARY)
    assert held_out["overall"]["tokens"] == held_out["math"]["tokens"] + held_out["prose"]["tokens"]
    assert "| math |" in (trained / "PROVENANCE.md").read_text()
    assert (trained / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not (trained / "checkpoints").exists() and not (trained / "settings.json").exists()


def test_the_model_loads_with_its_tokenizer_and_ends_its_turn(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert model.config.vocab_size == len(tokenizer) == VOCABULARY
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_killed_run_resumes_to_the_same_weights(corpus: Path, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "target"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_ext.cli", *command(corpus, out)], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "checkpoints" / "checkpoint-4" / "trainer_state.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (out / "model.safetensors").exists()
    # What a kill in the middle of writing leaves behind is passed over.
    (out / "checkpoints" / "checkpoint-23").mkdir()
    assert main(command(corpus, out, "--resume")) == 0
    expected, resumed = load_file(trained / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def damage_vocabulary(folder: Path) -> None:
    index = json.loads((folder / "train" / "index.json").read_text())
    (folder / "train" / "index.json").write_text(json.dumps(index | {"vocabulary": 4096}))


@pytest.mark.parametrize(
    "more, damage, sentence",
    [
        (["--preset", "huge"], None, "there is no preset 'huge': choose one of dense-small"),
        (["--steps", "0"], None, "give at least 1"),
        (["--batch-size", "4000"], None, "give a smaller --batch-size"),
        (["--resume"], None, "holds no interrupted run"),
        ([], damage_vocabulary, "was encoded with a vocabulary of 4096"),
        ([], shutil.rmtree, "holds no encoded documents"),
        (["--tokenizer", "nowhere"], None, "nowhere holds no tokenizer.json"),
    ],
)
def test_wrong_use_is_one_sentence(
    more: list[str],
    damage: Callable[[Path], None] | None,
    sentence: str,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    if damage:
        damage(copy / "tokens")
    assert main(command(copy, tmp_path / "out", *more)) == 2
    message = capsys.readouterr().err
    assert sentence in message and message.count("\n") == 1 and "Traceback" not in message
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_taken_folder_and_a_full_disk_are_refused(
    corpus: Path, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(command(corpus, trained)) == 2
    assert "exists already" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    assert main(command(corpus, tmp_path / "new")) == 2
    assert "training needs 500" in capsys.readouterr().err
    assert main(["train", "regenerate", "--target", str(corpus), "--tokens", str(corpus / "tokens"), "--out", "x"]) == 2
    assert "holds no model" in capsys.readouterr().err


def test_hybrid_config_has_what_both_sides_read() -> None:
    config = build_config("hybrid-small", 4096, [2, 0], 0).to_dict()
    assert config["full_attention_interval"] == 4
    assert [kind == "full_attention" for kind in config["layer_types"]] == [False, False, False, True] * 2
    assert config["linear_num_value_heads"] > config["linear_num_key_heads"]
    assert {"dense-small", "hybrid-small", "dense-medium", "dense-tiny", "hybrid-tiny"} == set(PRESETS)


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_packing_keeps_beginnings_and_loses_less_than_a_row(lengths: list[int], width: int) -> None:
    bounds = np.cumsum([0, *lengths])
    documents = [np.arange(a, b, dtype=np.int32) for a, b in itertools.pairwise(bounds)]
    rows = pack_rows(documents, width)
    assert rows.dtype == np.uint16 and rows.shape[1:] == (width,)
    assert len(np.unique(rows)) == rows.size and rows.size > sum(lengths) - width
    long = [document[:width].tolist() for document in documents if len(document) >= width]
    assert rows[: len(long)].tolist() == long
    if len(rows):
        batch = collate(PackedRows(rows).__getitems__([len(rows) - 1, 0]))
        assert batch["input_ids"].tolist() == batch["labels"].tolist() == rows[[len(rows) - 1, 0]].tolist()
