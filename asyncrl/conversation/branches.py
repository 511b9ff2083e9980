"""Keeps the rows of an agent's episode: which row a request of the agent extends, and what the answer adds.

    AgentRequest --place_request--> Placement --(engine)--> Generation --next_turn--> Turn
                 \\---------------> Refusal: a limit of the run

    Turn --add_turn--> the turn's row is longer

A request that repeats the messages of a row and adds new ones extends that row: the template writes the new
messages after the very ids of the model. Everything else begins a new row, whose prompt is rendered as a
whole: an edited history, a second conversation, the same prompt again, a row that another request is
extending, a template that rewrites. A turn whose client left before the delivery answers the same request
when the request comes again. No awaits and no clocks; requests of one agent may overlap.

Side requests (titles, commit messages) are answered like all requests, but none of their turns is trained.
Side requests have rows and limits of their own, so that the conversation goes on where the side request
interrupted the agent; the episode's answer, end and conversation come from the last trained turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from asyncrl.conversation.commands import Rules
from asyncrl.conversation.requests import (
    AgentRequest,
    IsUntrained,
    Placement,
    Refusal,
    TextPrompt,
    TextRows,
    TokenRow,
    characters_of,
    count_common,
    is_short,
    limit_reached,
    row_is_full,
)
from asyncrl.conversation.tokenizer import CHARACTERS_PER_TOKEN
from asyncrl.conversation.turns import read_turn, turn_message
from asyncrl.conversation.watch import text_before
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.types import EpisodeEnd, Generation, Message, StopReason, Turn

MAX_ABANDONED = 8  # remembered requests whose clients have left
ANSWERING_ROLES = ("system", "tool", "user")  # roles of messages that can follow a message of the model


class Branches:
    """Owns the rows and turns of one episode. A call of `add_turn` or `cancel_placement` follows each
    `place_request`.

    `recorded_turns`: the turns of an earlier attempt, which answer the agent's requests before the engine
    samples anything.
    """

    def __init__(
        self,
        rules: Rules,
        recorded_turns: Sequence[Turn] = (),
        is_untrained: IsUntrained = lambda request: False,
    ) -> None:
        self.rows: list[TokenRow] = []
        self.turns: list[Turn] = []
        self.last_refusal: Refusal | None = None  # the newest refusal since the last turn
        self.folded = 0  # system messages that the template got under another role
        self._rules = rules
        self._recorded_turns = recorded_turns
        self._is_untrained = is_untrained
        self._text_rows = TextRows(rules.chat)
        self._newest_message: tuple[Turn, tuple[str, ...], Message] | None = None  # turn, stop texts, message
        self._next_session = 0  # sessions number the rows, cancelled rows included
        self._pending_placements: dict[int, Placement] = {}  # by session
        # Cancelled placements in new rows: the requests may come again.
        self._abandoned_placements: list[Placement] = []

        # Cache the tokenising for a request that comes next, and for each of its answers.
        self._cached_ids: Callable[..., Any] = lru_cache(maxsize=2)(
            lambda tokenise, *arguments: tokenise(*arguments)
        )

    @property
    def replaying(self) -> bool:
        """Return True while a recorded turn was not requested again."""
        return len(self.turns) < len(self._recorded_turns)

    @property
    def end(self) -> EpisodeEnd:
        """Return the end of the episode if the agent ends now. There must be a turn."""
        if self.last_refusal is not None:
            return self.last_refusal.end
        if self._last_trained_turn.generation.stop is StopReason.LENGTH:
            return EpisodeEnd.LENGTH
        return EpisodeEnd.DONE

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the conversation that the last trained turn belongs to, up to that turn."""
        return self.rows[self._last_trained_turn.row].messages

    @property
    def task_messages(self) -> tuple[Message, ...]:
        """Return the conversation about the task, up to the last turn: the agent and the tools are those of
        the first request with tools. Without tools, return the conversation with the most turns."""
        trained_rows = [(turn.row, self.rows[turn.row]) for turn in self.turns if not turn.untrained]
        conversations = {
            row_number: (row.request.agent, row.request.tools or row.messages[0].content)
            for row_number, row in trained_rows
        }

        rows_with_tools = [number for number in sorted(conversations) if self.rows[number].request.tools]
        if rows_with_tools:
            main_conversation = conversations[rows_with_tools[0]]
        else:
            turn_counts = Counter(conversations[row_number] for row_number, _ in trained_rows)
            main_conversation = turn_counts.most_common(1)[0][0]

        for row_number, row in reversed(trained_rows):
            if conversations[row_number] == main_conversation:
                return row.messages
        raise AssertionError("no turn is trained on")

    @property
    def calls(self) -> int:
        """Count the well-formed tool calls of the model."""
        return sum(len(self.model_message(turn).tool_calls) for turn in self.turns if not turn.untrained)

    @property
    def _last_trained_turn(self) -> Turn:
        """Return the last trained turn, which must exist."""
        return next(turn for turn in reversed(self.turns) if not turn.untrained)

    @property
    def answer(self) -> str:
        """Return the text of the last trained turn outside tool calls."""
        last_turn = self._last_trained_turn
        request = self.rows[last_turn.row].request
        if request.prompt is not None:
            return self.model_message(last_turn).content
        return read_turn(self._rules, last_turn, request.tools, request.stops).content

    def model_message(self, turn: Turn) -> Message:
        """Return the model's message in a turn as the agent gets the message. An agent that sends no tools
        gets everything as text, calls included."""
        return self._read_message(self.rows[turn.row].request, turn)

    def stopped_at(self, turn: Turn) -> str:
        """Return the stop text of the request at which a turn ended; '' if no stop text ended the turn."""
        if turn.generation.stop is not StopReason.TEXT:
            return ""
        text = self._rules.chat.decode(turn.generation.ids)
        stops = self.rows[turn.row].request.stops
        positions = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
        return min(positions, default=(0, ""))[1]

    def prompt_tokens(self, answer: Turn | Placement) -> int:
        """Count the prompt tokens of an answer, sampled or to be sampled."""
        if isinstance(answer, Placement):
            return len(answer.ids)
        return len(self.rows[answer.row].ids) - len(answer.generation.ids)

    def count_prompt_tokens(self, request: AgentRequest) -> int:
        """Count the tokens of a request's prompt, if the answer came now. ConfigError when the template
        cannot write the messages. A text that is far too long is not tokenised: the count is an estimate."""
        placement = self._find_placement(request, self._is_untrained(request))
        if isinstance(placement, Placement):
            return len(placement.ids)
        return sum(map(characters_of, request.messages)) // 4

    # -- a request -----------------------------------------------------------------------------------

    def find_answers(
        self, request: AgentRequest, count: int, attempt: int = 0
    ) -> list[Turn | Placement] | Refusal:
        """Find `count` answers: each a new Placement, or a Turn to hand out again, which was not delivered or
        which an earlier try got. `attempt`: the number of the try. A client that counts tries did not read
        the turns of earlier tries. ConfigError when the template cannot write the messages."""
        if attempt == 0:
            # The agent has read the turns that answered an equal request before: no later try gets them.
            for row_number, row in enumerate(self.rows):
                if not row.undelivered and row.request == request:
                    self._change_row(row_number, read=True)

        answers: list[Turn | Placement] = []
        try:
            for _ in range(count):
                answer = (
                    self.redeliver(request, attempt)
                    or self._unread_turn(request, attempt)
                    or self.place_request(request, attempt)
                )
                if isinstance(answer, Refusal):
                    self.give_back_answers(answers)
                    return answer
                answers.append(answer)
        except BaseException:
            self.give_back_answers(answers)
            raise

        return answers

    def give_back_answers(self, answers: Sequence[Turn | Placement]) -> None:
        """Give back placements and turns that will not answer the request."""
        for answer in answers:
            if isinstance(answer, Turn):
                self.mark_undelivered(answer)
            else:
                self.cancel_placement(answer)

    def place_request(self, request: AgentRequest, attempt: int = 0) -> Placement | Refusal:
        """Find the row and the context of the answer to a request. ConfigError when the template cannot write
        the messages."""
        is_side = self._is_untrained(request)
        placement = self._find_placement(request, is_side)
        if isinstance(placement, Refusal):
            if not is_side:
                self.last_refusal = placement
            return placement

        placement = replace(placement, attempt=attempt)
        self._pending_placements[placement.session] = placement

        if placement.row is None:
            self._abandoned_placements = [
                left for left in self._abandoned_placements if left.session != placement.session
            ]
            self._next_session = max(self._next_session, placement.session + 1)
        else:
            self._change_row(placement.row, busy=True)

        return placement

    def recorded_turn(self, placement: Placement) -> Turn | None:
        """Return the recorded turn that answers the request, which can be added after all earlier turns.
        None: sample the turn. ProtocolError if recorded turns are left but no recorded turn answers: the
        agent does not repeat itself."""
        if not self.replaying:
            return None

        checked_rows: set[int] = set()
        for turn in self._recorded_turns[len(self.turns) :]:
            known_row = turn.row if turn.row < len(self.rows) else None  # None: the turn begins the row
            recorded_position = known_row, turn.context, turn.agent, turn.untrained
            requested_position = (
                placement.row,
                placement.context,
                placement.request.agent,
                placement.untrained,
            )
            if turn.row not in checked_rows and recorded_position == requested_position:
                return turn
            checked_rows.add(turn.row)

        raise ProtocolError(f"the agent did not repeat its recorded turn {len(self.turns)}")

    def next_turn(self, placement: Placement, generation: Generation) -> Turn:
        """Make the next turn of the episode, to be added before anything else happens."""
        return Turn(
            len(self.turns),
            placement.context,
            generation,
            row=self._row_number(placement),
            agent=placement.request.agent,
            untrained=placement.untrained,
        )

    def add_turn(self, placement: Placement, turn: Turn) -> Message:
        """Add a turn to its row, and return the model's message. ProtocolError, with nothing changed, if the
        placement has another next turn."""
        row_number = self._row_number(placement)
        row_messages, row_ids = self._messages_and_ids(placement.row)
        if (turn.index, turn.row, row_ids + turn.context) != (len(self.turns), row_number, placement.ids):
            raise ProtocolError(f"turn {turn.index} does not continue the tokens of row {turn.row}")

        message = self._read_message(placement.request, turn, with_stop_text=True)

        # Count the new system messages that the template gets under another role.
        new_messages = placement.messages[len(row_messages) :]
        template_messages = self._rules.chat.fold(new_messages, placement.row is None)
        self.folded += sum(new.role == "system" for new in new_messages)
        self.folded -= sum(written.role == "system" for written in template_messages)

        self.rows[row_number : row_number + 1] = [
            TokenRow(
                placement.request,
                placement.session,
                (*placement.messages, message),
                placement.ids + turn.generation.ids,
                turn,
                attempt=placement.attempt,
                untrained=placement.untrained,
            )
        ]
        self.turns.append(turn)
        if not turn.untrained:
            self.last_refusal = None

        del self._pending_placements[placement.session]
        return message

    def cancel_placement(self, placement: Placement) -> None:
        """Drop a placement that will not be answered. No effect after the answer, or if another request took
        over."""
        if self._pending_placements.get(placement.session) is placement:
            del self._pending_placements[placement.session]
            if placement.row is not None:
                self._change_row(placement.row, busy=False)
            else:
                self._abandoned_placements = [*self._abandoned_placements, placement][-MAX_ABANDONED:]

    def mark_undelivered(self, turn: Turn) -> None:
        """Note that the client left without this turn. No effect if the row has gone on: the turn was
        delivered."""
        if self.rows[turn.row].last is turn:
            self._change_row(turn.row, undelivered=True, read=False)

    def redeliver(self, request: AgentRequest, attempt: int = 0) -> Turn | None:
        """Return the newest undelivered turn that answers the very same request, and count the turn as
        delivered."""
        undelivered_turns = [
            row.last for row in self.rows if row.undelivered and not row.busy and row.request == request
        ]
        turn = max(undelivered_turns, key=lambda turn: turn.index, default=None)
        if turn is not None:
            self._change_row(turn.row, undelivered=False, attempt=attempt)
        return turn

    def _unread_turn(self, request: AgentRequest, attempt: int) -> Turn | None:
        """Return a turn that an earlier try of the very same request got, and that no request continues: the
        newest turn of the latest try. The turn belongs to this try from now on. None if the previous try got
        no turn: this try goes on with the placement of the previous try. (Equal requests may be under way
        side by side, each with its own tries.)"""
        if any(
            abandoned.request == request and abandoned.attempt == attempt - 1
            for abandoned in self._abandoned_placements
        ):
            return None

        answered_rows = [
            row
            for row in self.rows
            if row.attempt < attempt and not row.busy and not row.read and row.request == request
        ]
        row = max(answered_rows, key=lambda row: (row.attempt, row.last.index), default=None)
        if row is None:
            return None

        self._change_row(row.last.row, attempt=attempt)
        return row.last

    # -- finding the row -----------------------------------------------------------------------------

    def _find_placement(self, request: AgentRequest, is_side: bool) -> Placement | Refusal:
        limits = self._rules.config
        chat = self._rules.chat
        # A copy: `pending_rendering` calls this in a thread, while the event loop adds placements.
        all_pending = list(self._pending_placements.values())
        pending_placements = [placement for placement in all_pending if placement.untrained == is_side]
        turn_count = sum(turn.untrained == is_side for turn in self.turns)
        if turn_count + len(pending_placements) >= limits.max_turns:
            return limit_reached(EpisodeEnd.MAX_TURNS, "turns", limits.max_turns)
        if request.prompt is not None:
            return self._find_text_placement(request, request.prompt, pending_placements, is_side)

        row_number = self._find_extended_row(request, is_side)
        if row_number is not None:
            extended_row = self.rows[row_number]
            new_messages = request.messages[len(extended_row.messages) :]
            if refusal := self._too_long(new_messages, len(extended_row.ids)):
                return refusal

            delta_ids = self._delta_ids(extended_row.messages, extended_row.ids, new_messages, request.tools)
            if delta_ids is not None:
                messages = extended_row.messages + new_messages
                return self._make_placement(request, row_number, delta_ids, messages, is_side)

        if refusal := self._too_many_rows(pending_placements, is_side):
            return refusal

        # Begin a row. Messages that some row already has are written as the model wrote them.
        matching_prefixes = [
            row.messages[: count_common(row.messages, request.messages)] for row in self.rows
        ]
        longest_prefix = max(matching_prefixes, key=len, default=())
        messages = longest_prefix + request.messages[len(longest_prefix) :]
        if refusal := self._too_long(messages[len(longest_prefix) :], 0, sum(map(len, request.tools))):
            return refusal

        prompt_ids = self._cached_ids(chat.prompt_ids, chat.fold(messages, True), request.tools)
        return self._make_placement(request, None, prompt_ids, messages, is_side)

    def pending_rendering(self, request: AgentRequest) -> Callable[[], object] | None:
        """Return the tokenising that `find_answers` would do, if tokenising may take long: a function to be
        called, in any thread, before `find_answers`. The function changes nothing."""
        is_side = self._is_untrained(request)
        row_number = None if request.prompt is not None else self._find_extended_row(request, is_side)
        row_messages, row_ids = self._messages_and_ids(row_number)
        new_messages = request.messages[len(row_messages) :]

        tool_characters = sum(map(len, request.tools))
        is_quick = is_short(new_messages, 0 if row_ids else tool_characters)
        if is_quick and row_ids and not is_short((*row_messages, *new_messages), tool_characters):
            # The complete conversation is rendered if the template reads the history or rewrites the row.
            is_quick = (
                not self._rules.chat.depends_on_history(self._rules.chat.fold(new_messages, False))
                and self._delta_ids(row_messages, row_ids, new_messages, request.tools) is not None
            )

        return None if is_quick else lambda: self._find_placement(request, is_side)

    def _delta_ids(
        self,
        row_messages: tuple[Message, ...],
        row_ids: tuple[int, ...],
        new_messages: tuple[Message, ...],
        tools: tuple[str, ...],
    ) -> tuple[int, ...] | None:
        """Return the tokens with which new messages extend a row; None if the template rewrites the row."""
        chat = self._rules.chat
        written_messages = chat.fold(row_messages, True)
        answer = chat.fold(new_messages, False)
        delta_ids: tuple[int, ...] | None = self._cached_ids(
            chat.delta_ids, answer, row_ids[-1], written_messages, tools
        )
        return delta_ids

    def _find_text_placement(
        self,
        request: AgentRequest,
        prompt: TextPrompt,
        pending_placements: Sequence[Placement],
        is_side: bool,
    ) -> Placement | Refusal:
        chat = self._rules.chat
        if isinstance(prompt, str):
            prompt = chat.plain_text(prompt)

        row_number, continuation = self._text_rows.find_continued_row(
            prompt, self._free_rows(request, is_side)
        )
        row_messages, row_ids = self._messages_and_ids(row_number)
        if row_number is None and (refusal := self._too_many_rows(pending_placements, is_side)):
            return refusal

        if isinstance(continuation, str):
            if refusal := self._too_long((Message("user", continuation),), len(row_ids)):
                return refusal
            context = self._cached_ids(chat.text_ids, continuation, row_number is None)
        elif continuation and max(continuation) >= chat.vocabulary:
            highest_id = max(continuation)
            raise ConfigError(
                f"the prompt contains the token ID {highest_id}, but the tokenizer has "
                f"{chat.vocabulary} tokens"
            )
        else:
            context = continuation

        placeholders = () if chat.image_layout is None else chat.image_layout.placeholders
        if any(placeholder in context for placeholder in placeholders):
            raise ConfigError(
                "the prompt contains the token ID of an image or a video; remove the ID, or send the "
                "image in a message"
            )

        return self._make_placement(request, row_number, context, row_messages + request.messages, is_side)

    def _too_many_rows(self, pending_placements: Sequence[Placement], is_side: bool) -> Refusal | None:
        new_rows = sum(placement.row is None for placement in pending_placements)
        if sum(row.untrained == is_side for row in self.rows) + new_rows >= self._rules.config.max_rows:
            return limit_reached(EpisodeEnd.MAX_ROWS, "rows", self._rules.config.max_rows)
        return None

    def _make_placement(
        self,
        request: AgentRequest,
        row_number: int | None,
        context: tuple[int, ...],
        messages: tuple[Message, ...],
        is_side: bool,
    ) -> Placement | Refusal:
        """Return the placement with a token limit, or a refusal because the row is full. A request whose
        client left, and that comes again, goes on with the tokens already sampled of the turn."""
        limits = self._rules.config
        if row_number is None:
            session = next(
                (left.session for left in self._abandoned_placements if left.request == request),
                self._next_session,
            )
        else:
            session = self.rows[row_number].session

        prompt_ids = self._messages_and_ids(row_number)[1] + context
        free_tokens = limits.max_tokens - len(prompt_ids)
        if free_tokens < 1:
            explanation = f"the messages have {len(prompt_ids)} tokens"
            return row_is_full(limits.max_tokens, len(prompt_ids), explanation)

        max_new_tokens = min(free_tokens, limits.max_new_tokens)
        if request.max_new_tokens is not None:
            max_new_tokens = min(max_new_tokens, request.max_new_tokens)

        return Placement(request, session, row_number, prompt_ids, context, max_new_tokens, messages, is_side)

    def _too_long(
        self, new_messages: Sequence[Message], row_tokens: int, characters: int = 0
    ) -> Refusal | None:
        """Refuse text that cannot fit a row after so many tokens. The text is not tokenised to find out:
        tokenising would hold up all episodes of the worker. A message is a token at least."""
        max_tokens = self._rules.config.max_tokens
        characters += sum(map(characters_of, new_messages))
        if characters <= CHARACTERS_PER_TOKEN * (max_tokens - row_tokens):
            return None
        explanation = f"{characters} new characters do not fit"
        return row_is_full(max_tokens, row_tokens + characters // 4, explanation)

    def _find_extended_row(self, request: AgentRequest, is_side: bool) -> int | None:
        """Return the number of the free row that the request extends: the longest row, and of equally long
        rows the first."""
        extended_rows: list[int] = []
        for row_number, row in self._free_rows(request, is_side):
            new_messages = request.messages[len(row.messages) :]
            if (
                row.request.tools == request.tools
                and row.last.generation.stop is not StopReason.LENGTH  # a cut message is not extended
                and not self._rules.chat.is_placeholder(row.ids[-1])  # nor a message with a token of images
                and new_messages
                and all(message.role in ANSWERING_ROLES for message in new_messages)
                and count_common(row.messages, request.messages) == len(row.messages)
            ):
                extended_rows.append(row_number)

        return max(extended_rows, key=lambda row_number: len(self.rows[row_number].messages), default=None)

    def _free_rows(self, request: AgentRequest, is_side: bool) -> Iterator[tuple[int, TokenRow]]:
        """Yield the rows, with row numbers, that a request may extend: side requests extend only rows of side
        requests, and other requests only other rows; where rows are kept apart, only rows of the same
        agent."""
        for row_number, row in enumerate(self.rows):
            same_agent = row.request.agent == request.agent or not self._rules.rows_apart
            if not row.busy and row.untrained == is_side and same_agent:
                yield row_number, row

    def _read_message(self, request: AgentRequest, turn: Turn, with_stop_text: bool = False) -> Message:
        """Return the model's message; `with_stop_text`: with the stop text that ended the turn."""
        stops = () if with_stop_text else request.stops
        if self._newest_message is not None:
            parsed_turn, parsed_stops, message = self._newest_message
            if parsed_turn is turn and parsed_stops == stops:
                return message

        if request.prompt is not None:
            message = Message("assistant", text_before(self._rules.chat.decode(turn.generation.ids), stops))
        else:
            parsed = read_turn(self._rules, turn, request.tools, stops)
            message = turn_message(self._rules, turn, parsed, stops)

        self._newest_message = turn, stops, message
        return message

    def _row_number(self, placement: Placement) -> int:
        return len(self.rows) if placement.row is None else placement.row

    def _messages_and_ids(self, row_number: int | None) -> tuple[tuple[Message, ...], tuple[int, ...]]:
        """Return the messages and the ids of a row. None: a new row, where both are empty."""
        if row_number is None:
            return (), ()
        return self.rows[row_number].messages, self.rows[row_number].ids

    def _change_row(self, row_number: int, **changes: int) -> None:
        self.rows[row_number] = replace(self.rows[row_number], **changes)
