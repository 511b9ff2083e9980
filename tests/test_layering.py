"""Imports point down only (docs/architecture.md): walked, not believed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "asyncrl"

LEVELS = {
    **dict.fromkeys(("types", "errors", "config", "registry", "foreign"), 0),
    **dict.fromkeys(("algorithms", "buffer", "rollout"), 1),
    **dict.fromkeys(
        (
            "sandbox",
            "remote",
            "tools",
            "environments",
            "gateway",
            "rewards",
            "data",
            "transport",
            "store",
            "weights",
            "engines",
            "trainer",
            "observe",
        ),
        2,
    ),
    "roles": 3,
    "launch": 4,
    "cli": 4,
}
# (importer, imported) on one level, each with its reason.
EXCEPTIONS = {
    ("config", "errors"),
    ("registry", "errors"),
    ("foreign", "errors"),
    ("engines", "weights"),  # engines load what weights publishes
    ("transport", "weights"),  # messages name versions by WeightsRef
    ("trainer", "weights"),  # an export is written as a published version is
    ("trainer", "transport"),  # rows of a plan are messages
    ("tools", "sandbox"),  # python and shell run in it
    ("tools", "remote"),  # a retrieval server is asked as any other
    ("rewards", "sandbox"),  # so does the code that a reward tests
    ("rewards", "remote"),  # a judge is a model behind a URL
    ("environments", "remote"),  # so is a simulated user
    ("cli", "launch"),
}
OWNED = {"zmq": "transport/sockets.py", "ray": "launch/ray.py", "hydra": "cli.py", "omegaconf": "cli.py"}
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return found


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    here = package(path)
    if here == "__init__" or here == "__main__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "asyncrl":
            owner = OWNED.get(parts[0])
            assert owner in (None, str(path.relative_to(ROOT))), f"{name} may only be imported by {owner}"
        elif len(parts) > 1 and parts[1] != here:
            allowed = LEVELS[parts[1]] < LEVELS[here] or (here, parts[1]) in EXCEPTIONS
            assert allowed, f"{path.relative_to(ROOT)} (level {LEVELS[here]}) imports {name}"


def test_every_package_has_a_level() -> None:
    assert {package(path) for path in FILES} - {"__init__", "__main__"} <= LEVELS.keys()
