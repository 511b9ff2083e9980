"""A real run whose reward one answer games: an alert names the hack, and links to its episodes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.observe.alerts import find_alerts
from asyncrl.store import listing
from asyncrl.store.reader import RunReader
from tests.integration.runs import Run


@pytest.mark.full
def test_a_reward_that_pays_for_a_number_is_noticed(tmp_path: Path) -> None:
    settings = [
        "rollout.reward=tools/faults/rewards.py:lucky",
        "total_steps=48",
        "buffer.episodes_per_group=8",
        "validation.samples=128",
        "validation.every=8",
    ]
    with Run(tmp_path, *settings) as run:
        summary = run.completed(48)

    name = "held-out success fell"
    (line,) = [line for line in summary["alerts"] if line.startswith(f"{name}: from ")]
    assert "while the training reward rose from" in line and "the policy may game the reward" in line

    (link,) = [alert.link for alert in find_alerts(run.rows(), {}, {}) if alert.name == name]
    with closing(RunReader.open(run.path)) as reader:
        listed = listing.Listing.of(link["where"], link["order"], "", "")
        episodes = listing.episode_page(reader, listed)
    assert len(episodes) > 50 and all("guess 5" in episode["answer"] for episode in episodes[:50])
