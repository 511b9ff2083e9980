"""What a rollout worker is made of, from the configuration. ConfigError says which key is wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrl.config import RolloutConfig, RunConfig
from asyncrl.engines.base import Engine, engines
from asyncrl.errors import ConfigError, one_line
from asyncrl.rewards import load_reward, select_shapings
from asyncrl.roles.roster import Client
from asyncrl.roles.scoring import Scorer
from asyncrl.rollout.chat import Chat
from asyncrl.rollout.episode import Limits, Rules
from asyncrl.rollout.parsers import parsers
from asyncrl.tools import Tool, load_tool
from asyncrl.transport.messages import EngineEntry

BUILT_IN = {"torch": "asyncrl.engines.torch"}  # imported only by the workers that use it


@dataclass(frozen=True)
class Parts:
    """`build` makes an embedded engine with the initial weights; it may be called from a thread. `connect`
    makes a client of a server. A run has one or the other."""

    build: Callable[[], Engine] | None
    connect: Callable[[EngineEntry], Client] | None
    rules: Rules
    tools: dict[str, Tool]
    scorer: Scorer


def prepare(config: RunConfig) -> Parts:
    """Everything that can be wrong with a name or a file is found here."""
    tools = load_tools(config.rollout)
    scorer = load_scorer(config)
    remote = config.engine.remote
    build, connect = (None, connector(config)) if remote else (engine_factory(config), None)
    return Parts(build, connect, load_rules(config, tools), tools, scorer)


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
    from asyncrl.engines.sglang import SGLangEngine
    from asyncrl.engines.sglang_connect import terms_of
    from asyncrl.engines.sglang_http import Server
    from asyncrl.engines.sglang_process import keys

    terms, secrets = terms_of(config), keys(config.engine)
    return lambda entry: SGLangEngine(Server(entry.url, *secrets), terms, salt=entry.incarnation)


def load_scorer(config: RunConfig) -> Scorer:
    """The reward function with the shapings of `algorithm.shaping`."""
    shapings = select_shapings(config.algorithm.shaping, "$.algorithm.shaping")
    return Scorer(load_reward(config.rollout.reward), config.rollout.reward_timeout, shapings)


def load_tools(config: RolloutConfig) -> dict[str, Tool]:
    """Tools by the name that the model calls them by."""
    found: dict[str, Tool] = {}
    for spec in config.tools:
        tool = load_tool(spec, **config.tool_args.get(spec, {}))
        if tool.name in found:
            raise ConfigError(f"$.rollout.tools: two tools are named {tool.name!r}; leave one out")
        found[tool.name] = tool
    unused = sorted(config.tool_args.keys() - set(config.tools))
    if unused:
        raise ConfigError(
            f"$.rollout.tool_args names {', '.join(unused)}, not in rollout.tools; add it there"
        )
    return found


def load_rules(config: RunConfig, tools: dict[str, Tool]) -> Rules:
    """The chat template with the tools' schemas, the parser and the limits."""
    from transformers import AutoTokenizer  # takes seconds, and the launcher needs only names of this file

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"$.model.path {config.model.path!r}: no usable tokenizer ({one_line(error)})"
        ) from error
    rollout = config.rollout
    limits = Limits(rollout.max_turns, rollout.max_tokens, rollout.max_new_tokens, rollout.max_bad_calls)
    chat = Chat(tokenizer, [tool.schema for tool in tools.values()])
    return Rules(chat, parsers.load(rollout.parser), limits)
