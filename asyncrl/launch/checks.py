"""Lists the checks before a run. `asyncrl train` runs RUN_CHECKS up to the first error; `asyncrl doctor` and
`asyncrl train --dry-run` run all checks and collect their notes.

A check yields notes, and raises ConfigError for faults that must be corrected. A check reads `Inputs` and
changes nothing, neither the inputs nor anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncrl.config import RunConfig
from asyncrl.errors import AsyncrlError, ConfigError, one_line
from asyncrl.launch import gpus, kernels, machine, preflight
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.notes import Check, Note


def run_checks(config: RunConfig) -> tuple[Inputs, list[str]]:
    """Run RUN_CHECKS, cheap checks first, and raise the first ConfigError. Return the inputs that a run
    needs, and all warnings: settings that are valid, but probably a mistake."""
    # A child would take longer than the roles, which check the copy themselves while they start.
    inputs = Inputs(config, asks_child=False)
    return inputs, [
        note.text for check in RUN_CHECKS for note in _run_check(check, inputs) if note.level == "warning"
    ]


def collect_notes(checks: Iterable[Check], inputs: Inputs) -> Iterator[Note]:
    """Yield the notes of all checks, errors included. A check is skipped if a check that it requires has
    failed."""
    failed_checks: set[str] = set()
    for check in checks:
        if failed_requirements := [name for name in check.required_checks if name in failed_checks]:
            failed_checks.add(check.name)
            yield Note("skipped", f"not checked: requires {failed_requirements[0]}", check.name)
            continue

        try:
            for note in _run_check(check, inputs):
                yield note._replace(subject=check.name)
        except AsyncrlError as error:
            failed_checks.add(check.name)
            yield Note("error", " ".join(str(error).split()), check.name)


def _run_check(check: Check, inputs: Inputs) -> Iterator[Note]:
    try:
        yield from check(inputs)
    except OSError as error:  # A path failed that no check has foreseen
        raise ConfigError(one_line(error)) from error


RUN_CHECKS = (
    preflight.check_directory,  # first, before a model is fetched
    machine.check_libraries,
    machine.check_loopback,
    preflight.check_launch,
    preflight.check_models,
    kernels.check_kernels,
    preflight.check_plugins,
    preflight.check_tensors,
    preflight.load_data,
    preflight.check_tasks,
    machine.check_agent,
    preflight.check_device,
    preflight.check_memory_room,
    preflight.check_weights_directory,
    preflight.check_checkpoint_directory,
    preflight.check_remote,
    preflight.check_settings,
    preflight.check_reset,
    preflight.check_template,
    preflight.check_engine,
    preflight.describe_packing,
)
MACHINE_CHECKS = (
    machine.check_python,
    machine.check_libraries,
    gpus.check_gpus,
    gpus.check_nccl,
    gpus.check_network,
    machine.check_sglang,
    machine.check_ports,
    machine.check_loopback,
    machine.check_open_files,
    machine.check_shared_memory,
    machine.check_locks,
    machine.check_disk,
    machine.check_sandbox,
    machine.check_images,
)
PLAN_CHECKS = (  # a dry run prints these
    preflight.check_engine,
    preflight.describe_packing,
    preflight.describe_cluster,
    preflight.show_truths,
    preflight.show_images,
    preflight.check_sample,
    preflight.estimate,
)
ALL_CHECKS = tuple(dict.fromkeys((*MACHINE_CHECKS, *RUN_CHECKS, preflight.describe_chat, *PLAN_CHECKS)))
