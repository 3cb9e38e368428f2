"""The sums behind the metrics, on made-up rounds; the engine tests compare them with real ones."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.metrics.contract import contract_of, describe, fingerprint, state_layers
from sglang_ext.metrics.rounds import REASONS, Carry, Tally, on_decode, on_extend
from sglang_ext.metrics.scheduler import carry_of, carrying
from tests.tiny_models import tiny_models

WIDTH = 8


@dataclass(eq=False)
class Request:
    """What the tally looks at of SGLang's requests."""

    ended: bool = False
    is_retracted: bool = False
    kv: Any = field(default_factory=lambda: SimpleNamespace(kv_committed_len=10))

    def finished(self) -> bool:
        return self.ended


def reasons(tally: Tally) -> dict[str, int]:
    return {name: count for name, count in zip(REASONS, tally.uncarried, strict=True) if count}


@given(st.lists(st.lists(st.tuples(st.integers(0, WIDTH - 1), st.booleans()), min_size=1, max_size=6), max_size=20))
def test_identities_hold_for_any_rounds(rounds: list[list[tuple[int, bool]]]) -> None:
    """Design rule 9; requests that have ended count nowhere but in the overshoot."""
    tally = Tally(WIDTH)
    for batch in rounds:
        tally.add([Request(ended) for _, ended in batch], [n for n, _ in batch], None, None)
    running = [n for batch in rounds for n, ended in batch if not ended]
    assert tally.verify_steps == len(running) and tally.overshoot == sum(map(len, rounds)) - len(running)
    by_position = tally.accepted_by_position()
    assert len(by_position) == WIDTH - 1 and by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == tally.accepted == sum(running)
    assert tally.emitted == tally.accepted + tally.verify_steps
    assert tally.drafted == (WIDTH - 1) * tally.verify_steps
    assert bool(tally) == bool(sum(map(len, rounds)))
    tally.clear()
    assert not tally and tally.emitted == tally.drafted == 0


def test_a_ragged_verify_drafts_what_it_verifies() -> None:
    """With a cap per request (bonus row included) the drafted tokens are the capped ones."""
    tally = Tally(WIDTH)
    tally.add([Request(), Request()], [2, 0], None, [4, 1])
    assert tally.drafted == 3 and tally.accepted == 2


def test_carry_follows_the_round_before() -> None:
    """First round, carried rows, full acceptance, a mixed chunk and the row's end, in one request's life."""
    request, tally = Request(), Tally(WIDTH, Carry(query_width=7, columns=40, limit=None))

    def round_of(correct: int) -> None:
        before = on_decode([request])
        tally.add([request], [correct], before, None)
        request.kv.kv_committed_len += correct + 1

    on_extend([request], ())
    round_of(3)  # leaves four rejected rows
    round_of(7)  # reads them, leaves none
    round_of(1)
    assert (tally.carried_steps, tally.carried_rows) == (1, 4)
    assert reasons(tally) == {"first_round": 1, "full_acceptance": 1}
    on_extend([Request(), request], [request])
    round_of(2)
    assert reasons(tally)["mixed_chunk"] == 1
    request.kv.kv_committed_len = 31  # two columns are left behind the block
    round_of(0)
    assert (tally.carried_steps, tally.carried_rows) == (2, 6)
    request.kv.kv_committed_len = 33
    round_of(0)
    assert reasons(tally)["row_end"] == 1


def test_limits_and_unseen_prefills() -> None:
    """A limit caps the rows, 0 is off; a request whose prefill was not seen carries nothing at first."""
    request, tally = Request(), Tally(WIDTH, Carry(query_width=7, columns=400, limit=2))
    for _ in range(2):
        tally.add([request], [0], on_decode([request]), None)
    assert reasons(tally) == {"slot_reuse": 1} and tally.carried_rows == 2
    off = Tally(WIDTH, Carry(query_width=7, columns=400, limit=0))
    off.add([request, Request(ended=True)], [0, 0], on_decode([request, Request()]), None)
    assert reasons(off) == {"off": 1} and off.overshoot == 1


def test_contract_labels_do_not_depend_on_the_method(tmp_path: Path) -> None:
    """Every server has the same labels; a drafter's hash follows its weights, not its place."""
    path = tiny_models()["carryover-dspark-dense"]
    contract = contract_of(str(path), None)
    assert contract is not None
    labels = describe(contract)
    assert set(labels) == set(describe(None)) and not any(describe(None).values())
    assert labels["target_layers"] == "0,1,2" and labels["verify_width"] == "8" and labels["state_layers"] == ""
    assert state_layers(contract) == () == state_layers(None)
    copy = shutil.copytree(path, tmp_path / "copy")
    assert fingerprint(copy) == labels["checkpoint"] and len(labels["checkpoint"]) == 12
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert fingerprint(copy) != labels["checkpoint"]
    assert contract_of(None, None) is None and contract_of(str(tiny_models()["dense"]), None) is None


def test_a_lookup_reads_every_rejected_row() -> None:
    """A drafter without carried rows in its context reads them all through its lookup table."""
    worker = SimpleNamespace(carry_columns=100, carry_widths=lambda: (8, 7), carried_rows=0, lookup=None)
    off = carry_of(worker)
    assert off is not None and off.limit == 0 and carrying(worker) == {"carried_rows": "0", "lookup": ""}
    worker.lookup = SimpleNamespace(table=torch.tensor([0.0, 2.0, 3.5, 6.0, 4.0]))
    on = carry_of(worker)
    assert on is not None and on.limit is None
    assert carrying(worker) == {"carried_rows": "0", "lookup": "0,2,3.5,6,4"}
    assert carrying(SimpleNamespace()) == {"carried_rows": "", "lookup": ""}
