"""Where a model comes from, written beside it: provenance.json for programs, PROVENANCE.md for people."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "speculators", "peft", "flash-linear-attention", "tokenizers", "triton")


def environment() -> dict[str, str]:
    """Versions and hardware that a result depends on; packages that are not installed are left out."""
    import torch

    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        found["cuda"] = str(torch.version.cuda)
    else:
        found["device"] = "CPU"
    return found


def command() -> str:
    """The command line that is running, as a user would type it."""
    return shlex.join(["sglang-ext", *sys.argv[1:]])


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``, or an empty one if there is no such file."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_provenance(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``record`` (JSON types; ``title`` is the heading) as provenance.json and PROVENANCE.md into ``folder``."""
    (folder / "provenance.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = [f"# {record['title']}", ""]
    for key, value in record.items():
        if key != "title":
            lines += [f"## {_words(key)}", "", *_render(value), ""]
    (folder / "PROVENANCE.md").write_text("\n".join(lines), encoding="utf-8")


def _words(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _render(value: Any) -> list[str]:
    """Markdown lines: nested mappings as a table where all their values are mappings alike, else as a list."""
    if isinstance(value, Mapping) and value and all(isinstance(v, Mapping) for v in value.values()):
        columns = list(dict.fromkeys(column for row in value.values() for column in row))
        lines = ["| | " + " | ".join(map(_words, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {name} | " + " | ".join(_short(row.get(column, "")) for column in columns) + " |"
            for name, row in value.items()
        ]
        return lines
    if isinstance(value, Mapping):
        return [f"- {_words(str(name))}: {_short(entry)}" for name, entry in value.items()]
    if isinstance(value, list):
        return [f"- {_short(entry)}" for entry in value]
    return [f"`{value}`" if str(value).startswith("sglang-ext ") else _short(value)]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, (list, Mapping)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
