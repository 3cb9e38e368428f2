"""Extractors for translation pairs: message catalogues and parallel pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sglang_ext.training.text.documents import Text
from sglang_ext.training.text.files import read_text, unit, walk

LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish"}
_DOCUMENT_BYTES = 500


class Pair(NamedTuple):
    group: str
    source_language: str
    target_language: str
    source: str
    target: str


def messages(root: Path, package: str, only: str, group: str) -> Iterator[Text]:
    """JSON catalogues beside each other, ``…/en.json`` and ``…/de.json``, joined by key path.

    ``group`` is a regular expression on the path of the English file; its first group names the unit of the split.
    """

    def pairs() -> Iterator[Pair]:
        for name, path in walk(root, ("en.json",), only):
            shared = unit(package, name, group)
            english = dict(_leaves(json.loads(read_text(path))))
            for code, language in LANGUAGES.items():
                other = path.with_name(f"{code}.json")
                if other.exists():
                    for key, text in _leaves(json.loads(read_text(other))):
                        if key in english:
                            yield Pair(shared, "English", language, english[key], text)

    yield from documents(package, pairs())


def gettext(root: Path, package: str) -> Iterator[Text]:
    """``locale/<language>/LC_MESSAGES/*.po``; the group is the catalogue, in all languages."""
    import polib

    def pairs() -> Iterator[Pair]:
        for code, language in LANGUAGES.items():
            for name, path in walk(root, (".po",), rf"/(locale|translations)/{code}/LC_MESSAGES/"):
                shared = f"{package}/{re.sub(rf'/{code}/LC_MESSAGES', '', name)}"
                for entry in polib.pofile(str(path)):
                    if entry.msgstr and not entry.fuzzy and not entry.obsolete:
                        yield Pair(shared, "English", language, entry.msgid, entry.msgstr)

    yield from documents(package, pairs())


def jupyterlab(root: Path, package: str) -> Iterator[Text]:
    """JupyterLab's JSON catalogues, ``{"context\\x04English": ["translation"]}``, one package per language."""
    language = LANGUAGES[package.rsplit("-", 1)[-1]]

    def pairs() -> Iterator[Pair]:
        for name, path in walk(root, (".json",), skip="dist-info|package.json"):
            for key, texts in json.loads(read_text(path)).items():
                if key and isinstance(texts, list) and texts and isinstance(texts[0], str):
                    yield Pair(f"jupyterlab/{Path(name).stem}", "English", language, key.split("\x04")[-1], texts[0])

    yield from documents(package, pairs())


def parallel_pages(root: Path, package: str, folder: str) -> Iterator[Text]:
    """Whole pages in several languages: paragraphs pair up where the sequences of block elements are equal."""
    base = root / folder

    def pairs() -> Iterator[Pair]:
        for name, path in walk(base / "en", (".html",)):
            english = _blocks(read_text(path))
            for code, language in LANGUAGES.items():
                other = base / code / name
                if not other.exists():
                    continue
                translated = _blocks(read_text(other))
                if [tag for tag, _ in english] == [tag for tag, _ in translated]:
                    for (_, source), (_, target) in zip(english, translated, strict=True):
                        # The group of the English page's own text (files.html), so that both fall on one side.
                        yield Pair(f"{package}/{folder}/en/{name}", "English", language, source, target)

    yield from documents(package, pairs())


def documents(package: str, pairs: Iterable[Pair]) -> Iterator[Text]:
    """Neighbouring pairs of one group and direction, packed into requests to translate a few lines.

    A text that several groups contain goes to the first only: its translation is known from either side of the split.
    """
    owner: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    packed: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for pair in pairs:
        source, target = " ".join(pair.source.split()), " ".join(pair.target.split())
        usable = len(source) >= 12 and " " in source and target and source != target and len(source) < 1200
        key = source.lower()
        if not usable or owner.setdefault(key, pair.group) != pair.group or (key, pair.target_language) in seen:
            continue
        seen.add((key, pair.target_language))
        packed.setdefault((pair.group, pair.source_language, pair.target_language), []).append((source, target))
    for (group, source_language, target_language), lines in packed.items():
        direction = f"{source_language} into {target_language}"
        for number, batch in enumerate(_batches(lines)):
            prompt = f"Translate from {direction}:\n" + "\n".join(source for source, _ in batch)
            yield Text(group, f"{group}/{direction}#{number}", prompt, "\n".join(target for _, target in batch))


def _batches(lines: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line[0]) + len(line[1])
        if size > _DOCUMENT_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, str):
        yield path, value


def _blocks(page: str) -> list[tuple[str, str]]:
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(page)
    for node in tree.css("script,style,pre,.top,#quickview,#footer,.outofdate,.toplang,.bottomlang,#comments_section"):
        node.decompose()
    body = tree.css_first("#page-content") or tree.body
    nodes = body.css("h1,h2,h3,p,li,dd") if body is not None else []
    return [(node.tag or "", " ".join(node.text(deep=True).split())) for node in nodes]
