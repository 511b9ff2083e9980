"""The files of weights in a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

INDEX = "model.safetensors.index.json"


def weight_files(path: str) -> list[Path]:
    """The files that transformers reads, not others beside them, such as a second copy in a publisher's own
    layout, or adapters. Empty where there is no safetensors; one that an index names may be missing."""
    directory = Path(path)
    if (directory / INDEX).is_file():
        return [directory / name for name in set(read_json(directory / INDEX).get("weight_map", {}).values())]
    single = directory / "model.safetensors"
    return [single] if single.is_file() else []


def weight_bytes(path: str) -> int:
    """Bytes of the files of weights; 0 without any."""
    return sum(file.stat().st_size for file in weight_files(path) if file.is_file())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. ConfigError, which says what to do, when there is none."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; a model directory needs it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}); write it anew") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is no JSON object; write it anew")
    return value
