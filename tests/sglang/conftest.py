"""Real servers for tests. They are expensive (2 GB and 12 s or more each), so that at most two run at once:

`shared_server(family)` is one server per model for the whole session: leave it running, not paused, and load
weights before relying on them. `guarded` is one more, with keys. `sglang_server(model, *arguments)` starts
one for its module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from asyncrl.trainer.world import World
from tests.fakes.sglang_process import PYTHON, START_SECONDS, SGLangServer
from tests.sglang.conformance import Subject, Versions, embedded, served
from tests.sglang.models import FAMILIES, build

Start = Callable[..., SGLangServer]
Shared = Callable[[str], SGLangServer]
Named = Callable[[str], Versions]
KEYS = ("the-api-key", "the-admin-key")
MOST = 2
# One server per family, each started once: those of a stage, by family or module, run on the servers that the
# stages before have left. At the end of the second these are qwen3's, which is killed then, and qwen2's.
STAGES = (
    ("test_parsers",),
    ("qwen3",),
    ("qwen2", "test_collective", "test_traps", "test_version_check"),
    ("test_fatal_traps",),
    ("test_server_pool",),
    ("test_sleep",),
    ("test_experts",),
    ("test_adapters",),
    ("test_scorers",),
    ("test_training",),
    ("test_images",),
    ("test_shifts",),
    ("test_families",),
)


class Pool:
    """All servers of the session. Room for a new one is made by killing shared ones, the least
    recently used first."""

    def __init__(self, models: dict[str, Path], logs: Path) -> None:
        self.models = models
        self.logs = logs
        self.shared: dict[str, SGLangServer] = {}
        self.own: list[SGLangServer] = []
        self._started = 0

    def start(self, model: Path, *arguments: str, wait: bool = True) -> SGLangServer:
        self._make_room()
        server = self._spawn(model, *arguments, wait=wait)
        self.own.append(server)
        return server

    def share(self, family: str) -> SGLangServer:
        server = self.shared.pop(family, None)
        if server is None or not server.alive:
            self._make_room()
            server = self._spawn(self.models[family])
        self.shared[family] = server  # as the newest
        return server

    def stop_own(self) -> None:
        while self.own:
            self.own.pop().kill()

    def stop(self) -> None:
        self.stop_own()
        while self.shared:
            self.shared.popitem()[1].kill()

    def _make_room(self) -> None:
        for family, server in list(self.shared.items()):
            if sum(each_server.alive for each_server in (*self.shared.values(), *self.own)) >= MOST:
                self.shared.pop(family)
                server.kill()
        assert sum(each_server.alive for each_server in self.own) < MOST, (
            f"at most {MOST} servers at once: stop one first"
        )

    def _spawn(self, model: Path, *arguments: str, wait: bool = True) -> SGLangServer:
        self._started += 1
        return SGLangServer(model, self.logs / f"server-{self._started}.log", *arguments, wait=wait)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by family: "qwen2", "qwen3"."""
    directory = tmp_path_factory.mktemp("models")
    return {family: build(family, directory / family) for family in FAMILIES}


@pytest.fixture(scope="session")
def sglang_installed() -> None:
    if not PYTHON.exists():
        missing = f"there is no SGLang in {PYTHON.parents[1]}; `make sglang-cpu` builds it"
        if os.environ.get("CI") or os.environ.get("ASYNCRL_REQUIRE_SGLANG"):
            pytest.fail(missing)
        pytest.skip(missing)


@pytest.fixture(scope="session")
def pool(
    sglang_installed: None, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    pool = Pool(tiny_models, tmp_path_factory.mktemp("servers"))
    yield pool
    pool.stop()


@pytest.fixture
def alone(pool: Pool) -> None:
    """A run has servers of its own: those of other tests make room."""
    pool.stop()


@pytest.fixture(scope="session")
def shared_server(pool: Pool) -> Shared:
    return pool.share


@pytest.fixture(scope="session")
def guarded(pool: Pool) -> Iterator[SGLangServer]:
    """A second server of qwen2, with keys, a short queue and little KV memory. The last test that uses it may
    kill it."""
    keys = ("--api-key", KEYS[0], "--admin-api-key", KEYS[1])
    small = ("--max-running-requests=8", "--max-queued-requests=8", "--max-total-tokens=4096")
    server = pool.start(pool.models["qwen2"], *keys, *small)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def sglang_server(pool: Pool) -> Iterator[Start]:
    yield pool.start
    pool.stop_own()


@pytest.fixture(scope="session")
def versions_of(world: World, tmp_path_factory: pytest.TempPathFactory) -> Named:
    return cache(lambda family: Versions(family, tmp_path_factory.mktemp(family), world))


@pytest.fixture
def subject(request: pytest.FixtureRequest, tiny_models: dict[str, Path], versions_of: Named) -> Subject:
    """The engine that the parameter names: "torch-qwen2", "sglang-qwen2-retract"."""
    engine, family, *mode = request.param.split("-")
    if engine == "torch":
        return Subject(request.param, versions_of(family), embedded(tiny_models[family]))
    server = request.getfixturevalue("shared_server")(family)
    return Subject(request.param, versions_of(family), served(server.url, *mode))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on one server run together: see STAGES. A test that starts some may take as long as these may
    take to start."""
    positions = [at for at, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    for at in positions:
        if not items[at].get_closest_marker("timeout"):
            items[at].add_marker(pytest.mark.timeout(2 * START_SECONDS + 120))
    ordered = sorted((items[at] for at in positions), key=_stage)
    for at, item in zip(positions, ordered, strict=True):
        items[at] = item


def _stage(item: pytest.Item) -> int:
    name = _family(item) or item.path.stem
    return next(at for at, stage in enumerate(STAGES) if name in stage)


def _family(item: pytest.Item) -> str:
    """Of a conformance test; '' of any other."""
    callspec = getattr(item, "callspec", None)
    parameter = callspec.params.get("subject", "") if callspec else ""
    return parameter.split("-")[1] if isinstance(parameter, str) and "-" in parameter else ""
