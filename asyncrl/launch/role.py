"""The main program of a role's process: sets up logging, runs the role, ends with an exit code.

python -m asyncrl.launch.role rollout --index 0 --run-dir runs/demo --incarnation 3f… <endpoints

The coordinator's endpoints and the role's key come on standard input, as every process of the machine, or of
the user, can read arguments and variables.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from asyncrl.config import RunConfig, read_config
from asyncrl.errors import ConfigError, GaveUpError
from asyncrl.isolation.child import raise_file_limit
from asyncrl.launch.models import resolve_models
from asyncrl.launch.placement import COORDINATOR, ROLE_TARGETS, SCORER, TRAINER
from asyncrl.launch.process import BAD_INPUT, CRASHED, TRY_AGAIN
from asyncrl.registry import search_working_directory
from asyncrl.runtime.process import ignore_end_signals, quick_imports
from asyncrl.values import printable, without_middle
from asyncrl.wire.sockets import Endpoints, flush_sockets

log = logging.getLogger("asyncrl.launch")

LIBRARY_RECORDS = 200  # Records of a level that each logger of a library may write.
# Characters kept of the start and the end of a library's record; the cause comes last.
RECORD_START = 2000
RECORD_END = 6000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.launch.role", description=__doc__)
    parser.add_argument("role", choices=sorted(ROLE_TARGETS))
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument(
        "--target", default="", help="module:function to run instead of the role's own function"
    )
    arguments = parser.parse_args(argv)

    os.environ.pop("PYTHONSAFEPATH", None)  # for this process alone
    ignore_end_signals()
    set_up_logging()

    try:
        search_working_directory()
        config = read_config(Path(arguments.run_dir))
    except ConfigError as error:
        log.error("%s", error)
        return BAD_INPUT

    # The launcher has written the endpoints to standard input, which is empty from then on.
    with open(os.dup(0), "rb") as pipe:
        endpoints = msgspec.msgpack.decode(pipe.read(), type=Endpoints)
    with open(os.devnull, "rb") as empty_file:
        os.dup2(empty_file.fileno(), 0)
    return run_role(arguments, config, endpoints)


def run_role(arguments: argparse.Namespace, config: RunConfig, endpoints: Endpoints) -> int:
    """Run the function of a role; an exception is logged and becomes an exit code."""
    role = arguments.role
    index = arguments.index
    incarnation = arguments.incarnation

    role_arguments: dict[str, tuple[object, ...]] = {
        COORDINATOR: (incarnation,),
        SCORER: (index, incarnation, *config.scorer_places[index : index + 1]),
        TRAINER: (index, incarnation, arguments.rendezvous),
    }

    raise_file_limit()
    log.info("%s-%d starts, pid %d, incarnation %s", role, index, os.getpid(), incarnation)

    try:
        # On another machine a model of the hub is fetched into its cache.
        config = resolve_models(config, scorers=role == SCORER)
        module_name, _, function_name = (arguments.target or ROLE_TARGETS[role]).partition(":")
        try:
            with quick_imports():
                run = getattr(importlib.import_module(module_name), function_name)
        except ImportError as error:  # A broken installation: the launcher does not import torch
            log.exception("%s cannot be imported", module_name)
            raise ConfigError(f"{module_name} cannot be imported ({error}); reinstall asyncrl") from error

        exit_code = int(run(config, endpoints, *role_arguments.get(role, (index, incarnation))))
    except ConfigError as error:
        log.error("%s", error)
        return BAD_INPUT
    except GaveUpError as error:
        log.error("%s", error)
        return TRY_AGAIN
    except BaseException:
        log.exception("%s-%d crashed", role, index)
        return CRASHED

    log.info("%s-%d ends with %d", role, index, exit_code)
    return exit_code


class _LibraryRecords(logging.Filter):
    """Bounds the records of each logger of a library in a process: of each level the first LIBRARY_RECORDS
    pass, then every record whose number is a power of two, with that number. A program in a sandbox could
    otherwise make a server complain without end."""

    def __init__(self) -> None:
        super().__init__()
        self._record_counts: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] == "asyncrl":
            return True

        self._record_counts[record.name, record.levelno] += 1
        count = self._record_counts[record.name, record.levelno]
        if count <= LIBRARY_RECORDS:
            return True
        record.number = count  # for the formatter
        return count.bit_count() == 1


class _LogFormatter(logging.Formatter):
    """Formats records without control characters; long records of libraries are cut to their start and their
    end."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.name.partition(".")[0] != "asyncrl":
            text = without_middle(text, head=RECORD_START, tail=RECORD_END, note=" … ({} characters) … ")
        if (number := getattr(record, "number", None)) is not None:
            text += f" (record {number} of level {record.levelname} from this logger; the others are omitted)"
        return printable(text)


def set_up_logging() -> None:
    """Log to standard error, which the launcher directs to the role's log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_LibraryRecords())
    line_format = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(_LogFormatter(line_format, datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


def leave(exit_code: int, timeout: float = 5.0) -> NoReturn:
    """End the process once its sockets have sent everything: `sys.exit` would abort if a thread still runs.
    The deadline is an alarm and not a thread, as no thread can start when the process ends for lack of
    memory."""

    def give_up(number: int, frame: FrameType | None) -> None:
        with suppress(MemoryError):
            log.warning("a socket was left open; exiting after %g s", timeout)
        os._exit(exit_code)

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, timeout)

    flush_sockets()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main())
