"""When a keeper gives its server up, by what loads and looks tell it; the server is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import parse
from asyncrl.errors import AsyncrlError, ConfigError, EngineError
from asyncrl.keeper import keeper as engine_keeper
from asyncrl.keeper.keeper import Keeper
from asyncrl.runtime.weight_loader import LOAD_TRIES
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import WeightsRef
from asyncrl.wire.messages.engine import KeeperBeat
from asyncrl.wire.messages.shared import Loaded, WireMessage
from asyncrl.wire.sockets import Endpoints

REF = WeightsRef(PolicyVersion(1, 1), "somewhere")
FINE = Loaded(REF, "train", "sum", 0.1)
FAILED = Loaded(REF, "train", "", 0.1, "WeightsError: refused")


class Control:
    """In place of the link: what was sent."""

    def __init__(self) -> None:
        self.sent: list[WireMessage] = []

    async def send(self, message: WireMessage) -> None:
        self.sent.append(message)


class Server:
    """What `_look_after` sees. `labels`: what it says it holds, look by look; an error is raised."""

    broken = ""
    loaded = REF

    def __init__(self, *labels: str | Exception) -> None:
        self.labels, self.api = list(labels), self

    async def label(self) -> str:
        found = self.labels.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def kv_use(self) -> float | None:
        return len(self.labels) / 10


def keep(tmp_path: Path, act: Callable[[Keeper], Awaitable[Any]], **weights: Any) -> list[WireMessage]:
    """Run `act` on a keeper of a server that is up; returns what it told the coordinator."""
    engine = {"name": "sglang"}
    base: dict[str, Any] = {"name": "t", "model": {"path": "m"}, "data": {"train": "d"}, "engine": engine}
    config = parse(base | {"run_dir": str(tmp_path), "weights": weights})
    control = Control()

    async def main() -> None:
        keeper = Keeper(config, Endpoints("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), 0, "i")
        keeper._control = control  # type: ignore[assignment]
        keeper._server, keeper._healthy = Server(), True  # type: ignore[assignment]
        keeper._loads = engine_keeper.WeightLoader("train", keeper._timeline, 60.0, keeper._ready)
        await act(keeper)

    asyncio.run(main())
    return control.sent


async def report(keeper: Keeper, *answers: Loaded) -> None:
    for answer in answers:
        await keeper._report(answer)


def test_files_that_a_server_refuses_from_the_start_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 loads in a row failed; the last one: WeightsError: refused"):
        keep(tmp_path, lambda keeper: report(keeper, *[FAILED] * LOAD_TRIES))


@pytest.mark.parametrize(
    ("first", "weights", "failed"),
    [
        ([FINE], {}, FAILED),
        ([], {"transport": "collective"}, FAILED),
        ([], {}, msgspec.structs.replace(FAILED, lost=True)),
    ],
    ids=["later", "broadcast", "undelivered"],
)
def test_other_failures_are_given_the_time_of_a_load(
    tmp_path: Path, first: list[Loaded], weights: dict[str, str], failed: Loaded
) -> None:
    """A trainer that died takes its versions along, and comes back."""

    async def patient(keeper: Keeper) -> None:
        await report(keeper, *first, *[failed] * 10)

    keep(tmp_path, patient, deadline=60.0, **weights)

    async def at_last(keeper: Keeper) -> None:
        await report(keeper, *first, *[failed] * LOAD_TRIES)

    kind = EngineError if first else ConfigError
    with pytest.raises(kind, match="3 loads in a row"):
        keep(tmp_path, at_last, deadline=1e-9, **weights)


def test_a_success_or_a_newer_version_starts_the_count_anew(tmp_path: Path) -> None:
    superseded = msgspec.structs.replace(FAILED, superseded=True)
    two = [FAILED] * (LOAD_TRIES - 1)
    keep(tmp_path, lambda keeper: report(keeper, *two, superseded, *two, FINE, *two), deadline=1e-9)


def test_a_broken_server_is_out_of_service_at_once(tmp_path: Path) -> None:
    async def act(keeper: Keeper) -> None:
        keeper._server.broken = "half"  # type: ignore[union-attr, misc]
        await report(keeper, FAILED)

    sent = keep(tmp_path, act)
    assert isinstance(sent[0], KeeperBeat) and not sent[0].healthy and sent[1] == FAILED


def test_each_look_at_the_servers_memory_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_keeper, "CHECK_SECONDS", 0.0)

    async def act(keeper: Keeper) -> None:
        with pytest.raises(EngineError):
            await keeper._look_after(Server(*[REF.label] * 2, "other"))  # type: ignore[arg-type]
        await keeper._beat()
        await keeper._beat()

    sent = keep(tmp_path, act)
    assert [beat.kv_use for beat in sent if isinstance(beat, KeeperBeat)] == [0.0, None]


def test_another_model_shows_at_the_first_probe(tmp_path: Path) -> None:
    strange = Loaded(REF, "train", "sum", 0.1, probe_gap=2.5, probe_tokens=64)
    without = msgspec.structs.replace(FINE, unproven=True)
    for before in ([], [without]):  # the version came ahead of its probe
        with pytest.raises(ConfigError, match=r"computes another model.*2\.5"):
            keep(tmp_path, lambda keeper, before=before: report(keeper, *before, strange))
    keep(tmp_path, lambda keeper: report(keeper, FINE, strange))  # a gap that grows is a metric
    rounded = msgspec.structs.replace(strange, probe_noise=0.6)  # bfloat16
    keep(tmp_path, lambda keeper: report(keeper, rounded))


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        ([REF.label, "default"], "holds 'default' and not 'e1-v1'"),
        ([REF.label, *[EngineError("nobody there")] * 3], "no answer 3 times"),
        ([*[EngineError("busy")] * 2, REF.label, *[EngineError("gone")] * 3], "no answer 3 times: gone"),
    ],
    ids=["restarted", "silent", "silent for a moment, then for good"],
)
def test_a_server_that_is_gone_or_somebody_elses_is_given_up(
    tmp_path: Path, labels: list[str | Exception], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_keeper, "CHECK_SECONDS", 0.0)

    async def act(keeper: Keeper) -> None:
        await report(keeper, FINE)
        await keeper._look_after(Server(*labels))  # type: ignore[arg-type]

    with pytest.raises(AsyncrlError, match=complaint):
        keep(tmp_path, act)


def test_a_load_under_way_says_nothing_about_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unhealthy server would let the next one be paused as well."""
    monkeypatch.setattr(engine_keeper, "CHECK_SECONDS", 0.0)
    server = Server("old", "old", EngineError("end"), EngineError("end"), EngineError("end"))
    server.broken = "the load was not finished"
    healthy: list[bool] = []

    async def act(keeper: Keeper) -> None:
        keeper._loads.offer(REF)
        real = server.label

        async def label() -> str:
            healthy.append(keeper._healthy)
            return await real()

        server.label = label  # type: ignore[method-assign]
        await keeper._look_after(server)  # type: ignore[arg-type]

    with pytest.raises(EngineError, match="no answer"):
        keep(tmp_path, act)
    assert healthy[:3] == [True, True, True]
