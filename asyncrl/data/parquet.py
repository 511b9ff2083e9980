"""Samples from a parquet file with verl's columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from asyncrl.errors import ConfigError, one_line
from asyncrl.types import Message, Sample

REQUIRED = ("data_source", "prompt", "reward_model")


def load_samples(path: str | Path) -> list[Sample]:
    """All samples, in order; the whole file is in memory. Raises ConfigError for whatever is wrong."""
    columns = _read(Path(path))
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise ConfigError(
            f"{path}: no column {', '.join(missing)} (found: {', '.join(columns) or 'none'}); "
            "verl's columns are data_source, prompt, ability, reward_model, extra_info"
        )
    names = list(columns)
    rows = zip(*columns.values(), strict=True)
    return [_sample(path, index, dict(zip(names, row, strict=True))) for index, row in enumerate(rows)]


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


def _read(path: Path) -> dict[str, list[Any]]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; write one with tools/prepare_*.py, or correct the path")
    import pyarrow.parquet  # here: `--help` should not wait for it

    try:
        columns: dict[str, list[Any]] = pyarrow.parquet.ParquetFile(path).read().to_pydict()
    except Exception as error:
        raise ConfigError(f"{path}: not readable as parquet ({one_line(error)}); write it anew") from error
    if not any(columns.values()):
        raise ConfigError(f"{path}: the data set is empty; it needs at least one sample")
    return columns


def _sample(path: str | Path, index: int, row: dict[str, Any]) -> Sample:
    where = f"{path}, sample {index}"
    reward_model = _object(where, "reward_model", row["reward_model"])
    if reward_model.get("ground_truth") is None:
        raise ConfigError(f"{where}: reward_model has no ground_truth; it needs {{style, ground_truth}}")
    return Sample(
        row=index,
        data_source=str(row["data_source"]),
        prompt=_prompt(where, row["prompt"]),
        ground_truth=_json(where, "reward_model.ground_truth", reward_model["ground_truth"]),
        ability=str(row.get("ability") or ""),
        extra_info=_json(where, "extra_info", _object(where, "extra_info", row.get("extra_info") or {})),
    )


def _prompt(where: str, value: Any) -> tuple[Message, ...]:
    """A list of {role, content}, or the same as JSON text."""
    shape = f"{where}: column prompt must be a non-empty list of {{role, content}}, or that as JSON text"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ConfigError(f"{shape}; it is plain text") from None
    try:
        # A nested parquet column gives every message all keys of any message, None where absent.
        rows = [{key: item for key, item in message.items() if item is not None} for message in value]
        messages = msgspec.convert(rows, tuple[Message, ...])
    except (AttributeError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{shape} ({one_line(error)})") from None
    if not messages:
        raise ConfigError(f"{shape}; it is empty")
    return messages


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
