"""Finds the isolation that sandboxes have on this machine, and checks images for them."""

from __future__ import annotations

import asyncio
import functools
import logging
import tempfile
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.isolation.images import Image, find_image
from asyncrl.isolation.sandbox.base import ISOLATION, RunResult, SandboxError
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.isolation.wrapper import CANNOT_RUN

log = logging.getLogger("asyncrl.sandbox")
T = TypeVar("T")

DETECT_SECONDS = 30.0
SHELL_SECONDS = 5.0  # for a shell that does nothing; a part of DETECT_SECONDS


@dataclass(frozen=True)
class Isolation:
    """Describe the isolation of a sandbox. `enforced`: words of ISOLATION. `notes`: why the kernel refused
    the missing isolation."""

    enforced: frozenset[str]
    notes: str

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in ISOLATION if name not in self.enforced)


@functools.cache
def detect_isolation() -> Isolation:
    """Find the isolation of this machine's sandboxes. The first call blocks for the start of a sandbox (some
    40 ms). SandboxError: no sandbox starts."""

    async def start_jail() -> Isolation:
        async with Jail(require=()) as jail:
            return Isolation(jail.enforced, jail.notes)

    isolation = _run_blocking(start_jail())
    enforced_words = ", ".join(name for name in ISOLATION if name in isolation.enforced) or "nothing"
    log.info(
        "sandboxes on this machine isolate: %s%s",
        enforced_words,
        f" ({isolation.notes})" if isolation.missing else "",
    )
    return isolation


def _run_blocking(coroutine: Coroutine[None, None, T]) -> T:
    with ThreadPoolExecutor(1) as pool:  # the caller may be inside an event loop
        return pool.submit(asyncio.run, coroutine).result(DETECT_SECONDS)


@functools.cache
def detect_images(user: Literal["", "root"] = "") -> str:
    """Return why no sandbox of this machine can have an image, or "". Also blocks for the start of a
    sandbox."""
    with tempfile.TemporaryDirectory() as empty_directory:
        try:
            _run_blocking(_run_shell(Image("", empty_directory), user))
        except SandboxError as error:
            return str(error)
    return ""


def check_image(name: str, user: Literal["", "root"] = "") -> Image:
    """Find an image and start a sandbox with the image. ConfigError: one of the steps is impossible."""
    image = find_image(name)
    try:
        shell_result = _run_blocking(_run_shell(image, user))
    except SandboxError as error:
        raise ConfigError(f"image {name!r}: {error}") from error

    if shell_result.status == CANNOT_RUN:
        raise ConfigError(f"image {name!r} has no shell: {shell_result.output.strip()}")
    return image


async def _run_shell(image: Image, user: Literal["", "root"]) -> RunResult:
    async with Jail(require=(), image=image, user=user) as jail:
        return await jail.run("shell", ":", SHELL_SECONDS)


def check_isolation(require: str) -> frozenset[str]:
    """Read the words of `require`, an option of a tool or reward. ConfigError: a word is unknown, or this
    machine lacks the isolation."""
    required_words = frozenset(require.replace(",", " ").split())
    if unknown_words := sorted(required_words - set(ISOLATION)):
        raise ConfigError(
            f"require contains the unknown word {unknown_words[0]!r}; choose from: {' '.join(ISOLATION)}"
        )

    try:
        missing_words = sorted(required_words & set(detect_isolation().missing))
    except SandboxError as error:
        raise ConfigError(str(error)) from error

    if missing_words:
        raise ConfigError(
            f"this machine does not let the sandbox isolate {', '.join(missing_words)} "
            f"({detect_isolation().notes}); allow namespaces (docs/guides/tasks.md), or require less "
            "isolation"
        )
    return required_words
