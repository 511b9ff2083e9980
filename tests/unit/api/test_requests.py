"""The arguments of calls from Python, as a launcher's request; and the configuration that comes of it."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

import asyncrl
from asyncrl.api.launcher import LauncherRequest
from asyncrl.api.requests import make_request
from asyncrl.commands.sft import compose_sft
from asyncrl.config.composition import RUN_DIRECTORY_MARK, compose
from asyncrl.data.rows import read_rows
from asyncrl.data.samples import load_samples
from asyncrl.errors import ConfigError
from asyncrl.tools import tool

ROWS = [{"prompt": "2 + 2", "ground_truth": "4", "extra_info": {"stock": {"nail": "A"}}}]


def scored(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return 0.0


class Shelf:
    """An object without a `__call__`."""


async def waiting() -> float:
    return 0.0


def closed_rows() -> Iterator[dict[str, str]]:
    with Path(os.devnull).open() as file:
        pass
    for line in file:
        yield {"prompt": line}


@tool(timeout=3.0)
class Shelves:
    def find(self, item: str) -> str:
        """Find an item."""
        return item

    def count(self, shelf: str) -> int:
        """Count."""
        return len(shelf)


def request_of(tmp_path: Path, *settings: Any, **keywords: Any) -> LauncherRequest:
    return make_request("train", settings, keywords, tmp_path)


def test_names_rows_and_code_become_keys(tmp_path: Path) -> None:
    request = request_of(
        tmp_path,
        "trainer.lr=1e-5",
        {"trainer": {"ranks": 2}, "buffer": {"max_staleness": 3}},
        model="some/model",
        train=ROWS,
        tools=["calculator", Shelves],
        reward={scored: {"weight": 0.5}},
        trainer={"lr": 1e-4},
        total_steps=7,
        test=None,
    )
    assert request.overrides == ["trainer.lr=1e-5"]
    assert request.values["trainer"] == {"ranks": 2, "lr": 1e-4}
    assert request.values["model"] == {"path": "some/model"}
    assert request.values["total_steps"] == 7
    assert request.values["rollout"] == {
        "tools": ["calculator", f"{__name__}:Shelves"],
        "reward": {f"{__name__}:scored": {"weight": 0.5}},
    }
    ((name, path),) = request.saved_files.items()
    assert request.values["data"] == {"train": f"{RUN_DIRECTORY_MARK}/{name}"}
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == ROWS


def test_code_that_was_saved_may_have_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path in the run is the key of a mapping, which OmegaConf does not resolve."""
    saved_path = tmp_path / "code" / "d" / "task.py"
    names = lambda subject, key, directory: ("d/task.py:scored", saved_path)  # noqa: E731
    monkeypatch.setattr("asyncrl.api.requests.loadable_name", names)
    request = request_of(tmp_path, "experiment=calculator", reward={scored: {"weight": 0.5}}, name="a")
    config = compose(request.overrides, None, request.values)
    assert config.rollout.reward == {"runs/a/code/d/task.py:scored": {"weight": 0.5}}


def test_a_text_for_a_group_chooses_its_file(tmp_path: Path) -> None:
    request = request_of(tmp_path, experiment="calculator", algorithm="rloo", engine={"name": "torch"})
    assert request.overrides == ["experiment=calculator", "algorithm=rloo"]
    assert request.values == {"engine": {"name": "torch"}}


def test_sft_refuses_another_algorithm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="asyncrl sft sets algorithm=sft; for algorithm=rloo, use"):
        compose_sft(request_of(tmp_path, algorithm="rloo").overrides, None)


def test_rows_are_written_once(tmp_path: Path) -> None:
    """The names of evaluations depend on the time of the file."""
    (path,) = request_of(tmp_path, train=ROWS).saved_files.values()
    written_at = Path(path).stat().st_mtime_ns
    assert [path] == [*request_of(tmp_path, test=ROWS).saved_files.values()]
    assert Path(path).stat().st_mtime_ns == written_at


def test_one_tool_makes_a_list(tmp_path: Path) -> None:
    for tool_argument, names in ((Shelves, [f"{__name__}:Shelves"]), ("calculator", ["calculator"])):
        assert request_of(tmp_path, tools=tool_argument).values["rollout"]["tools"] == names


def test_values_are_composed_as_they_are(tmp_path: Path) -> None:
    """No grammar reads them: quotes, interpolations and brackets stay."""
    prompt = "a ${b} 'c' [d] \\ {e: f}"
    request = request_of(
        tmp_path,
        "experiment=calculator",
        data={"system_prompt": prompt},
        train=ROWS,
        name="a",
        run_dir="runs",
    )
    config = compose(request.overrides, None, request.values)
    assert config.data.system_prompt == prompt
    (name,) = request.saved_files
    assert config.data.train == f"runs/a/{name}"
    assert config.rollout.reward == "final_number"

    options = {"math": {"weight": 0.5}}
    request = request_of(tmp_path, "experiment=calculator", reward=options)
    assert compose(request.overrides, None, request.values).rollout.reward == options


def test_files_may_have_weights(tmp_path: Path) -> None:
    sources = [{"path": "a.parquet", "weight": 2.0}, {"path": "b.parquet", "weight": 1.0}]
    assert request_of(tmp_path, train=sources).values["data"]["train"] == sources
    assert request_of(tmp_path, train=Path("a.parquet")).values["data"]["train"] == "a.parquet"


def test_tables_are_rows(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["2 + 2"], "ground_truth": ["4"]})
    for rows in (table, table.to_pandas(), datasets.Dataset(table)):
        (path,) = request_of(tmp_path, train=rows).saved_files.values()
        assert list(read_rows(Path(path))) == [{"prompt": "2 + 2", "ground_truth": "4"}]


@pytest.mark.parametrize(
    ("settings", "keywords", "problem"),
    [
        (["trainer.lr"], {}, "'trainer.lr': not an override; write KEY=VALUE"),
        ([3], {}, "3: unexpected type int; settings must be strings or dicts"),
        ([], {"train": [ROWS[0], "a text"]}, "data.train[1]: unexpected type str; each row must be a dict"),
        ([], {"train": []}, "data.train: no rows"),
        ([], {"train": 3}, "data.train: unexpected type int; pass a list of dicts"),
        ([], {"train": [{"day": datetime.date(2026, 1, 1)}]}, "data.train[0].day: Object of type date"),
        (
            [],
            {"train": [{"prompt": "x", "weight": float("nan")}]},
            "data.train[0].weight: Out of range float",
        ),
        ([], {"train": closed_rows()}, "data.train: reading the rows failed (ValueError: I/O operation on"),
        ([], {"reward": object()}, "rollout.reward: unexpected type object; pass a function or a class"),
        ([], {"reward": 3}, "rollout.reward: unexpected type int; pass a function or a class"),
        ([], {"reward": [scored]}, "rollout.reward: unexpected type list; pass a function or a class"),
        (
            [],
            {"reward": waiting()},
            "unexpected type coroutine; pass the async function itself, without calling it",
        ),
        ([], {"reward": Shelf()}, "rollout.reward: unexpected type Shelf; pass a function or a class"),
        ([], {"reward": lambda answer: 0.0}, "rollout.reward: a lambda cannot be loaded by name"),
        ([], {"trainer": {"lr": object()}}, "trainer.lr: values of type object"),
    ],
)
def test_bad_arguments_name_the_key(
    tmp_path: Path, settings: list[Any], keywords: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        request_of(tmp_path, *settings, **keywords)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_rows_may_mix_types_in_what_is_free_and_in_nothing_else(tmp_path: Path) -> None:
    """A column of dicts, of truths or of prompts as text and as messages is no column of one type."""
    messages = [{"role": "user", "content": "2 + 2"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "2 + 2", "ground_truth": 4, "extra_info": {"part": 1}},
        {"prompt": messages, "ground_truth": "4", "extra_info": {"part": "one"}},
    ]
    (path,) = request_of(tmp_path, train=rows).saved_files.values()
    text_question, number_question = load_samples(path)
    assert [text_question.ground_truth, number_question.ground_truth] == [4, "4"]
    assert [text_question.extra_info, number_question.extra_info] == [{"part": 1}, {"part": "one"}]
    assert text_question.prompt == number_question.prompt

    for prompt, problem in ((5, "must be text, a non-empty list"), (None, "is null; provide some text")):
        (path,) = request_of(
            tmp_path, train=[*rows, {"prompt": prompt, "ground_truth": "4"}]
        ).saved_files.values()
        with pytest.raises(ConfigError, match=f"sample 2: the prompt column {problem}") as raised:
            load_samples(path)
        assert "\n" not in str(raised.value)


def test_a_directory_without_runs_names_the_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory; set run_dir= to the directory that contains"):
        asyncrl.open_run("a", run_dir=tmp_path / "none")


def test_a_run_without_a_checkpoint_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        asyncrl.start(model=asyncrl.open_run(tmp_path))


def test_a_number_as_a_key_of_a_row_is_refused(tmp_path: Path) -> None:
    """As a text it would be found by no code that looks up the number."""
    rows = [{"prompt": "?", "extra_info": {"rooms": [{"7": 1}, {7: 1}]}}]
    with pytest.raises(ConfigError, match=r"^data\.train\[0\]\.extra_info\.rooms: the key 7 is of type int"):
        make_request("train", [], {"train": rows}, tmp_path)
