"""The data of a run before it starts: read, checked, and saved for the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from asyncrl.config import RunConfig
from asyncrl.data import EpochOrder, Room, RowLayout, Samples, check_same_data, prepare, samples_path
from asyncrl.errors import ConfigError
from asyncrl.launch.run_directory import run_directory
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import DATABASE
from asyncrl.tools import Tool, Toolbox, ToolError, check_sample_tools
from asyncrl.types import Sample

# Rewards that can do without a ground truth. Those of users, whose names have a colon, say so themselves.
NO_TRUTH = frozenset({"agent", "classifier", "format", "llm_judge", "none", "reward_model"})


NUMBERS = ("final_number", "gsm8k")  # rewards that compare numbers
LOOKED_AT = 100  # samples whose ground truth is looked at for them


class RunData(NamedTuple):
    """The samples of a run, in files without names, and warnings about them."""

    train: Samples
    test: Samples | None
    warnings: list[str]

    def save(self, run_dir: Path) -> None:
        """Where the coordinator finds them. ConfigError where they cannot be written."""
        try:
            self.train.save(samples_path(run_dir, "train"))
            if self.test is not None:
                self.test.save(samples_path(run_dir, "test"))
        except OSError as error:
            raise ConfigError(f"{run_dir}: no room for the samples ({error}); set run_dir=…") from error


def check_data(config: RunConfig, tools: Mapping[str, Tool]) -> RunData:
    """The data sets load, hold at least a batch, and name only configured tools; prompts are not too long; a
    resumed run finds the samples that it was begun with. Raises ConfigError."""
    from asyncrl.algorithms.library import imitates  # here and below: it takes a second

    found: dict[str, Samples] = {}
    warnings: list[str] = []
    for split in ("train", "test") if config.data.test else ("train",):
        imitated = split == "train" and imitates(config)
        room = None if imitated or config.rollout.agent else _room(config, tools)
        found[split], more = prepare(config, split, _layout(config, imitated), room)
        warnings += more
        if not imitated and (complaint := _no_numbers(config, found[split])):
            warnings.append(f"data.{split}: {complaint}")
    train = found["train"]
    for split, samples in found.items():
        if config.rollout.agent:  # the agent itself reads what its data says about tools
            break
        problems, ignored = check_sample_tools(tools, (sample.extra_info for sample in samples))
        if problems:
            raise ConfigError(
                f"data.{split}: {'; '.join(problems)}; add it to rollout.tools, or correct the data"
            )
        warnings += [f"data.{split}: {line}; ignored" for line in ignored]
    if len(train) < config.buffer.groups_per_batch:
        raise ConfigError(
            f"data.train: {len(train)} samples are less than one batch; lower "
            f"buffer.groups_per_batch ({config.buffer.groups_per_batch}) or add samples"
        )
    check_same_data(train, _kept(config))
    EpochOrder(train, config.data, config.seed)(0)
    return RunData(train, found.get("test"), warnings)


def _no_numbers(config: RunConfig, samples: Samples) -> str:
    """A warning where the reward compares numbers, as the default does, and ground truths are words."""
    named = [name for name in NUMBERS if name in _rewards(config)]
    looked_at = [samples[n] for n in range(min(len(samples), LOOKED_AT))]
    words = [s.ground_truth for s in looked_at if not any(map(str.isdigit, s.ground_truth))]
    if not named or not words:
        return ""
    return (
        f"rollout.reward {named[0]} compares numbers, and {len(words)} of the first {len(looked_at)} ground "
        f"truths are none, such as {words[0][:50]}: they earn nothing; set rollout.reward, e.g. to exact"
    )


def _rewards(config: RunConfig) -> set[str]:
    reward = config.rollout.reward
    return {reward} if isinstance(reward, str) else set(reward)


def _layout(config: RunConfig, demonstrations: bool) -> RowLayout:
    """How rows become samples in this run."""
    needing = sorted(name for name in _rewards(config) - NO_TRUTH if ":" not in name)
    truth = f"rollout.reward {needing[0]}" if needing else ""
    return RowLayout(config.data.columns, config.data.system_prompt, truth, demonstrations)


def _room(config: RunConfig, tools: Mapping[str, Tool]) -> Room:
    """Measures prompts as the model reads them."""
    from asyncrl.rollout.components import load_chat

    chat, box = load_chat(config), Toolbox(tools)

    def tokens(sample: Sample) -> int:
        try:
            return len(chat.prompt_ids(sample.prompt, box.schemas(sample)))
        except ToolError:  # `check_sample_tools` says what is wrong
            return 0
        except ConfigError:
            if config.rollout.environment:  # its first message follows, and may be what the template asks for
                return 0
            raise

    return Room(config.rollout, tokens)


def _kept(config: RunConfig) -> str:
    """The fingerprint of the samples that a run to be continued was begun with; '' for a new one."""
    database = run_directory(config) / DATABASE
    if config.resume == "never" or not database.exists() or not database.stat().st_size:
        return ""
    with closing(RunReader.open(run_directory(config))) as reader:
        return reader.meta("data")
