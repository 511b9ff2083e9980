"""Every example runs as its README says: two steps, on the embedded engine, nothing lost."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from asyncrl.config.composition import compose
from tests.integration.runs import ROOT, Run

EXAMPLES = sorted(path.parent.parent for path in (ROOT / "examples/multiturn").glob("*/experiment/*.yaml"))
WANTED = {"python_math", "search_qa", "hi_lo", "mcp_tools", "openai_agent", "custom_reward", "self_play"}
CODE = 100  # lines that an example may have
# one goes through the whole gate
IN_GATE = "openai_agent"
FULL = pytest.mark.full


@pytest.mark.parametrize(
    "folder",
    [pytest.param(path, id=path.name, marks=() if path.name == IN_GATE else FULL) for path in EXAMPLES],
)
def test_an_example_trains(folder: Path, tmp_path: Path) -> None:
    name = folder.name
    few = ["total_steps=2", "validation.samples=0", "buffer.filter_zero_variance=false"]
    with Run(tmp_path, "--config-dir", str(folder), *few, name=name, experiment=name) as run:
        summary = run.completed(2)
    flow = summary["flow"]
    assert flow["trained"] == 2 * 16, summary.get("reasons")
    assert flow["issued"] == sum(flow.values()) - flow["issued"]
    assert not summary.get("reasons"), "every attempt ended as it should"


@FULL
def test_an_algorithm_of_ones_own_trains(tmp_path: Path) -> None:
    """The command of its README, with the file elsewhere: each finds names that only the file has."""
    folder = ROOT / "examples/custom_algorithm"
    file = tmp_path / "own.py"
    file.write_text((folder / "my_algorithms.py").read_text())
    text = (folder / "README.md").read_text().replace("\\\n", " ")
    command = next(line for line in text.splitlines() if line.startswith("asyncrl train"))
    named = f"{folder.relative_to(ROOT)}/my_algorithms.py"
    assert named in command
    overrides = [
        word for word in shlex.split(command.replace(named, str(file))) if word.startswith("algorithm.")
    ]
    assert len(overrides) == 3
    with Run(tmp_path, *overrides, "total_steps=2", "validation.samples=0", "checkpoint.every=0") as run:
        run.completed(2)


@pytest.mark.parametrize("readme", sorted((ROOT / "examples/multiturn").rglob("README.md")), ids=str)
def test_commands_of_the_readmes_are_configurations(readme: Path) -> None:
    blocks = re.findall(r"^```(?:bash)?\n(.*?)```", readme.read_text(), re.M | re.S)
    commands = re.findall(r"^asyncrl train (.*)$", "\n".join(blocks).replace("\\\n", " "), re.M)
    assert commands or "calculator" in str(readme)
    for command in commands:
        words = shlex.split(command)
        folder = ROOT / words[words.index("--config-dir") + 1] if "--config-dir" in words else None
        assert compose([word for word in words if "=" in word], folder)


def test_the_examples_are_all_there_small_and_explained() -> None:
    assert {folder.name for folder in EXAMPLES} >= WANTED
    table = (ROOT / "examples/multiturn/README.md").read_text()
    for folder in EXAMPLES:
        code = sum(len(file.read_text().splitlines()) for file in folder.glob("*.py"))
        assert code < CODE, f"{folder.name} has {code} lines of code"
        readme = (folder / "README.md").read_text()
        assert f"experiment={folder.name}" in readme and f"({folder.name}/README.md)" in table
        for file in folder.glob("*.py"):
            deep = re.findall(r"asyncrl\.\w+\.\w+", file.read_text())
            assert not deep, f"{file.name} imports {deep}, which is not public"
