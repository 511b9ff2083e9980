"""Imports of large libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


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
        module.__spec__, module.__file__ = spec, spec.origin


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
