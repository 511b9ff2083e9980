"""Tasks: a repository in an image, an instruction, and tests that judge an agent's changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.isolation.images import find_image
from asyncrl.types import Sample

TASK_KEY = "task"  # the key of extra_info that holds a Task


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes the sandbox of a sample's episodes. `image`: digest or name. `directory`: where programs
    start ('': the image's). `workspace`: the directories that are judged (empty: `directory`). Sizes are in
    MiB; 0 stands for the default of the sandbox."""

    name: str
    image: str
    directory: str = ""
    workspace: tuple[str, ...] = ()
    user: Literal["", "root"] = ""
    environment: dict[str, str] = {}
    memory_mb: int = 0
    disk_mb: int = 0
    seconds: float = 0.0


class TaskTests(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes how a task is judged; stored as the sample's ground truth. `tests`: the directory of
    `test.sh`. `turn_green`: tests that fail at first, and must pass; `stay_green`: tests that must still
    pass. Without named tests the script's own verdict counts. `protected`: globs of names, or of whole paths,
    that are taken from the image when tests run."""

    tests: str
    seconds: float = 600.0
    environment: dict[str, str] = {}
    turn_green: tuple[str, ...] = ()
    stay_green: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[str, ...]:
        return self.turn_green + self.stay_green


UNNAMED_TESTS = (
    "their score is whatever test.sh reports, usually an exit code, which the code under test can fake by "
    "exiting with 0; name the tests in tests/config.json, and write a JUnit report (docs/guides/tasks.md, "
    "What is judged)"
)
"""Why a task without named tests is worth a warning, and what to do."""


class _Extra(msgspec.Struct):
    task: Any = None


_decode_extra = msgspec.json.Decoder(_Extra).decode


def task_of(sample: Sample) -> Task | None:
    """Return the task of a sample; None without a task, also if `task` is another object without an image.
    ValueError for a malformed task."""
    task_fields = _decode_extra(sample.extra_info_json).task
    return (
        msgspec.convert(task_fields, Task)
        if isinstance(task_fields, dict) and "image" in task_fields
        else None
    )


def check_task(sample: Sample, judged: bool) -> TaskTests | None:
    """Return the sample's tests. ConfigError if the image is missing, or, if `judged`, the tests are."""
    where = f"sample {sample.row}"
    with ConfigError.instead_of(ValueError, text=f"{where}: the task or its tests cannot be read"):
        task = task_of(sample)
        tests = msgspec.json.decode(sample.ground_truth_json, type=TaskTests) if judged and task else None

    if task is None:
        if judged:
            raise ConfigError(
                f"{where} is not a task, but rollout.reward judges tasks; set another reward "
                "(docs/guides/tasks.md)"
            )
        return None

    where = f"task {task.name}"
    with ConfigError.instead_of(ConfigError, text=where):
        find_image(task.image)

    if tests and not Path(tests.tests, "test.sh").is_file():
        raise ConfigError(
            f"{where}: {tests.tests}/test.sh, which judges the task, is missing; restore the script"
        )

    return tests
