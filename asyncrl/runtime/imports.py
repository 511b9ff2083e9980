"""Imports of large libraries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
