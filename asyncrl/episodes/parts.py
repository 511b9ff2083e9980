"""Makes the parts of a run's episodes from the configuration, and checks the parts before the start.

The launcher's checks, workers and the commands over recorded episodes use the parts. Nothing here imports
torch.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.commands import Fail, Rules
from asyncrl.conversation.demonstration import demonstration_turns
from asyncrl.conversation.parsers import Parser, load_parser, parse_turn
from asyncrl.conversation.requests import IsUntrained, texts_of
from asyncrl.conversation.tokenizer import load_tokenizer
from asyncrl.conversation.turns import rows_of
from asyncrl.environments import Environment, load_environment
from asyncrl.episodes.image_checks import check_images, run_image_layout
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.errors import ConfigError
from asyncrl.gateway import Agent, Command, load_agent, load_untrained
from asyncrl.observe.files import first_day
from asyncrl.rewards import load_rewards, select_shapings
from asyncrl.tools import Toolbox, load_tools
from asyncrl.types import Message, Sample
from asyncrl.vision.image_ids import largest_token_id
from asyncrl.vision.layout import ImageLayout, is_vision_model
from asyncrl.weights.model_files import read_json

MAX_CHECKED_DEMONSTRATIONS = 256  # conversations checked before the start, in less than a second


class EpisodeParts:
    """The parts that all episodes of a run share. Each part is made at the first use, and kept: all checks of
    a launcher share one object, as do all episodes of a worker. ConfigError names the key or the file.

    `config` must name a model directory. Files of other keys of `algorithm` may register shapings: compose
    the recipe before the first use of `reward`.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @cached_property
    def toolbox(self) -> Toolbox:
        rollout = self.config.rollout
        return Toolbox(load_tools(rollout.tools, rollout.tool_args), rollout.tool_timeout, self.image_layout)

    @cached_property
    def reward(self) -> EpisodeReward:
        """Return the reward function with the shapings of `algorithm.shaping`."""
        rollout = self.config.rollout
        shapings = select_shapings(self.config.algorithm.shaping, "algorithm.shaping")
        return EpisodeReward(load_rewards(rollout.reward), rollout.reward_timeout, shapings)

    @cached_property
    def environment(self) -> Callable[[], Environment] | None:
        """Return the factory of the episodes' environments; None without `rollout.environment`. ConfigError
        also if the environment needs images and the model reads text only."""
        environment_name = self.config.rollout.environment
        if not environment_name:
            return None

        if self.environment_shows_images and self.image_layout is None:
            with ConfigError.instead_of(ConfigError, text="rollout.environment shows images"):
                self.require_images()
        return load_environment(environment_name)

    @cached_property
    def environment_shows_images(self) -> bool:
        """Return whether the environment shows images to the model; False without `rollout.environment`."""
        environment_name = self.config.rollout.environment
        return bool(environment_name) and getattr(load_environment(environment_name)(), "needs_images", False)

    @cached_property
    def agent(self) -> Agent | None:
        """Return the agent; None without `rollout.agent`."""
        agent_name = self.config.rollout.agent
        reward = self.config.rollout.reward
        agent = load_agent(agent_name) if agent_name else None

        silent_harness = isinstance(agent, Command) and agent.harness.stdin != "sample" and agent.harness.name
        if silent_harness and "agent" in ([reward] if isinstance(reward, str) else reward):
            raise ConfigError(
                f"rollout.reward is agent, but rollout.agent {silent_harness} returns no score; "
                "set another reward"
            )

        return agent

    @cached_property
    def untrained(self) -> IsUntrained:
        """Return the function that recognises side requests: requests of `rollout.untrained_agents`, and
        requests that no adapter answers."""
        untrained = load_untrained(self.config.rollout.untrained_agents)
        config = self.config
        if not config.agents or config.model.lora_rank:
            return untrained
        return lambda request: request.agent not in config.agents or untrained(request)

    @cached_property
    def parser(self) -> Parser:
        """Return the parser of tool calls, `rollout.parser`."""
        return load_parser(self.config.rollout.parser)

    @cached_property
    def image_layout(self) -> ImageLayout | None:
        """Return how the run reads images; None if it reads none. ConfigError if this machine lacks the
        files for that, although the launcher has decided that the run reads images."""
        model = self.config.model
        reads_images = model.read_images and (model.max_image_tokens or is_vision_model(model.path))
        return run_image_layout(self.config) if reads_images else None

    def require_images(self) -> ImageLayout:
        """Return how the run reads images. ConfigError says why it reads none."""
        check_images(self.config)
        return run_image_layout(self.config)

    @cached_property
    def chat(self) -> Chat:
        """Return the tokenizer, with the chat template of the model or `model.template`."""
        config = self.config
        tokenizer = load_tokenizer(config.model.path)
        template_options = config.model.template_args
        if config.model.template:
            tokenizer.chat_template = config.model.template

        template_names = set(re.findall(r"\w+", str(tokenizer.chat_template)))
        if unread_options := sorted(template_options.keys() - template_names):
            raise ConfigError(
                f"model.template_args: the chat template does not read {unread_options[0]!r}; correct or "
                "remove the name"
            )

        today = first_day(Path(config.run_dir) / config.name)
        stop_ids = _generation_stop_ids(Path(config.model.path) / "generation_config.json")
        try:
            return Chat(tokenizer, today, template_options, stop_ids, self.image_layout)
        except ConfigError as error:
            key = "model.template" if config.model.template else config.model.path
            raise ConfigError(f"{key}: {error}") from error

    @cached_property
    def rules(self) -> Rules:
        """Return the rules of the episode machine: the chat template, the parser and the limits."""
        rows_apart = bool(self.config.agents)
        return Rules(self.chat, self.parser, self.config.rollout, rows_apart, self.config.kl.prompt)

    def load_parts(self, *names: str) -> EpisodeParts:
        """Make the named parts, or all parts, to find faults of names and files."""
        for name in names or ("rules", "toolbox", "reward", "environment", "agent", "untrained"):
            getattr(self, name)
        return self

    async def close(self) -> None:
        """Close the tools and the reward processes that were made. A later use makes new ones."""
        used_parts = [self.__dict__.pop(name, None) for name in ("toolbox", "reward")]
        await asyncio.gather(*(part.close() for part in used_parts if part is not None))


def _generation_stop_ids(path: Path) -> list[int]:
    """Return the ids that end generation by a model's generation_config.json, which need not exist.
    ConfigError for an unreadable file: turns would end elsewhere than the model was trained to."""
    eos_ids: Any = read_json(path).get("eos_token_id") if path.is_file() else None
    if eos_ids is None:
        return []

    stop_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    if not all(type(stop_id) is int for stop_id in stop_ids):
        raise ConfigError(f"{path}: eos_token_id must be a token ID or a list of token IDs, not {eos_ids!r}")
    return stop_ids


def check_chat(parts: EpisodeParts, prompt: tuple[Message, ...]) -> list[str]:
    """Render the tools and the first prompt of the data as the model will read them; ConfigError if the
    template cannot write them, or the messages that answer a turn. Return warnings about the template."""
    rollout = parts.config.rollout
    chat = parts.chat
    tools = parts.toolbox.tools
    if rollout.agent:  # requests of an agent bring tools, and may begin new rows
        return []

    for name, tool in tools.items():
        try:
            chat.prompt_ids((Message("user", "?"),), (tool.schema_text,))
        except ConfigError as error:
            raise ConfigError(
                f"rollout.tools: the tool {name!r} cannot be shown to the model: {error}; change the tool's "
                "signature"
            ) from error

    if not rollout.environment:  # the environment's first message follows the prompt
        try:
            chat.prompt_ids(prompt, tuple(tool.schema_text for tool in tools.values()))
        except ConfigError as error:
            raise ConfigError(f"data.train, sample 0: {error}; change the prompt") from error

    roles = []
    if rollout.tools:
        roles.append("tool")
    if rollout.environment:
        roles.append("user")
    return chat.check_history(rollout.history, roles, calls_shown=tools.keys() <= shown_calls(parts, prompt))


def check_token_ids(parts: EpisodeParts, key: str, samples: Sequence[Sample], embedding_rows: int) -> None:
    """Hold the ids of rendered prompts, or conversations, against the `embedding_rows` of the model's
    embedding.

    Tokenizers may have more tokens than the embedding has rows, as long as nothing writes the extra tokens.
    ConfigError for a sample that does, and for a model that cannot end a turn.
    """
    chat = parts.chat
    missing_tokens = chat.tokens_beyond(embedding_rows)
    if not missing_tokens:
        return

    advice = (
        f"the embedding of {parts.config.model.path} has {embedding_rows} rows; run "
        "model.resize_token_embeddings(len(tokenizer)) and save the model"
    )
    if chat.stop_ids and min(chat.stop_ids) >= embedding_rows:
        raise ConfigError(
            f"model.path: every token that ends a turn has an ID of at least {min(chat.stop_ids)}, but "
            f"{advice}"
        )

    needs_text = chat.splits_at(missing_tokens)
    # Arguments of calls and extra_info are JSON text, where some characters are escaped.
    escaped_tokens = [
        json.dumps(token, ensure_ascii=is_ascii)[1:-1]
        for token in missing_tokens
        for is_ascii in (True, False)
    ]

    spellings = {*missing_tokens, *escaped_tokens}
    for sample in samples:
        prompt_texts = [text for message in sample.prompt for text in texts_of(message)]
        sample_text = "\n".join([sample.extra_info_json, *prompt_texts])
        written_by_text = any(spelling in sample_text for spelling in spellings) or not needs_text
        if sample is not samples[0] and not written_by_text:
            continue

        highest_id = largest_token_id(tuple(_rendered_ids(parts, sample)))
        if highest_id >= embedding_rows:
            token = next(token for token, token_id in missing_tokens.items() if token_id == highest_id)
            raise ConfigError(
                f"{key}, sample {sample.row}: the prompt contains the token {token!r} ({highest_id}), but "
                f"{advice}, or remove the token from the prompt or the chat template"
            )


def check_images_written(parts: EpisodeParts, key: str, samples: Sequence[Sample]) -> None:
    """Render the first sample with images as the run will. ConfigError if the chat template does not write
    its images."""
    for sample in samples:
        if any(message.images for message in sample.prompt):
            with ConfigError.instead_of(ConfigError, text=f"{key}, sample {sample.row}"):
                _rendered_ids(parts, sample)
            return


def _rendered_ids(parts: EpisodeParts, sample: Sample) -> Iterable[int]:
    """Return the ids that the model reads of a sample, or the ids of a short prompt if an environment or an
    agent writes the prompt."""
    rollout = parts.config.rollout
    schemas = parts.toolbox.schemas(sample)

    if sample.demonstration:
        turns = demonstration_turns(parts.rules, sample, schemas)
        if isinstance(turns, Fail):
            return ()  # the sample is refused later
        return chain.from_iterable(rows_of(turns))

    if rollout.environment or rollout.agent:
        return parts.chat.prompt_ids((Message("user", "?"),), schemas)

    return parts.chat.prompt_ids(sample.prompt, schemas)


def shown_calls(parts: EpisodeParts, prompt: tuple[Message, ...]) -> set[str]:
    """Return the tools called in the prompt's worked examples: the turns of the model in the prompt."""
    tools = parts.toolbox.tools
    schemas = tuple(tool.schema_text for tool in tools.values())
    model_texts = [message.content for message in prompt if message.role == "assistant"]
    parsed_turns = [parse_turn(parts.parser, text, schemas) for text in model_texts]
    return {call.name for parsed_turn in parsed_turns for call in parsed_turn.calls} & tools.keys()


def check_demonstrations(parts: EpisodeParts, key: str, samples: Sequence[Sample]) -> None:
    """Render up to MAX_CHECKED_DEMONSTRATIONS conversations, spread over the data, as the run will.
    ConfigError for a conversation that cannot be learned. Prompts are passed over."""
    stride = -(-len(samples) // MAX_CHECKED_DEMONSTRATIONS)
    for sample in filter(lambda sample: sample.demonstration, samples[::stride]):
        turns = demonstration_turns(parts.rules, sample, parts.toolbox.schemas(sample))
        if isinstance(turns, Fail):
            raise ConfigError(f"{key}, sample {sample.row}: {turns.detail}")
