"""What the map of the architecture names is there, and the walk of a trajectory is short; what the pages for
users of verl and TRL say of keys and defaults is so."""

from __future__ import annotations

import ast
import json
import re
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest

from asyncrl.config import parse

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


RECIPES = (ROOT / "CONTRIBUTING.md").read_text()


def test_there_is_a_recipe_for_all_that_is_added() -> None:
    added = re.findall(r"^- \*\*(.*?)\*\*:", RECIPES, re.M)
    assert {"A message", "A transport of weights", "A metric", "A configuration key"} <= set(added)


@pytest.mark.parametrize("text", [MAP, RECIPES], ids=["map", "recipes"])
def test_files_and_names_of_the_map_exist(text: str) -> None:
    missing = []
    for path, name in NAMED.findall(text):
        bases = [base for base in (ROOT / "asyncrl", ROOT) if (base / path).exists()]
        if not bases or (name and name not in defined(bases[0] / path)):
            missing.append(f"{path}: {name}")
    assert not missing, missing


def test_a_trajectory_crosses_at_most_thirty_files() -> None:
    walk = MAP.partition("### A trajectory")[2].partition("###")[0]
    assert 15 < len({path for path, _ in NAMED.findall(walk) if path.endswith(".py")}) <= 30


PAGES = {name: (ROOT / "docs" / f"from_{name}.md").read_text() for name in ("verl", "trl")}
RUN = parse({"name": "n", "model": {"path": "m"}, "data": {"train": "t"}})
SECTIONS = tuple(name for name in RUN.__struct_fields__ if isinstance(getattr(RUN, name), msgspec.Struct))
OURS = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.\w+|total_steps|resume)(?:=([^`]+))?`")


def ours(text: str) -> list[tuple[str, str]]:
    """Keys, and their values where given, of the last column but notes: all that have our sections' names."""
    return OURS.findall(text)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_keys_for_users_of_other_trainers_exist(page: str) -> None:
    columns = [row.split(" | ")[1] for row in page.splitlines() if row.count(" | ") == 2]
    keys = {key for column in columns for key, _ in ours(column)}
    assert len(keys) > 40
    for key in keys:
        attrgetter(key)(RUN)  # AttributeError: there is no such key


@pytest.mark.parametrize(("name", "least"), [("verl", 15), ("trl", 10)])
def test_defaults_for_users_of_other_trainers_are_ours(name: str, least: int) -> None:
    table = PAGES[name].partition("## Defaults that differ")[2].partition("##")[0]
    told = [
        (key, value) for row in table.splitlines() for key, value in ours(row.rpartition(" | ")[2]) if value
    ]
    assert len(told) > least
    for key, value in told:
        if key != "kl.where":  # off by default
            assert json.dumps(attrgetter(key)(RUN)).strip('"') == value, key


def test_metrics_that_the_page_for_users_of_verl_names_are_those_of_a_real_run() -> None:
    """The fixture: all names of `asyncrl train experiment=calculator`."""
    written = set((ROOT / "tests" / "fixtures" / "metric_names.txt").read_text().split())
    page = (ROOT / "docs" / "metrics.md").read_text()
    same, other, own = (part.partition("\n## ")[0] for part in page.split("\n## ")[1:])
    columns = [row.split("|")[1] for row in (same + own).splitlines() if row.startswith("| `")]
    columns += [row.split("|")[2] for row in other.splitlines() if row.startswith("| `")]
    named = {name for column in columns for text in re.findall(r"`([^`]+)`", column) for name in spread(text)}
    assert len(named) > 60 and not {name for name in named if name not in written}


def spread(text: str) -> list[str]:
    """a/{b,c}/* as all names that it stands for."""
    if found := re.search(r"\{([^}]*)\}", text):
        return [
            name
            for part in found[1].split(",")
            for name in spread(text[: found.start()] + part + text[found.end() :])
        ]
    text = text.replace("SOURCE", "all")
    return [text.replace("*", part) for part in ("mean", "max", "min")] if "*" in text else [text]
