"""An episode as a state machine: a pure function (episode, event) -> episode.

The state is the command that the episode waits for. Its driver (rollout/turn_player.py) carries the command
out and returns the answer as an event:

    command     to be done                             answered by     commands that may follow
    Open        open the tools, reset the environment  Opened          Generate
    Generate    sample a turn after these ids          TurnGenerated   CallTools, Step, Generate, Score
    CallTools   run the calls of the turn              ToolsReplied    Generate, Score
    Step        give the turn to the environment       Observed        Generate, Score
    Score       compute the reward                     EpisodeScored   Done
    Done, Fail  nothing: the episode is over

Fail may follow every event. With one tool call: Open, Generate -> "f(1)", CallTools -> "2", Generate ->
"It is 2.", Score -> 1.0, Done. A turn of malformed calls only is followed by Generate at once.

There are no awaits, clocks or I/O here. Tokens are only ever appended to a row; where the template rewrites
the history, or a full row is to go on without old tool replies, a new row begins. The same events give the
same state on any worker: `resume_episode` repeats them from the recorded turns.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from asyncrl.conversation.chat import prefill_of
from asyncrl.conversation.commands import (
    CallTools,
    Command,
    Done,
    EpisodeScored,
    Event,
    Fail,
    Generate,
    Observed,
    Open,
    Opened,
    Rules,
    Score,
    Step,
    ToolsReplied,
    TurnGenerated,
)
from asyncrl.conversation.parsers import Parsed
from asyncrl.conversation.parsers.base import think_tags
from asyncrl.conversation.turns import (
    generation_problem,
    read_turn,
    score_turns,
    split_thought,
    turn_message,
)
from asyncrl.errors import ProtocolError
from asyncrl.types import (
    MALFORMED_CALL,
    EpisodeEnd,
    FailReason,
    Generation,
    ImageRef,
    Message,
    Observation,
    Sample,
    StopReason,
    ToolCall,
    ToolReply,
    Turn,
)
from asyncrl.vision.content import without_marks

FREE_DIVISOR = 4  # folding frees at least 1 / FREE_DIVISOR of a row, so that the next turns need no folding
DROPPED_REPLY = "[dropped]"
BAD_CALL = ToolCall(MALFORMED_CALL, "{}")


class Episode(msgspec.Struct, frozen=True):
    """The state of an episode. `sample`: the prompt with the opening text of tools, once these are open.
    `rows`: the tokens of each row up to the model's last token. `read`: the parsed turns. `folded`: how many
    tool replies, the oldest first, the newest row does not show."""

    sample: Sample
    command: Command
    opened: Opened = Opened()
    rows: tuple[tuple[int, ...], ...] = ()
    turns: tuple[Turn, ...] = ()
    read: tuple[Parsed, ...] = ()
    bad_calls: int = 0  # successive malformed or refused calls, up to now
    tool_calls: int = 0  # well-formed calls
    folded: int = 0

    @property
    def over(self) -> bool:
        return isinstance(self.command, Done | Fail)

    @property
    def tool_seconds(self) -> float:
        """Return the seconds spent in tools, whose calls in one turn run side by side, and in the
        environment."""
        return sum(
            max((reply.seconds for reply in turn.replies), default=0.0)
            + (turn.observation.seconds if turn.observation else 0.0)
            for turn in self.turns
        )


def begin_episode(sample: Sample) -> Episode:
    """Begin an episode."""
    return Episode(sample, Open())


def advance_episode(rules: Rules, episode: Episode, event: Event) -> Episode:
    """Return the next state. ProtocolError, with nothing changed, when the event does not answer the
    command."""
    match episode.command, event:
        case Open(), Opened():
            return _opened(rules, episode, event)
        case Generate() as command, TurnGenerated():
            return _generated(rules, episode, command, event.generation)
        case CallTools() as command, ToolsReplied():
            if tuple(reply.call for reply in event.replies) != command.calls:
                raise ProtocolError(
                    f"the replies ({len(event.replies)}) do not match the calls ({len(command.calls)})"
                )
            return _replied(rules, episode, event.replies, command.errors)
        case Step(), Observed():
            return _observed(rules, episode, event.observation)
        case Score() as command, EpisodeScored():
            return replace(episode, command=score_turns(episode.turns, command.end, event.result))
        case command, _:
            raise ProtocolError(f"{type(event).__name__} does not answer {type(command).__name__}")


def resume_episode(rules: Rules, sample: Sample, opened: Opened, turns: Sequence[Turn]) -> Episode:
    """Return the state after recorded turns, by the same events. The answer to the last turn may be missing:
    then tools or the environment come next. ProtocolError when these rules would not make the same turns."""
    episode = advance_episode(rules, begin_episode(sample), opened)
    for turn in turns:
        command = episode.command
        if (
            not isinstance(command, Generate)
            or command.row != turn.row
            or command.ids != _row_ids(episode, command) + turn.context
        ):
            raise ProtocolError(f"recorded turn {turn.index} does not continue the tokens before it")

        episode = advance_episode(rules, episode, TurnGenerated(turn.generation))
        if isinstance(episode.command, Fail) and len(episode.turns) == turn.index:
            raise ProtocolError(f"recorded turn {turn.index}: {episode.command.detail}")
        if turn.replies and isinstance(episode.command, CallTools):
            episode = advance_episode(
                rules, episode, ToolsReplied(turn.replies[: len(episode.command.calls)])
            )
        if turn.observation is not None and isinstance(episode.command, Step):
            episode = advance_episode(rules, episode, Observed(turn.observation))

        repeated_turn = episode.turns[-1]
        replies_differ = turn.replies and repeated_turn.replies != turn.replies
        if replies_differ or repeated_turn.observation != turn.observation:
            raise ProtocolError(f"the recorded answer to turn {turn.index} does not match the turn")

    return episode


def expire_episode(episode: Episode) -> Episode:
    """End an episode whose time is up. Finished turns are scored; an unfinished turn does not count. Without
    a finished turn the episode fails."""
    if not episode.turns:
        detail = "rollout.episode_timeout expired before the first turn finished"
        return _fail_episode(episode, FailReason.DEADLINE, detail)
    return _score_episode(episode, EpisodeEnd.TIMEOUT)


def conversation(rules: Rules, episode: Episode) -> tuple[Message, ...]:
    """Return all messages, the prompt included, as the newest row shows them. Folded replies read
    DROPPED_REPLY: the oldest tool replies, which a full row left out so that the episode could go on."""
    messages = [*episode.sample.prompt, *episode.opened.messages]
    hidden_replies = episode.folded
    for turn, parsed in zip(episode.turns, episode.read, strict=True):
        messages.append(turn_message(rules, turn, parsed))
        for reply in turn.replies:
            if hidden_replies > 0:
                messages.append(_tool_message(reply, DROPPED_REPLY))
            else:
                messages.append(_tool_message(reply, reply.content, reply.images))
            hidden_replies -= 1
        messages += turn.observation.messages if turn.observation else ()

    return tuple(messages)


def shorten_observation(rules: Rules, observation: Observation) -> Observation:
    """Cut the messages of an observation to the length that the model reads."""
    return replace(observation, messages=_shorten_messages(rules, observation.messages))


# -- transitions, in the order of the table above ------------------------------------------------------


def _opened(rules: Rules, episode: Episode, opened: Opened) -> Episode:
    """Begin the first row with the prompt."""
    opened = replace(opened, messages=_shorten_messages(rules, opened.messages))
    if rules.chat.image_layout is not None:
        episode = replace(episode, sample=replace(episode.sample, prompt=_without_stray_marks(episode)))
    opening_text = rules.shorten_content(opened.opening_text, opened.opening_images)
    prompt = episode.sample.prompt
    if opening_text:
        prompt = _with_opening(prompt, opening_text, opened.opening_images)
    episode = replace(episode, sample=replace(episode.sample, prompt=prompt), opened=opened)

    prompt_ids = _prompt_ids(rules, episode)
    max_tokens = rules.config.max_tokens
    if len(prompt_ids) >= max_tokens:
        detail = f"the prompt has {len(prompt_ids)} tokens, but rollout.max_tokens is {max_tokens}"
        return _fail_episode(episode, FailReason.PROMPT_TOO_LONG, detail)

    return _sample_next(rules, episode, prompt_ids, row_number=0)


def _generated(rules: Rules, episode: Episode, command: Generate, generation: Generation) -> Episode:
    """Add the sampled turn, and end the episode or pass the turn to the environment or the tools."""
    row_ids = _row_ids(episode, command)
    if command.ids[: len(row_ids)] != row_ids:
        detail = f"the prompt of turn {len(episode.turns)} does not extend the tokens of its row"
        return _fail_episode(episode, FailReason.MISALIGNED, detail)

    if engine_problem := generation_problem(rules.chat.stop_ids, command.max_new_tokens, generation):
        return _fail_episode(episode, FailReason.ENGINE_ERROR, engine_problem)

    turn = Turn(
        len(episode.turns),
        command.ids[len(row_ids) :],
        generation,
        row=command.row,
        taught=() if row_ids else teacher_prompt(rules, episode, command),
    )
    rows = (*episode.rows[: command.row], command.ids + generation.ids)
    opened = episode.opened
    prefill = "" if episode.turns else prefill_of((*episode.sample.prompt, *opened.messages))
    parsed = read_turn(rules, turn, opened.tools, prefill=prefill)
    episode = replace(episode, rows=rows, turns=(*episode.turns, turn), read=(*episode.read, parsed))

    # The environment answers turns without calls, and turns with a call of the environment's tools.
    calls_environment = any(call.name in opened.own_tools for call in parsed.calls)
    answers_plain_turns = bool(rules.config.environment) and not parsed.calls
    to_environment = not parsed.errors and (calls_environment or answers_plain_turns)
    if (episode_end := _end_after_turn(rules, episode, parsed, to_environment)) is not None:
        return _score_episode(episode, episode_end)

    if to_environment:
        message = turn_message(rules, turn, parsed)
        tool_calls = episode.tool_calls + len(parsed.calls)
        return replace(episode, tool_calls=tool_calls, bad_calls=0, command=Step(message))

    if parsed.calls:
        return replace(episode, command=CallTools(parsed.calls, parsed.errors))

    return _replied(rules, episode, (), parsed.errors)  # all calls are malformed: no tool runs


def _end_after_turn(
    rules: Rules, episode: Episode, parsed: Parsed, to_environment: bool
) -> EpisodeEnd | None:
    """Return why the episode is over after this turn; None: the episode goes on. Tools of a last turn are not
    run: no turn would read the replies."""
    limits = rules.config
    call_count = len(parsed.calls)
    error_count = len(parsed.errors)
    generation = episode.turns[-1].generation
    if generation.stop is StopReason.LENGTH:
        return EpisodeEnd.LENGTH
    if rules.chat.is_placeholder(generation.ids[-1]):
        return EpisodeEnd.IMAGE_TOKEN
    if episode.tool_calls + call_count > limits.max_calls:
        return EpisodeEnd.MAX_CALLS
    if to_environment:
        return None
    if not call_count and not error_count:
        return EpisodeEnd.ANSWERED
    if not call_count and episode.bad_calls + error_count >= limits.max_bad_calls:
        return EpisodeEnd.BAD_CALLS

    return EpisodeEnd.MAX_TURNS if len(episode.turns) >= limits.max_turns else None


def _replied(
    rules: Rules, episode: Episode, replies: tuple[ToolReply, ...], errors: tuple[str, ...]
) -> Episode:
    """Attach to the turn the tools' replies and, after them, one reply for each malformed call."""
    malformed_replies = [ToolReply(BAD_CALL, f"error: {error}", error, refused=True) for error in errors]
    all_replies = tuple(
        replace(reply, content=rules.shorten_content(reply.content, reply.images))
        for reply in (*replies, *malformed_replies)
    )
    refused_count = sum(reply.refused for reply in all_replies)
    episode = replace(
        episode,
        turns=(*episode.turns[:-1], replace(episode.turns[-1], replies=all_replies)),
        tool_calls=episode.tool_calls + len(replies),
        bad_calls=refused_count + (episode.bad_calls if refused_count == len(all_replies) else 0),
    )
    if episode.bad_calls >= rules.config.max_bad_calls:
        return _score_episode(episode, EpisodeEnd.BAD_CALLS)

    reply_messages = tuple(_tool_message(reply, reply.content, reply.images) for reply in all_replies)
    return _next_turn(rules, episode, reply_messages)


def _observed(rules: Rules, episode: Episode, observation: Observation) -> Episode:
    observation = shorten_observation(rules, observation)
    turn = replace(episode.turns[-1], observation=observation)
    episode = replace(episode, turns=(*episode.turns[:-1], turn))
    if observation.done:
        return _score_episode(episode, EpisodeEnd.DONE)
    if len(episode.turns) >= rules.config.max_turns:
        return _score_episode(episode, EpisodeEnd.MAX_TURNS)

    if not observation.messages:
        detail = "the environment sent no message, although the episode is not done"
        return _fail_episode(episode, FailReason.ENVIRONMENT_ERROR, detail)

    return _next_turn(rules, episode, observation.messages)


def _next_turn(rules: Rules, episode: Episode, messages: tuple[Message, ...]) -> Episode:
    """Ask for the turn after these messages: in the newest row if the template only appends messages, else in
    a new row. With history=fold, a full row goes on as a new row."""
    limits = rules.config
    row_number = len(episode.rows) - 1

    history: tuple[Message, ...] = ()
    if rules.chat.depends_on_history(messages):
        written_messages = _written_conversation(rules, episode)
        history = written_messages[: len(written_messages) - len(messages)]

    delta_ids = rules.chat.delta_ids(messages, episode.rows[-1][-1], history, episode.opened.tools)
    if delta_ids is not None:
        prefix_ids = episode.rows[-1] + delta_ids
    elif limits.history == "append":
        detail = "the chat template rewrites earlier turns after these replies; set rollout.history=fork"
        return _fail_episode(episode, FailReason.MISALIGNED, detail)
    else:
        prefix_ids = _prompt_ids(rules, episode)
        row_number += 1

    row_is_full = len(prefix_ids) + limits.max_new_tokens > limits.max_tokens
    if limits.history == "fold" and row_is_full and len(episode.rows) < limits.max_rows:
        folded_episode = _with_more_folded(rules, episode)
        if folded_episode.folded > episode.folded:
            episode = folded_episode
            prefix_ids = _prompt_ids(rules, episode)
            row_number = len(episode.rows)

    if row_number >= limits.max_rows:
        return _score_episode(episode, EpisodeEnd.MAX_ROWS)
    if len(prefix_ids) >= limits.max_tokens:
        return _score_episode(episode, EpisodeEnd.LENGTH)

    return _sample_next(rules, episode, prefix_ids, row_number)


def _with_more_folded(rules: Rules, episode: Episode) -> Episode:
    """Fold as few of the oldest tool replies as leave room for a turn, and for at least 1 / FREE_DIVISOR of a
    row. Replies of the last turn are always shown, so there may be nothing to fold."""
    limits = rules.config
    reply_counts = range(episode.folded + 1, 1 + sum(len(turn.replies) for turn in episode.turns[:-1]))
    if not reply_counts:
        return episode

    max_prompt_tokens = limits.max_tokens - max(limits.max_new_tokens, limits.max_tokens // FREE_DIVISOR)
    position = bisect.bisect_left(
        reply_counts,
        True,
        key=lambda count: len(_prompt_ids(rules, replace(episode, folded=count))) <= max_prompt_tokens,
    )

    return replace(episode, folded=reply_counts[min(position, len(reply_counts) - 1)])


# -- parts of the transitions ----------------------------------------------------------------------------


def _sample_next(rules: Rules, episode: Episode, prefix_ids: tuple[int, ...], row_number: int) -> Episode:
    free_tokens = rules.config.max_tokens - len(prefix_ids)
    max_new_tokens = min(free_tokens, rules.config.max_new_tokens)
    return replace(episode, command=Generate(prefix_ids, max_new_tokens, row_number))


def _score_episode(episode: Episode, end: EpisodeEnd) -> Episode:
    return replace(episode, command=Score(episode.read[-1].content, end))


def _fail_episode(episode: Episode, reason: FailReason, detail: str) -> Episode:
    return replace(episode, command=Fail(reason, detail))


def _prompt_ids(rules: Rules, episode: Episode) -> tuple[int, ...]:
    """Return the ids that begin a row: the whole conversation, with the tools."""
    return rules.chat.prompt_ids(_written_conversation(rules, episode), episode.opened.tools)


def _written_conversation(rules: Rules, episode: Episode) -> tuple[Message, ...]:
    """Return the conversation for the template: a first turn that continues the prompt's last message is
    joined with that message."""
    messages = conversation(rules, episode)
    prompt_length = len(episode.sample.prompt) + len(episode.opened.messages)
    prefill = prefill_of(messages[:prompt_length])
    if not episode.turns or not prefill:
        return messages

    begun_message = messages[prompt_length - 1]
    turn = messages[prompt_length]
    written_text = rules.chat.decode(episode.turns[0].generation.ids)
    leading_space = written_text[: len(written_text) - len(written_text.lstrip())]

    text, thought = split_thought(rules, prefill)
    if thought and not episode.read[0].errors:
        thought = thought.removeprefix(think_tags(rules.parse).open).lstrip()
        turn = replace(turn, content=text + turn.content, reasoning=thought + leading_space + turn.reasoning)
    else:
        content = prefill + leading_space + turn.content.lstrip()
        turn = replace(turn, content=content, reasoning=turn.reasoning or begun_message.reasoning)

    return (*messages[: prompt_length - 1], turn, *messages[prompt_length + 1 :])


def teacher_prompt(rules: Rules, episode: Episode, command: Generate) -> tuple[int, ...]:
    """Return the turn's prefix for the teacher, for whom the first message of the row says more. Empty: the
    teacher reads the same prefix."""
    if not rules.privilege:
        return ()
    if first_turn := next((turn for turn in episode.turns if turn.row == command.row), None):
        return first_turn.taught + command.ids[len(first_turn.context) :]

    first_message, *later_messages = _written_conversation(rules, episode)
    ground_truth = episode.sample.ground_truth
    if not isinstance(ground_truth, str):
        ground_truth = json.dumps(ground_truth)

    privileged_text = rules.privilege.replace("{ground_truth}", ground_truth)
    messages = (
        replace(first_message, content=f"{privileged_text}\n\n{first_message.content}"),
        *later_messages,
    )

    return rules.chat.prompt_ids(messages, episode.opened.tools)


def _without_stray_marks(episode: Episode) -> tuple[Message, ...]:
    """Return the sample's prompt without image marks in messages that have no images: joined with a message
    that has some, there would be more marks than images."""
    return tuple(
        message if message.images else replace(message, content=without_marks(message.content))
        for message in episode.sample.prompt
    )


def _row_ids(episode: Episode, command: Generate) -> tuple[int, ...]:
    """Return the tokens that the turn extends; no tokens if the turn begins a row."""
    return episode.rows[command.row] if command.row < len(episode.rows) else ()


def _with_opening(
    prompt: tuple[Message, ...], text: str, images: tuple[ImageRef, ...]
) -> tuple[Message, ...]:
    """Add the text and its images to the last message of the user, without a separator, as TRL does; to a
    prompt without one as a message of its own."""
    for position in reversed(range(len(prompt))):
        if prompt[position].role == "user":
            message = prompt[position]
            message = replace(message, content=message.content + text, images=message.images + images)
            return (*prompt[:position], message, *prompt[position + 1 :])

    return (*prompt, Message("user", text, images=images))


def _shorten_messages(rules: Rules, messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(
        replace(
            message,
            content=rules.shorten_content(message.content, message.images),
            reasoning=rules.shorten(message.reasoning),
        )
        for message in messages
    )


def _tool_message(reply: ToolReply, content: str, images: tuple[ImageRef, ...] = ()) -> Message:
    return Message("tool", content, tool_call_id=reply.call.id, name=reply.call.name, images=images)
