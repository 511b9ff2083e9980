"""All checks before a run, by name. `asyncrl train` runs RUN up to the first error; `asyncrl doctor` and
`asyncrl train --dry-run` run all of them, and collect what they find.

A check yields notes, and raises ConfigError for what has to be corrected. It reads `Inputs` and changes
nothing, there or elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from asyncrl.config import RunConfig
from asyncrl.errors import AsyncrlError, ConfigError, one_line
from asyncrl.launch import machine, preflight
from asyncrl.launch.data import Inputs, Note


class Check(NamedTuple):
    """`needs`: names of checks without which it says nothing new."""

    name: str
    run: Callable[[Inputs], Iterable[Note]]
    needs: tuple[str, ...] = ()


def check(config: RunConfig) -> tuple[Inputs, list[str]]:
    """Raise the first ConfigError of RUN, cheap checks first. Return what a run needs, and all warnings about
    what is valid, but probably a mistake."""
    inputs = Inputs(config)
    return inputs, [note.text for each in RUN for note in _notes(each, inputs) if note.level == "warning"]


def examine(checks: Iterable[Check], inputs: Inputs) -> Iterator[Note]:
    """What each of them finds, errors included. One that needs another which has failed is skipped."""
    failed: set[str] = set()
    for each in checks:
        if lacking := [name for name in each.needs if name in failed]:
            failed.add(each.name)
            yield Note("skipped", f"not checked: it needs {lacking[0]}", each.name)
            continue
        try:
            for note in _notes(each, inputs):
                yield note._replace(check=each.name)
        except AsyncrlError as error:
            failed.add(each.name)
            yield Note("error", " ".join(str(error).split()), each.name)


def _notes(each: Check, inputs: Inputs) -> Iterator[Note]:
    try:
        yield from each.run(inputs)
    except OSError as error:  # of a path that no check has foreseen
        raise ConfigError(one_line(error)) from error


LIBRARIES = Check("libraries", machine.check_libraries)
RUN = (
    Check("run directory", preflight.check_directory),  # before a model is fetched
    LIBRARIES,
    Check("launch", preflight.check_launch),
    Check("model", preflight.check_models, ("libraries",)),
    Check("plug-ins", preflight.check_plugins, ("libraries",)),
    Check("data", preflight.load_data, ("model", "plug-ins")),
    Check("device", preflight.check_device, ("libraries",)),
    Check("memory", preflight.check_room, ("model",)),
    Check("weights", preflight.check_weights_directory, ("model",)),
    Check("checkpoints", preflight.check_checkpoint_directory),
    Check("servers", preflight.check_remote),
    Check("settings", preflight.check_settings, ("model",)),
    Check("template", preflight.check_template, ("data",)),
)
MACHINE = (
    Check("Python", machine.check_python),
    LIBRARIES,
    Check("GPUs", machine.check_gpus, ("libraries",)),
    Check("NCCL", machine.check_nccl, ("libraries",)),
    Check("network", machine.check_network, ("libraries",)),
    Check("SGLang", machine.check_sglang),
    Check("ports", machine.check_ports),
    Check("open files", machine.check_files),
    Check("/dev/shm", machine.check_shared_memory),
    Check("file locks", machine.check_locks),
    Check("disk", machine.check_disk),
    Check("sandbox", machine.check_sandbox),
)
CLUSTER = Check("cluster", preflight.describe_cluster, ("launch",))
CHAT = Check("chat", preflight.describe_chat, ("template",))
SAMPLE = Check("sample", preflight.check_sample, ("template",))
ESTIMATE = Check("estimate", preflight.estimate, ("data", "memory"))
ALL = tuple(dict.fromkeys((*MACHINE, *RUN, CHAT, CLUSTER, SAMPLE, ESTIMATE)))
