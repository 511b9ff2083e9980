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
from asyncrl.config import RunConfig
from asyncrl.registry import load_object, single

KEY = "algorithm.advantage"

__all__ = [
    "Advantage",
    "Credit",
    "CreditInput",
    "Scale",
    "Trace",
    "advantage",
    "advantages",
    "credit_of",
    "group_advantages",
    "load_named_files",
    "token_advantages",
]


def load_named_files(config: RunConfig) -> None:
    """Import each file and module that a key of `algorithm` names: what it registers is then known by its
    bare name, to every key."""
    for key in ("advantage", "loss", "correction", "aggregation", "shaping"):
        plugin = getattr(config.algorithm, key) or ()
        for name in [plugin] if isinstance(plugin, str) else plugin:
            if ":" in name:
                load_object(name, f"algorithm.{key}")


def credit_of(config: RunConfig) -> Advantage:
    """The advantage, options bound. Only an unknown name imports files: the coordinator needs no torch."""
    name, options = single(config.algorithm.advantage, KEY)
    if name not in advantages:
        load_named_files(config)
    return advantages.load(name, KEY).bound(options, f"{KEY}.{name}")
