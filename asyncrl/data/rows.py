"""Rows of a file, one after another, whatever its format; no more of it is in memory than one piece."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ConfigError, one_line

Row = dict[str, Any]
BATCH = 1024  # rows of a parquet file decoded at once


def read_rows(path: Path) -> Iterator[Row]:
    """All rows of a file, in order. ConfigError for whatever is wrong, no row at all included."""
    if path.suffix not in READERS:
        known = ", ".join(READERS)
        raise ConfigError(f"{path}: no data file by its name; its format is told by its suffix: {known}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; correct the path, or see docs/data.md for what it may be")
    empty = True
    try:
        for number, row in enumerate(READERS[path.suffix](path)):
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, sample {number}: an object is expected, not {type(row).__name__}")
            empty = False
            yield row
    except (OSError, ValueError) as error:  # msgspec's and pyarrow's errors are among them
        raise ConfigError(
            f"{path}: not readable as {path.suffix[1:]} ({one_line(error)}); write it anew"
        ) from error
    if empty:
        raise ConfigError(f"{path}: the data set is empty; it needs at least one sample")


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow  # here: `--help` should not wait for it
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(one_line(error)) from error


def _jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield msgspec.json.decode(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None


def _json(path: Path) -> Iterator[Any]:
    """A list of rows; or one row a line, as files of this name often are. A list is in memory whole."""
    with path.open("rb") as file:
        first = file.read(4096).lstrip()[:1]
    if first != b"[":
        yield from _jsonl(path)
        return
    yield from msgspec.json.decode(path.read_bytes(), type=list[Any])


def _csv(path: Path) -> Iterator[Any]:
    """Read a file with a header; all values are text."""
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise ValueError(f"line {reader.line_num}: more values than the header has names")
                yield row
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}") from None


READERS = {".parquet": _parquet, ".jsonl": _jsonl, ".json": _json, ".csv": _csv}
