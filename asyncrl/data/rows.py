"""Reads the rows of a data file of any format, with one piece of the file in memory at a time, and writes
files of rows with verl's columns. Values are converted to JSON's where possible."""

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
BATCH_ROWS = 1024  # rows of a parquet file decoded at once; fewer if they would have more than BATCH_BYTES
BATCH_BYTES = 64 << 20
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
TOO_DEEP = "a value is nested too deeply"


def read_rows(path: Path) -> Iterator[Row]:
    """Read all rows of a file, in order. ConfigError for an unreadable or empty file."""
    if path.suffix not in READERS:
        suffixes = ", ".join(READERS)
        raise ConfigError(f"{path}: unknown data format; use a file with one of the suffixes {suffixes}")
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; correct the path, or see docs/guides/data.md for other sources"
        )

    is_empty = True
    problem = f"{path}: not readable as {path.suffix[1:]}"
    # ValueError: msgspec's and pyarrow's errors are subclasses.
    with ConfigError.instead_of(OSError, ValueError, text=problem, advice="write the file again"):
        for number, row in enumerate(READERS[path.suffix](path)):
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, sample {number}: expected an object, not {type(row).__name__}")

            is_empty = False
            yield row

    if is_empty:
        raise ConfigError(f"{path}: the data set is empty; add at least one sample")


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow  # not at the top, so that `--help` does not wait
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            converters = [(field.name, _converter(field.type)) for field in file.schema_arrow]
            converted_columns = [(name, convert) for name, convert in converters if convert]

            byte_count = sum(
                file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)
            )
            mean_row_bytes = byte_count / max(1, file.metadata.num_rows)
            batch_rows = min(BATCH_ROWS, int(BATCH_BYTES / max(1, mean_row_bytes)))
            for batch in file.iter_batches(max(1, batch_rows)):
                for row in batch.to_pylist():
                    yield row | {name: convert(row[name]) for name, convert in converted_columns}
    except pyarrow.ArrowException as error:
        raise ValueError(one_line(error)) from error


def _converter(kind: Any) -> Callable[[Any], Any] | None:
    """Return a function that converts values of an Arrow type to JSON values, for example the pairs that
    pyarrow returns for a map to a dict; None if no conversion is needed."""
    import pyarrow.types as types

    if types.is_map(kind):
        convert_key = _converter(kind.key_type) or _unchanged
        convert_value = _converter(kind.item_type) or _unchanged
        return lambda pairs: (
            None
            if pairs is None
            else {_map_key(convert_key(key)): convert_value(value) for key, value in pairs}
        )

    if types.is_struct(kind):
        fields = [(field.name, _converter(field.type)) for field in kind]
        converted_fields = [(name, convert) for name, convert in fields if convert]
        if not converted_fields:
            return None

        return lambda struct: (
            struct and struct | {name: convert(struct[name]) for name, convert in converted_fields}
        )

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        convert_item = _converter(kind.value_type)
        return convert_item and (lambda items: items and [convert_item(item) for item in items])
    if types.is_dictionary(kind):
        return _converter(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind):
        return None

    return json_value


def _unchanged(value: Any) -> Any:
    return value


def _map_key(key: Any) -> Any:
    """Return the key of a map; a list or dict as text, so that a dict can hold the key."""
    return str(key) if isinstance(key, dict | list) else key


def json_value(value: Any) -> Any:
    """Convert a value to JSON's types. UTF-8 binary data become text, as Impala, Hive and old Spark do not
    mark texts; Decimal(128.00) becomes 128; arrays become lists. Other values stay unchanged, and are refused
    where a sample needs them."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {_map_key(json_value(key)): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]

    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return value

    if isinstance(value, Decimal):
        if not value.is_finite():
            return None
        if value == value.to_integral_value():
            return int(value)
        is_exact = Decimal(repr(float(value))) == value
        return float(value) if is_exact else format(value.normalize(), "f")  # text, as a float would round

    if hasattr(value, "tolist"):  # arrays of numpy and torch
        return json_value(value.tolist())

    return value


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        _skip_byte_order_mark(file)
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _decode_json(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None


def _skip_byte_order_mark(file: BinaryIO) -> None:
    """Skip the byte order mark with which some programs begin a file in UTF-8."""
    start = file.read(len(codecs.BOM_UTF8))
    if start.startswith(UTF_16_MARKS):
        raise ValueError("the file is encoded in UTF-16; save the file as UTF-8")
    if start != codecs.BOM_UTF8:
        file.seek(0)


def _decode_json(text: bytes) -> Any:
    """Decode a JSON value, also with the NaN and Infinity that Python writes. ValueError for other text."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError(TOO_DEEP) from None


def _read_json(path: Path) -> Iterator[Any]:
    """Read a list of rows, whole in memory; or one row a line, as many files with this suffix have."""
    with path.open("rb") as file:
        _skip_byte_order_mark(file)
        text = file.read(4096)
        if text.lstrip().startswith(b"["):
            yield from _decode_json(text + file.read())
            return
    yield from _read_jsonl(path)


def _read_csv(path: Path) -> Iterator[Any]:
    """Read a file with a header; all values are text."""
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise ValueError(f"line {reader.line_num}: more values than the header has columns")

                yield row
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}") from None


READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}


# -- writing -----------------------------------------------------------------------------------------


def verl_row(
    data_source: str, prompt: str | list[dict[str, Any]], truth: Any, ability: str = "math", **extra: Any
) -> Row:
    """Make a row of one sample. `prompt`: messages, or the text of the user's message. `extra`: the fields of
    extra_info beside the split and the row's number."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write FILE.jsonl or FILE.parquet, whole or not at all. Returns the number of rows."""
    all_rows = list(rows)
    temporary = path.with_name(f"{path.name}.writing")
    if path.suffix == ".jsonl":
        temporary.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in all_rows))
    else:
        import pyarrow  # not at the top, so that `--help` does not wait
        import pyarrow.parquet

        with temporary.open("wb") as file:  # pyarrow reads some paths as URLs
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(all_rows), file)

    temporary.replace(path)
    return len(all_rows)


def write_splits(out: Path, splits: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Write `<out>/<split>.parquet`, each row with its split and number; no file for an empty split.
    Returns the directory and the number of rows of each split, for a person to read."""
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        numbered = [
            row | {"extra_info": {"split": split, "index": index} | row["extra_info"]}
            for index, row in enumerate(rows)
        ]
        if numbered:
            write_rows(out / f"{split}.parquet", numbered)

    return {"out": str(out), **{split: len(rows) for split, rows in splits.items()}}
