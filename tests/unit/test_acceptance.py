"""Acceptance figures against traces worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.evaluation.acceptance import acceptance, by_category, pool

histograms = st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=6)


def test_one_request_worked_out_by_hand() -> None:
    # Accepted drafts step by step: 0, 2, 2, 7 -> 11 drafts in 4 steps.
    figures = acceptance([[1, 0, 2, 0, 0, 0, 0, 1]], drafts=7)
    assert (figures.verify_steps, figures.accepted_drafts) == (4, 11)
    assert figures.length == 1 + 11 / 4
    assert figures.survival == (3 / 4, 3 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 4)


def test_micro_average_weighs_steps_and_the_mean_weighs_requests() -> None:
    long, short = [90, 10], [0, 0, 0, 10]  # 10 drafts in 100 steps, 30 drafts in 10 steps
    figures = acceptance([long, short])
    assert figures.length == pytest.approx(1 + 40 / 110)
    assert figures.mean_of_requests == pytest.approx((1.1 + 4.0) / 2)


def test_a_request_without_a_verify_step_counts_as_a_request_only() -> None:
    figures = acceptance([[], [0, 3]])
    assert (figures.requests, figures.verify_steps, figures.length, figures.mean_of_requests) == (2, 3, 2.0, 2.0)


def test_nothing_verified_has_no_length() -> None:
    figures = acceptance([[], []])
    assert (figures.length, figures.mean_of_requests, figures.survival) == (None, None, ())


def test_categories_are_told_apart_and_keep_their_order() -> None:
    figures = by_category([("prose", [2]), ("code", [0, 0, 1]), ("prose", [0, 2])], drafts=2)
    assert list(figures) == ["prose", "code"]
    assert figures["prose"].length == 1.5 and figures["prose"].survival == (0.5, 0.0)
    assert figures["code"].length == 3.0 and figures["code"].survival == (1.0, 1.0)


@pytest.mark.parametrize(("bad", "message"), [([[1, -1]], "counts verify steps"), ([[0, 0, 1]], "more than the 1")])
def test_impossible_histograms_are_refused(bad: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        acceptance(bad, drafts=1)


@given(histograms)
def test_identities(requests: list[list[int]]) -> None:
    figures = acceptance(requests, drafts=8)
    survival = [*figures.survival]
    assert survival == sorted(survival, reverse=True)
    assert figures.verify_steps == sum(map(sum, requests)) == sum(pool(requests))
    if figures.verify_steps:
        # Accepted drafts are the sum over positions, and emitted tokens are accepted drafts plus verify steps.
        assert sum(survival) * figures.verify_steps == pytest.approx(figures.accepted_drafts)
        assert figures.length is not None
        assert figures.length * figures.verify_steps == pytest.approx(figures.accepted_drafts + figures.verify_steps)
