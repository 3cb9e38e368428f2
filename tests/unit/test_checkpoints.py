"""The checkpoint contract: what is read, and every way a drafter can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fixtures import (
    FEATURES,
    HIDDEN,
    LAYER_IDS,
    VOCAB,
    edit_config,
    make_drafter,
    make_sharded_drafter,
    make_target,
    set_tensor,
    write_json,
)

from sglang_ext.carryover.lookup import LONGEST, WIDEST
from sglang_ext.checkpoints import (
    CARRYOVER_CONFIG,
    LOOKUP_BONUSES,
    LOOKUP_WIDEST,
    check,
    locate,
    read_contract,
    read_target,
    read_tensors,
    validate,
)
from sglang_ext.checkpoints.conversion import convert
from sglang_ext.errors import UsageError


@pytest.fixture
def carryover(tmp_path: Path) -> Path:
    """A sound Carryover DSpark drafter."""
    return convert(read_contract(make_drafter(tmp_path / "base", "dspark")), tmp_path / "carryover").path


@pytest.mark.parametrize(("kind", "verify", "query"), [("dflash", 8, 8), ("dspark", 8, 7)])
def test_widths_and_algorithm_of_each_kind(tmp_path: Path, kind: str, verify: int, query: int) -> None:
    contract = read_contract(make_drafter(tmp_path / "d", kind))
    assert (contract.verify_width, contract.query_width, contract.drafts) == (verify, query, 7)
    assert contract.algorithm == contract.base_algorithm == kind.upper()
    assert contract.feature_width == FEATURES
    assert validate(contract) == []


def test_a_dspark_anchor_row_that_drafts_nothing_widens_the_query(tmp_path: Path) -> None:
    contract = read_contract(make_drafter(tmp_path / "d", "dspark", sample_from_anchor=False))
    assert (contract.query_width, contract.verify_width) == (8, 8)


def test_published_layouts_read_alike(tmp_path: Path) -> None:
    nested = {"mask_token_id": 3, "target_layer_ids": LAYER_IDS, "block_size": 7, "markov_rank": 3}
    layouts: list[dict[str, Any]] = [
        {},  # block size flat, mask and layers in dflash_config
        {"dflash_config": None, "mask_token_id": 3, "target_layer_ids": LAYER_IDS},  # all flat
        {"dflash_config": nested},  # both
        {"dspark_config": {"mask_token_id": 3, "markov_head_type": "vanilla"}},
    ]
    contracts = []
    for number, layout in enumerate(layouts):
        directory = make_drafter(tmp_path / str(number), "dspark", architectures=["Qwen3DSparkModel"])
        edit_config(directory, **layout)
        contracts.append(read_contract(directory))
    assert {(c.block_size, c.mask_token_id, c.target_layer_ids, c.markov_rank) for c in contracts} == {
        (7, 3, (1, 2), 3)
    }
    assert [validate(c) for c in contracts] == [[], [], [], []]


def test_model_prefix_and_native_names_are_those_sglang_resolves(tmp_path: Path) -> None:
    directory = make_drafter(tmp_path / "d", "dflash")
    set_tensor(directory, "norm.weight", None)
    set_tensor(directory, "model.norm.weight", torch.ones(HIDDEN))
    set_tensor(directory, "fc.weight", None)
    set_tensor(directory, "encoder.fc.weight", torch.ones(HIDDEN, FEATURES))
    assert validate(read_contract(directory)) == []


def test_a_fitting_target_dense_and_nested_hybrid(tmp_path: Path) -> None:
    contract = read_contract(make_drafter(tmp_path / "d", "dspark"))
    dense = read_target(make_target(tmp_path / "dense"))
    assert (dense.recurrent_layers, validate(contract, dense)) == (0, [])
    flat = json.loads((tmp_path / "dense" / "config.json").read_text())
    text = {**flat, "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"]}
    hybrid = read_target(
        make_target(
            tmp_path / "hybrid",
            architectures=["Qwen3_5ForConditionalGeneration"],
            model_type="qwen3_5",
            text_config=text,
            hidden_size=999,  # the outer fields are the vision wrapper's
        )
    )
    assert (hybrid.recurrent_layers, hybrid.hidden_size, validate(contract, hybrid)) == (4, HIDDEN, [])
    interval = read_target(make_target(tmp_path / "interval", num_hidden_layers=8, full_attention_interval=4))
    assert interval.recurrent_layers == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 16}, "its hidden size is 8"),
        ({"vocab_size": 32}, "its vocabulary is 16"),
        ({"num_hidden_layers": 6}, "trained on a target of 5 layers"),
    ],
)
def test_a_target_that_does_not_fit(tmp_path: Path, changes: dict[str, int], said: str) -> None:
    contract = read_contract(make_drafter(tmp_path / "d", "dflash"))
    problems = validate(contract, read_target(make_target(tmp_path / "t", **changes)))
    assert len(problems) == 1 and said in problems[0]
    with pytest.raises(UsageError, match=said):
        check(contract, read_target(tmp_path / "t"))


def test_layers_beyond_those_sglang_captures(tmp_path: Path) -> None:
    ids = {"mask_token_id": 3, "target_layer_ids": [1, 4]}
    told = read_contract(make_drafter(tmp_path / "told", "dflash", dflash_config=ids))
    assert "layers 0 to 3 only" in validate(told)[0]
    untold = read_contract(make_drafter(tmp_path / "untold", "dflash", dflash_config=ids, num_target_layers=None))
    assert validate(untold) == []
    target = read_target(make_target(tmp_path / "t"))
    assert "layers 0 to 3 only" in validate(untold, target)[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [2, 1]}}, "must rise strictly"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [2, 2]}}, "must rise strictly"),
        ({"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": LAYER_IDS}}, "outside the vocabulary"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": LAYER_IDS, "block_size": 4}}, "block_size twice"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1]}}, "fc.weight is [8, 16]"),
        ({"dspark_config": {"block_size": 4}}, "block_size twice"),
        ({"dspark_config": {"sample_from_anchor": False}}, "sample_from_anchor is False inside"),
        ({"markov_rank": None, "dspark_config": {"markov_rank": 3}}, "markov_rank is 3 inside"),
        ({"markov_head_type": "quadratic"}, "markov_head_type is 'quadratic'"),
        ({"markov_head_type": "gated"}, "lack markov_head.gate_proj.weight, markov_head.gate_proj.bias"),
        ({"markov_head_type": "rnn"}, "lack markov_head.joint_proj.weight"),
        ({"markov_rank": 4}, "markov_head.markov_w1.weight is [16, 3] where config.json promises [16, 4]"),
        ({"draft_vocab_size": 9}, "draft vocabulary (9)"),
        ({"attention_bias": True}, "lack layers.0.self_attn.q_proj.bias"),
        ({"num_hidden_layers": 3}, "lack layers.2.input_layernorm.weight"),
        ({"carryover_config": {"embedding": "learned"}}, "it must be CarryoverDSparkModel"),
    ],
)
def test_a_configuration_that_is_wrong(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    directory = make_drafter(tmp_path / "d", "dspark")
    edit_config(directory, **changes)
    problems = validate(read_contract(directory))
    assert any(said in problem for problem in problems), problems
    assert all(problem.count(". ") == 0 and problem.endswith(".") for problem in problems)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": None}, "block_size in .* it is missing"),
        ({"block_size": "8"}, "must be an integer of at least 1; it is '8'"),
        ({"dflash_config": [1]}, "dflash_config in .* must be an object"),
        ({"dflash_config": {"mask_token_id": 3}}, "no list target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1]}}, "each of target_layer_ids .* it is -1"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id in .* it is missing"),
        ({"markov_rank": 0}, "markov_rank .* it is 0"),
        ({"carryover_config": "learned"}, "carryover_config in .* must be an object"),
        ({"architectures": ["EagleModel"]}, "no drafter of a known architecture"),
        ({"architectures": None}, "it is without architectures"),
        ({"speculators_model_type": "dspark"}, "speculators training layout"),
    ],
)
def test_a_configuration_without_a_contract(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    directory = make_drafter(tmp_path / "d", "dspark")
    edit_config(directory, **changes)
    with pytest.raises(UsageError, match=said):
        read_contract(directory)


def test_target_and_drafter_are_not_taken_for_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a target model, not a drafter"):
        read_contract(make_target(tmp_path / "t"))
    with pytest.raises(UsageError, match=r"is a drafter \(DFlashDraftModel\), not a target"):
        read_target(make_drafter(tmp_path / "d", "dflash"))


def test_a_sound_carryover_checkpoint(carryover: Path) -> None:
    contract = read_contract(carryover)
    assert (contract.algorithm, contract.base_algorithm) == ("CARRYOVER_DSPARK", "DSPARK")
    assert (validate(contract), contract.embedding_is_zero()) == ([], True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        trained = torch.linspace(-1, 2, FEATURES, dtype=dtype)
        set_tensor(carryover, "carryover_embedding", trained)
        contract = read_contract(carryover)
        assert contract.embedding_is_zero() is False
        assert (contract.tensors["carryover_embedding"].values() == trained.float().numpy()).all()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "has no carryover_config"),
        ({"embedding": "learned", "round": 1}, "unknown key round;"),
        ({"embedding": "projected", "rounds": 1}, "embedding is 'projected'; only 'learned'"),
        ({"embedding": "learned", "rounds": 2}, "rounds is 2; only 1"),
        ({"embedding": "learned", "rounds": True}, "rounds is True; only 1"),
        ({"lookup": [1, 2, 3, 4]}, "lookup is [1, 2, 3, 4], but a lookup table has 5 finite numbers"),
        ({"lookup": [1, 2, 3, 4, 5, 6]}, "has 5 finite numbers"),
        ({"lookup": [0, 1, 2, 3, -0.5]}, "of at least 0;"),
        ({"lookup": [0, 1, 2, 3, float("nan")]}, "finite numbers"),
        ({"lookup": [0, 1, 2, 3, float("inf")]}, "finite numbers"),
        ({"lookup": [0, 1, 2, 3, True]}, "finite numbers"),
        ({"lookup": [0, 1, 2, 3, "4"]}, "finite numbers"),
        ({"lookup": None}, "lookup is None"),
        ({"carried_rows": -1}, "carried_rows is -1; it must be an integer"),
        ({"carried_rows": 1.0}, "carried_rows is 1.0;"),
        ({"carried_rows": True}, "carried_rows is True;"),
        ({"carried_rows": None}, "carried_rows is None;"),
    ],
)
def test_carryover_settings_that_are_wrong(carryover: Path, config: object, said: str) -> None:
    edit_config(carryover, carryover_config=config)
    problems = validate(read_contract(carryover))
    assert len(problems) == 1 and said in problems[0]


def test_a_lookup_table_and_a_limit_of_carried_rows(carryover: Path) -> None:
    assert (LOOKUP_BONUSES, LOOKUP_WIDEST) == (LONGEST + 1, WIDEST)
    contract = read_contract(carryover)
    assert (contract.lookup, contract.carried_rows_limit) == (None, None)
    edit_config(carryover, carryover_config={**CARRYOVER_CONFIG, "lookup": [0, 0.5, 1, 2, 3], "carried_rows": 0})
    contract = read_contract(carryover)
    assert validate(contract) == []
    assert (contract.lookup, contract.carried_rows_limit) == ((0.0, 0.5, 1.0, 2.0, 3.0), 0)
    assert contract.embedding_is_zero() is None  # and stays so
    edit_config(carryover, block_size=WIDEST + 1)
    problems = validate(read_contract(carryover))
    assert [problem for problem in problems if "verify steps of up to 64 rows, and this drafter's have" in problem]


@pytest.mark.parametrize(
    ("embedding", "said"),
    [
        (None, "lack carryover_embedding [16]"),
        (torch.zeros(FEATURES + 1), "carryover_embedding is [17] but must be [16]"),
        (torch.zeros(1, FEATURES), "carryover_embedding is [1, 16] but must be [16]"),
        (torch.zeros(FEATURES, dtype=torch.float64), "dtype F64"),
        (torch.full([FEATURES], torch.nan), "not finite"),
    ],
)
def test_an_embedding_that_is_wrong(carryover: Path, embedding: torch.Tensor | None, said: str) -> None:
    set_tensor(carryover, "carryover_embedding", embedding)
    problems = validate(read_contract(carryover))
    assert len(problems) == 1 and said in problems[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"projector_type": "domino"},
        {"selector_rank": 4},
    ],
)
def test_variants_carryover_does_not_cover(carryover: Path, changes: dict[str, Any]) -> None:
    edit_config(carryover, **changes)
    problems = validate(read_contract(carryover))
    assert len(problems) == 1 and "Carryover does not cover" in problems[0]


def test_the_first_problem_is_raised_and_the_rest_counted(carryover: Path, tmp_path: Path) -> None:
    edit_config(carryover, carryover_config=None, draft_vocab_size=9)
    with pytest.raises(
        UsageError, match=r"cannot be used: the draft vocabulary .* \(1 more: sglang-ext inspect .*\)\."
    ):
        check(read_contract(carryover))


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no checkpoint directory"):
        locate(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_contract(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be read as JSON"):
        read_contract(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        locate(tmp_path / "config.json")
    directory = make_drafter(tmp_path / "d", "dflash")
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(UsageError, match="cut short or damaged"):
        read_contract(directory)
    file.write_bytes(b"\xff" * 16)
    with pytest.raises(UsageError, match="not a readable safetensors file"):
        read_contract(directory)
    file.unlink()
    assert "lack fc.weight, hidden_norm.weight, norm.weight and 22 more" in validate(read_contract(directory))[0]


def test_a_repository_that_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def snapshot_download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        if revision is None:
            raise OSError("Cannot find the files in the cache.\nAnd a long explanation.")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(UsageError, match=r"could not be read \(Cannot find the files in the cache\); check the name"):
        locate("organisation/model", weights=False)
    assert locate("organisation/model", revision="v1") == tmp_path
    assert asked == [
        ("organisation/model", None, ["*.json"]),
        ("organisation/model", "v1", ["*.json", "*.safetensors"]),
    ]


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    directory = make_sharded_drafter(tmp_path / "d", "dflash")
    assert validate(read_contract(directory)) == []
    next(directory.glob("model-00002*")).unlink()
    with pytest.raises(UsageError, match="which is missing"):
        read_contract(directory)
    write_json(directory / "model.safetensors.index.json", {"weight_map": {"fc.weight": "../elsewhere.safetensors"}})
    with pytest.raises(UsageError, match="which is missing"):
        read_tensors(directory)
