"""Starts the main program of a sandbox: a Python that knows nothing of the owner's environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from asyncrl.isolation.images import Image
from asyncrl.isolation.sandbox.frames import SandboxLimits
from asyncrl.isolation.sandbox.guard import START

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")),
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each would take 128 MiB of the address space that is counted as memory
}
"""All environment variables of the code: keys and tokens of the trainer's environment are left out."""
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # where an image has no PATH


Shown = str | tuple[str, str]
"""A path that the code may read, or such a path and the absolute one at which it is inside."""


def spawn(
    limits: SandboxLimits,
    image: Image | None,
    show: Iterable[Shown],
    *plan: object,
    streams: tuple[int, int],
) -> subprocess.Popen[bytes]:
    """`plan`: fields of confine.ConfinementPlan from `fallback` on. `streams`: the warden's connections."""
    system = () if image else (*SYSTEM, *SETTINGS, sys.base_prefix, sys.prefix)
    arguments = (
        tuple(limits),
        sysconfig.get_path("purelib"),
        _existing((*system, *show)),
        image.layers if image else (),
        {"PATH": IMAGE_PATH, **image.environment} if image else {},
        *plan,
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", START.format(root=str(ROOT), arguments=arguments)],
        stdin=streams[0],
        stdout=streams[1],
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )


def _existing(shown: Iterable[Shown]) -> list[tuple[str, str]]:
    """Keep what exists, links resolved beside their names; a directory before what is in it."""
    found: dict[str, str] = {}
    for one in shown:
        path, target = (one, "") if isinstance(one, str) else one
        if os.path.exists(path):
            inside = (target,) if target else (os.path.abspath(path), os.path.realpath(path))
            found |= {name: os.path.realpath(path) if target else name for name in inside}
    return sorted(((path, target) for target, path in found.items()), key=lambda pair: len(pair[1]))
