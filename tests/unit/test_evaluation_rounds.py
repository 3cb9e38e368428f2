"""Recorded rounds, re-convergence and recall against traces worked out by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.carryover.recorder import Recorder
from sglang_ext.evaluation.replay import rank, recall
from sglang_ext.evaluation.rounds import carry_figures, correlation, read, reconverged

NAN = float("nan")


def record(folder: Path) -> None:
    """Two requests through a verify width of 3 with features of 2 values: a prefill, two rounds, one past the end."""
    recorder = Recorder(folder, verify_width=3)

    def batch(**fields: object) -> None:
        recorder.batch = SimpleNamespace(reqs=[SimpleNamespace(rid=rid) for rid in ("x", "y")], **fields)

    def round_(row: float, commit_lens: list[int], predictions: list[list[int]] | None) -> None:
        batch()
        chosen = None if predictions is None else torch.tensor(predictions)
        recorder.on_accept(torch.zeros(2, 3, dtype=torch.int64), torch.tensor(commit_lens), chosen)
        recorder.on_verify(row + torch.arange(12.0).view(6, 2), commit_lens)

    batch(extend_lens=[2, 1])
    recorder.on_extend(torch.tensor([[1.0, 1], [2, 2], [3, 3]]), [0, 1, 0])
    round_(100, [1, 3], [[11, 13, 0], [21, 22, 23]])
    round_(200, [2, 1], [[13, 14, 15], [0, 0, 0]])
    round_(300, [1, 1], [[0, 0, 0], [0, 0, 0]])


def test_a_recording_is_put_together_again(tmp_path: Path) -> None:
    record(tmp_path)
    # x: prompt of 2, answer of 4; its third round began at row 5, the last token. y: prompt of 1, answer of 6.
    answers = {"x": ("code", [1, 2, 11, 13, 14, 15]), "y": ("qa", [5, 20, 21, 22, 23, 24, 25])}
    x, y = read(tmp_path, answers, width=2)
    assert (x.category, [(r.start, r.committed, r.carried) for r in x.rounds]) == ("code", [(2, 1, 0), (3, 2, 2)])
    assert [(r.start, r.committed, r.carried) for r in y.rounds] == [(1, 3, 0), (4, 1, 0), (5, 1, 2)]
    assert x.features[:, 0].tolist() == [1, 2, 100, 200, 202, 300]
    assert x.rounds[0].features[:, 0].tolist() == [100, 102, 104] and x.rounds[0].predictions == (11, 13, 0)
    assert list(x.rounds[0].rejected) == [1, 2] and not y.rounds[0].rejected
    limited = read(tmp_path, answers, width=2, limit=1)
    assert [r.carried for r in limited[0].rounds] == [0, 1] and [r.carried for r in limited[1].rounds] == [0, 0, 1]

    figures = carry_figures([x, y])
    assert (figures["requests"], figures["rounds"], figures["rejected_rounds"]) == (2, 5, 4)
    assert figures["carried_rows_per_round"] == 4 / 5 and figures["rounds_by_carried_rows"] == {"0": 3, "2": 2}
    assert figures["rejected_rows_per_rejected_round"] == 7 / 4
    # x, first round: row 1 predicts position 4 with 13, which came at 3. Row 2 predicts 5 with 0. Second round: row 2
    # predicts 6, past the end. y: zeros.
    assert figures["reconverged_per_rejected_round"] == 1 / 4


def test_a_new_prefill_ends_the_carry_and_replaces_rows(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, verify_width=2)
    recorder.batch = SimpleNamespace(reqs=[SimpleNamespace(rid="x")], extend_lens=[2])
    recorder.on_extend(torch.tensor([[1.0], [2]]), [0, 1])
    recorder.on_accept(torch.zeros(1, 2), torch.tensor([1]), None)
    recorder.on_verify(torch.tensor([[3.0], [4]]), [1])
    recorder.batch.extend_lens = [3]  # retracted and computed again
    recorder.on_extend(torch.tensor([[1.0], [2], [3]]), [0, 1, 2])
    recorder.on_accept(torch.zeros(1, 2), torch.tensor([2]), None)
    recorder.on_verify(torch.tensor([[5.0], [6]]), [2])
    (request,) = read(tmp_path, {"x": ("code", range(9))}, width=1)
    assert [(r.start, r.carried) for r in request.rounds] == [(2, 0), (3, 0)]
    assert request.features[:, 0].tolist() == [1, 2, 3, 5, 6]
    assert carry_figures([request])["reconverged_per_rejected_round"] is None  # no predictions were recorded


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        ([9, 9, 9, 9], 0),
        ([9, 3, 9, 9], 1),  # row 1 predicts position 3: exact
        ([9, 2, 9, 9], 1),  # the token one position before
        ([9, 4, 9, 9], 1),  # one behind
        ([9, 1, 9, 9], 0),  # two before
        ([0, 3, 4, 5], 2),  # row 3 predicts position 5, past the end; row 0 was accepted
    ],
)
def test_reconvergence_tolerates_one_position(predictions: list[int], expected: int) -> None:
    assert reconverged(predictions, round_start=1, rejected=range(1, 4), tokens=[0, 1, 2, 3, 4]) == expected


def test_correlation_needs_three_points_that_vary() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1) and correlation([1, 2, 3], [3, 2, 1]) == -1
    assert correlation([1, 2], [1, 2]) is None and correlation([1, 1, 1], [1, 2, 3]) is None


def test_rank_counts_the_tokens_that_score_higher() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, 1.0, 1.0]])
    assert rank(logits, [1, 2]) == [0, 1] and rank(logits, [0, 0]) == [2, 0]


def test_recall_counts_rounds_where_on_and_the_reference_are_right_so_far() -> None:
    # [rounds, variants (on, off, baseline), positions]: ranks of the committed token.
    first = np.array(
        [
            [[0, 0, 3], [5, 0, 20], [0, 0, 16]],  # counts everywhere: on and baseline are right before each position
            [[0, 2, 0], [0, 0, 0], [9, 0, 0]],  # the baseline misses position 0: nothing counts behind it
        ],
        float,
    )
    second = np.array([[[0, NAN, NAN], [40, NAN, NAN], [1, NAN, NAN]]])  # one token before the answer's end
    found = recall([first, second], ["on", "off", "baseline"], "baseline", seed=0)
    assert found["rounds"] == [3, 1, 1]
    on, off, baseline = (found["variants"][name] for name in ("on", "off", "baseline"))
    assert on["recall_at_1"] == {"by_position": [1.0, 1.0, 0.0], "all": 4 / 5}
    assert off["recall_at_1"]["by_position"] == [1 / 3, 1.0, 0.0] and off["recall_at_16"]["all"] == 3 / 5
    assert baseline["recall_at_16"]["by_position"] == [1.0, 1.0, 0.0]
    gap = found["on_minus_off"]["recall_at_1"]
    assert gap["by_position"] == pytest.approx([2 / 3, 0, 0]) and gap["all"] == pytest.approx(2 / 5)
    assert gap["intervals"][0] == (0.5, 1.0) and gap["intervals"][1] is None  # some resamples have no such round
    assert found["on_minus_baseline"]["recall_at_1"]["all"] == pytest.approx(2 / 5)
