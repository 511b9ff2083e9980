"""Checks before a start how a run will compute its model: how rows can be laid out, and whether the embedded
engine serves the model.

    launcher ──purpose, model──► child: check a small copy (shrunk.py) ──CopyFinding──► launcher

The checks are those of the trainer and of the engine at their start. Here a child runs them, which can be
ended when it takes long. Findings are kept in the user's cache, where a start reads them without a child.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.errors import ConfigError, one_line
from asyncrl.isolation.calls import CallTimeout
from asyncrl.isolation.child import Child, ChildError, Service
from asyncrl.runtime.process import quick_imports
from asyncrl.user_cache import code_versions, keep_result, read_result
from asyncrl.weights.model_files import read_json

CHECK_SECONDS = 20.0  # seconds in which a child must have checked a copy; later the start checks by itself
MAX_ANSWER_BYTES = 1 << 20  # bytes of a finding
NOT_YET = "not checked yet (the check runs when the run starts)"
NO_COPY = "not checked, because no small copy can be built; the loaded model is checked when the run starts"

Purpose = Literal["engine", "trainer"]


class SlotMemory(msgspec.Struct, frozen=True):
    """What a slot of the embedded engine holds: for each token so many numbers of keys and values, in the
    engine's type, and states of layers, with their snapshots."""

    kv_numbers: int
    state_bytes: int


class CopyFinding(msgspec.Struct, frozen=True):
    """The result of one check of a small copy. `problems`: the problem of each way to compute the model, ''
    for none: by layout (`check_gradients`), or of the `engine`; None: unknown, and `reason` says why.
    `slot`: of the whole model, where the engine serves it and its layers can be laid out without memory."""

    problems: dict[str, str] | None = None
    reason: str = ""
    slot: SlotMemory | None = None


def architecture_name(model_path: str) -> str:
    """Return the class that config.json names, or the type of the model."""
    settings = read_json(Path(model_path) / "config.json")
    architectures = settings.get("architectures") or [settings.get("model_type", "the model")]
    return str(architectures[0])


def remembered_findings(model_path: str, purposes: Sequence[Purpose]) -> dict[Purpose, CopyFinding]:
    """Return the findings that are in the user's cache."""
    findings: dict[Purpose, CopyFinding] = {}
    for purpose in purposes:
        if (known_finding := read_result(_cache_key(model_path, purpose), CopyFinding)) is not None:
            findings[purpose] = known_finding
    return findings


def find_on_copy(
    model_path: str, purposes: Sequence[Purpose], seconds: float = CHECK_SECONDS
) -> dict[Purpose, CopyFinding]:
    """Return a finding for each purpose: from the user's cache, or from a child that is ended after
    `seconds`. Must be called outside of event loops."""
    findings = remembered_findings(model_path, purposes)
    if missing_purposes := [purpose for purpose in purposes if purpose not in findings]:
        findings |= asyncio.run(_find_in_child(model_path, missing_purposes, seconds))
    return findings


async def _find_in_child(
    model_path: str, purposes: Sequence[Purpose], seconds: float
) -> dict[Purpose, CopyFinding]:
    findings: dict[Purpose, CopyFinding] = {}
    reason = NOT_YET
    deadline = time.monotonic() + seconds
    child = await Child.start(COPY_CHECKS, "the process that checks a small copy", MAX_ANSWER_BYTES)

    try:
        await child.open(model_path, seconds)
        for purpose in purposes:
            findings[purpose] = await child.ask(purpose, max(0.0, deadline - time.monotonic()))
            if findings[purpose].problems is not None:  # else the machine may be why
                keep_result(_cache_key(model_path, purpose), findings[purpose])
    except CallTimeout:
        pass
    except ChildError as error:
        reason = f"not checked ({error}); the check runs when the run starts"
    finally:
        child.kill()
        await child.wait_for_exit()

    return dict.fromkeys(purposes, CopyFinding(reason=reason)) | findings


def _cache_key(model_path: str, purpose: Purpose) -> str:
    settings_text = (Path(model_path) / "config.json").read_text()
    return json.dumps(["before the start", purpose, settings_text, *code_versions()])


# -- in the child ------------------------------------------------------------------------------------


def _open_checks(model_path: str) -> Callable[[str], CopyFinding]:
    logging.disable(logging.ERROR)  # the launcher prints the findings
    with quick_imports():
        from transformers import AutoConfig

        from asyncrl.engines.torch.check import check_served, slot_sizes
        from asyncrl.trainer.model import architecture_problems

    def check_copy(purpose: str) -> CopyFinding:
        slot: SlotMemory | None = None
        reason = ""
        config = AutoConfig.from_pretrained(model_path)
        if purpose == "trainer":
            problems = architecture_problems(config)
        else:
            try:
                problems = {"engine": ""} if check_served(model_path) else None
                try:
                    slot = SlotMemory(*slot_sizes(config))
                except Exception as error:
                    reason = f"cannot estimate the memory for the embedded engine's slots: {one_line(error)}"
            except ConfigError as error:
                problems = {"engine": str(error)}
        return CopyFinding(problems, reason=reason if problems is not None else NO_COPY, slot=slot)

    return check_copy


COPY_CHECKS = Service("asyncrl.launch.architecture:COPY_CHECKS", _open_checks, str, str, CopyFinding)
