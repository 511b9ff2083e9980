"""How a model writes tool calls. A parser turns the text of a turn into calls; it never raises."""

from asyncrl.rollout.parsers.base import Parsed, Parser, parsers, unread, visible
from asyncrl.rollout.parsers.guess import guess
from asyncrl.rollout.parsers.harmony import harmony
from asyncrl.rollout.parsers.json_calls import hermes, llama3, mistral
from asyncrl.rollout.parsers.pythonic import pythonic
from asyncrl.rollout.parsers.sections import deepseek, kimi
from asyncrl.rollout.parsers.tagged import glm, qwen3_coder

__all__ = [
    "Parsed",
    "Parser",
    "deepseek",
    "glm",
    "guess",
    "harmony",
    "hermes",
    "kimi",
    "llama3",
    "mistral",
    "parsers",
    "pythonic",
    "qwen3_coder",
    "unread",
    "visible",
]
