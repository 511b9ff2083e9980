"""Converts public data sets that many people train on from the publishers' columns to verl's."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.data.rows import READERS, Row, read_rows, verl_row
from asyncrl.data.sources import load_split
from asyncrl.errors import ConfigError

STEP_BY_STEP = "Think step by step, then"


class Benchmark(NamedTuple):
    """Describes a public data set. `repository`, `config`: on the hub; `held_out`: the split that becomes
    test.parquet, '' for none; `columns`: required columns; `convert_row`: converts a row, given an
    instruction, to verl's columns, or returns None if the answer cannot be scored; `reward`: the reward that
    scores answers; `instruction`: the usual text after each question."""

    repository: str
    config: str
    held_out: str
    columns: tuple[str, ...]
    convert_row: Callable[[Row, str], Row | None]
    reward: str
    instruction: str = ""


def _question_row(
    row: Row,
    instruction: str,
    *,
    data_source: str,
    read_truth: Callable[[Row], Any],
    extra: tuple[str, ...],
    question: str = "question",
    ability: str = "math",
) -> Row | None:
    """Convert a row with a question in the column `question`. `read_truth`: returns the ground truth of a
    row, or None; `extra`: the columns that go to extra_info, where they are not empty."""
    truth = read_truth(row)
    prompt = f"{row[question]} {instruction}".strip()
    extra_info = {key: row[key] for key in extra if row.get(key)}
    return None if truth is None else verl_row(data_source, prompt, truth, ability, **extra_info)


def _gsm8k_truth(row: Row) -> str | None:
    match = re.search(r"#### *(-?[0-9.,]+)", row["answer"])
    return match and match[1].replace(",", "").rstrip(".")


def _dapo_math_row(row: Row, instruction: str) -> Row | None:
    """Convert a row of DAPO-Math, which has verl's columns and an instruction, and repeats questions."""
    messages = [{key: message[key] for key in ("role", "content")} for message in row["prompt"]]
    if instruction:
        messages[-1]["content"] += f"\n\n{instruction}"
    truth = row["reward_model"].get("ground_truth")
    name = str((row.get("extra_info") or {}).get("index", ""))
    return verl_row("math_dapo", messages, truth, id=name) if truth else None


BENCHMARKS = {
    "gsm8k": Benchmark(
        repository="openai/gsm8k",
        config="main",
        held_out="test",
        columns=("question", "answer"),
        convert_row=partial(
            _question_row, data_source="openai/gsm8k", read_truth=_gsm8k_truth, extra=("answer",)
        ),
        reward="gsm8k",
        instruction=f'{STEP_BY_STEP} write the final number after "#### ".',
    ),
    "math": Benchmark(
        repository="DigitalLearningGmbH/MATH-lighteval",
        config="",
        held_out="test",
        columns=("problem", "solution"),
        convert_row=partial(
            _question_row,
            data_source="DigitalLearningGmbH/MATH-lighteval",
            question="problem",
            read_truth=lambda row: last_boxed(row["solution"]) or None,
            extra=("level", "type"),
        ),
        reward="math",
        instruction=f"{STEP_BY_STEP} put the final answer into \\boxed{{}}.",
    ),
    "dapo_math": Benchmark(
        repository="BytedTsinghua-SIA/DAPO-Math-17k",
        config="",
        held_out="",
        columns=("prompt", "reward_model"),
        convert_row=_dapo_math_row,
        reward="math",
    ),
    "hotpotqa": Benchmark(
        repository="hotpotqa/hotpot_qa",
        config="distractor",
        held_out="validation",
        columns=("question", "answer"),
        convert_row=partial(
            _question_row,
            data_source="hotpotqa",
            read_truth=lambda row: [row["answer"]] if row["answer"] else None,
            extra=("id", "type", "level"),
            ability="search",
        ),
        reward="{exact: {tag: answer}}",
        instruction=(
            "Search for the facts that you need, then write the answer, a few words, as <answer>...</answer>."
        ),
    ),
}


def benchmark_rows(
    benchmark: Benchmark, source: str, split: str, instruction: str | None
) -> tuple[list[Row], int]:
    """Return a split's distinct rows, and the number of unscorable rows. ConfigError for wrong columns."""
    instruction_text = benchmark.instruction if instruction is None else instruction
    rows_by_prompt = dict[str, Row]()
    unscorable_rows = 0

    for source_row in read_split(source or benchmark.repository, benchmark.config, split):
        if missing := [name for name in benchmark.columns if name not in source_row]:
            source_name = source or benchmark.repository
            raise ConfigError(
                f"{source_name}: missing columns: {', '.join(missing)} (found: {', '.join(source_row)}); "
                f"use a copy of {benchmark.repository}, or a data set with the same columns"
            )

        row = benchmark.convert_row(source_row, instruction_text)
        if row is None:
            unscorable_rows += 1
        else:
            rows_by_prompt.setdefault(str(row["prompt"]), row)

    return list(rows_by_prompt.values()), unscorable_rows


def read_split(source: str, config: str, split: str) -> Iterator[Row]:
    """Read the rows of one split, from a file, a directory or a hub repository. ConfigError on failure."""
    if Path(source).suffix in READERS:
        return read_rows(Path(source))
    return load_split(source, config, split, "pass a local copy (a directory or a file) with --source")


def question_passages(
    source: str, config: str, split: str, question_ids: Container[str | None]
) -> Iterator[Row]:
    """Yield the paragraphs beside these HotpotQA questions, as a corpus for the tool `search`; a paragraph
    beside several questions is repeated."""
    for row in read_split(source, config, split):
        if row.get("id") in question_ids and row.get("context"):
            context = row["context"]
            for title, sentences in zip(context["title"], context["sentences"], strict=True):
                yield {"title": title, "text": "".join(sentences)}


def last_boxed(text: str) -> str:
    """Return the content of the last `\\boxed{…}`, with balanced braces; '' without a box."""
    _, box, after_box = text.rpartition("\\boxed")
    depth = 0
    for position, letter in enumerate(after_box if box and after_box.startswith("{") else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return after_box[1:position]
    return ""
