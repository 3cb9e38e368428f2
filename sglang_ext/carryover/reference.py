"""Plain-torch drafter: the whole draft block from a checkpoint, without pools, caches or kernels.

The oracle of the serving path and of the training path. It takes features and positions of every context row
and computes the block densely in fp32, so that nothing a paged cache does can be wrong in the same way. Asked to, it
rounds each result as a server of a lower precision does, which shows how far that alone may lead.
Sources of the maths: methods of DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147); SGLang models/dflash.py,
models/dspark.py.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors import safe_open

from sglang_ext.errors import UsageError
from sglang_ext.ready.config import READER, ReadyConfig
from sglang_ext.ready.reference import read_states

EMBEDDING_NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")


def _load(folder: Path, names: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint folder in fp32; only those in ``names`` where given."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                if names is None or name in names:
                    tensors[name] = weights.get_tensor(name).float()
    return tensors


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class ReferenceDrafter:
    """A DFlash or DSpark drafter of a Qwen3 shape, evaluated densely.

    Args:
        draft: drafter checkpoint folder.
        target: target checkpoint folder; its token embedding and head are the drafter's.
        device: where it computes, and where its inputs must be.

    Raises:
        UsageError: a rope scaling or sliding layers, which this reference does not cover.
    """

    def __init__(self, draft: str | Path, target: str | Path, device: str = "cpu") -> None:
        config = json.loads((Path(draft) / "config.json").read_text())
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
        if scaling or "sliding_attention" in config.get("layer_types", []):
            raise UsageError(
                f"{draft} has a scaled rotary embedding or sliding layers, which the reference drafter does not cover; "
                "use a drafter with a plain one and full attention."
            )
        self.config = config
        self.dtype = torch.float32
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.layers = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config["num_key_value_heads"])
        self.head_dim = int(config["head_dim"])
        self.rope_theta = float(config.get("rope_theta") or rope["rope_theta"])
        self.weights = {name.removeprefix("model."): w.to(device) for name, w in _load(Path(draft)).items()}
        shared = _load(Path(target), (*EMBEDDING_NAMES, "lm_head.weight"))
        self.embed = next(shared[name] for name in EMBEDDING_NAMES if name in shared).to(device)
        self.head = shared["lm_head.weight"].to(device) if "lm_head.weight" in shared else self.embed
        self.is_dspark = "markov_head.markov_w1.weight" in self.weights
        self.embedding = self.weights.get("carryover_embedding")
        self.reader = ReadyConfig.of(config["ready_config"]) if "ready_config" in config else None
        self.reader_weights = {
            name.removeprefix(f"{READER}."): w for name, w in self.weights.items() if name.startswith(f"{READER}.")
        }

    def rounding(self, dtype: torch.dtype) -> ReferenceDrafter:
        """The same drafter, every stored result rounded to ``dtype``: what a server that computes in it may get."""
        other = copy.copy(self)
        other.dtype = dtype
        return other

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dtype == torch.float32 else x.to(self.dtype).float()

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._stored(x @ self.weights[f"{name}.weight"].T)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._stored(rms_norm(x, self.weights[f"{name}.weight"], self.eps))

    def _rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate [rows, heads, head_dim] by absolute positions [rows]."""
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=x.device) / self.head_dim
        angle = (positions.double()[:, None] / self.rope_theta**half)[:, None]
        cos, sin = angle.cos().float(), angle.sin().float()
        left, right = x.chunk(2, -1)
        return self._stored(torch.cat([left * cos - right * sin, right * cos + left * sin], -1))

    def _key_value(self, x: torch.Tensor, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prefix = f"layers.{layer}.self_attn."
        key = self._linear(x, prefix + "k_proj").view(-1, self.kv_heads, self.head_dim)
        value = self._linear(x, prefix + "v_proj").view(-1, self.kv_heads, self.head_dim)
        return self._rope(self._norm(key, prefix + "k_norm"), positions), value

    def marked(self, features: torch.Tensor) -> torch.Tensor:
        """Features [rows, D] of rejected rows, as they are carried."""
        assert self.embedding is not None
        return self._stored(features + self.embedding)

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's key and value [rows, kv heads, head_dim] of context rows with features [rows, D]."""
        hidden = self._norm(self._linear(features, "fc"), "hidden_norm")
        return [self._key_value(hidden, layer, positions) for layer in range(self.layers)]

    def block(
        self,
        context: list[tuple[torch.Tensor, torch.Tensor]],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final hidden states [Q, hidden] of a block of token ids [Q], bidirectional, behind the context.

        A drafter with a reader reads ``states`` [sources, HV, V, K]; without them it drafts as if its output were zero.
        """
        rows, groups = len(token_ids), self.heads // self.kv_heads
        hidden = self.embed[token_ids]
        for layer, (context_key, context_value) in enumerate(context):
            prefix = f"layers.{layer}."
            hidden = self._stored(hidden + self._read(hidden, states, layer, "before_attention"))
            x = self._norm(hidden, prefix + "input_layernorm")
            query = self._linear(x, prefix + "self_attn.q_proj").view(rows, self.heads, self.head_dim)
            query = self._rope(self._norm(query, prefix + "self_attn.q_norm"), positions)
            key, value = self._key_value(x, layer, positions)
            key = torch.cat([context_key, key]).repeat_interleave(groups, 1)
            value = torch.cat([context_value, value]).repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", query, key) * self.head_dim**-0.5
            attended = self._stored(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)).reshape(rows, -1)
            attended = self._linear(attended, prefix + "self_attn.o_proj")
            # As SGLang: what is read joins the attention's output, and both the residual stream.
            read = self._read(self._stored(hidden + attended), states, layer, "after_attention")
            hidden = self._stored(hidden + self._stored(attended + read))
            x = self._norm(hidden, prefix + "post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(x, prefix + "mlp.gate_proj"))
            inner = self._stored(gate * self._linear(x, prefix + "mlp.up_proj"))
            hidden = self._stored(hidden + self._linear(inner, prefix + "mlp.down_proj"))
        return self._norm(hidden, "norm")

    def _read(self, hidden: torch.Tensor, states: torch.Tensor | None, layer: int, place: str) -> torch.Tensor | float:
        """What a layer reads at a place; 0 where it reads nothing."""
        reader = self.reader
        if (
            reader is None
            or states is None
            or reader.inject != place
            or layer not in reader.reading_layers(self.layers)
        ):
            return 0.0
        index = reader.reading_layers(self.layers).index(layer)
        return self._stored(read_states(hidden, states, self.reader_weights, reader, index))

    def _draft_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows of a block that predict: DFlash, and DSpark with a row more than drafts, skip the anchor's."""
        skips = not self.is_dspark or self.config.get("sample_from_anchor", True) is False
        return hidden[1:] if skips else hidden

    def _bias(self, previous: int) -> torch.Tensor | float:
        """What the token before adds to a row's logits: DSpark's vanilla Markov head, nothing for DFlash."""
        if not self.is_dspark:
            return 0.0
        first, second = (self.weights[f"markov_head.markov_w{index}.weight"] for index in (1, 2))
        return second @ first[previous]

    def logits(self, hidden: torch.Tensor, previous: list[int]) -> torch.Tensor:
        """Logits [len(previous), vocabulary] of a block's first drafts, each behind a given token: the anchor first."""
        rows = self._draft_rows(hidden)[: len(previous)] @ self.head.T
        return torch.stack([row + self._bias(token) for row, token in zip(rows, previous, strict=True)])

    def greedy(
        self, hidden: torch.Tensor, anchor: int, verified: tuple[list[int], list[int], int] | None = None
    ) -> tuple[list[int], list[float]]:
        """Drafted tokens of a block and the margin of each over the second best, each behind the one before it.

        A drafter with a lookup table looks up in the last verify step: its inputs, the target's choices behind them,
        and how many rows were committed.
        """
        tokens: list[int] = []
        margins = []
        for row in self._draft_rows(hidden) @ self.head.T:
            logits = row + self._bias([anchor, *tokens][-1])
            for choice, bonus in self._bonuses(anchor, tokens, verified).items():
                logits[choice] += bonus
            best = logits.topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
        return tokens, margins

    def _bonuses(
        self, anchor: int, drafts: list[int], verified: tuple[list[int], list[int], int] | None
    ) -> dict[int, float]:
        """What each choice's logit is raised by, as the words of ``lookup`` have it."""
        table = (self.config.get("carryover_config") or {}).get("lookup")
        if table is None or verified is None:
            return {}
        inputs, choices, committed = verified
        written = [*inputs[:committed], anchor, *drafts]
        bonuses: dict[int, float] = {}
        for row in range(committed, len(inputs)):
            matched = 0
            while matched < min(len(table) - 1, row + 1) and written[-1 - matched :] == inputs[row - matched : row + 1]:
                matched += 1
            if matched or row == committed + len(drafts):
                bonuses[choices[row]] = max(bonuses.get(choices[row], 0.0), table[matched])
        return bonuses
