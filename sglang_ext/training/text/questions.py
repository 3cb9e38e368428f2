"""Extractors for questions with answers and requests with tool calls, from documentation inside packages."""

from __future__ import annotations

import ast
import inspect
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_ext.training.text.documents import PIECE_BYTES, Text, continuations, pieces, stable_hash
from sglang_ext.training.text.files import read_text, unit, walk

DISCOVERY_API = r"documents/([^./]+)"
"""A Google API: its unit of the split, in all of its versions."""


def docstrings(root: Path, package: str, skip: str = "/tests?/") -> Iterator[Text]:
    """What a function or class is for, answered by its docstring; the group is the file's, as in ``files.code``."""
    for name, path in walk(root, (".py",), skip=skip):
        try:
            tree = ast.parse(read_text(path))
        except (SyntaxError, ValueError):
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            text = ast.get_docstring(node) or ""
            if 120 < len(text) < 6000:
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                question = f"What does the {kind} `{node.name}` in `{module}` do?"
                yield Text(f"{package}/{name}", f"{name}:{node.lineno}", question, _first_piece(text))


def country_questions(root: Path, package: str) -> Iterator[Text]:
    """Questions about one field of a country's profile, answered by its prose."""
    for name, path in walk(root, (".json",), skip="package.json"):
        country = json.loads(read_text(path))
        try:
            names = country["Government"]["Country name"]
            title = (names.get("conventional short form") or names["conventional long form"])["text"]
        except (KeyError, TypeError):
            continue
        if title == "none":
            title = names.get("conventional long form", {}).get("text", "none")
        for fields, text in _texts(country):
            if len(text) >= 60:
                about = " - ".join(fields).lower()
                question = f"What does the country profile of {title} say about {about}?"
                yield Text(f"{package}/{name}", f"{name}/{about}", question, _first_piece(text))


def aws_operations(root: Path, package: str) -> Iterator[Text]:
    """What an AWS operation does; the group is the service, in all of its API versions."""
    for service, model in _aws_models(root, "service-2.json"):
        title = model.get("metadata", {}).get("serviceId", service)
        for operation, shape in sorted(model.get("operations", {}).items()):
            text = _html_words(shape.get("documentation", ""))
            if len(text) > 120:
                question = f"What does the operation {operation} of {title} do?"
                yield Text(f"{package}/{service}", f"{service}/{operation}", question, _first_piece(text))


def aws_prose(root: Path, package: str) -> Iterator[Text]:
    """The descriptions of a service's data types as running text."""
    for service, model in _aws_models(root, "service-2.json"):
        paragraphs = [_html_words(shape.get("documentation", "")) for shape in model.get("shapes", {}).values()]
        text = "\n\n".join(dict.fromkeys(paragraph for paragraph in paragraphs if len(paragraph) > 200))
        yield from continuations("prose", f"{package}/{service}", f"{service}/shapes", text)


def aws_calls(root: Path, package: str) -> Iterator[Text]:
    """The published examples of API use: a described request becomes a JSON call."""
    for service, examples in _aws_models(root, "examples-1.json"):
        for operation, items in sorted(examples.get("examples", {}).items()):
            for number, item in enumerate(items):
                wish = _html_words(item.get("description") or "")
                if len(wish) > 30 and item.get("input"):
                    call = json.dumps({"name": f"{service}.{operation}", "arguments": item["input"]})
                    tool = json.dumps({"name": f"{service}.{operation}", "parameters": list(item["input"])})
                    prompt = f"Answer with a JSON tool call.\nTools:\n{tool}\nRequest: {wish}"
                    yield Text(f"{package}/{service}", f"{service}/{operation}/{number}", prompt, call)


def discovery_calls(root: Path, package: str) -> Iterator[Text]:
    """Requests made from API descriptions: two tools, a wish with values, the JSON call that fulfils it."""
    for name, path in walk(root, (".json",), only="discovery_cache/documents/"):
        api = json.loads(read_text(path))
        methods = [method for method in _methods(api.get("resources")) if len(method.get("description", "")) >= 40]
        group = unit(package, name, DISCOVERY_API)
        for number, method in enumerate(methods):
            draw = random.Random(stable_hash(method["id"]))
            arguments = _arguments(method.get("parameters", {}), draw)
            if not arguments:
                continue
            tools = [_tool(method), _tool(methods[(number + 1) % len(methods)])]
            draw.shuffle(tools)
            wish = method["description"].split(". ")[0].rstrip(".")
            values = ", ".join(f"{key} = {value}" for key, value in arguments.items())
            prompt = "Answer with a JSON tool call.\nTools:\n" + "\n".join(tools)
            prompt += f"\nRequest: {wish[0].upper() + wish[1:]}, with {values}."
            call = json.dumps({"name": method["id"], "arguments": arguments})
            yield Text(group, f"{name}/{method['id']}", prompt, call)


def _aws_models(root: Path, file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(service, model) of each service's newest API version."""
    newest: dict[str, Path] = {}
    for name, path in walk(root, (file,), only="^botocore/data/"):
        newest[name.split("/")[2]] = path  # walk is sorted, and versions are dates
    for service, path in newest.items():
        yield service, json.loads(read_text(path))


def _html_words(text: str) -> str:
    from selectolax.lexbor import LexborHTMLParser

    body = LexborHTMLParser(text).body if text else None
    words = " ".join(body.text(deep=True, separator=" ").split()) if body is not None else ""
    return re.sub(r" ([.,;:)])", r"\1", words)


def _methods(resources: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    for resource in (resources or {}).values():
        yield from (resource.get("methods") or {}).values()
        yield from _methods(resource.get("resources"))


def _tool(method: dict[str, Any]) -> str:
    parameters = {key: value.get("type", "string") for key, value in list(method.get("parameters", {}).items())[:6]}
    return json.dumps({"name": method["id"], "parameters": parameters})


def _arguments(parameters: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, schema in list(parameters.items())[:6]:
        if not schema.get("required") and draw.random() < 0.5:
            continue
        if "enum" in schema:
            values[key] = draw.choice(schema["enum"])
        elif schema.get("type") == "integer":
            values[key] = draw.randint(1, 500)
        elif schema.get("type") == "boolean":
            values[key] = draw.random() < 0.5
        else:
            name = f"{draw.choice(['alpha', 'beta', 'demo', 'north', 'prod', 'test', 'west'])}-{draw.randint(1, 99)}"
            pattern = schema.get("pattern", "").strip("^$").replace(".*", "[^/]+")
            values[key] = pattern.replace("[^/]+", name) if "[^/]+" in pattern else name
    return values


def _texts(value: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, item in value.items():
        if isinstance(item, dict):
            if isinstance(item.get("text"), str):
                yield (*path, key), item["text"]
            else:
                yield from _texts(item, (*path, key))


def _first_piece(text: str) -> str:
    return next(iter(pieces(inspect.cleandoc(text), PIECE_BYTES)), "")
