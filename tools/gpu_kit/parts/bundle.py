"""How parts start SGLang: with a Python that has it, or from the file that `make gpu-kit-sglang` writes."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parts.common import Context

PYTHON = "ASYNCRL_SGLANG_PYTHON"  # "PYTHON [LAUNCHER]", on a CPU with tools/sglang_cpu/launch.py
BUNDLE = "sglang.tar.xz"
NOT_THERE = f"not run: no package sglang here, no {PYTHON}, and no {BUNDLE} (make gpu-kit-sglang) on a GPU"
LAUNCHER = "launch_gpu.py"
# A checkout has the newest launcher; the folder of the kit that check.py runs from has only the bundle's.
CHECKOUT_LAUNCHER = Path(__file__).resolve().parents[1] / "sglang_bundle" / LAUNCHER
LOCK_POLL_S = 0.1
IMPORT_S = 30.0  # limit for a Python that looks for a package


def server_command(context: Context) -> list[str] | None:
    """Return `engine.server_command`, or None where SGLang is nowhere. []: asyncrl's own, with this Python;
    else its first three words run another Python. Unpacks the bundle, if that is what there is. TimeoutError:
    another process was still unpacking the bundle when this part's time was over."""
    if words := shlex.split(os.environ.get(PYTHON, "")):
        # Packages of this Python are not for that one.
        module = ["-m", "sglang.launch_server"] if len(words) == 1 else []
        return ["env", "--unset=PYTHONPATH", *words, *module]

    bundles = (context.kit / BUNDLE, context.kit.parent / BUNDLE)
    bundle = next((file for file in bundles if file.exists()), None)
    if bundle is not None and not context.small:
        folder = unpacked_bundle(bundle, context.work.parent / "sglang-bundle", context.deadline)
        return ["env", f"PYTHONPATH={folder / 'site'}", sys.executable, str(folder / LAUNCHER)]

    return None if importlib.util.find_spec("sglang") is None else []


def unpacked_bundle(bundle: Path, folder: Path, deadline: float) -> Path:
    """Unpack the bundle below `folder`, once for all parts, and return where that is: a folder with the name
    of the file's digest. Its launcher is the checkout's, if there is one. `deadline`: of time.monotonic();
    TimeoutError if another process unpacks until then."""
    with bundle.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    unpacked = folder / digest

    with locked(folder.with_name(f"{folder.name}.lock"), deadline):
        folder.mkdir(exist_ok=True)
        # Bundles that were brought before this one, and what a process that was killed has left.
        for outdated in folder.iterdir():
            if outdated != unpacked:
                shutil.rmtree(outdated)

        if not unpacked.exists():
            unfinished = folder / f"{digest}.unfinished"
            with tarfile.open(bundle) as packed:
                packed.extractall(unfinished, filter="data")
            unfinished.rename(unpacked)
            write_bytecode(unpacked / "site", deadline)

        if CHECKOUT_LAUNCHER.exists():
            # By renaming: a server that starts meanwhile reads a whole file.
            copy = shutil.copy(CHECKOUT_LAUNCHER, unpacked / f"{LAUNCHER}.new")
            os.replace(copy, unpacked / LAUNCHER)
    return unpacked


def write_bytecode(site: Path, deadline: float) -> None:
    """Compile the packages by all cores, until the deadline: the server's processes would compile one file
    after another."""
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)]
    subprocess.run(command, timeout=max(1.0, deadline - time.monotonic()))


@contextmanager
def locked(file: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of this file inside. TimeoutError: another process held it until the deadline."""
    with file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{file}: another process still unpacks SGLang's bundle") from None
                time.sleep(LOCK_POLL_S)
        yield


def has_saver(context: Context, command: list[str]) -> bool:
    """Return whether the server can give memory back; on a CPU tools/sglang_cpu/launch.py does that."""
    python = command[:3] or [sys.executable]
    script = "import importlib.util as u, sys; sys.exit(u.find_spec('torch_memory_saver') is None)"
    if context.small:
        return True
    seconds = max(1.0, min(IMPORT_S, context.left()))
    return subprocess.run([*python, "-c", script], timeout=seconds).returncode == 0
