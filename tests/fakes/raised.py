"""What users' code raises that is no Exception."""

from __future__ import annotations

import asyncio

import pytest


class PanicException(BaseException):
    """Derives from BaseException, as pyo3's of this name, which Rust extensions raise when they panic."""


BASE_EXCEPTIONS: tuple[type[BaseException], ...] = (
    PanicException,
    pytest.skip.Exception,
    pytest.fail.Exception,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
)
