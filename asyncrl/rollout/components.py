"""The parts of a run's episodes, from its configuration: chat, tools, rewards. ConfigError names the key.

Used by the worker, and by the launcher before it starts any process. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.conversation.chat import Chat
from asyncrl.errors import ConfigError, one_line
from asyncrl.observe.files import first_day
from asyncrl.rewards import load_rewards, select_shapings
from asyncrl.rollout.scoring import Scorer
from asyncrl.tools import Toolbox, load_tools

ENGINE_MODULES = {"torch": "asyncrl.engines.torch.engine"}  # imported only by the workers that use it


def load_toolbox(config: RunConfig) -> Toolbox:
    """The tools of `rollout.tools`."""
    rollout = config.rollout
    return Toolbox(load_tools(rollout.tools, rollout.tool_args), rollout.tool_timeout)


def load_scorer(config: RunConfig) -> Scorer:
    """The reward function with the shapings of `algorithm.shaping`."""
    shapings = select_shapings(config.algorithm.shaping, "$.algorithm.shaping")
    return Scorer(load_rewards(config.rollout.reward), config.rollout.reward_timeout, shapings)


def load_chat(config: RunConfig) -> Chat:
    """The model's chat template. ConfigError if there is no usable one."""
    from transformers import AutoTokenizer  # takes seconds, and the launcher needs only names of this file

    tokenizer: Any
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"$.model.path {config.model.path!r}: no usable tokenizer ({one_line(error)})"
        ) from error
    return Chat(tokenizer, first_day(Path(config.run_dir) / config.name))


def chat_warnings(config: RunConfig, chat: Chat) -> list[str]:
    """Warnings about how the template writes tool replies and an environment's messages. ConfigError where it
    cannot write them."""
    rollout = config.rollout
    if rollout.agent:  # its requests begin a new row wherever they must
        return []
    return chat.check(rollout.history, ["tool"] * bool(rollout.tools) + ["user"] * bool(rollout.environment))
