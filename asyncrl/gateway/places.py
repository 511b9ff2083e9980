"""A place for each episode of a program: a directory to work in, a HOME and a TMPDIR that no other one has.

    /var/tmp/asyncrl-UID/NAMESPACE-PID-START-TOKEN/{work,home,tmp}

It is removed when the episode is over. A killed worker leaves it: its owner is known by pid and start time,
and the next worker removes it. Not in /tmp: Codex does not install its helpers there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.gateway.lines import CommandError
from asyncrl.isolation.calls import in_thread
from asyncrl.isolation.child import wrapped
from asyncrl.isolation.sandbox import emptying
from asyncrl.isolation.wrapper import KILL_SECONDS, kill

PARENT = f"/var/tmp/asyncrl-{os.getuid()}"
PARTS = ("work", "home", "tmp")
CREDENTIALS = (
    *(".netrc", ".ssh", ".aws", ".azure", ".gnupg", ".kube", ".git-credentials", ".pypirc", ".npmrc"),
    *("auth.json", ".credentials.json", "*token*", "id_rsa*", "id_ed25519*", "*.pem", ".env"),
)
"""Names of files and directories in which logins lie."""

Streams = tuple[int, int, int]
"""Descriptors of a program's standard input, output and error."""


class DirectoryPlace:
    """A place beside the run: whatever runs there can do what the user can."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    def write(self, path: str, text: str) -> None:
        """Write a file at a path in the place."""
        file = Path(self.root, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, errors="replace")

    async def run(self, words: Sequence[str], environment: Mapping[str, str], streams: Streams) -> int:
        """Run a program in `work` until it ends, and return its exit code. It and its descendants are killed
        when this is cancelled, or the worker dies. The streams are closed here once the program has them."""
        stdin, stdout, stderr = streams
        try:
            process = await asyncio.create_subprocess_exec(
                *wrapped(words),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=f"{self.root}/work",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"{words[0]} cannot be run: {error.strerror}") from error
        finally:
            for descriptor in streams:
                os.close(descriptor)
        ended = asyncio.ensure_future(process.wait())
        try:
            return await asyncio.shield(ended)
        finally:
            if not ended.done():
                with suppress(ProcessLookupError):
                    kill(process.pid)
                await asyncio.wait([ended], timeout=2 * KILL_SECONDS)


@asynccontextmanager
async def new_place(files: str = "") -> AsyncIterator[DirectoryPlace]:
    """Make a place, its `work` a copy of the tree `files`; it is removed in the end. CommandError where it
    cannot be made."""
    try:
        root = await in_thread(partial(_make, files), "place")
    except OSError as error:
        raise CommandError(f"no place for the episode could be made: {error}") from error
    try:
        yield DirectoryPlace(root)
    finally:
        await in_thread(partial(emptying.remove, str(root)), "place")


def _make(files: str) -> Path:
    root = _parent() / "-".join((*_owner(), secrets.token_hex(8)))
    root.mkdir(0o700)
    for part in PARTS:
        if files and part == "work":
            shutil.copytree(files, root / part, symlinks=True)
        else:
            (root / part).mkdir()
    return root


@cache
def _parent() -> Path:
    """Make the directory of all places of this user, and remove those whose worker was killed."""
    parent = Path(PARENT)
    parent.mkdir(0o700, exist_ok=True)
    found = parent.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or parent.is_symlink():
        raise CommandError(f"{parent} is open to other users; remove it")
    for place in parent.iterdir():
        space, pid, start, _ = place.name.split("-")
        if space == _owner()[0] and start != _start_of(pid):
            emptying.remove(str(place))
    return parent


def _owner() -> tuple[str, str, str]:
    """This process: its namespace of pids, its pid there, and when it started."""
    pid = str(os.getpid())
    return os.readlink("/proc/self/ns/pid").strip("pid:[]"), pid, _start_of(pid)


def _start_of(pid: str) -> str:
    """When a process started, in clock ticks since the machine did; '' if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def check_tree(files: str, allow: Sequence[str]) -> None:
    """ConfigError where the tree is none, or has files with logins by their names that are not in `allow`."""
    if not Path(files).is_dir():
        raise ConfigError(f"files {files!r}: no such directory")
    if found := sorted(set(_credentials(files)).difference(allow)):
        raise ConfigError(
            f"files {files!r}: the model could read {', '.join(found)}, which may hold logins; remove them, "
            f"or set allow: {found[0]}"
        )


def _credentials(files: str) -> Iterator[str]:
    for top, directories, names in os.walk(files):
        for name in (*directories, *names):
            if any(fnmatchcase(name.lower(), pattern) for pattern in CREDENTIALS):
                yield os.path.relpath(os.path.join(top, name), files)
