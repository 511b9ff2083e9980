from __future__ import annotations

from collections import Counter

import pytest

from asyncrl.observe.answers import EMPTY_ANSWERS, REFUSALS, SAME_ANSWERS, answer_metrics


def metrics_of(*episodes: tuple[int, str]) -> dict[str, float]:
    return answer_metrics(Counter(episodes))


def test_the_same_answers_to_different_samples_are_counted_as_pairs() -> None:
    episodes = [(0, "7"), (0, "7"), (1, "7"), (1, ""), (2, "8"), (2, "")]
    pairs = [
        answer == other_answer != ""
        for position, (sample, answer) in enumerate(episodes)
        for other_sample, other_answer in episodes[:position]
        if sample != other_sample
    ]
    assert metrics_of(*episodes)[SAME_ANSWERS] == pytest.approx(sum(pairs) / len(pairs)) == 2 / 12
    assert metrics_of((0, "7"), (1, "7"), (2, "7"))[SAME_ANSWERS] == 1.0
    assert metrics_of((0, "7"), (0, "7"), (1, "8"), (1, "8"))[SAME_ANSWERS] == 0.0
    assert SAME_ANSWERS not in metrics_of((0, "7"), (0, "7"))


@pytest.mark.parametrize(
    ("answer", "refuses"),
    [
        ("I can't help with that.", True),
        ("i CANNOT answer", True),
        ("I’m sorry, but", True),
        ("As an AI language model", True),
        ("I can do this: 7", False),
        ("The answer is 7. I can't explain why.", False),
        ("", False),
    ],
)
def test_refusals_are_read_from_the_beginning(answer: str, refuses: bool) -> None:
    metrics = metrics_of((0, answer), (1, "7"))
    assert metrics[REFUSALS] == 0.5 * refuses
    assert metrics[EMPTY_ANSWERS] == 0.5 * (answer == "")


def test_without_episodes_there_are_no_metrics() -> None:
    assert answer_metrics({}) == {}
