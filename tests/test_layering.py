"""Imports go to a level below, or stay inside a package; files form no cycle. Walked, without exceptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.readability import bound_names

ROOT = Path(__file__).resolve().parents[1] / "asyncrl"

LEVELS = (
    ("layer_kernels",),
    ("types", "user_cache", "values", "model_class", "attention_rules", "state_layers"),
    ("errors",),
    ("registry", "config", "shrunk", "vision"),
    ("algorithms", "buffer", "conversation"),
    ("isolation", "planning", "weights", "store", "remote", "observe"),
    ("wire",),
    ("engines", "data"),
    ("tools", "rewards", "environments", "gateway", "runtime"),
    ("episodes",),
    ("coordinator", "rollout", "trainer", "server_supervisor"),  # processes: none imports another
    ("launch", "viewer"),
    ("commands",),
    ("api", "cli"),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
# Packages with few importers.
OWNED = {
    "zmq": ("wire/sockets.py",),
    "ray": ("launch/ray.py",),
    "hydra": ("config/composition.py",),
    "omegaconf": ("config/composition.py",),
}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module in the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


@cache  # not at import: every process of a test run collects this file, one runs it
def graph() -> dict[str, list[str]]:
    return {name: sorted(set(imports(path))) for name, path in MODULES.items()}


def package(module: str) -> str:
    """The part of a module's name that has a level; '' for the root and `__main__`."""
    parts = module.split(".")
    return "" if len(parts) == 1 or parts[1] == "__main__" else parts[1]


def test_every_package_has_a_level() -> None:
    assert {package(name) for name in MODULES} - {""} == LEVEL.keys()


def test_imports_go_to_a_level_below() -> None:
    wrong = [
        f"{here} imports {there}"
        for here, found in graph().items()
        for there in found
        if there in MODULES and package(here) and package(there) not in ("", package(here))
        if LEVEL[package(there)] >= LEVEL[package(here)]
    ]
    assert not wrong, "\n".join(wrong)


def test_some_libraries_have_one_importer() -> None:
    wrong = [
        f"{here} imports {there}"
        for here, found in graph().items()
        for there in found
        if (owners := OWNED.get(there.split(".")[0]))
        and MODULES[here] not in [ROOT / owner for owner in owners]
    ]
    assert not wrong, "\n".join(wrong)


def test_files_form_no_cycle() -> None:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name in done:
            return
        for there in graph()[name]:
            if there in MODULES and there != name:
                visit(there, (*above, name))
        done.add(name)

    for name in MODULES:
        visit(name, ())


def test_tools_and_tests_share_only_the_fakes() -> None:
    """Tools use `tests.fakes`, which use no tool. Other tests import the tools that they test."""
    tools = ROOT.parent / "tools"
    fakes = ROOT.parent / "tests/fakes"
    for path in (*tools.rglob("*.py"), *fakes.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = str(node.module) if isinstance(node, ast.ImportFrom) else ""
            if path.is_relative_to(tools):
                assert not module.startswith("tests.") or module.startswith("tests.fakes"), (
                    f"{path}: {module}"
                )
            else:
                assert not module.startswith("tools."), f"{path}: {module}"


def test_class_names_are_unique() -> None:
    owners: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(name)
    twice = {name: found for name, found in owners.items() if len(found) > 1}
    assert not twice, twice


# Words of the table in CONTRIBUTING.md that no good name contains. Formulas keep their letters, as does the
# configuration key `algorithm.prox`.
RETIRED = {"told", "likeliest", "dealt", "keeper", "keepers", "examine"}
LETTERS = {"mu", "prox"}
MAY_HAVE_LETTERS = ("algorithms/", "config/")


def test_retired_words_are_in_no_name() -> None:
    for folder in (ROOT, ROOT.parent / "tools", ROOT.parent / "tests"):
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder).as_posix()
            formulas = folder != ROOT or relative.startswith(MAY_HAVE_LETTERS)
            for name, line in bound_names(ast.parse(path.read_text())):
                words = {word.lower() for word in re.findall("[A-Z]?[a-z]+", name)}
                retired = words & (RETIRED if formulas else RETIRED | LETTERS)
                assert not retired, f"{path}:{line}: '{name}' has {retired}: see the table in CONTRIBUTING.md"


# Readings of the wall clock, which may jump: dates, how old a status is, the timeline's spans, for people.
WALL_CLOCK = {
    "commands/status.py",
    "conversation/chat.py",
    "coordinator/reporting.py",
    "gateway/completions.py",
    "gateway/responses.py",
    "observe/files.py",
    "observe/timeline.py",
    "observe/transcripts.py",
    "runtime/activity.py",
    "runtime/mirror.py",
    "runtime/weight_loader.py",
    "tools/snapshots.py",
}


def test_deadlines_and_durations_are_of_the_monotonic_clock() -> None:
    """No other file reads the wall clock: a clock that is set changes no lease, no deadline and no wait."""
    readings = {
        ("time", "time"),
        ("time", "time_ns"),
        ("datetime", "now"),
        ("datetime", "utcnow"),
        ("date", "today"),
    }
    found = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if (name, node.attr) in readings:
                    found.add(str(path.relative_to(ROOT)))
    assert found == WALL_CLOCK
