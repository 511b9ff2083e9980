"""What this machine lets a sandbox keep from its code: looked up by starting one, once per process."""

from __future__ import annotations

import asyncio
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.isolation.sandbox import wire
from asyncrl.isolation.sandbox.box import Sandbox, SandboxError

log = logging.getLogger("asyncrl.sandbox")
SECONDS = 30.0


@dataclass(frozen=True)
class Abilities:
    """`holds`: of wire.HOLDS. `notes`: what the kernel said to the rest."""

    holds: frozenset[str]
    notes: str

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in wire.HOLDS if name not in self.holds)


@functools.cache
def abilities() -> Abilities:
    """Blocks for the start of one sandbox (some 40 ms) the first time. SandboxError when none starts."""
    with ThreadPoolExecutor(1) as pool:  # the caller may be inside an event loop
        found = pool.submit(asyncio.run, _look()).result(SECONDS)
    held = ", ".join(name for name in wire.HOLDS if name in found.holds) or "nothing"
    log.info("sandboxes of this machine isolate: %s%s", held, f" ({found.notes})" if found.missing else "")
    return found


def demand(words: str, where: str) -> frozenset[str]:
    """`require` of a tool or reward, as words in one text. ConfigError for a word that is none, and for what
    this machine does not isolate."""
    wanted = frozenset(words.replace(",", " ").split())
    if unknown := sorted(wanted - set(wire.HOLDS)):
        raise ConfigError(f"{where}: require has {unknown[0]!r}; it takes words of: {' '.join(wire.HOLDS)}")
    try:
        missing = sorted(wanted & set(abilities().missing))
    except SandboxError as error:
        raise ConfigError(f"{where}: {error}") from error
    if missing:
        raise ConfigError(
            f"{where}: this machine does not let the sandbox isolate {', '.join(missing)} "
            f"({abilities().notes}); allow namespaces (docs/sandbox.md), or require less"
        )
    return wanted


async def _look() -> Abilities:
    async with Sandbox(require=()) as box:
        return Abilities(box.holds, box.notes)
