"""A program that cannot be executed is refused before the start, with what is missing, and is not run."""

from __future__ import annotations

import asyncio
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.gateway import CommandError, executables
from asyncrl.gateway.programs import Command
from asyncrl.isolation.sandbox.detection import detect_isolation

JAILED = "network" in detect_isolation().enforced if sys.platform == "linux" else False
every_sandbox = pytest.mark.parametrize(
    "sandbox", ["none", pytest.param("jail", marks=pytest.mark.skipif(not JAILED, reason="no namespaces"))]
)


def script(first_line: str) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(f"{first_line}\ntouch {path}.ran\n".encode())


def elf(machine: int = 62, loader: str = "") -> bytes:
    """Write the headers of an executable file."""
    name = loader.encode() + b"\0"
    header = (
        b"\x7fELF\2\1\1"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    )
    return header + struct.pack("<IIQQQQQQ", 3, 4, 120, 0, 0, len(name), len(name), 1) + name


def chain(path: Path) -> None:
    inner = path.with_name("inner")
    inner.write_text("#!/no/such/interpreter\n")
    inner.chmod(0o755)
    path.write_text(f"#!{inner}\n")


def endless(path: Path) -> None:
    path.write_text(f"#!{path}\n")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no interpreter": (
        script("#!/no/node"),
        "the interpreter '/no/node', named in the first line of .*agent, does not exist",
    ),
    "not on the PATH": (
        script("#!/usr/bin/env no-node"),
        "'no-node', named in the first line of .*agent, is not on the PATH",
    ),
    "arguments as one word": (script("#!/usr/bin/env sh -e"), "'sh -e', named in the first line"),
    "split by env": (script("#!/usr/bin/env -S A=1 no-node --x"), "'no-node', named in the first line"),
    "lines of Windows": (script("#!/bin/sh\r"), "ends with a carriage return"),
    "of an interpreter": (
        chain,
        "the interpreter '/no/such/interpreter', named in the first line of .*inner",
    ),
    "itself": (endless, "more than 5 scripts in a row name another script as the interpreter"),
    "a directory": (
        script("#!/usr"),
        "the interpreter '/usr', named in the first line of .*agent, is a directory",
    ),
    "not executable": (script("#!/etc/passwd"), "the interpreter '/etc/passwd', .* is not "),
    "no name": (script("#!"), "does not name an interpreter"),
    "another machine": (
        lambda path: path.write_bytes(elf(machine=243)),
        r"is built for another architecture \(ELF machine 243\); this machine is x86_64",
    ),
    "no first line": (script("touch x"), "is neither a binary nor a script; add a first line such as"),
    "an empty first line": (script(""), "is neither a binary nor a script"),
    "no loader": (
        lambda path: path.write_bytes(elf(loader="/no/ld.so")),
        "the loader '/no/ld.so', which .*agent needs, does not exist",
    ),
}


def agent_of(path: Path, sandbox: str) -> Command:
    path.chmod(0o755)
    return Command(line=f"{path} --url {{base_url}}", sandbox=sandbox)  # type: ignore[arg-type]


@pytest.mark.parametrize(("write", "why"), BROKEN.values(), ids=BROKEN)
@every_sandbox
def test_what_a_program_needs_is_looked_for_before_the_start(
    tmp_path: Path, sandbox: str, write: Callable[[Path], Any], why: str
) -> None:
    write(tmp_path / "agent")
    with pytest.raises(CommandError, match=why):
        asyncio.run(agent_of(tmp_path / "agent", sandbox).version())
    assert not (tmp_path / "agent.ran").exists()


@pytest.mark.parametrize(
    "first_line",
    [
        "#!/bin/sh",
        "#! /bin/sh -e",
        "#!/bin/sh\t-e",
        "#!/bin/sh\0",
        "#!/usr/bin/env sh",
        "#!/usr/bin/env\tsh",
        "#!/usr/bin/env -S A=1 sh -e",
        "#!/usr/bin/env -S -u FOO sh",
        "#!/usr/bin/env -S -C / sh",
        "#!/usr/bin/env -S PATH=/opt/bin tool",
        "#!/usr/bin/env -S ${X}sh",
        r"#!/usr/bin/env -S sh\_-e",
        "#!/usr/bin/env -S # sh",
    ],
)
@every_sandbox
def test_programs_that_can_be_executed_are_not_refused(tmp_path: Path, sandbox: str, first_line: str) -> None:
    script(first_line)(tmp_path / "agent")
    asyncio.run(agent_of(tmp_path / "agent", sandbox).version())
    assert not (tmp_path / "agent.ran").exists()


@pytest.mark.parametrize("write", [script("touch x"), lambda path: path.write_bytes(elf(machine=243))])
def test_what_an_emulator_may_run_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Any]
) -> None:
    write(tmp_path / "agent")
    formats = tmp_path / "formats"
    monkeypatch.setattr(executables, "BINARY_FORMATS", str(formats))
    formats.mkdir()
    for name in ("register", "status"):
        (formats / name).touch()
    with pytest.raises(CommandError):
        asyncio.run(agent_of(tmp_path / "agent", "none").version())
    (formats / "qemu-riscv64").touch()
    asyncio.run(agent_of(tmp_path / "agent", "none").version())


def test_a_loader_whose_path_was_not_read_is_not_looked_for(tmp_path: Path) -> None:
    """It is further behind in the file than what is read."""
    path = tmp_path / "agent"
    path.write_bytes(elf(loader="/lib64/" + "./" * executables.HEAD_BYTES + "ld-linux-x86-64.so.2"))
    asyncio.run(agent_of(path, "none").version())


@every_sandbox
def test_executable_files_are_not_refused(tmp_path: Path, sandbox: str) -> None:
    for program in (shutil.which("ls"), sys.executable, shutil.which("bash")):
        asyncio.run(Command(line=f"{program} x", sandbox=sandbox).version())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["link", "directory", "file"])
def test_what_is_no_program_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "agent"
    {"link": lambda: path.symlink_to("gone"), "directory": path.mkdir, "file": path.touch}[kind]()
    with pytest.raises(ConfigError, match=r"line '.*agent': no such program"):
        Command(line=str(path))
