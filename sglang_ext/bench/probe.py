"""Inside a scheduler: several methods on one target, taken in turns, and a clock around the parts of their rounds.

An engine is started with a stock algorithm. Behind its start, a worker of each further method is built on the same
target, pools and request slots, as the engine's own was. So the methods are compared on one target, one process and one
state of the machine. Either decode rounds go to one after the other (``Turns``): a drafter's context is right only
where its own worker wrote it, and with forced acceptance (``SGLANG_SIMULATE_ACC_LEN``) that changes tokens and no time.
Or requests do, from their prefill to their end (``ByRequest``), and acceptance is real.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

PARTS = ("draft", "verify", "inject")
"""Draft: the block's preparation, forward and sampling. Verify: the target's forward. Inject: acceptance, commit of
recurrent states, writing the drafter's context. What a round takes beyond them is glue between two rounds."""


class _HostMark:
    """A CUDA event's stand-in where the device is the CPU."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: _HostMark) -> float:
        return 1000 * (other.at - self.at)


def attach(scheduler: Any, plan: Path) -> None:
    """Build the methods of ``plan``, and let decode rounds or requests go to one after the other.

    The plan is JSON: ``methods``, each with ``name``, ``algorithm`` and ``drafter``, the engine's own first; ``out``,
    where rounds' times or blocks' counts go; for rounds in turns also ``turn``, how many a turn has. Writes
    ``memory.json`` beside it.
    """
    settings = json.loads(plan.read_text())
    first, *others = settings["methods"]
    workers = {first["name"]: scheduler.model_worker}
    for method in others:
        workers[method["name"]] = _build(scheduler, method["algorithm"], method["drafter"])
        logger.info("The bench has a worker of %s.", method["name"])
    plan.with_name("memory.json").write_text(json.dumps(_memory(scheduler, workers)))
    out = Path(settings["out"])
    taking: ByRequest | Turns
    if "turn" in settings:
        taking = Turns(workers, scheduler.tp_worker, int(settings["turn"]), out)
    else:
        taking = ByRequest(workers, out)
    scheduler.model_worker = taking
    idle = scheduler.on_idle

    def on_idle() -> Any:
        taking.flush()
        return idle()

    scheduler.on_idle = on_idle


def _build(scheduler: Any, algorithm: str, drafter: str) -> Any:
    """One more worker, in the steps of ``Scheduler.init_model_worker`` (scheduler.py:1128)."""
    from sglang.srt.runtime_context import get_device, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    with get_spec().override(speculative_draft_model_path=drafter):
        made = SpeculativeAlgorithm.from_string(algorithm).create_worker(scheduler.server_args)
        worker = made(
            server_args=scheduler.server_args,
            gpu_id=get_device().gpu_id,
            nccl_port=scheduler.nccl_port,
            target_worker=scheduler.tp_worker,
        )
        pool, allocator = scheduler.tp_worker.get_memory_pool()
        worker.alloc_memory_pool(
            memory_pool_config=scheduler.tp_worker.model_runner.memory_pool_config,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
        )
        worker.init_attention_backends()
        with torch.no_grad():
            worker.init_cuda_graphs()
    return worker


def _memory(scheduler: Any, workers: dict[str, Any]) -> dict[str, Any]:
    """Bytes that the methods keep beside SGLang's: Carryover's a slot, ReaDy's buffers of a running request."""
    found: dict[str, Any] = {"slots": int(scheduler.req_to_token_pool.req_to_token.shape[0])}
    for name, worker in workers.items():
        row: dict[str, Any] = {}
        if (carry := getattr(worker, "carry", None)) is not None:
            device, host = carry.bytes_per_slot()
            row |= {"carryover_device_bytes_per_slot": device, "carryover_host_bytes_per_slot": host}
        if (lookup := getattr(worker, "lookup", None)) is not None:
            row["lookup_device_bytes_per_slot"] = lookup.bytes_per_slot()
        reader = getattr(getattr(worker, "draft_model", None), "state_reader", None)
        if reader is not None:
            row["ready_bytes_per_request"] = reader.bytes_per_request(int(worker.query_token_num))
            row["ready_weight_bytes"] = sum(p.numel() * p.element_size() for p in reader.parameters())
        found[name] = row
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"gpu_bytes_used": total - free, "gpu_bytes": total}
    return found


def whose_turn(names: Sequence[str], turn: int) -> str:
    """The method of a turn: there and back again, so that what grows with time costs every method the same."""
    cycle, place = divmod(turn, len(names))
    return names[place if cycle % 2 == 0 else -1 - place]


class ByRequest:
    """A worker that is several: a batch goes to the one whose name begins its requests' ids, ``NAME/BLOCK/...``.

    All requests that run at a time must be of one block, which has one method: whoever sends them waits for those of
    the block before. How many prefills and rounds a block took goes to ``out``, one JSON line each.
    """

    def __init__(self, workers: dict[str, Any], out: Path) -> None:
        self._first = next(iter(workers.values()))
        self._forward = {name: worker.forward_batch_generation for name, worker in workers.items()}
        self._out, self._block = out, ""
        self._taken = {"prefills": 0, "rounds": 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One scheduler step, on the forward stream; ids of another form go to the first."""
        name, block = "", ""
        if batch.reqs:
            name, block = batch.reqs[0].rid.partition("/")[0], batch.reqs[0].rid.rpartition("/")[0]
        if block != self._block:
            self.flush()
            self._block = block
        self._taken["prefills" if batch.forward_mode.is_extend() else "rounds"] += 1
        return self._forward.get(name, self._first.forward_batch_generation)(batch, *args, **kwargs)

    def flush(self) -> None:
        """Write what the block took, and begin anew."""
        if any(self._taken.values()):
            with self._out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"block": self._block, **self._taken}) + "\n")
            self._taken = dict.fromkeys(self._taken, 0)


class Turns:
    """A worker that is several: decode rounds go to each in turn, everything else to the first."""

    def __init__(self, workers: dict[str, Any], target: Any, turn: int, out: Path) -> None:
        self._workers, self._names = workers, list(workers)
        self._first = workers[self._names[0]]
        self._turn, self._out = turn, out
        self._decoded = 0
        self._rows: list[tuple[str, int, int, list[Any]]] = []
        self._open: list[Any] | None = None
        # An AR engine's only worker is the target's: then both clocks are around one call.
        self._forward = {name: worker.forward_batch_generation for name, worker in workers.items()}
        verify = target.forward_batch_generation
        on_cuda = torch.cuda.is_available()
        self._mark: Any = (lambda: torch.cuda.Event(enable_timing=True)) if on_cuda else _HostMark

        def timed_verify(*args: Any, **kwargs: Any) -> Any:
            marks = self._open
            if marks is None:
                return verify(*args, **kwargs)
            marks[1].record()
            result = verify(*args, **kwargs)
            marks[2].record()
            return result

        target.forward_batch_generation = timed_verify
        if self._first is target:
            self._forward = {self._names[0]: timed_verify}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One scheduler step, on the forward stream."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or not batch.reqs:
            self._decoded = 0
            return self._forward[self._names[0]](batch, *args, **kwargs)
        turn, self._decoded = divmod(self._decoded, self._turn)[0], self._decoded + 1
        name = whose_turn(self._names, turn)
        marks = self._open = [self._mark() for _ in range(4)]
        marks[0].record()
        try:
            return self._forward[name](batch, *args, **kwargs)
        finally:
            marks[3].record()
            self._open = None
            self._rows.append((name, len(batch.reqs), turn, marks))

    def flush(self) -> None:
        """Write what is known of the rounds so far, microseconds, one JSON line each."""
        if not self._rows:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rows, self._rows = self._rows, []
        with self._out.open("a", encoding="utf-8") as file:
            for (name, batch, turn, marks), after in zip(rows, [*rows[1:], None], strict=True):
                row = {"method": name, "batch": batch, "turn": turn}
                for part, start, end in zip(PARTS, marks, marks[1:], strict=False):
                    row[part] = 1000 * start.elapsed_time(end)
                if after is not None and after[1:3] == (batch, turn):
                    row["round"] = 1000 * marks[0].elapsed_time(after[3][0])
                file.write(json.dumps(row) + "\n")
            file.write(json.dumps({"end": True}) + "\n")
