from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import signal
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from asyncrl.trainer.world import World
    from tests.fakes.checked import Given

# A shell's jobs in the background ignore SIGINT, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The real standard error: while a test runs, pytest captures descriptor 2.
REAL_STDERR = pytest.StashKey[int]()
SECONDS_TO_TEAR_DOWN = 60  # after a test's own timeout

SLOW = ("sglang", "tests/integration", "tests/sglang", "tests/unit/trainer", "tests/unit/weights")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """This process as the only rank of a trainer."""
    import torch  # here: pytest's main process reads this file too, and runs no test under xdist

    from asyncrl.trainer.world import join_ranks, leave_ranks

    torch.set_num_threads(1)
    yield join_ranks(0, 1, device="cpu")
    leave_ranks()


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    from tests.fakes.chatml import save_tiny_chat_model

    return Path(save_tiny_chat_model(tmp_path_factory.mktemp("chat")))


@pytest.fixture
def given(tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """The inputs of a good run."""
    from tests.fakes.checked import Given

    return Given(tmp_path, chat_model, monkeypatch)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of images, for this session; see tests/fakes/images.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCRL_IMAGES", str(found := tmp_path_factory.mktemp("images")))
        yield found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` a file is run by one process. Files that share SGLang servers count as one."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.partition("::")[0])

    return FileScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REAL_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End this process, and print what each thread waits for, when a test does not end after its timeout.

    pytest-timeout interrupts the main thread once, by a signal. After that a test can wait forever: for a
    call in C, or where asyncio joins the threads of `asyncio.to_thread`, without a deadline in Python 3.11.
    """
    marker = item.get_closest_marker("timeout")
    # pytest-timeout is not installed where tests of sandboxes run pytest inside a container.
    timeout = marker.args[0] if marker else item.config.getoption("timeout", 300.0)
    if timeout and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(
            timeout + SECONDS_TO_TEAR_DOWN, file=item.config.stash[REAL_STDERR], exit=True
        )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**given))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: with quick ones at the end neither process waits long for the other."""
    items.sort(key=lambda item: _order(item.nodeid.partition("::")[0]))


@cache
def _order(file: str) -> list[bool]:
    return [not _group(file).startswith(slow) for slow in SLOW]


@cache
def _group(file: str) -> str:
    path = Path(file)
    return "sglang" if path.parent.name == "sglang" and path.stem != "test_training" else str(path)
