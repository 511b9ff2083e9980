"""Results that are kept between runs in the user's cache directory, each under a hash of what decides it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

MAX_RESULTS = 256  # the oldest are removed beyond that


def read_result(key: str, kind: type[T]) -> T | None:
    """Return the result that was kept under `key`; None without one, or where it cannot be read."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(_file(key).read_bytes(), type=kind)
    return None


def keep_result(key: str, result: object) -> None:
    """Keep a result. Processes may race; a cache that cannot be written is left as it is."""
    file = _file(key)
    content = msgspec.json.encode(result)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            try:
                temporary.write(content)
                temporary.flush()
                os.replace(temporary.name, file)
            except BaseException:
                os.unlink(temporary.name)
                raise

        for old in sorted(file.parent.iterdir(), key=os.path.getmtime)[:-MAX_RESULTS]:
            old.unlink()


def _file(key: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "asyncrl" / "models" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
