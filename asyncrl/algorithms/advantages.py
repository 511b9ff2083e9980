"""Advantages: how much better an episode, a turn or a token did than expected.

Each is a function of one `CreditInput` and gives one number for all model tokens of the episode, or one
per model token. What it needs beside that is declared where it is registered. Importing this module registers
all of the library's advantages.
"""

from asyncrl.algorithms import group_advantages, token_advantages
from asyncrl.algorithms.credit import (
    Advantage,
    Credit,
    CreditInput,
    Scale,
    Trace,
    advantage,
    advantages,
)

__all__ = [
    "Advantage",
    "Credit",
    "CreditInput",
    "Scale",
    "Trace",
    "advantage",
    "advantages",
    "group_advantages",
    "token_advantages",
]
