"""``results.json`` and the CSV files of a run."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_ext import __version__
from sglang_ext.errors import UsageError
from sglang_ext_loadtest import summary, workload
from sglang_ext_loadtest.settings import Sweep, parse

SCHEMA = 1
RESULTS = "results.json"
JOURNAL = "journal.jsonl"
FLAT = ("ttft_ms", "tpot_ms", "itl_ms", "chunk_ms", "e2e_ms", "send_lag_ms")


def document(
    sweep: Sweep, cells: Sequence[dict[str, Any]], about: dict[str, Any], search: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Everything about a run: settings, environment, cells, and what they come to."""
    return complete(head(sweep), sweep, cells, about, search)


def complete(
    head: dict[str, Any],
    sweep: Sweep,
    cells: Sequence[dict[str, Any]],
    about: dict[str, Any],
    search: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document whose head is known: that of this process, or of the one that left a journal."""
    body = {"methods": about, "summary": summary.summarize(sweep, cells), "search": search, "cells": list(cells)}
    return head | body


def head(sweep: Sweep) -> dict[str, Any]:
    """What is known before the first cell: command, environment of the load generator, prompts, settings."""
    prompts = workload.load(sweep.workload, sweep.load.seed)
    digest = hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts.prompts]).encode())
    return {
        "schema": SCHEMA,
        "title": sweep.title,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "generator": {
            "sglang_ext": __version__,
            "locust": version("locust"),
            "python": platform.python_version(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "packages": _versions("sglang", "torch", "triton", "flashinfer-python", "transformers"),
            "gpus": _gpus(),
        },
        "prompts": {
            "count": len(prompts.prompts),
            "categories": sorted({prompt.category for prompt in prompts.prompts}),
            "languages": sorted({prompt.language or "not stated" for prompt in prompts.prompts}),
            "broken": prompts.broken,
            "sha256": digest.hexdigest(),
        },
        "sweep": asdict(sweep),
    }


class Journal:
    """``journal.jsonl``: the head, then each cell as soon as it is measured; what a killed sweep leaves behind."""

    def __init__(self, out: Path, sweep: Sweep) -> None:
        self.head = head(sweep)
        self._path = out / JOURNAL
        (out / RESULTS).unlink(missing_ok=True)  # of another sweep
        self._path.write_text(json.dumps(self.head) + "\n", encoding="utf-8")

    def add(self, cell: dict[str, Any], about: dict[str, Any]) -> None:
        """Write down one cell and what its method's server says about itself."""
        entry = {"cell": cell, "about": {cell["method"]: about[cell["method"]]}}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")


def recover(out: Path) -> tuple[dict[str, Any], Sweep]:
    """The document of a sweep that ended before it could write one, from its journal.

    Raises:
        UsageError: the journal is not there, or not even its head is whole.
    """
    path = out / JOURNAL
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        top = json.loads(first)
        sweep = parse(Sweep, top["sweep"], f"{path}: sweep")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"There is no journal of a sweep at {path} ({error}); give its directory.") from None
    cells: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line of a sweep that was killed
            entry = json.loads(line)
            cells.append(entry["cell"])
            about |= entry["about"]
    return complete(top, sweep, cells, about), sweep


def write(out: Path, results: dict[str, Any]) -> None:
    """``results.json``, ``cells.csv`` and ``requests.csv`` in a directory, each whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    _whole(out / RESULTS, _text(results))
    _table(out / "cells.csv", [_flat(cell) for cell in results["cells"]])
    keys = ("method", "level", "repeat")
    rows = [{key: cell[key] for key in keys} | row for cell in results["cells"] for row in cell["rows"]]
    _table(out / "requests.csv", rows)
    (out / JOURNAL).unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Any], Sweep]:
    """The results in a file or in a directory, and their sweep.

    Raises:
        UsageError: there are none, or another version wrote them.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        schema = results["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"There are no results at {file} ({error}); give the output directory of a run.") from None
    if schema != SCHEMA:
        raise UsageError(f"{file} has schema {schema}, this version reads {SCHEMA}; run the sweep again.")
    for cell in results["cells"]:
        columns = cell["rows"]
        cell["rows"] = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return results, parse(Sweep, results["sweep"], f"{file}: sweep")


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _gpus() -> list[str]:
    """Name, memory and driver of this machine's GPUs, empty where the driver's tool is not there."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _command() -> str:
    program = Path(sys.argv[0])
    words = ["python", "-m", f"sglang_ext_loadtest.{program.stem}"] if program.suffix == ".py" else [program.name]
    return shlex.join([*words, *sys.argv[1:]])


def _text(results: dict[str, Any]) -> str:
    """JSON to read and to diff: a line per cell, its requests in columns."""
    cells = []
    for cell in results["cells"]:
        rows = cell["rows"]
        columns = {key: [row[key] for row in rows] for key in (rows[0] if rows else {})}
        cells.append(json.dumps(cell | {"rows": columns}, separators=(",", ":")))
    head = json.dumps({key: value for key, value in results.items() if key != "cells"}, indent=1)
    return head.removesuffix("\n}") + ',\n "cells": [\n' + ",\n".join(cells) + "\n]}\n"


def _flat(cell: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {key: cell.get(key) for key in ("method", "level", "repeat", "started")}
    flat |= {"measured": cell["requests"]["measured"], "ok": cell["requests"]["ok"]}
    flat |= cell.get("throughput") or {}
    for name in FLAT:
        flat |= {f"{name}_{key}": value for key, value in (cell.get(name) or {}).items()}
    flat["acceptance_length"] = (cell.get("acceptance") or {}).get("length")
    flat["goodput_share"] = (cell.get("goodput") or {}).get("share")
    return flat | {"invalid": " ".join(cell["invalid"]), "warnings": " ".join(cell["warnings"])}


def _table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def _whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
