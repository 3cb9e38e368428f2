"""The lookup rule against its words: an oracle of Python lists, and one round worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.carryover.lookup import LONGEST, VerifiedRound, look_up, raise_choices

TABLE = [0.5, 1.0, 2.0, 3.0, 5.0]


def matched_length(inputs: list[int], row: int, text: list[int]) -> int:
    """The longest m for which the inputs up to ``row`` end in the last m tokens of ``text``."""
    upto = inputs[: row + 1]
    return max(m for m in range(min(len(upto), len(text)) + 1) if upto[len(upto) - m :] == text[len(text) - m :])


def expected_bonus(inputs: list[int], committed: int, text: list[int], draft: int) -> list[float]:
    """Each row's bonus where ``text`` is what is written before the position ``draft``."""
    bonus = [0.0] * len(inputs)
    for row in range(committed, len(inputs)) if committed else ():
        length = matched_length(inputs, row, text)
        if length or row == committed + draft:
            bonus[row] = TABLE[min(length, LONGEST)]
    return bonus


TOKEN = st.integers(0, 2)  # few tokens, so that matches occur, long ones too


@st.composite
def rounds(draw: st.DrawFn) -> tuple[VerifiedRound, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three requests' last rounds, their new anchors, the drafter's own tokens, and logits with ties."""
    width, drafts = draw(st.integers(2, 9)), draw(st.integers(1, 8))

    def tokens(*shape: int) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        return torch.tensor(draw(st.lists(TOKEN, min_size=count, max_size=count))).view(shape)

    committed = torch.tensor(draw(st.lists(st.integers(0, width), min_size=3, max_size=3)))
    logits = torch.tensor(draw(st.randoms(use_true_random=False)).choices(range(-6, 1), k=3 * drafts * (1 + width)))
    verified = VerifiedRound(tokens(3, width), tokens(3, width), committed)
    return verified, tokens(3), tokens(3, drafts), logits.view(3, drafts, 1 + width) / 2


@settings(max_examples=150, deadline=None)
@given(rounds())
def test_the_bonus_follows_the_longest_match(drawn: tuple) -> None:
    verified, anchor, written, _ = drawn
    matched = verified.begin()
    for request in range(3):
        inputs, committed = verified.inputs[request].tolist(), int(verified.committed[request])
        for row in range(len(inputs)):
            length = matched_length(inputs, row, inputs[:committed])
            assert matched[request, row] == min(length, LONGEST - 1)
    for draft in range(written.shape[1]):
        matched = verified.follow(matched, written[:, draft - 1] if draft else anchor)
        found = verified.bonus(matched, draft, torch.tensor(TABLE))
        for request in range(3):
            inputs, committed = verified.inputs[request].tolist(), int(verified.committed[request])
            text = [*inputs[:committed], int(anchor[request]), *written[request, :draft].tolist()]
            for row in range(len(inputs)):
                assert min(int(matched[request, row]), LONGEST) == min(matched_length(inputs, row, text), LONGEST)
            assert found[request].tolist() == expected_bonus(inputs, committed, text, draft)


@settings(max_examples=150, deadline=None)
@given(rounds())
def test_each_draft_is_the_highest_with_its_bonus_given_those_before(drawn: tuple) -> None:
    verified, anchor, tokens, logits = drawn
    found = look_up(tokens, logits, anchor, verified, torch.tensor(TABLE))
    for request in range(3):
        inputs, committed = verified.inputs[request].tolist(), int(verified.committed[request])
        choices, text = verified.choices[request].tolist(), [*inputs[:committed], int(anchor[request])]
        for draft in range(tokens.shape[1]):
            own, *others = logits[request, draft].tolist()
            bonus = expected_bonus(inputs, committed, text, draft)
            best, written = own, int(tokens[request, draft])
            for choice, logit, more in zip(choices, others, bonus, strict=True):
                if logit + more > best:  # a tie keeps the drafter's own, then the first row
                    best, written = logit + more, choice
            assert found[request, draft] == written
            text.append(written)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from((0.0, *TABLE))), min_size=1, max_size=9),
    st.integers(-3, 14),
    st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_a_choice_of_several_rows_gets_their_highest_bonus(rows: list, start: int, dtype: torch.dtype) -> None:
    """On any part of the vocabulary, also one that begins before the first token."""
    bias = torch.arange(8.0)[None].to(dtype)
    found = raise_choices(bias, torch.tensor([[c for c, _ in rows]]), torch.tensor([[b for _, b in rows]]), start)
    best = [max((bonus for choice, bonus in rows if choice == start + column), default=0.0) for column in range(8)]
    assert found.dtype == dtype and found[0].tolist() == [column + best[column] for column in range(8)]


@pytest.mark.parametrize("committed", [0, 6])
def test_without_a_rejected_row_nothing_is_raised(committed: int) -> None:
    """A request without a round, and one whose drafts were all accepted."""
    same = torch.full((1, 6), 3)
    verified = VerifiedRound(same, same + 1, torch.tensor([committed]))
    matched, table = verified.begin(), torch.tensor(TABLE)
    for draft in range(5):
        matched = verified.follow(matched, torch.tensor([3]))
        assert matched.any() and not verified.bonus(matched, draft, table).any()
    tokens, logits = torch.full((1, 5), 2), torch.zeros(1, 5, 7)
    assert torch.equal(look_up(tokens, logits, torch.tensor([3]), verified, table), tokens)


def test_a_round_by_hand() -> None:
    """The target wrote 20 where 99 was drafted; the words behind come again one position later."""
    inputs, choices = [10, 11, 99, 12, 13, 14], [11, 20, 55, 13, 14, 15]
    verified = VerifiedRound(torch.tensor([inputs]), torch.tensor([choices]), torch.tensor([2]))
    anchor, table = torch.tensor([20]), torch.tensor(TABLE)
    assert verified.begin().tolist() == [[0, 2, 0, 0, 0, 0]]  # 10 11 committed: row 1 ends in both
    matched, bonuses = verified.begin(), []
    for draft, token in enumerate((20, 12, 13, 14)):
        matched = verified.follow(matched, torch.tensor([token]))
        bonuses.append(verified.bonus(matched, draft, table)[0].tolist())
    assert bonuses == [
        [0, 0, 0.5, 0, 0, 0],  # behind 20: no row ends in it; row 2 at its own position
        [0, 0, 0, 1, 0, 0],  # behind 12: row 3, matched and at its own position
        [0, 0, 0, 0, 2, 0],  # behind 12 13: row 4
        [0, 0, 0, 0, 0, 3],  # behind 12 13 14: row 5
    ]
    tokens = torch.tensor([[12, 70, 71, 72]])
    logits = torch.full((1, 4, 7), -0.75)
    logits[:, :, 0] = 0.0
    # 55 at -0.75 + 0.5 stays below the drafter's 12; then the target's own 13, 14 and 15 win.
    assert look_up(tokens, logits, anchor, verified, table).tolist() == [[12, 13, 14, 15]]
    # A tie keeps the drafter's own: without 13 written, 14 and 15 get no more than what is theirs by position.
    logits[0, 1, 4] = -1.0
    assert look_up(tokens, logits, anchor, verified, table).tolist() == [[12, 70, 71, 72]]
