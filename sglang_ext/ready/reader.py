"""The reader: what a draft position takes from the target's committed recurrent states.

Plain torch, used by training and by serving; neither SGLang nor a trainer is imported. The published description of
ReaDy (Sun et al., section 3) names its parts but not its equations; these are ours (docs/ready.md).

For source s and value head h with state S [V, K], committed up to but without the anchor:

    M = P S U^T                       [r_v, r_k]  once per anchor, shared by all positions of its block
    M^ = M / rms(M)                   so that the state's scale, which grows with the context, drops out
    q = W_q rmsnorm(x), q^ = q / |q|  [r_k]       per position, x its representation in the draft layer
    o = M^ q^                         [r_v]
    delta = W_o [o of all s, h]       [H]         zero at the start of training

**Layout.** States are [.., HV, V, K], as in SGLang's pool (mem_cache/memory_pool.py:749); transformers and
flash-linear-attention keep [.., HV, K, V], see :func:`value_key_order`. At V = K a transposed state has the right shape
and gives wrong reads.

**Precision.** States, projections to M, and everything between query and output are float32; the two products with
[H]-wide weights run in the weights' dtype. The result is added to the attention output and the layer's residual is left
alone: SGLang's fused add-and-norm does not round their sum, so adding it earlier would change bits even at zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ext.ready.config import ReadyConfig

SHARDED = {"value_down": 1, "key_down": 1, "query": 1, "out": 2}
"""Last part of a weight's name -> its value-head dimension, which tensor parallelism splits (a shared query: not)."""

EPS = 1e-6


def value_key_order(states: Tensor) -> Tensor:
    """States as transformers and flash-linear-attention keep them, [.., K, V], in the reader's order [.., V, K]."""
    return states.transpose(-1, -2)


class StateRead(nn.Module):
    """The part of the reader that belongs to one draft layer.

    Weights: ``norm`` [H], ``query`` [L, HV or 1, r_k, H], ``out`` [H, L, HV, r_v].
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(shapes["norm"]))
        self.query = nn.Parameter(torch.empty(shapes["query"]))
        self.out = nn.Parameter(torch.zeros(shapes["out"]))

    def queries(self, hidden: Tensor) -> Tensor:
        """Queries [N, B, L, HV or 1, r_k], not yet of unit length, of representations [N, B, H]."""
        x = F.rms_norm(hidden.float(), self.norm.shape, self.norm.float(), EPS).to(self.query.dtype)
        return F.linear(x, self.query.flatten(0, 2)).unflatten(-1, self.query.shape[:3])

    def output(self, reads: Tensor, dtype: torch.dtype) -> Tensor:
        """Delta [N, B, H] of reads [N, B, L, HV, r_v], in the dtype given."""
        return F.linear(reads.flatten(-3).to(self.out.dtype), self.out.flatten(1)).to(dtype)


class StateReader(nn.Module):
    """Low-rank reads of recurrent states, for every draft layer that reads.

    Use: ``reduced = reader.reduce(states)`` once per anchor, then in the i-th reading draft layer
    ``attn_out = attn_out + reader.read(residual + attn_out, reduced, i)`` (inject ``after_attention``), or
    ``hidden = hidden + reader.read(hidden, reduced, i)`` in front of its input norm, on the residual stream
    (``before_attention``).

    Weights (in a checkpoint below ``state_reader.``): ``value_down`` [L, HV, r_v, V] (P) and ``key_down``
    [L, HV, r_k, K] (U), always float32; ``reads.i.norm`` [H], ``reads.i.query`` [L, HV or 1, r_k, H] and
    ``reads.i.out`` [H, L, HV, r_v] in the model's dtype. L sources, HV value heads, H hidden size.

    Args:
        config: the checkpoint's ``ready_config``.
        hidden_size: H.
        num_draft_layers: layers of the drafter.
        shards: ranks that the value heads are split over; a rank's deltas must be summed over all of them.
    """

    def __init__(self, config: ReadyConfig, hidden_size: int, num_draft_layers: int, shards: int = 1) -> None:
        super().__init__()
        self.config = config
        self.layers = config.reading_layers(num_draft_layers)
        shapes = {
            name: shard_shape(name, shape, shards)
            for name, shape in config.weight_shapes(hidden_size, num_draft_layers).items()
        }
        self.value_down = nn.Parameter(torch.empty(shapes["value_down"], dtype=torch.float32))
        self.key_down = nn.Parameter(torch.empty(shapes["key_down"], dtype=torch.float32))
        self.reads = nn.ModuleList(
            StateRead({part: shapes[f"reads.{index}.{part}"] for part in ("norm", "query", "out")})
            for index in range(len(self.layers))
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Start of training: random orthonormal projections, small random queries, an output of zeros."""
        for down in (self.value_down, self.key_down):
            for matrix in down.flatten(0, 1):
                nn.init.orthogonal_(matrix, generator=generator)
        for read in self.reads:
            assert isinstance(read, StateRead)
            nn.init.ones_(read.norm)
            nn.init.normal_(read.query, std=read.query.shape[-1] ** -0.5, generator=generator)
            nn.init.zeros_(read.out)

    def reduced_shape(self) -> tuple[int, ...]:
        """[L, HV, r_v, r_k]: one anchor's reduced states on this rank."""
        return (*self.value_down.shape[:3], self.key_down.shape[2])

    def bytes_per_request(self, rows: int) -> int:
        """Most bytes that a running request takes: reduced states, and a layer's queries and reads for its rows."""
        sources, heads, rank_v, rank_k = self.reduced_shape()
        query = self.reads[0].get_parameter("query")
        asked = rows * sources * (query.shape[1] * rank_k + heads * rank_v)
        return 4 * sources * heads * rank_v * rank_k + query.element_size() * asked

    def reduce(self, states: Tensor) -> Tensor:
        """Reduced states M^ [N, L, HV, r_v, r_k] (float32) of the states [N, L, HV, V, K] of N anchors."""
        expected = (*self.value_down.shape[:2], self.value_down.shape[-1], self.key_down.shape[-1])
        if states.shape[1:] != expected:
            raise ValueError(f"states are {list(states.shape)}, but this reader takes [N, {str(expected)[1:-1]}].")
        with torch.autocast(states.device.type, enabled=False):
            values = torch.einsum("lhrv,nlhvk->nlhrk", self.value_down, states.float())
            return normalize_reduced(torch.einsum("nlhrk,lhqk->nlhrq", values, self.key_down))

    def read(
        self,
        hidden: Tensor,
        reduced: Tensor,
        index: int = 0,
        kernel: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Delta [N, B, H] for the block representations [N, B, H] of N anchors, in their dtype.

        Args:
            hidden: representations in the reading draft layer; the residual stream, not normalised.
            reduced: what :meth:`reduce` made of the same N anchors' states.
            index: which of the reading layers asks, counted from 0.
            kernel: takes the place of :func:`read_reduced`, which is the plain form.
        """
        layer = self.reads[index]
        assert isinstance(layer, StateRead)
        reads = (kernel or read_reduced)(layer.queries(hidden), reduced)
        return layer.output(reads, hidden.dtype)


def read_reduced(queries: Tensor, reduced: Tensor) -> Tensor:
    """Reads [N, B, L, HV, r_v] (float32) of queries [N, B, L, HV or 1, r_k] and reduced states [N, L, HV, r_v, r_k]."""
    with torch.autocast(queries.device.type, enabled=False):
        unit = F.normalize(queries.float(), dim=-1, eps=EPS).expand(*queries.shape[:3], reduced.shape[2], -1)
        return torch.einsum("nlhrq,nblhq->nblhr", reduced, unit)


def normalize_reduced(reduced: Tensor) -> Tensor:
    """Divide each head's [r_v, r_k] by its root mean square; a state of zeros stays zero."""
    return reduced * torch.rsqrt(reduced.pow(2).mean((-2, -1), keepdim=True) + EPS)


def shard_dimension(name: str, shape: tuple[int, ...]) -> int | None:
    """The dimension of a weight that tensor parallelism splits; None for one that every rank has whole."""
    dimension = SHARDED.get(name.rpartition(".")[2])
    return None if dimension is None or shape[dimension] == 1 else dimension


def shard_shape(name: str, shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """A rank's part of a weight of ``shape``."""
    dimension = shard_dimension(name, shape)
    if dimension is None:
        return shape
    return (*shape[:dimension], shape[dimension] // shards, *shape[dimension + 1 :])
