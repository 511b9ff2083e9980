"""Finds what sandboxes isolate on this machine, and which images they can have."""

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
SHELL_SECONDS = 5.0  # of them, for a shell that does nothing


@dataclass(frozen=True)
class Isolation:
    """The isolation that a sandbox gives. `holds`: words of ISOLATION. `notes`: why the kernel refused the
    others."""

    holds: frozenset[str]
    notes: str

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in ISOLATION if name not in self.holds)


@functools.cache
def detect_isolation() -> Isolation:
    """Blocks for the start of one sandbox (some 40 ms) the first time. SandboxError when none starts."""

    async def look() -> Isolation:
        async with Jail(require=()) as jail:
            return Isolation(jail.holds, jail.notes)

    found = _blocking(look())
    held = ", ".join(name for name in ISOLATION if name in found.holds) or "nothing"
    log.info("sandboxes of this machine isolate: %s%s", held, f" ({found.notes})" if found.missing else "")
    return found


def _blocking(work: Coroutine[None, None, T]) -> T:
    with ThreadPoolExecutor(1) as pool:  # the caller may be inside an event loop
        return pool.submit(asyncio.run, work).result(DETECT_SECONDS)


@functools.cache
def detect_images(user: Literal["", "root"] = "") -> str:
    """Return why no sandbox of this machine can have an image; "" if it can. Blocks for a start, too."""
    with tempfile.TemporaryDirectory() as empty:
        try:
            _blocking(_shell_of(Image("", empty), user))
        except SandboxError as error:
            return str(error)
    return ""


def check_image(name: str, user: Literal["", "root"] = "") -> Image:
    """Find an image that is to be used, and start a sandbox with it. ConfigError if either is impossible."""
    image = find_image(name)
    try:
        shell = _blocking(_shell_of(image, user))
    except SandboxError as error:
        raise ConfigError(f"image {name!r}: {error}") from error
    if shell.status == CANNOT_RUN:
        raise ConfigError(f"image {name!r} has no shell: {shell.output.strip()}")
    return image


async def _shell_of(image: Image, user: Literal["", "root"]) -> RunResult:
    async with Jail(require=(), image=image, user=user) as jail:
        return await jail.run("shell", ":", SHELL_SECONDS)


def check_isolation(require: str) -> frozenset[str]:
    """The words of `require`, an option of a tool or reward. ConfigError for an unknown word, and for what
    this machine cannot isolate."""
    required = frozenset(require.replace(",", " ").split())
    if unknown := sorted(required - set(ISOLATION)):
        raise ConfigError(f"require has {unknown[0]!r}; it takes words of: {' '.join(ISOLATION)}")
    try:
        missing = sorted(required & set(detect_isolation().missing))
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    if missing:
        raise ConfigError(
            f"this machine does not let the sandbox isolate {', '.join(missing)} "
            f"({detect_isolation().notes}); allow namespaces (docs/sandbox.md), or require less"
        )
    return required
