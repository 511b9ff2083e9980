"""Public data sets that many people train on: from the columns of their publishers to verl's."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import NamedTuple

from asyncrl.data.rows import READERS, Row, read_rows, verl_row
from asyncrl.data.sources import load_split
from asyncrl.errors import ConfigError

STEPS = "Think step by step, then"


class Benchmark(NamedTuple):
    """`repository`, `config`: on the hub; `held_out`: the split that becomes test.parquet, '' for none;
    `columns`: what a row must have; `row`: makes a row of verl's of it and of an instruction, None where the
    answer cannot be scored; `reward`: what scores it; `instruction`: the usual one, after each question."""

    repository: str
    config: str
    held_out: str
    columns: tuple[str, ...]
    row: Callable[[Row, str], Row | None]
    reward: str
    instruction: str = ""


def _gsm8k(row: Row, instruction: str) -> Row | None:
    marked = re.search(r"#### *(-?[0-9.,]+)", row["answer"])
    if marked is None:
        return None
    prompt = f"{row['question']} {instruction}".strip()
    return verl_row("openai/gsm8k", prompt, marked[1].replace(",", "").rstrip("."), answer=row["answer"])


def _math(row: Row, instruction: str) -> Row | None:
    truth = boxed(row["solution"])
    prompt = f"{row['problem']} {instruction}".strip()
    more = {key: row[key] for key in ("level", "type") if row.get(key)}
    return verl_row("DigitalLearningGmbH/MATH-lighteval", prompt, truth, **more) if truth else None


def _dapo_math(row: Row, instruction: str) -> Row | None:
    """Its rows are verl's already, with an instruction of their own; a question is in it many times."""
    messages = [{key: message[key] for key in ("role", "content")} for message in row["prompt"]]
    if instruction:
        messages[-1]["content"] += f"\n\n{instruction}"
    truth = row["reward_model"].get("ground_truth")
    name = str((row.get("extra_info") or {}).get("index", ""))
    return verl_row("math_dapo", messages, truth, id=name) if truth else None


def _hotpotqa(row: Row, instruction: str) -> Row | None:
    more = {key: row[key] for key in ("id", "type", "level") if row.get(key)}
    prompt = f"{row['question']} {instruction}".strip()
    return verl_row("hotpotqa", prompt, [row["answer"]], "search", **more) if row["answer"] else None


BENCHMARKS = {
    "gsm8k": Benchmark(
        *("openai/gsm8k", "main", "test", ("question", "answer"), _gsm8k, "gsm8k"),
        f'{STEPS} write the final number after "#### ".',
    ),
    "math": Benchmark(
        *("DigitalLearningGmbH/MATH-lighteval", "", "test", ("problem", "solution"), _math, "math"),
        f"{STEPS} put the final answer into \\boxed{{}}.",
    ),
    "dapo_math": Benchmark(
        *("BytedTsinghua-SIA/DAPO-Math-17k", "", "", ("prompt", "reward_model"), _dapo_math, "math"),
    ),
    "hotpotqa": Benchmark(
        *("hotpotqa/hotpot_qa", "distractor", "validation", ("question", "answer"), _hotpotqa),
        "{exact: {tag: answer}}",
        "Search for the facts that you need, then write the answer, a few words, as <answer>...</answer>.",
    ),
}


def rows_of(benchmark: Benchmark, source: str, split: str, instruction: str | None) -> tuple[list[Row], int]:
    """The different rows of a split, and how many could not be scored. ConfigError for other columns."""
    text = benchmark.instruction if instruction is None else instruction
    found = dict[str, Row]()
    left_out = 0
    for given in read_split(source or benchmark.repository, benchmark.config, split):
        if missing := [name for name in benchmark.columns if name not in given]:
            where = source or benchmark.repository
            raise ConfigError(
                f"{where}: no column {', '.join(missing)} (found: {', '.join(given)}); "
                f"those of {benchmark.repository} are expected"
            )
        row = benchmark.row(given, text)
        if row is None:
            left_out += 1
        else:
            found.setdefault(str(row["prompt"]), row)
    return list(found.values()), left_out


def read_split(source: str, config: str, split: str) -> Iterator[Row]:
    """The rows of one split: of a file, or of a directory or hub repository. ConfigError."""
    if Path(source).suffix in READERS:
        return read_rows(Path(source))
    return load_split(source, config, split, "give a copy of it, a directory or a file, with --source")


def passages_of(source: str, config: str, split: str, asked: Container[str | None]) -> Iterator[Row]:
    """The paragraphs beside HotpotQA's questions of these ids, as a corpus for the tool `search`; one that
    stands beside several, several times."""
    for row in read_split(source, config, split):
        if row.get("id") in asked and row.get("context"):
            context = row["context"]
            for title, sentences in zip(context["title"], context["sentences"], strict=True):
                yield {"title": title, "text": "".join(sentences)}


def boxed(text: str) -> str:
    """Return what stands in the last `\\boxed{…}`, with balanced braces; '' without one."""
    _, box, rest = text.rpartition("\\boxed")
    depth = 0
    for at, letter in enumerate(rest if box and rest.startswith("{") else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[1:at]
    return ""
