"""Tasks: a repository in an image, an instruction, and tests that judge what an agent made of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncrl.types import Sample

TASK = "task"  # the key of extra_info that holds a Task


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes where an episode of a sample works. `image`: its digest, or a name. `directory`: where
    programs start ('': the image's). `workspace`: the directories that are judged (none: `directory`).
    Sizes are MiB, and 0 is the default of what uses it."""

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
    """Describes how a task is judged: the ground truth of its sample. `tests`: the directory of `test.sh`.
    `turn_green`: tests that fail before, and must pass; `stay_green`: tests that must go on to pass. Without
    either the script's own verdict counts."""

    tests: str
    seconds: float = 600.0
    environment: dict[str, str] = {}
    turn_green: tuple[str, ...] = ()
    stay_green: tuple[str, ...] = ()


class _Extra(msgspec.Struct):
    task: Task | None = None


_extra = msgspec.json.Decoder(_Extra).decode


def task_of(sample: Sample) -> Task | None:
    """Return the task of a sample, or None. ValueError where `extra_info.task` is none."""
    return _extra(sample.extra_info).task
