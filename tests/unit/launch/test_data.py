"""The data of a run, checked before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.data import Samples, samples_path
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.errors import ConfigError
from asyncrl.launch.data import check_data
from asyncrl.launch.run_directory import check_resumed, run_directory
from asyncrl.rewards import RewardInput, needs_truth
from asyncrl.store.runstore import RunStore

MODEL = Path(__file__).resolve().parents[3] / "examples/multiturn/calculator/model"


def write(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def questions(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{number}?", "ground_truth": 1} | more for number in range(count)]


def config(run_dir: Path, rows: Iterable[Any], data: dict[str, Any] | None = None, **keys: Any) -> RunConfig:
    train = write(run_dir / "t.jsonl", rows)
    least = {"name": "x", "run_dir": str(run_dir), "model": {"path": str(MODEL)}}
    return parse(least | {"data": {"train": train} | (data or {}), "buffer": {"groups_per_batch": 4}} | keys)


def test_what_is_checked_is_what_the_coordinator_finds(tmp_path: Path) -> None:
    test = write(tmp_path / "test.jsonl", questions(3))
    found = check_data(EpisodeParts(config(tmp_path, questions(9), {"test": test})))
    assert not found.warnings and not (tmp_path / "x").exists()
    found.save(tmp_path / "x")
    for split, count in (("train", 9), ("test", 3)):
        assert len(Samples.open(samples_path(tmp_path / "x", split))) == count


def test_prompts_that_leave_no_room_are_found_before_the_start(tmp_path: Path) -> None:
    """Each of their episodes fails."""
    rollout = {"max_tokens": 128, "max_new_tokens": 16}
    rows = [*questions(4), {"prompt": "7 plus 8? " * 60, "ground_truth": 1}]
    (line,) = check_data(EpisodeParts(config(tmp_path, rows, rollout=rollout))).warnings
    assert "data.train: at least 1 prompts have more than 112 tokens" in line
    filtered = check_data(EpisodeParts(config(tmp_path, rows, {"filter_overlong": True}, rollout=rollout)))
    assert len(filtered.train) == 4 and "left out" in filtered.warnings[0]
    with pytest.raises(ConfigError, match="all prompts have more than 112 tokens"):
        check_data(EpisodeParts(config(tmp_path, rows[-1:] * 5, rollout=rollout)))
    with pytest.raises(ConfigError, match=r"data.train: 4 samples are less than one batch"):
        check_data(
            EpisodeParts(config(tmp_path, rows, {"filter_overlong": True}, buffer={}, rollout=rollout))
        )


def said(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}


SFT: dict[str, Any] = {
    "algorithm": {"loss": "sft", "advantage": "constant"},
    "buffer": {"groups_per_batch": 4, "episodes_per_group": 1, "filter_zero_variance": False},
}


def test_a_supervised_run_measures_whole_conversations(tmp_path: Path) -> None:
    keys: dict[str, Any] = SFT | {"rollout": {"max_tokens": 64, "max_new_tokens": 16}}
    rows = [*map(said, ["yes"] * 4), said("7 plus 8? " * 60)]
    found = check_data(EpisodeParts(config(tmp_path, rows, {"filter_overlong": True}, **keys)))
    (line,) = found.warnings
    assert len(found.train) == 4 and "1 conversations have more than 64 tokens" in line
    (line,) = check_data(EpisodeParts(config(tmp_path, rows, **keys))).warnings
    assert "at least 1 conversations have more than 64 tokens" in line and "their episodes fail" in line


def test_words_where_the_reward_compares_numbers_get_a_warning(tmp_path: Path) -> None:
    rows = questions(5) + questions(1, ground_truth="rain") + questions(1, ground_truth="2 + 3 = 5\n#### 5")
    (line,) = check_data(EpisodeParts(config(tmp_path, rows))).warnings
    assert "rollout.reward final_number compares numbers, and 2 of the first 7 ground" in line
    assert 'such as "rain"' in line
    assert not check_data(EpisodeParts(config(tmp_path, rows, rollout={"reward": "exact"}))).warnings


JUDGE: dict[str, Any] = {"llm_judge": {"url": "http://x", "model": "m"}}


def own(given: RewardInput) -> float:
    return 1.0


@needs_truth()
def comparing(given: RewardInput) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("reward", "refused"),
    [
        *(("exact", True), ({"gsm8k": {}, "format": {"weight": 0.2}}, True)),
        *(("none", False), (f"{__name__}:own", False), ({"format": {}, f"{__name__}:own": {}}, False)),
        *((f"{__name__}:comparing", True), (JUDGE, False)),
    ],
)
def test_a_ground_truth_is_needed_where_a_reward_compares_with_it(
    tmp_path: Path, reward: Any, refused: bool
) -> None:
    given = config(tmp_path, [{"prompt": "?"}] * 4, rollout={"reward": reward})
    if not refused:
        assert check_data(EpisodeParts(given)).train[0].ground_truth == "null"
        return
    with pytest.raises(
        ConfigError, match=r"sample 0: no ground truth for rollout.reward (exact|gsm8k|comparing)"
    ):
        check_data(EpisodeParts(given))


def test_what_an_agents_data_says_of_tools_is_its_own_affair(tmp_path: Path) -> None:
    rows = questions(9, extra_info={"tools": [{"type": "function"}]})
    check_data(EpisodeParts(config(tmp_path, rows, rollout={"agent": "a.py:f"})))
    with pytest.raises(ConfigError, match="extra_info"):
        check_data(EpisodeParts(config(tmp_path, rows)))


def test_another_file_under_the_same_path_is_found_before_anything_starts(tmp_path: Path) -> None:
    resumed = config(tmp_path, questions(9), resume="auto")
    samples = check_data(EpisodeParts(resumed)).train  # there is no run yet
    run = run_directory(resumed)
    run.mkdir()
    (run / "run.db").touch()
    check_data(EpisodeParts(resumed))  # its first coordinator was killed at once
    begin(resumed, samples)
    check_data(EpisodeParts(resumed))
    with pytest.raises(ConfigError, match=r"data\.train: these are other samples.*; restore the data"):
        check_data(EpisodeParts(config(tmp_path, questions(9)[::-1], resume="auto")))


def begin(given: RunConfig, samples: Samples) -> None:
    with closing(RunStore(run_directory(given))) as store:
        store.put_meta("data", samples.fingerprint)
        store.commit()
    (run_directory(given) / "config.yaml").write_bytes(msgspec.yaml.encode(given))


def test_a_limit_that_changes_which_prompts_are_left_out_is_named(tmp_path: Path) -> None:
    rows = [*questions(4), {"prompt": "7 plus 8? " * 60, "ground_truth": 1}]

    def limited(limit: int, rows: Iterable[Any] = rows) -> RunConfig:
        rollout = {"max_tokens": limit, "max_new_tokens": 16}
        return config(tmp_path, rows, {"filter_overlong": True}, rollout=rollout, resume="auto")

    begun = limited(128)
    begin(begun, check_data(EpisodeParts(begun)).train)
    check_data(EpisodeParts(limited(120)))  # leaves out the same one
    with pytest.raises(ConfigError, match=r"on rollout\.max_tokens, which was 128 and is 4096; restore that"):
        check_data(EpisodeParts(limited(4096)))


def test_a_resumed_run_keeps_its_sources_and_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resumed(train: Any, **data: Any) -> RunConfig:
        return config(tmp_path, questions(9), {"train": train} | data, resume="auto")

    monkeypatch.chdir(tmp_path)
    begun = tmp_path / "x" / "config.yaml"
    begun.parent.mkdir()
    begun.write_text("data: {train: [{path: t.jsonl, weight: 1}, {path: u.jsonl, weight: 2.0}], order: ''}\n")
    same = [{"path": str(tmp_path / "t.jsonl"), "weight": 1}, {"path": "u.jsonl", "weight": 2}]
    check_resumed(resumed(same))
    for other in ([same[0], same[1] | {"weight": 3}], same[::-1], "t.jsonl", ["t.jsonl", "u.jsonl"]):
        with pytest.raises(ConfigError, match=r"data.train: .* was begun with"):
            check_resumed(resumed(other))
    with pytest.raises(ConfigError, match=r"data.order: .* was begun with ''"):
        check_resumed(resumed(same, order="a.py:f"))


@pytest.mark.parametrize(
    ("row", "rollout", "said"),
    [
        ({"agent_name": "tool_agent"}, {}, "4 samples ask for the agent loop 'tool_agent'"),
        ({"agent_name": "my_loop"}, {}, "set rollout.agent or rollout.environment"),
        ({"agent_name": "my_loop"}, {"environment": "scripted_user"}, ""),
        ({"agent_name": "single_turn_agent"}, {}, ""),
        ({"reward_manager": "prime"}, {}, "the reward_manager 'prime', and there are none; write what"),
        ({"reward_model": {"style": "model"}}, {}, "a reward model .*rollout.reward is final_number"),
        ({"reward_model": {"style": "model"}}, {"reward": JUDGE | {"format": {}}}, ""),
        ({"reward_model": {"style": "rule"}}, {}, ""),
        ({"extra_info": {"interaction_kwargs": {"name": "gsm8k"}}}, {}, "'gsm8k' .*set rollout.environment"),
        (
            {"extra_info": {"tools_kwargs": {"calc": {"a": 1}}}},
            {},
            "'calc', which is not in rollout.tools; ig",
        ),
    ],
)
def test_what_verls_data_asks_for_and_is_not_there_is_said_before_the_start(
    tmp_path: Path, row: dict[str, Any], rollout: dict[str, Any], said: str
) -> None:
    rollout = {"reward": "final_number"} | rollout
    warnings = check_data(EpisodeParts(config(tmp_path, questions(4, **row), rollout=rollout))).warnings
    assert len(warnings) == bool(said) and re.search(said, "".join(warnings))


def test_columns_that_nothing_reads_are_listed(tmp_path: Path) -> None:
    rows = questions(4, extro_info={}, answer={"value": 1}, level=3, agent_name=None, note=None)
    columns = {"columns": {"ground_truth": "answer.value"}}
    (line,) = check_data(EpisodeParts(config(tmp_path, rows, columns))).warnings
    assert "data.train: nothing reads the columns extro_info (meant extra_info?), level; " in line
    rows = [{"messages": [{"role": "assistant", "content": "a"}], "tools": [], "uid": 1}] * 4
    (line,) = check_data(EpisodeParts(config(tmp_path, rows, **SFT))).warnings
    assert "nothing reads the columns uid; " in line
