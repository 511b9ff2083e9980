"""A conversation of the data as turns of the model, token for token as an episode would have sampled them.

    messages ─► [prompt, or delta since the last turn] + [what the assistant says, with its stop id] ─► turns

Pure. What an assistant says is learned, but not in the first `given` messages; everything else is context.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec.structs import replace

from asyncrl.config import RolloutConfig
from asyncrl.conversation.chat import prefill_of
from asyncrl.conversation.commands import Fail, Rules
from asyncrl.conversation.turns import read_turn, rows_of
from asyncrl.errors import ConfigError
from asyncrl.types import FailReason, Message, Sample, StopReason, ToolCall, Turn, VersionSpan


def demonstrated(
    rules: Rules, sample: Sample, tools: tuple[str, ...], version: int = 0
) -> tuple[Turn, ...] | Fail:
    """The turns, all sampled by `version` as far as a record needs one, with log-probs of 0; or why there are
    none, whatever their length (`too_long`). `tools`: schemas that the prompt shows, as JSON text.

    A row that the template rewrites goes on as a new one where `rollout.history` allows it.
    """
    turns: list[Turn] = []
    said: tuple[Message, ...] = ()
    # messages up to the newest turn, itself included; its row
    answered = 0
    row = -1
    try:
        for place, message in enumerate(sample.prompt):
            if message.role == "assistant" and place >= (sample.given or 0):
                context = _context(rules, said, answered, turns)
                if context is None:
                    row += 1
                    context = rules.chat.prompt_ids(said, tools)
                at = Turn(len(turns), context, (), (), (), StopReason.STOP, row=row)
                turns.append(_turn(rules, at, said, message, tools, version))
                if prefill := prefill_of(said):  # one message with the one that it continues
                    message = replace(message, content=prefill + message.content)
                    said = said[:-1]
                answered = len(said) + 1
            elif message.role == "tool":
                message = replace(message, content=rules.shorten(message.content))
            said += (message,)
    except ConfigError as error:
        return Fail(FailReason.MISALIGNED, f"message {place}: {error}")
    return tuple(turns)


def _context(
    rules: Rules, said: tuple[Message, ...], answered: int, turns: Sequence[Turn]
) -> tuple[int, ...] | None:
    """The tokens before a turn in its row; None: it begins a row."""
    new = said[answered:]
    if not new:
        raise ConfigError("the assistant speaks without a message that it answers")
    delta = rules.chat.delta_ids(new, turns[-1].ids[-1]) if turns else None
    if turns and delta is None and rules.config.history == "append":
        raise ConfigError("the chat template rewrites earlier turns here; set rollout.history=fork")
    return delta


def _turn(
    rules: Rules, at: Turn, said: tuple[Message, ...], message: Message, tools: tuple[str, ...], version: int
) -> Turn:
    """The turn `at` that says `message`. ConfigError where the model could not say that, or the run would not
    read it so."""
    ids = rules.chat.turn_ids(said, message, tools)
    spans = (VersionSpan(0, len(ids), version, kv_version=-1),)
    turn = replace(at, ids=ids, logprobs=(0.0,) * len(ids), spans=spans)
    if message.tool_calls:
        found = read_turn(rules, turn, tools)
        if found.errors or _plain(found.calls) != _plain(message.tool_calls):
            name = message.tool_calls[0].name
            if name not in rules.chat.decode(ids):
                raise ConfigError(
                    f"the chat template does not write the call of {name!r}: set model.template to one that "
                    "does (chatml_tools), or write the call into the content"
                )
            raise ConfigError(
                f"the call of {name!r} is not read back by rollout.parser from what the chat template "
                "writes; name the tool in rollout.tools, or use another parser or template"
            )
    return turn


def _plain(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def too_long(limits: RolloutConfig, turns: Sequence[Turn]) -> Fail | None:
    """Say why a conversation is not learned that could be."""
    lengths = list(map(len, rows_of(turns)))
    if max(lengths) > limits.max_tokens:
        detail = f"the conversation has {max(lengths)} tokens, rollout.max_tokens is {limits.max_tokens}"
    elif len(lengths) > limits.rows:
        detail = f"the template makes {len(lengths)} rows of it, rollout.max_rows is {limits.rows}"
    else:
        return None
    return Fail(FailReason.PROMPT_TOO_LONG, detail)
