"""Computes metrics of the answers of training episodes, which show a policy that games its reward. Pure.

An answer is the text that the reward function reports as `pred`, or else the model's last words, shortened
for lists of episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

REFUSAL_OPENINGS = (  # beginnings of answers that refuse the task, in any case and with either apostrophe
    "I can't",
    "I cannot",
    "I can not",
    "I won't",
    "I'm unable",
    "I am unable",
    "I'm sorry",
    "I am sorry",
    "Sorry",
    "As an AI",
)
EMPTY_ANSWERS = "rollout/answer/empty_frac"
REFUSALS = "rollout/answer/refusal_frac"
SAME_ANSWERS = "rollout/answer/same_frac"

_lowered_openings = tuple(opening.lower() for opening in REFUSAL_OPENINGS)


def is_refusal(answer: str) -> bool:
    return answer.replace("’", "'").lower().startswith(_lowered_openings)


def answer_metrics(answer_counts: Mapping[tuple[int, str], int]) -> dict[str, float]:
    """Compute the metrics of answers from the number of episodes by sample and answer.

    SAME_ANSWERS is the share of the pairs of episodes with different samples that have the same answer, not
    counting empty answers: (Σ_a n_a² − Σ_sa n_sa²) / (N² − Σ_s n_s²) for n_sa episodes of sample s with
    answer a. Episodes of one sample are not compared, because a solved sample has one right answer. Without
    two samples there is no such metric.

    Example: {(0, "7"): 2, (1, "7"): 1, (1, ""): 1} has 4 pairs between the samples, 2 of them with the same
    answer: 0.5.
    """
    episodes = 0
    empty_answers = 0
    refusals = 0
    by_answer = Counter[str]()
    by_sample = Counter[int]()
    same_within_samples = 0

    for (sample, answer), count in answer_counts.items():
        episodes += count
        by_sample[sample] += count
        if not answer:
            empty_answers += count
            continue

        by_answer[answer] += count
        same_within_samples += count * count
        if is_refusal(answer):
            refusals += count

    if not episodes:
        return {}

    metrics = {EMPTY_ANSWERS: empty_answers / episodes, REFUSALS: refusals / episodes}
    pairs = episodes * episodes - sum(count * count for count in by_sample.values())
    if pairs:
        same_pairs = sum(count * count for count in by_answer.values()) - same_within_samples
        metrics[SAME_ANSWERS] = same_pairs / pairs

    return metrics
