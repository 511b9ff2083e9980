"""Reads a model directory: whether a run can use it, its chat template, and its size."""

from __future__ import annotations

import json
import struct
from math import gcd, prod
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig, divisors, leaves
from asyncrl.errors import ConfigError
from asyncrl.weights.model_files import read_json, weight_files


def check_model(config: RunConfig) -> None:
    """config.json, weights, tokenizer and chat template are there; the context is long enough."""
    path = Path(config.model.path)
    settings = read_json(path / "config.json")
    files = weight_files(config.model.path)
    if not files:
        raise ConfigError(f"{path}: no model.safetensors; save the weights with save_pretrained(...)")
    if missing := sorted(file.name for file in files if not file.is_file()):
        raise ConfigError(
            f"{path}: {len(missing)} of {len(files)} files of weights are missing, first {missing[0]}; "
            "fetch or save the model anew"
        )
    _check_width(path, settings)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"{path}: no tokenizer.json; save a fast tokenizer with tokenizer.save_pretrained(...)"
        )
    if not chat_template(config):
        raise ConfigError(
            f"{path}: no chat template; set model.template to a Jinja file, or to chatml_tools where the "
            "tokenizer has <|im_start|> and <|im_end|>"
        )
    longest = settings.get("max_position_embeddings", settings.get("n_positions"))  # GPT-2
    if isinstance(longest, int) and longest < config.rollout.max_tokens:
        raise ConfigError(
            f"rollout.max_tokens ({config.rollout.max_tokens}) exceeds the model's context ({longest}); "
            "lower it"
        )
    heads = settings.get("num_attention_heads", settings.get("n_head"))  # GPT-2
    sharing = config.trainer.sequence_parallel
    if isinstance(heads, int) and heads % sharing:
        raise ConfigError(
            f"trainer.sequence_parallel ({sharing}) does not divide the model's {heads} attention heads; set "
            f"it to one of {divisors(gcd(heads, config.trainer.ranks))}, which divide these and trainer.ranks"
        )


def _check_width(path: Path, settings: dict[str, Any]) -> None:
    """The embedding in the weights is as wide as one of the sizes in config.json, whatever its name."""
    sizes = dict(leaves(settings))
    vocabulary = sizes.get("vocab_size", sizes.get("text_config.vocab_size"))
    matrices = (shape for shape in weight_shapes(str(path)).values() if len(shape) == 2)
    widths = {width for rows, width in matrices if rows == vocabulary}
    if widths and not any(value in widths for value in sizes.values() if isinstance(value, int)):
        hidden = sizes.get("hidden_size", sizes.get("text_config.hidden_size", "another size"))
        raise ConfigError(
            f"{path}: config.json says hidden_size {hidden}, and the embedding in the weights is "
            f"{vocabulary} × {min(widths)}: they are not of one model; fetch or save it anew"
        )


def chat_template(config: RunConfig) -> str:
    """The text of the chat template: `model.template`, or the model's own; '' if there is none."""
    if config.model.template:
        return config.model.template
    path = Path(config.model.path)
    file, inside = path / "chat_template.jinja", path / "tokenizer_config.json"
    if file.is_file():
        return file.read_text()
    return str((read_json(inside) if inside.is_file() else {}).get("chat_template") or "")


def parameter_count(path: str) -> int:
    """Count the parameters, where shared ones are one. 0 without files of weights."""
    return sum(map(prod, weight_shapes(path).values()))


def weight_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by its name, as the headers of the files of weights say."""
    headers = (_header(file) for file in weight_files(path))
    entries = (entry for header in headers for entry in header.items() if entry[0] != "__metadata__")
    return {name: tuple(tensor["shape"]) for name, tensor in entries}


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: {name: {dtype, shape, …}}. ConfigError if it has none."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > file.stat().st_size:
                raise ValueError("it is cut off, or no safetensors file")
            found: dict[str, Any] = json.loads(opened.read(length))
            return found
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{file}: not readable as safetensors ({error}); fetch or save it anew") from None
