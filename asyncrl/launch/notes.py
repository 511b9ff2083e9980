"""What checks work on, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from asyncrl.config import RunConfig
from asyncrl.launch.data import RunData
from asyncrl.tools import Tool

Level = Literal["ok", "warning", "error", "skipped"]


@dataclass
class Inputs:
    """Of a run. A check may complete them for later ones: `config` gets directories for the names of models,
    `tools` and `data` are loaded. `prompt`: tokens of the first one."""

    config: RunConfig
    tools: Mapping[str, Tool] = field(default_factory=dict)
    data: RunData | None = None
    prompt: int = 0

    @property
    def samples(self) -> RunData:
        assert self.data is not None, "the check of the data comes first"
        return self.data


class Note(NamedTuple):
    """One thing that a check has found."""

    level: Level
    text: str
    check: str = ""  # by which one, once it is collected


def ok(text: str) -> Note:
    return Note("ok", text)


def warning(text: str) -> Note:
    return Note("warning", text)
