"""Mock servers of known timing, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@dataclass
class Mock:
    url: str
    log: Path

    def sent(self) -> dict[str, dict[str, Any]]:
        """What the server wrote down of each finished request, by its id."""
        return {entry["id"]: entry for entry in map(json.loads, self.log.read_text().splitlines())}


@pytest.fixture
def start_mock(tmp_path: Path) -> Iterator[Callable[..., Mock]]:
    processes: list[subprocess.Popen[str]] = []

    def start(capacity: int | None = None) -> Mock:
        log = tmp_path / f"mock-{len(processes)}.jsonl"
        command = [sys.executable, str(HERE / "mock_sse.py"), str(log), *([str(capacity)] if capacity else [])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return Mock(f"http://127.0.0.1:{process.stdout.readline().strip()}", log)

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def mock(start_mock: Callable[..., Mock]) -> Mock:
    return start_mock()


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., str]:
    """Writes a prompt file; each prompt is a script for the mock server, or a list of them for several turns."""

    def write(**scripts: Any) -> str:
        lines = []
        for name, script in scripts.items():
            turns = script if isinstance(script, list) else [script]
            row = {"id": name, "category": name.split("_")[0], "turns": [json.dumps(turn) for turn in turns]}
            lines.append(json.dumps(row))
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write
