"""An advantage of another episode's reward: the control that must not learn, whatever the rewards are."""

from __future__ import annotations

import statistics

from asyncrl.algorithms.advantages import Credit, CreditInput, advantage


@advantage("of_a_sibling")
def of_a_sibling(given: CreditInput) -> Credit:
    """R of the next member − mean of all the others, the episode's own R left out.

    Members are numbered as they are issued, not as they end, and their rewards are exchangeable: the
    advantage is as large as in the real run, its expectation 0, whatever the episode itself did. (A reward
    drawn from those of earlier episodes is not: episodes with tool calls end later than guesses.)
    """
    others = [member.reward for member in given.others]
    if not others:
        return 0.0
    return others[given.place % len(others)] - statistics.fmean(others)
