"""Sets up a process of a run: large imports, the signals that end the process, the memory for the process."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psutil


class DeferredModule(ModuleType):
    """Stands for a module until a name of the module is used. `import NAME` costs nothing before; `import
    NAME.x` and `from NAME import x` use the module."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute not in ("__path__", "__version__"):
            raise AttributeError(attribute)  # code that looks through all modules asks for these

        name = self.__name__
        if sys.modules.get(name) is self:
            del sys.modules[name]
            with quick_imports():
                import_module(name)

        return getattr(sys.modules[name], attribute)


def is_imported(name: str) -> bool:
    """True once the module itself was imported."""
    return name in sys.modules and not isinstance(sys.modules[name], DeferredModule)


def defer_import(name: str) -> None:
    """Let this process import a large module only when a name of the module is used."""
    if name not in sys.modules and (spec := find_spec(name)):
        module = sys.modules[name] = DeferredModule(name)
        module.__spec__ = spec
        module.__file__ = spec.origin


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, which finds nothing and takes a fifth of the time of importing torch
    and transformers. Objects that exist afterwards are never scanned again, neither in mid-run nor when
    Python ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed


def ignore_end_signals() -> None:
    """Ignore the signals that end a run, in a process of a role: the launcher stops roles in order, and a
    signal would end the process without the last checkpoint. By a handler, as started programs would inherit
    SIG_IGN."""
    for number in END_SIGNALS:
        signal.signal(number, lambda *_: None)


def on_end_signal(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Have the loop call `call` at a signal that ends the run, if the loop belongs to the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in END_SIGNALS:
            loop.add_signal_handler(number, call)


class MainMemory(NamedTuple):
    """Main memory, in bytes."""

    total: int
    available: int


class CgroupFiles(NamedTuple):
    """Files with the memory limit and the used memory of a group, in one version of cgroups. `cache`: the
    line of memory.stat for the used memory that the kernel frees on demand."""

    mount: str
    limit: str
    used: str
    cache: str


CGROUP_VERSIONS = {
    "": CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": CgroupFiles(
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def main_memory(root: Path = Path("/")) -> MainMemory:
    """Return this machine's memory now, within the limits of this process's groups. `root`: of the file
    system."""
    machine = psutil.virtual_memory()
    total = int(machine.total)
    available = int(machine.available)
    for limit, used in _memory_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return MainMemory(total, available)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used bytes) of each group of this process, and of each enclosing group. Inside a
    container a path may be the path outside of the container: then the container's own group is the mount."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if files := CGROUP_VERSIONS.get(controllers):
                inner_path = Path(path.lstrip("/"))
                for group in (inner_path, *inner_path.parents):
                    with suppress(OSError, ValueError, KeyError):  # no such group, no limit
                        group_directory = root / files.mount / group
                        limit = int((group_directory / files.limit).read_text())
                        used = int((group_directory / files.used).read_text())
                        memory_stat = dict(
                            line.split()
                            for line in (group_directory / "memory.stat").read_text().splitlines()
                        )
                        yield limit, used - int(memory_stat[files.cache])
