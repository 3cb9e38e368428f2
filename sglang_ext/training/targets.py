"""``sglang-ext train target``: train a small target on rendered chat documents, with transformers' Trainer.

On a GPU: bf16 autocast over fp32 master weights; on the CPU: fp32. Start it under torchrun for several GPUs. A run that
was killed goes on from its last checkpoint with ``--resume`` and ends with the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.errors import UsageError
from sglang_ext.training.targets_model import PRESETS

if TYPE_CHECKING:
    import numpy as np
    from transformers import Trainer

    from sglang_ext.training.encode import TokenDataset
    from sglang_ext.training.trainer_support import Progress

_FREE_BYTES = 500_000_000


@dataclass(frozen=True)
class TargetSettings:
    """What determines a run; ``batch_size`` rows of ``sequence_length`` tokens a step, all processes together."""

    preset: str
    steps: int
    batch_size: int = 256
    sequence_length: int = 512
    learning_rate: float = 3e-3
    warmup: float = 0.03
    weight_decay: float = 0.1
    seed: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = TargetSettings(preset="", steps=0)
    parser.add_argument("--preset", required=True, help=f"shape of the model: {', '.join(PRESETS)}")
    parser.add_argument("--tokens", type=Path, default=Path("build/tokens"), help="from `encode`")
    parser.add_argument("--tokenizer", type=Path, default=Path("build/tokenizer"), help="from `tokenizer`")
    parser.add_argument(
        "--manifest",
        type=Path,
        default=Path("build/data/manifest.json"),
        help="of the corpus, for the record of sources and licences",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, required=True, help="optimiser steps")
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="rows a step")
    parser.add_argument("--sequence-length", type=int, default=default.sequence_length, help="tokens a row")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate, help="peak")
    parser.add_argument("--warmup", type=float, default=default.warmup, help="share of the steps, before cosine")
    parser.add_argument("--weight-decay", type=float, default=default.weight_decay, help="of AdamW")
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights and order")
    parser.add_argument("--resume", action="store_true", help="go on with the run that was interrupted in --out")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--held-out-documents", type=int, default=2000, help="at most, for the held-out loss")
    parser.add_argument("--workers", type=int, default=2, help="processes that gather batches")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the saved weights")


def run(args: argparse.Namespace) -> int:
    names = TargetSettings.__dataclass_fields__
    settings = TargetSettings(**{name: getattr(args, name) for name in names})
    train_target(settings, args)
    return 0


def train_target(settings: TargetSettings, args: argparse.Namespace) -> None:
    """Train, save the model with its tokenizer, measure the held-out loss, write the provenance."""
    from sglang_ext.training.encode import TokenDataset
    from sglang_ext.training.targets_model import build_target, load_tokenizer, save_target
    from sglang_ext.training.trainer_support import Progress, claim_output, release_output, use_progress

    if settings.steps < 1:
        raise UsageError(f"--steps {settings.steps} trains nothing; give at least 1")
    device = resolve_device(args.device)
    check_free_space(args.out)
    tokenizer = load_tokenizer(args.tokenizer)
    documents, held_out = TokenDataset(args.tokens / "train"), TokenDataset(args.tokens / "heldout")
    check_vocabulary(documents, len(tokenizer), args.tokenizer)
    model = build_target(settings.preset, tokenizer, settings.seed)
    rows = _rows(documents, settings)
    checkpoint = None
    if args.resume or os.environ.get("RANK", "0") == "0":
        checkpoint = claim_output(args.out, asdict(settings) | {"tokens": documents.index["tokens"]}, args.resume)
    trainer = _trainer(model, rows, held_out, settings, args, device)
    tokens = settings.batch_size * settings.sequence_length
    progress = Progress(settings.preset, tokens, {"loss": "loss", "eval_loss": "held-out loss"})
    use_progress(trainer, progress)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.is_world_process_zero():
        trained: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        save_target(trained, args.tokenizer, args.out, args.dtype)
        _record(trainer, progress, documents, held_out, settings, args)
        release_output(args.out)


def check_free_space(folder: Path) -> None:
    """Refuse to start where checkpoints would not fit: less than 500 MB free."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < _FREE_BYTES:
        raise UsageError(f"{existing} has {free >> 20} MB free and training needs 500; free some or give another --out")


def check_vocabulary(documents: TokenDataset, vocab_size: int, owner: Path) -> None:
    """Refuse tokens of another vocabulary than that of ``owner``, a tokenizer or a model."""
    encoded = documents.index["vocabulary"]
    if encoded != vocab_size:
        raise UsageError(
            f"{documents.path} was encoded with a vocabulary of {encoded} and {owner} has {vocab_size}; encode the "
            "documents with this tokenizer"
        )


def resolve_device(name: str) -> str:
    """``cuda`` or ``cpu`` for an option that may say ``auto``; a GPU that is not there is a UsageError."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no GPU that torch can use here; leave --device cuda out")
    if name == "cpu" or not torch.cuda.is_available():
        return "cpu"
    # cuDNN's attention fails in the backward pass with a mask on some releases (seen with torch 2.14.1 on CUDA 13.0);
    # the memory-efficient kernel takes its place.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return "cuda"


def _rows(documents: TokenDataset, settings: TargetSettings) -> np.ndarray:
    """The training rows, in an order that depends on the seed."""
    from sglang_ext.training.targets_data import pack_rows

    if settings.batch_size % int(os.environ.get("WORLD_SIZE", "1")):
        raise UsageError(
            f"a batch of {settings.batch_size} rows does not divide among {os.environ['WORLD_SIZE']} processes; give a "
            "--batch-size that does"
        )
    length = settings.sequence_length
    rows = pack_rows((documents.document(i)[0] for i in documents.order(settings.seed)), length)
    if len(rows) < settings.batch_size:
        raise UsageError(
            f"{documents.path} fills {len(rows)} rows of {length} tokens and a batch is {settings.batch_size}; encode "
            "more text or give a smaller --batch-size"
        )
    return rows


def _trainer(
    model: Any,
    rows: np.ndarray,
    held_out: TokenDataset,
    settings: TargetSettings,
    args: argparse.Namespace,
    device: str,
) -> Trainer:
    from transformers import Trainer, TrainingArguments

    from sglang_ext.training.targets_data import PackedRows, collate, pack_rows
    from sglang_ext.training.trainer_support import CHECKPOINTS

    length = settings.sequence_length
    held_out_rows = pack_rows((held_out.document(i)[0] for i in held_out.order(settings.seed)), length)
    on_gpu = device == "cuda"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir=str(args.out / CHECKPOINTS),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size // processes,
        per_device_eval_batch_size=settings.batch_size // processes,
        learning_rate=settings.learning_rate,
        warmup_steps=round(settings.warmup * settings.steps),
        lr_scheduler_type="cosine",
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        torch_compile=args.compile,
        seed=settings.seed,
        logging_steps=max(1, settings.steps // 200),
        logging_nan_inf_filter=False,  # the filter would synchronise the device in every step
        eval_strategy="steps" if len(held_out_rows) else "no",
        eval_steps=max(1, settings.steps // 8),
        save_steps=args.save_every,
        save_total_limit=2,
        dataloader_num_workers=args.workers if on_gpu else 0,
        dataloader_pin_memory=on_gpu,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        report_to=[],
    )
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=PackedRows(rows),
        eval_dataset=PackedRows(held_out_rows[: 4 * settings.batch_size]),
        data_collator=collate,
    )


def _record(
    trainer: Trainer,
    progress: Progress,
    documents: TokenDataset,
    held_out: TokenDataset,
    settings: TargetSettings,
    args: argparse.Namespace,
) -> None:
    """Measure the model as it was saved, and write curve, log and provenance beside it."""
    from sglang_ext.training import provenance
    from sglang_ext.training.targets_evaluation import held_out_loss
    from sglang_ext.training.targets_model import load_target
    from sglang_ext.training.trainer_support import write_curve

    history = trainer.state.log_history
    curves = {"loss": "training", "eval_loss": "held-out"}
    write_curve(history, args.out / "loss_curve.png", curves, "loss (nats per token)")
    (args.out / "training.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    model = load_target(args.out, str(trainer.args.device), "float32")
    some = held_out.order(settings.seed)[: args.held_out_documents]
    losses = held_out_loss(model, ((held_out.category(i), held_out.document(i)[0]) for i in some))
    summary = next(entry for entry in reversed(history) if "train_runtime" in entry)
    tokens_seen = settings.steps * settings.batch_size * settings.sequence_length
    manifest = provenance.read_json(args.manifest)
    record = {
        "title": f"{args.out.name}: a small {model.config.model_type} target",
        "command": provenance.command(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "settings": asdict(settings),
        "training": {
            "tokens_seen": tokens_seen,
            "seconds": round(summary["train_runtime"], 1),
            "tokens_per_second": round(progress.tokens_per_second()),
        },
        "held_out_loss": losses,
        "data": {name: documents.index[name] for name in ("documents", "tokens", "tokenizer_sha256")},
        "packages": {
            package["name"]: {name: package[name] for name in ("manager", "version", "licence")}
            for package in manifest.get("packages", [])
        },
        "weights_sha256": provenance.file_digest(args.out / "model.safetensors"),
        "environment": provenance.environment(),
    }
    provenance.write_provenance(args.out, record)
    loss = losses["overall"]["loss"] if losses else float("nan")
    print(f"{args.out}: held-out loss {loss:.4f} nats per token after {tokens_seen:,} tokens", flush=True)
