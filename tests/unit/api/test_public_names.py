"""`import asyncrl`: what it gives, and that it costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import packages_distributions

import asyncrl

PUBLIC = {
    *("train", "sft", "start", "dry_run", "evaluate", "open_run"),
    *("Run", "StartedRun", "RunStatus", "RunEpisode", "RunTurn", "Evaluation", "RunError", "ConfigError"),
    *("tool", "Tool", "ToolError", "Rewarded", "signature_of", "Environment", "RewardInput"),
    *("Sample", "Message", "ImageFile", "__version__"),
}


def test_the_public_names_are_these() -> None:
    """A name that goes or changes is a breaking change: CHANGELOG says so."""
    assert set(asyncrl.__all__) == PUBLIC
    assert set(dir(asyncrl)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(asyncrl, name) is not None
    assert not hasattr(asyncrl, "no_such_name")


def modules_after(code: str) -> set[str]:
    """Return the names of modules that a new interpreter has after this code."""
    command = [sys.executable, "-c", f"import json, sys\n{code}\nprint(json.dumps([*sys.modules]))"]
    shell = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(shell.stdout))


def test_the_import_loads_no_library() -> None:
    modules = {name.partition(".")[0] for name in modules_after("import asyncrl")}
    assert "asyncrl" in modules
    libraries = {name for name in packages_distributions() if not name.startswith("_")} - {"asyncrl"}
    at_start = {name.partition(".")[0] for name in modules_after("")}
    assert not (modules - at_start) & libraries


def test_the_calls_load_no_heavy_library() -> None:
    """A notebook that starts a run keeps its memory: torch and transformers are for the run's processes."""
    modules = modules_after("import asyncrl; asyncrl.train, asyncrl.Run, asyncrl.tool, asyncrl.Sample")
    assert "asyncrl.api.calls" in modules
    assert not modules & {"torch", "transformers", "hydra", "ray", "zmq"}
