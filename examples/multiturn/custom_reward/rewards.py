"""Two rewards: one with verl's signature, which gets the answer, and a typed one, which gets the episode."""

import re

from asyncrl.rewards import RewardInput, runs

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, close: float = 0.0):
    """1 for the right number, `close` for a number that is off by one. The reward runs in its own process."""
    found = NUMBER.findall(solution_str)
    off = abs(float(found[-1]) - float(ground_truth)) if found else None
    return {"score": 1.0 if off == 0 else close if off == 1 else 0.0, "components": {"answered": bool(found)}}


@runs("loop")  # quick enough for the event loop of the worker
def diligence(given: RewardInput) -> dict:
    """A tenth for each turn that calls the tool and gets a reply without an error, as that turn's reward."""
    spoken = [k for k, message in enumerate(given.messages) if message.role == "assistant"]
    earned = [0.0] * given.turns
    for turn, (start, end) in enumerate(zip(spoken, [*spoken[1:], None], strict=True)):
        replies = [message for message in given.messages[start:end] if message.role == "tool"]
        if replies and not any(reply.content.startswith("error") for reply in replies):
            earned[turn] = 0.1
    return {"score": 0.0, "turns": earned, "components": {"turns": float(given.turns)}}
