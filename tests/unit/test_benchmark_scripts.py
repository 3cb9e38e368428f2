"""Scripts of benchmarks/ refuse a wrong path as the command line does: one sentence, exit code 2."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from sglang_ext.carryover.lookup import VerifiedRound
from sglang_ext.training.lookup_rounds import Rounds

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("gpu/end_to_end.py", "{0}/nowhere --out {0}/record"),
        ("carryover/ceiling.py", "{0}/nowhere {0} {0}"),
        ("carryover/arbiter.py", "{0} {0}/nowhere {0}"),
        ("carryover/readable.py", "{0}/nowhere {0} {0}"),
        ("carryover/lookup_temperature.py", "{0}/nowhere {0} {0} --temperature 1"),
    ],
)
def test_a_wrong_path_is_refused(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER / "carryover")  # as where the script itself is run
    monkeypatch.setattr(sys, "argv", [script, *words.format(tmp_path).split()])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and str(tmp_path / "nowhere") in error


def test_a_sampled_draft_is_kept_as_often_as_rejection_sampling_keeps_it() -> None:
    """Against whole distributions: the drafter's with the raised logits, and min(1, q / p) of the recorded token."""
    script = runpy.run_path(str(FOLDER / "carryover/lookup_temperature.py"))
    generator = torch.Generator().manual_seed(3)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    count, width, drafts, vocabulary, temperature = 200, 5, 4, 6, 0.7
    committed = 1 + draw(width, count)
    verified = VerifiedRound(draw(vocabulary, count, width), draw(vocabulary, count, width), committed)
    rounds = Rounds(
        verified=verified,
        anchor=draw(vocabulary, count),
        logits=torch.randn(count, drafts, vocabulary, generator=generator),
        labels=draw(vocabulary, count, drafts),
        supervised=torch.ones(count, drafts, dtype=torch.bool),
        last_hidden=torch.randn(count, drafts, vocabulary, generator=generator),
        document=torch.zeros(count, dtype=torch.long),
    )

    class Features:
        logits = staticmethod(lambda hidden: hidden)

    sampled = script["Sampled"].of(rounds, Features, temperature)
    table = [0.5, 1.0, 2.0, 3.0, 4.0]
    kept = sampled.kept(table, temperature)
    raised = rounds.logits.clone()
    for n, position, row in (sampled.seen.entries > 0).nonzero().tolist():
        token, bonus = int(verified.choices[n, row]), table[int(sampled.seen.entries[n, position, row]) - 1]
        best = rounds.logits[n, position, token] + bonus
        raised[n, position, token] = torch.maximum(raised[n, position, token], best)
    label = rounds.labels[..., None]
    q = (raised / temperature).softmax(-1).gather(2, label)[..., 0]
    p = (rounds.last_hidden / temperature).softmax(-1).gather(2, label)[..., 0]
    torch.testing.assert_close(kept, (q / p).clamp(max=1))
    assert not torch.allclose(kept, sampled.kept([0.0] * 5, temperature))
