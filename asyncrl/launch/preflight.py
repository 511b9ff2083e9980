"""Checks before any process starts. Each problem is one ConfigError: what is wrong, and how to correct it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.data import RunData, check_data
from asyncrl.launch.devices import sees_gpu
from asyncrl.launch.estimates import cost_warnings
from asyncrl.launch.memory import check_memory
from asyncrl.launch.model_directory import chat_template, check_model
from asyncrl.launch.run_directory import check_resumed, creatable, run_directory
from asyncrl.launch.servers import check_servers
from asyncrl.observe.trackers import check_trackers
from asyncrl.store.schema import DATABASE
from asyncrl.tools import Tool
from asyncrl.weights.model_files import weight_bytes


def check(config: RunConfig) -> RunData:
    """Raise the first ConfigError, cheap checks first. Nothing is written and nothing started. The data, with
    all warnings about what is valid, but probably a mistake, one line each."""
    check_resumed(config)
    if config.launch.kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("launch.kind is ray, which is not installed; pip install 'asyncrl[ray]'")
    check_trackers(config)
    check_model(config)
    tools = check_names(config)
    with _quiet():
        data = check_data(config, tools)
    check_device(config)
    if config.total_steps:
        check_memory(config, sees_gpu(config))
    check_weights_directory(config)
    check_checkpoint_directory(config)
    check_servers(config)
    found = [*warnings(config), *check_template(config, tools, data), *data.warnings]
    return data._replace(warnings=found)


def check_names(config: RunConfig) -> Mapping[str, Tool]:
    """Every name of a plug-in is known, what it names can be loaded, and the algorithm's parts fit. Returns
    the tools."""
    from asyncrl.algorithms.recipe import compose
    from asyncrl.conversation.parsers import load_parser
    from asyncrl.engines.base import engines
    from asyncrl.environments import load_environment
    from asyncrl.gateway import load_agent
    from asyncrl.rollout.components import load_scorer, load_toolbox

    toolbox = load_toolbox(config)
    if config.rollout.environment:
        load_environment(config.rollout.environment)
    if config.rollout.agent:
        load_agent(config.rollout.agent)
    load_scorer(config)
    load_parser(config.rollout.parser)
    compose(config)
    if not config.engine.remote and config.engine.name not in engines:
        engines.load(config.engine.name)
    return toolbox.tools


def check_template(config: RunConfig, tools: Mapping[str, Tool], data: RunData) -> list[str]:
    """The tokenizer is what its file says, and the chat template writes these tools, the first prompt, and
    what answers a turn; or the conversations that are to be learned. Returns warnings about what it does."""
    from asyncrl.algorithms.library import imitates
    from asyncrl.rollout.components import check_chat
    from asyncrl.rollout.demonstrations import check_demonstrations

    with _quiet():
        if imitates(config):
            check_demonstrations(config, tools, "data.train", data.train)
            if data.test is not None:
                check_demonstrations(config, tools, "data.test", data.test)
            return []
        return check_chat(config, tools, data.train[0].prompt)


def check_device(config: RunConfig) -> None:
    """A GPU that is asked for exists."""
    if config.model.device == "cuda" and sees_gpu(config) is False:
        raise ConfigError("model.device is cuda, and torch sees no GPU here; use auto or cpu")


def check_weights_directory(config: RunConfig) -> None:
    """Versions can be written where the configuration says; where it insists on /dev/shm, there is room for
    as many as are kept."""
    from asyncrl.weights.disk import bytes_needed, weights_directory

    needed = bytes_needed(
        weight_bytes(config.model.path), config.weights.full_every > 1, config.engine.keepers
    )
    where = weights_directory(config.weights.directory, run_directory(config), config.name, needed)
    creatable(where, "weights.directory")


def check_checkpoint_directory(config: RunConfig) -> None:
    """Checkpoints can be written to a directory; what is elsewhere the trainer finds out."""
    from asyncrl.store.checkpoints import checkpoints_of

    place = checkpoints_of(config, run_directory(config))
    if place.local and config.checkpoint.directory:
        creatable(Path(place.root), "checkpoint.directory")
    if config.checkpoint.directory and not (run_directory(config) / DATABASE).exists() and place.steps():
        raise ConfigError(
            f"checkpoint.directory: {place.root} holds checkpoints of a run of this name, of which there is "
            f"nothing in {run_directory(config)}; choose another name=…, or restore that directory"
        )


def outside_weights(config: RunConfig) -> list[Path]:
    """Directories outside the run directory in which its versions, and caches of them, may lie."""
    from asyncrl.weights.disk import weights_directory

    own = {config.weights.directory} - {"auto", "shm", "run"}
    return [weights_directory(at, run_directory(config), config.name, needed_bytes=0) for at in ("shm", *own)]


def warnings(config: RunConfig) -> list[str]:
    """Settings that are valid but probably a mistake, one line each."""
    from asyncrl.conversation.parsers import detect, parsers

    slots = config.rollout.workers * config.rollout.slots
    live = config.buffer.max_live_groups * config.buffer.episodes_per_group
    ahead = "max" if config.buffer.target_staleness == "auto" else "target"
    rows, budget = config.rollout.rows, config.trainer.micro_batch_tokens
    trains = config.total_steps > 0
    parser, engine, gpu = config.rollout.parser, config.engine, sees_gpu(config)
    calls = config.rollout.tools or config.rollout.environment or config.rollout.agent
    fitting = detect(chat_template(config)) if calls else None
    found = {
        f"at most {live} episodes run at once, (1 + {ahead}_staleness) * groups_per_batch * "
        f"episodes_per_group: {slots - live} of {slots} slots (rollout.workers * rollout.slots) stay empty": (
            trains and slots > live
        ),
        f"an episode may have {rows * config.rollout.max_tokens} tokens (rollout.max_tokens, times "
        f"max_rows), more than trainer.micro_batch_tokens ({budget}): it is a micro-batch by itself, "
        "and needs the memory": (trains and rows * config.rollout.max_tokens > budget),
        "engine=sglang starts servers on GPUs, and torch sees none here; on a CPU, make sglang-cpu, "
        "then engine=sglang_cpu": (
            gpu is False and engine.remote and not (engine.urls or engine.server_command)
        ),
        "trainer.offload_optimizer has no effect on a CPU, where all is in main memory": (
            gpu is False and config.trainer.offload_optimizer
        ),
        f"rollout.parser is {parser}, but the model's chat template looks like {fitting}: calls would be "
        f"taken for text; set rollout.parser={fitting}": fitting not in (None, parser) and parser in parsers,
    }
    return [
        *(message for message, applies in found.items() if applies),
        *(cost_warnings(config, gpu) if trains else ()),
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the logs of libraries, which raise the same errors."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
