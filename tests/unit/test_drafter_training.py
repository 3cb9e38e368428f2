"""Drafter training end to end on the CPU: it learns, resumes to the same loss, accumulates like one big batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_fixtures import arguments, make_target, make_tokens
from safetensors.torch import load_file
from transformers import TrainerCallback

from sglang_ext.errors import UsageError
from sglang_ext.training import drafter_run, drafters
from sglang_ext.training.drafter_run import train_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def losses(trainer: drafter_run.DrafterTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("kind", "factor"), [("dflash", 0.6), ("dspark", 0.7)])
def test_loss_falls_and_the_run_leaves_a_complete_folder(
    kind: str, factor: float, target: Path, tokens: Path, tmp_path: Path
) -> None:
    args = arguments(target, tokens, tmp_path / "out", "--steps", "60", "--lr", "1e-2", kind=kind)
    trainer = train_drafter(drafters.resolve(args), args)
    history = losses(trainer)
    assert np.mean(history[-5:]) < factor * np.mean(history[:3])
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated and 1 < evaluated[-1]["eval_acceptance_length"] <= 5
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "loss_curve.png", "acceptance_length_curve.png"} <= found
    assert {"PROVENANCE.md", "provenance.json"} <= found and "checkpoints" not in found


class Killed(Exception):
    """Stands for the signal that ends a run."""


class KillAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:  # type: ignore[no-untyped-def]
        if state.global_step == self.step:
            raise Killed


def test_a_killed_run_resumes_to_the_same_weights(
    target: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_args = arguments(target, tokens, tmp_path / "whole")
    whole = train_drafter(drafters.resolve(whole_args), whole_args)

    args = arguments(target, tokens, tmp_path / "out")
    use_progress = drafter_run.use_progress

    def killing(trainer, progress) -> None:  # type: ignore[no-untyped-def]
        use_progress(trainer, progress)
        trainer.add_callback(KillAt(8))

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(drafter_run, "use_progress", killing)
        train_drafter(drafters.resolve(args), args)
    # The last checkpoint is of step 5; a newer, half-written one must be passed over.
    (tmp_path / "out" / "checkpoints" / "checkpoint-7").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        train_drafter(drafters.resolve(args), args)
    changed = arguments(target, tokens, tmp_path / "out", "--resume", "--lr", "1e-3")
    with pytest.raises(UsageError, match="learning_rate"):
        train_drafter(drafters.resolve(changed), changed)
    args.resume = True
    resumed = train_drafter(drafters.resolve(args), args)

    assert losses(resumed) == losses(whole)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_accumulated_micro_batches_equal_one_big_batch(
    target: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches of 4 rows and one batch of the same 8 rows make the same steps: same loss, same weights."""
    made = drafter_run.AnchorBatches

    class Joined(made):  # type: ignore[misc, valid-type]
        """Item i of the big run is items 2i and 2i + 1 of the small run."""

        def __init__(self, *documents: Any, count: int, **options: Any) -> None:
            super().__init__(*documents, count=2 * count, **options)

        def __len__(self) -> int:
            return int(self.count // 2)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            first, second = super().__getitem__(2 * index), super().__getitem__(2 * index + 1)
            rows = first["input_ids"].numel()
            second["anchors"] = torch.where(second["valid"], second["anchors"] + rows, 0)
            return {name: torch.cat([first[name], second[name]]) for name in first}

    # One width only, so that two batches can be stacked.
    more = ("--max-length", "32", "--batch-tokens", "128", "--steps", "4", "--held-out-batches", "0")
    small_args = arguments(target, tokens, tmp_path / "small", *more, "--accumulate", "2")
    small = train_drafter(drafters.resolve(small_args), small_args)
    monkeypatch.setattr(drafter_run, "AnchorBatches", Joined)
    big_args = arguments(target, tokens, tmp_path / "big", *more)
    big = train_drafter(drafters.resolve(big_args), big_args)

    assert losses(small) == pytest.approx(losses(big), rel=1e-5)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("small", "big"))
    assert all(torch.allclose(one[name], other[name], atol=2e-5) for name in one)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--feature-layers", "1,2,3"], "between 0 and 2"),
        (["--feature-layers", "one"], "list of layer numbers"),
        (["--kv-heads", "3"], "query heads"),
        (["--mask-token-id", "64"], "vocabulary"),
        (["--max-length", "256"], "positions"),
        (["--batch-tokens", "100"], "divide into rows"),
        (["--markov-rank", "4"], "Markov"),
        (["--block-size", "1"], "too small"),
        (["--batch", "2"], "give one of them"),
    ],
)
def test_wrong_use_is_refused_in_one_sentence(
    more: list[str], message: str, target: Path, tokens: Path, tmp_path: Path
) -> None:
    args = arguments(target, tokens, tmp_path / "out", *more)
    with pytest.raises(UsageError, match=message):
        train_drafter(drafters.resolve(args), args)
    assert not (tmp_path / "out").exists()


def test_unknown_kind_and_foreign_tokens_are_refused(target: Path, tokens: Path, tmp_path: Path) -> None:
    args = arguments(target, tokens, tmp_path / "out", kind="eagle")
    with pytest.raises(UsageError, match="eagle"):
        drafters.resolve(args)
    args = arguments(target, tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(UsageError, match="no encoded documents"):
        train_drafter(drafters.resolve(args), args)
    index = tokens / "train" / "index.json"
    kept = index.read_text()
    index.write_text(kept.replace('"vocabulary": 64', '"vocabulary": 99'))
    args = arguments(target, tokens, tmp_path / "out")
    try:
        with pytest.raises(UsageError, match="99"):
            train_drafter(drafters.resolve(args), args)
    finally:
        index.write_text(kept)


def test_a_dense_mask_of_gigabytes_is_refused(target: Path, tokens: Path, tmp_path: Path) -> None:
    args = arguments(target, tokens, tmp_path / "out", "--batch-tokens", "65536")
    with pytest.raises(UsageError, match=r"65536 tokens .* dense attention mask of \d+\.\d GB .* --batch-tokens"):
        train_drafter(drafters.resolve(args), args)
    assert not (tmp_path / "out").exists()
