"""The document: one prompt and one response, and how a long text is cut into such pairs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from sglang_ext.errors import UsageError

CATEGORIES = ("code", "prose", "structured", "translation", "qa", "math")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")

PIECE_BYTES = 2400
"""A long text is cut into pieces of about this size: some 900 tokens at a vocabulary of 4096."""
_PROMPT_BYTES = (120, 320)
_RESPONSE_BYTES = 160
_INSTRUCTIONS = {
    "code": "Continue this code:",
    "prose": "Continue this text:",
    "structured": "Continue this JSON:",
}


class Text(NamedTuple):
    """What an extractor yields.

    ``group`` names the unit of the split: texts that share content share their group, in every category.
    """

    group: str
    name: str
    prompt: str
    response: str


@dataclass(frozen=True)
class Document:
    """One line of the corpus; ``id`` is unique, ``source`` is the package, ``group`` the unit of the split."""

    id: str
    category: str
    source: str
    licence: str
    group: str
    prompt: str
    response: str

    @property
    def text(self) -> str:
        return self.prompt + "\n" + self.response

    @property
    def size(self) -> int:
        """Bytes of UTF-8."""
        return len(self.prompt.encode()) + len(self.response.encode())


def stable_hash(text: str) -> int:
    """64 bits that depend on the text alone, the same on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def well_formed(text: Text) -> bool:
    """Both sides say something, survive UTF-8 and hold none of the tokens that structure a chat."""
    both = text.prompt + text.response
    if not text.prompt.strip() or not text.response.strip() or "\0" in both or "\ufffd" in both:
        return False
    if any(token in both for token in SPECIAL_TOKENS):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in both)


def pieces(text: str, size: int = PIECE_BYTES) -> Iterator[str]:
    """Cut at line ends, at a blank line where one lies in the last quarter of the piece."""
    lines: list[str] = []
    length = 0
    for line in text.splitlines():
        lines.append(line.rstrip())
        length += len(line) + 1
        if length > size or (length > size * 3 // 4 and not line.strip()):
            yield "\n".join(lines).strip("\n")
            lines, length = [], 0
    if lines:
        yield "\n".join(lines).strip("\n")


def continuation(category: str, piece: str) -> tuple[str, str] | None:
    """Split a piece into an instruction with its beginning, and the rest; None if it is too short for both."""
    low, high = _PROMPT_BYTES
    cut = piece.find("\n", low)
    if cut < 0 or cut > high:
        # A paragraph on one line: end at a sentence, else between two words.
        sentence = re.compile(r"[.!?:] ").search(piece, low, high)
        cut = sentence.start() + 1 if sentence else piece.find(" ", low, high)
    beginning, rest = piece[:cut].rstrip(), piece[cut + 1 :].strip("\n")
    if cut < 0 or len(rest) < _RESPONSE_BYTES:
        return None
    return f"{_INSTRUCTIONS.get(category, _INSTRUCTIONS['prose'])}\n{beginning}", rest


def continuations(category: str, group: str, name: str, text: str) -> Iterator[Text]:
    """All pieces of one text as prompt and response; they share the group."""
    for number, piece in enumerate(pieces(text)):
        pair = continuation(category, piece)
        if pair is not None:
            yield Text(group, f"{name}#{number}", *pair)


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Write JSON lines (UTF-8, one document a line)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")


def read_documents(path: Path) -> Iterator[Document]:
    """Read what :func:`write_documents` wrote; fields of other programs are ignored, ``group`` may be missing.

    Raises:
        UsageError: a line is no JSON object or lacks a field; the message names file, line number and field.
    """
    names = [field.name for field in fields(Document)]
    for number, record in read_json_lines(path):
        record.setdefault("group", record.get("id"))
        missing = [name for name in names if not isinstance(record.get(name), str)]
        if missing:
            raise UsageError(
                f"{path} line {number} has no text in the field {missing[0]!r}: "
                "build the corpus again with `sglang-ext train data`."
            )
        yield Document(**{name: record[name] for name in names})


def read_json_lines(path: Path) -> Iterator[tuple[int, dict]]:
    """Yield (line number from 1, object) and skip blank lines; a broken line is a UsageError with its number."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give a JSON lines file.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: convert it first.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path} line {number} is not valid JSON ({error}): correct or remove it.") from None
        if not isinstance(record, dict):
            raise UsageError(f"{path} line {number} is not a JSON object: write one object a line.")
        yield number, record
