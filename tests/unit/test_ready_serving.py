"""READY's serving parts without a server: loading a reader, finding the states, and what is refused."""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fixtures import make_drafter, make_target
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor, nn

from sglang_ext import algorithms, compat
from sglang_ext.checkpoints import DraftContract, read_contract
from sglang_ext.checkpoints.conversion import convert, convert_ready
from sglang_ext.cli import main
from sglang_ext.commands.serve import METHODS, choose_algorithm
from sglang_ext.errors import UsageError
from sglang_ext.evaluation import methods
from sglang_ext.ready import draft_model
from sglang_ext.ready.config import ReadyConfig, RecurrentShape
from sglang_ext.ready.controls import WrongStates
from sglang_ext.ready.reader import StateReader
from sglang_ext.ready.states import committed_states
from sglang_ext.settings import READ_STATES, WRONG_STATES

CONFIG = ReadyConfig(source_layers=(1, 4), value_heads=4, value_dim=6, key_dim=5, rank_k=2, rank_v=3)


class Base(nn.Module):
    """The part of SGLang's draft model that is built upon."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        layer = types.SimpleNamespace(attach=lambda read, inject: None)
        self.layers = [layer, layer]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if (name := name.removeprefix("model.")) in own:
                own[name].weight_loader(own[name], tensor)  # type: ignore[attr-defined]


class Model(draft_model._StateReading, Base):
    """A drafter with nothing but the reader."""


@pytest.fixture
def weights() -> dict[str, Tensor]:
    reader = StateReader(CONFIG, 8, 2)
    return {f"state_reader.{name}": torch.randn_like(weight) for name, weight in reader.named_parameters()}


def model(monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 1) -> Model:
    monkeypatch.setattr(draft_model, "get_parallel", lambda: types.SimpleNamespace(tp_rank=rank, tp_size=size))
    return Model(types.SimpleNamespace(hidden_size=8, ready_config=CONFIG.as_json()))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_reader_is_loaded(monkeypatch: pytest.MonkeyPatch, weights: dict[str, Tensor], prefix: str) -> None:
    made = model(monkeypatch)
    made.load_weights([(prefix + name, weight) for name, weight in weights.items()])
    assert all(torch.equal(parameter, weights[name]) for name, parameter in made.named_parameters())
    assert not any(parameter.requires_grad for parameter in made.parameters())
    made.load_weights([("fc.weight", torch.zeros(1))])  # a later update may bring a part


def test_each_rank_loads_its_value_heads(monkeypatch: pytest.MonkeyPatch, weights: dict[str, Tensor]) -> None:
    for rank in (0, 1):
        made = model(monkeypatch, rank, 2)
        made.load_weights(weights.items())
        own = dict(made.named_parameters())
        heads = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(own["state_reader.key_down"], weights["state_reader.key_down"][:, heads])
        out = weights["state_reader.reads.0.out"][:, :, heads]
        assert torch.equal(own["state_reader.reads.0.out"], out) and out.shape == (8, 2, 2, 3)


def test_incomplete_and_unknown_weights_are_refused(
    monkeypatch: pytest.MonkeyPatch, weights: dict[str, Tensor]
) -> None:
    made, missing = model(monkeypatch), dict(weights)
    del missing["state_reader.key_down"]
    with pytest.raises(ValueError, match=r"no state_reader\.key_down; make one with `sglang-ext convert`"):
        made.load_weights(missing.items())
    with pytest.raises(ValueError, match=r"state_reader\.gate, which its ready_config has no place for"):
        made.load_weights([("state_reader.gate", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"state_reader\.value_down is \[2, 4, 3, 5\] but must be \[2, 4, 3, 6\]"):
        made.load_weights([("state_reader.value_down", torch.zeros(2, 4, 3, 5))])


def pool(**changes: Any) -> Any:
    """A target's request pool with recurrent layers 0, 1, 3, 4 and five state slots."""
    made = HybridReqToTokenPool.__new__(HybridReqToTokenPool)
    temporal = torch.randn(4, 5, 6, 4, 5).transpose(2, 3)  # [layers, slots, 4, 6, 5], not contiguous
    states = {"mamba_cache": types.SimpleNamespace(temporal=temporal), "replayssm_write_pos": None}
    made.mamba_map = {0: 0, 1: 1, 3: 2, 4: 3}
    made.req_index_to_mamba_index_mapping = torch.tensor([0, 3, 1], dtype=torch.int32)
    made.mamba_pool = types.SimpleNamespace(**{**states, **changes})
    return made


def test_states_are_those_of_the_requests_and_sources() -> None:
    made = pool()
    states = committed_states(made, CONFIG, 1)
    temporal = made.mamba_pool.mamba_cache.temporal
    assert states.temporal is temporal and states.state_slots is made.req_index_to_mamba_index_mapping
    gathered = states.gather(torch.tensor([2, 1, 0]))
    assert gathered.shape == (3, 2, 4, 6, 5)
    for row, slot in enumerate((1, 3, 0)):
        assert torch.equal(gathered[row], temporal[[1, 3], slot])


def test_states_that_cannot_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="keeps no recurrent states"):
        committed_states(object(), CONFIG, 1)
    for flag in ("replayssm_write_pos", "replayssm_spec_write_pos"):
        with pytest.raises(UsageError, match="ReplaySSM"):
            committed_states(pool(**{flag: torch.zeros(1)}), CONFIG, 1)
    other = ReadyConfig(**{**vars(CONFIG), "source_layers": (2, 4)})
    with pytest.raises(UsageError, match=r"Layers 2 of .* those that do: 0, 1, 3, 4"):
        committed_states(pool(), other, 1)
    with pytest.raises(UsageError, match=r"states are \[4, 6, 5\] a rank and the reader was made for \[2, 6, 5\]"):
        committed_states(pool(), CONFIG, 2)
    monkeypatch.setattr(HybridReqToTokenPool, "mamba_v2p_table", torch.zeros(1))
    with pytest.raises(UsageError, match="--enable-unified-memory"):
        committed_states(pool(), CONFIG, 1)


def worker(commit: bool = True, accepted: Any = None) -> Any:
    linear = types.SimpleNamespace(accept_lens_pool=accepted)
    backend = types.SimpleNamespace(linear_attn_backend=linear)
    runner = types.SimpleNamespace(attn_backend=backend, req_to_token_pool=object())
    return types.SimpleNamespace(
        _need_mamba_verify_commit=commit,
        model_runner=runner,
        draft_model=types.SimpleNamespace(state_reader=None),
        draft_model_runner=types.SimpleNamespace(req_to_token_pool=runner.req_to_token_pool),
        target_worker=types.SimpleNamespace(model_runner=runner),
    )


def test_workers_that_cannot_read_are_refused() -> None:
    compat.check_state_commit(worker())
    for broken in (worker(commit=False), worker(accepted=torch.zeros(1))):
        with pytest.raises(UsageError, match="does not commit its recurrent states"):
            compat.check_state_commit(broken)
    compat.check_reading_worker(worker())
    stock = worker()
    del stock.draft_model.state_reader
    with pytest.raises(UsageError, match="has no reader of states"):
        compat.check_reading_worker(stock)
    apart = worker()
    apart.draft_model_runner.req_to_token_pool = object()
    with pytest.raises(UsageError, match="request slots of its own"):
        compat.check_reading_worker(apart)


def arguments(name: str, **changes: Any) -> Any:
    base = {"speculative_algorithm": name, "speculative_draft_model_path": "draft"}
    return types.SimpleNamespace(**{**base, **changes})


@pytest.mark.parametrize("name", ["READY", "READY_CARRYOVER"])
def test_arguments_are_refused_with_a_way_out(name: str) -> None:
    algorithms.check_server_args(arguments(name))
    for changes, told in (
        ({"pp_size": 2}, "--pp-size 1"),
        ({"attn_cp_size": 2}, "--attn-cp-size 1"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_linear_replayssm": True}, "lag behind"),
        ({"enable_linear_replayssm_spec": True}, "state commit"),
        ({"disaggregation_mode": "decode"}, "prefill and decode together"),
    ):
        with pytest.raises(UsageError, match=f"{name} cannot run with .*{told}"):
            algorithms.check_server_args(arguments(name, **changes))
    algorithms.check_server_args(arguments("CARRYOVER_DSPARK", enable_linear_replayssm=True))
    backend = arguments(name, speculative_draft_attention_backend="trtllm_mha")
    if name == "READY":
        algorithms.check_server_args(backend)  # a reader leaves attention alone
    else:
        with pytest.raises(UsageError, match="trtllm_mha"):
            algorithms.check_server_args(backend)


def test_a_drafter_of_another_method_and_a_dense_target_are_refused(tmp_path: Path) -> None:
    shape = {"linear_num_value_heads": 4, "linear_value_head_dim": 6, "linear_key_head_dim": 5}
    kinds = ["linear_attention"] * 4 + ["full_attention"]
    hybrid = make_target(tmp_path / "hybrid", layer_types=kinds, **shape)
    dense, base, drafter = make_target(tmp_path / "dense"), make_drafter(tmp_path / "base", "dspark"), tmp_path / "out"
    words = ["convert", base, "--ready", drafter, "--target", hybrid, "--rank-k", 2]
    assert main([str(word) for word in words]) == 0

    def serve(path: Path, target: Path, algorithm: str = "READY") -> None:
        names = ("speculative_draft_model_revision", "revision", "speculative_num_draft_tokens")
        settings = dict.fromkeys((*names, "speculative_dspark_block_size", "speculative_dflash_block_size"))
        algorithms.check_drafter(
            arguments(algorithm, model_path=str(target), **{**settings, "speculative_draft_model_path": str(path)})
        )

    serve(drafter, hybrid)
    with pytest.raises(UsageError, match="no Gated DeltaNet layers"):
        serve(drafter, dense)
    with pytest.raises(UsageError, match=r"a drafter for DSPARK, not for READY; .*--ready"):
        serve(base, hybrid)
    with pytest.raises(UsageError, match="a drafter for READY, not for READY_CARRYOVER"):
        serve(drafter, hybrid, "READY_CARRYOVER")


def contracts(folder: Path) -> dict[str, DraftContract]:
    """A drafter of each method."""
    shape = RecurrentShape(num_layers=5, layers=(0, 1, 3), value_heads=4, value_dim=6, key_dim=5)
    base = read_contract(make_drafter(folder / "none", "dspark"))
    ready = convert_ready(base, folder / "ready", ReadyConfig.for_target(shape))
    carryover = convert(base, folder / "carryover")
    both = convert(ready, folder / "both")
    return {contract.method: contract for contract in (base, ready, carryover, both)}


def test_the_method_asked_for_must_be_the_drafters(tmp_path: Path) -> None:
    made = contracts(tmp_path)
    assert set(made) == set(METHODS) - {"auto"}
    for method, contract in made.items():
        assert choose_algorithm(contract, "auto") == choose_algorithm(contract, method) == contract.algorithm
    for drafter, method, told in (
        ("none", "ready", r"stock drafter without a reader of states; .* --ready OUT --target MODEL"),
        ("ready", "ready_carryover", r"ReaDy drafter without a Carryover embedding; .* --carryover OUT"),
        ("carryover", "ready_carryover", r"Carryover drafter without a reader of states"),
        ("ready_carryover", "ready", r"ReaDy and Carryover drafter, which ready alone does not load"),
        ("ready", "none", r"ReaDy drafter, which stock DSPARK does not load; serve the drafter it was made from\."),
        ("ready_carryover", "none", r"SGLANG_EXT_CARRIED_ROWS=0"),
    ):
        with pytest.raises(UsageError, match=told):
            choose_algorithm(made[drafter], method)


def test_evaluation_knows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = contracts(tmp_path)
    monkeypatch.setattr(methods, "check", lambda contract, target: None)
    target: Any = None
    paths = {method: str(contract.path) for method, contract in made.items()}
    both, ready, stock = methods.choose(paths["ready_carryover"], [paths["ready"], paths["none"]], 2, target)
    assert (both.describe()["embedding"], both.describe()["reader"]) == ("zero, untrained", "zero, untrained")
    assert (ready.describe()["embedding"], ready.describe()["reader"]) == (None, "zero, untrained")
    assert methods.baseline([both, ready, stock]) is stock
    with pytest.raises(UsageError, match="no Carryover drafter"):
        methods.choose(paths["ready"], ["off"], None, target)
    first, *controls = methods.choose(paths["ready"], [*WRONG_STATES, paths["none"]], None, target)
    assert [method.name for method in controls[:3]] == [f"ready, {kind} states" for kind in WRONG_STATES]
    assert [m.describe()["states"] for m in (first, *controls)] == ["committed", *WRONG_STATES, None]
    assert methods.environment(None, "stale")[READ_STATES] == "stale"
    monkeypatch.setenv(READ_STATES, "zero")
    assert READ_STATES not in methods.environment()
    with pytest.raises(UsageError, match="no ReaDy drafter, so it reads no states"):
        methods.choose(paths["carryover"], ["stale"], None, target)
    monkeypatch.setenv(READ_STATES, "old")
    with pytest.raises(UsageError, match="SGLANG_EXT_READ_STATES=old is no control"):
        algorithms.check_server_args(arguments("READY"))


def test_wrong_states_are_wrong_in_the_way_they_say() -> None:
    shape = (2, 4, 3, 2)
    slots, rounds = torch.tensor([3, 1, 0]), torch.randn(3, 3, *shape)
    assert not WrongStates("zero", 5, shape, slots.device)(rounds[0], slots).any()
    shuffled = WrongStates("shuffled", 5, shape, slots.device)(rounds[0], slots)
    assert torch.equal(shuffled, rounds[0][[1, 2, 0]])
    stale = WrongStates("stale", 5, shape, slots.device)
    assert torch.equal(stale(rounds[0], slots), rounds[0])
    turned = slots[[1, 0, 2]]  # batches change their order
    assert torch.equal(stale(rounds[1], turned), rounds[0][[1, 0, 2]])
    stale.forget(torch.tensor([3]))
    read = stale(rounds[2], slots)
    assert torch.equal(read[0], rounds[2][0]) and torch.equal(read[1], rounds[1][0])


def test_the_algorithms_extend_dspark() -> None:
    algorithms.register()
    for name, mixins in (("READY", 0), ("READY_CARRYOVER", 1)):
        algorithm = SpeculativeAlgorithm.from_string(name)
        parents = [
            parent.__name__ for parent in algorithm.factory(arguments(name, disable_overlap_schedule=False)).__mro__
        ]
        assert "DSparkWorkerV2" in parents and "ReadMixin" in parents and parents.count("CarryMixin") == mixins
