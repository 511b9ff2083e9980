"""What `make tokenizers`, `make smollm2` and `make harnesses` fetched, for tests: skipped without it, or
failing where it is required."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
FETCHED = Path(os.environ.get("ASYNCRL_TOKENIZERS") or ROOT / ".tokenizers")
HARNESSES = ROOT / ".harnesses"
IN_THE_GATE = ("claude_code", "codex")  # coding agents that `make harnesses` fetches; others: harnesses-all
SMOLLM2 = ROOT / ".models" / "smollm2-135m-instruct"


def missing(subject: str, target: str = "tokenizers") -> NoReturn:
    """Skip the test. With ASYNCRL_REQUIRE_TOKENIZERS, or the variable of another target, fail."""
    why = f"there is no {subject} here; `make {target}` fetches it"
    if os.environ.get(f"ASYNCRL_REQUIRE_{target.upper().replace('-', '_')}"):
        pytest.fail(why)
    pytest.skip(why)


def harness(path: str) -> Path:
    """A file of a coding agent."""
    if not (HARNESSES / path).exists():
        missing(path, "harnesses" if any(name in path for name in IN_THE_GATE) else "harnesses-all")
    return HARNESSES / path


def first_requests(name: str) -> list[Any]:
    """Return the paths and the bodies, as text, of a coding agent's first requests."""
    file = harness(f"requests/{name}.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def needs_smollm2() -> None:
    """For a test with the pretrained model of `experiment=smollm2`."""
    if not (SMOLLM2 / "model.safetensors").exists():
        missing(SMOLLM2.name, "smollm2")


@functools.cache
def fetched_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Read once, which takes most of a test's time: a second for 200,000 tokens."""
    folder = FETCHED / name
    if not folder.is_dir():
        missing(name)
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    if (template := folder / "chat_template.jinja").exists():
        settings["chat_template"] = template.read_text()
    special_settings = {key: settings.get(key) for key in ("bos_token", "eos_token", "chat_template")}
    plain = {
        key: value["content"] if isinstance(value, dict) else value for key, value in special_settings.items()
    }
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **plain)
