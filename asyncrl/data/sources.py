"""Reads rows: from files or folders of tasks by path or pattern, a hub data set, or a user's own data set."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config import DataConfig, WeightedSource
from asyncrl.config.base import Plugin
from asyncrl.data.harbor import read_tasks
from asyncrl.data.rows import READERS, TOO_DEEP, Row, json_value, read_rows
from asyncrl.errors import ConfigError, describe, users_code
from asyncrl.registry import Call, load_object, make_plugin, name_and_options

HUB_PREFIX = "hf:"
MEDIA_BATCH_ROWS = 16  # rows with images of a hub data set that are in memory at once
NO_MORE_ROWS = object()  # stands for the row after the last one
DATASET_CALL = Call("a class or function that takes the path", ("path",), makes=True)


class RowOrigin(NamedTuple):
    """Names the origin of a row: a file or a data set, and the row's number there."""

    name: str
    number: int

    @property
    def source(self) -> str:
        """Return the data source of a row without one: the file's name without suffix, or the data set's."""
        return Path(self.name).stem if Path(self.name).suffix in READERS else self.name

    @property
    def directory(self) -> Path:
        """Return the directory of the row's file, from which relative paths lead."""
        path = Path(self.name)
        return path if path.is_dir() else path.parent

    def __str__(self) -> str:
        return f"{self.name}, sample {self.number}"


def source_paths(config: DataConfig, split: str) -> list[str]:
    """Return the paths of the sources. ConfigError if only some of the sources have weights."""
    configured = config.train if split == "train" else config.test
    sources = [configured] if isinstance(configured, str) else configured
    weighted = [source.path for source in sources if isinstance(source, WeightedSource)]
    unweighted = [source for source in sources if isinstance(source, str)]
    if weighted and unweighted:
        raise ConfigError(
            f"data.train: {unweighted[0]} has no weight; set a weight for every source, or for none"
        )
    return weighted or unweighted


def read_source(config: DataConfig, split: str, path: str) -> Iterator[tuple[RowOrigin, Row]]:
    """Read the rows of a source. `split`: train or test."""
    if config.dataset:
        return _read_users_dataset(config.dataset, path)
    return _read_hub(path, split) if path.startswith(HUB_PREFIX) else _read_files(path)


def named_files(path: str) -> list[str]:
    """Return the file or directory of exactly this name, or all matches of the name as a pattern, sorted."""
    return [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))


def _read_files(path: str) -> Iterator[tuple[RowOrigin, Row]]:
    """Read one file, or all files that match a pattern, sorted by name. A directory holds tasks."""
    file_names = named_files(path)
    if not file_names and glob.has_magic(path):
        raise ConfigError(f"{path}: no file matches; correct the pattern")
    if not file_names and path.endswith("/"):
        raise ConfigError(f"{path}: no such directory; correct the path")

    for name in file_names or [path]:
        tasks = (task.row for task in read_tasks(name)) if Path(name).is_dir() else None
        for number, row in enumerate(tasks or read_rows(Path(name))):
            yield RowOrigin(name, number), row


def _read_hub(path: str, split: str) -> Iterator[tuple[RowOrigin, Row]]:
    """Read a split of a hub data set, named `hf:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]`."""
    repository, _, selection = path.removeprefix(HUB_PREFIX).partition(":")
    name, _, revision = repository.partition("@")
    chosen_config, _, chosen_split = selection.partition(":")

    hint = (
        "the format is hf:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]; if this machine has no network, load the "
        "data set once on a machine that has one, and copy the cache (HF_HOME) to this machine"
    )
    for number, row in enumerate(load_split(name, chosen_config, chosen_split or split, hint, revision)):
        yield RowOrigin(name, number), json_value(row)


def load_split(name: str, config: str, split: str, hint: str, revision: str = "") -> Iterator[Row]:
    """Read one split of a hub repository, or of a directory with a copy, through `datasets`, which maps the
    split into memory. A copy of the files alone has one configuration, whose name does not matter.
    ConfigError on failure."""
    import datasets  # slow to import

    datasets.disable_progress_bars()

    # Exception: errors of the network, the disk and the format are of many types.
    problem = f"{name}: the split {split!r} cannot be loaded"
    with ConfigError.instead_of(Exception, text=problem, advice=hint):
        if config and datasets.get_dataset_config_names(name, revision or None) == ["default"]:
            config = ""

        dataset = datasets.load_dataset(name, config or None, split=split, revision=revision or None)

    features = getattr(dataset, "features", None) or {}
    if any(map(datasets.features.features.require_decoding, features.values())):
        # Images stay files, as rows of files have them: {bytes, path}.
        for batch in dataset.with_format("arrow").iter(MEDIA_BATCH_ROWS):
            yield from batch.to_pylist()
    else:
        yield from dataset


def _read_users_dataset(plugin: Plugin, path: str) -> Iterator[tuple[RowOrigin, Row]]:
    """Read rows by a user's class or function, which is called with a source's path. Data sets that can only
    be counted and indexed, such as torch's, are iterated by index. Exceptions become a ConfigError with file
    and line."""
    where = "data.dataset"
    name, options = name_and_options(plugin, where)
    make_rows = make_plugin(load_object(name, "data set"), options, f"{where}.{name}", DATASET_CALL)
    call_text = f"{where}: {name}({path!r})"

    def iterate_rows() -> Iterator[Any]:
        rows: Any = make_rows(path)
        if hasattr(rows, "__iter__"):
            return iter(rows)
        return map(rows.__getitem__, range(len(rows)))

    rows = _call_dataset(call_text, iterate_rows)
    number = 0
    while (row := _call_dataset(call_text, lambda: next(rows, NO_MORE_ROWS))) is not NO_MORE_ROWS:
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{call_text} yielded a row of type {type(row).__name__}; every row must be a dict that maps "
                "columns to values"
            )

        origin = RowOrigin(path, number)
        yield origin, _call_dataset(f"{call_text}, sample {number}", partial(_plain_row, row, origin))
        number += 1


def _plain_row(row: Mapping[str, Any], origin: RowOrigin) -> Row:
    """Read all columns of a row, whose class may be users' code."""
    try:
        return json_value(dict(row))
    except RecursionError:
        raise ConfigError(f"{origin}: {TOO_DEEP}; flatten the value, or store it as JSON text") from None


def _call_dataset(where: str, function: Callable[[], Any]) -> Any:
    try:
        with users_code():
            return function()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where} failed: {describe(error)}; the call must return an iterable of rows"
        ) from error
