"""Names of actions, and descriptions of observations, for Gymnasium's toy text environments.

Gymnasium's documentation has the names, its code does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

ACTION_NAMES = {  # of the actions, in order
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
STANDS = ("R", "G", "Y", "B")  # the taxi's, in order

_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


def plain(text: str) -> str:
    """Text without terminal escapes. Colour marks where the agent is: it becomes brackets."""
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", text)).strip("\n")


def taxi(seen: Any, env: Any) -> str:
    """The map and a description: on the map only colours distinguish passenger and destination."""
    row, column, passenger, destination = env.decode(seen)
    where = "in the taxi" if passenger == len(STANDS) else f"at {STANDS[passenger]}"
    streets = _ESCAPE.sub("", env.render()).split("\n  (")[0].strip("\n")
    return (
        f"{streets}\nThe taxi is in row {row}, column {column} (from 0). "
        f"The passenger is {where} and wants to go to {STANDS[destination]}."
    )


def blackjack(seen: Any, env: Any) -> str:
    hand, dealer, ace = seen
    usable = ", with a usable ace" if ace else ""
    return f"Your hand: {hand}{usable}. The dealer shows {dealer}."


DESCRIPTIONS: dict[str, Callable[[Any, Any], str]] = {"Taxi": taxi, "Blackjack": blackjack}
