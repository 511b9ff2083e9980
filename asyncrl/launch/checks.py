"""All checks before a run, by name. `asyncrl train` runs RUN up to the first error; `asyncrl doctor` and
`asyncrl train --dry-run` run all of them, and collect what they find.

A check yields notes, and raises ConfigError for what has to be corrected. Nothing is written or started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from asyncrl.config import RunConfig
from asyncrl.errors import AsyncrlError, ConfigError, one_line
from asyncrl.launch import machine, placement, preflight
from asyncrl.launch.estimates import (
    check_memory,
    describe_costs,
    describe_memory,
    describe_time,
    describe_work,
    on_gpu,
    sees_gpu,
)
from asyncrl.launch.model_directory import check_model
from asyncrl.launch.models import resolve_models
from asyncrl.launch.notes import Inputs, Level, Note, ok, warning
from asyncrl.launch.run_directory import begun_with, check_resumed, check_run_directory, run_directory
from asyncrl.launch.servers import check_servers
from asyncrl.observe.trackers import check_trackers
from asyncrl.store.schema import check_schema


class Check(NamedTuple):
    """`needs`: names of checks without which it says nothing new."""

    name: str
    run: Callable[[Inputs], Iterable[Note]]
    needs: tuple[str, ...] = ()


class Finding(NamedTuple):
    level: Level
    check: str
    text: str


def check(config: RunConfig) -> Inputs:
    """Raise the first ConfigError of RUN, cheap checks first. What a run needs, with all warnings about what
    is valid, but probably a mistake, among its data's."""
    inputs = Inputs(config)
    found = [note.text for each in RUN for note in _notes(each, inputs) if note.level == "warning"]
    inputs.data = inputs.samples._replace(warnings=found)
    return inputs


def examine(checks: Iterable[Check], inputs: Inputs) -> Iterator[Finding]:
    """What each of them finds, errors included. One that needs another which has failed is skipped."""
    failed: set[str] = set()
    for each in checks:
        if lacking := [name for name in each.needs if name in failed]:
            failed.add(each.name)
            yield Finding("skipped", each.name, f"not checked: it needs {lacking[0]}")
            continue
        try:
            for note in _notes(each, inputs):
                yield Finding(note.level, each.name, note.text)
        except AsyncrlError as error:
            failed.add(each.name)
            yield Finding("error", each.name, " ".join(str(error).split()))


def _notes(each: Check, inputs: Inputs) -> Iterator[Note]:
    try:
        yield from each.run(inputs)
    except OSError as error:  # of a path that no check has foreseen
        raise ConfigError(one_line(error)) from error


def _run_directory(inputs: Inputs) -> Iterator[Note]:
    check_run_directory(inputs.config)
    check_schema(run_directory(inputs.config))
    yield ok(str(run_directory(inputs.config)))


def _model(inputs: Inputs) -> Iterator[Note]:
    from asyncrl.algorithms.recipe import with_group_policy  # imports torch

    inputs.config = with_group_policy(resolve_models(inputs.config, begun_with(inputs.config)))
    check_resumed(inputs.config)
    check_model(inputs.config)
    yield ok(f"{inputs.config.model.path}: weights, tokenizer and chat template are there")


def _launch(inputs: Inputs) -> Iterator[Note]:
    preflight.check_ray(inputs.config)
    check_trackers(inputs.config)
    yield ok(f"{len(placement.plan(inputs.config))} processes")


def _plugins(inputs: Inputs) -> Iterator[Note]:
    inputs.tools = preflight.check_names(inputs.config)
    yield ok(f"tools: {', '.join(inputs.tools) or 'none'}; parser {inputs.config.rollout.parser}")


def _data(inputs: Inputs) -> Iterator[Note]:
    inputs.data = preflight.load_data(inputs.config, inputs.tools)
    held_out = f", {len(inputs.data.test)} held out" if inputs.data.test is not None else ""
    yield ok(f"{len(inputs.data.train)} samples{held_out}")
    yield from map(warning, inputs.data.warnings)


def _device(inputs: Inputs) -> Iterator[Note]:
    preflight.check_device(inputs.config)
    yield ok(f"model.device={inputs.config.model.device}, {inputs.config.model.dtype}")


def _memory(inputs: Inputs) -> Iterator[Note]:
    if inputs.config.total_steps:
        check_memory(inputs.config, sees_gpu(inputs.config))
        yield ok("has room for weights, gradients and optimizer state")


def _weights(inputs: Inputs) -> Iterator[Note]:
    yield ok(f"versions go to {preflight.check_weights_directory(inputs.config)}")


def _checkpoints(inputs: Inputs) -> Iterator[Note]:
    yield from map(warning, filter(None, [preflight.check_checkpoint_directory(inputs.config)]))
    yield ok(inputs.config.checkpoint.directory or "in the run directory")


def _servers(inputs: Inputs) -> Iterator[Note]:
    check_servers(inputs.config)
    yield ok("keys, addresses and commands" if inputs.config.engine.remote else "none")


def _settings(inputs: Inputs) -> Iterator[Note]:
    yield from map(warning, preflight.warnings(inputs.config))


def _template(inputs: Inputs) -> Iterator[Note]:
    yield from map(warning, preflight.check_template(inputs.config, inputs.tools, inputs.samples))


def _chat(inputs: Inputs) -> Iterator[Note]:
    lines, inputs.prompt = preflight.describe_chat(inputs.config, inputs.tools, inputs.samples.train[0])
    return map(ok, lines)


def _sample(inputs: Inputs) -> Iterator[Note]:
    sample = inputs.samples.train[0]
    if not (inputs.config.rollout.agent or sample.demonstration):
        yield from asyncio.run(preflight.try_sample(inputs.config, inputs.tools, sample))


def _cluster(inputs: Inputs) -> Iterator[Note]:
    return map(ok, preflight.describe_cluster(inputs.config))


def _estimate(inputs: Inputs) -> Iterator[Note]:
    if inputs.config.engine.name == "torch":
        from asyncrl.engines.torch.served import check_served  # imports torch

        check_served(inputs.config.model.path)
    if inputs.config.total_steps:
        config, gpu, prompt = inputs.config, sees_gpu(inputs.config), inputs.prompt
        train, test = len(inputs.samples.train), len(inputs.samples.test or ())
        memory, problem = describe_memory(config, gpu)
        found = [
            *describe_work(config, train, test, prompt),
            *describe_costs(config, gpu),
            *memory.splitlines(),
        ]
        if on_gpu(config, gpu) is False and not inputs.samples.train[0].demonstration:
            found += describe_time(config, test, prompt)
        yield from map(ok, found)
        yield from map(warning, filter(None, [problem]))


LIBRARIES = Check("libraries", machine.check_libraries)
RUN = (
    Check("run directory", _run_directory),  # before a model is fetched
    LIBRARIES,
    Check("launch", _launch),
    Check("model", _model, ("libraries",)),
    Check("plug-ins", _plugins, ("libraries",)),
    Check("data", _data, ("model", "plug-ins")),
    Check("device", _device, ("libraries",)),
    Check("memory", _memory, ("model",)),
    Check("weights", _weights, ("model",)),
    Check("checkpoints", _checkpoints),
    Check("servers", _servers),
    Check("settings", _settings, ("model",)),
    Check("template", _template, ("data",)),
)
MACHINE = (
    Check("Python", machine.check_python),
    LIBRARIES,
    Check("GPUs", machine.check_gpus, ("libraries",)),
    Check("NCCL", machine.check_nccl, ("libraries",)),
    Check("SGLang", machine.check_sglang),
    Check("ports", machine.check_ports),
    Check("open files", machine.check_files),
    Check("/dev/shm", machine.check_shared_memory),
    Check("file locks", machine.check_locks),
    Check("disk", machine.check_disk),
    Check("sandbox", machine.check_sandbox),
)
CLUSTER = Check("cluster", _cluster, ("launch",))
SAMPLE = Check("sample", _sample, ("template",))
ESTIMATE = Check("estimate", _estimate, ("data", "memory"))
ALL = tuple(dict.fromkeys((*MACHINE, *RUN, Check("chat", _chat, ("template",)), CLUSTER, SAMPLE, ESTIMATE)))
