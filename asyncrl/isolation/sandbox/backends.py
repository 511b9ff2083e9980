"""Creates sandboxes, and finds out by starting one, once per process, what they isolate on this machine."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.isolation.sandbox.base import ISOLATION, Sandbox, SandboxError, SandboxLimits
from asyncrl.isolation.sandbox.jail import Jail

log = logging.getLogger("asyncrl.sandbox")
SECONDS = 30.0


def new_sandbox(limits: SandboxLimits, require: Iterable[str]) -> Sandbox:
    """Make a sandbox that is not started yet. `require`: words of ISOLATION."""
    return Jail(limits, require=require)


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
    with ThreadPoolExecutor(1) as pool:  # the caller may be inside an event loop
        found = pool.submit(asyncio.run, _look()).result(SECONDS)
    held = ", ".join(name for name in ISOLATION if name in found.holds) or "nothing"
    log.info("sandboxes of this machine isolate: %s%s", held, f" ({found.notes})" if found.missing else "")
    return found


def check_isolation(require: str, where: str) -> frozenset[str]:
    """The words of `require`, an option of a tool or reward. ConfigError for an unknown word, and for what
    this machine cannot isolate."""
    required = frozenset(require.replace(",", " ").split())
    if unknown := sorted(required - set(ISOLATION)):
        raise ConfigError(f"{where}: require has {unknown[0]!r}; it takes words of: {' '.join(ISOLATION)}")
    try:
        missing = sorted(required & set(detect_isolation().missing))
    except SandboxError as error:
        raise ConfigError(f"{where}: {error}") from error
    if missing:
        raise ConfigError(
            f"{where}: this machine does not let the sandbox isolate {', '.join(missing)} "
            f"({detect_isolation().notes}); allow namespaces (docs/sandbox.md), or require less"
        )
    return required


async def _look() -> Isolation:
    async with Jail(require=()) as jail:
        return Isolation(jail.holds, jail.notes)
