"""What differs between the SGLang versions that the project speaks to, behind one seam.

It is chosen from the version that a server reports. The rest of the protocol is the same in all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from asyncrl.engines.sglang.http import PauseMode, ServerApi
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.weights.manifest import WeightsError

CLEANUP_SECONDS = 5.0  # for a server that may be stuck to end a session


class Dialect(Protocol):
    """How to speak to one version. `modes`: what it can do with requests under way at an update."""

    @property
    def modes(self) -> tuple[PauseMode, ...]: ...

    def update(self, server: ServerApi) -> AbstractAsyncContextManager[None]:
        """To be entered around the calls that change weights through a process group."""


class Plain:
    """0.5.20: every such call stands for itself. It cannot empty its cache while retracted requests wait."""

    modes: tuple[PauseMode, ...] = ("in_place", "abort")

    def update(self, server: ServerApi) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class Sessions:
    """0.5.22 and later: they are accepted within a session only, of which there is one at a time."""

    modes: tuple[PauseMode, ...] = ("in_place", "retract", "abort")

    @asynccontextmanager
    async def update(self, server: ServerApi) -> AsyncIterator[None]:
        try:
            await server.begin_update()
        except WeightsError:  # one is open: its owner died
            await server.end_update()
            await server.begin_update()
        try:
            yield
        except BaseException:
            await _end_quietly(server)
            raise
        await server.end_update()


DIALECTS: Mapping[str, Dialect] = {"0.5.20": Plain(), "0.5.22": Sessions(), "0.5.23": Sessions()}


def dialect_of(version: str, url: str) -> Dialect:
    """ConfigError for a version that the project does not know."""
    try:
        return DIALECTS[version]
    except KeyError:
        known = ", ".join(DIALECTS)
        raise ConfigError(f"server {url} runs SGLang {version}; supported are {known}") from None


async def _end_quietly(server: ServerApi) -> None:
    """The error that is on its way says more than one about the session."""
    try:
        await server.end_update(CLEANUP_SECONDS)
    except AsyncrlError:
        return
