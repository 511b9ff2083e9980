"""Agents that lead an episode themselves, through an OpenAI-compatible endpoint."""

from asyncrl.gateway.agents import Agent, Command, agents, load_agent, load_untrained, result_of
from asyncrl.gateway.server import Endpoint, Gateway, Host

__all__ = [
    "Agent",
    "Command",
    "Endpoint",
    "Gateway",
    "Host",
    "agents",
    "load_agent",
    "load_untrained",
    "result_of",
]
