"""Lets agents lead an episode themselves, through an endpoint that speaks OpenAI's and Anthropic's APIs."""

from asyncrl.gateway.agents import Agent, AgentError, agents, load_agent, load_untrained
from asyncrl.gateway.lines import CommandError
from asyncrl.gateway.programs import Command, Harness, TimeUp
from asyncrl.gateway.server import Endpoint, Gateway, Host
