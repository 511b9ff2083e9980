"""Describes the machine of a run's launcher in words, for readers of the run's report."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from asyncrl.errors import UNDECODABLE

CPUINFO = Path("/proc/cpuinfo")
LIST_GPUS = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
LIST_SECONDS = 10.0
VERSION_PATTERN = re.compile(r"Driver Version: *(\S+).*CUDA (?:UMD )?Version: *(\d+\.\d+)")
PACKAGES = ("torch", "transformers", "sglang")


def record_machine(run_dir: Path, versions: Mapping[str, str]) -> None:
    """Write the machine's description, with further versions, to the run directory, in place of an earlier
    launch's: CPU, memory, GPUs, system and versions of packages, which are not imported. A full disk is no
    error."""
    cpu_name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = CPUINFO.read_text().splitlines()
        model_names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        cpu_name = next(model_names, cpu_name)
    cores = f"{psutil.cpu_count(logical=False) or '?'} cores, {psutil.cpu_count()} threads"

    facts = {
        "CPU": f"{cpu_name}, {cores}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": ", ".join(f"{count} × {name}" for name, count in Counter(list_gpus()).items())
        or "none found",
        "system": platform.platform(),
        "Python": platform.python_version(),
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[package] = version(package)

    with suppress(OSError):
        (run_dir / "machine.json").write_bytes(msgspec.json.encode({**facts, **versions}))


def recorded_machine(run_dir: Path) -> Mapping[str, str] | None:
    """Read the record of a run's machine; None if there is no readable record."""
    try:
        return msgspec.json.decode((run_dir / "machine.json").read_bytes(), type=dict[str, str])
    except (OSError, *UNDECODABLE):
        return None


def list_gpus() -> list[str]:
    """List the name and memory of each GPU by nvidia-smi, as torch would take memory on each GPU."""
    if not shutil.which(LIST_GPUS[0]):
        return []
    try:
        listed = subprocess.run(LIST_GPUS, capture_output=True, text=True, timeout=LIST_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ["unknown GPU (nvidia-smi failed)"]
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def gpu_driver() -> tuple[str, str]:
    """Return the versions of the driver and of the newest CUDA that it runs; '' if nvidia-smi names none."""
    with suppress(OSError, subprocess.SubprocessError):
        completed = subprocess.run(LIST_GPUS[:1], capture_output=True, text=True, timeout=LIST_SECONDS)
        if versions := VERSION_PATTERN.search(completed.stdout):
            return versions[1], versions[2]
    return "", ""
