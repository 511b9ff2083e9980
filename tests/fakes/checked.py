"""The inputs of a good run, for a case to spoil, and what the checks before a start say of them.

A spoil is keys, or a function of the inputs that may return some.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.launch.checks import ALL_CHECKS, collect_notes
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.notes import Note

Keys = Mapping[str, Any]  # dotted
Spoil = Keys | Callable[["Given"], Any]


class Given:
    """A tiny chat model (a byte is a token), four short prompts, and the keys of a run with them."""

    def __init__(self, folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.patch = patch
        self.train = folder / "train.jsonl"
        self.runs = folder / "runs"

        shutil.copytree(model, self.model)
        self.write(questions(4))

        self.keys: dict[str, Any] = {
            "name": "x",
            "run_dir": str(self.runs),
            "model.path": str(self.model),
            "model.dtype": "float32",
            "data.train": str(self.train),
            "buffer.groups_per_batch": 4,
            "buffer.episodes_per_group": 4,
            "rollout.slots": 16,
            "rollout.max_tokens": 300,
            "rollout.max_new_tokens": 16,
            "trainer.lr": 1e-3,
        }

    def write(self, rows: Iterable[Any], path: Path | None = None) -> str:
        (path or self.train).write_text("\n".join(map(json.dumps, rows)))
        return str(path or self.train)

    def edit(self, **values: Any) -> None:
        """Change the model's config.json. None: remove a key."""
        path = self.model / "config.json"
        changed = json.loads(path.read_text()) | values
        path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))

    def program(self, name: str, script: str) -> str:
        """Write a program that comes first on PATH."""
        self.patch.setenv("PATH", f"{self.folder}:/usr/bin:/bin")
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    def spoil(self, spoils: Iterable[Spoil]) -> None:
        for spoil in spoils:
            self.keys |= (spoil if isinstance(spoil, Mapping) else spoil(self)) or {}

    @property
    def overrides(self) -> list[str]:
        """The keys on the command line."""
        return [f"{key}={value}" for key, value in self.keys.items()]

    def config(self, **keys: Any) -> RunConfig:
        """Return the configuration of the keys, and of sections beside the keys."""
        tree: dict[str, Any] = {}
        for key, value in self.keys.items():
            *parents, last = key.split(".")
            subtree = tree
            for name in parents:
                subtree = subtree.setdefault(name, {})
            subtree[last] = value

        return parse(tree | keys)

    def notes(self, *names: str) -> list[Note]:
        """Return the notes of these checks, which run after the checks they need."""
        needed = set(names)
        for check in reversed(ALL_CHECKS):
            needed |= set(check.required_checks) if check.name in needed else set()
        return list(
            collect_notes([check for check in ALL_CHECKS if check.name in needed], Inputs(self.config()))
        )


def assert_found(setup: Given, expected: str, spoils: Spoil | list[Spoil], text: str = "") -> None:
    """Assert that a check's note has the level and the text of `expected`.

    Beside this note, only notes of level `ok` may exist. `expected` may name further checks to run before.
    """
    level, _, names = expected.partition(": ")
    setup.spoil(spoils if isinstance(spoils, list) else [spoils])
    notes = setup.notes(*names.split(", "))
    check_notes = [note for note in notes if note.subject == names.split(", ")[-1]]
    texts = [note.text for note in check_notes if note.level == level]
    assert {note.level for note in check_notes} <= {"ok", level}, notes
    assert level == "ok" or len(texts) == 1, notes
    assert not text or re.search(text, "\n".join(texts)), notes


def questions(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{number} + 1?", "ground_truth": 1} | more for number in range(count)]


def rows(count: int, **more: Any) -> Spoil:
    """Other rows of data."""
    return lambda setup: {"data.train": setup.write(questions(count, **more))}


def patched(target: str, value: Any) -> Spoil:
    return lambda setup: setup.patch.setattr(target, value)


def write_header(file: Path, **shapes: list[int]) -> None:
    """A safetensors file of bfloat16 tensors, with a hole in place of the numbers."""
    tensors: dict[str, Any] = {}
    size = 0  # bytes of the tensors so far
    for name, shape in shapes.items():
        end = size + 2 * prod(shape)
        tensors[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, end]}
        size = end

    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + size)


def with_an_earlier_run(setup: Given) -> Keys:
    """Write a run with the keys so far, and return the keys that resume the run."""
    (setup.runs / "x").mkdir(parents=True)
    (setup.runs / "x" / "config.yaml").write_bytes(msgspec.yaml.encode(setup.config()))
    return {"resume": "auto"}


def gpus(count: int, apart: Iterable[tuple[int, int]] = ()) -> Spoil:
    """Let torch see so many GPUs. GPUs `apart` cannot read each other's memory."""
    strangers = {frozenset(pair) for pair in apart}
    properties = SimpleNamespace(name="NVIDIA L4", total_memory=24 << 30)

    def spoil(setup: Given) -> None:
        for name, value in {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "get_device_properties": lambda _: properties,
            "can_device_access_peer": lambda *pair: frozenset(pair) not in strangers,
            "is_bf16_supported": lambda **_: True,
            "nccl.version": lambda: (2, 27, 5),
        }.items():
            setup.patch.setattr(f"torch.cuda.{name}", value)
        setup.patch.setattr("torch.distributed.is_nccl_available", lambda: True)

    return spoil


def sglang_in(setup: Given, version: str, **modules: str) -> list[str]:
    """Return the command of servers in a Python with an SGLang, a torch that sees a GPU, and these
    modules."""
    info = setup.folder / "site" / f"sglang-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    sees = "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    for name, text in {"torch": sees, **modules}.items():
        (setup.folder / "site" / f"{name}.py").write_text(text)
    program = setup.program("python", f'PYTHONPATH={setup.folder}/site exec {sys.executable} "$@"')
    return [program, "-m", "sglang.launch_server"]
