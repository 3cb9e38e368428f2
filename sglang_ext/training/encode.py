"""``sglang-ext train encode``: documents as 16-bit token ids in one flat file, and the reader for training.

A folder holds ``tokens.npy`` (uint16 [all tokens], memory-mapped), ``offsets.npy`` (int64 [documents + 1]),
``response_starts.npy`` (int32 [documents], relative to the document), ``categories.npy`` (uint8 [documents]) and
``index.json`` (category names, document ids, counts, the tokenizer's hash).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sglang_ext.errors import UsageError
from sglang_ext.training.text.documents import Document, read_documents
from sglang_ext.training.tokenizer import END, END_OF_TEXT, render_prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = "sglang-ext tokens 1"
_BATCH = 4096


class TokenDataset:
    """Read one encoded side of the corpus (``train`` or ``heldout``).

    Raises:
        UsageError: the folder was not written by ``sglang-ext train encode`` or is incomplete.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self.index = json.loads((self.path / "index.json").read_text(encoding="utf-8"))
            self.tokens = np.load(self.path / "tokens.npy", mmap_mode="r", allow_pickle=False)
            self.offsets = np.load(self.path / "offsets.npy", allow_pickle=False)
            self.response_starts = np.load(self.path / "response_starts.npy", allow_pickle=False)
            self.category_ids = np.load(self.path / "categories.npy", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.path} holds no encoded documents ({error}): write them with `sglang-ext train encode`."
            ) from None
        if self.index.get("format") != FORMAT or self.offsets[-1] != len(self.tokens):
            raise UsageError(f"{self.path} is damaged or of another version: run `sglang-ext train encode` again.")

    def __len__(self) -> int:
        return len(self.response_starts)

    @property
    def categories(self) -> list[str]:
        return list(self.index["categories"])

    def category(self, i: int) -> str:
        return str(self.index["categories"][self.category_ids[i]])

    def document_id(self, i: int) -> str:
        return str(self.index["ids"][i])

    def document(self, i: int) -> tuple[np.ndarray, int]:
        """(ids int32 [T], position of the first response token); ids end with ``<|im_end|>`` unless cut."""
        ids = self.tokens[self.offsets[i] : self.offsets[i + 1]]
        return np.asarray(ids, dtype=np.int32), int(self.response_starts[i])

    def order(self, seed: int) -> np.ndarray:
        """All documents in a random order that depends on ``seed`` alone, int64 [documents]."""
        return np.random.default_rng(seed).permutation(len(self))


def encode(
    tokenizer: Tokenizer, documents: Iterable[Document], max_tokens: int
) -> Iterator[tuple[Document, list[int], int]]:
    """Yield (document, ids, response start).

    A response that passes ``max_tokens`` is cut; a document whose prompt does is left out. Prompt and response are
    tokenised apart, as in serving: no token spans the two.
    """
    for batch in _batches(documents):
        prompts = tokenizer.encode_batch_fast([render_prompt(document.prompt) for document in batch])
        responses = tokenizer.encode_batch_fast([document.response + END for document in batch])
        for document, prompt, response in zip(batch, prompts, responses, strict=True):
            if len(prompt.ids) < max_tokens:
                yield document, (prompt.ids + response.ids)[:max_tokens], len(prompt.ids)


def write_tokens(tokenizer: Tokenizer, paths: Iterable[Path], out: Path, max_tokens: int) -> TokenDataset:
    """Encode the JSON lines files (category = file name) into the folder ``out``."""
    paths = sorted(paths)
    categories = [path.stem for path in paths]
    ids: list[np.ndarray] = []
    names: list[str] = []
    starts: list[int] = []
    numbers: list[int] = []
    for number, path in enumerate(paths):
        for document, tokens, start in encode(tokenizer, read_documents(path), max_tokens):
            ids.append(np.asarray(tokens, dtype=np.uint16))
            names.append(document.id)
            starts.append(start)
            numbers.append(number)
    if not ids:
        raise UsageError(f"no documents to encode for {out}: build the corpus first with `sglang-ext train data`.")
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "tokens.npy", np.concatenate(ids))
    np.save(out / "offsets.npy", np.cumsum([0, *map(len, ids)], dtype=np.int64))
    np.save(out / "response_starts.npy", np.asarray(starts, dtype=np.int32))
    np.save(out / "categories.npy", np.asarray(numbers, dtype=np.uint8))
    index = {
        "format": FORMAT,
        "categories": categories,
        "documents": {name: numbers.count(number) for number, name in enumerate(categories)},
        "tokens": sum(map(len, ids)),
        "max_tokens": max_tokens,
        "vocabulary": tokenizer.get_vocab_size(),
        "end_of_text": tokenizer.token_to_id(END_OF_TEXT),
        "tokenizer_sha256": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        "ids": names,
    }
    (out / "index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")
    return TokenDataset(out)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of ``folder`` (its ``tokenizer.json``)."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"{folder} has no tokenizer.json: train one with `sglang-ext train tokenizer`.")
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() > 65_536 or tokenizer.token_to_id(END) is None:
        raise UsageError(f"{path} does not fit: ids must be 16-bit, and {END} must be one of its tokens.")
    return tokenizer


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path("build/data"), help="the corpus")
    parser.add_argument("--tokenizer", type=Path, default=Path("build/tokenizer"), help="from `tokenizer`")
    parser.add_argument("--out", type=Path, default=Path("build/tokens"), help="output folder")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longest document")


def run(args: argparse.Namespace) -> int:
    if args.max_tokens < 16:
        raise UsageError(f"--max-tokens {args.max_tokens} leaves no room for a response: give at least 16.")
    tokenizer = load_tokenizer(args.tokenizer)
    for side in ("train", "heldout"):
        dataset = write_tokens(tokenizer, (args.data / side).glob("*.jsonl"), args.out / side, args.max_tokens)
        counts = ", ".join(f"{count} {name}" for name, count in dataset.index["documents"].items())
        print(f"{dataset.path}: {dataset.index['tokens'] / 1e6:.2f} M tokens in {len(dataset)} documents ({counts})")
    return 0
