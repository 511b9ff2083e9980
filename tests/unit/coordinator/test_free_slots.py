"""Which worker gets an episode: what a look at all workers would choose."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.coordinator.workers import FreeSlots

workers = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 5), max_size=3).map(sorted)), max_size=6
)


@given(workers, st.lists(st.integers(-2, 6), max_size=20))
@settings(deadline=None)
def test_the_least_loaded_worker_with_weights_that_are_new_enough(
    given_workers: list[tuple[int, list[int]]], needs: list[int]
) -> None:
    free = {number: slots for number, (slots, _) in enumerate(given_workers)}
    versions = {number: worker_versions for number, (_, worker_versions) in enumerate(given_workers)}
    found = FreeSlots((number, free[number], versions[number]) for number in free)
    for needed in needs:
        fit = {n: [v for v in versions[n] if v >= needed] for n in free if free[n] > 0}
        fit = {n: fresh for n, fresh in fit.items() if fresh}
        best = max(fit, key=lambda n: free[n], default=None)  # of equals the first
        assert found.take_slot(needed) == (None if best is None else (best, fit[best][0]))
        if best is not None:
            free[best] -= 1
    assert bool(found) == any(free[n] > 0 and versions[n] for n in free)
