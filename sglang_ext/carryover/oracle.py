"""Debug mode: recompute every draft block of a running engine from the checkpoint and compare.

The oracle keeps its own record of each request: committed tokens, their raw target features and the rejected
rows of the last verify step. It never looks at KV pools, slot tables or the plugin's state, so it also sees what
neither the output nor the acceptance can show (a wrong or stale carry). It copies features to the host and is
slow: for tests and for hunting a suspected error, not for serving. It wants float32 (or bfloat16, for what has no
float32 kernel), greedy drafts and a vanilla Markov head, and follows the first rank.

Set ``SGLANG_EXT_ORACLE_LOG=FILE``; one JSON line is appended per request and round:
``ok`` (all comparisons hold), what was compared (``length_ok``, ``host_ok``, ``positions_ok``, ``tokens_ok``,
``hidden_error`` against ``tolerance``) and ``carried`` rows with ``effect``, how much the block's hidden states
move when they are left out; ``looked_up`` says if a lookup table changed the drafts. A bfloat16 server's tolerance
follows from ``rounding``: how far the reference itself moves when it rounds each of its results to bfloat16. Where
the drafter reads recurrent states, ``read_effect`` says how much they move the block; they are taken from the pool that
the drafter reads, so this checks the reading and not what is in the pool.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch

from sglang_ext.carryover import observer
from sglang_ext.carryover.reference import ReferenceDrafter
from sglang_ext.errors import UsageError
from sglang_ext.settings import ORACLE_LOG

TOLERANCE = 1e-4
"""Largest difference of a hidden state (of order 1) between two float32 computations; a wrong row shows over 1e-3."""

ROUNDINGS = 4
"""A bfloat16 block may be this many times as far from the reference as the reference's own rounding takes it.

Two bfloat16 computations of a tiny ReaDy drafter's 312 blocks, whose roundings fall in different places, were 0.3 to
2.6 times as far from float32 as each other. Leaving out what is read moves a block further than that in every round, a
stale state not in every one, so a claim about bfloat16 needs many rounds: their median error is their median rounding.
"""

TIE = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Logit margin under which rounding may pick different tokens."""


@dataclass
class _Record:
    """One request: committed tokens with their features, and the rows its next block should carry."""

    tokens: list[int] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    keys: list[int] = field(default_factory=lambda: [0])
    carried: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    verified: tuple[list[int], list[int], int] | None = None  # inputs, the target's choices, rows committed

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.features[length:], self.keys[length + 1 :]


class Oracle:
    """Follows a worker's rounds and writes one comparison per request and round to ``log``."""

    def __init__(self, worker: Any, drafter: ReferenceDrafter, log: TextIO) -> None:
        self.drafter = drafter
        dtype = worker.draft_model_runner.dtype
        self.rounded = None if dtype == torch.float32 else drafter.rounding(dtype)
        self.worker = worker
        self.tie = TIE[dtype]
        self.log = log
        self.verify_width, self.query_width = worker.carry_widths()
        self.mask_token_id = int(worker._mask_token_id)
        self.limit = 0 if drafter.embedding is None else worker.carried_rows
        self.looks_up = getattr(worker, "lookup", None) is not None
        self.columns: int = getattr(worker, "carry_columns", 0)
        self.records: dict[str, _Record] = {}
        # Features by token prefix: a radix hit brings rows that an earlier request computed.
        self.rows: dict[int, torch.Tensor] = {}
        self.batch: Any = None
        self.blocks: list[dict[str, Any]] = []
        self.candidates: list[list[int]] = []

    def on_extend(self, features: torch.Tensor, positions: list[int]) -> None:
        """Record a prefill's rows ([tokens, D], flat over requests); it ends what a request carries."""
        token_ids, at = self.batch.input_ids.tolist(), 0
        for index, request in enumerate(self.batch.reqs):
            count, start = int(self.batch.extend_lens[index]), positions[at]
            record = self.records.setdefault(request.rid, _Record())
            record.cut(start)
            known = [*request.origin_input_ids, *request.output_ids]
            for position in range(len(record.tokens), start):
                self._append(record, known[position], None)
            for row in range(at, at + count):
                self._append(record, token_ids[row], features[row])
            record.carried, record.verified = [], None
            at += count

    def on_verify(self, features: torch.Tensor, commit_lens: list[int]) -> None:
        """Record a verify step's rows ([bs * W, D]): committed ones as context, rejected ones to carry."""
        rows = features.view(len(commit_lens), self.verify_width, -1)
        for index, request in enumerate(self.batch.reqs):
            record, committed = self.records[request.rid], commit_lens[index]
            start = len(record.tokens)
            for row in range(committed):
                self._append(record, self.candidates[index][row], rows[index, row])
            rejected = [(start + row, rows[index, row]) for row in range(committed, self.verify_width)]
            room = max(0, self.columns - len(record.tokens) - self.query_width)
            record.carried = rejected[: self.limit][:room]

    def _append(self, record: _Record, token: int, row: torch.Tensor | None) -> None:
        key = hash((record.keys[-1], token))
        if row is None:
            row = self.rows[key]
        self.rows[key] = row
        record.tokens.append(token)
        record.features.append(row)
        record.keys.append(key)

    def on_block(self, forward_batch: Any, hidden: torch.Tensor) -> None:
        """Recompute each request's block (served: [bs * Q, hidden]); the comparison waits for the round's tokens."""
        width = self.query_width
        served = hidden.float().cpu().view(-1, width, hidden.shape[-1])
        lengths = forward_batch.seq_lens.tolist()
        positions = forward_batch.positions.view(-1, width).tolist()
        token_ids = forward_batch.input_ids.view(-1, width).tolist()
        # With exact host lengths SGLang passes prefix + block; without them a bound, or nothing.
        exact = self.batch.seq_lens_cpu is not None and forward_batch.seq_lens_cpu is not None
        host = forward_batch.seq_lens_cpu.tolist() if exact else None
        states = self._states(forward_batch)
        self.blocks = []
        for index, request in enumerate(self.batch.reqs):
            record = self.records[request.rid]
            length, carried = len(record.tokens), record.carried
            ids, at = torch.tensor(token_ids[index]), torch.arange(length, length + width)
            plain, context = self._contexts(self.drafter, record)
            expected = self.drafter.block(context, ids, at, states[index])
            rounding = 0.0
            if self.rounded is not None:
                block = self.rounded.block(self._contexts(self.rounded, record)[1], ids, at, states[index])
                rounding = float((expected - block).abs().max())
            anchor, verified = token_ids[index][0], record.verified if self.looks_up else None
            drafts, margins = self.drafter.greedy(expected, anchor, verified)
            self.blocks.append(
                {
                    "rid": request.rid,
                    "length": length,
                    "carried": len(carried),
                    "length_ok": lengths[index] == length + len(carried),
                    "host_ok": host is None or host[index] == length + len(carried) + width,
                    "positions_ok": positions[index] == at.tolist(),
                    "masks_ok": all(token == self.mask_token_id for token in token_ids[index][1:]),
                    "hidden_error": float((expected - served[index]).abs().max()),
                    "rounding": rounding,
                    "effect": self._distance(expected, plain, ids, at, states[index]) if carried else 0.0,
                    "read_effect": self._distance(expected, context, ids, at, None) if self.drafter.reader else 0.0,
                    "looked_up": drafts != self.drafter.greedy(expected, anchor)[0],
                    "drafts": drafts,
                    "margin": min(margins),
                }
            )

    def _states(self, forward_batch: Any) -> list[torch.Tensor | None]:
        """Each request's committed states [sources, HV, V, K]; None where the drafter has no reader."""
        if self.drafter.reader is None:
            return [None] * forward_batch.batch_size
        return list(self.worker.draft_model.states.gather(forward_batch.req_pool_indices).float().cpu())

    def _distance(self, block: torch.Tensor, context: Any, ids: Any, at: Any, states: torch.Tensor | None) -> float:
        """How far a block is from one drafted with another context or other states."""
        return float((block - self.drafter.block(context, ids, at, states)).abs().max())

    @staticmethod
    def _contexts(drafter: ReferenceDrafter, record: _Record) -> tuple[Any, Any]:
        """A request's context without and with the rows that it carries."""
        plain = drafter.context(torch.stack(record.features), torch.arange(len(record.features)))
        if not record.carried:
            return plain, plain
        marked = drafter.marked(torch.stack([row for _, row in record.carried]))
        extra = drafter.context(marked, torch.tensor([position for position, _ in record.carried]))
        return plain, [
            (torch.cat([key, more_key]), torch.cat([value, more_value]))
            for (key, value), (more_key, more_value) in zip(plain, extra, strict=True)
        ]

    def on_accept(self, candidates: torch.Tensor, commit_lens: torch.Tensor, predictions: torch.Tensor | None) -> None:
        """Close the round: were the verified candidates ([bs, W], anchor first) the reference's own drafts?"""
        self.candidates = candidates.tolist()
        for index, block in enumerate(self.blocks):
            drafts = block.pop("drafts")
            tokens_ok = self.candidates[index][1:] == drafts or block["margin"] < self.tie
            checks = (block["length_ok"], block["host_ok"], block["positions_ok"], block["masks_ok"], tokens_ok)
            tolerance = TOLERANCE if self.rounded is None else ROUNDINGS * block["rounding"]
            ok = all(checks) and block["hidden_error"] <= tolerance
            row = {
                "ok": ok,
                **block,
                "tolerance": tolerance,
                "tokens_ok": tokens_ok,
                "committed": int(commit_lens[index]),
            }
            self.log.write(json.dumps(row) + "\n")
        self.log.flush()
        if predictions is not None:
            for request, inputs, choices, committed in zip(
                self.batch.reqs, self.candidates, predictions.tolist(), commit_lens.tolist(), strict=True
            ):
                self.records[request.rid].verified = inputs, choices, committed
        self.blocks = []


def attach(worker: Any, log: str) -> Oracle:
    """Let an oracle follow a Carryover or ReaDy worker; one line per request and round goes to the file ``log``."""
    from sglang.srt.runtime_context import get_spec

    if worker.draft_model_runner.dtype not in TIE:
        raise UsageError(
            f"{ORACLE_LOG} compares with float32 and bfloat16 servers, and this one runs another dtype; add "
            "--dtype float32."
        )
    target = worker.target_worker.model_runner.model_config.model_path
    drafter = ReferenceDrafter(get_spec().speculative_draft_model_path, target)
    if drafter.reader is not None and worker.draft_model.shards > 1:
        raise UsageError(f"{ORACLE_LOG} follows one rank, and each has only some value heads' states; set --tp 1.")
    oracle = Oracle(worker, drafter, open(log, "a", encoding="utf-8"))  # noqa: SIM115 - lives as long as the engine
    observer.attach(worker, oracle)
    return oracle
