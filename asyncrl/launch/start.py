"""Runs a configuration: checks it, prepares the run directory, launches, reports, returns an exit code."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from asyncrl.config import RunConfig, without_defaults
from asyncrl.errors import recorded
from asyncrl.launch import checks, placement, preflight
from asyncrl.launch.console import Console, open_console
from asyncrl.launch.estimates import count_gpus, sees_gpu
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.process import BAD_INPUT, COMPLETED, INTERRUPTED, LocalSpawner
from asyncrl.launch.run_directory import (
    check_paths_are_text,
    describe_resumed_changes,
    prepare_and_lock,
    run_directory,
)
from asyncrl.launch.session import Session
from asyncrl.launch.supervisor import Supervisor
from asyncrl.observe.files import read_status, read_summary, write_status, write_summary
from asyncrl.observe.machine import record_machine
from asyncrl.observe.table import print_summary
from asyncrl.observe.timeline import busy_overlap
from asyncrl.observe.trackers import Trackers
from asyncrl.runtime.process import defer_import
from asyncrl.values import printable
from asyncrl.wire.sockets import choose_endpoints

if TYPE_CHECKING:
    from asyncrl.launch.ray import RaySpawner


def train(
    config: RunConfig,
    dry_run: bool = False,
    show_summary: bool = True,
    on_start: Callable[[Path], None] = lambda run_dir: None,
    caller_draws: bool = False,
) -> int:
    """Check everything, then launch and watch the run, and return the exit code. `show_summary`: print the
    summary at the end. `on_start` is called with the run's directory once no check can refuse the run.
    `caller_draws`: a caller in another process draws the live view, so that only notes are printed here.
    Raises ConfigError for bad input, before anything is started."""
    check_paths_are_text(config)
    if dry_run:
        return _dry_run(config)
    defer_import("torch")  # Without a GPU no check uses torch, whose import takes 1.5 s.

    # Check the run. The checks resolve model names and read the data.
    inputs, warnings = checks.run_checks(config)
    config = inputs.config
    run_data = inputs.run_data
    agent_versions = inputs.agent_versions
    del inputs  # The tokenizer in the inputs is not needed any more.

    run_dir = run_directory(config)
    units = placement.plan_units(config)
    changed_keys = describe_resumed_changes(config)
    endpoints = choose_endpoints(config.launch.host, config.launch.port)

    with ExitStack() as stack:
        # Prepare the run directory for this launch alone.
        stack.enter_context(prepare_and_lock(config))
        run_data.save_samples(run_dir)
        record_machine(run_dir, agent_versions)
        _remove_outside_weights(config)  # left by a launcher that was killed
        preflight.record_launch_name(config)
        stack.callback(_remove_outside_weights, config)

        # Open what the processes are started and watched with. Trackers are opened once no check can refuse
        # the run.
        spawner: LocalSpawner | RaySpawner = LocalSpawner(run_dir, endpoints)
        if config.launch.kind == "ray":
            from asyncrl.launch.ray import RaySpawner

            spawner = stack.enter_context(RaySpawner.open_cluster(config, run_dir, endpoints))
        trackers = stack.enter_context(Trackers.open(config, run_dir))
        console_mode = config.observe.console
        if caller_draws and console_mode == "auto":
            console_mode = "live"
        console = stack.enter_context(
            open_console(console_mode, config.name, config.total_steps, config.validation.success, run_dir)
        )

        with recorded():  # no run fails for its curves
            console.state.load_earlier_steps(run_dir)
        if changed_keys:
            console.print_note(f"resuming with changed keys: {changed_keys}")
        for line in (*run_data.truth_lines, *run_data.image_lines):
            console.print_note(line)
        for warning in warnings:
            console.print_note(f"warning: {warning}")
        process_count = sum(len(unit.processes) for unit in units)
        console.print_note(f"run {run_dir}: starting {process_count} processes; logs in {run_dir / 'logs'}")

        # Start the processes, and watch them until the run ends.
        on_start(run_dir)
        supervisor = Supervisor(
            units, spawner, run_dir, config.launch.restarts, spawner.rendezvous, on_restart=console.print_note
        )
        session = Session(
            config.launch,
            run_dir,
            endpoints,
            supervisor,
            console,
            on_report=lambda report: trackers.log(report.step, report.metrics, report.values),
            is_training=config.total_steps > 0,
        )
        outcome = session.run()

        write_status(run_dir, read_status(run_dir) | {"code": outcome.code, "error": outcome.error})
        trackers.summarize(read_summary(run_dir))
    return conclude(config, run_dir, outcome.code, outcome.error, console, show_summary)


def _dry_run(config: RunConfig) -> int:
    """Run all checks and print the plan, the most important part last; or print all errors."""
    inputs = Inputs(config)
    notes = list(checks.collect_notes(checks.ALL_CHECKS, inputs))

    if errors := [note.text for note in notes if note.level == "error"]:
        print(*(printable(f"asyncrl: {text}") for text in errors), sep="\n", file=sys.stderr)
        return BAD_INPUT

    shown_config = replace(inputs.config, model=replace(inputs.config.model, template=config.model.template))
    print("# keys that differ from the defaults (docs/reference/configuration.md)")
    print(msgspec.yaml.encode(without_defaults(shown_config)).decode())
    print(f"run directory: {run_directory(shown_config)}\n")

    if changed_keys := describe_resumed_changes(inputs.config):
        print(f"resuming with changed keys: {changed_keys}\n")

    units = placement.plan_units(shown_config)
    has_gpu = sees_gpu(shown_config)
    gpu_count = count_gpus(shown_config)
    print(*placement.describe_plan(shown_config, units, has_gpu, gpu_count), sep="\n")

    printed_checks = {check.name for check in checks.PLAN_CHECKS}
    for level, text, subject in notes:
        if level == "ok" and subject in printed_checks:
            print(f"{subject:<14}{text}" if subject == "sample" else text)

    for level, text, _ in notes:
        if level == "warning":
            print(printable(f"warning: {text}"))
    return COMPLETED


def _remove_outside_weights(config: RunConfig) -> None:
    """Remove the versions outside the run directory, which serve this launch only and which no other code
    removes."""
    for directory in preflight.outside_weights(config):
        shutil.rmtree(directory, ignore_errors=True)


def conclude(
    config: RunConfig, run_dir: Path, code: int, error: str, console: Console, show_summary: bool = True
) -> int:
    """Complete the summary, and print it if `show_summary`. After an interrupt only print, to end at once."""
    summary = read_summary(run_dir)
    if summary and code != INTERRUPTED:
        with recorded() as failure:
            summary["busy_at_once"] = busy_overlap(run_dir)
            write_summary(run_dir, summary)
        if failure:
            console.print_error(f"summary.json is incomplete: {failure.line}")

    if summary and config.total_steps and show_summary:
        print_summary(summary, run_dir)

    if error:
        console.print_error(error)
    if not summary:
        console.print_error(f"no summary was written; see the logs in {run_dir / 'logs'}")
    return code
