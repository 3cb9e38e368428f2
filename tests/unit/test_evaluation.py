"""Evaluation's arithmetic against traces worked out by hand, and the prompts it reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.errors import UsageError
from sglang_ext.evaluation.bootstrap import Counts, gain, interval, resample
from sglang_ext.evaluation.client import Answer
from sglang_ext.evaluation.figures import ALL, comparisons, differences, gains, records, traces
from sglang_ext.evaluation.prompts import Prompt, read_prompts


def test_counts_of_hand_made_traces() -> None:
    # Accepted drafts step by step: 0, 2, 2 and 1.
    counts = Counts([[1, 0, 2], [0, 1]], drafts=3)
    assert counts.steps.tolist() == [3, 1] and counts.accepted.tolist() == [4, 1]
    assert counts.survivors.tolist() == [[2, 2, 0], [1, 0, 0]]
    once, twice = np.array([[1.0, 1.0]]), np.array([[2.0, 1.0]])
    assert counts.length(once)[0] == 1 + 5 / 4 and counts.length(twice)[0] == 1 + 9 / 7
    assert counts.mean_of_prompts(twice)[0] == pytest.approx(1 + (2 * 4 / 3 + 1) / 3)
    assert counts.survival(twice)[0].tolist() == [5 / 7, 4 / 7, 0]


def test_a_prompt_without_a_verify_step_weighs_nothing() -> None:
    counts = Counts([[], [0, 2]], drafts=1)
    draws = np.array([[1.0, 1.0], [2.0, 0.0]])
    assert counts.length(draws)[0] == counts.mean_of_prompts(draws)[0] == 2.0
    assert np.isnan(counts.length(draws)[1]) and interval(counts.length(draws)) is None


def test_resampling_is_seeded_and_draws_as_many_prompts_as_there_are() -> None:
    draws = resample(5, seed=3)
    assert (draws.sum(1) == 5).all() and (draws == resample(5, seed=3)).all()
    assert (draws != resample(5, seed=4)).any()


def test_the_interval_of_two_prompts_is_known() -> None:
    # Both prompts are the first with probability 1/4, the second with 1/4: the outer 2.5 % lie at their own lengths.
    counts = Counts([[1], [0, 1]], drafts=1)
    assert interval(counts.length(resample(2, seed=0))) == (1.0, 2.0)


def test_the_interval_of_many_prompts_is_the_normal_one() -> None:
    prompts, share = 400, 0.25
    accepting = int(prompts * share)
    counts = Counts([[0, 1]] * accepting + [[1, 0]] * (prompts - accepting), drafts=1)
    found = interval(counts.length(resample(prompts, seed=0)))
    half = 1.96 * (share * (1 - share) / prompts) ** 0.5
    assert found == pytest.approx((1 + share - half, 1 + share + half), abs=0.005)


def test_pairing_takes_the_prompts_own_spread_out_of_the_gain() -> None:
    # Lengths 2 and 4 against 2.2 and 4.4 in ten steps each: ten percent on every prompt, whatever is drawn.
    reference = Counts([[0, 10], [0, 0, 0, 10]], drafts=4)
    method = Counts([[0, 8, 2], [0, 0, 0, 6, 4]], drafts=4)
    value, span = gain(method, reference, seed=0)
    assert value == pytest.approx(0.1) and span == pytest.approx((0.1, 0.1))
    assert gain(reference, reference, seed=0) == (0.0, (0.0, 0.0))


def test_a_gain_needs_steps_and_its_interval_two_prompts() -> None:
    one, none = Counts([[0, 1]], drafts=1), Counts([[]], drafts=1)
    assert gain(one, none, seed=0) == (None, None)
    assert gain(one, Counts([[1]], drafts=1), seed=0) == (1.0, None)
    with pytest.raises(ValueError, match="cannot be paired"):
        gain(one, Counts([[1], [1]], drafts=1), seed=0)


PROMPTS = [Prompt("c1", "code", "a", ("b",)), Prompt("q1", "qa", "c"), Prompt("c2", "code", "d")]


def answers(*histograms: tuple[int, ...]) -> list[Answer]:
    """Answers to PROMPTS in order, the first prompt's second turn included."""
    asked = [PROMPTS[0], *PROMPTS]
    return [Answer(p, "", (1, 2, 3), h, (7, 8)) for p, h in zip(asked, histograms, strict=True)]


def test_turns_of_a_prompt_are_one_trace() -> None:
    found = traces(answers((1,), (0, 2), (3,), ()))
    assert [(t.id, t.category, t.tokens, t.histogram) for t in found] == [
        ("c1", "code", 6, (1, 2)),
        ("q1", "qa", 3, (3,)),
        ("c2", "code", 3, ()),
    ]


def test_records_and_comparisons_by_category_and_over_all() -> None:
    method = traces(answers((0, 1), (0, 0, 1), (1, 0), (0, 0, 2)))
    reference = traces(answers((1,), (0, 1), (1,), (0, 2)))
    rows = {row["category"]: row for row in records(method, drafts=2, seed=0)}
    assert list(rows) == ["code", "qa", ALL]
    assert rows["code"]["acceptance_length"] == 1 + 7 / 4 and rows["code"]["survival"] == [1.0, 0.75]
    assert rows["code"]["interval"] == (2.5, 3.0)  # either prompt twice
    assert rows["qa"]["acceptance_length"] == 1.0 and rows["qa"]["interval"] is None
    assert rows[ALL]["verify_steps"] == 5 and rows[ALL]["mean_of_prompts"] == pytest.approx((2.5 + 1 + 3) / 3)
    low, high = rows[ALL]["interval"]
    assert low < rows[ALL]["acceptance_length"] < high and len(rows[ALL]["survival_intervals"]) == 2
    gains = {row["category"]: row for row in comparisons(method, reference, 2, 1, seed=0)}
    assert gains["code"]["gain"] == pytest.approx(2.75 / 1.75 - 1) and gains["qa"]["gain"] == 0.0
    assert gains[ALL]["prompts"] == 3 and gains[ALL]["gain"] == pytest.approx(2.4 / 1.6 - 1)
    with pytest.raises(ValueError, match="same prompts"):
        comparisons(method, reference[1:], 2, 1, seed=0)


def test_gains_over_references_with_a_role_stand_side_by_side() -> None:
    head = {"method": "m", "temperature": 0.0, "category": "all", "prompts": 2}
    rows = [
        {**head, "reference": "base", "gain": 0.1, "interval": [0.05, 0.15]},
        {**head, "reference": "other", "gain": 0.5, "interval": [0.4, 0.6]},
        {**head, "reference": "control", "gain": 0.04, "interval": [0.01, 0.07]},
    ]
    assert gains(rows, {"gain_over_baseline": "base", "gain_over_control": "control"}) == [
        {
            **head,
            "gain_over_baseline": 0.1,
            "gain_over_baseline_interval": [0.05, 0.15],
            "gain_over_control": 0.04,
            "gain_over_control_interval": [0.01, 0.07],
        }
    ]
    assert gains(rows, {}) == []


def test_a_difference_is_where_an_answer_first_leaves_plain_decoding() -> None:
    plain = [Answer(PROMPTS[1], "", (1, 2, 3), (), (7, 8)), Answer(PROMPTS[2], "", (1, 2), (), (9,))]
    same = [Answer(a.prompt, "other text", a.token_ids, (0, 1), a.input_ids) for a in plain]
    assert differences(same, plain) == []
    (wrong,) = differences([Answer(PROMPTS[1], "", (1, 5, 3), (), (7, 8)), same[1]], plain)
    assert (wrong.id, wrong.position, wrong.input_ids, wrong.expected, wrong.found) == ("q1", 1, (7, 8, 1), 2, 5)
    (short,) = differences([same[0], Answer(PROMPTS[2], "", (1,), (), (9,))], plain)
    assert (short.position, short.expected, short.found) == (1, 2, None)
    # A later turn behind another answer was asked something else.
    assert differences([same[0], Answer(PROMPTS[2], "", (4,), (), (9, 9))], plain) == []


def lines(*records: object) -> str:
    return "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)


GOOD = {"id": "a", "category": "code", "turns": ["one", "two"]}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ('{"id": "b", "turns": ["x"', "Line 3 of .* is no prompt"),
        ('["x"]', "Line 3 of .*not a JSON object"),
        ({"id": "b", "category": "code"}, 'Line 3 of .*"turns" must be a list of texts'),
        ({"id": "b", "turns": []}, 'Line 3 of .*"turns" must be'),
        ({"id": "b", "turns": ["x", 1]}, 'Line 3 of .*"turns" must be'),
        (GOOD, "Line 3 of .* repeats the id 'a'"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, broken: object, said: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(lines(GOOD, "", broken, GOOD))
    with pytest.raises(UsageError, match=said):
        read_prompts(path)


def test_public_sets_drop_in(tmp_path: Path) -> None:
    bench, plain = tmp_path / "spec_bench.jsonl", tmp_path / "gsm8k.jsonl"
    bench.write_text(lines({"question_id": 81, "category": "writing", "turns": ["one", "two"]}))
    plain.write_text(lines({"turns": ["three"]}, {"turns": ["four"]}))
    assert read_prompts(bench) == [Prompt("81", "writing", "one", ("two",))]
    found = read_prompts([bench, plain], per_category=1)
    assert found == [Prompt("spec_bench/81", "writing", "one", ("two",)), Prompt("gsm8k/1", "gsm8k", "three")]


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_no_prompts_are_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "none.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="no prompts"):
        read_prompts(path)
