"""Agents that lead an episode themselves, through an OpenAI-compatible endpoint."""

from asyncrl.gateway.agents import Agent, agents, load_agent, result_of
from asyncrl.gateway.command import Command
from asyncrl.gateway.server import Endpoint, Gateway, Host

__all__ = ["Agent", "Command", "Endpoint", "Gateway", "Host", "agents", "load_agent", "result_of"]
