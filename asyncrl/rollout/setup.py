"""What a rollout worker is made of, from the configuration. ConfigError says which key is wrong."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.config import RunConfig
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.commands import EpisodeLimits, Rules
from asyncrl.conversation.parsers import parsers
from asyncrl.engines.base import Engine, engines
from asyncrl.environments import load_environment
from asyncrl.errors import ConfigError, one_line
from asyncrl.gateway import Agent, load_agent
from asyncrl.observe.files import first_day
from asyncrl.rewards import load_rewards, select_shapings
from asyncrl.rollout.roster import Client
from asyncrl.rollout.scoring import Scorer
from asyncrl.rollout.turn_player import World
from asyncrl.tools import Toolbox, load_tools
from asyncrl.wire.messages import EngineEntry

log = logging.getLogger("asyncrl.worker")

BUILT_IN = {"torch": "asyncrl.engines.torch.engine"}  # imported only by the workers that use it


@dataclass(frozen=True)
class Parts:
    """`build` makes an embedded engine with the initial weights; it may be called from a thread. `connect`
    makes a client of a server. A run has one or the other. `agent`: what leads the episodes, if any does."""

    build: Callable[[], Engine] | None
    connect: Callable[[EngineEntry], Client] | None
    rules: Rules
    world: World
    scorer: Scorer
    agent: Agent | None = None


def prepare(config: RunConfig) -> Parts:
    """Everything that can be wrong with a name or a file is found here."""
    remote = config.engine.remote
    build, connect = (None, connector(config)) if remote else (engine_factory(config), None)
    agent = load_agent(config.rollout.agent) if config.rollout.agent else None
    return Parts(build, connect, load_rules(config), load_world(config), load_scorer(config), agent)


def engine_factory(config: RunConfig) -> Callable[[], Engine]:
    """See `Parts.build`."""
    if config.engine.name in BUILT_IN:
        importlib.import_module(BUILT_IN[config.engine.name])
    factory, device = engines.load(config.engine.name), config.engine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda: factory(
        model_path=config.model.path,
        dtype=config.model.dtype,
        slots=config.rollout.slots,
        max_len=config.rollout.max_tokens,
        max_batch_tokens=config.engine.max_batch_tokens,
        device=device,
    )


def connector(config: RunConfig) -> Callable[[EngineEntry], Client]:
    """See `Parts.connect`."""
    from asyncrl.engines.sglang.connect import terms_of
    from asyncrl.engines.sglang.engine import SGLangEngine
    from asyncrl.engines.sglang.http import ServerApi
    from asyncrl.engines.sglang.process import keys

    terms, secrets = terms_of(config), keys(config.engine)
    return lambda entry: SGLangEngine(ServerApi(entry.url, *secrets), terms, salt=entry.incarnation)


def load_scorer(config: RunConfig) -> Scorer:
    """The reward function with the shapings of `algorithm.shaping`."""
    shapings = select_shapings(config.algorithm.shaping, "$.algorithm.shaping")
    return Scorer(load_rewards(config.rollout.reward), config.rollout.reward_timeout, shapings)


def load_world(config: RunConfig) -> World:
    """The tools, and what makes an environment."""
    rollout = config.rollout
    toolbox = Toolbox(load_tools(rollout.tools, rollout.tool_args), rollout.tool_timeout)
    return World(toolbox, load_environment(rollout.environment) if rollout.environment else None)


def load_rules(config: RunConfig) -> Rules:
    """The chat template, the parser and the limits."""
    rollout = config.rollout
    chat = load_chat(config)
    for warning in chat_warnings(config, chat):
        log.warning("%s", warning)
    limits = msgspec.convert(rollout, EpisodeLimits, from_attributes=True)
    return Rules(chat, parsers.load(rollout.parser), limits, bool(rollout.environment))


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
    """What the template makes of those who answer the model. ConfigError for what it makes impossible."""
    rollout = config.rollout
    if rollout.agent:  # its requests begin a new row wherever they must
        return []
    return chat.check(rollout.history, ["tool"] * bool(rollout.tools) + ["user"] * bool(rollout.environment))
