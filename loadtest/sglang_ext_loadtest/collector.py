"""The side that gathers: in the same process, or on Locust's master from its workers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from sglang_ext_loadtest.settings import Plan

RECORDS, RUN = "records.jsonl", "run.json"


class Collector:
    """Writes records as they come and knows when every process is done.

    Args:
        plan: what is being run; with ``out`` its directory receives ``records.jsonl`` and, at the end, ``run.json``.
        broken: prompts that could not be read.
        stop: tells every process to send no further request.
    """

    def __init__(self, plan: Plan, broken: list[str], stop: Any) -> None:
        self._plan, self._broken, self._stop = plan, broken, stop
        self._measured: set[int] = set()
        self._notes: dict[int, dict[str, Any]] = {}
        self._halted: str | None = None
        self._file: IO[str] | None = None
        self.expected = 1
        if plan.out:
            Path(plan.out).mkdir(parents=True, exist_ok=True)
            self._file = (Path(plan.out) / RECORDS).open("w", encoding="utf-8")

    def receive(self, message: dict[str, Any]) -> None:
        """Take one message of a session."""
        worker = int(message["worker"])
        if message["kind"] == "records":
            for record in message["records"]:
                if self._file:
                    self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        elif message["kind"] == "measured":
            self._measured.add(worker)
            self._halted = self._halted or message["halted"]
            if self._halted or len(self._measured) >= self.expected:
                self._stop()
        else:
            self._notes[worker] = message["notes"]

    def finished(self, alive: int) -> bool:
        """Whether every process that is still alive is done; the first time, write ``run.json``."""
        if len(self._notes) < min(self.expected, alive):
            # A worker that died will never report: the others need not wait for it.
            if alive < self.expected and len(self._measured) >= alive:
                self._stop()
            return False
        if self._file:
            lost = self.expected - len(self._notes)
            halted = self._halted or (f"{lost} of {self.expected} workers were lost" if lost else None)
            run = {
                "plan": asdict(self._plan),
                "broken_prompts": self._broken,
                "halted": halted,
                "workers": [self._notes[worker] for worker in sorted(self._notes)],
            }
            self._file.close()
            self._file = None
            (Path(self._plan.out or ".") / RUN).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        return True
