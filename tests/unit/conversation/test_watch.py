"""Where a turn ends at a text, and what is told of it while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from asyncrl.conversation.parsers import Parsed, hermes, parsers
from asyncrl.conversation.watch import GrowingText, TurnStopCheck, text_before
from tests.fakes.chat import call, encode, rules

TOOLS = ('{"type": "function", "function": {"name": "look"}}',)
PIECES = ["Th", "ought", ": a\nOb", "serv", "ation: b", " c"]


def pieces(ids: Sequence[int]) -> str:
    return "".join(PIECES[id] for id in ids)


def heard(
    text: str,
    stops: tuple[str, ...] = (),
    tools: tuple[str, ...] = (),
    prompt: str = "",
    parser: str = "hermes",
) -> tuple[str, str, int]:
    """The reasoning and the content that were told, and how many characters it took."""
    pieces: list[tuple[str, str]] = []
    chat_rules = replace(rules(), parse=parsers.load(parser, ""))
    watch = TurnStopCheck(chat_rules, tools, stops, prompt, lambda *new: pieces.append(new))
    ids = encode(text)
    end = next((n for n in range(1, len(ids) + 1) if watch(ids[:n])), len(ids) + 1)
    return "".join(new[0] for new in pieces), "".join(new[1] for new in pieces), end


def test_the_turn_ends_with_the_token_in_which_the_text_ends() -> None:
    class Words(type(rules().chat)):  # type: ignore[misc]
        def decode(self, ids: Sequence[int]) -> str:
            return pieces(ids)

    watch = TurnStopCheck(rules(chat=Words()), (), ("\nObservation:", "never"), "", None)
    assert [watch(range(n)) for n in range(1, 6)] == [False, False, False, False, True]
    assert text_before(pieces(range(5)), ("never", "\nObservation:")) == "Thought: a"


def test_ids_that_were_lost_are_not_in_the_text() -> None:
    watch = TurnStopCheck(rules(), (), ("ab",), "", None)
    assert not watch(encode("a"))
    assert not watch(encode("b"))  # sampled anew
    assert not watch(encode("ba"))
    assert watch(encode("bab"))


def test_the_text_has_whole_characters_only() -> None:
    data = "né🙂x".encode()
    text = GrowingText(lambda ids: bytes(ids).decode(errors="replace"))
    seen = []
    for count in range(1, len(data) + 1):
        text.read_new_ids(list(data[:count]))
        seen.append(text.text)
    assert seen == ["n", "n", "né", "né", "né", "né", "né🙂", "né🙂x"]


def test_bytes_that_make_no_character_do_not_pile_up() -> None:
    text = GrowingText(lambda ids: bytes(ids).decode(errors="replace"))
    for count in range(1, 101):
        text.read_new_ids([0x80] * count)
    assert len(text.text) > 80


@pytest.mark.parametrize("parser", ["hermes", "llama3", "pythonic", "harmony"])
def test_text_is_passed_on_as_it_comes(parser: str) -> None:
    text = "It is 42, " * 30
    assert heard(text, parser=parser)[1] == text.strip()
    assert heard(text, tools=TOOLS, parser=parser)[1] == text.strip()


def test_a_stop_text_is_never_passed_on_not_even_its_beginning() -> None:
    assert heard("let me </co </code> x", ("</code>",))[1:] == ("let me </co", 19)
    assert heard("let me </cod", ("</code>",))[1] == "let me"


def test_thoughts_are_passed_on_as_such() -> None:
    assert heard("<think>so be it</think>It is 4.")[:2] == ("so be it", "It is 4.")
    assert heard("so be it</think>It is 4.", prompt="<think>\n")[:2] == ("so be it", "It is 4.")


@pytest.mark.parametrize(
    ("text", "parser"),
    [
        ("let me see " + call("look"), "hermes"),
        ("let me see <|python_tag|>" + '{"name": "look", "parameters": {}}', "llama3"),
        ('{"name": "look", "parameters": {}}', "llama3"),
        ("[look(at='it')]", "pythonic"),
        ("<|channel|>commentary to=functions.look<|message|>{}<|call|>", "harmony"),
    ],
)
def test_calls_are_never_passed_on(text: str, parser: str) -> None:
    assert heard(text, tools=TOOLS, parser=parser)[:2] == ("", "let me see" if "let" in text else "")


def test_without_tools_what_looks_like_a_call_is_passed_on() -> None:
    text = "see " + call("look")
    assert heard(text)[1] == text
    assert hermes(text, TOOLS).content == "see"


def test_a_parser_that_fails_does_not_break_the_engine() -> None:
    """The watch runs in its loop."""

    def broken(text: str, tools: tuple[str, ...]) -> Parsed:
        raise IndexError

    broken_rules = replace(rules(), parse=broken)
    pieces = []
    watch = TurnStopCheck(broken_rules, TOOLS, ("42",), "", lambda *new: pieces.append(new))
    ids = encode("It is 42")
    assert [watch(ids[:n]) for n in range(1, 9)] == [False] * 7 + [True]
    assert pieces == []
