"""Reads the tool calls that a model writes. A parser turns the text of a turn into calls; it never raises."""

from asyncrl.conversation.parsers import harmony, pythonic, tagged  # they register themselves
from asyncrl.conversation.parsers.base import Parsed, Parser, load_parser, parse_turn, parsers
from asyncrl.conversation.parsers.detect import detect
from asyncrl.conversation.parsers.json_calls import hermes
