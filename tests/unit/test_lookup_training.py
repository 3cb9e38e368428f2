"""The lookup table's stage: second drafts as serving would draft them, the fit, the exported drafters, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_fixtures import edit_config, set_tensor
from drafter_fixtures import MASK, make_target, make_tokens, shape
from hybrid_fixtures import hybrid_shape, make_hybrid_target
from safetensors.torch import load_file
from test_carryover_training import with_some_recorded

from sglang_ext.carryover.lookup import LONGEST, VerifiedRound, look_up
from sglang_ext.carryover.reference import ReferenceDrafter
from sglang_ext.checkpoints import check, read_contract, read_target
from sglang_ext.cli import main
from sglang_ext.ready.config import ReadyConfig
from sglang_ext.ready.reader import value_key_order
from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.carryover_models import CarryingDFlash, CarryingDSpark
from sglang_ext.training.carryover_trainer import second_blocks
from sglang_ext.training.drafter_models import DrafterShape, build_drafter
from sglang_ext.training.encode import TokenDataset, encode
from sglang_ext.training.export import export_drafter
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.lookup import lookup_prompts, table_text
from sglang_ext.training.lookup_fit import FOLDS, GRID, accepted, cross_fit, drafts_with, fit, judge, weights
from sglang_ext.training.lookup_rounds import Observer, OtherPrompts, SecondDrafts, lookup_entries
from sglang_ext.training.ready_models import ReadingCarryingDSpark
from sglang_ext.training.ready_trainer import StateSource
from sglang_ext.training.targets_model import load_target
from sglang_ext.training.text.documents import Document
from sglang_ext.training.tokenizer import train as train_tokenizer

READER = ReadyConfig(source_layers=(1, 3), value_heads=4, value_dim=12, key_dim=8, rank_k=3, rank_v=5)
TABLE = [0.5, 1.0, 1.5, 2.0, 3.0]


def second_drafts(full: torch.Tensor, verified: VerifiedRound, anchor: torch.Tensor, labels: torch.Tensor) -> Any:
    """What is seen of drafts with logits [N, P, V]."""
    own, count = full.max(-1), len(full)
    candidates = verified.choices[:, None].expand(-1, full.shape[1], -1)
    stale = torch.cat([verified.inputs[:, 1:], verified.inputs[:, :1]], 1)
    return SecondDrafts(
        tokens=own.indices,
        logits=own.values,
        choices=verified.choices,
        choice_logits=full.gather(2, candidates),
        stale=stale,
        stale_logits=full.gather(2, stale[:, None].expand_as(candidates)),
        entries=lookup_entries(verified, anchor, labels),
        labels=labels,
        supervised=torch.ones_like(labels, dtype=torch.bool),
        committed=verified.committed,
        document=torch.arange(count) // 4,
    )


def random_round(count: int, drafts: int) -> tuple[torch.Tensor, VerifiedRound, torch.Tensor]:
    """Logits [N, P, V], rounds and anchors over so few tokens that matches of all lengths occur."""
    generator = torch.Generator().manual_seed(7)
    full = torch.randn(count, drafts, 6, generator=generator)
    inputs, choices = (torch.randint(0, 3, (count, drafts + 1), generator=generator) for _ in range(2))
    committed = torch.randint(1, drafts + 2, (count,), generator=generator)
    return full, VerifiedRound(inputs, choices, committed), torch.randint(0, 3, (count,), generator=generator)


def test_behind_right_drafts_the_lookup_is_the_one_that_drafts_in_sequence() -> None:
    full, verified, anchor = random_round(400, 6)
    own = full.max(-1)
    candidates = verified.choices[:, None].expand(-1, 6, -1)
    served = torch.cat([own.values[..., None], full.gather(2, candidates)], 2)
    drafted = look_up(own.indices, served, anchor, verified, torch.tensor(TABLE))
    seen = second_drafts(full, verified, anchor, drafted)
    assert torch.equal(drafts_with(seen, TABLE), drafted)  # what it drafted was right all along
    assert (drafted != own.indices).float().mean() > 0.1 and seen.entries.unique().tolist() == list(range(LONGEST + 2))
    assert torch.equal(drafts_with(seen, [0.0] * 5), own.indices)
    other = second_drafts(full, verified, anchor, (drafted + (torch.rand(drafted.shape) < 0.3)) % 6)
    leading = accepted(other, drafted == other.labels)
    assert torch.equal(accepted(other, drafts_with(other, TABLE) == other.labels), leading) and leading.min() == 0


def planted(table: list[float]) -> SecondDrafts:
    """One position each: a choice that lies less than its entry of the table below the drafter's token is right."""
    cases = [(entry, bonus - 0.25) for entry in range(5) for bonus in GRID[1:]]
    gap, entry = torch.tensor([gap for _, gap in cases]), torch.tensor([entry for entry, _ in cases])
    right, count = gap < torch.tensor(table)[entry], len(cases)
    one = torch.ones(count, 1, dtype=torch.long)
    return SecondDrafts(
        tokens=one,
        logits=torch.zeros(count, 1),
        choices=2 * one,
        choice_logits=-gap[:, None, None],
        stale=3 * one,
        stale_logits=-gap[:, None, None],
        entries=(entry + 1).int()[:, None, None],
        labels=one + right[:, None],
        supervised=one.bool(),
        committed=one[:, 0],
        document=torch.arange(count),
    )


def test_the_fit_finds_a_planted_table_and_judges_it() -> None:
    table = [0.0, 0.5, 2.0, 4.0, 8.0]
    seen = planted(table)
    assert fit(seen) == table == fit(seen)
    assert fit(seen.with_stale_drafts()) == [0.0] * 5  # what was drafted before is never right here
    found = judge(seen, drafts_with(seen, table), drafts_with(seen.with_stale_drafts(), [8.0] * 5))
    taken = sum(bonus <= entry for entry in table for bonus in GRID[1:])
    count = len(seen)
    for figures in (found["rounds"], found["anchors"]):
        assert figures["without"] == pytest.approx(2 - taken / count) and figures["with"] == 2
        assert figures["gain"] == pytest.approx(2 / (2 - taken / count) - 1) == figures["ceiling"]
        assert figures["gain_interval"][0] > 0 > figures["stale_drafts"]["gain_interval"][1]
    assert found["positions"] == {
        "reached": count,
        "changed": taken,
        "changed_to_the_right_token": 1.0,
        "changed_from_the_right_token": 0.0,
    }
    said = table_text({"table": table, **found})
    assert "0, 0.5, 2, 4, 8 for matches of 0 to 4 tokens" in said and "of these 100% became right and 0% had" in said


def test_every_document_is_judged_with_a_table_fitted_on_others() -> None:
    seen = planted([0.0, 0.5, 2.0, 4.0, 8.0])
    own = replace(seen, document=seen.entries[:, 0, 0] - 1)  # all cases of an entry of the table in one document
    drafted, tables = cross_fit(own)
    assert torch.equal(drafted, seen.tokens)  # nothing else tells what its bonus would be
    assert [[bonus for at, bonus in enumerate(table) if at != part] for part, table in enumerate(tables)] == [
        [bonus for at, bonus in enumerate([0.0, 0.5, 2.0, 4.0, 8.0]) if at != part] for part in range(FOLDS)
    ]
    twice = SecondDrafts.join([replace(seen, document=0 * seen.document + part) for part in range(FOLDS)])
    drafted, tables = cross_fit(twice)
    assert tables == [[0.0, 0.5, 2.0, 4.0, 8.0]] * FOLDS and torch.equal(drafted, twice.labels)


def test_rounds_that_commit_more_count_less() -> None:
    seen = planted(TABLE)
    longer = replace(seen, committed=4 * seen.committed)
    assert torch.equal(4 * weights(longer, "rounds"), weights(seen, "rounds"))
    assert torch.equal(weights(longer, "anchors"), weights(seen, "anchors"))


def random_drafter(target: Path, of: DrafterShape, model_class: Any, reader: ReadyConfig | None = None) -> Any:
    """A drafter whose attention, embedding and reader are strong enough to matter."""
    torch.manual_seed(2)
    model = build_drafter(of, target, "sdpa", model_class=model_class)
    with torch.no_grad():
        model.carryover_embedding.normal_(std=2.0)
        for layer in model.layers:
            layer.self_attn.o_proj.weight.mul_(20)
        if reader is not None:
            model.add_reader(reader)
            for read in model.state_reader.reads:
                read.out.normal_(std=0.3)
    return model


@pytest.mark.parametrize(
    ("kind", "carried_rows"), [("dflash", None), ("dspark", 0), ("dspark", 2), ("reader", None)], ids=str
)
def test_second_drafts_are_what_serving_drafts(kind: str, carried_rows: int | None, tmp_path: Path) -> None:
    """Logits of the drafter's own tokens and of the target's choices, against the reference drafter, round by round."""
    tokens = TokenDataset(make_tokens(tmp_path / "tokens") / "train")
    hybrid = kind == "reader"
    path = (make_hybrid_target if hybrid else make_target)(tmp_path / "target")
    of = hybrid_shape() if hybrid else shape(kind)
    classes = {"dflash": CarryingDFlash, "dspark": CarryingDSpark, "reader": ReadingCarryingDSpark}
    drafter = random_drafter(path, of, classes[kind], READER if hybrid else None)
    export_drafter(drafter, of, path, tmp_path / "drafter", torch.float32)
    reference = ReferenceDrafter(tmp_path / "drafter", path)
    sizes: dict[str, Any] = {"batch_tokens": 256, "max_length": 64, "anchors": 8, "gamma": 1.0, "seed": 3}
    inputs = AnchorBatches(tokens, of.block, count=1, **sizes)[0]
    proposed: list[torch.Tensor] = []

    def propose(**call: Any) -> torch.Tensor:
        proposed.append(with_some_recorded(inputs, type(drafter).propose(drafter, **call)))
        return proposed[-1]

    drafter.propose = propose
    source = StateSource(READER.source_layers, of.block.drafts + 1) if hybrid else None
    with TargetFeatures(load_target(path, "cpu", "float32"), of.feature_layers) as features:
        seen = Observer(drafter, features, carried_rows, source).observe(inputs)
        second = second_blocks(inputs, proposed[0], 1.0)
        kept = (second["weights"][:, 0] > 0).nonzero()[:, 0].tolist()
        assert len(seen) == len(kept) > 20
        captured, _ = features(inputs["input_ids"])
        width, committed_counts = inputs["input_ids"].shape[1], set()
        for number in range(14):
            index = kept[number]
            row, first = divmod(int(inputs["anchors"][index]), width)
            anchor = int(second["anchors"][index]) - row * width
            ids, committed = inputs["input_ids"][row], anchor - first
            committed_counts.add(committed)
            rows, last_hidden = features(torch.cat([ids[: first + 1], proposed[0][index]])[None])
            choices = features.logits(last_hidden[0, first:]).argmax(-1)[committed:]
            assert seen.choices[number, committed:].tolist() == choices.tolist()
            assert (seen.committed[number], seen.document[number]) == (committed, row)
            many = len(choices) if carried_rows is None else min(carried_rows, len(choices))
            marked = reference.marked(rows[0, anchor : anchor + many])
            context = reference.context(torch.cat([captured[row, :anchor], marked]), torch.arange(anchor + many))
            states = None
            if hybrid:
                cache = features.model(input_ids=ids[None, :anchor], use_cache=True).past_key_values
                states = value_key_order(
                    torch.stack([cache.layers[i].recurrent_states[0][0] for i in READER.source_layers])
                )
            block = torch.tensor([int(ids[anchor])] + [MASK] * (of.block_size - 1))
            hidden = reference.block(context, block, torch.arange(anchor, anchor + of.block_size), states)
            logits = reference.logits(hidden, [int(ids[anchor]), *seen.labels[number, :-1].tolist()])
            near = 1e-4 * float(logits.abs().max())
            torch.testing.assert_close(seen.logits[number], logits.max(-1).values, rtol=0, atol=near)
            assert seen.stale[number, committed:-1].tolist() == proposed[0][index, committed:].tolist()
            for found, candidates in (
                (seen.choice_logits, choices),
                (seen.stale_logits, proposed[0][index, committed:]),
            ):
                found = found[number, :, committed : committed + len(candidates)]
                torch.testing.assert_close(found, logits[:, candidates], rtol=0, atol=near)
            assert torch.isneginf(seen.stale_logits[number, :, -1]).all()
    assert committed_counts >= {1, 2, of.block.drafts + 1}


def launch(drafter: Path, target: Path, data: Path, out: Path, *more: str) -> int:
    line = f"train lookup --drafter {drafter} --target {target} --data {data} --out {out} --device cpu"
    line += " --max-length 64 --anchors 16"
    return main([*line.split(), *more])


def test_the_stage_exports_a_stock_and_a_carryover_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, data = make_target(tmp_path / "target"), make_tokens(tmp_path / "tokens")
    stock, both = tmp_path / "stock", tmp_path / "both"
    export_drafter(build_drafter(shape("dflash"), target), shape("dflash"), target, stock, torch.float32)
    carrying = random_drafter(target, shape("dspark"), CarryingDSpark)
    export_drafter(carrying, shape("dspark"), target, both, torch.bfloat16)
    (both / "provenance.json").write_text('{"command": "how it was trained"}')
    for base, method in ((stock, "CARRYOVER_DFLASH"), (both, "CARRYOVER_DSPARK")):
        out = tmp_path / "out" / base.name
        assert launch(base, target, data, out) == 0
        said = capsys.readouterr().out
        assert "batch 7 of 7, " in said and "lookup table: " in said and "stale drafts instead" in said
        contract, found = read_contract(out), json.loads((out / "lookup.json").read_text())
        check(contract, read_target(target))
        assert contract.algorithm == method and contract.lookup == tuple(found["table"])
        assert found["rounds"]["with"] >= 1 and found["second_drafts"] > 20 and found["documents"] == 8
        assert found["command"].startswith("sglang-ext") and "torch" in found["environment"]
        record = json.loads((out / "provenance.json").read_text())
        assert record["lookup"] == found["table"] and (out / "PROVENANCE.md").is_file()
        assert (out / "trained.json").exists() == (base == both)
    assert json.loads((tmp_path / "out/both/trained.json").read_text()) == {"command": record["drafter"]}
    weights_before, weights_after = (load_file(path / "model.safetensors") for path in (stock, tmp_path / "out/stock"))
    assert not weights_after.pop("carryover_embedding").any()
    assert weights_before.keys() == weights_after.keys()
    assert all(torch.equal(weights_before[name], tensor) for name, tensor in weights_after.items())
    assert read_contract(tmp_path / "out/stock").carried_rows_limit == 0
    files = [path / "model.safetensors" for path in (both, tmp_path / "out/both")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert read_contract(files[1].parent).carried_rows_limit is None


def test_a_drafter_with_a_reader_gets_its_table_too(tmp_path: Path) -> None:
    target, data = make_hybrid_target(tmp_path / "target"), make_tokens(tmp_path / "tokens")
    base, seen = tmp_path / "ready", []
    model = random_drafter(target, hybrid_shape(), ReadingCarryingDSpark, READER)
    del model.carryover_embedding
    export_drafter(model, hybrid_shape(), target, base, torch.float32)
    assert read_contract(base).algorithm == "READY"
    for number in range(2):  # the second time it is a drafter that carries no rows, whose table is fitted anew
        out = tmp_path / f"out{number}"
        assert launch(base, target, data, out) == 0
        contract = read_contract(out)
        check(contract, read_target(target))
        assert (contract.algorithm, contract.carried_rows_limit) == ("READY_CARRYOVER", 0)
        seen.append(json.loads((out / "lookup.json").read_text())["rounds"])
        base = out
    assert seen[0] == seen[1] and contract.reader_is_zero() is False


def test_answers_to_evaluated_prompts_are_left_out(tmp_path: Path) -> None:
    """The documents of a corpus against the prompts of an evaluation, tokenised as both are."""
    asked = [f"What is {number} and {number + 1}?" for number in range(6)]
    tokenizer = train_tokenizer(iter(asked * 5), 280)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"id": text, "category": "sum", "turns": [text]}) for text in asked[1:3]]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    documents = [Document(str(n), "sum", "here", "free", "", text, "It is.") for n, text in enumerate(asked)]

    rows = [(np.array(ids), start) for _, ids, start in encode(tokenizer, documents, 100)]

    class Encoded:
        document = staticmethod(rows.__getitem__)

        def __len__(self) -> int:
            return len(rows)

    kept = OtherPrompts(Encoded(), lookup_prompts(tmp_path / "prompts.jsonl", tmp_path))
    assert kept.kept == [0, 3, 4, 5] and len(kept) == 4
    assert kept.document(1)[0].tolist() == rows[3][0].tolist()
    assert len(OtherPrompts(Encoded(), ())) == 6


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--leave-out", "{0}/prompts"), "has no tokenizer.json to read"),
        (("--batches", "0"), "--batches 0 leaves nothing to look at; give at least 1."),
        (("--batches", "1"), "has fewer than 5 documents to fit on and to judge by in turns"),
        (("--anchors", "0"), "--anchors 0 leaves nothing"),
        (("--out", "{0}"), "already exists; give a new directory"),
        (("--max-length", "256"), "exceed the drafter's 256 positions; give a smaller --max-length."),
        (("--data", "{0}/nowhere"), "holds no encoded documents"),
        (("--target", "{0}/nowhere"), "nowhere"),
        (("--target", "{0}/stock"), "is a drafter"),
        (("--drafter", "{0}/target"), "is a target model, not a drafter"),
        (("--drafter", "{0}/skipping"), "drafts nothing in its anchor's row; give a DSpark drafter with"),
        (("--drafter", "{0}/wide"), "verifies 65 rows; the lookup is made for up to 64."),
        (("--drafter", "{0}/gated"), "has a gated Markov head; the lookup is made for the vanilla one."),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_refusals(small: Path, more: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.format(small) for word in more]
    assert launch(small / "stock", small / "target", small / "tokens", small / "out", *words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (small / "out").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, tokens, a stock drafter and three of forms that are not looked up in."""
    folder = tmp_path_factory.mktemp("small")
    target, of = make_target(folder / "target"), shape("dspark")
    make_tokens(folder / "tokens", documents=4)
    export_drafter(build_drafter(of, target), of, target, folder / "stock", torch.float32)
    for form in ("gated", "skipping", "wide"):
        shutil.copytree(folder / "stock", folder / form)
    edit_config(folder / "skipping", sample_from_anchor=False)
    edit_config(folder / "wide", block_size=64)
    edit_config(folder / "gated", markov_head_type="gated")
    set_tensor(folder / "gated", "markov_head.gate_proj.weight", torch.zeros(8, 40))
    set_tensor(folder / "gated", "markov_head.gate_proj.bias", torch.zeros(8))
    return folder
