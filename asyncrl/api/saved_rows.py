"""Writes rows that a caller holds in memory to files, which a run reads as any other."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Iterable, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import Any

from asyncrl.data.rows import json_value
from asyncrl.errors import ConfigError

DIGEST_BYTES = 8


def save_rows(rows: Any, key: str, directory: Path) -> Path:
    """Write rows to a file in `directory` whose name is the content's digest, and return its path. `rows`:
    dicts with the columns of the data files (docs/guides/data.md); a table of pyarrow, pandas or polars, or a
    `datasets.Dataset`. ConfigError, which begins with `key`, for a row that JSON cannot hold."""
    if hasattr(rows, "with_format") and hasattr(rows, "to_parquet"):  # datasets.Dataset
        rows = rows.with_format("arrow")[:]
    if hasattr(rows, "to_pylist"):  # pyarrow.Table: its types decide how values are read
        return _save_table(rows, key, directory)
    if hasattr(rows, "to_dicts"):  # polars.DataFrame
        row_list = rows.to_dicts()
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas.DataFrame
        row_list = rows.to_dict("records")
    elif isinstance(rows, Iterable) and not isinstance(rows, Mapping):
        advice = "pass an iterable that works in this process, such as a list of dicts"
        with ConfigError.instead_of(Exception, text=f"{key}: reading the rows failed", advice=advice):
            row_list = list(rows)
    else:
        raise ConfigError(
            f"{key}: unexpected type {type(rows).__name__}; pass a list of dicts, or the path of a file"
        )
    if not row_list:
        raise ConfigError(f"{key}: no rows; pass at least one")

    lines: list[bytes] = []
    for number, row in enumerate(row_list):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{key}[{number}]: unexpected type {type(row).__name__}; each row must be a dict"
            )
        _refuse_number_keys(row, f"{key}[{number}]")
        try:
            line = json.dumps(json_value(dict(row)), ensure_ascii=False, allow_nan=False)
            lines.append(line.encode() + b"\n")
        except (TypeError, ValueError) as error:
            column = next(column for column in row if not _is_json(row[column]))
            raise ConfigError(
                f"{key}[{number}].{column}: {error}; make it a string, a number, a list or a dict"
            ) from None

    content = b"".join(lines)
    return save_once(directory / f"{digest_of(content)}.jsonl", content)


def digest_of(content: bytes) -> str:
    return blake2s(content, digest_size=DIGEST_BYTES).hexdigest()


def save_once(path: Path, content: bytes) -> Path:
    """Write a file whose path has the digest of its content, unless it is there: the names of evaluations
    depend on its time."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_path = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        temporary_path.write_bytes(content)
        temporary_path.replace(path)
    return path


def _save_table(table: Any, key: str, directory: Path) -> Path:
    import pyarrow.parquet

    if not table.num_rows:
        raise ConfigError(f"{key}: no rows; pass at least one")
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    content = buffer.getvalue()
    return save_once(directory / f"{digest_of(content)}.parquet", content)


def _refuse_number_keys(value: Any, where: str) -> None:
    """Raise ConfigError for a dict whose keys are no texts: in JSON they would become texts, so that code
    which looks a number up would find nothing."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if not isinstance(name, str):
                raise ConfigError(
                    f"{where}: the key {name!r} is of type {type(name).__name__}, but tools and rewards "
                    "would receive a string; convert the key with str(…), both here and in the code "
                    "that looks it up"
                )
            _refuse_number_keys(entry, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for entry in value:
            _refuse_number_keys(entry, where)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(json_value(value), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):
        return False
    return True
