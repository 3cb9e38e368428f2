"""One training run of a drafter, from settings to an exported checkpoint with its provenance."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, set_seed

from sglang_ext.errors import UsageError
from sglang_ext.training import provenance
from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.drafter_models import DrafterShape, build_drafter, text_config
from sglang_ext.training.drafter_trainer import DrafterTrainer
from sglang_ext.training.drafters import DrafterSettings
from sglang_ext.training.encode import TokenDataset
from sglang_ext.training.export import drafter_weights, export_drafter
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.targets import check_free_space, check_vocabulary, resolve_device
from sglang_ext.training.targets_model import load_target
from sglang_ext.training.trainer_support import (
    CHECKPOINTS,
    Progress,
    claim_output,
    release_output,
    use_progress,
    write_curve,
)

_DENSE_MASK_BYTES = 500_000_000  # a byte an entry; attention makes several times that of it

_SHOWN = {
    "loss": "loss",
    "acceptance_length": "accept",
    "eval_loss": "held-out loss",
    "eval_acceptance_length": "held-out accept",
}


def drafter_shape(settings: DrafterSettings) -> DrafterShape:
    """The drafter that the settings describe; its rotary base is the target's."""
    return DrafterShape(
        kind=settings.kind,  # type: ignore[arg-type]
        block_size=settings.block_size,
        num_layers=settings.layers,
        feature_layers=settings.feature_layers,
        mask_token_id=settings.mask_token_id,
        intermediate_size=settings.intermediate_size,
        num_heads=settings.heads,
        num_kv_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        rope_theta=float(text_config(settings.target).rope_parameters["rope_theta"]),
        markov_rank=settings.markov_rank,
    )


@dataclass(frozen=True)
class Stage:
    """What a training stage does differently: the model it starts from, the trainer, what the log shows."""

    label: str
    build: Callable[[DrafterShape, str], Any]  # (shape, attention) -> drafter in fp32
    trainer: Callable[..., DrafterTrainer] = DrafterTrainer
    record: Mapping[str, Any] = field(default_factory=dict)  # kept with the settings, for resume and provenance
    carried_rows: int = 0  # context rows that each block brings along
    finish: Callable[[Any], None] | None = None  # turns the trained model into the one that is exported
    exported: bool = True  # False: the run is for its held-out figures, nothing can serve its weights


def train_drafter(settings: DrafterSettings, args: argparse.Namespace) -> DrafterTrainer:
    """Train a fresh drafter and export it to ``args.out``."""

    def fresh(shape: DrafterShape, attention: str) -> Any:
        return build_drafter(shape, settings.target, attention, compile_blocks=args.compile)

    return train_stage(settings, args, Stage(f"{settings.kind} drafter", fresh))


def train_stage(settings: DrafterSettings, args: argparse.Namespace, stage: Stage) -> DrafterTrainer:
    """Train and export to ``args.out``; returns the trainer that did it (log in ``trainer.state.log_history``)."""
    device = resolve_device(args.device)
    check_free_space(args.out)
    attention = args.attention if args.attention != "auto" else "flex" if device == "cuda" else "sdpa"
    if attention != "flex":
        check_dense_mask(settings, stage.carried_rows)
    documents, held_out = TokenDataset(args.data / "train"), TokenDataset(args.data / "heldout")
    vocab_size = text_config(settings.target).vocab_size
    check_vocabulary(documents, vocab_size, args.target)
    arguments = training_arguments(settings, args, device)
    shape = drafter_shape(settings)
    common: dict[str, Any] = {
        name: getattr(settings, name) for name in ("batch_tokens", "max_length", "anchors", "gamma")
    }
    micro_batches = settings.steps * settings.accumulate * arguments.world_size
    batches = AnchorBatches(documents, shape.block, count=micro_batches, seed=settings.seed, **common)
    evaluated = None
    if args.held_out_batches:
        each = -(-args.held_out_batches // arguments.world_size)  # every process evaluates as many
        evaluated = AnchorBatches(
            held_out, shape.block, count=each * arguments.world_size, seed=settings.seed + 1, **common
        )
    checkpoint = None
    if args.resume or arguments.process_index == 0:
        checkpoint = claim_output(args.out, _record(settings, documents) | dict(stage.record), args.resume)
    set_seed(settings.seed)
    model = stage.build(shape, attention)
    target = load_target(Path(settings.target), str(arguments.device), args.target_dtype)
    step_tokens = settings.batch_tokens * settings.accumulate * arguments.world_size
    with TargetFeatures(target, settings.feature_layers) as features:
        trainer = stage.trainer(model, arguments, batches=batches, heldout=evaluated, features=features)
        use_progress(trainer, Progress(stage.label, step_tokens, _SHOWN))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if trainer.is_world_process_zero() and stage.exported:
            model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            if stage.finish is not None:
                stage.finish(model)
            export_drafter(model, shape, settings.target, args.out, getattr(torch, args.dtype))
        if evaluated is not None:
            trainer.evaluate()
    if trainer.is_world_process_zero():
        _finish(trainer, settings, args, documents, step_tokens, stage)
    return trainer


def check_dense_mask(settings: DrafterSettings, carried_rows: int) -> None:
    """Without flex attention every block row gets a mask over all keys; UsageError where that is gigabytes."""
    blocks = settings.anchors * settings.batch_tokens // settings.max_length
    queries = blocks * settings.block_size
    size = queries * (settings.batch_tokens + queries + blocks * carried_rows)
    if size > _DENSE_MASK_BYTES:
        raise UsageError(
            f"a micro-batch of {settings.batch_tokens} tokens with {settings.anchors} anchors per "
            f"{settings.max_length} needs a dense attention mask of {size / 1e9:.1f} GB without flex attention; give a "
            "smaller --batch-tokens or --anchors (and --accumulate for the same step)."
        )


def training_arguments(settings: DrafterSettings, args: argparse.Namespace, device: str) -> TrainingArguments:
    """The Trainer's arguments of a run on "cuda" or "cpu"."""
    on_gpu = device == "cuda"
    bf16 = args.precision == "bf16" or (args.precision == "auto" and on_gpu)
    return TrainingArguments(
        output_dir=str(args.out / CHECKPOINTS),
        max_steps=settings.steps,
        per_device_train_batch_size=1,  # an item of the dataset is a whole micro-batch
        train_sampling_strategy="sequential",  # the dataset is in its drawn order already
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        warmup_steps=round(settings.warmup * settings.steps),
        lr_scheduler_type="cosine",
        weight_decay=settings.weight_decay,
        max_grad_norm=1.0,
        bf16=bf16,
        use_cpu=not on_gpu,
        ddp_backend=("nccl" if on_gpu else "gloo") if "WORLD_SIZE" in os.environ else None,
        ddp_find_unused_parameters=False,
        seed=settings.seed,
        dataloader_num_workers=args.workers if on_gpu else 0,
        dataloader_pin_memory=on_gpu,
        remove_unused_columns=False,
        logging_steps=args.log_every,
        logging_nan_inf_filter=False,  # the filter would wait for the device in every step
        eval_strategy="steps" if args.held_out_batches else "no",
        eval_steps=args.eval_every,
        save_steps=args.save_every,
        save_total_limit=2,
        report_to="none",
    )


def _record(settings: DrafterSettings, documents: TokenDataset) -> dict[str, Any]:
    """What a resumed run must share with the run it goes on from, as JSON keeps it."""
    return json.loads(json.dumps(asdict(settings) | {"tokens": documents.index["tokens"]}))


def _finish(
    trainer: DrafterTrainer,
    settings: DrafterSettings,
    args: argparse.Namespace,
    documents: TokenDataset,
    step_tokens: int,
    stage: Stage,
) -> None:
    """Write curves and provenance beside the exported drafter."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    history = trainer.state.log_history
    both = {"": "training", "eval_": "held-out"}
    for figure, label in (("loss", "loss per drafted token"), ("acceptance_length", "tokens per verify step")):
        curves = {prefix + figure: legend for prefix, legend in both.items()}
        write_curve(history, args.out / f"{figure}_curve.png", curves, label)
    summary = next(entry for entry in reversed(history) if "train_runtime" in entry)
    evaluated: dict[str, float] = next((entry for entry in reversed(history) if "eval_loss" in entry), {})
    results = {name.removeprefix("eval_"): value for name, value in evaluated.items() if name.startswith("eval_")}
    provenance.write_provenance(
        args.out,
        {
            "title": f"{args.out.name}: a {stage.label} for {Path(settings.target).name}",
            "command": provenance.command(),
            "parameters": sum(tensor.numel() for tensor in drafter_weights(model).values()),
            **({"weights_sha256": provenance.file_digest(args.out / "model.safetensors")} if stage.exported else {}),
            "training": asdict(settings)
            | dict(stage.record)
            | {
                "tokens_seen": step_tokens * settings.steps,
                "documents": len(documents),
                "final_loss": summary["train_loss"],
                "seconds": round(summary["train_runtime"]),
            },
            "held_out": results,
            "data": {name: value for name, value in documents.index.items() if name != "ids"},
            "environment": provenance.environment(),
        },
    )
    release_output(args.out)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
    print(f"{args.out}: {shown or 'not evaluated'} after {step_tokens * settings.steps:,} target tokens")
