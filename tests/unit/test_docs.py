"""What the map of the architecture names is there, and the walk of a trajectory is short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAP = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.compile(r"`([a-z_/]+(?:\.py|/))(?:: ([\w.]+))?`")


def defined(path: Path) -> set[str]:
    """Functions, classes and `Class.method` of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in ast.walk(node) if hasattr(inner, "name")}
    return found


def test_files_and_names_of_the_map_exist() -> None:
    missing = []
    for path, name in NAMED.findall(MAP):
        bases = [base for base in (ROOT / "asyncrl", ROOT) if (base / path).exists()]
        if not bases or (name and name not in defined(bases[0] / path)):
            missing.append(f"{path}: {name}")
    assert not missing, missing


def test_a_trajectory_crosses_at_most_thirty_files() -> None:
    walk = MAP.partition("### A trajectory")[2].partition("###")[0]
    assert 15 < len({path for path, _ in NAMED.findall(walk) if path.endswith(".py")}) <= 30
