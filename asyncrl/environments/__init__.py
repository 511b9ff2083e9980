"""Worlds that talk with the model: games, simulated users, other packages' environments."""

from asyncrl.environments.base import Environment, environments, load_environment

__all__ = ["Environment", "environments", "load_environment"]
