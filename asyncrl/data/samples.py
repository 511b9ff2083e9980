"""Samples from rows: prompts with verl's columns, or demonstrations for supervised training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from asyncrl.data.messages import read_messages
from asyncrl.data.rows import Row, read_rows
from asyncrl.errors import ConfigError
from asyncrl.types import Sample

REQUIRED = ("data_source", "prompt", "reward_model")


def load_samples(path: str | Path) -> list[Sample]:
    """Prompts, in order. Raises ConfigError for whatever is wrong."""
    return [_question(path, index, row) for index, row in enumerate(read_rows(Path(path)))]


def load_demonstrations(path: str | Path) -> list[Sample]:
    """Whole conversations, in order: what to imitate. The `prompt` of a sample holds all messages, turns of
    the assistant included. Columns: `messages`, or `prompt` and `response`; optional: `tools` (schemas, which
    go to `extra_info.tool_schemas`), and verl's, which a validation needs. ConfigError as above."""
    return [_demonstration(path, index, row) for index, row in enumerate(read_rows(Path(path)))]


def check_same_data(path: str | Path, samples: Sequence[Sample], kept: str) -> str:
    """The fingerprint of samples in their order, as a run keeps it: its groups name samples by number.
    ConfigError when it is not the `kept` one, unless that is empty: a new run."""
    digest = xxhash.xxh3_128()
    for sample in samples:
        digest.update(msgspec.msgpack.encode(sample))
    found = digest.hexdigest()
    if kept not in ("", found):
        raise ConfigError(
            f"$.data.train: {path} holds other samples, or another order, than those that the run was begun "
            "with; restore the file, or begin a new run with another name=…"
        )
    return found


def _question(path: str | Path, index: int, row: Row) -> Sample:
    where = f"{path}, sample {index}"
    if missing := [name for name in REQUIRED if row.get(name) is None]:
        raise ConfigError(
            f"{where}: no column {', '.join(missing)} (found: {', '.join(row) or 'none'}); "
            "verl's columns are data_source, prompt, ability, reward_model, extra_info"
        )
    reward_model = _object(where, "reward_model", row["reward_model"])
    if reward_model.get("ground_truth") is None:
        raise ConfigError(f"{where}: reward_model has no ground_truth; it needs {{style, ground_truth}}")
    return Sample(
        row=index,
        data_source=str(row["data_source"]),
        prompt=read_messages(f"{where}: column prompt", row["prompt"]),
        ground_truth=_json(where, "reward_model.ground_truth", reward_model["ground_truth"]),
        ability=str(row.get("ability") or ""),
        extra_info=_json(where, "extra_info", _object(where, "extra_info", row.get("extra_info") or {})),
    )


def _demonstration(path: str | Path, index: int, row: Row) -> Sample:
    where = f"{path}, sample {index}"
    if row.get("messages") is not None:
        messages = read_messages(f"{where}: column messages", row["messages"])
    elif row.get("prompt") is not None and row.get("response") is not None:
        answer = read_messages(f"{where}: column response", row["response"], role="assistant")
        messages = read_messages(f"{where}: column prompt", row["prompt"]) + answer
    else:
        raise ConfigError(
            f"{where}: no column messages, or prompt and response (found: {', '.join(row) or 'none'})"
        )
    if all(message.role != "assistant" for message in messages):
        raise ConfigError(f"{where}: has no assistant message, so there is nothing to imitate")
    extra = _object(where, "extra_info", row.get("extra_info") or {})
    if tools := row.get("tools"):
        extra["tool_schemas"] = json.loads(tools) if isinstance(tools, str) else tools
    truth = _object(where, "reward_model", row.get("reward_model") or {}).get("ground_truth")
    return Sample(
        row=index,
        data_source=str(row.get("data_source") or Path(path).stem),
        prompt=messages,
        ground_truth=_json(where, "reward_model.ground_truth", truth),
        ability=str(row.get("ability") or ""),
        extra_info=_json(where, "extra_info", extra),
    )


def _object(where: str, column: str, value: Any) -> dict[str, Any]:
    """A nested column, or the same as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ConfigError(f"{where}: column {column} is text, but not JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: column {column} must be an object, not {type(value).__name__}")
    return value


def _json(where: str, column: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except ValueError as error:
        raise ConfigError(f"{where}: {column} cannot be written as JSON ({error})") from None
