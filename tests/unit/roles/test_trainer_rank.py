from __future__ import annotations

from asyncrl.roles.trainer_rank import performance


def test_only_what_happened_since_the_last_commit_is_timed() -> None:
    found = performance(4.0, {"update_actor": 2.0, "wait_data": 1.5, "wait_commit": 0.5}, tokens=1000)
    assert found.pop("perf/cpu_memory_used_gb") > 0
    assert found == {
        "timing_s/update_actor": 2.0,
        "timing_s/wait_data": 1.5,
        "timing_per_token_ms/update_actor": 2.0,
        "perf/time_per_step": 4.0,
    }


def test_a_batch_without_a_token_has_no_time_per_token() -> None:
    assert "timing_per_token_ms/update_actor" not in performance(1.0, {}, tokens=0)
