"""Turns a conversation of the data into turns of the model, token for token as an episode samples turns.

    messages ─► [prompt, or delta since the last turn] + [what the assistant says, with its stop id] ─► turns

Pure. The assistant's messages are learned, except in the first `given` messages; everything else is context.
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
from asyncrl.types import FailReason, Generation, Message, Sample, StopReason, ToolCall, Turn, VersionSpan


def demonstration_turns(
    rules: Rules, sample: Sample, tools: tuple[str, ...], version: int = 0
) -> tuple[Turn, ...] | Fail:
    """Return the turns, recorded as sampled by `version` with log-probs of 0, or the reason why there are no
    turns. The length is not checked here (see `length_failure`). `tools`: schemas that the prompt shows,
    as JSON text.

    A row that the template rewrites goes on as a new row if `rollout.history` allows new rows.
    """
    turns: list[Turn] = []
    history: tuple[Message, ...] = ()
    answered_count = 0  # messages up to the newest turn, the turn included
    row_number = -1
    try:
        for position, message in enumerate(sample.prompt):
            if message.role == "assistant" and position >= (sample.given or 0):
                context = _turn_context(rules, history, answered_count, turns, tools)
                if context is None:
                    row_number += 1
                    context = rules.chat.prompt_ids(history, tools)

                turn_ids = rules.chat.turn_ids(history, message, tools)
                spans = (VersionSpan(0, len(turn_ids), version, kv_version=-1),)
                generation = Generation(turn_ids, (0.0,) * len(turn_ids), spans, StopReason.STOP)
                turn = Turn(len(turns), context, generation, row=row_number)
                _check_calls(rules, turn, message, tools)
                turns.append(turn)

                if prefill := prefill_of(history):  # the prefill and the turn are one message
                    message = replace(message, content=prefill + message.content)
                    history = history[:-1]
                answered_count = len(history) + 1
            elif message.role == "tool":
                content = rules.shorten_content(message.content, message.images)
                message = replace(message, content=content)

            history += (message,)
    except ConfigError as error:
        return Fail(FailReason.MISALIGNED, f"message {position}: {error}")

    return tuple(turns)


def _turn_context(
    rules: Rules,
    history: tuple[Message, ...],
    answered_count: int,
    turns: Sequence[Turn],
    tools: tuple[str, ...],
) -> tuple[int, ...] | None:
    """Return the tokens before a turn in its row; None: the turn begins a row."""
    new_messages = history[answered_count:]
    if not new_messages:
        raise ConfigError("an assistant message must follow the message that it answers")

    if not turns:
        return None

    last_token = turns[-1].generation.ids[-1]
    delta_ids = rules.chat.delta_ids(new_messages, last_token, history[:answered_count], tools)
    if delta_ids is None and rules.config.history == "append":
        raise ConfigError("the chat template rewrites earlier turns here; set rollout.history=fork")

    return delta_ids


def _check_calls(rules: Rules, turn: Turn, message: Message, tools: tuple[str, ...]) -> None:
    """Check that the calls of `message` are read back from the turn. ConfigError if the model could not write
    the message, or the run would read the message otherwise."""
    if not message.tool_calls:
        return

    parsed = read_turn(rules, turn, tools)
    if parsed.errors or _call_values(parsed.calls) != _call_values(message.tool_calls):
        name = message.tool_calls[0].name
        if name not in rules.chat.decode(turn.generation.ids):
            raise ConfigError(
                f"the chat template does not write the call to {name!r}; set model.template to a template "
                "that writes calls (chatml_tools), or write the call into the content"
            )

        raise ConfigError(
            f"rollout.parser cannot read back the call to {name!r} from the output of the chat "
            "template; list the tool in rollout.tools, or use another parser or template"
        )


def _call_values(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def length_failure(limits: RolloutConfig, turns: Sequence[Turn]) -> Fail | None:
    """Return why a conversation that could be learned is not, if its rows are too long or too many."""
    row_lengths = list(map(len, rows_of(turns)))
    if max(row_lengths) > limits.max_tokens:
        token_count = max(row_lengths)
        detail = f"the conversation has {token_count} tokens, but rollout.max_tokens is {limits.max_tokens}"
    elif len(row_lengths) > limits.rows:
        detail = (
            f"the chat template splits the conversation into {len(row_lengths)} rows, but rollout.max_rows "
            f"is {limits.rows}"
        )
    else:
        return None

    return Fail(FailReason.PROMPT_TOO_LONG, detail)
