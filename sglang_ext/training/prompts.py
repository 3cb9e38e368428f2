"""``sglang-ext train prompts``: readable held-out prompts, a fixed number of each category, for acceptance figures."""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from sglang_ext.errors import UsageError
from sglang_ext.training.text.documents import CATEGORIES, Document, read_documents, read_json_lines, stable_hash

PROMPT_TOKENS = (20, 120)
_RESPONSE_TOKENS = {"code": 96, "prose": 96, "structured": 40, "translation": 40, "qa": 64, "math": 40}


def readable(document: Document) -> bool:
    """The text begins where a reader could begin too, and is not a table, an index or a licence."""
    instruction, _, beginning = document.prompt.partition("\n")
    if document.category == "translation":
        sentences = beginning.splitlines()
        plain = not re.search(r"[{}%<>¶]", beginning)
        return len(sentences) <= 8 and len(beginning) >= 30 * len(sentences) and plain
    if not instruction.startswith("Continue"):
        return True
    letters = sum(character.isalpha() or character == " " for character in beginning) / max(1, len(beginning))
    lines = beginning.splitlines()
    if document.category == "code":
        starts = lines[0].lstrip().startswith(("def ", "class ", "async def ", "@", "import ", "from ", "function "))
        return starts and len(lines) >= 3 and len(lines[0]) - len(lines[0].lstrip()) <= 4
    if document.category == "structured":
        return lines[0].startswith("{") or lines[0].endswith("{")
    whole = beginning.endswith(".") and max(map(len, lines)) >= 80 and not re.search(r"::|``|¶|[;=]", beginning)
    return letters > 0.88 and beginning[0].isupper() and whole


def choose(documents: Iterable[Document], tokens: dict[str, tuple[int, int]], number: int) -> list[Document]:
    """``number`` readable documents, at most one of a group and kind, taken from the sources in turn.

    ``tokens`` maps a document's id to the tokens of its (rendered) prompt and of its response.
    """
    queues: dict[str, list[Document]] = defaultdict(list)
    groups: set[tuple[str, str]] = set()
    for document in sorted(documents, key=lambda document: stable_hash(document.id)):
        prompt, response = tokens[document.id]
        long_enough = response >= _RESPONSE_TOKENS.get(document.category, 40)
        fits = PROMPT_TOKENS[0] <= prompt <= PROMPT_TOKENS[1] and long_enough
        key = (document.group, kind(document))
        if fits and key not in groups and readable(document):
            groups.add(key)
            queues[kind(document)].append(document)
    chosen: list[Document] = []
    while len(chosen) < number and any(queues.values()):
        for name in sorted(queues):
            if queues[name] and len(chosen) < number:
                chosen.append(queues[name].pop(0))
    return chosen


def kind(document: Document) -> str:
    """What the choice is spread over: the source and the kind of request."""
    if document.category == "math":
        return document.id.split("/")[1]
    request = re.match(r"Continue|Translate [\w ]+|Answer with|What does the \w+", document.prompt)
    return f"{document.source} {request.group() if request else ''}"


def read_prompts(path: Path) -> list[dict]:
    """The prompts of a file, ``{"id", "category", "turns": [text, ...]}`` a line.

    Raises:
        UsageError: a broken or incomplete line, by its number.
    """
    prompts = []
    for number, record in read_json_lines(path):
        turns = record.get("turns")
        if not isinstance(record.get("category"), str) or not isinstance(turns, list) or not turns:
            raise UsageError(f"{path} line {number} lacks `category` or `turns`: write both.")
        prompts.append(record)
    return prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path("build/data"), help="the corpus")
    parser.add_argument("--tokenizer", type=Path, default=Path("build/tokenizer"), help="from `tokenizer`")
    parser.add_argument("--out", type=Path, default=Path("build/prompts.jsonl"), help="output")
    parser.add_argument("--per-category", type=int, default=16, help="prompts of each category")


def run(args: argparse.Namespace) -> int:
    from sglang_ext.training.encode import encode, load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer)
    lines = []
    for category in CATEGORIES:
        path = args.data / "heldout" / f"{category}.jsonl"
        documents = list(read_documents(path)) if path.exists() else []
        tokens = {
            document.id: (start, len(ids) - start) for document, ids, start in encode(tokenizer, documents, 1 << 16)
        }
        chosen = choose(documents, tokens, args.per_category)
        print(f"{category}: {len(chosen)} prompts of {len(documents)} held-out documents")
        for number, document in enumerate(chosen, 1):
            lines.append({"id": f"{category}-{number:02}", "category": category, "turns": [document.prompt]})
    if not lines:
        raise UsageError(f"{args.data} has no held-out documents: build the corpus with `sglang-ext train data`.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return 0
