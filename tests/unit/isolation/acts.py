"""Behaviour, some of it bad, of children that tests start; they import nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from asyncrl.isolation.child import Service


def opened(first: str) -> Callable[[str], str]:
    """`first`: what a child does before it is ready."""
    match first.split():
        case ["refuse"]:
            raise ValueError("no such model")
        case ["refuse", path]:
            with open(path, "a") as tries:
                tries.write("x")
            raise ValueError("no such model")
        case ["leave"]:
            os._exit(3)
        case ["say", path]:  # that it has begun, and never be ready
            with open(path, "w") as begun:
                begun.write("begun\n")
            time.sleep(1000)
        case ["await", path]:
            with open(path, "rb", buffering=0) as gate:
                gate.read(1)
    return act


def act(what: str) -> str:
    match what.split():
        case ["hang"]:
            time.sleep(1000)
        case ["deaf"]:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            while True:
                pass
        case ["segv"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["leave"]:
            os._exit(3)
        case ["exit"]:
            sys.exit(4)
        case ["raise"]:
            raise KeyError("no key")
        case ["surrogate"]:
            raise ValueError("\ud800")
        case ["print"]:
            print("x" * 1000)
            os.write(1, b"\x01\x00\x00\x00\xc0" * 10)
            sys.stdout.flush()
        case ["read"]:
            return sys.stdin.read()
        case ["close"]:
            os.closerange(0, 3)
        case ["garbage"]:
            write_everywhere(b"\x05\x00\x00\x00hello")
        case ["flood"]:
            write_everywhere(b"\xff\xff\xff\xffhello")
        case ["huge"]:
            return "x" * (2 << 20)
        case ["main"]:
            return str(threading.current_thread() is threading.main_thread())
        case ["child"]:
            return str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
        case ["stop"]:  # the wrapper around this process
            os.kill(os.getppid(), signal.SIGSTOP)
            return str(os.getppid())
        case ["stop", "always"]:
            threading.Thread(target=keep_stopped, args=(os.getppid(),), daemon=True).start()
            return str(os.getppid())
        case ["pid"]:
            return str(os.getpid())
    return what


def write_everywhere(data: bytes) -> None:
    for number in range(3, 20):
        with suppress(OSError):
            os.write(number, data)


def keep_stopped(pid: int) -> None:
    while True:
        os.kill(pid, signal.SIGSTOP)


ACTS = Service(f"{__name__}:ACTS", opened, str, str, str)
