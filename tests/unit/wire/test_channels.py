"""Every channel's `match` names all messages of its union, and lets mypy refuse the next one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import pytest

import asyncrl
from asyncrl.wire.messages import channels
from asyncrl.wire.messages.shared import WireMessage

ROOT = Path(asyncrl.__file__).parent
MATCH = re.compile(r"^ +match .*:$", re.M)
MESSAGES = {
    member.__name__
    for union in vars(channels).values()
    for member in get_args(union) or (union,)
    if isinstance(member, type) and issubclass(member, WireMessage)
}


class MatchOfMessages(NamedTuple):
    location: str
    annotation: str  # of its subject
    handled: frozenset[str]
    last: str


def matches() -> Iterator[MatchOfMessages]:
    for path in sorted(ROOT.rglob("*.py")):
        if not MATCH.search(text := path.read_text()):
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            nodes = list(ast.walk(function))
            types = {arg.arg: arg.annotation for arg in nodes if isinstance(arg, ast.arg)}
            types |= {
                ast.unparse(statement.target): statement.annotation
                for statement in nodes
                if isinstance(statement, ast.AnnAssign)
            }

            for match in (node for node in nodes if isinstance(node, ast.Match)):
                names = {
                    ast.unparse(member.cls).rpartition(".")[2]
                    for case in match.cases
                    if case.guard is None
                    for member in ast.walk(case.pattern)
                    if isinstance(member, ast.MatchClass)
                }
                if names & MESSAGES:
                    annotation = types.get(ast.unparse(match.subject))
                    yield MatchOfMessages(
                        f"{path.relative_to(ROOT)}:{match.lineno}",
                        ast.unparse(annotation) if annotation else "",
                        frozenset(names),
                        ast.unparse(match.cases[-1].body[0]),
                    )


FOUND = list(matches())


def test_they_are_found() -> None:
    assert len(FOUND) >= 8 and {"WorkerHeartbeat", "LoadWeights", "Stop", "Generated"} <= MESSAGES
    assert issubclass(WireMessage, msgspec.Struct)


@pytest.mark.parametrize("match_of_messages", FOUND, ids=lambda match_of_messages: match_of_messages.location)
def test_a_channels_match_is_complete_and_stays_so(match_of_messages: MatchOfMessages) -> None:
    union = vars(channels).get(match_of_messages.annotation)
    assert {message.__name__ for message in get_args(union)} == match_of_messages.handled, (
        match_of_messages.annotation or "not annotated"
    )
    assert match_of_messages.last.startswith("assert_never(")
