"""Describes the differences between the supported SGLang versions. The rest of the protocol is the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from asyncrl.engines.sglang.http import PauseMode, ServerApi
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.weights.manifest import WeightsError

CLEANUP_SECONDS = 5.0  # for a server that may be stuck to end a session


@dataclass(frozen=True)
class Dialect:
    """The protocol of one version. `modes`: what it can do with requests under way at an update. `sessions`:
    it accepts broadcast weights within a session only, of which there is one at a time."""

    modes: tuple[PauseMode, ...]
    sessions: bool

    @asynccontextmanager
    async def update(self, server: ServerApi) -> AsyncIterator[None]:
        """To be entered around the calls that change weights through a process group."""
        if not self.sessions:
            yield
            return
        try:
            await server.begin_update()
        except WeightsError:  # one is open: its owner died
            await server.end_update()
            await server.begin_update()
        try:
            yield
        except BaseException:
            with suppress(AsyncrlError):  # the error of the body says more
                await server.end_update(CLEANUP_SECONDS)
            raise
        await server.end_update()


OLD = Dialect(("in_place", "abort"), sessions=False)  # cannot empty its cache while retracted requests wait
NEW = Dialect(("in_place", "retract", "abort"), sessions=True)
DIALECTS: Mapping[str, Dialect] = {"0.5.20": OLD, "0.5.22": NEW, "0.5.23": NEW}


def dialect_of(version: str, url: str) -> Dialect:
    """ConfigError for a version that the project does not know."""
    try:
        return DIALECTS[version]
    except KeyError:
        known = ", ".join(DIALECTS)
        raise ConfigError(f"server {url} runs SGLang {version}; supported are {known}") from None
