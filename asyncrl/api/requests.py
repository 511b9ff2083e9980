"""Makes a launcher's request of a call's arguments: overrides, keys, functions and rows."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.api.launcher import LauncherRequest
from asyncrl.api.saved_code import is_tool_class, loadable_name
from asyncrl.api.saved_rows import save_rows
from asyncrl.config.composition import RUN_DIRECTORY_MARK
from asyncrl.errors import ConfigError
from asyncrl.tools.base import Tool

# Arguments for keys that nearly every call sets.
KEY_OF_ARGUMENT = {
    "model": "model.path",
    "train": "data.train",
    "test": "data.test",
    "tools": "rollout.tools",
    "reward": "rollout.reward",
    "environment": "rollout.environment",
    "agent": "rollout.agent",
}
DATA_KEYS = ("data.train", "data.test")
LIST_KEYS = ("rollout.tools",)
PLUGIN_KEYS = ("rollout.reward", "rollout.environment", "rollout.agent")
GROUPS = ("algorithm", "engine", "experiment", "launch")  # of files in configs/, chosen by a text
CODE_DIRECTORY = "code"
DATA_DIRECTORY = "data"


def make_request(
    command: Literal["train", "sft", "eval"],
    settings: Sequence[str | Mapping[str, Any]],
    keywords: Mapping[str, Any],
    directory: Path,
    named_directory: str = RUN_DIRECTORY_MARK,
    config_dir: str | Path = "",
    model: str = "",
    runs: str = "",
) -> LauncherRequest:
    """Make the request. `settings`: overrides as text (`"trainer.lr=1e-5"`) and dicts of sections;
    `keywords`: sections, keys at top level, and the arguments of KEY_OF_ARGUMENT. Functions and rows are
    written below `directory`, and named in the configuration as files below `named_directory`. ConfigError
    names the key."""
    saver = ValueSaver(directory, named_directory)
    overrides: list[str] = []
    values: dict[str, Any] = {}

    for setting in (*settings, keywords):
        if isinstance(setting, str):
            if "=" not in setting:
                raise ConfigError(f"{setting!r}: not an override; write KEY=VALUE")
            overrides.append(setting)
        elif isinstance(setting, Mapping):
            for name, value in setting.items():
                if value is None:
                    continue
                if name in GROUPS and isinstance(value, str):
                    overrides.append(f"{name}={value}")
                    continue

                is_section = name == "model" and isinstance(value, Mapping)
                key = name if is_section else KEY_OF_ARGUMENT.get(name, name)
                section, _, section_key = key.partition(".")
                saved_value = saver.save(value, key)
                added_values = {section_key: saved_value} if section_key else saved_value
                if isinstance(added_values, dict):  # of a section: other keys stay
                    added_values = {**values.get(section, {}), **added_values}
                values[section] = added_values
        else:
            raise ConfigError(
                f"{setting!r}: unexpected type {type(setting).__name__}; settings must be strings or dicts"
            )

    return LauncherRequest(
        command=command,
        overrides=overrides,
        values=values,
        saved_files=saver.saved_files,
        config_dir=str(config_dir),
        model=model,
        runs=runs,
    )


class ValueSaver:
    """Turns values of a call into values of JSON's types; functions and rows become files in `directory`,
    which the values name as files in `named_directory`."""

    def __init__(self, directory: Path, named_directory: str) -> None:
        self._directory = directory
        self._named_directory = named_directory
        self.saved_files: dict[str, str] = {}  # the file's path, by the path within the run's directory

    def save(self, value: Any, key: str) -> Any:
        """Return a value of a key, or of a section, in JSON's types."""
        if isinstance(value, str) and key in LIST_KEYS:
            return [value]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if key in DATA_KEYS and not _names_sources(value):
            path = save_rows(value, key, self._directory / DATA_DIRECTORY)
            return self._path_in_run(f"{DATA_DIRECTORY}/{path.name}", path)
        if key in PLUGIN_KEYS and not (isinstance(value, str | Mapping) or callable(value) or value is None):
            advice = "pass a function or a class, a name, or {function: {option: value}}"
            if inspect.iscoroutine(value):
                value.close()  # otherwise Python warns that nobody has awaited it
                advice = "pass the async function itself, without calling it"
            raise ConfigError(f"{key}: unexpected type {type(value).__name__}; {advice}")
        if value is None or isinstance(value, str | int | float):
            return value

        if callable(value) or isinstance(value, Tool) or is_tool_class(value):
            loadable = self._save_code(value, key)
            return [loadable] if key in LIST_KEYS else loadable
        if isinstance(value, Mapping):
            saved_values: dict[str, Any] = {}
            for name, entry in value.items():
                saved_name = name if isinstance(name, str) else self._save_code(name, key)
                saved_values[saved_name] = self.save(entry, f"{key}.{saved_name}")
            return saved_values
        if isinstance(value, list | tuple):
            entries = [self.save(entry, key) for entry in value]
            return [name for entry in entries for name in entry] if key in LIST_KEYS else entries

        raise ConfigError(
            f"{key}: values of type {type(value).__name__} are not supported; "
            "docs/reference/configuration.md lists the types"
        )

    def _save_code(self, subject: Any, key: str) -> str:
        name, path = loadable_name(subject, key, self._directory / CODE_DIRECTORY)
        if path is None:
            return name
        file_name, _, attribute = name.rpartition(":")
        return f"{self._path_in_run(f'{CODE_DIRECTORY}/{file_name}', path)}:{attribute}"

    def _path_in_run(self, name: str, path: Path) -> str:
        """Add a saved file, and return the path for the configuration."""
        self.saved_files[name] = str(path)
        return f"{self._named_directory}/{name}"


def _names_sources(value: Any) -> bool:
    """Return whether a value of `data.train` or `data.test` names files, and holds no rows."""
    entries = value if isinstance(value, list | tuple) else [value]
    return bool(entries) and all(
        isinstance(entry, str | os.PathLike)
        or (isinstance(entry, Mapping) and entry.keys() == {"path", "weight"})
        for entry in entries
    )
