"""The command line: finds the command, which parses its own arguments.

Exit codes: 0 completed, 1 failed, 2 bad input (one line on standard error; of several unknown
keys a line each), 130 interrupted, 141 nobody reads the output any more (as of a program that SIGPIPE ends).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import suppress
from importlib import import_module

import asyncrl
from asyncrl.errors import AsyncrlError, ConfigError, UnknownKeysError, one_line
from asyncrl.values import printable

# The lines of --help for each command, a module of `asyncrl.commands` that is imported on demand.
COMMANDS = {
    "train": [
        "experiment=calculator   train a small model on a CPU to use a calculator",
        "--help                  flags, examples, and the most common keys",
    ],
    "sft": ["--help                    train on conversations, e.g. to teach a new format"],
    "eval": ["MODEL data=FILE          measure mean@k, pass@k and maj@k for a model, a checkpoint or a run"],
    "generate": ["MODEL data=FILE out=FILE.parquet      write a model's answers and rewards as a data set"],
    "merge": ["CHECKPOINT OUT          write a Hugging Face directory, or only the adapters"],
    "doctor": ["[OVERRIDES]            check what a run needs: machine, model, data, memory"],
    "data": [
        "gsm8k --out gsm8k        write a data set: gsm8k, math, dapo_math, hotpotqa, reasoning_gym:TASK",
    ],
    "runs": [
        "list | show [NAME]       list the runs in runs/, or show a summary",
        "transcripts [NAME]       show stored transcripts from validation, or from training (--of training)",
    ],
    "status": ["[NAME]                 show what an active run is waiting for, or why a run ended"],
    "invite": ["[NAME]                 print a token for a worker or server to join an active run"],
    "worker": ["--join TOKEN           run as that worker or server until stopped"],
    "plan": [
        "NAME | KEY=VALUE...     find the bottleneck; predict the effect of changing slots, splits and bounds"
    ],
    "view": [
        "[NAME...]                serve a web page with curves, episodes token by token, and a timeline"
    ],
    "replay": ["NAME --step N          repeat a recorded step, with the same or different settings"],
    "regrade": ["NAME --reward SPEC    score recorded episodes with a different reward"],
    "image": [
        "import FILE | list       import or list root file systems for sandboxes",
    ],
    "tasks": ["check DIR               check that tasks score 0 if untouched and 1 if solved"],
    "tools": [
        "list [SPEC...]          list the built-in tools, or the tools in a module, file or folder",
        "call NAME '{\"a\": 1}'    call a tool",
    ],
}
# Commands that run users' code in the command's process, whose child processes must not outlive the command.
# Values: seconds from a signal to the end; an evaluation may take as long as necessary to end in order.
ENCLOSED_COMMANDS = {
    "doctor": 5.0,
    "regrade": 5.0,
    "tasks": 5.0,
    "tools": 5.0,
    "eval": math.inf,
    "generate": math.inf,
}
COMMAND_HELP = "\n".join(f"  asyncrl {name} {line}" for name, lines in COMMANDS.items() for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. A named error is printed on a single line."""
    if argv is None and sys.argv[1:2] and sys.argv[1] in ENCLOSED_COMMANDS:
        from asyncrl.isolation.child import run_enclosed

        return run_enclosed("asyncrl.cli:main", sys.argv[1:], grace_seconds=ENCLOSED_COMMANDS[sys.argv[1]])

    try:
        if sys.flags.optimize > 1:
            raise ConfigError(
                "PYTHONOPTIMIZE=2 (python -OO) strips docstrings, which transformers and tool descriptions "
                "need; unset it, or set PYTHONOPTIMIZE=1"
            )
        exit_code = _dispatch_command(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # now, as errors of the flush at exit would print a stack trace
        return exit_code
    except UnknownKeysError as error:
        return _report_error(str(error), 2)
    except ConfigError as error:
        return _report_error(" ".join(str(error).split()), 2)
    except AsyncrlError as error:
        return _report_error(str(error), 1)
    except BrokenPipeError:  # asyncrl runs list | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at the exit then succeeds
        return 141
    except UnicodeEncodeError as error:  # a path that is not UTF-8
        return _report_error(
            f"{error.object!a}: the path is not UTF-8 text; rename the file or directory, or use another", 2
        )
    except OSError as error:  # a full disk, an unreadable file
        return _report_error(one_line(error), 1)
    except KeyboardInterrupt:
        return _report_error("interrupted", 130)


def _report_error(text: str, code: int) -> int:
    with suppress(OSError):
        print(printable(f"asyncrl: {text}"), file=sys.stderr)
    return code


def _dispatch_command(argv: list[str]) -> int:
    """Parse the name of the command, and let the command parse the arguments."""
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description=asyncrl.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=COMMAND_HELP,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {asyncrl.__version__}")
    parser.add_argument("command", choices=COMMANDS, help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments for the command")
    if not argv:
        parser.print_help(sys.stderr)
        return 2

    options = parser.parse_args(argv)
    exit_code: int = import_module(f"asyncrl.commands.{options.command}").main(options.arguments)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
