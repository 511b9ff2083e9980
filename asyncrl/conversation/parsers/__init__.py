"""How a model writes tool calls. A parser turns the text of a turn into calls; it never raises."""

from asyncrl.conversation.parsers.base import Parsed, Parser, parsers, unread, visible
from asyncrl.conversation.parsers.detect import detect
from asyncrl.conversation.parsers.harmony import harmony
from asyncrl.conversation.parsers.json_calls import hermes, llama3, mistral
from asyncrl.conversation.parsers.pythonic import pythonic
from asyncrl.conversation.parsers.sections import deepseek, kimi
from asyncrl.conversation.parsers.tagged import glm, qwen3_coder

__all__ = [
    "Parsed",
    "Parser",
    "deepseek",
    "detect",
    "glm",
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
