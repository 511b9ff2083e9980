"""Sources of rows, and layouts of their columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import DataConfig
from asyncrl.data.columns import check_columns
from asyncrl.data.samples import RowLayout, read_samples
from asyncrl.errors import ConfigError
from asyncrl.types import Message, Sample
from tests.fakes.raised import BASE_EXCEPTIONS

COLUMNS = {"prompt": "question", "ground_truth": "answer.value", "extra_info.level": "level"}
ROW = {"question": "1 + 1?", "answer": {"value": 2}, "level": 3}


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def read(path: Path | str, layout: RowLayout = RowLayout(COLUMNS, truth="r"), **keys: Any) -> list[Sample]:
    return list(read_samples(DataConfig(str(path), **keys), str(path), "train", layout))


def test_columns_of_another_layout_get_the_names_of_ours(tmp_path: Path) -> None:
    samples = read(jsonl(tmp_path / "sums.jsonl", ROW, ROW | {"extra_info": {"a": 1}, "data_source": "mine"}))
    assert samples[0] == Sample(0, "sums", (Message("user", "1 + 1?"),), "2", "", '{"level": 3}')
    assert (samples[1].data_source, samples[1].extra_info) == ("mine", {"a": 1, "level": 3})


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"promt": "question"}, r"'promt' is not part of a sample \(did you mean prompt"),
        ({"extra_info.": "question"}, "is not part of a sample .*; the parts are"),
    ],
)
def test_names_that_no_sample_has_are_refused(columns: dict[str, str], complaint: str) -> None:
    check_columns(COLUMNS)
    with pytest.raises(ConfigError, match=complaint):
        check_columns(columns)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROW, ROW | {"answer": 2})
    with pytest.raises(ConfigError, match=r"sample 1: no answer\.value column, .*found: question, answer"):
        read(path)


def test_columns_of_questions_and_of_conversations_may_be_named_together(tmp_path: Path) -> None:
    columns = {"prompt": "question", "ground_truth": "answer", "messages": "talk"}
    conversation = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    question_path = jsonl(tmp_path / "asked.jsonl", {"question": "1 + 1?", "answer": 2})
    talks = jsonl(tmp_path / "talks.jsonl", {"talk": conversation})
    assert read(question_path, RowLayout(columns))[0].ground_truth == 2
    assert len(read(talks, RowLayout(columns, demonstrations=True))[0].prompt) == 2
    with pytest.raises(ConfigError, match="sample 0: no question column"):
        read(talks, RowLayout(columns))
    either = RowLayout(columns, demonstrations=None)
    assert not read(question_path, either)[0].demonstration and read(talks, either)[0].given == 0


def test_the_ground_truth_may_be_missing_where_nothing_needs_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "Play!"})
    assert read(path, RowLayout())[0].ground_truth is None
    with pytest.raises(ConfigError, match=r"sample 0: no ground truth for rollout.reward exact"):
        read(path, RowLayout(truth="rollout.reward exact"))


def test_a_system_prompt_goes_to_prompts_without_one(tmp_path: Path) -> None:
    own_messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "?"}]
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "?"}, {"prompt": own_messages})
    first, second = read(path, RowLayout(system_prompt="Be brief."))
    assert first.prompt == (Message("system", "Be brief."), Message("user", "?"))
    assert second.prompt == (Message("system", "Mine."), Message("user", "?"))


def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        jsonl(tmp_path / f"{name}.jsonl", ROW, ROW)
    samples = read(tmp_path / "*.jsonl")
    assert [(sample.data_source, sample.row) for sample in samples] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    with pytest.raises(ConfigError, match="no file matches"):
        read(tmp_path / "*.csv")


def test_a_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # here: it imports pandas, and few tests need either

    requests: list[Any] = []

    def load(name: str, chosen: str | None, **more: Any) -> Any:
        requests.append((name, chosen, *more.values()))
        return datasets.Dataset.from_list([ROW, ROW])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda *_: ["main", "socratic"])
    (sample, _) = read("hf:openai/gsm8k")
    assert (sample.data_source, sample.ground_truth) == ("openai/gsm8k", 2)
    read("hf:openai/gsm8k@abc:main:test"), read("hf:openai/gsm8k::extra")
    assert requests == [
        ("openai/gsm8k", None, "train", None),
        ("openai/gsm8k", "main", "test", "abc"),
        ("openai/gsm8k", None, "extra", None),
    ]


def test_a_hub_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach\n'a/b' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(
        ConfigError, match=r"a/b: the split 'train' cannot be loaded .*if this machine has no network"
    ) as caught:
        read("hf:a/b")
    assert "\n" not in str(caught.value)


OWN = """
class Squares:
    def __init__(self, path, *, count: int = 2):
        self.path, self.count = path, count

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        return {"prompt": f"{self.path} {at}^2?", "ground_truth": at * at}  # no IndexError, as of torch's


def rows(path):
    yield {"prompt": "?", "ground_truth": 1}
    yield {"prompt": path[99], "ground_truth": 1}


def numbers(path):
    return [3]


def nothing():
    return []


def empty(path):
    return []


def deep(path):
    value = []
    for _ in range(5000):
        value = [value]
    return [{"prompt": "?"}, {"prompt": "?", "extra_info": {"tree": value}}]
"""


def test_a_data_set_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    samples = read("small", RowLayout(truth="r"), dataset={f"{tmp_path}/own.py:Squares": {"count": 3}})
    assert [(sample.prompt[0].content, sample.ground_truth) for sample in samples] == [
        *(("small 0^2?", 0), ("small 1^2?", 1), ("small 2^2?", 4)),
    ]


RAISING = """
from collections import UserDict
from tests.fakes.raised import BASE_EXCEPTIONS
def made(path):
    raise BASE_EXCEPTIONS[{number}]("its text")

def rows(path):
    yield {{"prompt": "?", "ground_truth": 1}}
    made(path)

class LazyRow(UserDict):
    def __getitem__(self, column):
        made(column)

def lazy(path):
    return [{{"prompt": "?", "ground_truth": 1}}, LazyRow(prompt="?")]

if {imported}:
    made("")
"""


@pytest.mark.parametrize("number", range(len(BASE_EXCEPTIONS)))
@pytest.mark.parametrize("name", ["made", "rows", "lazy", "imported"])
def test_whatever_a_data_set_raises_is_an_error_of_its_key(tmp_path: Path, number: int, name: str) -> None:
    (tmp_path / "own.py").write_text(RAISING.format(number=number, imported=name == "imported"))
    kind = BASE_EXCEPTIONS[number].__name__
    with pytest.raises(ConfigError, match=rf"own\.py.*{kind}: its text \(own\.py:5\)"):
        read("small", RowLayout(), dataset=f"{tmp_path}/own.py:{name}")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("rows", r"rows\('small'\) failed: IndexError: .* \(own.py:15\); the call must return"),
        ("numbers", "yielded a row of type int; every row must be a dict"),
        ("nothing", r"nothing \(own.py:22\) cannot be called with the expected arguments"),
        ("empty", "small: the data set is empty"),
        ("deep", "small, sample 1: a value is nested too deeply; flatten the value"),
        ("none", "has no 'none'"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_named(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=complaint):
        read("small", RowLayout(), dataset=f"{tmp_path}/own.py:{name}")
