"""Checks, before the start, that a program can be executed in the workspace of an episode. Nothing is run:
the checks look for the files that the kernel would look for.

    cli.js ──#!──► /usr/bin/env node ──PATH──► /usr/local/bin/node ──ELF──► /lib64/ld-linux-x86-64.so.2
"""

from __future__ import annotations

import os
import re
import shlex
import struct
from contextlib import suppress
from pathlib import PurePath
from typing import Protocol

HEAD_BYTES = 4096  # read of a program: the first line, or the headers of an executable file
MAX_STEPS = 5  # from a script to its interpreter, as many as the kernel takes
# ELF machine numbers that run on a machine, by `uname -m`.
MACHINES = {
    "x86_64": (62, 3),
    "aarch64": (183, 40),
}
# Lists further formats that the kernel runs, by emulators for example.
BINARY_FORMATS = "/proc/sys/fs/binfmt_misc"
PROGRAM_INTERPRETER = 3  # the type of a program header that names a loader


class ProgramFiles(Protocol):
    """Access to the files that a program of an episode sees."""

    async def look_up(self, name: str, search_path: str) -> str:
        """Find the path of an executable file by name; '' if there is none."""

    async def problem(self, path: str) -> str:
        """Say why a path cannot be executed: 'is not there', 'is a directory', …; '' if nothing is wrong."""

    async def head(self, path: str) -> bytes:
        """Read the first HEAD_BYTES; b'' if the file cannot be read."""


async def why_not_executable(program: str, files: ProgramFiles, search_path: str) -> str:
    """Return why this program, a path or a name, cannot be executed; '' if nothing is wrong."""
    path = program if "/" in program else await files.look_up(program, search_path)
    subject = f"{program!r}"
    for _ in range(MAX_STEPS):
        if not path:
            return f"{subject} is not on the PATH ({search_path})"
        if trouble := await files.problem(path):
            return f"{subject} {trouble}"

        head = await files.head(path)
        if head.startswith(b"\x7fELF"):
            return await _elf_problem(subject, path, head, files)

        if not head.startswith(b"#!"):
            if not head or _runs_other_formats():  # an unreadable file can be executable
                return ""
            return f"{subject} is neither a binary nor a script; add a first line such as #!/bin/sh"

        first_line, newline, _ = head[2:].partition(b"\n")
        line = os.fsdecode(first_line.partition(b"\0")[0])
        if newline and line.endswith("\r"):
            return f"{path}: the first line ({'#!' + line!r}) ends with a carriage return; remove it"

        interpreter, *arguments = re.split(r"[ \t]+", line.strip(" \t"), maxsplit=1)
        if not interpreter:
            return f"the first line of {path} does not name an interpreter"

        named_by = f", named in the first line of {path},"
        subject = f"the interpreter {interpreter!r}{named_by}"
        path = interpreter

        env_program = _started_by_env(*arguments) if PurePath(interpreter).name == "env" else ""
        if env_program:
            if trouble := await files.problem(interpreter):
                return f"{subject} {trouble}"
            subject = f"{env_program!r}{named_by}"
            path = env_program if "/" in env_program else await files.look_up(env_program, search_path)

    return (
        f"more than {MAX_STEPS} scripts in a row name another script as the interpreter; the last script is "
        f"{path!r}"
    )


def _started_by_env(argument: str = "") -> str:
    """Return the program that `env` runs: everything after `env` is one word, unless it begins with -S.
    Return '' if only `env` itself can tell: with other options, PATH=, $, escapes and comments."""
    words = [argument]
    if argument.startswith(("-S", "--split-string")):
        text = argument.removeprefix("--split-string").removeprefix("-S").lstrip("=")
        try:
            words = [] if re.search(r"[$\\#]", text) else shlex.split(text)
        except ValueError:
            return ""

    for word in words:
        if word.startswith(("-", "PATH=")):
            return ""
        if "=" not in word:
            return word

    return ""


def _runs_other_formats() -> bool:
    """Return whether the kernel may run files that are neither its own binaries nor scripts."""
    with suppress(OSError):
        return bool(set(os.listdir(BINARY_FORMATS)) - {"register", "status"})
    return False


async def _elf_problem(subject: str, path: str, head: bytes, files: ProgramFiles) -> str:
    """Return why an executable file cannot be started: built for another machine, or without its loader."""
    this_machine = os.uname().machine
    is_64_bit = head[4:5] == b"\x02"
    byte_order = ">" if head[5:6] == b"\x02" else "<"
    try:
        (machine,) = struct.unpack_from(f"{byte_order}H", head, 18)
        if machine not in MACHINES.get(this_machine, (machine,)):
            if _runs_other_formats():
                return ""
            built_for = f"another architecture (ELF machine {machine})"
            return f"{subject} is built for {built_for}; this machine is {this_machine}"

        loader = _loader(head, is_64_bit, byte_order)
    except struct.error:  # the headers lie beyond the head
        return ""

    if loader and (trouble := await files.problem(loader)):
        return f"the loader {loader!r}, which {path} needs, {trouble}"

    return ""


def _loader(head: bytes, is_64_bit: bool, byte_order: str) -> str:
    """Return the path of the loader; '' if there is none, or the path lies beyond the head."""
    # Where the fields stand: the first two in the ELF header, the others in a program header.
    if is_64_bit:
        size_format = "Q"
        headers_at = 32
        sizes_at = 54
        offset_at = 8
        length_at = 32
    else:
        size_format = "I"
        headers_at = 28
        sizes_at = 42
        offset_at = 4
        length_at = 16

    (headers_start,) = struct.unpack_from(f"{byte_order}{size_format}", head, headers_at)
    header_size, header_count = struct.unpack_from(f"{byte_order}HH", head, sizes_at)
    for header_number in range(header_count):
        header_start = headers_start + header_number * header_size
        (header_type,) = struct.unpack_from(f"{byte_order}I", head, header_start)
        if header_type == PROGRAM_INTERPRETER:
            (path_offset,) = struct.unpack_from(f"{byte_order}{size_format}", head, header_start + offset_at)
            (path_length,) = struct.unpack_from(f"{byte_order}{size_format}", head, header_start + length_at)
            path_end = path_offset + path_length
            return (
                os.fsdecode(head[path_offset:path_end].partition(b"\0")[0]) if path_end <= len(head) else ""
            )

    return ""
