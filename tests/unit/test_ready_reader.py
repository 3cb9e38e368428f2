"""The reader's maths: against einsum and a second writing in float64, layouts, shards, precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from sglang_ext.ready.config import ReadyConfig
from sglang_ext.ready.reader import StateReader, shard_dimension, shard_shape, value_key_order
from sglang_ext.ready.reference import read_states

HIDDEN, DRAFT_LAYERS, BLOCK, ANCHORS = 24, 3, 7, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "shared-query": {"query": "source"},
    "ranks-and-layers": {"rank_k": 5, "rank_v": 2, "layers": (0, 2)},
    "square": {"value_dim": 8, "key_dim": 8},
}


def config(**settings: Any) -> ReadyConfig:
    base = {"source_layers": (1, 3), "value_heads": 4, "value_dim": 12, "key_dim": 10, "rank_k": 4, "rank_v": 3}
    return ReadyConfig(**{**base, **settings})


def made(settings: dict[str, Any], shards: int = 1) -> tuple[StateReader, Tensor, Tensor]:
    """A reader with a random output, states [A, L, HV, V, K] and representations [A, B, H]."""
    generator = torch.Generator().manual_seed(0)
    reader = StateReader(config(**settings), HIDDEN, DRAFT_LAYERS, shards)
    reader.reset_parameters(generator)
    for read in reader.reads:
        torch.nn.init.normal_(read.out, generator=generator)  # type: ignore[arg-type]
        torch.nn.init.normal_(read.norm, generator=generator)  # type: ignore[arg-type]
    c = reader.config
    states = torch.randn(ANCHORS, 2, c.value_heads, c.value_dim, c.key_dim, generator=generator)
    return reader, 3 * states, 5 * torch.randn(ANCHORS, BLOCK, HIDDEN, generator=generator)


def in_one_einsum(reader: StateReader, states: Tensor, hidden: Tensor, index: int) -> Tensor:
    """The equations of the module's docstring, in the dtype of the arguments."""
    weights = {name: p.detach().to(states.dtype) for name, p in reader.named_parameters()}
    norm, query, out = (weights[f"reads.{index}.{part}"] for part in ("norm", "query", "out"))
    x = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    q = torch.einsum("abd,lhkd->ablhk", x, query.expand(-1, states.shape[2], -1, -1))
    q = q / q.norm(dim=-1, keepdim=True)
    m = torch.einsum("lhrv,alhvk,lhqk->alhrq", weights["value_down"], states, weights["key_down"])
    m = m / (m.pow(2).mean((-1, -2), keepdim=True) + 1e-6).sqrt()
    return torch.einsum("alhrq,ablhq,dlhr->abd", m, q, out)


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_reads_equal_einsum_in_float64(name: str) -> None:
    reader, states, hidden = made(SETTINGS[name])
    reduced = reader.reduce(states)
    assert reduced.shape == (ANCHORS, 2, 4, reader.config.rank_v, reader.config.rank_k)
    for index in range(len(reader.layers)):
        delta = reader.read(hidden, reduced, index)
        expected = in_one_einsum(reader, states.double(), hidden.double(), index)
        assert delta.shape == hidden.shape and (delta - expected).abs().max() < 1e-4
        weights = dict(reader.named_parameters())
        for anchor in range(ANCHORS):
            again = read_states(hidden[anchor].double(), states[anchor], weights, reader.config, index)
            assert (expected[anchor] - again).abs().max() < 1e-6


@torch.no_grad()
def test_a_transposed_state_is_another_state() -> None:
    """Where V = K the shapes agree, so only the values can tell (the control that must fail)."""
    reader, states, hidden = made(SETTINGS["square"])
    right = reader.read(hidden, reader.reduce(states))
    wrong = reader.read(hidden, reader.reduce(states.transpose(-1, -2).contiguous()))
    assert (right - in_one_einsum(reader, states.double(), hidden.double(), 0)).abs().max() < 1e-4
    assert (wrong - right).abs().amax((-1, -2)).min() > 1
    as_transformers = states.transpose(-1, -2).contiguous()  # [.., K, V]
    assert torch.equal(reader.reduce(value_key_order(as_transformers)), reader.reduce(states))
    other, rectangular, _ = made({})
    with pytest.raises(ValueError, match=r"this reader takes \[N, 2, 4, 12, 10\]"):
        other.reduce(value_key_order(rectangular))


@torch.no_grad()
def test_anchors_and_positions_do_not_mix() -> None:
    reader, states, hidden = made({})
    whole = reader.read(hidden, reader.reduce(states))
    for anchor in range(ANCHORS):
        for row in range(BLOCK):
            alone = reader.read(hidden[anchor, row][None, None], reader.reduce(states[anchor][None]))
            assert (whole[anchor, row] - alone[0, 0]).abs().max() < 1e-4
    changed = states.clone()
    changed[2] *= -1
    other = reader.read(hidden, reader.reduce(changed))
    assert torch.equal(other[[0, 1, 3]], whole[[0, 1, 3]]) and (other[2] - whole[2]).abs().max() > 1


@torch.no_grad()
def test_a_state_s_scale_drops_out_and_zeros_stay_zero() -> None:
    reader, states, hidden = made({})
    assert torch.allclose(reader.reduce(states), reader.reduce(50 * states), atol=1e-4)
    assert not reader.read(hidden, reader.reduce(torch.zeros_like(states))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_fresh_reader_adds_nothing(dtype: torch.dtype) -> None:
    """Bit for bit: the start of training drafts as the drafter without a reader."""
    reader, states, hidden = made({})
    reader.reset_parameters()
    reader.reads.to(dtype)
    attention = hidden.flip(1).to(dtype)
    delta = reader.read(hidden.to(dtype), reader.reduce(states))
    assert delta.dtype == dtype and torch.equal((attention + delta).view(torch.uint8), attention.view(torch.uint8))


def test_autocast_leaves_the_states_in_float32() -> None:
    reader, states, hidden = made({})
    exact = reader.reduce(states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reduced = reader.reduce(states)
        delta = reader.read(hidden, reduced)
    assert torch.equal(reduced, exact) and delta.dtype == torch.float32
    assert 0 < (delta - reader.read(hidden, exact)).abs().max() < 0.5
    delta.sum().backward()
    grads = {name: parameter.grad for name, parameter in reader.named_parameters()}
    assert all(grad is not None and grad.any() for grad in grads.values())


def test_shards_split_value_heads_and_nothing_else() -> None:
    shapes = config().weight_shapes(HIDDEN, DRAFT_LAYERS)
    halved = {name: shard_shape(name, shape, 2) for name, shape in shapes.items()}
    assert halved == {
        "value_down": (2, 2, 3, 12),
        "key_down": (2, 2, 4, 10),
        "reads.0.norm": (HIDDEN,),
        "reads.0.query": (2, 2, 4, HIDDEN),
        "reads.0.out": (HIDDEN, 2, 2, 3),
    }
    shared = config(query="source").weight_shapes(HIDDEN, DRAFT_LAYERS)["reads.0.query"]
    assert shard_shape("reads.0.query", shared, 2) == shared == (2, 1, 4, HIDDEN)


def _rank(rank: int, folder: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    whole, states, hidden = made(settings)
    part = StateReader(whole.config, HIDDEN, DRAFT_LAYERS, shards=2)
    wanted = dict(part.named_parameters())
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            dimension = shard_dimension(name, tuple(weight.shape))
            wanted[name].copy_(weight if dimension is None else weight.chunk(2, dimension)[rank])
        delta = part.read(hidden, part.reduce(states.chunk(2, 2)[rank]))
    dist.all_reduce(delta)
    if rank == 0:
        np.save(f"{folder}/delta.npy", delta.numpy())
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["default", "shared-query"])
def test_two_ranks_equal_one(name: str, tmp_path: Path) -> None:
    """Value heads split over two processes; their deltas are summed by a real all-reduce (gloo)."""
    mp.start_processes(_rank, args=(str(tmp_path), SETTINGS[name]), nprocs=2, start_method="fork")
    reader, states, hidden = made(SETTINGS[name])
    with torch.no_grad():
        alone = reader.read(hidden, reader.reduce(states))
    assert (torch.from_numpy(np.load(tmp_path / "delta.npy")) - alone).abs().max() < 1e-4


def test_the_memory_of_a_running_request_at_the_shape_of_a_27b_target() -> None:
    reader = StateReader(ReadyConfig((30, 62), 48, 128, 128, rank_k=8, rank_v=8), 64, 5)
    reader.reads.bfloat16()
    assert reader.bytes_per_request(7) == 4 * 96 * 64 + 2 * 7 * 96 * 16 < 64 * 1024
