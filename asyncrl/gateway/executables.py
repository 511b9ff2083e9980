"""Checks, before the start, that a program can be executed in the place of an episode. Nothing of it is run:
what the kernel would look for is looked for there.

    cli.js ──#!──► /usr/bin/env node ──PATH──► /usr/local/bin/node ──ELF──► /lib64/ld-linux-x86-64.so.2
"""

from __future__ import annotations

import os
import shlex
import struct
from pathlib import PurePath
from typing import Protocol

HEAD_BYTES = 4096  # of a program: its first line, or the headers of an executable file
MAX_STEPS = 5  # from a script to its interpreter, as the kernel
MACHINES = {
    "x86_64": (62, 3),
    "aarch64": (183, 40),
}  # by `uname -m`: ELF machines that run there, the own first
PROGRAM_INTERPRETER = 3  # the type of a program header that names a loader


class ProgramFiles(Protocol):
    """The files that a program of an episode sees."""

    async def look_up(self, name: str, search_path: str) -> str:
        """Find the path of an executable file by its name; '' if there is none."""

    async def problem(self, path: str) -> str:
        """Say why a path cannot be executed: 'is missing', 'is a directory', …; '' if it can."""

    async def head(self, path: str) -> bytes:
        """Read the first HEAD_BYTES; b'' where they cannot be read."""


async def why_not_executable(program: str, files: ProgramFiles, search_path: str) -> str:
    """Say why this program, a path or a name, cannot be executed; '' if nothing speaks against it."""
    named_by = ""
    for _ in range(MAX_STEPS):
        path = program if "/" in program else await files.look_up(program, search_path)
        subject = f"{program!r}{named_by}"
        if not path:
            return f"{subject} is not on the PATH ({search_path})"
        if trouble := await files.problem(path):
            return f"{subject} {trouble}"

        head = await files.head(path)
        if head.startswith(b"\x7fELF"):
            return await _elf_problem(subject, path, head, files)
        if not head.startswith(b"#!"):
            return ""

        first_line, newline, _ = head[2:].partition(b"\n")
        line = os.fsdecode(first_line)
        if newline and line.endswith("\r"):
            return f"the first line of {path}, {'#!' + line!r}, ends with a carriage return; write it without"
        interpreter, _, argument = line.strip().partition(" ")
        if not interpreter:
            return f"the first line of {path} names no interpreter"
        named_by = f", which the first line of {path} names,"
        if trouble := await files.problem(interpreter):
            return f"the interpreter {interpreter!r}{named_by} {trouble}"
        program = interpreter
        if PurePath(interpreter).name == "env":
            program = _started_by_env(argument.strip()) or interpreter
    return f"{program!r} is the interpreter of an interpreter, more than {MAX_STEPS} times"


def _started_by_env(argument: str) -> str:
    """Return what `env` is to run: it gets all behind its name as one word, unless that begins with -S."""
    split = argument.startswith(("-S", "--split-string"))
    try:
        words = (
            shlex.split(argument.removeprefix("--split-string").removeprefix("-S").lstrip("="))
            if split
            else [argument]
        )
    except ValueError:
        return ""
    programs = [word for word in words if not word.startswith("-") and "=" not in word]
    return programs[0] if programs else ""


async def _elf_problem(subject: str, path: str, head: bytes, files: ProgramFiles) -> str:
    """Say why an executable file cannot be started: it is of another machine, or its loader is missing."""
    here = os.uname().machine
    is_64_bit, order = head[4:5] == b"\x02", ">" if head[5:6] == b"\x02" else "<"
    try:
        (machine,) = struct.unpack_from(f"{order}H", head, 18)
        if machine not in MACHINES.get(here, (machine,)):
            return f"{subject} is built for another machine: ELF machine {machine}, and this is {here}"
        start, size, count = _program_headers(head, is_64_bit, order)
        for number in range(count):
            at = start + number * size
            (kind,) = struct.unpack_from(f"{order}I", head, at)
            if kind == PROGRAM_INTERPRETER:
                form, offset_at, length_at = ("Q", 8, 32) if is_64_bit else ("I", 4, 16)
                (offset,) = struct.unpack_from(f"{order}{form}", head, at + offset_at)
                (length,) = struct.unpack_from(f"{order}{form}", head, at + length_at)
                loader = os.fsdecode(head[offset : offset + length].rstrip(b"\0"))
                if loader and (trouble := await files.problem(loader)):
                    return f"the loader {loader!r}, which {path} needs, {trouble}"
    except struct.error:  # headers that lie further behind
        return ""
    return ""


def _program_headers(head: bytes, is_64_bit: bool, order: str) -> tuple[int, int, int]:
    """Return where the program headers begin, the size of each, and their number."""
    form, start_at, size_at = ("Q", 32, 54) if is_64_bit else ("I", 28, 42)
    (start,) = struct.unpack_from(f"{order}{form}", head, start_at)
    size, count = struct.unpack_from(f"{order}HH", head, size_at)
    return start, size, count
