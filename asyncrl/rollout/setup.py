"""The parts of a rollout worker, from the configuration. ConfigError says which key is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrl.config import RunConfig
from asyncrl.conversation.commands import Rules
from asyncrl.engines.base import Engine, engines
from asyncrl.environments import Environment, load_environment
from asyncrl.gateway import Agent, load_agent
from asyncrl.rollout.components import load_rules, load_scorer, load_toolbox
from asyncrl.rollout.scoring import Scorer
from asyncrl.rollout.server_pool import Client, Connect
from asyncrl.runtime.imports import quick_imports
from asyncrl.tools import Toolbox
from asyncrl.wire.messages.worker_control import EngineEntry, EngineUse


@dataclass(frozen=True)
class WorkerParts:
    """`build` makes an embedded engine with the initial weights; it may be called from a thread. `connect`
    makes a client of a server. A run has one or the other. `environment` makes one for an episode."""

    build: Callable[[], Engine] | None
    connect: Connect | None
    rules: Rules
    toolbox: Toolbox
    scorer: Scorer
    environment: Callable[[], Environment] | None = None
    agent: Agent | None = None


def prepare(config: RunConfig) -> WorkerParts:
    """Everything that can be wrong with a name or a file is found here."""
    rollout, remote = config.rollout, config.engine.remote
    return WorkerParts(
        build=None if remote else engine_factory(config),
        connect=connector(config) if remote else None,
        rules=load_rules(config),
        toolbox=load_toolbox(config),
        scorer=load_scorer(config),
        environment=load_environment(rollout.environment) if rollout.environment else None,
        agent=load_agent(rollout.agent) if rollout.agent else None,
    )


def engine_factory(config: RunConfig) -> Callable[[], Engine]:
    """See `WorkerParts.build`."""
    with quick_imports():
        factory, device = engines.load(config.engine.name), config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda: factory(
        model_path=config.model.path,
        dtype=config.model.dtype,
        slots=config.rollout.slots,
        max_len=config.rollout.max_tokens,
        device=device,
    )


def connector(config: RunConfig) -> Connect:
    """See `WorkerParts.connect`."""
    from asyncrl.engines.sglang.client import SGLangClient
    from asyncrl.engines.sglang.http import ServerApi
    from asyncrl.engines.sglang.process import keys
    from asyncrl.engines.sglang.server import vocabulary_of

    vocabulary, secrets = vocabulary_of(config), keys(config.engine)

    def connect(entry: EngineEntry, use: EngineUse) -> Client:
        return SGLangClient(ServerApi(entry.url, *secrets), config, vocabulary, use, salt=entry.incarnation)

    return connect
