"""``sglang-ext bench kernels``: the kernels of ReaDy and Carryover at the shape of Qwen3.8-27B.

Every kernel is checked against float64 before it is timed; a time of a wrong one is not reported. Inputs rotate, so
that each call finds its data in memory and not in the cache, as in a server, where a verify step of the target lies
between two reads of the same states.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.errors import UsageError

if TYPE_CHECKING:
    import torch

BATCHES = (1, 2, 4, 8, 16, 32, 64)
RANKS = (8, 4, 32)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest relative error, by norm, of a result in such a type: far below what tf32 alone would make (3e-4)."""
_ROTATED = 512 << 20  # bytes, several times the cache of any GPU so far


@dataclass(frozen=True)
class Shape:
    """Sizes that the kernels see: by default Qwen3.8-27B with its DSpark drafter."""

    heads: int = 48
    side: int = 128  # of a head's state
    sources: int = 2
    block: int = 7
    hidden: int = 5120
    features: int = 5  # target layers whose features a row has
    verify: int = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes and outputs."""
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES), help="requests in the batch")
    parser.add_argument("--rank", type=int, nargs="+", default=list(RANKS), help="ranks of the reader, r_k = r_v")
    parser.add_argument("--tune", action="store_true", help="time many ways of loading the states, at --tune-batch")
    parser.add_argument("--tune-batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes for --tune")
    parser.add_argument("--repeats", type=int, default=15, help="timed repeats of each figure")
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench/kernels.json"), help="JSON file; a PNG is written beside it"
    )


def state_bytes(shape: Shape, batch: int) -> int:
    """Bytes of the states that ``batch`` requests' reads must load."""
    return 4 * shape.sources * batch * shape.heads * shape.side**2


def reader_bytes(shape: Shape, batch: int, rank: int) -> int:
    """Fewest bytes of reduce and read together: states, projections, queries in, reads out (bfloat16)."""
    pairs = shape.sources * shape.heads
    return state_bytes(shape, batch) + 4 * pairs * 2 * rank * shape.side + 2 * batch * shape.block * pairs * 2 * rank


def write_bytes(shape: Shape, batch: int) -> int:
    """Fewest bytes of the Carryover write: features in and out, the embedding (bfloat16)."""
    width = shape.features * shape.hidden
    return 2 * (2 * batch * shape.verify + 1) * width


def rotations(size: int) -> int:
    """How many inputs of ``size`` bytes a graph goes through."""
    return max(2, min(128, -(-_ROTATED // size)))


def run(args: argparse.Namespace) -> int:
    """Check, time, write the JSON after every row, draw."""
    import torch

    from sglang_ext.bench.timing import copy_bandwidths
    from sglang_ext.evaluation import record

    if not torch.cuda.is_available():
        raise UsageError("There is no CUDA device here, and these kernels run on nothing else; use a machine with one.")
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = Shape()
    copies = copy_bandwidths()
    bandwidth = max(copies.values())  # the floor is what the card can do, not what one way of copying can
    said = ", ".join(f"{name} {value / 1e12:.2f}" for name, value in copies.items())
    print(f"copies, TB/s read and written: {said}", flush=True)
    document: dict[str, Any] = {
        "command": shlex.join(["sglang-ext", *sys.argv[1:]]),
        "environment": record.environment(),
        "shape": asdict(shape),
        "copies_bytes_per_second": copies,
        "copy_bytes_per_second": bandwidth,
        "rows": [],
    }
    for row in _measure(shape, args):
        row["floor_us"] = row["bytes"] / bandwidth * 1e6
        row["bandwidth_share"] = row["floor_us"] / row["median_us"] if row["correct"] else None
        document["rows"].append(row)
        print(_line(row), flush=True)
        record.write(args.out, document)
    _draw(document, args.out.with_suffix(".png"))
    return 0 if all(row["correct"] for row in document["rows"]) else 1


def _line(row: dict[str, Any]) -> str:
    time = (
        "not timed: wrong" if not row["correct"] else "{median_us:8.2f} us ({low_us:.2f}-{high_us:.2f})".format(**row)
    )
    share = "" if row["bandwidth_share"] is None else f" {row['bandwidth_share']:6.1%} of copy bandwidth"
    return "{operator:14} {variant:33} batch {batch:3} rank {rank:3}: ".format(**row) + time + share


def _measure(shape: Shape, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from sglang_ext.ready.kernels import FEW

    pool = _Pool(shape, max([*args.batch, *args.tune_batch]))
    for rank in args.rank:
        reader = _Reader(pool, rank)
        for batch in args.batch:
            yield from reader.rows(batch, args.repeats)
    for batch in args.batch:
        yield from _carryover_write(shape, batch, args.repeats)
    if args.tune:
        reader = _Reader(pool, args.rank[0])
        for batch in args.tune_batch:
            for tuning in _tunings(FEW):
                yield from reader.fused(batch, args.repeats, tuning, _name(tuning))


def _tunings(base: Any) -> Iterable[Any]:
    """``base`` first, which is served to few; then tiles, stages and warps, on tensor cores and as plain sums."""
    yield base
    for rows, stages, warps in (
        (32, 1, 4), (32, 1, 2), (32, 2, 2), (32, 3, 2), (16, 1, 2), (16, 2, 2), (16, 3, 2), (16, 1, 1),
        (16, 2, 1),
    ):  # fmt: skip
        yield replace(base, rows=rows, stages=stages, warps=warps)
    sums = replace(base, precision="sums")
    for rows, stages, warps in (
        (64, 2, 4), (64, 2, 2), (32, 1, 1), (32, 2, 1), (32, 3, 1), (32, 4, 1), (16, 1, 1), (16, 2, 1), (16, 3, 1),
        (16, 4, 1), (16, 6, 1), (8, 4, 1), (8, 8, 1),
    ):  # fmt: skip
        yield replace(sums, rows=rows, stages=stages, warps=warps)
    for rows, stages in ((32, 2), (16, 3)):
        yield replace(sums, rows=rows, stages=stages, warps=1, eviction="")
    yield replace(base, early=True)


def _name(tuning: Any) -> str:
    more = ", evict first" * bool(tuning.eviction) + ", early" * tuning.early
    return f"{tuning.precision} {tuning.rows}x{tuning.stages} w{tuning.warps}{more}"


def _row(
    operator: str,
    variant: str,
    batch: int,
    rank: int,
    size: int,
    error: float,
    tolerance: float,
    calls: Sequence[Callable[[], object]],
    repeats: int,
) -> dict[str, Any]:
    from sglang_ext.bench.timing import replay_time

    correct = error <= tolerance  # NaN is no such number
    row = {"operator": operator, "variant": variant, "batch": batch, "rank": rank, "bytes": size, "error": error}
    row["correct"] = correct
    if correct:
        time = replay_time(calls, repeats)
        row |= {"median_us": time.median, "low_us": time.low, "high_us": time.high}
    return row


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


class _Pool:
    """States of many requests, strided like SGLang's pool, in which batches rotate."""

    def __init__(self, shape: Shape, largest: int) -> None:
        import torch

        self.shape = shape
        count = max(2 * largest, rotations(state_bytes(shape, 1))) + 1
        self.temporal = torch.randn(shape.sources, count, shape.heads, shape.side, shape.side, device="cuda")
        order = torch.randperm(count - 1, device="cuda") + 1
        self.state_slots = torch.cat([order.new_zeros(1), order]).to(torch.int32)  # slot 0 is padding's
        self.count = count

    def slots(self, batch: int) -> list[torch.Tensor]:
        """Batches of request slots that have none in common."""
        import torch

        sets = min((self.count - 1) // batch, rotations(state_bytes(self.shape, batch)))
        return [torch.arange(1 + index * batch, 1 + (index + 1) * batch, device="cuda") for index in range(sets)]


class _Reader:
    """ReaDy's kernels at one rank."""

    def __init__(self, pool: _Pool, rank: int) -> None:
        import torch

        from sglang_ext.ready.config import ReadyConfig
        from sglang_ext.ready.reader import StateReader
        from sglang_ext.ready.states import CommittedStates

        shape = pool.shape
        config = ReadyConfig((30, 62), shape.heads, shape.side, shape.side, rank_k=rank, rank_v=rank)
        self.pool, self.shape, self.rank = pool, shape, rank
        self.reader = StateReader(config, shape.hidden, 5).cuda()
        self.reader.requires_grad_(False)
        torch.nn.init.normal_(self.reader.reads[0].out, std=0.02)  # type: ignore[arg-type]
        self.reader.reads.bfloat16()
        self.states = CommittedStates(pool.temporal, pool.state_slots, tuple(range(shape.sources)))
        self.layers = torch.arange(shape.sources, device="cuda")

    def _inputs(self, batch: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots by rotation, hidden [bs, B, H], queries of the first rotation, M^ of it in float64."""
        import torch

        slots = self.pool.slots(batch)
        hidden = torch.randn(batch, self.shape.block, self.shape.hidden, device="cuda", dtype=torch.bfloat16)
        queries = self.reader.reads[0].queries(hidden)  # type: ignore[operator]
        parts = []
        for one in slots[0].split(4):
            states = self.states.gather(one).double()
            down = torch.einsum("lhrv,nlhvk->nlhrk", self.reader.value_down.double(), states)
            parts.append(torch.einsum("nlhrk,lhqk->nlhrq", down, self.reader.key_down.double()))
        product = torch.cat(parts)
        return slots, hidden, queries, product * torch.rsqrt(product.pow(2).mean((-2, -1), keepdim=True) + 1e-6)

    def _expected(self, queries: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
        import torch

        unit = torch.nn.functional.normalize(queries.double(), dim=-1, eps=1e-6)
        return torch.einsum("nlhrq,nblhq->nblhr", reduced, unit)

    def rows(self, batch: int, repeats: int) -> Iterator[dict[str, Any]]:
        """Reduce, read, both in two launches and in one, and the whole reader of a layer; plain and with kernels."""
        from sglang_ext.ready import kernels
        from sglang_ext.ready.reader import read_reduced

        reader, shape = self.reader, self.shape
        slots, hidden, queries, exact = self._inputs(batch)
        expected = self._expected(queries, exact)
        half, full = TOLERANCE["bfloat16"], TOLERANCE["float32"]
        pairs = shape.sources * shape.heads
        matrices = 4 * batch * pairs * self.rank**2
        reduce_size = state_bytes(shape, batch) + 4 * pairs * 2 * self.rank * shape.side + matrices
        read_size = matrices + 2 * batch * shape.block * pairs * 2 * self.rank
        whole_size = reader_bytes(shape, batch, self.rank) + 2 * 2 * pairs * self.rank * shape.hidden

        def plain_reduce(at: torch.Tensor) -> torch.Tensor:
            return reader.reduce(self.states.gather(at))

        def reduce(at: torch.Tensor) -> torch.Tensor:
            return kernels.reduce_states(self.states, self.layers, at, reader.value_down, reader.key_down)

        def fused(at: torch.Tensor, asked: torch.Tensor = queries, tuning: Any = None) -> torch.Tensor:
            weights = reader.value_down, reader.key_down
            return kernels.read_states(self.states, self.layers, at, *weights, asked, tuning)

        def layer(at: torch.Tensor, tuning: Any) -> torch.Tensor:
            asked = reader.reads[0].queries(hidden)  # type: ignore[operator]
            return reader.reads[0].output(fused(at, asked, tuning), hidden.dtype)  # type: ignore[operator]

        read = fused(slots[0])

        def around(_: torch.Tensor) -> torch.Tensor:
            reader.reads[0].queries(hidden)  # type: ignore[operator]
            return reader.reads[0].output(read, hidden.dtype)  # type: ignore[operator]

        def delta(reads: torch.Tensor) -> torch.Tensor:
            return reads.bfloat16().flatten(-3).double() @ reader.reads[0].out.flatten(1).double().T  # type: ignore

        stored = reduce(slots[0])
        early = replace(kernels.served(batch, shape.sources, shape.heads, self.rank), early=True)
        forms: list[tuple[str, str, int, Callable[[torch.Tensor], torch.Tensor], torch.Tensor, float]] = [
            ("reduce", "plain", reduce_size, plain_reduce, exact, full),
            ("reduce", "kernel", reduce_size, reduce, exact, full),
            ("read", "plain", read_size, lambda _: read_reduced(queries, stored), expected, full),
            ("read", "kernel", read_size, lambda _: kernels.read_reduced(queries, stored), expected, half),
            ("reduce and read", "plain", reader_bytes(shape, batch, self.rank),
             lambda at: read_reduced(queries, plain_reduce(at)), expected, full),
            ("reduce and read", "two kernels", reader_bytes(shape, batch, self.rank),
             lambda at: kernels.read_reduced(queries, reduce(at)), expected, half),
            ("reduce and read", "one kernel", reader_bytes(shape, batch, self.rank), fused, expected, half),
            ("reader", "plain", whole_size, lambda at: reader.read(hidden, plain_reduce(at)), delta(expected), half),
            ("reader", "one kernel", whole_size, lambda at: layer(at, None), delta(expected), half),
            ("reader", "one kernel, early", whole_size, lambda at: layer(at, early), delta(expected), half),
            ("reader", "without the kernel", whole_size, around, delta(expected), half),
        ]  # fmt: skip
        for operator, variant, size, call, wanted, tolerance in forms:
            error = _error(call(slots[0]), wanted)
            calls = [_bound(call, at) for at in slots]
            yield _row(operator, variant, batch, self.rank, size, error, tolerance, calls, repeats)

    def fused(self, batch: int, repeats: int, tuning: Any, name: str) -> Iterator[dict[str, Any]]:
        """The one launch in another tuning; nothing where it needs more than the GPU has or the compiler refuses it."""
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        from sglang_ext.ready import kernels

        slots, _, queries, exact = self._inputs(batch)
        expected = self._expected(queries, exact)
        size = reader_bytes(self.shape, batch, self.rank)

        def call(at: torch.Tensor) -> torch.Tensor:
            weights = self.reader.value_down, self.reader.key_down
            return kernels.read_states(self.states, self.layers, at, *weights, queries, tuning)

        try:
            error = _error(call(slots[0]), expected)
        except (OutOfResources, CompilationError, PTXASError) as refusal:
            print(f"tuning {name} at batch {batch}: {type(refusal).__name__}", flush=True)
            return
        calls = [_bound(call, at) for at in slots]
        yield _row("tuning", name, batch, self.rank, size, error, TOLERANCE["bfloat16"], calls, repeats)


def _bound(call: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> Callable[[], object]:
    return lambda: call(at)


def _carryover_write(shape: Shape, batch: int, repeats: int) -> Iterator[dict[str, Any]]:
    """The features of a verify step, the rejected rows marked."""
    import torch

    from sglang_ext.carryover import kernels, rows

    width, size = shape.features * shape.hidden, write_bytes(shape, batch)
    sets = [
        torch.randn(batch * shape.verify, width, device="cuda", dtype=torch.bfloat16)
        for _ in range(min(64, rotations(size)))
    ]
    commits = torch.randint(1, shape.verify + 1, (batch,), device="cuda", dtype=torch.int32)
    embedding = torch.randn(width, device="cuda", dtype=torch.bfloat16)
    rejected = torch.arange(shape.verify, device="cuda") >= commits[:, None]
    expected = sets[0].double() + rejected.reshape(-1, 1) * embedding.double()
    for variant, form in (("plain", rows.write_all_rows), ("kernel", kernels.write_all_rows)):
        marked, lens = form(sets[0], commits, shape.verify, embedding)
        error = _error(marked, expected) if bool((lens == shape.verify).all()) else float("nan")
        calls = [_marking(form, hidden, commits, shape.verify, embedding) for hidden in sets]
        yield _row("Carryover write", variant, batch, 0, size, error, TOLERANCE["bfloat16"], calls, repeats)


def _marking(form: Any, *arguments: Any) -> Callable[[], object]:
    return lambda: form(*arguments)


def _draw(document: dict[str, Any], path: Path) -> None:
    """Time by batch size and the floor, one panel per operator, at the first rank."""
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row["correct"] and row["operator"] != "tuning"]
    first = next(row["rank"] for row in rows if row["rank"])
    rows = [row for row in rows if row["rank"] in (0, first)]
    operators = list(dict.fromkeys(row["operator"] for row in rows))
    figure = Figure(figsize=(3.6 * len(operators), 3.6), layout="constrained")
    for index, operator in enumerate(operators):
        axes = figure.add_subplot(1, len(operators), index + 1)
        chosen = [row for row in rows if row["operator"] == operator]
        for variant in dict.fromkeys(row["variant"] for row in chosen):
            line = [row for row in chosen if row["variant"] == variant]
            axes.plot([row["batch"] for row in line], [row["median_us"] for row in line], marker="o", label=variant)
        floor = {row["batch"]: row["floor_us"] for row in chosen}
        axes.plot(list(floor), list(floor.values()), "k--", label="bytes over bandwidth")
        axes.set(title=operator, xlabel="requests", ylabel="microseconds", xscale="log", yscale="log")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
