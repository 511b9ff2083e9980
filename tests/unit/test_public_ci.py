"""The workflows, issue forms and templates of a public host are readable, and what they name is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl import cli

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ISSUE_FORMS = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
PAGES = [*(ROOT / ".github").rglob("*.yml"), *(ROOT / ".github").rglob("*.md")]


def jobs_of(workflow: Path) -> dict[str, Any]:
    return yaml.safe_load(workflow.read_text())["jobs"]


def commands_of(workflow: Path) -> list[str]:
    """Return the lines of all steps that run something."""
    steps = [step for job in jobs_of(workflow).values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_only_has_limits_and_names_what_is_there(workflow: Path) -> None:
    tree = yaml.safe_load(workflow.read_text())
    assert tree["permissions"] == {"contents": "read"} and "secrets" not in workflow.read_text()
    assert tree["concurrency"]["cancel-in-progress"] is True
    assert all(job["timeout-minutes"] <= 180 for job in jobs_of(workflow).values())
    assert all("permissions" not in job for job in jobs_of(workflow).values())

    for action in re.findall(r"uses: *(\S+)", workflow.read_text()):
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", action), f"{action}: not pinned to a major version"

    (phony_targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    commands = commands_of(workflow)
    assert commands
    for command in commands:
        program, *arguments = command.split()
        if program == "make":
            assert arguments[0] in phony_targets.split(), command
        if program.endswith("/asyncrl"):
            assert arguments[0] in cli.COMMANDS, command
        if program.startswith("."):
            assert (ROOT / program).is_file(), command


def test_the_workflows_run_checks_tests_gate_site_and_package() -> None:
    commands = {command for workflow in WORKFLOWS for command in commands_of(workflow)}
    assert {"make check", "make quick", ".ci/run", "make site", "make package"} <= commands


def test_python_versions_are_those_of_the_package_and_of_the_documentation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    versions = [
        name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(f"{prefix}3.")
    ]
    assert project["requires-python"] == f">={versions[0]}"

    matrices = {
        (workflow.stem, name): job["strategy"]["matrix"]["python"]
        for workflow in WORKFLOWS
        for name, job in jobs_of(workflow).items()
        if "strategy" in job
    }
    assert matrices == {("test", "quick"): versions, ("package", "demo"): versions}

    for page in ("README.md", "docs/start/install.md"):
        sentence = f"Python {', '.join(versions[:-1])} or {versions[-1]}"
        assert sentence in (ROOT / page).read_text(), page


@pytest.mark.parametrize("form", ISSUE_FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_the_host_asks_for(form: Path) -> None:
    tree = yaml.safe_load(form.read_text())
    assert tree["name"] and tree["description"] and tree["labels"]
    fields = [field for field in tree["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    names = [field["id"] for field in fields]
    assert names and len(names) == len(set(names))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_and_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"`asyncrl ([a-z]+)", text)) <= {*cli.COMMANDS}
    missing = [name for name in re.findall(r"[\w/-]*\w\.md\b", text) if not (ROOT / name).exists()]
    assert [name for name in missing if name != "gpu-report/report.md"] == []
