"""Questions of the Berkeley Function-Calling Leaderboard (PyPI: bfcl-eval): real tools, and the calls of them
that are right."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.fetched import FETCHED, missing

SETS = ("simple_python", "multiple", "parallel", "parallel_multiple")
SETS += ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}  # as the leaderboard says
CLASSES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}

Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Question:
    """`tools`: OpenAI schemas, as JSON text."""

    tools: tuple[str, ...]
    calls: Calls


def questions() -> list[Question]:
    """Return the questions without the few whose right calls contradict the schemas."""
    data = _data()
    if data is None:
        missing("bfcl-eval")
    return [question for name in SETS for question in _read(data, name) if question.calls]


def _data() -> Path | zipfile.Path | None:
    """Return the directory with the sets, in a wheel or beside a wheel."""
    for data_file in FETCHED.rglob("BFCL_v4_multiple.json"):
        if data_file.parent.name == "data":
            return data_file.parent
    wheels = sorted(FETCHED.rglob("bfcl_eval-*.whl"))
    return zipfile.Path(wheels[-1], "bfcl_eval/data/") if wheels else None


def _read(data: Path | zipfile.Path, name: str) -> Iterator[Question]:
    questions_file = data / f"BFCL_v4_{name}.json"
    right = data / "possible_answer" / f"BFCL_v4_{name}.json"
    for question, answer in zip(_lines(questions_file), _lines(right), strict=True):
        assert question["id"] == answer["id"]
        tools = [_schema(tool) for tool in question["function"]]
        schemas = {tool["name"]: tool["parameters"] for tool in tools}
        calls = [
            (tool, _value(arguments)) for call in answer["ground_truth"] for tool, arguments in call.items()
        ]
        texts = tuple(json.dumps({"type": "function", "function": tool}) for tool in tools)
        yield Question(
            texts,
            [(tool, arguments) for tool, arguments in calls if fits(arguments, schemas.get(tool, False))],
        )


def _lines(file: Path | zipfile.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _schema(schema: Any) -> Any:
    """With JSON Schema's names of types."""
    if isinstance(schema, list):
        return [_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    named = {"type": TYPES.get(kind, kind)} if isinstance(kind, str) else {}
    return {key: _schema(part) for key, part in schema.items()} | named


def _value(ground_truth: Any) -> Any:
    """Return the first right value of each argument. "" stands for an argument that may be left out."""
    if isinstance(ground_truth, list):
        return [_value(part) for part in ground_truth]
    if not isinstance(ground_truth, dict):
        return ground_truth
    choices = {key: parts if isinstance(parts, list) else [parts] for key, parts in ground_truth.items()}
    accepted_values = {key: [part for part in parts if part != ""] for key, parts in choices.items()}
    return {key: _value(parts[0]) for key, parts in accepted_values.items() if parts}


def fits(value: Any, schema: Any) -> bool:
    """Tell whether the schema allows the value, as far as the schema's types say."""
    if not isinstance(schema, dict):
        return schema is not False
    kind = schema.get("type")
    if kind in CLASSES and (
        not isinstance(value, CLASSES[kind]) or isinstance(value, bool) > (kind == "boolean")
    ):
        return False

    parts = schema.get("properties", {})
    if isinstance(value, dict):
        return all(fits(part, parts.get(key)) for key, part in value.items())
    return not isinstance(value, list) or all(fits(part, schema.get("items")) for part in value)
