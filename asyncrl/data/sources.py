"""Reads rows: from files or folders of tasks by path or pattern, a hub data set, or a user's own one."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config import DataConfig, WeightedSource
from asyncrl.config.base import Plugin
from asyncrl.data.harbor import read_tasks
from asyncrl.data.rows import READERS, TOO_DEEP, Row, plain, read_rows
from asyncrl.errors import ConfigError, describe, users_code
from asyncrl.registry import Call, load_object, make, single

HUB = "hf:"
NO_MORE_ROWS = object()  # stands for the row after the last one
CALL = Call("a class or function that takes the path", ("path",), makes=True)


class Place(NamedTuple):
    """Names the place of a row: a file, a hub data set or a user's one, and its number there."""

    name: str
    number: int

    @property
    def source(self) -> str:
        """The data source of a row that names none: the file's name without its suffix, or the data set's."""
        return Path(self.name).stem if Path(self.name).suffix in READERS else self.name

    def __str__(self) -> str:
        return f"{self.name}, sample {self.number}"


def paths(config: DataConfig, split: str) -> list[str]:
    """Return the paths of the sources. ConfigError where some have weights and others none."""
    given = config.train if split == "train" else config.test
    sources = [given] if isinstance(given, str) else given
    weighted = [source.path for source in sources if isinstance(source, WeightedSource)]
    plain = [source for source in sources if isinstance(source, str)]
    if weighted and plain:
        raise ConfigError(f"data.train: {plain[0]} has no weight; give one to all sources, or to none")
    return weighted or plain


Reader = Callable[[str], Iterator[tuple[Place, Row]]]


def reader(config: DataConfig, split: str) -> Reader:
    """Return what gives the rows of a source. `split`: train or test."""
    if config.dataset:
        return _own(config.dataset)
    return lambda path: _hub(path, split) if path.startswith(HUB) else _files(path)


def named_files(path: str) -> list[str]:
    """Return the file or directory of this very name, or all that it names as a pattern, sorted."""
    return [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))


def _files(path: str) -> Iterator[tuple[Place, Row]]:
    """Read one file, or all that a pattern names, sorted by name. A directory holds tasks."""
    found = named_files(path)
    if not found and glob.has_magic(path):
        raise ConfigError(f"{path}: no file is named so; correct the pattern")
    if not found and path.endswith("/"):
        raise ConfigError(f"{path}: no such directory; correct the path")
    for name in found or [path]:
        tasks = (task.row for task in read_tasks(name)) if Path(name).is_dir() else None
        for number, row in enumerate(tasks or read_rows(Path(name))):
            yield Place(name, number), row


def _hub(path: str, split: str) -> Iterator[tuple[Place, Row]]:
    """`hf:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]`."""
    repository, _, rest = path.removeprefix(HUB).partition(":")
    name, _, revision = repository.partition("@")
    chosen, _, given = rest.partition(":")
    hint = (
        "it is read as hf:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]; without network, load it once where there "
        "is one, and bring its cache (HF_HOME) here"
    )
    for number, row in enumerate(load_split(name, chosen, given or split, hint, revision)):
        yield Place(name, number), plain(row)


def load_split(name: str, config: str, split: str, hint: str, revision: str = "") -> Iterator[Row]:
    """Read one split of a hub repository, or of a directory with a copy of one, through `datasets`, which
    maps it into memory. A copy of the files alone has one configuration, whose name does not matter.
    ConfigError."""
    import datasets  # here: it takes a second

    datasets.disable_progress_bars()
    with ConfigError.instead_of(
        Exception, text=f"{name}: the split {split!r} cannot be loaded", advice=hint
    ):  # errors of the network, the disk, the format
        if config and datasets.get_dataset_config_names(name, revision or None) == ["default"]:
            config = ""
        found = datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    yield from found


def _own(plugin: Plugin) -> Reader:
    """A class or function of the user's, called with a source's path, that gives rows."""
    where = "data.dataset"
    name, options = single(plugin, where)
    made = make(load_object(name, "data set"), options, f"{where}.{name}", CALL)

    def read(path: str) -> Iterator[tuple[Place, Row]]:
        call = f"{where}: {name}({path!r})"
        for number, row in enumerate(_guarded(call, made, path)):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{call} gives {type(row).__name__}; rows are dicts of column and value")
            origin = Place(path, number)
            yield origin, _call_dataset(f"{call}, sample {number}", partial(_plain_row, row, origin))

    return read


def _plain_row(row: Mapping[str, Any], origin: Place) -> Row:
    """Read all columns of a row, which may be users' code, too."""
    try:
        return plain(dict(row))
    except RecursionError:
        raise ConfigError(f"{origin}: {TOO_DEEP}; flatten its values, or store them as JSON text") from None


def _guarded(where: str, made: Callable[[str], Iterable[Any]], path: str) -> Iterator[Any]:
    """Turn what users' code raises into a ConfigError with its file and line. What can only be counted and
    indexed, as data sets of torch can, is iterated, too."""

    def iterated() -> Iterator[Any]:
        rows: Any = made(path)
        return iter(rows if hasattr(rows, "__iter__") else map(rows.__getitem__, range(len(rows))))

    rows = _call_dataset(where, iterated)
    while (row := _call_dataset(where, lambda: next(rows, NO_MORE_ROWS))) is not NO_MORE_ROWS:
        yield row


def _call_dataset(where: str, function: Callable[[], Any]) -> Any:
    try:
        with users_code():
            return function()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} failed: {describe(error)}; it must give an iterable of rows") from error
