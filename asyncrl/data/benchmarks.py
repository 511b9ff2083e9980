"""Converts public data sets that many people train on from the publishers' columns to verl's."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import NamedTuple

from asyncrl.data.rows import READERS, Row, read_rows, verl_row
from asyncrl.data.sources import load_split
from asyncrl.errors import ConfigError

STEP_BY_STEP = "Think step by step, then"


class Benchmark(NamedTuple):
    """Describes a public data set. `repository`, `config`: on the hub; `held_out`: the split that becomes
    test.parquet, '' for none; `columns`: required columns; `row`: converts a row, given an instruction, to
    verl's columns, or returns None if the answer cannot be scored; `reward`: the reward that scores answers;
    `instruction`: the usual text after each question."""

    repository: str
    config: str
    held_out: str
    columns: tuple[str, ...]
    row: Callable[[Row, str], Row | None]
    reward: str
    instruction: str = ""


def _gsm8k_row(row: Row, instruction: str) -> Row | None:
    match = re.search(r"#### *(-?[0-9.,]+)", row["answer"])
    if match is None:
        return None
    prompt = f"{row['question']} {instruction}".strip()
    return verl_row("openai/gsm8k", prompt, match[1].replace(",", "").rstrip("."), answer=row["answer"])


def _math_row(row: Row, instruction: str) -> Row | None:
    truth = last_boxed(row["solution"])
    prompt = f"{row['problem']} {instruction}".strip()
    extra = {key: row[key] for key in ("level", "type") if row.get(key)}
    return verl_row("DigitalLearningGmbH/MATH-lighteval", prompt, truth, **extra) if truth else None


def _dapo_math_row(row: Row, instruction: str) -> Row | None:
    """Convert a row of DAPO-Math, which has verl's columns and an instruction, and repeats questions."""
    messages = [{key: message[key] for key in ("role", "content")} for message in row["prompt"]]
    if instruction:
        messages[-1]["content"] += f"\n\n{instruction}"
    truth = row["reward_model"].get("ground_truth")
    name = str((row.get("extra_info") or {}).get("index", ""))
    return verl_row("math_dapo", messages, truth, id=name) if truth else None


def _hotpotqa_row(row: Row, instruction: str) -> Row | None:
    extra = {key: row[key] for key in ("id", "type", "level") if row.get(key)}
    prompt = f"{row['question']} {instruction}".strip()
    return verl_row("hotpotqa", prompt, [row["answer"]], "search", **extra) if row["answer"] else None


BENCHMARKS = {
    "gsm8k": Benchmark(
        repository="openai/gsm8k",
        config="main",
        held_out="test",
        columns=("question", "answer"),
        row=_gsm8k_row,
        reward="gsm8k",
        instruction=f'{STEP_BY_STEP} write the final number after "#### ".',
    ),
    "math": Benchmark(
        repository="DigitalLearningGmbH/MATH-lighteval",
        config="",
        held_out="test",
        columns=("problem", "solution"),
        row=_math_row,
        reward="math",
        instruction=f"{STEP_BY_STEP} put the final answer into \\boxed{{}}.",
    ),
    "dapo_math": Benchmark(
        repository="BytedTsinghua-SIA/DAPO-Math-17k",
        config="",
        held_out="",
        columns=("prompt", "reward_model"),
        row=_dapo_math_row,
        reward="math",
    ),
    "hotpotqa": Benchmark(
        repository="hotpotqa/hotpot_qa",
        config="distractor",
        held_out="validation",
        columns=("question", "answer"),
        row=_hotpotqa_row,
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
                f"{source_name}: no column {', '.join(missing)} (found: {', '.join(source_row)}); "
                f"those of {benchmark.repository} are expected"
            )

        row = benchmark.row(source_row, instruction_text)
        if row is None:
            unscorable_rows += 1
        else:
            rows_by_prompt.setdefault(str(row["prompt"]), row)

    return list(rows_by_prompt.values()), unscorable_rows


def read_split(source: str, config: str, split: str) -> Iterator[Row]:
    """Read the rows of one split, from a file, a directory or a hub repository. ConfigError on failure."""
    if Path(source).suffix in READERS:
        return read_rows(Path(source))
    return load_split(source, config, split, "give a copy of it, a directory or a file, with --source")


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
