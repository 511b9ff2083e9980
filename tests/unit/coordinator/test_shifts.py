from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.coordinator.shifts import ShiftHandler
from asyncrl.errors import ConfigError


def config(**changed: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "name": "t",
        "model": {"path": "m"},
        "data": {"train": "d"},
        "engine": {"colocated": 1},
    }
    for section, keys in changed.items():
        tree[section] = tree.get(section, {}) | keys
    return parse(tree)


def test_engines_idle_once_all_workers_have_said_so_twice() -> None:
    """A worker says how long its engine has sampled now and then only: silence in between is no idleness."""
    workers = [SimpleNamespace(heartbeat=SimpleNamespace(busy_s=0.0), heartbeat_at=0.0) for _ in range(2)]
    handlers: Any = SimpleNamespace(peers=workers, supervisors=[], remote=False)
    state: Any = MagicMock()
    handler = ShiftHandler(state, handlers, handlers, handlers, handlers, lambda message: None)

    def beat(worker: int, at: float, busy: float) -> float:
        workers[worker].heartbeat_at = at
        workers[worker].heartbeat.busy_s = busy
        return handler._engine_idle_seconds()

    assert beat(0, 10.0, 3.0) <= 0 and beat(1, 10.2, 3.0) <= 0
    assert beat(0, 10.5, 3.0) <= 0.3 and beat(1, 10.7, 3.5) <= 0
    assert beat(0, 11.0, 3.0) <= 0.3 and beat(1, 11.2, 3.5) == pytest.approx(0.3)
    assert beat(0, 12.0, 3.0) == pytest.approx(0.5)
    workers.clear()
    assert handler._engine_idle_seconds() < 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rollout": {"workers": 2}, "trainer": {"ranks": 2}}, "rollout.workers (2), or 0"),
        ({"rollout": {"workers": 2}, "engine": {"colocated": 2}}, "need 2 devices, but trainer.ranks=1"),
        ({"engine": {"colocated": 1, "name": "sglang", "tp": 2}}, "need 2 devices"),
        ({"engine": {"colocated": 1, "name": "sglang", "urls": ["http://a:1"]}}, "engine.urls"),
        ({"engine": {"name": "sglang"}, "weights": {"transport": "collective"}}, "transport=disk"),
        ({"weights": {"full_every": 2}}, "full_every=1"),
        ({"launch": {"kind": "ray"}}, "launch.kind=local"),
    ],
)  # fmt: skip
def test_what_shifts_do_not_work_with_is_refused(changed: dict[str, Any], said: str) -> None:
    assert config().shifts and not config(engine={"colocated": 0}).shifts
    with pytest.raises(ConfigError) as refused:
        config(**changed)
    assert said in str(refused.value)
