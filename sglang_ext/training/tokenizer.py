"""``sglang-ext train tokenizer``: a byte-level BPE with the chat template, loadable by ``AutoTokenizer`` alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.errors import UsageError
from sglang_ext.training.text.documents import SPECIAL_TOKENS, read_documents, stable_hash

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT, START, END, MASK = SPECIAL_TOKENS
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Words with one leading character, single digits, runs of signs, line ends with the space before them, other space.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
MAX_LENGTH = 4096


def render_prompt(prompt: str) -> str:
    """One user turn up to where the response starts: what the chat template gives with a generation prompt."""
    return f"{START}user\n{prompt}{END}\n{START}assistant\n"


def train(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Train on ``texts``; the special tokens get ids 0-3 in the order of ``SPECIAL_TOKENS``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "extra_special_tokens": [START],
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def sample(data: Path, megabytes: float) -> Iterator[str]:
    """Training texts, an equal share of each category, chosen by the documents' names."""
    paths = sorted((data / "train").glob("*.jsonl"))
    if not paths:
        raise UsageError(f"{data} has no train/*.jsonl: build the corpus first with `sglang-ext train data`.")
    for path in paths:
        left = megabytes * 1e6 / len(paths)
        for document in sorted(read_documents(path), key=lambda document: stable_hash(document.id)):
            left -= document.size
            if left < 0:
                break
            yield render_prompt(document.prompt) + document.response


def bytes_per_token(tokenizer: Tokenizer, data: Path, documents: int = 200) -> dict[str, float]:
    """Held-out compression by category, over prompts and responses."""
    result = {}
    for path in sorted((data / "heldout").glob("*.jsonl")):
        texts = [document.text for _, document in zip(range(documents), read_documents(path), strict=False)]
        tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
        if tokens:
            result[path.stem] = sum(len(text.encode()) for text in texts) / tokens
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path("build/data"), help="the corpus")
    parser.add_argument("--out", type=Path, default=Path("build/tokenizer"), help="output folder")
    parser.add_argument("--vocabulary", type=int, default=4096, help="number of tokens")
    parser.add_argument("--megabytes", type=float, default=24.0, help="text to train on")


def run(args: argparse.Namespace) -> int:
    if not 256 + len(SPECIAL_TOKENS) <= args.vocabulary <= 65_536:
        raise UsageError(f"--vocabulary {args.vocabulary} is out of range: choose 260 to 65536 (ids are 16-bit).")
    tokenizer = train(sample(args.data, args.megabytes), args.vocabulary)
    if tokenizer.get_vocab_size() < args.vocabulary:
        raise UsageError(
            f"the text gives only {tokenizer.get_vocab_size()} tokens: "
            f"ask for fewer than --vocabulary {args.vocabulary} or add text."
        )
    save(tokenizer, args.out)
    print(f"{args.out}: {tokenizer.get_vocab_size()} tokens")
    for category, rate in bytes_per_token(tokenizer, args.data).items():
        print(f"{category:12} {rate:.2f} bytes per token on held-out text")
    return 0
