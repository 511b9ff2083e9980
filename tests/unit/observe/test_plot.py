"""run.png from metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.observe.metrics import REWARD, SAMPLED
from asyncrl.observe.plot import draw, figure

ROWS = [
    {"training/step": 1.0, "time_s": 10.0, "timing_s/step": 9.0, REWARD: 0.2, "staleness/lag/max": 0.0},
    {"training/step": 2.0, "time_s": 20.0, "timing_s/step": 9.0, REWARD: 0.9, "staleness/lag/max": 1.0},
    {"training/step": 3.0, "rollout/component/near/mean": 0.0, "val-aux/all/sampled/near/mean@1": 0.5},
    # written after step 2, by a validation of the first weights
    {"training/step": 0.0, "time_s": 25.0, SAMPLED: 0.25},
    # step 2 again, after a crash
    {"training/step": 2.0, "time_s": 70.0, "timing_s/step": 9.0, REWARD: 0.5, "flow/dropped": 3.0},
    {
        "training/step": 2.0,
        "time_s": 90.0,
        SAMPLED: 0.75,
        "rollout/attempts_failed/deadline": 4.0,
        "rollout/attempts_failed/tool_error": 0.0,
    },
]


def panels(rows: list[dict[str, float]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Chart -> label -> points."""
    return {
        axes.get_title(loc="left"): {
            str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
            for line in axes.lines
        }
        for axes in figure("a", rows).axes
    }


def test_x_is_the_step_that_was_judged_and_a_repeated_step_counts_once() -> None:
    found = panels(ROWS)
    assert found["Reward, before shaping"] == {"reward": [(1, 0.2), (2, 0.5)]}
    assert found["Success, held out"] == {"success (sampled)": [(0, 0.25), (2, 0.75)]}
    assert found["Attempts that failed"] == {"deadline": [(2, 4)]}  # and no kind that did not happen
    assert found["Flow, episodes"] == {"dropped": [(2, 3)]}
    assert found["Components of the reward"] == {"near": [(3, 0)]}
    assert found["Components, held out"] == {"near": [(3, 0.5)]}
    assert "Idle, share of time" not in found


def test_the_upper_axis_says_when_steps_were_committed() -> None:
    drawn = figure("a", ROWS)
    drawn.canvas.draw()
    (upper,) = drawn.axes[0].child_axes
    times = {
        at: text.get_text() for at, text in zip(upper.get_xticks(), upper.get_xticklabels(), strict=True)
    }
    assert times[1.0] == "0:00:10" and times[2.0] == "0:01:10"
    assert drawn.get_suptitle() == "a"


def test_it_forgives_a_cut_line_and_replaces_the_picture_as_a_whole(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(row) for row in ROWS) + '\n{"time_s": 2.0, "cri'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "run.png").write_text("old")
    path = draw(tmp_path)
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["metrics.jsonl", "run.png"]


@pytest.mark.parametrize("rows", [[], [{"training/step": 0.0, "time_s": 1.0}]])
def test_there_may_be_nothing_to_draw(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (draw(tmp_path) is None) == (not rows)
