"""Sets up a process of a run: large imports, the signals that end it, the memory that it may use."""

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
    """Stands for a module until something of it is used. `import NAME` costs nothing before; `import NAME.x`
    and `from NAME import x` use it."""

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


def defer(name: str) -> None:
    """Let this process import a large module when something of it is used, and not before."""
    if name not in sys.modules and (spec := find_spec(name)):
        module = sys.modules[name] = DeferredModule(name)
        module.__spec__ = spec
        module.__file__ = spec.origin


@contextmanager
def quick_imports() -> Iterator[None]:
    """No garbage collection meanwhile: it finds nothing, and takes a fifth of the time of importing torch and
    transformers. What is there afterwards is not scanned again, neither in mid-run nor when Python ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed


def ignore_endings() -> None:
    """In a process of a role, which the launcher stops in order: they would end it without the last
    checkpoint. A handler, as programs that it starts would inherit SIG_IGN."""
    for number in ENDING:
        signal.signal(number, lambda *_: None)


def at_ending(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call this in the loop at such a signal, where the loop is of the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            loop.add_signal_handler(number, call)


class MainMemory(NamedTuple):
    """Bytes."""

    total: int
    available: int


class CgroupFiles(NamedTuple):
    """Files in which a version of cgroups says what a group may use and uses. `cache`: what of it the kernel
    frees on demand, a line of memory.stat."""

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
    """Now. `root`: of the file system."""
    machine = psutil.virtual_memory()
    total = int(machine.total)
    available = int(machine.available)
    for limit, used in _memory_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return MainMemory(total, available)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields what each group of this process, and each around it, may use and uses. Inside a container a path
    may be that outside of it: the container's own group is the mount then."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if files := CGROUP_VERSIONS.get(controllers):
                inner_path = Path(path.lstrip("/"))
                for group in (inner_path, *inner_path.parents):
                    with suppress(OSError, ValueError, KeyError):  # no such group, no limit
                        group_directory = root / files.mount / group
                        limit, used = (
                            int((group_directory / name).read_text()) for name in (files.limit, files.used)
                        )
                        memory_stat = dict(
                            line.split()
                            for line in (group_directory / "memory.stat").read_text().splitlines()
                        )
                        yield limit, used - int(memory_stat[files.cache])
