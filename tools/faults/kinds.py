"""The kinds of faults: what each does to a run, and for how long.

A fault is a context manager: entered, it has happened; left, its cause is gone. `FAULTS` names them all.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from asyncrl.isolation.sandbox.kernel import READ_ONLY, copy_mount, place_mount, set_attributes
from asyncrl.store.checkpoints import MANIFEST, Checkpoints
from asyncrl.weights.disk import SHARED_MEMORY
from faults.target import Target

ROLES = ("rollout", "trainer", "coordinator")
SERVED = ("engine", "server")  # where engines are servers: a supervisor, and the server itself
FLIPPED = 64  # bytes between two that are damaged
LEFT = 1 << 20  # bytes, less than a rank of the demo moves


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    `happen(target, victim)` lasts for `leases` leases. `victims`: roles, of which one is chosen (empty: the
    fault concerns the run as a whole).
    """

    happen: Callable[[Target, str], AbstractContextManager[None]]
    leases: float = 0.0
    victims: tuple[str, ...] = ("",)


@contextmanager
def kill(target: Target, victim: str) -> Iterator[None]:
    """kill -9."""
    target.process(victim).kill()
    yield


@contextmanager
def pause(target: Target, victim: str) -> Iterator[None]:
    """Send SIGSTOP, then SIGCONT: the process pauses as on a machine that swaps, or in a debugger."""
    process = target.process(victim)
    process.suspend()
    yield
    with suppress(psutil.NoSuchProcess):  # the process was replaced meanwhile
        process.resume()


@contextmanager
def launcher(target: Target, victim: str) -> Iterator[None]:
    """Kill the launcher with SIGKILL: all other processes end with the launcher, and the run is resumed."""
    processes = target.roles().values()
    target.launcher.kill()
    target.launcher.wait(60)
    assert not psutil.wait_procs(processes, 30)[1], "a process outlived the launcher"
    target.launch("resume=must")
    yield


@contextmanager
def second_launcher(target: Target, victim: str) -> Iterator[None]:
    """The same command again: refused."""
    code, output = target.again("launch.port=0")
    assert code == 2 and "another run with this name" in output, (code, output)
    yield


@contextmanager
def cut(target: Target, victim: str) -> Iterator[None]:
    """All connections to the coordinator end."""
    for proxy in target.proxies:
        proxy.cut()
    yield


@contextmanager
def _bad(target: Target, mode: str) -> Iterator[None]:
    for proxy in target.proxies:
        proxy.mode = mode
    yield
    for proxy in target.proxies:
        proxy.mode = "pass"


def held_connections(target: Target, victim: str) -> AbstractContextManager[None]:
    """Keep connections open, and let them carry nothing."""
    return _bad(target, "hold")


def slow(target: Target, victim: str) -> AbstractContextManager[None]:
    """Slow connections down to 20 kB a second."""
    return _bad(target, "slow")


def duplicated(target: Target, victim: str) -> AbstractContextManager[None]:
    """Parts of the stream come twice."""
    return _bad(target, "duplicate")


def corrupted(target: Target, victim: str) -> AbstractContextManager[None]:
    """Bits of the stream are flipped."""
    return _bad(target, "corrupt")


@contextmanager
def _filled(target: Target, directory: Path) -> Iterator[None]:
    """Fill a disk.

    In a run with shifts the disk is filled when engines are about to wake, when ranks move their state there
    and the newest version is written.
    """
    filler = directory / "filler"
    shifts = target.shift() != ""
    with filler.open("wb", buffering=0) as file:
        _fill(file, leave=LEFT if shifts else 0)  # most of it now: that takes longer than a change
        while shifts:
            room = file.tell()
            target.until(lambda: target.shift() != "waking", "another shift than this one", pause=0.001)
            target.until(lambda: target.shift() == "waking", "a change to engines", pause=0.001)
            _fill(file)
            if target.shift() == "waking":
                break
            file.seek(room)
            file.truncate()

    yield
    filler.unlink()


def _fill(file: IO[bytes], leave: int = 0) -> None:
    size = 1 << 20
    while size:
        with suppress(OSError):
            while shutil.disk_usage(file.name).free - size >= leave:
                file.write(bytes(size))
        size //= 2


def full_disk(target: Target, victim: str) -> AbstractContextManager[None]:
    """Fill the disk of the run directory."""
    return _filled(target, target.run.parent)


def full_memory(target: Target, victim: str) -> AbstractContextManager[None]:
    """Fill shared memory, where the versions of the weights are."""
    return _filled(target, SHARED_MEMORY)


@contextmanager
def read_only(target: Target, victim: str) -> Iterator[None]:
    """Let no file of the run directory be made or opened to write. Open files can still be written."""
    directory = str(target.run)
    tree = copy_mount(directory)
    set_attributes(tree, "", READ_ONLY)  # before it is in place: then no file can be open in it to write
    place_mount(tree, directory)
    yield
    subprocess.run(["umount", "--lazy", directory], check=True)


@contextmanager
def locked_store(target: Target, victim: str) -> Iterator[None]:
    """Another program has begun to write into run.db."""
    with closing(sqlite3.connect(target.run / "run.db", isolation_level=None, timeout=5)) as connection:
        with suppress(sqlite3.OperationalError):  # a coordinator that is paused as it writes keeps the lock
            connection.execute("BEGIN IMMEDIATE")
        yield
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def weights_gone(target: Target, victim: str) -> Iterator[None]:
    """Remove a file of the version that was just published, while engines load the version."""
    first_paths = set(target.weights.glob("*"))
    target.until(lambda: set(target.weights.glob("*")) - first_paths, "a version is published", pause=0.001)
    for path in set(target.weights.glob("*")) - first_paths:
        for file in _weight_files(path):
            file.unlink(missing_ok=True)
    yield


@contextmanager
def weights_damaged(target: Target, victim: str) -> Iterator[None]:
    """Bits of the newest version's files are flipped; then the worker is killed, and loads it anew."""
    for file in sorted(_weight_files(target.weights), key=_age)[-1:]:
        _flip(file)
    target.process(victim).kill()
    yield


@contextmanager
def checkpoint_damaged(target: Target, victim: str) -> Iterator[None]:
    """Flip bits of the newest checkpoint, then kill the trainer, which resumes from another checkpoint."""
    checkpoints = Checkpoints(target.run / "checkpoints")
    target.until(lambda: len(checkpoints.steps()) > 1, "two checkpoints")
    newest = Path(checkpoints.file_path(checkpoints.steps()[0]))
    files = [path for path in newest.rglob("*") if path.is_file() and path.name != MANIFEST]
    _flip(max(files, key=lambda path: path.stat().st_size))
    target.process(victim).kill()
    yield


@contextmanager
def segment_damaged(target: Target, victim: str) -> Iterator[None]:
    """Flip bits of the newest payloads, then kill the coordinator, which reads the payloads again."""
    newest = max((target.run / "segments").iterdir())
    _flip(newest, newest.stat().st_size - 4096)
    target.process(victim).kill()
    yield


@contextmanager
def segment_cut(target: Target, victim: str) -> Iterator[None]:
    """Cut the last 4 KiB off the payloads file in writing; the coordinator goes on writing."""
    newest = max((target.run / "segments").iterdir())
    os.truncate(newest, max(0, newest.stat().st_size - 4096))
    yield


@contextmanager
def hang(target: Target, victim: str) -> Iterator[None]:
    """Let the reward hang until its deadline: workers answer, and no episode ends."""
    target.flag.touch()
    yield
    target.flag.unlink()


def _weight_files(directory: Path) -> list[Path]:
    """Return the files of weights below `directory`, whose folders are renamed and removed meanwhile."""
    # os.walk passes over a folder that has vanished; Path.rglob raises
    return [
        Path(folder, name)
        for folder, _, names in os.walk(directory)
        for name in names
        if name.endswith(".safetensors")
    ]


def _age(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _flip(path: Path, start: int = 0) -> None:
    """Flip a bit of each FLIPPED bytes from `start` on."""
    with path.open("r+b", buffering=0) as file:
        for offset in range(max(0, start), path.stat().st_size, FLIPPED):
            (byte,) = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), offset)


FAULTS = {
    "kill": Fault(kill, victims=ROLES + SERVED),
    "pause": Fault(pause, leases=1.5, victims=ROLES + SERVED),
    "launcher": Fault(launcher),
    "second-launcher": Fault(second_launcher),
    "cut": Fault(cut),
    "held": Fault(held_connections, leases=1.5),
    "slow": Fault(slow, leases=1.0),
    "duplicated": Fault(duplicated, leases=0.5),
    "corrupted": Fault(corrupted, leases=0.5),
    "full-disk": Fault(full_disk, leases=1.0),
    "full-memory": Fault(full_memory, leases=1.0),
    "read-only": Fault(read_only, leases=1.0),
    "locked-store": Fault(locked_store, leases=1.5),
    "weights-gone": Fault(weights_gone),
    "weights-damaged": Fault(weights_damaged, victims=("rollout",)),
    "checkpoint-damaged": Fault(checkpoint_damaged, victims=("trainer",)),
    "segment-damaged": Fault(segment_damaged, victims=("coordinator",)),
    "segment-cut": Fault(segment_cut),
    "hang": Fault(hang, leases=1.5),
}
