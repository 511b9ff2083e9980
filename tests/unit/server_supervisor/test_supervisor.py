"""When a supervisor gives its server up, by what loads and looks tell it; the server is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch

import msgspec
import pytest
from aiohttp import web
from transformers import Qwen2Config

from asyncrl.config import parse
from asyncrl.engines.sglang.http import INVALID_LABEL
from asyncrl.engines.sglang.process import store_kv_tokens, stored_kv_tokens
from asyncrl.engines.sglang.server import Attached
from asyncrl.errors import AsyncrlError, ConfigError, EngineError
from asyncrl.runtime.probe_sampling import SAMPLE_COUNT, SAMPLE_TOKENS
from asyncrl.runtime.weight_loader import LOAD_TRIES
from asyncrl.server_supervisor import supervisor as engine_supervisor
from asyncrl.server_supervisor.supervisor import ServerSupervisor
from asyncrl.server_supervisor.versions import ServerVersions
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import Manifest, Probe, WeightsError, WeightsRef
from asyncrl.wire.messages.engine import SupervisorHeartbeat, SupervisorHello
from asyncrl.wire.messages.shared import Loaded, LoadWeights, Sleep, Slept, WireMessage
from asyncrl.wire.messages.worker import Leave
from asyncrl.wire.sockets import Endpoints
from tests.fakes.loop import settle
from tests.fakes.sglang import DONE, Script, event, scripted

REF = WeightsRef(PolicyVersion(1, 1), "somewhere")
FINE = Loaded(REF, "train", "sum", 0.1)
FAILED = Loaded(REF, "train", "", 0.1, "WeightsError: refused")


class Control:
    """In place of the link: what was sent."""

    def __init__(self) -> None:
        self.sent: list[WireMessage] = []

    async def send(self, message: WireMessage) -> None:
        self.sent.append(message)

    def close(self) -> None: ...


class Server:
    """A loader and its API. `labels`: what it says it holds, look by look; an error is raised."""

    broken = ""
    loaded = REF
    sleeping = SimpleNamespace(asleep=False, unknown_reason="")

    def __init__(self, *labels: str | Exception) -> None:
        self.labels = list(labels)
        self.api = self

    async def label(self) -> str:
        current_label = self.labels.pop(0)
        if isinstance(current_label, Exception):
            raise current_label
        return current_label

    async def kv_use(self) -> float | None:
        return len(self.labels) / 10


class Answers:
    """In place of a WeightLoader: what its loads come to. After them the run ends."""

    changed = None
    has_waiting = True
    is_pending = False

    def __init__(self, answers: Sequence[Loaded]) -> None:
        self._answers = [*answers]

    async def load_next(self) -> Loaded:
        if not self._answers:
            raise asyncio.CancelledError
        return self._answers.pop(0)


def keep(
    tmp_path: Path,
    act: Callable[[ServerSupervisor, ServerVersions], Awaitable[Any]],
    server: Server | None = None,
    **weights: Any,
) -> list[WireMessage]:
    """Run `act` on a supervisor of a server that is up; returns what it told the coordinator."""
    engine = {"name": "sglang"}
    base: dict[str, Any] = {"name": "t", "model": {"path": "m"}, "data": {"train": "d"}, "engine": engine}
    config = parse(base | {"run_dir": str(tmp_path), "weights": weights})
    control = Control()

    async def main() -> None:
        supervisor = ServerSupervisor(
            config, Endpoints("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), 0, "i", None
        )
        supervisor._control = control  # type: ignore[assignment]
        assert supervisor._versions is not None
        supervisor._server = supervisor._versions._server = server or Server()  # type: ignore[assignment]
        supervisor._healthy = True
        await act(supervisor, supervisor._versions)

    asyncio.run(main())
    return control.sent


@asynccontextmanager
async def attached_supervisor(
    directory: Path, url: str, shifts: bool = False
) -> AsyncIterator[ServerSupervisor]:
    """A supervisor that is given a server which is there already."""
    Qwen2Config(vocab_size=64, architectures=["Qwen2ForCausalLM"]).save_pretrained(directory)
    rollout = {"max_tokens": 64, "max_new_tokens": 64}
    base = {"name": "t", "model": {"path": str(directory)}, "data": {"train": "d"}, "rollout": rollout}
    config = parse(base | {"run_dir": str(directory), "engine": {"name": "sglang", "urls": [url]}})
    if shifts:
        engine = msgspec.structs.replace(config.engine, colocated=1)
        config = msgspec.structs.replace(config, engine=engine, total_steps=1)
    supervisor = ServerSupervisor(config, Endpoints("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), 0, "i", None)
    supervisor._control = Control()  # type: ignore[assignment]
    try:
        yield supervisor
    finally:
        await supervisor._shut_down([])


def answering(script: Script, **state: Any) -> None:
    """Has the script answer as an SGLang server of this state does: `paused`, `label`."""

    async def answer(request: web.Request) -> web.Response:
        body = script.requests[-1][1]
        match request.path:
            case "/ready":
                return web.Response(status=503 if state["paused"] else 200)
            case "/update_weight_version":
                state["label"] = body["new_version"]
            case "/continue_generation":
                state["paused"] = False
        return web.json_response(
            {
                "version": "0.5.23",
                "model_path": "/elsewhere",
                "architectures": ["Qwen2ForCausalLM"],
                "weight_version": state["label"],
            }
        )

    paths = "ready abort_request server_info model_info update_weight_version continue_generation"
    script.answers |= {f"/{path}": answer for path in paths.split()}


@pytest.mark.parametrize(("paused", "label"), [(True, INVALID_LABEL), (False, "e1-v1")])
async def test_what_a_load_left_whose_supervisor_died_is_no_version(
    tmp_path: Path, paused: bool, label: str
) -> None:
    """A new supervisor of such a server finds it paused, with the label of the version before."""
    async with scripted() as script, attached_supervisor(tmp_path, script.url) as supervisor:
        answering(script, paused=paused, label="e1-v1")
        server = await supervisor._start_server()
        assert server.model.weight_version == await server.api.weight_label() == label
        paths = [path for path, _, _ in script.requests]
        if paused:  # before anything samples
            assert paths.index("/update_weight_version") < paths.index("/continue_generation")
        await server.api.close()


async def test_a_server_whose_loader_cannot_be_made_is_disconnected(tmp_path: Path) -> None:
    async with scripted() as script:
        answering(script, paused=False, label="e1-v1")
        async with attached_supervisor(tmp_path, script.url) as supervisor:
            unmade = patch(
                "asyncrl.server_supervisor.versions.build_loader", side_effect=ConfigError("no files")
            )
            with unmade as called, pytest.raises(ConfigError, match="no files"):
                await supervisor._keep_server()
            assert supervisor._server is None  # no beat has told of it
        server = called.call_args.args[2]
        assert server.api._http_session is None


async def test_a_run_without_training_samples_nothing_for_the_test(tmp_path: Path) -> None:
    async with scripted() as script, attached_supervisor(tmp_path, script.url) as supervisor:
        answering(script, paused=False, label="e1-v1")
        versions = supervisor._versions
        assert versions is not None
        versions._config = msgspec.structs.replace(versions._config, total_steps=0)
        server = await supervisor._start_server()
        with patch("asyncrl.server_supervisor.versions.build_loader", return_value=AsyncMock()):
            await versions.attach_server(server, "i")

        versions._weight_loader.compared_probe = Probe(((7, 8, 9),), ((-1.0, -1.0),))
        versions.sample_version(FINE, supervisor._control.send)
        assert versions._probe_sampling is None
        await server.api.close()


async def test_a_loaded_version_is_sampled_as_workers_sample_turns(tmp_path: Path) -> None:
    async with scripted() as script, attached_supervisor(tmp_path, script.url) as supervisor:
        answering(script, paused=False, label="e1-v1")
        finish = {"type": "length", "length": SAMPLE_TOKENS}
        script.streams(event(range(SAMPLE_TOKENS), SAMPLE_TOKENS, REF.version.label, finish), DONE)
        versions = supervisor._versions
        assert versions is not None
        server = await supervisor._start_server()
        with patch("asyncrl.server_supervisor.versions.build_loader", return_value=AsyncMock()):
            await versions.attach_server(server, "i")

        versions.sample_version(FAILED, supervisor._control.send)
        versions.sample_version(FINE, supervisor._control.send)  # not compared with the trainer
        versions._weight_loader.compared_probe = Probe(((7, 8, 9),), ((-1.0, -1.0),))
        versions.sample_version(FINE, supervisor._control.send)
        assert versions._probe_sampling is not None and versions._probe_sampling._task is not None
        await asyncio.wait([versions._probe_sampling._task])
        await server.api.close()

    sampled = supervisor._control.sent  # type: ignore[attr-defined]
    assert {message.version for message in sampled[:-1]} == {REF.version} and sampled[-1] == Leave()
    sequences = [sequence for message in sampled[:-1] for sequence in message.sequences]
    assert len(sequences) == SAMPLE_COUNT
    assert {sequence.ids[-SAMPLE_TOKENS:] for sequence in sequences} == {tuple(range(SAMPLE_TOKENS))}
    requests = [body for path, body, _ in script.requests if path == "/generate"]
    assert len(requests) == SAMPLE_COUNT and all(body["return_logprob"] for body in requests)
    assert {body["sampling_params"]["max_new_tokens"] for body in requests} == {SAMPLE_TOKENS}


def report(*answers: Loaded) -> Callable[[ServerSupervisor, ServerVersions], Awaitable[Any]]:
    async def act(supervisor: ServerSupervisor, versions: ServerVersions) -> None:
        with patch.object(versions, "_weight_loader", Answers(answers)), suppress(asyncio.CancelledError):
            await supervisor._load_versions(versions)

    return act


def test_files_that_a_server_refuses_from_the_start_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 loads in a row failed; last error: WeightsError: refused"):
        keep(tmp_path, report(*[FAILED] * LOAD_TRIES))


@pytest.mark.parametrize(
    ("first", "weights", "failed"),
    [
        ([FINE], {}, FAILED),
        ([], {"transport": "collective"}, FAILED),
        ([], {}, msgspec.structs.replace(FAILED, lost=True)),
        ([], {}, msgspec.structs.replace(FAILED, process_failed=True)),
    ],
    ids=["later", "broadcast", "undelivered", "its process"],
)
def test_other_failures_are_given_the_time_of_a_load(
    tmp_path: Path, first: list[Loaded], weights: dict[str, str], failed: Loaded
) -> None:
    """A trainer that died takes its versions along, and comes back."""
    keep(tmp_path, report(*first, *[failed] * 10), deadline=60.0, **weights)
    kind = EngineError if first or failed.process_failed else ConfigError
    with pytest.raises(kind, match="3 loads in a row"):
        keep(tmp_path, report(*first, *[failed] * LOAD_TRIES), deadline=1e-9, **weights)


def test_a_success_or_a_newer_version_starts_the_count_anew(tmp_path: Path) -> None:
    postponed = msgspec.structs.replace(FAILED, postponed=True)
    two = [FAILED] * (LOAD_TRIES - 1)
    keep(tmp_path, report(*two, postponed, *two, FINE, *two), deadline=1e-9)


def test_a_broken_server_is_out_of_service_at_once(tmp_path: Path) -> None:
    server = Server()
    server.broken = "half"
    sent = keep(tmp_path, report(FAILED), server)
    assert isinstance(sent[0], SupervisorHeartbeat) and not sent[0].healthy and sent[1] == FAILED


def test_each_look_at_the_servers_memory_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "CHECK_SECONDS", 0.0)

    async def act(supervisor: ServerSupervisor, versions: ServerVersions) -> None:
        with pytest.raises(WeightsError):
            await supervisor._watch_server(supervisor._server)  # type: ignore[arg-type]
        await supervisor._send_heartbeat()
        await supervisor._send_heartbeat()

    sent = keep(tmp_path, act, Server(*[REF.label] * 2, "other"))
    assert [beat.kv_use for beat in sent if isinstance(beat, SupervisorHeartbeat)] == [0.0, None]


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        ([REF.label, "default"], "holds 'default' instead of 'e1-v1'"),
        ([REF.label, *[EngineError("nobody there")] * 3], "its server failed to answer 3 times in a row"),
        (
            [*[EngineError("busy")] * 2, REF.label, *[EngineError("gone")] * 3],
            "its server failed to answer 3 times in a row: gone",
        ),
    ],
    ids=["restarted", "silent", "silent for a moment, then for good"],
)
def test_a_server_that_is_gone_or_somebody_elses_is_given_up(
    tmp_path: Path, labels: list[str | Exception], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "CHECK_SECONDS", 0.0)

    async def act(supervisor: ServerSupervisor, versions: ServerVersions) -> None:
        await report(FINE)(supervisor, versions)
        await supervisor._watch_server(supervisor._server)  # type: ignore[arg-type]

    with pytest.raises(AsyncrlError, match=complaint):
        keep(tmp_path, act, Server(*labels))


def test_a_load_under_way_says_nothing_about_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unhealthy server would let the next one be paused as well."""
    monkeypatch.setattr(engine_supervisor, "CHECK_SECONDS", 0.0)
    server = Server("old", "old", EngineError("end"), EngineError("end"), EngineError("end"))
    server.broken = "the load was not finished"
    healthy: list[bool] = []

    async def act(supervisor: ServerSupervisor, versions: ServerVersions) -> None:
        versions.take_message(LoadWeights(REF, "train"))
        real = server.label

        async def label() -> str:
            healthy.append(supervisor._healthy)
            return await real()

        server.label = label  # type: ignore[method-assign]
        await supervisor._watch_server(supervisor._server)  # type: ignore[arg-type]

    with pytest.raises(EngineError, match="failed to answer"):
        keep(tmp_path, act, server)
    assert healthy[:3] == [True, True, True]


# -- shifts ------------------------------------------------------------------------------------------------


class Sleeper(Server):
    """Falls asleep, unless `fails`."""

    fails = ""
    url = "http://server"
    description = "a server"

    def __init__(self, *labels: str | Exception) -> None:
        super().__init__(*labels)
        self.sleeping = SimpleNamespace(asleep=False, unknown_reason="")
        self.done: list[str] = []

    async def sleep(self) -> None:
        self.sleeping.unknown_reason = self.fails
        if self.fails:
            raise EngineError(self.fails)
        self.sleeping.asleep = True
        self.done.append("sleep")

    async def load(self, ref: WeightsRef) -> Manifest:
        self.done.append(ref.label)
        self.loaded = ref
        self.sleeping.asleep = False
        return Manifest(ref.version, (), 0, "sum")


async def answers(versions: ServerVersions, count: int) -> list[WireMessage]:
    async with asyncio.timeout(10):
        return [await versions.next_answer() for _ in range(count)]


def test_orders_are_carried_out_as_they_came_and_a_version_is_loaded_again_after_a_sleep(
    tmp_path: Path,
) -> None:
    server = Sleeper()

    async def act(supervisor: ServerSupervisor, versions: ServerVersions) -> None:
        for orders, wanted in (
            ((LoadWeights(REF, "train"),), [Loaded]),
            ((LoadWeights(REF, "train"), Sleep(1), Sleep(1)), [Slept]),  # too late to be loaded
            ((Sleep(1), LoadWeights(REF, "train")), [Slept, Loaded]),  # repeated, and then the shift's end
        ):
            for order in orders:
                versions.take_message(order)
            received = await answers(versions, len(wanted))
            assert [type(message) for message in received] == wanted
            assert not any(message.error for message in received)  # type: ignore[attr-defined]
        assert server.done == [REF.label, "sleep", "sleep", REF.label]

    keep(tmp_path, act, server)


def test_a_server_of_which_nobody_knows_what_it_holds_is_given_up(tmp_path: Path) -> None:
    server = Sleeper()
    server.fails = "falling asleep was not finished"

    async def act(supervisor: ServerSupervisor, versions: ServerVersions) -> None:
        versions.take_message(Sleep(3))
        with pytest.raises(EngineError, match="engine 0: falling asleep was not finished"):
            await supervisor._load_versions(versions)

    beat, slept = keep(tmp_path, act, server)
    assert isinstance(beat, SupervisorHeartbeat) and not beat.healthy
    assert isinstance(slept, Slept) and slept.number == 3 and slept.error


def test_the_memory_of_a_server_that_sleeps_is_not_asked_for(tmp_path: Path) -> None:
    server = Sleeper(REF.label)
    server.sleeping.asleep = True

    async def act(supervisor: ServerSupervisor, versions: ServerVersions) -> None:
        assert await versions.check_server()
        await supervisor._send_heartbeat()
        await supervisor._send_hello()

    beat, hello = keep(tmp_path, act, server)
    assert isinstance(beat, SupervisorHeartbeat) and beat.healthy and beat.kv_use is None
    assert isinstance(hello, SupervisorHello)


async def test_the_first_server_of_a_run_starts_at_once_and_later_ones_when_there_is_a_version(
    tmp_path: Path,
) -> None:
    async with attached_supervisor(tmp_path, "http://nowhere", shifts=True) as supervisor:
        assert supervisor._versions is not None and not supervisor._versions.asleep
    store_kv_tokens(tmp_path / "t", 0, 4096)
    store_kv_tokens(tmp_path / "t", 0, 1024)  # less was free then
    assert stored_kv_tokens(tmp_path / "t", 0) == 4096
    async with (
        asyncio.timeout(10),
        attached_supervisor(tmp_path, "http://nowhere", shifts=True) as supervisor,
    ):
        control = supervisor._control
        versions = supervisor._versions
        started = asyncio.Event()
        assert versions is not None

        async def start() -> Attached:
            started.set()
            raise EngineError("a start")

        with patch.object(supervisor, "_start_server", start):
            task = asyncio.create_task(supervisor._keep_server())
            await supervisor._send_hello()
            versions.take_message(Sleep(7))
            await settle()
            await supervisor._send_heartbeat()
            hello, slept, beat = control.sent  # type: ignore[attr-defined]
            assert isinstance(hello, SupervisorHello) and not hello.url
            assert isinstance(beat, SupervisorHeartbeat) and not beat.starting, (
                "a trainer that hangs would be waited for"
            )
            assert isinstance(slept, Slept) and slept.number == 7 and not slept.error
            assert not started.is_set()
            versions.take_message(LoadWeights(REF, "train"))
            with pytest.raises(EngineError, match="a start"):
                await task
            assert not versions.asleep  # it takes memory from now on
