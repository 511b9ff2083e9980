"""`asyncrl data`, on small files in the layouts of the publishers; asyncrl's rewards score the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl import cli
from asyncrl.data import load_samples
from asyncrl.rewards import RewardInput, load_rewards
from asyncrl.rewards.base import as_result
from asyncrl.types import Sample

GSM8K = [
    {"question": "Two eggs and 3,000 more?", "answer": "2 + 3000 = <<2+3000=3002>>3002\n#### 3,002"},
    {"question": "Down to?", "answer": "#### -5"},
    {"question": "Down to?", "answer": "#### -5"},
    {"question": "Nobody knows.", "answer": "I do not."},
]
MATH = [
    {
        "problem": "Half?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": r"Not \boxed{2}, but $\boxed{\frac{1}{2}}$.",
    },
    {"problem": "Open?", "level": "Level 5", "type": "Algebra", "solution": r"It is \boxed{3"},
]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"content": f"What is 30 + {n % 4}? End with Answer: $Answer", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(30 + n % 4), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{n % 4}"},
    }
    for n in range(12)
]
HOTPOT = [
    {
        "id": f"5a{n}",
        "question": f"Whose is {n}?",
        "answer": "The Queen",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["A"], "sent_id": [0]},
        "context": {"title": ["A", f"B{n}"], "sentences": [["One. ", "Two."], ["Three."]]},
    }
    for n in range(2)
]


def written(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["data", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["data", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def score(reward: Any, sample: Sample, answer: str) -> float:
    (function,) = load_rewards(reward)
    function.load()
    return as_result(function.function(RewardInput(sample, answer))).score


def saved(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_gsm8k_of_a_directory_with_both_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    copy = tmp_path / "copy"
    copy.mkdir()
    for split, rows in (("train", GSM8K), ("test", GSM8K[:1])):
        (copy / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = written(capsys, "gsm8k", "--source", str(copy), "--out", str(tmp_path / "out"))
    assert (
        '"train": 2, "test": 1' in output
        and "train: left out 1 row, because its answer cannot be scored" in output
    )
    assert "rollout.reward=gsm8k'" in output
    eggs, down = load_samples(tmp_path / "out" / "train.parquet")
    assert eggs.data_source == "openai/gsm8k" and eggs.extra_info["split"] == "train"
    assert eggs.prompt[0].content.startswith("Two eggs and 3,000 more? Think step by step")
    assert (eggs.ground_truth, down.ground_truth) == ("3002", "-5")
    assert score("gsm8k", eggs, "So it is\n#### 3002") == score("gsm8k", down, "#### -5") == 1.0
    assert score("gsm8k", eggs, "#### 3") == 0.0


def test_math_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "MATH.parquet", MATH)
    output = written(capsys, "math", "--source", source, "--out", str(tmp_path), "--system", "Be brief.")
    assert '"train": 1, "test": 0' in output and not (tmp_path / "test.parquet").exists()
    (half,) = load_samples(tmp_path / "train.parquet")
    assert half.ground_truth == r"\frac{1}{2}" and half.data_source.endswith("MATH-lighteval")
    assert [message.content for message in half.prompt] == [
        "Be brief.",
        r"Half? Think step by step, then put the final answer into \boxed{}.",
    ]
    assert score("math", half, r"\boxed{0.5}") == 1.0


def test_dapo_math_holds_questions_out_and_has_each_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "dapo.parquet", DAPO)
    runs = []
    for out in (tmp_path / "a", tmp_path / "b"):
        output = written(
            capsys, "dapo_math", "--source", source, "--out", str(out), "--test", "1", "--train", "2"
        )
        assert '"train": 2, "test": 1' in output
        runs.append([load_samples(out / f"{split}.parquet") for split in ("train", "test")])
    assert runs[0] == runs[1], "the same seed draws the same rows"
    train, test = runs[0]
    assert len({sample.prompt for sample in (*train, *test)}) == 3
    truth = test[0].ground_truth
    assert test[0].data_source == "math_dapo" and test[0].prompt[0].content.endswith("Answer: $Answer")
    assert score("math", test[0], f"30 and so on.\nAnswer: {truth}") == 1.0


def test_hotpotqa_brings_its_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "hotpot.parquet", HOTPOT)
    output = written(capsys, "hotpotqa", "--source", source, "--out", str(tmp_path))
    assert "'rollout.reward={exact: {tag: answer}}'" in output and "3 passages" in output
    corpus = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert corpus[0] == {"title": "A", "text": "One. Two."} and len(corpus) == 3
    (first, _) = load_samples(tmp_path / "train.parquet")
    assert first.ground_truth == ["The Queen"]
    assert score({"exact": {"tag": "answer"}}, first, "Hm. <answer>the queen</answer>") == 1.0


def test_a_corpus_is_of_the_questions_that_were_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "hotpot.parquet", HOTPOT)
    written(capsys, "hotpotqa", "--source", source, "--out", str(tmp_path), "--train", "1")
    (only,) = load_samples(tmp_path / "train.parquet")
    titles = [json.loads(line)["title"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert titles == ["A", f"B{only.extra_info['id'][-1]}"]


def test_what_cannot_be_prepared_is_said_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path))
    assert "gsm9k: no such data set; choose from gsm8k, math" in refused(capsys, "gsm9k", *out)
    other = saved(tmp_path / "other.parquet", MATH)
    line = refused(capsys, "gsm8k", "--source", other, *out)
    assert "missing columns: question, answer (found: problem, level, type, solution)" in line
    gone = refused(capsys, "gsm8k", "--source", str(tmp_path / "gone"), *out)
    assert "the split 'train' cannot be loaded" in gone and "with --source" in gone
    assert "nope: no such reasoning-gym task" in refused(capsys, "reasoning_gym:nope", *out)
    options = ("--config", '{"gcd": {"x": 1}}')
    assert "--config: gcd rejects {'x': 1}" in refused(capsys, "reasoning_gym:gcd", *options, *out)
    assert "a JSON object" in refused(capsys, "reasoning_gym:gcd", "--config", "{", *out)
    assert not (tmp_path / "train.parquet").exists()
