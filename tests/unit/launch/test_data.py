"""Samples in a file, and what is known of them before a run starts. What is refused: test_checks.py."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.data import RowLayout, Samples, check_same_data, samples_path
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.errors import ConfigError
from asyncrl.launch import data as data_module
from asyncrl.launch.data import PromptBudget, PromptBudgets, check_data, prepare_samples
from asyncrl.launch.run_directory import run_directory
from asyncrl.launch.truths import EXAMINED_SAMPLES
from asyncrl.store.runstore import RunStore
from asyncrl.types import Sample
from asyncrl.vision.layout import ImageLayout
from tests.fakes.checked import Given, questions
from tests.fakes.data import rows, stored
from tests.fakes.tasks import bare_image, task_folder

LONG = {"prompt": "7 plus 8? " * 60, "ground_truth": 1}


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
    for each, name in ((path, r"x\.samples"), (tmp_path / "none", "none")):
        with pytest.raises(ConfigError, match=f"{name}: not readable"):
            Samples.open(each)


def test_a_run_knows_its_samples_and_their_order() -> None:
    kept = stored(rows(3)).fingerprint
    for same in (kept, ""):
        check_same_data(stored(rows(3)), same)
    swapped = [rows(3)[1], rows(3)[0], rows(3)[2]]
    for other in (swapped, rows(2), rows(4)):
        with pytest.raises(ConfigError, match=r"data\.train: the samples"):
            check_same_data(stored(other), kept)


def no_images() -> ImageLayout:
    raise ConfigError("the model reads text only")


def letters(sample: Sample) -> int:
    """A tokenizer that makes every letter a token."""
    return len(sample.prompt[0].content)


def test_the_measured_prompts_decide_where_others_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "MAX_MEASURED_SAMPLES", 2)
    config = of_letters(tmp_path, 999, 900, 10)
    budgets = PromptBudgets(prompts=PromptBudget("prompt", 800, letters, letters))
    prepared = prepare_samples(config, "train", RowLayout(), budgets, no_images)
    (line,) = prepared.warnings
    assert len(prepared.samples) == 3 and "at least 2 prompts" in line


def test_short_prompts_are_not_rendered_and_a_warning_measures_a_thousand_at_most() -> None:
    measured: list[str] = []

    def tokens(sample: Sample) -> int:
        measured.append(sample.prompt[0].content)
        return letters(sample)

    budget = PromptBudget("prompt", 800, tokens, tokens)
    assert (
        all(map(budget.fits_limit, rows(5000))) and len(measured) == 1
    )  # what the template and the tools take
    assert budget.longest_tokens == 0
    budget = PromptBudget("prompt", 8, tokens, tokens)
    assert all(budget.keeps_sample(row, filter_overlong=False) for row in rows(5000))
    assert len(measured) == 1002


def of_letters(path: Path, *lengths: int, train: Any = None) -> RunConfig:
    (path / "t.jsonl").write_text("\n".join(json.dumps({"prompt": "x" * length}) for length in lengths))
    return parse({"name": "n", "model": {"path": "m"}, "data": {"train": train or str(path / "t.jsonl")}})


def test_a_file_may_be_named_twice(tmp_path: Path) -> None:
    twice = of_letters(tmp_path, 1, train=[str(tmp_path / "t.jsonl")] * 2)
    assert prepare_samples(twice, "train", RowLayout(), PromptBudgets(), no_images).samples.sizes == (1, 1)


def test_what_is_prepared_is_not_held_in_memory(tmp_path: Path) -> None:
    config = of_letters(tmp_path, *[4000] * 1000)  # 4 MB
    tracemalloc.start()
    try:
        samples = prepare_samples(config, "train", RowLayout(), PromptBudgets(), no_images).samples
        assert sum(letters(sample) for sample in samples) == 4_000_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_what_is_checked_is_what_the_coordinator_finds(given: Given) -> None:
    given.write([*questions(4), LONG, *questions(1)])
    test = given.write(questions(3), given.folder / "test.jsonl")
    given.keys |= {"data.filter_overlong": True, "data.test": test}
    checked_data = check_data(EpisodeParts(given.config()))
    run_dir = given.runs / "x"
    assert not run_dir.exists()
    checked_data.save_samples(run_dir)
    for split, count in (("train", 5), ("test", 3)):
        samples = Samples.open(samples_path(run_dir, split))
        assert [sample.row for sample in samples] == list(range(count))


def test_an_answer_that_only_calls_a_tool_is_not_empty(given: Given) -> None:
    said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "well"}
    call = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    answers = ({"content": "x"}, {"content": " \n"}, {}, call, {"reasoning": "hm"})
    given.write({"messages": [*said, said[0], {"role": "assistant"} | answer]} for answer in answers)
    prepared = prepare_samples(
        given.config(),
        "train",
        RowLayout(demonstrations=True),
        PromptBudgets(demonstrations=PromptBudget("conversation", 100, lambda _: 1, lambda _: 1)),
        no_images,
    )
    samples = prepared.samples
    (line,) = prepared.warnings
    assert [sample.row for sample in samples] == [0, 1, 2] and not samples[0].prompt[-1].tool_calls
    assert line == "data.train: 2 conversations have an empty assistant message, and will be left out"


def begin(given: RunConfig) -> None:
    """Its store knows the samples."""
    run_directory(given).mkdir(parents=True, exist_ok=True)
    with closing(RunStore(run_directory(given))) as store:
        store.put_meta("data", check_data(EpisodeParts(given)).train.fingerprint)
        store.commit()
    (run_directory(given) / "config.yaml").write_bytes(msgspec.yaml.encode(given))


def test_another_file_under_the_same_path_is_found_before_anything_starts(given: Given) -> None:
    begin(given.config())
    given.keys["resume"] = "auto"
    assert all(note.level == "ok" for note in given.notes("data"))
    given.write(questions(4)[::-1])
    assert "data.train: the samples" in given.notes("data")[-1].text


def test_a_limit_that_changes_which_prompts_are_left_out_is_named(given: Given) -> None:
    given.write([*questions(4), LONG])
    given.keys |= {"data.filter_overlong": True}
    begin(given.config())
    given.keys |= {"resume": "auto", "rollout.max_tokens": 290}
    assert given.notes("data")[-1].level == "warning"  # leaves out the same one
    given.edit(max_position_embeddings=4096)
    given.keys["rollout.max_tokens"] = 4096
    said = given.notes("data")[-1].text
    assert "on rollout.max_tokens, which was 300 and is 4096); restore the" in said


def test_a_task_after_many_samples_is_checked_too(given: Given) -> None:
    lost = questions(1)[0] | {"extra_info": {"task": {"name": "lost", "image": "lost"}}}
    given.write([*questions(EXAMINED_SAMPLES + 1), lost])
    assert "data.train: task lost: no image named 'lost'" in given.notes("data")[-1].text


def test_tasks_need_a_reward_that_judges_them_and_their_image_at_a_resume(given: Given) -> None:
    given.patch.setenv("ASYNCRL_IMAGES", str(images := given.folder / "images"))
    bare_image(images, "bare", "app")
    for name in "abcd":
        task_folder(given.folder / "tasks" / name)
    given.keys |= {"data.train": str(given.folder / "tasks"), "rollout.tools": ["calculator"]}
    assert "data.train: rollout.reward final_number cannot judge tasks; set rollout.reward=tests" in (
        given.notes("data")[-1].text
    )
    given.keys |= {"rollout.reward": "tests", "data.train": str(given.train)}
    assert "data.train: sample 0 is not a task, but rollout.reward judges" in given.notes("data")[-1].text
    given.keys |= {"data.train": str(given.folder / "tasks"), "rollout.tools": []}
    assert (
        "data.train: no tool in rollout.tools can change a task's files; set rollout.agent"
        in given.notes("data")[-1].text
    )
    given.keys["rollout.tools"] = ["calculator"]
    assert "data.train: no tool in rollout.tools can change a task's files" in given.notes("data")[-1].text
    given.keys["rollout.tools"] = ["shell", "python"]
    assert "data.train: 2 tools in rollout.tools change files, but" in given.notes("data")[-1].text
    given.keys["rollout.tools"] = ["shell", "calculator"]
    begin(given.config())
    given.keys["resume"] = "auto"
    *others, unnamed = given.notes("data")
    assert {note.level for note in others} == {"ok"} and unnamed.level == "warning"
    assert unnamed.text.startswith(
        "data.train: 4 of 4 tasks do not name their tests: their score is whatever test.sh reports"
    )
    bare_image(images, "bare", "app", digest="sha256-anew")
    assert (
        "the samples or their order have changed" in (said := given.notes("data")[-1].text)
        and "the task images" in said
    )
    given.keys |= {"resume": "never", "run_dir": str(given.folder / "other")}
    for name in "abcd":
        task_folder(given.folder / "tasks" / name, config={"FAIL_TO_PASS": ["t.py::test_a"]})
    assert {note.level for note in given.notes("data")} == {"ok"}
    (images / "names" / "bare").unlink()
    assert "no image named 'bare'" in given.notes("data")[-1].text
