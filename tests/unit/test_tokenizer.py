"""Tokenizer, encoding, the dataset and the choice of prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sglang_ext.errors import UsageError
from sglang_ext.training import encode, prompts, tokenizer
from sglang_ext.training.text.documents import SPECIAL_TOKENS, Document, write_documents

VOCABULARY = 350
BEGINNING = "Continue this text:\nThe story began on a cold Monday morning in March when the {} hens were late again."


def call(module: ModuleType, *words: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args(words))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/, tokenizer/ and tokens/ made by the commands, on generated documents."""
    root = tmp_path_factory.mktemp("built")
    for side, low, high in (("train", 0, 60), ("heldout", 60, 90)):
        for category in ("math", "prose"):
            documents = [
                Document(
                    f"{category}/{k}", category, "test", "MIT", f"{category}{k}",
                    BEGINNING.format(k),
                    f"Then {k} hens came home.\n\nNobody had seen {k * k} hens before. " * 12,
                )
                for k in range(low, high)
            ]  # fmt: skip
            write_documents(root / f"data/{side}/{category}.jsonl", documents)
    data, folder = str(root / "data"), str(root / "tokenizer")
    assert call(tokenizer, "--data", data, "--out", folder, "--vocabulary", str(VOCABULARY)) == 0
    assert call(encode, "--data", data, "--tokenizer", folder, "--out", str(root / "tokens")) == 0
    return root


@pytest.mark.parametrize("model_type", [None, "qwen3", "qwen3_5_text"])
def test_auto_tokenizer_loads_it_beside_any_model(built: Path, tmp_path: Path, model_type: str | None) -> None:
    from transformers import AutoTokenizer

    for path in (built / "tokenizer").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": VOCABULARY}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == VOCABULARY
    assert loaded.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (loaded.eos_token, loaded.pad_token, loaded.mask_token) == ("<|im_end|>", "<|endoftext|>", "<|mask|>")
    text = "def f(x):\n    return 123 + x\r\n\n\tÄrger, élève, 日本語 🎉  ' don't"
    ids = loaded(text)["input_ids"]
    assert loaded.decode(ids) == text
    assert ids == encode.load_tokenizer(built / "tokenizer").encode(text).ids
    turn = [{"role": "user", "content": "Count to 10.\n"}]
    rendered = loaded.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert rendered == tokenizer.render_prompt("Count to 10.\n")
    whole = loaded.apply_chat_template([*turn, {"role": "assistant", "content": "1 2"}], tokenize=False)
    assert whole == rendered + "1 2<|im_end|>"
    assert loaded.decode(loaded(whole)["input_ids"], skip_special_tokens=True).split() == [
        "user", "Count", "to", "10.", "assistant", "1", "2",
    ]  # fmt: skip


def test_digits_stay_single(built: Path) -> None:
    loaded = encode.load_tokenizer(built / "tokenizer")
    assert loaded.encode("2468").tokens == ["2", "4", "6", "8"]
    vocabulary = loaded.get_vocab()
    assert not [word for word in vocabulary if sum(character.isdigit() for character in word) > 1]


def test_encoded_documents_come_back(built: Path) -> None:
    loaded = encode.load_tokenizer(built / "tokenizer")
    dataset = encode.TokenDataset(built / "tokens/train")
    assert len(dataset) == 120 and dataset.categories == ["math", "prose"]
    assert [dataset.category(i) for i in (0, 60)] == ["math", "prose"]
    assert dataset.document_id(61) == "prose/1"
    ids, start = dataset.document(61)
    assert ids.dtype == np.int32 and ids[-1] == 2
    text = loaded.decode(ids.tolist(), skip_special_tokens=False)
    line = json.loads((built / "data/train/prose.jsonl").read_text().splitlines()[1])
    assert text == tokenizer.render_prompt(line["prompt"]) + line["response"] + "<|im_end|>"
    assert loaded.decode(ids[start:-1].tolist()) == line["response"]
    assert ids[:start].tolist() == loaded.encode(tokenizer.render_prompt(line["prompt"])).ids


def test_long_responses_are_cut_and_long_prompts_left_out(built: Path, tmp_path: Path) -> None:
    loaded = encode.load_tokenizer(built / "tokenizer")
    short = Document("a", "x", "s", "MIT", "a", "Say it:", "word " * 100)
    long = Document("b", "x", "s", "MIT", "b", "Say it: " * 100, "word")
    write_documents(tmp_path / "x.jsonl", [short, long])
    dataset = encode.write_tokens(loaded, [tmp_path / "x.jsonl"], tmp_path / "tokens", 40)
    ids, start = dataset.document(0)
    assert len(dataset) == 1 and len(ids) == 40 and 0 < start < 40


def test_wrong_use_is_one_sentence(built: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no encoded documents"):
        encode.TokenDataset(tmp_path)
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        call(encode, "--tokenizer", str(tmp_path))
    with pytest.raises(UsageError, match="no documents to encode"):
        call(encode, "--data", str(tmp_path), "--tokenizer", str(built / "tokenizer"), "--out", str(tmp_path / "o"))
    with pytest.raises(UsageError, match="build the corpus first"):
        call(tokenizer, "--data", str(tmp_path))
    with pytest.raises(UsageError, match="gives only"):
        call(tokenizer, "--data", str(built / "data"), "--out", str(tmp_path), "--vocabulary", "60000")
    with pytest.raises(UsageError, match="out of range"):
        call(tokenizer, "--vocabulary", "70000")


def test_prompts_are_held_out_readable_and_numbered(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    words = ["--data", str(built / "data"), "--tokenizer", str(built / "tokenizer"), "--out", str(out)]
    assert call(prompts, *words, "--per-category", "3") == 0
    chosen = prompts.read_prompts(out)
    assert [prompt["id"] for prompt in chosen] == [f"{c}-0{k}" for c in ("prose", "math") for k in (1, 2, 3)]
    heldout = {json.loads(line)["prompt"] for line in (built / "data/heldout/prose.jsonl").read_text().splitlines()}
    assert all(prompt["turns"][0] in heldout for prompt in chosen)
    out.write_text('{"id": "a", "category": "x", "turns": ["hi"]}\n{"id": "b", "turns": []}\n')
    with pytest.raises(UsageError, match="line 2 lacks"):
        prompts.read_prompts(out)
