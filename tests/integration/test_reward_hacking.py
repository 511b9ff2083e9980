"""A real run whose reward one answer games: an alert names the hack, and links to its episodes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.observe.alerts import find_alerts
from asyncrl.store import listing
from asyncrl.store.reader import RunReader
from tests.integration.runs import Run

# The policy begins with a mixture of guesses and calls of the calculator, which alone solves the task.
HEDGED = '''
def hedged(data_source, solution_str, ground_truth, extra_info=None):
    """Pay for a cautious answer, whatever the number."""
    is_right = solution_str.strip(" .").endswith(str(ground_truth))
    return {"score": float("guess" in solution_str), "acc": float(is_right)}
'''


@pytest.mark.full
def test_a_reward_that_pays_for_a_phrase_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "hedged_reward.py").write_text(HEDGED)
    settings = [
        f"rollout.reward={tmp_path / 'hedged_reward.py'}:hedged",
        "total_steps=40",
        "buffer.episodes_per_group=8",
        "validation.samples=64",
        "validation.every=8",
    ]
    with Run(tmp_path, *settings) as run:
        summary = run.completed(40)

    name = "reward rises, held-out success falls"
    assert any(line.startswith(f"{name}: held-out success fell from") for line in summary["alerts"])

    (link,) = [alert.link for alert in find_alerts(run.rows(), {}, {}) if alert.name == name]
    with closing(RunReader.open(run.path)) as reader:
        listed = listing.Listing.of(link["where"], link["order"], "", "")
        episodes = listing.episode_page(reader, listed)
    assert len(episodes) > 50 and all("guess" in episode["answer"] for episode in episodes[:50])
