"""Results that are kept between runs in the user's cache directory, each under a hash of the inputs."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncrl.layer_kernels import installed_kernels

T = TypeVar("T")

MAX_RESULTS = 256  # beyond this number the oldest results are removed


def read_result(key: str, result_type: type[T]) -> T | None:
    """Return the result that was kept under `key`; None without a result, or where reading fails."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(_cache_file(key).read_bytes(), type=result_type)
    return None


def keep_result(key: str, result: object) -> None:
    """Keep a result. Processes may race; a cache that cannot be written stays unchanged."""
    cache_file = _cache_file(key)
    encoded_result = msgspec.json.encode(result)
    with suppress(OSError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache_file.parent, delete=False) as temporary:
            try:
                temporary.write(encoded_result)
                temporary.flush()
                os.replace(temporary.name, cache_file)
            except BaseException:
                os.unlink(temporary.name)
                raise

        for oldest_file in sorted(cache_file.parent.iterdir(), key=os.path.getmtime)[:-MAX_RESULTS]:
            oldest_file.unlink()


@cache
def code_versions() -> tuple[str, ...]:
    """Return the versions of torch, transformers, kernels of layers, and the code here that computes with
    models. Imports none of them."""
    package_root = Path(__file__).parent
    files = [
        *sorted(package_root.glob("*.py")),
        *sorted(package_root.glob("trainer/*.py")),
        *sorted(package_root.glob("engines/**/*.py")),
    ]
    code_hash = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    return version("torch"), version("transformers"), *installed_kernels(), platform.machine(), code_hash


def _cache_file(key: str) -> Path:
    cache_directory = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache_directory / "asyncrl" / "models" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
