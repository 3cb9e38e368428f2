"""What every training stage needs around transformers' Trainer: a progress bar, resume, the loss log as a picture."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from sglang_ext.errors import UsageError

CHECKPOINTS = "checkpoints"
SETTINGS = "settings.json"


class Progress(TrainerCallback):
    """One bar on the main process: steps, tokens a second, and the latest of the logged figures in ``shown``."""

    def __init__(self, label: str, tokens_per_step: int, shown: Mapping[str, str]) -> None:
        self.label, self.tokens_per_step, self.shown = label, tokens_per_step, shown
        self._bar: tqdm[Any] | None = None
        self._latest: dict[str, str] = {}
        self._times: list[tuple[int, float]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar at the step the run starts from."""
        if state.is_world_process_zero:
            # A log file gets a line now and then instead of a redrawn one.
            interval = 0.5 if sys.stderr.isatty() else 15.0
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc=self.label, unit="step", mininterval=interval
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance by one step."""
        self._times.append((state.global_step, time.monotonic()))
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the figures of the log entry."""
        if self._bar is not None and logs:
            self._latest |= {text: f"{logs[name]:.3f}" for name, text in self.shown.items() if name in logs}
            rate = self._bar.format_dict["rate"]
            speed = {"tok/s": f"{rate * self.tokens_per_step:,.0f}"} if rate else {}
            self._bar.set_postfix(self._latest | speed, refresh=False)

    def tokens_per_second(self) -> float:
        """Speed over the second half of the steps done so far, evaluations and checkpoints included."""
        (first, start), (last, end) = self._times[len(self._times) // 2], self._times[-1]
        return (last - first) * self.tokens_per_step / (end - start) if last > first else 0.0

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


def use_progress(trainer: Trainer, progress: Progress) -> None:
    """Put ``progress`` in the place of the Trainer's own bar, which prints every log entry as a line."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(progress)


def claim_output(folder: Path, settings: Mapping[str, Any], resume: bool) -> Path | None:
    """Start a run in ``folder``, or go on with the one that was interrupted there.

    ``settings`` are kept in settings.json while the run lasts. Returns the newest complete checkpoint of a resumed run,
    else None. A checkpoint that a kill left half-written is passed over: the Trainer writes trainer_state.json last.

    Raises:
        UsageError: the folder is taken, holds no run to resume, or one with other settings.
    """
    record = folder / SETTINGS
    if not resume:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists already; give another --out, or --resume to go on with the run in it")
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        return None
    if not _is_json(record):
        raise UsageError(f"{folder} holds no interrupted run to go on with; leave --resume out")
    kept = json.loads(record.read_text(encoding="utf-8"))
    for name in settings:
        if kept.get(name) != settings[name]:
            raise UsageError(
                f"the run in {folder} was started with {name} = {kept.get(name)}, not {settings[name]}; resume it with "
                "its own settings"
            )
    found = {int(path.name.removeprefix("checkpoint-")): path for path in (folder / CHECKPOINTS).glob("checkpoint-*")}
    complete = {step: path for step, path in found.items() if _is_json(path / "trainer_state.json")}
    return complete[max(complete)] if complete else None


def release_output(folder: Path) -> None:
    """The run is complete: drop its settings and checkpoints."""
    (folder / SETTINGS).unlink()
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def write_curve(history: Sequence[Mapping[str, float]], path: Path, curves: Mapping[str, str], ylabel: str) -> None:
    """Draw logged figures over the steps as a PNG; ``curves`` maps names in the history to legend entries."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, legend in curves.items():
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=legend, marker="o" if len(points) < 30 else None, markersize=3)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
