"""Reads and checks the data of a run before the start, and saves the samples for the coordinator."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from asyncrl.config import RunConfig
from asyncrl.conversation.commands import Fail
from asyncrl.conversation.demonstration import demonstration_turns
from asyncrl.conversation.turns import rows_of
from asyncrl.data import EpochOrder, RowLayout, Samples, StoredImages, check_same_data, samples_path
from asyncrl.data.columns import IgnoredSettings, check_columns
from asyncrl.data.images import ImagePreparer
from asyncrl.data.samples import read_samples
from asyncrl.data.sources import source_paths
from asyncrl.data.storage import images_path, save_sequence_image_ids
from asyncrl.data.tasks import UNNAMED_TESTS, check_task, task_of
from asyncrl.errors import ConfigError
from asyncrl.launch.run_directory import describe_changes, stored_meta
from asyncrl.launch.truths import TESTS_REWARD, describe_truths
from asyncrl.registry import missing_column_advice
from asyncrl.tools import ToolError, check_sample_tools
from asyncrl.types import Sample
from asyncrl.vision.layout import ImageLayout

if TYPE_CHECKING:
    from asyncrl.episodes.parts import EpisodeParts

MESSAGE_OVERHEAD_TOKENS = 64  # Upper bound of the tokens that a template writes around a message.
MAX_MEASURED_SAMPLES = 1000  # Samples whose tokens are counted if only a warning depends on them.
# Keys that, beside data and template, decide which prompts are too long.
FILTER_KEYS = (
    *("rollout.max_tokens", "rollout.max_new_tokens", "rollout.tools", "rollout.tool_args"),
    *("rollout.history", "rollout.max_reply_tokens"),
)
IMAGE_KEYS = ("model.max_image_tokens",)  # Keys that, beside the model, decide the sizes of images.


class PreparedSplit(NamedTuple):
    """The samples of `train` or `test` in a file without a name, their images in another (None: there are
    none), and lines for people: warnings, and the number and sizes of the images."""

    samples: Samples
    images: StoredImages | None
    warnings: list[str]
    image_lines: list[str]


class RunData(NamedTuple):
    """The samples of a run, in files without names, and warnings about the samples. `truth_lines`: lines that
    show how the rewards read ground truths; `image_lines`: lines about images. `sequence_image_ids`: the most
    ids of images in a sequence that is trained, without images of tools and agents, which are unknown."""

    train: Samples
    test: Samples | None
    warnings: list[str]
    truth_lines: Sequence[str] = ()
    image_lines: Sequence[str] = ()
    train_images: StoredImages | None = None
    test_images: StoredImages | None = None
    sequence_image_ids: int = 0

    def save_samples(self, run_dir: Path) -> None:
        """Save samples and images where the coordinator finds them. Raises ConfigError if writing fails."""
        files: dict[Path, Samples | StoredImages | None] = {
            samples_path(run_dir, "train"): self.train,
            samples_path(run_dir, "test"): self.test,
            images_path(run_dir, "train"): self.train_images,
            images_path(run_dir, "test"): self.test_images,
        }
        try:
            for path, mapped_file in files.items():
                if mapped_file is not None:
                    mapped_file.save(path)
                else:
                    path.unlink(missing_ok=True)
            save_sequence_image_ids(run_dir, self.sequence_image_ids)
        except OSError as error:
            raise ConfigError(
                f"{run_dir}: not enough space for the samples ({error}); set run_dir=…"
            ) from error


def check_data(parts: EpisodeParts) -> RunData:
    """Check that the data sets load, hold at least a batch and name only configured tools, that prompts are
    not too long, and that a resumed run finds the samples of its first launch. Raises ConfigError."""
    config = parts.config
    check_columns(config.data.columns)

    test: PreparedSplit | None = None
    splits: list[PreparedSplit] = []
    if config.data.test:
        test = _check_split(parts, "test")
        splits.append(test)

    if test is not None and not config.total_steps:
        train = test
    else:
        train = _check_split(parts, "train")
        splits.insert(0, train)

    if len(train.samples) < config.buffer.groups_per_batch:
        raise ConfigError(
            f"data.train: too few samples ({len(train.samples)}) for one batch; lower "
            f"buffer.groups_per_batch ({config.buffer.groups_per_batch}), or add samples"
        )

    changes: list[str] = []
    if config.data.filter_overlong and (filter_changes := describe_changes(config, FILTER_KEYS)):
        changes.append(f"data.filter_overlong depends on {'; '.join(filter_changes)}")
    if train.images is not None and (size_changes := describe_changes(config, IMAGE_KEYS)):
        changes.append(f"the sizes of images depend on {'; '.join(size_changes)}")
    check_same_data(train.samples, stored_meta(config, "data"), "; ".join(changes))
    EpochOrder(train.samples, config.data, config.seed)(0)

    truth_lines, _ = describe_truths(parts.reward.rewards, train.samples)
    return RunData(
        train=train.samples,
        test=test.samples if test else None,
        warnings=[line for prepared in splits for line in prepared.warnings],
        truth_lines=truth_lines,
        image_lines=[line for prepared in splits for line in prepared.image_lines],
        train_images=train.images,
        test_images=test.images if test else None,
        sequence_image_ids=_sequence_image_ids(parts, train.images),
    )


def _sequence_image_ids(parts: EpisodeParts, images: StoredImages | None) -> int:
    """Return `RunData.sequence_image_ids`. Where an environment shows images, all ids may be of images."""
    max_tokens = parts.config.rollout.max_tokens
    if parts.environment_shows_images:
        return max_tokens
    return min(images.sample_ids, max_tokens) if images is not None else 0


def _check_split(parts: EpisodeParts, split: str) -> PreparedSplit:
    from asyncrl.algorithms.recipe import imitates  # The import takes a second

    config = parts.config

    truth_rewards = [reward.name for reward in parts.reward.rewards if reward.needs_truth]
    truth_reader = f"rollout.reward {truth_rewards[0]}" if truth_rewards else ""
    # Held-out rows may be prompts or demonstrations: None.
    demonstrations = imitates(config) and (split == "train" or None)
    layout = RowLayout(config.data.columns, config.data.system_prompt, truth_reader, demonstrations)

    prepared = prepare_samples(config, split, layout, prompt_budgets(parts), parts.require_images)
    samples = prepared.samples
    warnings = list(prepared.warnings)
    _, truth_warnings = describe_truths(parts.reward.rewards, samples)
    warnings += [f"data.{split}: {line}" for line in truth_warnings]

    _check_reward_columns(parts, split, samples)
    with ConfigError.instead_of(ConfigError, ValueError, text=f"data.{split}"):
        warnings += [f"data.{split}: {line}" for line in _check_tasks(parts, samples)]

    if not config.rollout.agent:  # An agent reads the tools of its data by itself.
        problems, ignored_lines = check_sample_tools(
            parts.toolbox.tools, (sample.extra_info_json for sample in samples)
        )
        if problems:
            raise ConfigError(
                f"data.{split}: {'; '.join(problems)}; add missing tools to rollout.tools, or fix the data"
            )
        warnings += [f"data.{split}: {line}; ignored" for line in ignored_lines]

    return prepared._replace(warnings=warnings)


def _check_reward_columns(parts: EpisodeParts, split: str, samples: Samples) -> None:
    """Raise ConfigError if a reward of TRL's signature needs a column that the first sample lacks."""
    sample = samples[0]
    if sample.demonstration:
        return

    for reward in parts.reward.rewards:
        missing_columns = [name for name in reward.needed_columns if name not in sample.columns]
        if missing_columns:
            name = missing_columns[0]
            raise ConfigError(
                f"data.{split}: rollout.reward {reward.name} needs a {name!r} column, but the first sample "
                f"has only {', '.join(sample.columns)}; {missing_column_advice(name)}, or give the "
                "parameter a default"
            )


def prepare_samples(
    config: RunConfig,
    split: str,
    layout: RowLayout,
    budgets: PromptBudgets,
    find_image_layout: Callable[[], ImageLayout],
) -> PreparedSplit:
    """Read the samples of `train` or `test`, and prepare their images. `find_image_layout`: see
    `ImagePreparer`. Raises ConfigError for any fault of the data."""
    data_key = f"data.{split}"
    filter_overlong = config.data.filter_overlong
    ignored_settings = IgnoredSettings()

    def sample_fits(sample: Sample) -> bool:
        budget = budgets.demonstrations if sample.demonstration else budgets.prompts
        return budget is None or budget.keeps_sample(sample, filter_overlong)

    try:
        with (
            tempfile.TemporaryFile() as samples_file,
            tempfile.TemporaryFile() as images_file,
            ImagePreparer(images_file, find_image_layout) as preparer,
        ):
            sample_iterators = (
                read_samples(config.data, path, split, layout, ignored_settings.count_row, preparer)
                for path in source_paths(config.data, split)
            )
            samples = Samples.write(
                samples_file, (filter(sample_fits, samples) for samples in sample_iterators)
            )
            images = preparer.finish()

        used_budgets = filter(None, (budgets.demonstrations, budgets.prompts))
        budget_lines = [line for budget in used_budgets for line in budget.report_lines(filter_overlong)]
    except ConfigError as error:
        raise ConfigError(f"{data_key}: {error}") from error
    except OSError as error:
        temporary_directory = tempfile.gettempdir()
        raise ConfigError(
            f"{data_key}: not enough space for the samples in {temporary_directory} ({error}); set TMPDIR"
        ) from error

    warnings = [*budget_lines, *ignored_settings.unmet_requests(config)]
    image_text = preparer.summary.describe()
    return PreparedSplit(
        samples,
        images,
        warnings=[f"{data_key}: {line}" for line in warnings],
        image_lines=[f"{data_key}: {image_text}"] if image_text else [],
    )


def _check_tasks(parts: EpisodeParts, samples: Samples) -> list[str]:
    """Raise ConfigError unless the samples are tasks exactly where the reward judges tasks. Return a warning
    if some tasks can be solved without a solution."""
    rewards = parts.reward.rewards
    rollout = parts.config.rollout
    uses_tests = any(reward.source.spec == TESTS_REWARD for reward in rewards)

    if not (uses_tests or any(map(task_of, samples))):  # 4 µs per sample
        return []

    unnamed_count = 0
    for sample in samples:
        tests = check_task(sample, uses_tests)
        unnamed_count += tests is not None and not tests.named
    warnings = (
        [f"{unnamed_count} of {len(samples)} tasks do not name their tests: {UNNAMED_TESTS}"]
        if unnamed_count
        else []
    )

    if other_rewards := [
        reward.name for reward in rewards if reward.needs_truth and reward.source.spec != TESTS_REWARD
    ]:
        raise ConfigError(
            f"rollout.reward {other_rewards[0]} cannot judge tasks; set rollout.reward={TESTS_REWARD}"
        )

    if rollout.agent or rollout.environment:
        return warnings

    states = {tool.state for tool in parts.toolbox.tools.values() if tool.state}
    change_tool_count = sum(hasattr(getattr(state, "func", state), "result") for state in states)
    if uses_tests and change_tool_count != 1:
        problem = (
            f"{change_tool_count} tools in rollout.tools change files, but tasks need exactly one such tool"
            if change_tool_count
            else "no tool in rollout.tools can change a task's files"
        )
        raise ConfigError(f"{problem}; set rollout.agent, or rollout.tools=[shell], [python] or [workspace]")
    return warnings


@dataclass
class PromptBudget:
    """Counts how many samples of one kind have at most `limit` tokens.

    `count_tokens` counts the tokens of a sample as the model reads the sample, with its tools;
    `count_image_tokens` those of the sample's images alone.
    `count_fixed_tokens` gives an upper bound of the tokens that template and tools add to the text of any
    sample, found with one sample. `limit_meaning` explains the limit, `overlong_fate` what happens to longer
    samples.
    """

    kind: str
    limit: int
    count_tokens: Callable[[Sample], int]
    count_fixed_tokens: Callable[[Sample], int]
    count_image_tokens: Callable[[Sample], int] = lambda sample: 0
    limit_meaning: str = ""
    overlong_fate: str = "these episodes will fail"
    fitting_count: int = 0
    overlong_count: int = 0
    empty_count: int = 0
    longest_tokens: int = 0
    measured_count: int = 0
    unmeasured_count: int = 0
    _fixed_tokens: int | None = field(default=None, init=False)

    def fits_limit(self, sample: Sample) -> bool:
        """Return whether a sample fits, and count the sample. A token is at least a byte of text, so most
        samples need not be rendered."""
        if self._fixed_tokens is None:
            self._fixed_tokens = self.count_fixed_tokens(sample)

        text_bytes = len(
            msgspec.msgpack.encode((sample.prompt, sample.extra_info_json if sample.demonstration else ""))
        )
        most_tokens = text_bytes + self.count_image_tokens(sample) + self._fixed_tokens
        token_count = 0
        if most_tokens + MESSAGE_OVERHEAD_TOKENS * len(sample.prompt) > self.limit:
            token_count = self.count_tokens(sample)
            self.measured_count += 1

        is_fitting = token_count <= self.limit
        self.fitting_count += is_fitting
        self.overlong_count += not is_fitting
        self.longest_tokens = max(self.longest_tokens, token_count)
        return is_fitting

    def keeps_sample(self, sample: Sample, filter_overlong: bool) -> bool:
        """Return True if a sample fits, or if overlong samples are kept; in that case at most
        MAX_MEASURED_SAMPLES are measured. An answer without content would teach the model to end its turn at
        once, so a sample with an empty answer is always left out."""
        if sample.demonstration and any(
            message.role == "assistant"
            and not (message.content.strip() or message.reasoning.strip() or message.tool_calls)
            for message in sample.prompt[sample.given :]
        ):
            self.empty_count += 1
            return False

        if not filter_overlong and self.measured_count >= MAX_MEASURED_SAMPLES:
            self.unmeasured_count += 1
            return True
        return self.fits_limit(sample) or not filter_overlong

    def report_lines(self, filter_overlong: bool) -> list[str]:
        """Return the counts as lines of text. Raises ConfigError if no sample that fits is left."""
        nothing_fits = not self.fitting_count and not self.unmeasured_count
        count_text = (
            "all"
            if nothing_fits and not self.empty_count
            else f"{self.overlong_count}"
            if filter_overlong
            else f"at least {self.overlong_count}"
        )
        overlong_subject = (
            f"{self.kind}s have" if count_text == "all" or self.overlong_count != 1 else f"{self.kind} has"
        )
        empty_subject = f"{self.kind} has" if self.empty_count == 1 else f"{self.kind}s have"

        size_text = f"more than {self.limit} tokens (the longest has {self.longest_tokens})"
        overlong_text = f"{count_text} {overlong_subject} {size_text}{self.limit_meaning}"
        empty_text = f"{self.empty_count} {empty_subject} an empty assistant message"

        if nothing_fits and (self.overlong_count or self.empty_count):
            advice = (
                f"{overlong_text}; raise rollout.max_tokens"
                if self.overlong_count
                else f"{empty_text}, and no other samples are left"
            )
            raise ConfigError(advice)

        fate_text = f", so {self.overlong_fate}; set data.filter_overlong=true, or raise rollout.max_tokens"
        if filter_overlong:
            fate_text = ", and will be left out (data.filter_overlong)"

        lines = []
        if self.overlong_count:
            lines.append(f"{overlong_text}{fate_text}")
        if self.empty_count:
            lines.append(f"{empty_text}, and will be left out")
        return lines


class PromptBudgets(NamedTuple):
    """The budgets of prompts and demonstrations. Samples of a kind without a budget are not measured."""

    prompts: PromptBudget | None = None
    demonstrations: PromptBudget | None = None


def prompt_budgets(parts: EpisodeParts) -> PromptBudgets:
    """Return the budgets of prompts and demonstrations, as the model reads the samples. Prompts of agents
    have no budget: agents write their own prompts."""
    rules = parts.rules
    toolbox = parts.toolbox
    rollout = parts.config.rollout

    def prompt_tokens(sample: Sample) -> int:
        try:
            return len(rules.chat.prompt_ids(sample.prompt, toolbox.schemas(sample)))
        except ToolError:  # reported by `check_sample_tools`
            return 0
        except ConfigError:
            if rollout.environment:  # Its first message follows, and may satisfy the template
                return 0
            raise

    def conversation_tokens(sample: Sample) -> int:
        turns = demonstration_turns(rules, sample, toolbox.schemas(sample))
        # A Fail is reported by a later check.
        return 0 if isinstance(turns, Fail) else max(map(len, rows_of(turns)))

    def image_tokens(sample: Sample) -> int:
        images = [image for message in sample.prompt for image in message.images]
        if not images:
            return 0
        image_layout = parts.require_images()
        return sum(image_layout.run_length(image.height, image.width) for image in images)

    def shown_prompt_tokens(sample: Sample) -> int:
        """Return the tokens of the messages before the first answer, with all tools."""
        opening_messages = tuple(takewhile(lambda message: message.role != "assistant", sample.prompt))
        return prompt_tokens(
            msgspec.structs.replace(sample, prompt=opening_messages or sample.prompt, extra_info_json="{}")
        )

    conversations = PromptBudget(
        "conversation", rollout.max_tokens, conversation_tokens, shown_prompt_tokens, image_tokens
    )
    if rollout.agent:
        return PromptBudgets(demonstrations=conversations)

    room_left = rollout.max_tokens - rollout.longest_prompt
    prompts = PromptBudget(
        "prompt",
        rollout.longest_prompt,
        prompt_tokens,
        shown_prompt_tokens,
        image_tokens,
        limit_meaning=f", leaving fewer than {room_left} tokens for a turn (rollout.max_new_tokens)",
        overlong_fate="these episodes will be cut short or fail",
    )
    return PromptBudgets(prompts, conversations)
