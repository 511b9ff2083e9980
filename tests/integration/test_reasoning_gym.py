"""Tasks of reasoning-gym as data and as reward: the real package."""

from __future__ import annotations

import json
import sys

import pytest

from asyncrl import cli
from asyncrl.data.samples import load_samples
from asyncrl.errors import ConfigError
from asyncrl.rewards import RewardInput, load_rewards
from asyncrl.rewards.reasoning_gym import pack_entry, unpack_entry
from asyncrl.types import Sample

TASKS = ["chain_sum", "arc_agi", "graph_color"]  # an answer, tuples that are compared, keys that are numbers


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    out = tmp_path_factory.mktemp("data")
    config = {"chain_sum": {"max_terms": 2, "max_digits": 1}}
    options = ["--train", "7", "--test", "0", "--config", json.dumps(config), "--out", str(out)]
    assert cli.main(["data", f"reasoning_gym:{','.join(TASKS)}", *options]) == 0
    assert not (out / "test.parquet").exists()
    return load_samples(out / "train.parquet")


def score(sample: Sample, answer: str, **options: str) -> float:
    (reward,) = load_rewards({"reasoning_gym": {**options}})
    reward.load()
    return reward.function(RewardInput(sample, answer))


def of(task: str, samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.data_source == f"reasoning_gym/{task}"]


def test_tasks_are_rows_in_verls_shape(samples: list[Sample]) -> None:
    assert [len(of(task, samples)) for task in TASKS] == [3, 2, 2]
    assert [sample.data_source for sample in samples] != sorted(sample.data_source for sample in samples)
    for sample in samples:
        assert [message.role for message in sample.prompt] == ["system", "user"]
        assert "<answer>" in sample.prompt[0].content
        assert sample.prompt[1].content == entry(sample)["question"]


def entry(sample: Sample) -> dict[str, object]:
    return unpack_entry(json.loads(sample.extra_info["reasoning_gym"]["entry"]))


@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_scores_one(task: str, samples: list[Sample]) -> None:
    for sample in of(task, samples):
        task_entry = entry(sample)
        answer = task_entry["answer"] or json.dumps(task_entry["metadata"]["possible_answer"])  # type: ignore[index]
        assert score(sample, f"It is <answer>1 <answer></answer> no, <answer> {answer}\n</answer>.") == 1.0
        assert score(sample, str(answer)) == 1.0
        assert score(sample, f"<final>{answer}</final>", tag="final") == 1.0
        assert score(sample, f"<answer>{answer}</answer>", tag="") < 1.0
        assert score(sample, "<answer>what?</answer>") < 1.0


def test_the_tasks_options_are_used(samples: list[Sample]) -> None:
    for sample in of("chain_sum", samples):
        assert sample.prompt[1].content.rpartition(": ")[2].count(" ") == 3, "two terms and a sign"


def test_it_runs_in_child_processes() -> None:
    (reward,) = load_rewards({"reasoning_gym": {"tag": ""}})
    assert reward.location == "processes"


def test_a_row_of_another_data_set_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"extra_info\.reasoning_gym is missing"):
        score(Sample(0, "other", (), "null"), "3")


@pytest.mark.parametrize(
    "value",
    [{"a": (1, [2.5, None]), 3: {"of": "x", "tuple": ()}}, {(1, 2): True}, [], {}, ((),), "text"],
)
def test_an_entry_survives_json(value: object) -> None:
    again = unpack_entry(json.loads(json.dumps(pack_entry(value))))
    assert (again, repr(again)) == (value, repr(value))


def test_what_has_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="set cannot be written as JSON"):
        pack_entry({"a": {1}})


def test_without_the_package_the_run_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[reasoning-gym\]'"):
        load_rewards("reasoning_gym")
