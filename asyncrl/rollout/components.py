"""The parts of a run's episodes, from its configuration: chat, tools, rewards. ConfigError names the key.

Used by the worker, and by the launcher before it starts any process. Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.commands import Rules
from asyncrl.conversation.parsers import load_parser, parse_turn
from asyncrl.conversation.tokenizer import load_tokenizer
from asyncrl.errors import ConfigError, one_line
from asyncrl.observe.files import first_day
from asyncrl.rewards import load_rewards, select_shapings
from asyncrl.rollout.scoring import Scorer
from asyncrl.tools import Tool, Toolbox, load_tools
from asyncrl.types import Message


def load_toolbox(config: RunConfig) -> Toolbox:
    """The tools of `rollout.tools`."""
    rollout = config.rollout
    return Toolbox(load_tools(rollout.tools, rollout.tool_args), rollout.tool_timeout)


def load_scorer(config: RunConfig) -> Scorer:
    """The reward function with the shapings of `algorithm.shaping`."""
    shapings = select_shapings(config.algorithm.shaping, "algorithm.shaping")
    return Scorer(load_rewards(config.rollout.reward), config.rollout.reward_timeout, shapings)


def load_chat(config: RunConfig) -> Chat:
    """The chat template of the model, or `model.template`. ConfigError if there is no usable one."""
    tokenizer, options = load_tokenizer(config.model.path), config.model.template_args
    if config.model.template:
        tokenizer.chat_template = config.model.template
    names = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    if unread := sorted(options.keys() - names):
        raise ConfigError(
            f"model.template_args: the chat template does not read {unread[0]!r}; correct the "
            "name, or leave it out"
        )
    today = first_day(Path(config.run_dir) / config.name)
    ends = _ends(Path(config.model.path) / "generation_config.json")
    try:
        return Chat(tokenizer, today, options, ends)
    except ConfigError as error:
        raise ConfigError(
            f"{'model.template' if config.model.template else config.model.path}: {error}"
        ) from error


def load_rules(config: RunConfig) -> Rules:
    """The chat template, the parser and the limits."""
    return Rules(load_chat(config), load_parser(config.rollout.parser), config.rollout)


def _ends(path: Path) -> list[int]:
    """The ids with which generation ends, by a model's generation_config.json, which need not be there.
    ConfigError for one that cannot be read: its turns would end elsewhere than the model was trained to."""
    try:
        found: Any = json.loads(path.read_bytes()).get("eos_token_id")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: no readable JSON object ({one_line(error)}); write it anew, or remove it"
        ) from None
    ends = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(end) is int for end in ends):
        raise ConfigError(
            f"{path}: eos_token_id is {found!r}, and must be an id or a list of ids; correct it"
        )
    return ends


def check_chat(config: RunConfig, tools: Mapping[str, Tool], prompt: tuple[Message, ...]) -> list[str]:
    """Write the tools and the first prompt of the data as the model will read them; ConfigError where the
    template cannot, or cannot write the messages that answer a turn. Returns warnings about what it does."""
    rollout, chat = config.rollout, load_chat(config)
    if rollout.agent:  # its requests bring their own tools, and begin a new row wherever they must
        return []
    for name, tool in tools.items():
        try:
            chat.prompt_ids((Message("user", "?"),), (tool.schema_text,))
        except ConfigError as error:
            raise ConfigError(
                f"rollout.tools: the model cannot be shown the tool {name!r}, change its signature: {error}"
            ) from error
    if not rollout.environment:  # its first message follows the prompt
        try:
            chat.prompt_ids(prompt, tuple(tool.schema_text for tool in tools.values()))
        except ConfigError as error:
            raise ConfigError(f"data.train: sample 0: {error}; change the prompt") from error
    roles = ["tool"] * bool(rollout.tools) + ["user"] * bool(rollout.environment)
    return chat.check(rollout.history, roles, shown=tools.keys() <= shown_calls(config, tools, prompt))


def shown_calls(config: RunConfig, tools: Mapping[str, Tool], prompt: tuple[Message, ...]) -> set[str]:
    """Return the tools called in the prompt's worked examples, that is, turns of the model in it."""
    parser, schemas = load_parser(config.rollout.parser), tuple(tool.schema_text for tool in tools.values())
    turns = [
        parse_turn(parser, message.content, schemas) for message in prompt if message.role == "assistant"
    ]
    return {call.name for turn in turns for call in turn.calls} & tools.keys()
