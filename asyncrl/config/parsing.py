"""Turns a plain mapping into a checked `RunConfig`."""

from __future__ import annotations

import math
import os
import typing
from typing import Any

import msgspec

from asyncrl.config.base import alternative_types, divisors, leaves
from asyncrl.config.old_keys import old_key_advice
from asyncrl.config.run import RunConfig
from asyncrl.config.scorers import scorer_refusals
from asyncrl.errors import ConfigError


def parse(mapping: Any) -> RunConfig:
    """Validate a plain mapping. Raises ConfigError with the path of the wrong key."""
    try:
        config = msgspec.convert(_expand_paths(mapping, RunConfig), RunConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {_explain_error(str(error))}") from None

    for path, value in leaves(msgspec.to_builtins(config)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"configuration: {path}: expected a finite number, got {value}")

        try:
            msgspec.json.encode((path, value))
        except UnicodeEncodeError:
            raise ConfigError(
                f"configuration: {path!a}: {value!a} is not UTF-8 text; correct the value"
            ) from None

    _check_combinations(config)
    return config


def _expand_paths(value: Any, kind: Any) -> Any:
    """Replace `~` at the beginning of each path in a value of this type by the home directory."""
    parts = list(alternative_types(kind))
    if isinstance(value, str):
        is_path = any(marked for part, marked in parts if part is str)
        return os.path.expanduser(value) if is_path else value
    if isinstance(value, list):
        elements = [typing.get_args(part)[0] for part, _ in parts if typing.get_origin(part) is list]
        return [_expand_paths(element, elements[0]) for element in value] if elements else value
    if not isinstance(value, dict):
        return value

    for part, _ in parts:
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            kinds = {field.name: field.type for field in msgspec.structs.fields(part)}
            return {name: _expand_paths(inner, kinds.get(name)) for name, inner in value.items()}
        if typing.get_origin(part) is dict:
            key_kind, value_kind = typing.get_args(part)
            return {
                _expand_paths(name, key_kind): _expand_paths(inner, value_kind)
                for name, inner in value.items()
            }

    return value


def _explain_error(complaint: str) -> str:
    """Write msgspec's error with the key in front, and a hint on valid values."""
    problem, _, path = complaint.replace(" - at `key` in `$.", " - at `$.").partition(" - at `$.")
    key = path.rstrip("`")
    kind: Any = RunConfig

    for name in key.partition("[")[0].split("."):
        kind = typing.get_type_hints(kind).get(name) if isinstance(kind, type) else None

    if problem.startswith("Object contains unknown field"):
        unknown_key = f"{key}.{problem.split('`')[1]}"
        if advice := old_key_advice(unknown_key):
            return f"unknown key {unknown_key}; {advice}"

    hint = ""
    if problem.startswith("Invalid enum"):
        choices = [value for part in (kind, *typing.get_args(kind)) for value in typing.get_args(part)]
        hint = f"; choose from {', '.join(str(value) for value in choices if isinstance(value, str | int))}"
    elif problem.startswith("Expected `array`"):
        hint = f"; write a list: {key}=[NAME]"
    elif problem.startswith("Expected `object`"):
        hint = f"; {key} is a section, so set its keys: {key}.KEY=…"
    elif problem.startswith("Expected `str`"):
        hint = "; write the text in quotes"

    return f"{key}: {problem}{hint}" if key else problem


def _check_combinations(config: RunConfig) -> None:
    """Refuse values that are valid alone but cannot work together."""
    buffer = config.buffer
    algorithm = config.algorithm
    trainer = config.trainer
    engine = config.engine
    rollout = config.rollout
    weights = config.weights
    checkpoint = config.checkpoint
    directory = checkpoint.directory
    batch_bytes = config.group_bytes * buffer.groups_per_batch

    uneven_advice = (
        f"does not divide trainer.ranks ({trainer.ranks}); set it to one of {divisors(trainer.ranks)}, or "
        "change trainer.ranks"
    )

    refusals = {
        f"buffer.target_staleness ({buffer.target:g}) exceeds max_staleness ({buffer.max_staleness}): "
        "admission would run ahead of the bound; lower target_staleness": (
            buffer.target > buffer.max_staleness
        ),
        f"algorithm.steps_per_batch ({algorithm.steps_per_batch}) exceeds groups_per_batch "
        f"({buffer.groups_per_batch}), so some steps would have no groups; lower steps_per_batch": (
            algorithm.steps_per_batch > buffer.groups_per_batch
        ),
        f"weights.every ({weights.every}) exceeds max_staleness + 1 ({buffer.max_staleness + 1}): the "
        "engines' weights would become too old to start an episode; lower weights.every": (
            weights.every > buffer.max_staleness + 1
        ),
        f"engine.urls lists a server twice ({', '.join(engine.urls)}); list each server once": (
            len({url.rstrip("/") for url in engine.urls}) < len(engine.urls)
        ),
        f"weights.transport {weights.transport} needs servers; set engine=sglang, or "
        "weights.transport=disk": (weights.transport != "disk" and not engine.remote),
        "weights.adapters=true needs adapters in complete files: set model.lora_rank, weights.transport=disk "
        "and full_every=1, or remove weights.adapters": weights.adapters is True
        and not (config.adapters and weights.transport == "disk" and weights.full_every == 1),
        "model.train_vision=true does not work with adapters, which adapt the text part alone; remove "
        "model.lora_rank and agents, or set model.train_vision=false": bool(
            config.model.train_vision and config.adapters
        ),
        "agents: only requests from an agent program name an agent; set rollout.agent": bool(
            config.agents and not rollout.agent
        ),
        "agents need weight versions that contain only adapters; set weights.transport=disk, full_every=1 "
        "and, with engine.urls, adapters=true": bool(config.agents and not config.adapters_apart),
        "trainer.router_replay needs engine=sglang; set engine=sglang, or trainer.router_replay=false": (
            trainer.router_replay and not engine.remote
        ),
        "trainer.router_replay does not work with trainer.compile=true; set one of the two to false": (
            trainer.router_replay and trainer.compile
        ),
        "weights.full_every > 1 works only with files, because a server cannot apply deltas that it "
        "receives; use weights.transport=disk": weights.full_every > 1 and weights.transport != "disk",
        f"buffer.max_bytes ({buffer.max_bytes}) is less than a batch of episodes needs ({batch_bytes} bytes: "
        f"{rollout.rows} rows of max_tokens each); raise buffer.max_bytes, or lower rollout.max_tokens or "
        "max_rows": (buffer.max_bytes < batch_bytes),
        f"rollout.max_new_tokens ({rollout.max_new_tokens}) exceeds max_tokens "
        f"({rollout.max_tokens}); lower max_new_tokens": rollout.max_new_tokens > rollout.max_tokens,
        "rollout.agent: an agent program runs the episodes itself, with the tools in its requests; "
        "remove rollout.environment and rollout.tools, or remove rollout.agent": bool(
            rollout.agent and (rollout.environment or rollout.tools)
        ),
        f"checkpoint.directory ({directory}) is relative, but not all processes run here; set an absolute "
        "path or a URL": bool(directory) and "://" not in directory and not directory.startswith("/"),
        f"trainer.replicas ({trainer.replicas}) {uneven_advice}": trainer.ranks % trainer.replicas > 0,
        f"trainer.sequence_parallel ({trainer.sequence_parallel}) {uneven_advice}": (
            trainer.ranks % trainer.sequence_parallel > 0
        ),
        "trainer.sequence_parallel works only with packed rows; set trainer.packing to packed or tree": (
            trainer.sequence_parallel > 1 and trainer.packing == "padded"
        ),
        "trainer.sequence_parallel has not been tested with compiled layers; set trainer.compile=false": (
            trainer.sequence_parallel > 1 and trainer.compile
        ),
        "checkpoint.best needs validations; set data.test, validation.samples and validation.every": (
            checkpoint.best
            and not (config.data.test and config.validation.samples and config.validation.every)
        ),
    } | scorer_refusals(config.scorers, rollout, config.kl.reference, config.adapters_apart)

    refusals |= _colocation_refusals(config) if engine.colocated else {}
    for message, refused in refusals.items():
        if refused:
            raise ConfigError(message)


def _colocation_refusals(config: RunConfig) -> dict[str, bool]:
    """Return the refusals of settings that do not work with engines on the trainer's devices."""
    engine = config.engine
    weights = config.weights
    if engine.remote:
        key = "servers"
        count = engine.servers
        devices = count * engine.tp
    else:
        key = "rollout.workers"
        count = config.rollout.workers
        devices = count

    return {
        "engine.urls: these servers do not run on the trainer's devices; remove engine.colocated or "
        "engine.urls": bool(engine.urls),
        f"engine.colocated ({engine.colocated}) must be {key} ({count}), or 0: all engines share the "
        "trainer's devices, or none do": engine.colocated != count,
        f"engine.colocated: engines need {devices} devices, but trainer.ranks={config.trainer.ranks}; lower "
        f"{key}, or raise trainer.ranks": devices > config.trainer.ranks,
        "engine.colocated: engines reload their weights from complete files; set "
        "weights.transport=disk and full_every=1": (weights.transport != "disk" or weights.full_every > 1),
        "engine.colocated: scorers on the engines would sleep while the trainer trains; use separate "
        "scorer servers": bool(config.scorers_lent),
        "engine.colocated needs all processes on one machine; set launch.kind=local": (
            config.launch.kind != "local"
        ),
    }
