"""Samples in a file, and what is known of them before a run starts."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.data import RowLayout, Samples, check_same_data
from asyncrl.errors import ConfigError
from asyncrl.launch import data as data_module
from asyncrl.launch.data import PromptBudget, prepare
from asyncrl.types import Sample
from tests.fakes.data import rows, stored


def test_samples_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    with (tmp_path / "made").open("w+b") as file:
        samples = Samples.write(file, [rows(3), rows(4)])
    samples.save(tmp_path / "data" / "x.samples")
    again = Samples.open(tmp_path / "data" / "x.samples")
    expected = rows(3) + rows(4)
    assert [one.prompt for one in again] == [one.prompt for one in expected]
    assert [one.row for one in again] == list(range(7))
    assert (len(again), again.sizes, again.fingerprint) == (7, (3, 4), samples.fingerprint)
    assert again[-1] == again[6] and again[2:4] == [again[2], again[3]]
    with pytest.raises(IndexError):
        again[7]


@pytest.mark.parametrize("damage", [lambda whole: whole[:-20], lambda whole: b"", lambda whole: b"\xff" * 40])
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "x.samples"
    stored(rows(3)).save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"x\.samples: not readable"):
        Samples.open(path)
    with pytest.raises(ConfigError, match="none: not readable"):
        Samples.open(tmp_path / "none")


def test_a_run_knows_its_samples_and_their_order() -> None:
    kept = stored(rows(3)).fingerprint
    for same in (kept, ""):
        check_same_data(stored(rows(3)), same)
    swapped = [rows(3)[1], rows(3)[0], rows(3)[2]]
    for other in (swapped, rows(2), rows(4)):
        with pytest.raises(ConfigError, match=r"data\.train: these are other samples"):
            check_same_data(stored(other), kept)


def config(path: Path, *lengths: int, **data: Any) -> RunConfig:
    """A data set of prompts of so many letters."""
    path = path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "x" * length}) for length in lengths))
    rollout = {"max_tokens": 1000, "max_new_tokens": 200}
    return run(rollout=rollout, data={"train": str(path)} | data)


def run(**keys: Any) -> RunConfig:
    return parse({"name": "n", "model": {"path": "m"}} | keys)


def letters(sample: Sample) -> int:
    """A tokenizer that makes every letter a token."""
    return len(sample.prompt[0].content)


def room(config: RunConfig, tokens: Callable[[Sample], int] = letters) -> dict[bool, PromptBudget]:
    turn = config.rollout.max_new_tokens
    return {
        False: PromptBudget("prompts", config.rollout.max_tokens - turn, tokens, tokens, f" (turn {turn})")
    }


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    given = config(tmp_path, 10, 801, 800, 999, filter_overlong=True)
    samples, (line,) = prepare(given, "train", RowLayout(), room(given))
    assert [letters(sample) for sample in samples] == [10, 800] and [one.row for one in samples] == [0, 1]
    assert line.startswith("data.train: 2 prompts have more than 800 tokens (the longest 999) (turn 200);")
    assert "left out" in line


def test_without_the_filter_there_is_a_warning(tmp_path: Path) -> None:
    given = config(tmp_path, 10, 801, 10)
    samples, (line,) = prepare(given, "train", RowLayout(), room(given))
    assert len(samples) == 3
    assert "at least 1 prompts" in line and "set data.filter_overlong=true" in line
    given = config(tmp_path, 10, 800)
    assert prepare(given, "train", RowLayout(), room(given))[1] == []


def test_long_prompts_before_those_that_are_not_measured_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "MEASURED", 2)
    given = config(tmp_path, 999, 900, 10)
    samples, (line,) = prepare(given, "train", RowLayout(), room(given))
    assert len(samples) == 3 and "at least 2 prompts" in line


@pytest.mark.parametrize("filtered", [True, False])
def test_when_no_prompt_fits_nothing_starts(tmp_path: Path, filtered: bool) -> None:
    given = config(tmp_path, 801, 900, filter_overlong=filtered)
    with pytest.raises(ConfigError, match=r"data.train: all prompts have .*raise rollout.max_tokens"):
        prepare(given, "train", RowLayout(), room(given))


def test_short_prompts_are_not_rendered_and_a_warning_measures_a_thousand_at_most() -> None:
    measured: list[str] = []

    def tokens(sample: Sample) -> int:
        measured.append(sample.prompt[0].content)
        return letters(sample)

    room = PromptBudget("prompts", 800, tokens, tokens)
    assert all(map(room.fits, rows(5000))) and len(measured) == 1  # what the template and the tools take
    assert room.longest == 0
    room = PromptBudget("prompts", 8, tokens, tokens)
    assert all(room.keeps(row, filtered=False) for row in rows(5000))
    assert len(measured) == 1002


SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "well"}


def talks(path: Path, *answers: dict[str, Any], **data: Any) -> RunConfig:
    path = path / "t.jsonl"
    rows = ({"messages": [*SAID, SAID[0], {"role": "assistant"} | answer]} for answer in answers)
    path.write_text("\n".join(map(json.dumps, rows)))
    return run(data={"train": str(path)} | data)


def whole(sample: Sample) -> int:
    return sum(len(message.content) for message in sample.prompt)


def test_conversations_with_an_empty_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    call = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    given = talks(tmp_path, {"content": "x"}, {"content": " \n"}, {}, call, {"reasoning": "hm"})
    layout, budgets = RowLayout(demonstrations=True), {True: PromptBudget("conversations", 100, whole, whole)}
    samples, (line,) = prepare(given, "train", layout, budgets)
    assert [sample.row for sample in samples] == [0, 1, 2] and not samples[0].prompt[-1].tool_calls
    assert line == "data.train: 2 conversations have an empty message of the assistant; they were left out"
    given = talks(tmp_path, {}, {"content": ""})
    with pytest.raises(ConfigError, match=r"2 conversations have an empty .*and there are no others"):
        prepare(given, "train", layout, {True: PromptBudget("conversations", 100, whole, whole)})


@pytest.mark.parametrize(("filtered", "kept"), [(True, 1), (False, 2)])
def test_conversations_that_are_too_long_are_left_out_by_the_same_filter(
    tmp_path: Path, filtered: bool, kept: int
) -> None:
    given = talks(tmp_path, {"content": "x"}, {"content": "x" * 95}, filter_overlong=filtered)
    budgets = {True: PromptBudget("conversations", 100, whole, whole)}
    samples, (line,) = prepare(given, "train", RowLayout(demonstrations=True), budgets)
    assert len(samples) == kept and "1 conversations have more than 100 tokens (the longest 101); " in line
    assert ("left out (data.filter_overlong)" if filtered else "their episodes fail: set data.fil") in line


def test_sources_have_weights_or_none_has(tmp_path: Path) -> None:
    given = config(tmp_path, 1)
    path = given.data.train
    both = run(data={"train": [path, {"path": path, "weight": 2}]})
    with pytest.raises(ConfigError, match=r"t.jsonl has no weight; give one to all sources"):
        prepare(both, "train", RowLayout(), {})
    twice = run(data={"train": [path, path]})
    assert prepare(twice, "train", RowLayout(), {})[0].sizes == (1, 1)


def test_what_is_prepared_is_not_held_in_memory(tmp_path: Path) -> None:
    given = config(tmp_path, *[4000] * 1000)  # 4 MB
    tracemalloc.start()
    try:
        samples, _ = prepare(given, "train", RowLayout(), {})
        assert sum(letters(sample) for sample in samples) == 4_000_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
