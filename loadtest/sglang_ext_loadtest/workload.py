"""Prompts to send. A broken line is named and counted, and the rest is used."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.errors import UsageError
from sglang_ext_loadtest.settings import Requests, Workload

WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line
end member law car city name team minute idea body back parent face level office door health
""".split()  # noqa: SIM905 - a list literal of these would be eighty lines


@dataclass(frozen=True)
class Prompt:
    """A conversation to hold: the user's turns, answered one by one."""

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    language: str | None = None
    max_tokens: int | None = None  # of each answer; None: the run's limit
    exact: bool = False  # the answer must have max_tokens tokens: the end token is ignored
    schema: dict[str, Any] | None = None


@dataclass
class Prompts:
    """Prompts, and what could not be read."""

    prompts: list[Prompt] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # one sentence per line that was left out


def load(workload: Workload, seed: int) -> Prompts:
    """The prompts of a workload, the same for the same workload and seed.

    Files are JSON lines ``{"id", "category", "turns": [...]}`` (also "question_id", "system", "language", "max_tokens",
    "schema"), which is what Spec-Bench has and SPEED-Bench exports; ``.parquet`` of the same columns is read where
    pyarrow is installed. ShareGPT files are JSON lists of ``{"id", "conversations": [{"from", "value"}]}``.

    Raises:
        UsageError: a file is missing, or nothing in it can be used.
    """
    if workload.kind in ("prompts", "sharegpt"):
        if workload.kind == "sharegpt" and not workload.paths:
            raise UsageError("A workload of sharegpt needs files; set its paths.")
        found = Prompts()
        for path in map(Path, workload.paths or [held_out()]):
            prefix = f"{path.stem}/" if len(workload.paths) > 1 else ""
            _collect(_sharegpt(path) if workload.kind == "sharegpt" else _lines(path), path, prefix, found)
    elif workload.kind in ("synthetic", "shared_prefix"):
        found = Prompts(list(_synthetic(workload, seed)))
    else:
        raise UsageError(f"The workload is {workload.kind!r}; use prompts, sharegpt, synthetic or shared_prefix.")
    found.prompts = _shape(found.prompts, workload)
    if not found.prompts:
        reason = f"; first: {found.broken[0]}" if found.broken else ""
        raise UsageError(f"No prompt can be used ({len(found.broken)} broken lines{reason}); mend the file.")
    return found


def held_out() -> Path:
    """The prompts that no reference model was trained on: a part of the wheel, in a checkout those of models/."""
    inside = Path(__file__).with_name("prompts.jsonl")
    return inside if inside.exists() else Path(__file__).parents[2] / "models" / "prompts.jsonl"


def body(prompt: Prompt, answers: Iterable[str], settings: Requests, model: str, number: int) -> dict[str, Any]:
    """The request for the turn that follows ``answers``, with everything that makes tokens countable.

    Args:
        prompt: the conversation.
        answers: the model's answers to the turns before.
        settings: how to ask.
        model: the name the endpoint knows the model by.
        number: the request's number, added to the seed.
    """
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    turn = 0
    for turn, answer in enumerate(answers, start=1):
        messages += [{"role": "user", "content": prompt.turns[turn - 1]}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": prompt.turns[turn]})
    request: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
        "max_tokens": prompt.max_tokens or settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed + number,
    }
    if settings.api == "chat":
        request["messages"] = messages
    else:
        request["prompt"] = "\n".join(message["content"] for message in messages)
    if settings.thinking is not None:
        request["chat_template_kwargs"] = {"enable_thinking": settings.thinking}
    if settings.ignore_eos or prompt.exact:
        request["ignore_eos"] = True
    if prompt.schema is not None:
        schema = {"name": "answer", "schema": prompt.schema, "strict": True}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    return request | settings.extra


def _shape(prompts: list[Prompt], workload: Workload) -> list[Prompt]:
    """Apply the workload's limits: turns, prompts per category (in turn, so that a cut keeps all), prompts in all."""
    schema = _schema(workload.schema)
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(
            Prompt(
                prompt.id,
                prompt.category,
                prompt.turns[: workload.turns],
                prompt.system or workload.system,
                prompt.language or workload.language,
                prompt.max_tokens,
                prompt.exact,
                prompt.schema or schema,
            )
        )
    rounds = max((len(group) for group in groups.values()), default=0)
    if workload.per_category is not None:
        rounds = min(rounds, workload.per_category)
    taken = [group[index] for index in range(rounds) for group in groups.values() if index < len(group)]
    return taken[: workload.limit]


def _schema(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no JSON schema ({error}); give a JSON file.") from None
    if not isinstance(schema, dict):
        raise UsageError(f"{path} is no JSON schema (not an object); give a JSON file with one.")
    return schema


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"There are no prompts at {path} ({error.strerror}); give a file of prompts.") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, JSON value or the ValueError it gave), line by line."""
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except ValueError as error:
                yield f"line {number}", error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"{path} is Parquet, which needs pyarrow; install it or export the rows as JSON lines."
        ) from None
    if not path.is_file():
        raise UsageError(f"There are no prompts at {path}; give a file of prompts.")
    for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1):
        yield f"row {number}", row


def _sharegpt(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        entries = json.loads(_read(path))
    except ValueError as error:
        raise UsageError(f"{path} is no ShareGPT file ({error}); it must be a JSON list.") from None
    if not isinstance(entries, list):
        raise UsageError(f"{path} is no ShareGPT file; it must be a JSON list of conversations.")
    for number, entry in enumerate(entries, start=1):
        where = f"entry {number}"
        try:
            turns = [turn["value"] for turn in entry["conversations"] if turn["from"] in ("human", "user")]
            yield where, {"id": entry.get("id", number), "category": entry.get("category", "sharegpt"), "turns": turns}
        except (TypeError, KeyError, AttributeError) as error:
            yield where, ValueError(f"no ShareGPT conversation ({type(error).__name__}: {error})")


def _collect(rows: Iterator[tuple[str, Any]], path: Path, prefix: str, found: Prompts) -> None:
    ids = {prompt.id for prompt in found.prompts}
    for where, row in rows:
        try:
            prompt = _prompt(row, where, path.stem, prefix)
            if prompt.id in ids:
                raise ValueError(f"the id {prompt.id!r} is there twice")
        except ValueError as error:
            found.broken.append(f"{path.name}, {where}: {error}")
            continue
        ids.add(prompt.id)
        found.prompts.append(prompt)


def _prompt(row: Any, where: str, stem: str, prefix: str) -> Prompt:
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError('"turns" must be a list of texts')
    limit, schema = row.get("max_tokens"), row.get("schema")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError('"max_tokens" must be a number of tokens')
    if schema is not None and not isinstance(schema, dict):
        raise ValueError('"schema" must be a JSON schema')
    name = row.get("id", row.get("question_id", where.split()[-1]))
    return Prompt(
        id=f"{prefix}{name}",
        category=str(row.get("category") or stem),
        turns=tuple(turns),
        system=row.get("system"),
        language=row.get("language"),
        max_tokens=limit,
        schema=schema,
    )


def _synthetic(workload: Workload, seed: int) -> Iterator[Prompt]:
    """Prompts of random words; those of a shared_prefix group begin with the same words."""
    source = random.Random(f"{seed}/{workload.kind}")
    shared = workload.kind == "shared_prefix"
    prefixes = [_words(source, workload.prefix_words) for _ in range(workload.groups)] if shared else [""]
    for index in range(workload.count):
        group = index % len(prefixes)
        turns = []
        for _ in range(workload.turns):
            turns.append(_words(source, source.randint(*workload.input_words)))
        turns[0] = f"{prefixes[group]} {turns[0]}".strip()
        output = source.randint(*workload.output_tokens) if workload.output_tokens else None
        yield Prompt(
            f"{workload.kind}-{index:04d}",
            f"prefix-{group}" if shared else "synthetic",
            tuple(turns),
            max_tokens=output,
            exact=output is not None,
        )


def _words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(WORDS, k=count))
