"""The inside of a launched process: never outlive the parent, log, run the role, end with a code.

    python -m asyncrl.launch.role rollout --index 0 --run-dir runs/demo --incarnation 3f… --control tcp://…

A parent that dies by kill -9 takes its children along: the kernel signals them (PR_SET_PDEATHSIG), and for
kernels that do not, the pipe whose other end only the parent holds reads end-of-file.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import msgspec

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import COORDINATOR, ENGINE, ROLLOUT, TARGETS, TRAINER
from asyncrl.launch.process import BAD_INPUT, CRASHED
from asyncrl.wire.sockets import Endpoints, flush_sockets

PR_SET_PDEATHSIG = 1
log = logging.getLogger("asyncrl.launch")


def main(argv: list[str] | None = None) -> int:
    options = _arguments(argv)
    die_with_parent(options.parent, options.alive_fd)
    set_up_logging()
    config = read_config(Path(options.run_dir))
    target = options.target or TARGETS[options.role]
    endpoints = Endpoints(control=options.control, bulk=options.bulk)
    return execute(
        target, options.role, config, endpoints, options.index, options.incarnation, options.rendezvous
    )


def execute(
    target: str,
    role: str,
    config: RunConfig,
    endpoints: Endpoints,
    index: int,
    incarnation: str,
    rendezvous: str,
) -> int:
    """Run a role function; an exception is logged and becomes an exit code."""
    arguments: dict[str, tuple[object, ...]] = {
        COORDINATOR: (config, endpoints, incarnation),
        ENGINE: (config, endpoints, index, incarnation),
        ROLLOUT: (config, endpoints, index, incarnation),
        TRAINER: (config, endpoints, index, incarnation, rendezvous),
    }
    log.info("%s-%d starts, pid %d, incarnation %s", role, index, os.getpid(), incarnation)
    try:
        module, _, function = target.partition(":")
        code = int(getattr(importlib.import_module(module), function)(*arguments[role]))
    except ConfigError as error:
        log.error("%s", error)
        return BAD_INPUT
    except BaseException:
        log.exception("%s-%d crashed", role, index)
        return CRASHED
    log.info("%s-%d ends with %d", role, index, code)
    return code


def read_config(run_dir: Path) -> RunConfig:
    """The configuration as the launcher resolved and wrote it."""
    return msgspec.yaml.decode((run_dir / "config.yaml").read_bytes(), type=RunConfig)


def set_up_logging() -> None:
    """To standard error, which the launcher directs to the role's log."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    logging.captureWarnings(True)


def die_with_parent(parent: int, alive_fd: int) -> None:
    """End when the parent does. Both ways end without clean-up: every role survives a kill -9 anyway."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(CRASHED)
    threading.Thread(target=_watch_pipe, args=(alive_fd,), daemon=True, name="parent-watch").start()


def _watch_pipe(alive_fd: int) -> None:
    os.read(alive_fd, 1)  # nobody writes: this returns at end-of-file
    os._exit(CRASHED)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.launch.role", description=__doc__)
    parser.add_argument("role", choices=sorted(TARGETS))
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--control", required=True)
    parser.add_argument("--bulk", required=True)
    parser.add_argument("--target", default="", help="module:function to run instead of the role's own")
    parser.add_argument("--parent", type=int, required=True, help="pid to live and die with")
    parser.add_argument("--alive-fd", type=int, required=True, help="pipe that reads EOF when it is gone")
    return parser.parse_args(argv)


def leave(code: int, patience: float = 5.0) -> NoReturn:
    """End the process once its sockets have sent what they hold. Not the interpreter's way, which aborts when
    a thread of some library is still there."""
    timer = threading.Timer(patience, os._exit, (code,))
    timer.daemon = True
    timer.start()
    flush_sockets()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
