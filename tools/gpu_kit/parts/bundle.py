"""How parts start SGLang: with a Python that has it, or from the file that `make gpu-kit-sglang` writes."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

from parts.common import Context

PYTHON = "ASYNCRL_SGLANG_PYTHON"  # "PYTHON [LAUNCHER]", on a CPU with tools/sglang_cpu/launch.py
BUNDLE = "sglang.tar.xz"
NOT_THERE = f"not run: no package sglang here, no {PYTHON}, and no {BUNDLE} (make gpu-kit-sglang) on a GPU"


def server_command(context: Context) -> list[str] | None:
    """Return `engine.server_command`, or None where SGLang is nowhere. []: asyncrl's own, with this Python;
    else its first three words run another Python. Unpacks the bundle, if that is what there is."""
    if words := shlex.split(os.environ.get(PYTHON, "")):
        # Packages of this Python are not for that one.
        module = ["-m", "sglang.launch_server"] if len(words) == 1 else []
        return ["env", "--unset=PYTHONPATH", *words, *module]

    bundles = (context.kit / BUNDLE, context.kit.parent / BUNDLE)
    bundle = next((file for file in bundles if file.exists()), None)
    if bundle is not None and not context.small:
        folder = unpacked_bundle(bundle, context.work.parent / "sglang-bundle")
        return ["env", f"PYTHONPATH={folder / 'site'}", sys.executable, str(folder / "launch_gpu.py")]

    return None if importlib.util.find_spec("sglang") is None else []


def unpacked_bundle(bundle: Path, folder: Path) -> Path:
    """Unpack the bundle into the folder, once for all parts, and write its bytecode by all cores: its
    processes would compile it one file after another. Who comes meanwhile waits, until its own deadline."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            half = folder.with_name(f"{folder.name}.{os.getpid()}")
            with tarfile.open(bundle) as packed:
                packed.extractall(half, filter="data")
            half.rename(folder)
            subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", str(folder / "site")])
    return folder


def has_saver(context: Context, command: list[str]) -> bool:
    """Return whether the server can give memory back; on a CPU tools/sglang_cpu/launch.py does that."""
    python = command[:3] or [sys.executable]
    find = "import importlib.util as u, sys; sys.exit(u.find_spec('torch_memory_saver') is None)"
    return context.small or subprocess.run([*python, "-c", find]).returncode == 0
