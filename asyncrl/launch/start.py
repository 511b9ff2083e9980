"""From a configuration to an exit code: check, prepare the run directory, launch, report."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch import placement, preflight
from asyncrl.launch.local import LocalSpawner
from asyncrl.launch.process import COMPLETED, INTERRUPTED, Spawn
from asyncrl.launch.session import Session
from asyncrl.launch.supervisor import Supervisor
from asyncrl.observe.console import Console, open_console, print_summary
from asyncrl.observe.files import mark_start, read_summary, write_summary
from asyncrl.observe.timeline import overlap
from asyncrl.observe.trackers import Trackers
from asyncrl.wire.sockets import Endpoints, choose_endpoints

Rendezvous = Callable[[placement.Unit, str], str]


def train(config: RunConfig, dry_run: bool = False) -> int:
    """`asyncrl train`. Raises ConfigError for bad input, before anything is started."""
    preflight.check(config)
    units = placement.plan(config)
    run_dir = preflight.run_directory(config)
    warnings = [f"warning: {line}" for line in preflight.warnings(config)]
    if dry_run:
        warnings += [f"warning: {line}" for line in preflight.check_chat(config)]
    with ExitStack() as stack:
        endpoints = choose_endpoints(config.launch.host, config.launch.port)
        if dry_run:
            print(msgspec.yaml.encode(config).decode())
            print(*placement.describe(config, units), *warnings, f"\nrun directory: {run_dir}", sep="\n")
            return COMPLETED
        stack.enter_context(prepared(run_dir, config))
        _remove_outside_weights(config)  # of a launcher that was killed
        stack.callback(_remove_outside_weights, config)
        trackers = stack.enter_context(Trackers.open(config, run_dir))
        console = stack.enter_context(open_console(config.observe.console, config.name, config.total_steps))
        spawn, rendezvous = stack.enter_context(_spawner(config, run_dir, endpoints))
        supervisor = Supervisor(
            units, spawn, run_dir, config.launch.restarts, rendezvous, on_restart=console.note
        )
        session = Session(config.launch, run_dir, endpoints, supervisor, console, trackers.log)
        for warning in warnings:
            console.note(warning)
        console.note(f"run {run_dir}: {len(units)} units start; logs in {run_dir / 'logs'}")
        ending = session.run()
    return conclude(config, run_dir, ending.code, ending.error, console)


@contextmanager
def prepared(run_dir: Path, config: RunConfig) -> Iterator[None]:
    """The run directory with its config.yaml, locked: one launcher at a time."""
    lock = run_dir / "lock"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+")
    except OSError as error:
        raise ConfigError(f"{run_dir}: cannot be written ({error.strerror}); set run_dir=…") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigError(
                f"{run_dir}: is being trained by process {file.read() or '?'}; end it first"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        (run_dir / "summary.json").unlink(missing_ok=True)
        mark_start(run_dir)
        (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(config))
        try:
            yield
        except ConfigError:  # nothing was started: a corrected command must not find a run
            if not (run_dir / "run.db").exists():
                (run_dir / "config.yaml").unlink()
                (run_dir / "started").unlink()
            raise


@contextmanager
def _spawner(config: RunConfig, run_dir: Path, endpoints: Endpoints) -> Iterator[tuple[Spawn, Rendezvous]]:
    if config.launch.kind == "ray":
        from asyncrl.launch.ray import RaySpawner

        with RaySpawner.open(config, run_dir, endpoints) as ray:
            yield ray, ray.rendezvous
        return
    local = LocalSpawner(run_dir, endpoints)
    yield local, local.rendezvous


def _remove_outside_weights(config: RunConfig) -> None:
    """Versions outside of the run directory serve this launch only; nobody else would free their room."""
    for directory in preflight.outside_weights(config):
        shutil.rmtree(directory, ignore_errors=True)


def conclude(config: RunConfig, run_dir: Path, code: int, error: str, console: Console) -> int:
    """Say how it ended, and draw it. Who interrupts a run does not want to wait for that."""
    summary = read_summary(run_dir)
    if summary and code != INTERRUPTED:
        shares = overlap(run_dir)
        summary["busy_at_once"] = shares.both if shares.seconds else None
        write_summary(run_dir, summary)
        if config.observe.plot:
            from asyncrl.observe.plot import draw

            draw(run_dir)
    if summary:
        print_summary(summary, run_dir)
    if error:
        console.fail(error)
    if not summary:
        console.fail(f"no summary was written; logs: {run_dir / 'logs'}")
    return code
