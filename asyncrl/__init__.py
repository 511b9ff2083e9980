"""Fully asynchronous off-policy reinforcement learning for language-model agents."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# The public names, by the module that defines each: imported at their first use.
MODULE_OF_NAME = {
    "train": "asyncrl.api.calls",
    "sft": "asyncrl.api.calls",
    "start": "asyncrl.api.calls",
    "dry_run": "asyncrl.api.calls",
    "evaluate": "asyncrl.api.calls",
    "open_run": "asyncrl.api.calls",
    "Run": "asyncrl.api.run",
    "StartedRun": "asyncrl.api.run",
    "RunStatus": "asyncrl.api.run",
    "RunEpisode": "asyncrl.api.run",
    "RunTurn": "asyncrl.api.run",
    "Evaluation": "asyncrl.api.evaluation",
    "RunError": "asyncrl.api.launcher",
    "ConfigError": "asyncrl.errors",
    "tool": "asyncrl.tools",
    "Tool": "asyncrl.tools",
    "ToolError": "asyncrl.tools",
    "Rewarded": "asyncrl.tools",
    "ImageFile": "asyncrl.vision.content",
    "signature_of": "asyncrl.tools",
    "Environment": "asyncrl.environments",
    "RewardInput": "asyncrl.rewards",
    "Sample": "asyncrl.types",
    "Message": "asyncrl.types",
}
__all__ = ["__version__", *MODULE_OF_NAME]


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF_NAME:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    return getattr(importlib.import_module(MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
