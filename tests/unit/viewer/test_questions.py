"""Questions that people have about a run: from the first page a few clicks lead to the answer's words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.viewer.views import Views
from tests.fakes import planted
from tests.fakes.browser import Tab, look, needs_chromium, served
from tests.fakes.planted import ended

pytestmark = needs_chromium
MOST = 4  # clicks
PATIENCE = 30.0  # seconds for each
# What somebody sees: `place` is the link or button with a text, `seen` says whether words are on the screen.
EYES = r"""
const said = (one) => (one.innerText ?? "").replace(/\s+/g, " ").trim().toLowerCase();
const visible = (one) => {
  const { top, bottom, left, right, width } = one.getBoundingClientRect();
  const within = top < innerHeight && bottom > 0 && left < innerWidth && right > 0;
  return within && width > 0 && one.checkVisibility();
};
const place = (text) => [...document.querySelectorAll("a, button, summary")]
  .find((one) => visible(one) && said(one) === text.toLowerCase());
const seen = (words, within = document.body) => said(within).includes(words.toLowerCase()) && visible(within)
  && ([...within.children].some((one) => seen(words, one))
    || ![...within.children].some((one) => said(one).includes(words.toLowerCase())));
"""


class Question(NamedTuple):
    asks: str
    runs: Sequence[Callable[[Path], Path]]
    clicks: Sequence[str]
    answer: Sequence[str]


NAMES = ("first", "second")
REGRESSION = [partial(planted.regression, worse=False), partial(planted.regression, worse=True)]
QUESTIONS = (
    Question(
        "what do the episodes have in common that earn nothing?",
        [planted.broken_tool],
        ["Episodes", "search 24"],
        ["24 episodes", "score 0 24 first failed tool search 24", "connection refused"],
    ),
    Question(
        "what limits this run?",
        [planted.slow_reward],
        [],
        ["bottleneck: the reward function (12 s of the 15 s that an episode takes", "reward function 80%"],
    ),
    Question(
        "which tokens are masked, and why?",
        [planted.masked_tail],
        ["see the episodes →", "mask"],
        ["lag 5", "✂ 50%", "330 tokens masked", "too old", "Let us count"],
    ),
    Question(
        "is the second run worse, and what is different?",
        REGRESSION,
        ["Compare"],
        ["-0.5 (-0.708 to -0.292)", "0 better, 12 worse, 12 the same", "trainer.lr 1e-6 1e-4", "lost: 12"],
    ),
    Question(
        "what has the second run lost?",
        REGRESSION,
        ["second"],
        [
            "Held-out success 100% → 50% in 12 steps",
            "held-out success fell: from 100% at step 0 to 50% at step 12",
            "form 1 0.5",
            "trainer.lr 1e-4 1e-6",
        ],
    ),
    Question(
        "what has changed since it was resumed?",
        [planted.resumed],
        [],
        ["resumed with changed keys at step 7", "trainer.lr: 1e-06 → 1e-05"],
    ),
    Question(
        "which question does it answer no longer?",
        [planted.flipped],
        ["Compare"],
        [
            "first, step 6",
            "first, step 12",
            "lost: 1",
            "What is 3 plus 3? 6 score 1, sampled 103 score 0, sampled 6",
        ],
    ),
    Question(
        "what did the agent answer?",
        [planted.titled],
        ["Episodes"],
        ["The sum is in total.txt. · truth", "sub-agent title: A title for: add the numbers"],
    ),
    Question(
        "what was lost with the worker?",
        [planted.crashed],
        [],
        [
            "a process was lost: 3 attempts were lost with a worker and restarted, "
            "latest: worker 1 in step 5 (replaced by a new process): MemoryError"
        ],
    ),
    Question(
        "when was it lost?",
        [planted.crashed],
        ["see the timeline →"],
        ["1:40 worker 1 restarted"],
    ),
)


def test_each_answer_is_a_few_clicks_from_the_first_page(tmp_path: Path) -> None:
    async def test(tab: Tab) -> None:
        for number, question in enumerate(QUESTIONS):
            directory = tmp_path / str(number)
            saved = [save(directory / run) for run, save in zip(NAMES, question.runs, strict=False)]
            async with served(Views(saved, ended)) as url:
                await walk(tab, url, question)

    look(tmp_path / "profile", test)


async def walk(tab: Tab, url: str, question: Question) -> None:
    assert len(question.clicks) <= MOST
    await tab.open(url)
    for text in question.clicks:
        await sees(tab, question, f"place({json.dumps(text)})")
        await tab.run(f"(() => {{ {EYES} place({json.dumps(text)}).click() }})()")

    await sees(tab, question, " && ".join(f"seen({json.dumps(words)})" for words in question.answer))
    await tab.until(
        "document.body.dataset.ready === document.querySelector('main > section:not([hidden])').id"
    )


async def sees(tab: Tab, question: Question, condition: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            await tab.until(f"(() => {{ {EYES} return {condition} }})()")
    except TimeoutError:
        pytest.fail(f"{question.asks} {condition} is not on the screen")
