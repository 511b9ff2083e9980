"""The loop of examples/plain_loop, as a module, and recorded turns as it holds them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.types import Turn

FILE = Path(__file__).parents[2] / "examples" / "plain_loop" / "plain_loop.py"


def plain_loop() -> ModuleType:
    """The example itself, imported once."""
    if FILE.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
        assert spec is not None and spec.loader is not None
        module = sys.modules[FILE.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[FILE.stem]


def as_plain(turns: Sequence[Turn]) -> Any:
    """Return an episode of the loop with the ids of these turns."""
    episode = plain_loop().Episode(truth="", ids=[])
    for turn in turns:
        episode.append(list(turn.context), by_model=False)
        episode.append(list(turn.generation.ids), by_model=True)
    return episode
