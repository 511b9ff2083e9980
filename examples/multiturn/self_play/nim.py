"""Nim, played by the policy against itself: the player who takes the last of the stones wins.

Both players are the model in training. Each has its own conversation, and is named in its requests, so that
it gets its own reward: 1 or -1. A reply that cannot be read as 1, 2 or 3 stones loses the game.
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

from asyncrl.gateway import Endpoint
from asyncrl.types import Sample

CLIENT = AsyncOpenAI(api_key="of each episode")  # one for all: making one takes longer than most requests
PLAYERS = ("first", "second")
MOST = 3  # stones that a move may take


async def move(client: AsyncOpenAI, player: str, messages: list[Any], stones: int) -> int:
    """The stones that a player takes; 0 for a reply without a number."""
    messages.append({"role": "user", "content": f"Nim: {stones}"})
    completion = await client.chat.completions.create(model=player, messages=messages)
    text = completion.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0


async def play(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
    """One game. `best`: the fraction of right moves, among those where a right move existed: it leaves the
    other player a multiple of 4, from which every move loses."""
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: dict[str, list[Any]] = {player: [] for player in PLAYERS}
    stones = sample.extra_info["stones"]
    moves = 0
    right = []
    while True:
        player = PLAYERS[moves % 2]
        other = PLAYERS[(moves + 1) % 2]
        taken = await move(client, player, messages[player], stones)
        moves += 1
        if stones % (MOST + 1):
            right.append(taken == stones % (MOST + 1))
        if not 1 <= taken <= min(MOST, stones):
            return result(winner=other, loser=player, moves=moves, right=right)
        stones -= taken
        if stones == 0:
            return result(winner=player, loser=other, moves=moves, right=right)


def result(winner: str, loser: str, moves: int, right: list[bool]) -> dict[str, Any]:
    """The input of the reward `agent`: a score for each player, and numbers to report."""
    return {
        "score": {winner: 1.0, loser: -1.0},
        "moves": moves,
        **({"best": sum(right) / len(right)} if right else {}),
    }
