"""The scripts of tools/ as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def script(name: str, folder: str = "") -> ModuleType:
    """A script, which imports its neighbours."""
    sys.path.insert(0, where := str(TOOLS / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(where)


def bench_script(name: str) -> ModuleType:
    return script(name, "bench")
