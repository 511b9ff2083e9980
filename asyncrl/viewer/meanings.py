"""Gives each span of a timeline one of a few meanings, with a colour on the page, and a legible name."""

from __future__ import annotations

import re

MEANINGS = (
    *("generate", "tool or environment", "reward", "train"),
    *("weights", "wait for data", "wait for another process", "save, validate, other"),
)
GENERATE, TOOL, REWARD, TRAIN, WEIGHTS, DATA, PROCESS, OTHER = range(len(MEANINGS))

# Meaning and legible name by the beginning of a span's name; None: the span's own name.
SPANS: dict[str, tuple[int, str | None]] = {
    "decode": (GENERATE, "generate"),
    "tool ": (TOOL, None),
    "the environment": (TOOL, "environment"),
    "the agent program": (TOOL, "agent program"),
    "the results of the tools": (TOOL, "results of the tools"),
    "scorers.": (REWARD, None),
    "the reward function": (REWARD, "reward function"),
    "work": (TRAIN, "trainer"),
    "train": (TRAIN, "forward and backward"),
    "step": (TRAIN, "optimizer step"),
    "trying the largest micro-batch": (TRAIN, "trial of the largest micro-batch"),
    "snapshot": (WEIGHTS, "snapshot of the weights"),
    "write_weights": (WEIGHTS, "write weights"),
    "push": (WEIGHTS, "push weights"),
    "fetch_weights": (WEIGHTS, "fetch weights"),
    "load_weights": (WEIGHTS, "load weights"),
    "probe": (WEIGHTS, "check the weights"),
    "sleep": (WEIGHTS, "release weights and KV cache"),
    "wait_data": (DATA, "wait for data"),
    "read_images": (TRAIN, "read images"),
    "wait_devices": (DATA, "wait for data (offloaded)"),
    "wait_commit": (PROCESS, "wait for the commit"),
    "wait_welcome": (PROCESS, "wait for the coordinator"),
    "wait_stop": (PROCESS, "wait for the end"),
    "acks: turns that": (PROCESS, "acks: turns not durable yet"),
    "acks: the window": (PROCESS, "acks: the window is full"),
    "fresher weights": (PROCESS, "wait for fresher weights"),
    "images from the coordinator": (PROCESS, "wait for images"),
    "room on": (PROCESS, None),
    "the trainer's devices, to start its server": (PROCESS, "wait for its shift"),
    "rollout-# is silent": (PROCESS, "a worker is silent"),
    "rollout-# is starting": (PROCESS, "a worker is starting"),
    "its server to become": (PROCESS, "its server is not ready"),
    "commit": (OTHER, "commit"),
    "checkpoint": (OTHER, "checkpoint"),
    "a checkpoint": (OTHER, "checkpoint before the end"),
    "validation": (OTHER, "validation"),
    "the validation of": (OTHER, "validation episodes"),
    "rest": (OTHER, "offload to main memory"),
    "wake": (OTHER, "reload from main memory"),
    "others": (OTHER, None),
}
_span_pattern = re.compile("|".join(map(re.escape, sorted(SPANS, key=len, reverse=True))))


def meaning_of(name: str) -> tuple[int, str]:
    """Return the number of a span's meaning and a legible name. A name in no table is a wait for another
    process: waits are named after the awaited thing."""
    match = _span_pattern.match(name)
    if not match:
        return PROCESS, name

    meaning_number, legible_name = SPANS[match.group()]
    if legible_name is None:
        return meaning_number, name
    if name.endswith(" (validation)"):
        legible_name += " (validation)"
    return meaning_number, legible_name
