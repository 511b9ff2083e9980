"""Environments, which answer the model's turns: games, simulated users, environments of other packages."""

from asyncrl.environments.base import (
    Environment,
    environments,
    image_observation,
    load_environment,
    text_observation,
)
from asyncrl.environments.gym import Gymnasium
from asyncrl.environments.openenv import OpenEnv
from asyncrl.environments.user import ScriptedUser, SimulatedUser
from asyncrl.environments.verifiers import Verifiers
from asyncrl.isolation.calls import in_thread
