"""Shows before the start how rewards read ground truths."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from asyncrl.rewards.answers import as_python_writes_bytes, is_number
from asyncrl.rewards.loading import Reward
from asyncrl.types import Sample

EXAMINED_SAMPLES = 64  # Samples of a split whose ground truths are examined.
SHOWN_CHARACTERS = 50  # Characters shown of a ground truth, and of the text that is compared.
TESTS_REWARD = "tests"  # Reward that judges tasks, whose ground truths are no answers.
KIND_NAMES = {
    str: "text",
    bool: "Booleans",
    int: "numbers",
    float: "numbers",
    list: "lists",
    dict: "objects",
}


def describe_truths(rewards: Iterable[Reward], samples: Sequence[Sample]) -> tuple[list[str], list[str]]:
    """Describe how rewards read ground truths: a line for each reward and type of the first ground truths,
    with the text that the reward compares; and warnings about ground truths that no answer can match."""
    lines = list[str]()
    warnings = list[str]()
    truths = [sample.ground_truth for sample in islice(samples, EXAMINED_SAMPLES) if not sample.demonstration]
    truths_by_kind = defaultdict[str, list[Any]](list)

    for truth in truths:
        if truth is not None:
            truths_by_kind[KIND_NAMES[type(truth)]].append(truth)

    for reward in rewards:
        if reward.source.spec == TESTS_REWARD or not (reward.needs_truth or ":" in reward.source.spec):
            continue
        reward_key = f"rollout.reward {reward.name}"
        for kind, kind_truths in truths_by_kind.items():
            texts = compared_texts(reward, kind_truths[0])
            as_text = f", compared as {texts[0][:SHOWN_CHARACTERS]!r}" if texts and reward.compared else ""
            count_text = f"{len(kind_truths)} of the first {len(truths)}"
            lines.append(
                f"{reward_key}: ground truths contain {kind} ({count_text}), such as "
                f"{_shorten(kind_truths[0])}{as_text}"
            )

        if unmatched_truths := [truth for truth in truths if compared_texts(reward, truth) == []]:
            count_text = f"{len(unmatched_truths)} of the first {len(truths)} ground truths"
            fault = f"{reward_key}: no answer can match {count_text}"
            advice = "write these ground truths as text, numbers, or lists of them"
            if reward.numbers and not as_python_writes_bytes(unmatched_truths[0]):
                fault = f"{reward_key} compares numbers, but {count_text} cannot be read as numbers"
                advice = "set another rollout.reward, e.g. exact"
            warnings.append(
                f"{fault}, such as {_shorten(unmatched_truths[0])}, so answers to these samples score "
                f"nothing; {advice}"
            )
    return lines, warnings


def compared_texts(reward: Reward, truth: Any) -> list[str] | None:
    """Return the texts that a reward accepts for a ground truth: none if no answer can match, None if the
    reward compares no texts or if the texts are unknown."""
    if reward.compared:
        return reward.compared(truth)
    if reward.numbers:
        return [str(truth)] if is_number(truth) else []
    return [] if as_python_writes_bytes(truth) else None


def _shorten(truth: Any) -> str:
    return json.dumps(truth, ensure_ascii=False)[:SHOWN_CHARACTERS]
