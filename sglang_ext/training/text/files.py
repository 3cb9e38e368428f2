"""Extractors for files: source code, documentation in reStructuredText and HTML, JSON."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sglang_ext.training.text.documents import Text, continuations

FILE = r"^(.*)$"
"""Every file is its own unit of the split."""

_BOILERPLATE = "script,style,nav,header,footer,.sidebar,#sidebar,.navheader,.navfooter,.sphinxsidebar,.related,.toc"
_BOILERPLATE += ",#top,#topbar,.headerlink,.permalink,#quickview,.toplang,.bottomlang,#comments_section,.outofdate"
_BOILERPLATE += ",.nosearch"
_BLOCKS = "p,li,h1,h2,h3,h4,dt,dd,tr,pre,div"


def read_text(path: Path) -> str:
    """A file's text, unpacked if it is gzip; UTF-8, else Latin-1."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def walk(root: Path, suffixes: tuple[str, ...], only: str = "", skip: str = "") -> Iterator[tuple[str, Path]]:
    """(path below root, file) of regular files in a fixed order, filtered by regular expressions on the path."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if not name.removesuffix(".gz").endswith(suffixes) or path.is_symlink() or not path.is_file():
            continue
        if (only and not re.search(only, name)) or (skip and re.search(skip, name)):
            continue
        yield name, path


def looks_written(text: str) -> bool:
    """Source that a person wrote: neither minified, nor a table of data, nor tiny or huge."""
    lines = text.splitlines()
    if not 200 <= len(text) <= 400_000 or max(map(len, lines)) >= 1000 or len(text) / len(lines) >= 120:
        return False
    sample = text[:20_000]
    return sum(character.isalpha() or character.isspace() for character in sample) > 0.55 * len(sample)


def unit(package: str, name: str, group: str) -> str:
    """The unit of the split a file belongs to: the first group of the regular expression on its path."""
    match = re.search(group, name)
    return f"{package}/{match.group(1) if match else name}"


def code(
    root: Path, package: str, suffixes: tuple[str, ...], only: str = "", skip: str = "", group: str = FILE
) -> Iterator[Text]:
    """Source files; the group is the file unless said otherwise, so that its docstrings can share it."""
    for name, path in walk(root, suffixes, only, skip):
        text = read_text(path)
        if looks_written(text):
            yield from continuations("code", unit(package, name, group), name, text)


def plain(root: Path, package: str, suffixes: tuple[str, ...], only: str = "", skip: str = "") -> Iterator[Text]:
    """Documentation kept as plain text or markup; the group is the page."""
    for name, path in walk(root, suffixes, only, skip):
        yield from continuations("prose", f"{package}/{name}", name, read_text(path))


def html(root: Path, package: str, only: str = "", skip: str = "") -> Iterator[Text]:
    """Documentation in HTML, without menus: short lines that a tenth of the pages repeat are dropped."""
    texts = {name: html_text(read_text(path)) for name, path in walk(root, (".html", ".htm"), only, skip)}
    seen = Counter(line for text in texts.values() for line in set(text.splitlines()) if line.strip())
    often = max(15, len(texts) // 10)
    for name, text in texts.items():
        lines = [line for line in text.splitlines() if len(line) >= 80 or seen[line] <= often]
        yield from continuations("prose", f"{package}/{name}", name, "\n".join(lines))


def html_text(page: str) -> str:
    """The readable text of a page's main part, one block element a line."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(page)
    for node in tree.css(_BOILERPLATE):
        node.decompose()
    main = tree.css_first("main") or tree.css_first("div.body") or tree.css_first("#page-content") or tree.body
    if main is None:
        return ""
    for node in main.css("pre"):
        node.replace_with("\x01" + node.text(deep=True).replace("\n", "\x01").replace(" ", "\x02") + "\x01")
    for node in main.css("td,th"):
        node.insert_before(" ")
    for node in main.css(_BLOCKS):
        node.insert_before("\x01")
    # Line ends of the HTML source are spaces; only block elements and preformatted text break lines.
    text = re.sub(r"[ \t\r\n]+", " ", main.text(deep=True)).replace("\x01", "\n").replace("\x02", " ")
    text = re.sub(r"[ \t]+\n", "\n", re.sub(r"\n (?=\S)", "\n", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def json_files(
    root: Path, package: str, only: str = "", skip: str = "", pieces_per_file: int = 8, group: str = FILE
) -> Iterator[Text]:
    """JSON files, indented and cut into pieces, of which the first few count."""
    for name, path in walk(root, (".json",), only, skip):
        try:
            value = json.loads(read_text(path))
        except ValueError:
            continue
        text = json.dumps(value, indent=2, ensure_ascii=False)
        for number, item in enumerate(continuations("structured", unit(package, name, group), name, text)):
            if number == pieces_per_file:
                break
            yield item
