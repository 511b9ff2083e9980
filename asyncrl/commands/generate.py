"""`asyncrl generate MODEL out=FILE`: writes the answers of a model as a data set. An `asyncrl eval` without
greedy episodes, whose run is written to a file."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.commands.eval import argument_parser, check_order, evaluate, resolve_target, unknown_keys
from asyncrl.config import read_config
from asyncrl.data.messages import complete_json, marked_json
from asyncrl.data.rows import write_rows
from asyncrl.data.storage import StoredImages
from asyncrl.errors import ConfigError
from asyncrl.observe.held_out import SAMPLED, JudgedEpisode
from asyncrl.types import Message, Sample

HELP = """\
Sample answers and write them to a file, one row per prompt.

  asyncrl generate MODEL data=FILE.parquet out=answers.parquet episodes=4 rollout.reward=math
  asyncrl generate demo out=answers.jsonl         the newest checkpoint of a run, with its configuration
  asyncrl generate MODEL data=FILE.jsonl out=answers.jsonl rollout.reward=none         without a reward

All rows of the data are used, or only the first N with `samples=N`; with `episodes=K`, each row is answered
K times. A row of the file has data_source, prompt (messages), ground_truth (text, or JSON), and lists with
one entry per episode: responses (the text of the last turn), conversations (all messages, as JSON, with
images as data: URLs), rewards, stop_reasons, and tokens (the number of tokens that the model wrote). An
episode that failed in every attempt has no response and no reward. `<image>` in a prompt stands for the next
of the column images, which is there if the data have images. After a crash, run the same command again to
continue.
OVERRIDES work as in asyncrl train; asyncrl eval --help explains MODEL."""

if TYPE_CHECKING:
    from asyncrl.data.run_images import RunImages

OUT_PREFIX = "out="
COLUMNS = ("responses", "conversations", "rewards", "stop_reasons", "tokens")


def main(argv: list[str]) -> int:
    """Parse the arguments, sample and write. Exit code 1 where the run failed."""
    parser = argument_parser("generate", HELP)
    options = parser.parse_intermixed_args(argv)
    check_order(options)
    out_path = _take_out_path(options)
    options.overrides.insert(0, "validation.greedy=false")
    code, run_dir = evaluate(resolve_target(options.model, options.run_dir), options)

    if code or run_dir is None:
        return code
    from asyncrl.data import Samples, samples_path

    row_count = write_rows(out_path, _answer_rows(run_dir))
    sample_count = len(Samples.open(samples_path(run_dir, "test")))
    print(f"{out_path}: wrote answers to {row_count} of the {sample_count} prompts in the data")
    return 0


def _take_out_path(options: argparse.Namespace) -> Path:
    """Take the file to write from the overrides."""
    out_overrides = [argument for argument in options.overrides if argument.startswith(OUT_PREFIX)]
    options.overrides = [argument for argument in options.overrides if argument not in out_overrides]
    path = Path(out_overrides[-1].removeprefix(OUT_PREFIX)).expanduser() if out_overrides else Path()

    if path.suffix not in (".parquet", ".jsonl"):
        path_error = ConfigError(
            f"out={path if out_overrides else ''}: write out=FILE.parquet or out=FILE.jsonl"
        )
        raise unknown_keys(options.overrides) or path_error
    if not path.parent.is_dir():
        raise ConfigError(
            f"out={path}: the directory {path.parent} does not exist; create it, or choose another"
        )
    return path


def prompt_columns(sample: Sample, images: StoredImages | None) -> dict[str, Any]:
    """Return the columns `prompt` and, if the data have images, `images`, which `read_question` reads
    again."""
    columns: dict[str, Any] = {"prompt": [marked_json(message) for message in sample.prompt]}
    if images is not None:
        files = [images.file_of(image.digest) for message in sample.prompt for image in message.images]
        # Without images `<image>` in the prompt is text.
        columns["images"] = [{"bytes": file, "path": None} for file in files] or None
    return columns


def conversation_json(messages: Sequence[Message], images: RunImages) -> str:
    """Return a conversation as JSON that contains its images, including those of tools and environments. As
    the column `messages` of a demonstration, the text gives the same messages again."""
    files = images.files_of({image.digest for message in messages for image in message.images})
    return msgspec.json.encode([complete_json(message, files) for message in messages]).decode()


def _answer_rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield one row per sample, in the order of the samples."""
    from asyncrl.data import open_images
    from asyncrl.data.run_images import RunImages
    from asyncrl.episodes.parts import EpisodeParts
    from asyncrl.episodes.recorded import evaluated, judged_turns, reward_input
    from asyncrl.store.reader import RunReader

    parts = EpisodeParts(read_config(run_dir))
    samples, episodes = evaluated(run_dir)
    prompt_images = open_images(run_dir, "test")

    def episode_entry(judged: JudgedEpisode, sample: Sample) -> Sequence[Any]:
        if judged.result is None or judged.stats is None:
            return None, None, None, "failed", 0
        ending = judged.result.end

        recorded_input = reward_input(
            parts, sample, judged_turns(reader, judged), ending, judged.stats.tool_calls
        )
        return (
            recorded_input.answer,
            conversation_json(recorded_input.messages, run_images),
            judged.result.score,
            str(ending),
            judged.result.tokens,
        )

    with closing(RunReader.open(run_dir)) as reader:
        run_images = RunImages.open(run_dir, reader)
        sampled_episodes = sorted(
            (judged for judged in episodes if judged.identity.mode == SAMPLED), key=attrgetter("identity")
        )
        for row, members in groupby(sampled_episodes, key=attrgetter("identity.row")):
            sample = samples[row]
            entries = [episode_entry(judged, sample) for judged in members]
            ground_truth = sample.ground_truth
            yield {
                "data_source": sample.data_source,
                **prompt_columns(sample, prompt_images),
                "ground_truth": ground_truth if isinstance(ground_truth, str) else sample.ground_truth_json,
                **dict(zip(COLUMNS, map(list, zip(*entries, strict=True)), strict=True)),
            }
    asyncio.run(parts.close())
