"""One small registry for everything a user can name in the config."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from asyncrl.errors import ConfigError, one_line

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to objects of one kind. Asking for an unknown name tells the nearest known ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Registering another object under a taken name is an error."""

        def add(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ConfigError(f"{self.kind} {name!r} is already registered; choose another name")
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry, or ConfigError with the nearest names."""
        try:
            return self._entries[name]
        except KeyError:
            raise ConfigError(f"unknown {self.kind} {name!r}; {self._hint(name)}") from None

    def load(self, spec: str) -> T:
        """A registered name, `module:attribute` or `path/to/file.py:attribute`."""
        if spec in self._entries or ":" not in spec:
            return self.get(spec)
        return load_object(spec, self.kind)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.4)
        return f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(self.names()) or 'none'}"


def load_object(spec: str, kind: str) -> Any:
    """Import `module:attribute` or `file.py:attribute`; ConfigError says which part was wrong."""
    source, _, attribute = spec.rpartition(":")
    try:
        module = _module_from_file(source) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        raise ConfigError(f"{kind} {spec!r}: cannot import {source!r} ({one_line(error)})") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(module), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"{kind} {spec!r}: {source} has no {attribute!r}{hint}") from None


def _module_from_file(source: str) -> Any:
    path = Path(source).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {source}")
    name = f"asyncrl_user_{path.stem}_{abs(hash(str(path))):x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
