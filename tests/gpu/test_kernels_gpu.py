"""The kernels on a GPU: the reader's in all cases and in a CUDA graph whose slots change, those of Carryover."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
from kernel_cases import CASES, LARGE, compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("case", [*CASES, "large"])
def test_a_kernel_equals_its_plain_form(case: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    differences = compare("cuda", **{**CASES, "large": LARGE}[case])
    assert differences["reduce"] < 1e-4 and differences["delta"] < 1e-3
    assert max(differences["read"], differences["fused"]) < (0.04 if case in ("bf16-queries", "large") else 1e-4)
    assert "odd" in case or "shared" in case or differences["transposed"] > 1


def test_a_graph_follows_the_slots_in_its_buffer() -> None:
    from sglang_ext.ready import kernels
    from sglang_ext.ready.config import ReadyConfig
    from sglang_ext.ready.reader import StateReader
    from sglang_ext.ready.states import CommittedStates

    config = ReadyConfig(source_layers=(0, 2), value_heads=4, value_dim=32, key_dim=32)
    reader = StateReader(config, 64, 2).cuda()
    temporal = torch.randn(3, 6, 4, 32, 32, device="cuda")
    states = CommittedStates(temporal, torch.tensor([0, 5, 2, 3], dtype=torch.int32, device="cuda"), (0, 2))
    layers = torch.tensor(states.layers, device="cuda")
    slots = torch.zeros(4, dtype=torch.int64, device="cuda")

    def reduce() -> torch.Tensor:
        return kernels.reduce_states(states, layers, slots, reader.value_down, reader.key_down)

    with torch.no_grad():
        reduce()  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = reduce()
        for chosen in ([1, 2, 3, 0], [3, 1, 0, 0]):
            slots.copy_(torch.tensor(chosen))
            temporal.mul_(1.5).add_(0.1)  # the pool moves on, at the same address
            graph.replay()
            assert (out - reader.reduce(states.gather(slots))).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [96, 2500, 25600])
def test_the_carryover_write_equals_its_plain_form(dtype: torch.dtype, width: int) -> None:
    """Bit for bit, also in a CUDA graph that follows its inputs; rows of a wider tensor, and more than are read."""
    from sglang_ext.carryover import kernels, rows

    hidden = torch.randn(70, width + 32, device="cuda").to(dtype)[:, :width]
    embedding = torch.randn(width, device="cuda").to(dtype)
    for lens in (torch.int32, torch.int64):
        commits = torch.randint(0, 9, (8,), device="cuda", dtype=lens)
        kernels.write_all_rows(hidden, commits, 8, embedding)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kernels.write_all_rows(hidden, commits, 8, embedding)
        for new in (commits.clone(), torch.tensor([0, 8, 1, 2, 7, 0, 3, 8], device="cuda")):
            commits.copy_(new)
            hidden.mul_(-1)
            graph.replay()
            expected = rows.write_all_rows(hidden, commits, 8, embedding)
            for found in (captured, kernels.write_all_rows(hidden, commits, 8, embedding)):
                assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
                assert found[1].dtype == lens


@pytest.mark.parametrize("requests", [1, 32])
@pytest.mark.parametrize("limit", [None, 0, 1, 5])
def test_the_shift_equals_its_plain_form(requests: int, limit: int | None) -> None:
    """Round after round on states of their own: few rows left in the slot row, a round committed by nobody."""
    from sglang_ext.carryover import kernels, rows

    width, columns = 8, 300
    for block in (7, 16):
        slot_rows = torch.randperm(40 * 320, device="cuda").to(torch.int32).view(40, 320)
        plain, ours = rows.CarryState(40, "cuda"), rows.CarryState(40, "cuda")
        slots = 1 + torch.randperm(39, device="cuda")[:requests]
        committed = torch.randint(columns - 90, columns - 60, (requests,), device="cuda")
        moved = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(12):
            stock = torch.randint(40 * 320, (requests, block), device="cuda")
            given = (slot_rows, slots, committed, stock, width, columns, limit)
            expected, found = rows.shift(plain, *given), kernels.shift(ours, *given)
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            assert torch.equal(plain.previous, ours.previous)
            moved += (found[1] - committed).sum()
            committed = committed + torch.randint(0, width + 2, (requests,), device="cuda")
        assert (moved > 0) == (limit != 0)


class _Moved:
    """A module of kernels whose tensors are brought to a GPU for each call, and what was written there back."""

    def __init__(self, module: Any, device: str = "cuda") -> None:
        self.module, self.device = module, device

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            there = [a.to(self.device) if isinstance(a, torch.Tensor) else a for a in args]
            found = getattr(self.module, name)(*there)
            for here, moved in zip(args, there, strict=True):
                if isinstance(here, torch.Tensor):
                    here.copy_(moved)
            return found.cpu() if isinstance(found, torch.Tensor) else found

        return call


def test_the_lookup_kernels_equal_their_plain_forms() -> None:
    """The cases of the unit test; the plain forms stay on the CPU, whose ``max`` takes the first of equal ones."""
    from test_lookup_kernels import SCRIPT

    from sglang_ext.carryover import lookup_kernels

    words = "lookup, lookup_kernels as kernels"
    assert words in SCRIPT
    exec(SCRIPT.replace(words, "lookup"), {"kernels": _Moved(lookup_kernels)})
