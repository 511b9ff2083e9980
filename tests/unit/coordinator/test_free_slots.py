"""Which worker gets an episode: what a look at all workers would choose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.coordinator import workers
from asyncrl.coordinator.workers import WorkerHandler

strategy = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 5), max_size=3).map(sorted)), max_size=6
)


class Peers(list[Any]):
    def remove_silent(self, now: float) -> None: ...


@given(strategy, st.lists(st.integers(-2, 6), max_size=20))
@settings(deadline=None)
def test_the_least_loaded_worker_with_weights_that_are_new_enough(
    given_workers: list[tuple[int, list[int]]], needs: list[int]
) -> None:
    free = {number: slots for number, (slots, _) in enumerate(given_workers)}
    versions = {number: worker_versions for number, (_, worker_versions) in enumerate(given_workers)}
    expected = []
    for needed in needs:
        fit = {n: [v for v in versions[n] if v >= needed] for n in free if free[n] > 0}
        fit = {n: usable for n, usable in fit.items() if usable}
        best = max(fit, key=lambda n: free[n], default=None)  # of equals the first
        if best is not None:
            expected.append((best, needed, fit[best][0]))
            free[best] -= 1

    engines = MagicMock(missing_server="", quarantined=lambda peer: False)
    engines.usable_versions = lambda peers: {peer: versions[peer] for peer in peers}
    engines.remote = True
    handler = WorkerHandler(MagicMock(), engines)
    handler.config.buffer.on_stale = "hold"  # the needed versions are in any order
    handler.config.buffer.groups_per_batch = 1
    handler.peers = Peers(  # type: ignore[assignment]
        SimpleNamespace(peer=number, free_slots=slots) for number, (slots, _) in enumerate(given_workers)
    )
    assigned = []

    def give_episode(worker: Any, episode: Any, sample: object, version: int, *_: object) -> None:
        worker.free_slots -= 1
        assigned.append((worker.peer, episode.needed, version))

    handler.give_episode = give_episode  # type: ignore[method-assign]
    episodes = [(needed, SimpleNamespace(needed=needed, group=0, member=0)) for needed in needs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "assignable_episodes", lambda buffer: iter(episodes))
        patch.setattr(workers, "is_kept", lambda *_: False)
        handler.assign_pending(0.0)
    assert assigned == expected and not handler.work_left
