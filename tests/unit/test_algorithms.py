"""The added algorithms answer as the built-in ones, and refuse what they are not built for."""

from __future__ import annotations

import inspect
import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fixtures import make_drafter, make_target, set_tensor
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import get_spec

from sglang_ext import algorithms, compat, sglang_version
from sglang_ext.checkpoints import read_contract
from sglang_ext.checkpoints.conversion import convert
from sglang_ext.errors import UsageError, refusal_ends_process


@pytest.fixture(autouse=True)
def registered() -> None:
    algorithms.register()
    algorithms.register()  # SGLang may load plugins twice in one process


@pytest.mark.parametrize("name", algorithms.BASES)
def test_every_question_is_answered_as_the_base_does(name: str) -> None:
    algorithm, base = SpeculativeAlgorithm.from_string(name), algorithms.BASES[name]
    assert algorithm is get_spec(name)
    asked = 0
    for member, function in vars(SpeculativeAlgorithm).items():
        if not inspect.isfunction(function) or member.startswith("_"):
            continue
        assert hasattr(algorithm, member), member
        if list(inspect.signature(function).parameters) == ["self"] and member != "get_platform_worker_cls":
            assert getattr(algorithm, member)() == getattr(base, member)(), member
            asked += 1
    assert asked >= 20
    assert algorithm.is_dflash_family() and algorithm.supports_overlap
    assert algorithm.get_num_tokens_per_req_for_target_verify(8, True) == (8 if base.is_dflash() else 7)
    assert pickle.loads(pickle.dumps(algorithm)).name == name


@pytest.mark.parametrize("name", algorithms.BASES)
def test_worker_class_extends_the_base_worker(name: str) -> None:
    algorithm, base = SpeculativeAlgorithm.from_string(name), algorithms.BASES[name]
    arguments: Any = types.SimpleNamespace(disable_overlap_schedule=False)
    ours = algorithm.factory(arguments)
    stock = {"DFLASH": "DFlashWorkerV2", "DSPARK": "DSparkWorkerV2"}[base.name]
    assert stock in [parent.__name__ for parent in ours.__mro__[1:]]


def arguments(**changes: Any) -> types.SimpleNamespace:
    base = {"speculative_algorithm": "CARRYOVER_DSPARK", "speculative_draft_model_path": "draft"}
    return types.SimpleNamespace(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pp_size": 2}, "--pp-size 1"),
        ({"attn_dp_size": 2}, "--enable-dp-attention"),
        ({"attn_cp_size": 2}, "--attn-cp-size 1"),
        ({"speculative_draft_window_size": 64}, "windowed"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_linear_replayssm_spec": True}, "state commit"),
        ({"disaggregation_mode": "decode"}, "prefill and decode together"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_draft_attention_backend": "trtllm_mha"}, "triton"),
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
    ],
)
def test_refused_arguments_are_named_with_a_way_out(changes: dict[str, Any], told: str) -> None:
    algorithms.check_server_args(arguments())
    with pytest.raises(UsageError, match="CARRYOVER_DSPARK") as refusal:
        algorithms.check_server_args(arguments(**changes))
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SGLANG_RAGGED_VERIFY_MODE", "compact"),
        ("SGLANG_DSPARK_DEFER_CONTEXT_KV", "1"),
        ("SGLANG_EXT_CARRIED_ROWS", "many"),
    ],
)
def test_refused_environment(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=variable):
        algorithms.check_server_args(arguments())


def test_the_drafter_must_be_whole_and_made_for_the_algorithm(tmp_path: Path) -> None:
    target, base, drafter = make_target(tmp_path / "t"), make_drafter(tmp_path / "b", "dspark"), tmp_path / "c"
    convert(read_contract(base), drafter)

    def serve(path: Path, algorithm: str = "CARRYOVER_DSPARK", **changes: Any) -> None:
        settings: dict[str, Any] = {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(path),
            "speculative_draft_model_revision": None,
            "model_path": str(target),
            "revision": None,
            "speculative_num_draft_tokens": None,
            "speculative_dspark_block_size": None,
            "speculative_dflash_block_size": None,
        }
        algorithms.check_drafter(types.SimpleNamespace(**{**settings, **changes}))

    serve(drafter)
    serve(drafter, speculative_num_draft_tokens=8, speculative_dspark_block_size=7)
    with pytest.raises(UsageError, match="a drafter for DSPARK, not for CARRYOVER_DSPARK"):
        serve(base)
    with pytest.raises(UsageError, match="a drafter for CARRYOVER_DSPARK, not for CARRYOVER_DFLASH"):
        serve(drafter, "CARRYOVER_DFLASH")
    with pytest.raises(UsageError, match="--speculative-num-draft-tokens 5 differs from the 8"):
        serve(drafter, speculative_num_draft_tokens=5)
    set_tensor(drafter, "carryover_embedding", None)
    with pytest.raises(UsageError, match="carryover_embedding"):
        serve(drafter)


def test_a_refusal_ends_the_process_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, refusal_ends_process():
        algorithms.check_server_args(arguments(pp_size=2))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("sglang-ext: CARRYOVER_DSPARK cannot run with pp_size=2")


def test_refused_arguments_are_arguments_of_sglang() -> None:
    """A renamed one would never be refused."""
    from sglang.srt.server_args import ServerArgs

    known = set(vars(ServerArgs)) | set(ServerArgs.__annotations__)
    assert {name for name, _, _ in algorithms._REFUSED} <= known


def test_calls_with_arguments_reach_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = SpeculativeAlgorithm.from_string("CARRYOVER_DSPARK")
    calls = ("create_future_map", "build_disagg_draft_input", "resolve_max_speculative_num_draft_tokens")
    for name in calls:
        monkeypatch.setattr(SpeculativeAlgorithm, name, lambda self, *args, **kwargs: (self, args, kwargs))
        assert getattr(algorithm, name)(1, key=2) == (SpeculativeAlgorithm.DSPARK, (1,), {"key": 2})


def test_the_resolved_draft_backend_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, resolved = SpeculativeAlgorithm.from_string("CARRYOVER_DSPARK"), []
    monkeypatch.setattr(SpeculativeAlgorithm, "handle_server_args", lambda self, args: resolved.append(self))
    monkeypatch.setattr(compat, "resolved_draft_backend", lambda args: "fa3")
    algorithm.handle_server_args(arguments())
    assert resolved == [SpeculativeAlgorithm.DSPARK]
    monkeypatch.setattr(compat, "resolved_draft_backend", lambda args: "trtllm_mha")
    with pytest.raises(SystemExit):
        algorithm.handle_server_args(arguments())


def test_default_backends_are_chosen_as_for_the_base() -> None:
    from sglang.srt.arg_groups.model_override_base import _forces_eagle_topk_one

    assert _forces_eagle_topk_one("DFLASH") and _forces_eagle_topk_one("CARRYOVER_DFLASH")
    assert not _forces_eagle_topk_one("CARRYOVER_DSPARK")


def test_another_sglang_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_version.check_version()
    monkeypatch.setattr(sglang_version, "version", lambda name: "0.5.24")
    with pytest.raises(UsageError, match=r"SGLang 0\.5\.24 .* 0\.5\.23"):
        sglang_version.check_version()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_drafter_without_graphs_gets_embeddings_in_its_dtype(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """SGLang's own runner gives them in bfloat16, whatever the drafter computes in."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    stock = inspect.unwrap(ModelRunner._extend_forward_kwargs)
    monkeypatch.setattr(ModelRunner, "_extend_forward_kwargs", stock)
    runner = types.SimpleNamespace(dtype=dtype, is_generation=True, _pp_kwargs=lambda proxy: {})
    embeds = torch.arange(6.0).mul(1.001).to(dtype)
    batch = types.SimpleNamespace(input_embeds=embeds, replace_embeds=None, replace_positions=None)
    assert stock(runner, batch, None)["input_embeds"].dtype == torch.bfloat16
    compat.keep_embedding_dtype()
    compat.keep_embedding_dtype()
    given = ModelRunner._extend_forward_kwargs(runner, batch, None)["input_embeds"]
    assert given.dtype == dtype and torch.equal(given, embeds)
    assert ModelRunner._extend_forward_kwargs.__wrapped__ is stock  # wrapped once
    nothing = types.SimpleNamespace(input_embeds=None, replace_embeds=None, replace_positions=None)
    assert ModelRunner._extend_forward_kwargs(runner, nothing, None) == {}


def test_touch_points_hold_and_drift_is_named() -> None:
    compat.check_touch_points()
    with pytest.raises(UsageError, match="no parameter 'rows'"):
        compat.check_touch_points({"sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.bind": ("rows",)})
    with pytest.raises(UsageError, match=r"has no sglang\.srt\.mem_cache\.kv_loc_plan:KVLocPlan\.gone"):
        compat.check_touch_points({"sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.gone": ()})
