"""Rows of a file, one after another, whatever its format, with one piece of it in memory at a time; and files
of rows that this package writes, with verl's columns. Values are those of JSON, as far as they have one."""

from __future__ import annotations

import codecs
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from asyncrl.errors import ConfigError, one_line

Row = dict[str, Any]
BATCH = 1024  # rows of a parquet file decoded at once
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
TOO_DEEP = "it is nested too deeply"


def read_rows(path: Path) -> Iterator[Row]:
    """All rows of a file, in order. ConfigError for whatever is wrong, no row at all included."""
    if path.suffix not in READERS:
        known = ", ".join(READERS)
        raise ConfigError(f"{path}: no data file by its name; its format is told by its suffix: {known}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; correct the path, or see docs/data.md for what it may be")
    empty = True
    with ConfigError.instead_of(
        OSError, ValueError, text=f"{path}: not readable as {path.suffix[1:]}", advice="write it anew"
    ):  # msgspec's and pyarrow's errors are among them
        for number, row in enumerate(READERS[path.suffix](path)):
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, sample {number}: an object is expected, not {type(row).__name__}")
            empty = False
            yield row
    if empty:
        raise ConfigError(f"{path}: the data set is empty; it needs at least one sample")


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow  # here: `--help` should not wait for it
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            converters = [(field.name, _converter(field.type)) for field in file.schema_arrow]
            changed = [(name, convert) for name, convert in converters if convert]
            for batch in file.iter_batches(BATCH):
                for row in batch.to_pylist():
                    yield row | {name: convert(row[name]) for name, convert in changed}
    except pyarrow.ArrowException as error:
        raise ValueError(one_line(error)) from error


def _converter(kind: Any) -> Callable[[Any], Any] | None:
    """Return what makes values of JSON of the values of an Arrow type, for example dicts of maps, which
    pyarrow gives as lists of pairs; None where they are such values already."""
    import pyarrow.types as types

    if types.is_map(kind):
        of_key, of_value = (_converter(part) or _unchanged for part in (kind.key_type, kind.item_type))
        return lambda pairs: (
            None if pairs is None else {_key(of_key(key)): of_value(value) for key, value in pairs}
        )
    if types.is_struct(kind):
        fields = [(field.name, _converter(field.type)) for field in kind]
        changed = [(name, convert) for name, convert in fields if convert]
        if not changed:
            return None
        return lambda struct: struct and struct | {name: convert(struct[name]) for name, convert in changed}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        of_item = _converter(kind.value_type)
        return of_item and (lambda items: items and [of_item(item) for item in items])
    if types.is_dictionary(kind):
        return _converter(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind):
        return None
    return plain


def _unchanged(value: Any) -> Any:
    return value


def _key(key: Any) -> Any:
    """The key of a map; one that is no single value as text, which a dict takes."""
    return str(key) if isinstance(key, dict | list) else key


def plain(value: Any) -> Any:
    """Return the value as JSON has it. Binary data are text where they are UTF-8: Impala, Hive and old Spark
    do not mark texts as such. Decimal(128.00) is 128; arrays are lists. What has no such form
    stays as it is, and is refused where a sample needs it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {_key(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, Decimal):
        return _number(value)
    if hasattr(value, "tolist"):  # arrays of numpy and torch
        return plain(value.tolist())
    return value


def _number(value: Decimal) -> int | float | str | None:
    """A number, or text where a float would round it; None of one that is not finite."""
    if not value.is_finite():
        return None
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else format(value.normalize(), "f")


def _jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        _pass_mark(file)
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _decoded(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None


def _pass_mark(file: BinaryIO) -> None:
    """Read the byte order mark with which some programs begin a file in UTF-8, if it is there."""
    start = file.read(len(codecs.BOM_UTF8))
    if start.startswith(UTF_16):
        raise ValueError("it is in UTF-16; save it in UTF-8")
    if start != codecs.BOM_UTF8:
        file.seek(0)


def _decoded(text: bytes) -> Any:
    """Return a JSON value, also with the NaN and Infinity that Python writes. ValueError where it is none."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError(TOO_DEEP) from None


def _json(path: Path) -> Iterator[Any]:
    """A list of rows; or one row a line, as files of this name often are. A list is in memory whole."""
    with path.open("rb") as file:
        _pass_mark(file)
        text = file.read(4096)
        if text.lstrip().startswith(b"["):
            yield from _decoded(text + file.read())
            return
    yield from _jsonl(path)


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


# -- writing -----------------------------------------------------------------------------------------


def verl_row(
    data_source: str, prompt: str | list[dict[str, Any]], truth: Any, ability: str = "math", **extra: Any
) -> Row:
    """Make one sample. `prompt`: messages, or the text of the user's one. `extra`: what extra_info holds
    beside the split and the number of the row."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write FILE.jsonl or FILE.parquet, whole or not at all; how many rows."""
    listed = list(rows)
    work = path.with_name(f"{path.name}.writing")
    if path.suffix == ".jsonl":
        work.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in listed))
    else:
        import pyarrow  # here: `--help` should not wait for it
        import pyarrow.parquet

        with work.open("wb") as file:  # pyarrow reads some paths as URLs
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed), file)
    work.replace(path)
    return len(listed)


def write_splits(out: Path, splits: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Write `<out>/<split>.parquet`, each row with its split and number; none for a split without rows.
    Returns what was written, for a person to read."""
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        numbered = [
            row | {"extra_info": {"split": split, "index": index} | row["extra_info"]}
            for index, row in enumerate(rows)
        ]
        if numbered:
            write_rows(out / f"{split}.parquet", numbered)
    return {"out": str(out), **{split: len(rows) for split, rows in splits.items()}}
