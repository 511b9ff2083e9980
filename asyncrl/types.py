"""The data types of the project that processes exchange and the store holds.

Units and alignment are stated once, here: token sequences are int32 ids, log-probs are natural logs in
float32, version spans are half-open ranges of token positions, durations are seconds.
"""

from __future__ import annotations

import enum
import json
import math
from typing import Annotated, Any, NamedTuple

import msgspec


class PolicyVersion(NamedTuple):
    """A published version: the optimizer step of the weights, and the trainer's epoch, which increases with
    each start of the trainer. Of two versions, the one with the later epoch is newer, then the one with the
    later step: (1, 8) < (2, 5). Steps may skip numbers, because not every step is published."""

    epoch: int
    step: int

    @property
    def label(self) -> str:
        """Return the name of the version on a server, which labels sampled tokens with it."""
        return f"e{self.epoch}-v{self.step}"


NO_VERSION = PolicyVersion(0, 0)  # nothing published; a trainer's first epoch is 1
NO_STEP = -1  # the step of an episode or a group that no batch has taken; 0 is the policy before training


def start_version(step: int) -> int:
    """Return the policy version that a step starts from. Step N, from 1 on, leads from version N-1 to N."""
    return step - 1


class StopReason(enum.StrEnum):
    """The reason why one generation ended."""

    STOP = "stop"  # the model wrote a stop id
    TEXT = "text"  # the stop check ended the turn: the model wrote a stop text of the agent
    LENGTH = "length"  # the token budget ran out
    ABORT = "abort"  # the engine got an abort request


class EpisodeEnd(enum.StrEnum):
    """The reason why an episode ended. Endings caused by the policy are rewarded; episodes with other endings
    are not trained."""

    ANSWERED = "answered"  # a turn without tool calls, and no environment to reply
    DONE = "done"  # the environment or the agent program ended the episode
    LENGTH = "length"  # token budget of the turn or the row
    MAX_TURNS = "max_turns"
    MAX_CALLS = "max_calls"  # more tool calls than an episode may make
    MAX_ROWS = "max_rows"  # the history was rewritten too often
    BAD_CALLS = "bad_calls"  # too many malformed tool calls in a row
    IMAGE_TOKEN = "image_token"  # the model wrote the token that stands for an image
    TIMEOUT = "timeout"  # the episode's wall-clock limit, after at least one turn

    @property
    def truncated(self) -> bool:
        return self not in (
            EpisodeEnd.ANSWERED,
            EpisodeEnd.DONE,
            EpisodeEnd.BAD_CALLS,
            EpisodeEnd.IMAGE_TOKEN,
        )


class FailReason(enum.StrEnum):
    """Says why an episode has no trajectory. The policy is never the cause."""

    REWARD_ERROR = "reward_error"
    ENGINE_ERROR = "engine_error"
    EPISODE_ERROR = "episode_error"
    SETUP_FAILED = "setup_failed"  # the sandbox of a task, or of its tests, could not be made
    TOOL_ERROR = "tool_error"  # a tool could not be opened
    ENVIRONMENT_ERROR = "environment_error"
    AGENT_ERROR = "agent_error"  # the agent program failed
    TESTS_FAILED_TO_RUN = "tests_failed_to_run"  # not even on the task's untouched image
    MISALIGNED = "misaligned"  # a prompt did not extend the earlier tokens
    PROMPT_TOO_LONG = "prompt_too_long"
    IMAGE_LOST = "image_lost"  # a stored image cannot be read any more: the episode starts again
    DEADLINE = "deadline"  # the episode's wall-clock limit, before the end of the first turn
    # Losses, which do not count as retries (rollout.retries):
    WORKER_LOST = "worker_lost"
    # No server took the turn in time, or a server had weights that were never pushed.
    ENGINE_LOST = "engine_lost"
    NOT_REPEATED = "not_repeated"  # recorded turns could not be continued: the episode starts again


class DropReason(enum.StrEnum):
    """Says why a finished trajectory, or a whole group, was not trained."""

    STALE = "stale"
    GROUP_SHORT = "group_short"
    CORRUPT = "corrupt"  # turns or images cannot be read
    END_OF_DATA = "end_of_data"
    SPIKE = "spike"  # the batch was left out: trainer.on_spike


class FilterReason(enum.StrEnum):
    """Says why a usable group was left out by choice of the algorithm."""

    ZERO_VARIANCE = "zero_variance"
    BASELINE = "baseline"  # the group's greedy episode: a part of the baseline, never trained


MALFORMED_CALL = "malformed_call"  # the name in tool messages that report malformed calls


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of the model, parsed. `arguments` is a JSON object, as text."""

    name: str
    arguments: str
    id: str = ""

    def openai(self) -> dict[str, Any]:
        """Return the call as OpenAI's JSON."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


IMAGE_MARK = "\ufffc"  # the place of an image in a message's content: Unicode's object replacement character


class ImageRef(msgspec.Struct, frozen=True, array_like=True):
    """An image that a model reads, in the size in which it is stored and read: pixels. `digest`: of the file,
    29 hexadecimal digits, as image ids spell them (vision/image_ids.py)."""

    digest: str
    height: int
    width: int


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat message in OpenAI's format. `reasoning`: the text that a thinking model wrote before the
    content. `images`: the content of a message with images has an IMAGE_MARK in the place of each, in
    order."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""
    images: tuple[ImageRef, ...] = ()

    def openai(self) -> dict[str, Any]:
        """Return the message as OpenAI's JSON, without empty parts; servers use the key `reasoning_content`
        for the reasoning. An image is a part {"type": "image", "image": digest}."""
        message_json: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.images:
            message_json["content"] = self.content_parts()
        if self.reasoning:
            message_json["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message_json["tool_calls"] = [call.openai() for call in self.tool_calls]
        if self.tool_call_id:
            message_json["tool_call_id"] = self.tool_call_id
        if self.name:
            message_json["name"] = self.name

        return message_json

    def content_parts(self) -> list[dict[str, str]]:
        """Return the content as a list of texts and images."""
        texts = self.content.split(IMAGE_MARK)
        parts: list[dict[str, str]] = []
        for text, image in zip(texts, (*self.images, None), strict=True):
            if text:
                parts.append({"type": "text", "text": text})
            if image is not None:
                parts.append({"type": "image", "image": image.digest})
        return parts


class ToolReply(msgspec.Struct, frozen=True):
    """The result of a call. `error` names the failure, and the place in users' code; the model reads the
    content, the `reward` falls on the turn that made the call. `refused`: nothing was run, the call was
    wrong. `declined`: the error is the tool's own answer, a ToolError. `images`: as in a Message."""

    call: ToolCall
    content: str
    error: str | None = None
    seconds: float = 0.0
    reward: float = 0.0
    refused: bool = False
    declined: bool = False
    images: tuple[ImageRef, ...] = ()

    @property
    def failed(self) -> bool:
        return self.error is not None and not self.refused and not self.declined


def readable_content(message: Message | ToolReply) -> str:
    """Return the content as people read it, with [image WIDTHxHEIGHT] in the place of each image."""
    if not message.images:
        return message.content

    first_text, *texts = message.content.split(IMAGE_MARK)
    images = zip(message.images, texts, strict=True)
    return first_text + "".join(f"[image {image.width}x{image.height}]{text}" for image, text in images)


class Observation(msgspec.Struct, frozen=True):
    """The reply of an environment, or of a simulated user, to a turn of the model. `reward` is the reward of
    that turn; `done`: the episode ends, and the messages are not used."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    seconds: float = 0.0


class Sample(msgspec.Struct, frozen=True):
    """A sample of the data, in verl's layout. Stores and messages hold `ground_truth` and `extra_info` as
    JSON text, so that all processes read the same values. In a demonstration, `prompt` is the whole
    conversation, whose first `given` messages are not trained on. If `given` is None, the sample is a
    prompt."""

    row: int
    data_source: str
    prompt: tuple[Message, ...]
    ground_truth_json: str = msgspec.field(name="ground_truth")
    ability: str = ""
    extra_info_json: str = msgspec.field(name="extra_info", default="{}")
    given: int | None = None

    @property
    def ground_truth(self) -> Any:
        """Return the ground truth, decoded again for each call: changes to the value do not affect other
        episodes."""
        return json.loads(self.ground_truth_json)

    @property
    def extra_info(self) -> dict[str, Any]:
        """Return the additional columns of the sample, decoded again for each call: changes to the value do
        not affect other episodes."""
        return dict(json.loads(self.extra_info_json))

    @property
    def columns(self) -> dict[str, Any]:
        """Return the values by name, as TRL passes the columns of a row: the entries of `extra_info`,
        data_source, ground_truth, and prompt as messages in OpenAI's format."""
        return {
            **self.extra_info,
            "data_source": self.data_source,
            "ground_truth": self.ground_truth,
            "prompt": [message.openai() for message in self.prompt],
        }

    @property
    def demonstration(self) -> bool:
        return self.given is not None


Token = Annotated[int, msgspec.Meta(ge=0)]


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) were sampled by policy `version`.

    `kv_version` is the oldest version that wrote any key or value that these tokens attended to: if it
    differs from `version`, no single policy reproduces the log-probs. -1: unknown; `version` is then a lower
    bound.
    """

    start: int
    end: int
    version: int
    kv_version: int


class Routes(msgspec.Struct, frozen=True, array_like=True):
    """The experts that a server's routers chose for tokens [start, start + tokens) of a row: in `data` as
    little-endian uint16 [tokens, layers, k]. The last token of a row has no experts: no layer has read that
    token yet."""

    start: int
    tokens: int
    data: bytes

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def until(self, end: int) -> Routes | None:
        """Return the routes of the tokens before `end`; None without such tokens."""
        token_count = min(self.tokens, end - self.start)
        bytes_per_token = len(self.data) // self.tokens
        if token_count <= 0:
            return None
        return Routes(self.start, token_count, self.data[: token_count * bytes_per_token])


class TokenScores(msgspec.Struct, frozen=True):
    """The scores of a frozen model (`scorers`) for a turn's model tokens: log-probs, at the temperature of
    the rollout. `ids`: the k likeliest tokens at each of these positions, `top`: the log-probs of the
    likeliest tokens; empty: not asked for. Little-endian float32 [T], int32 [T, k], float32 [T, k]."""

    logprobs: bytes
    ids: bytes = b""
    top: bytes = b""


class Generation(msgspec.Struct, frozen=True):
    """The answer of an engine to a request. Spans are relative to `ids`. `routes`: if asked for. `scores`:
    added by a scorer."""

    ids: tuple[Token, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    stop: StopReason
    seconds: float = 0.0
    routes: Routes | None = None
    scores: TokenScores | None = None


class Turn(msgspec.Struct, frozen=True):
    """An engine call and the replies: the replies of the tools, then the environment's observation.

    An episode is a single row of tokens, or several rows where the history was rewritten or branched. The
    tokens of a row are, turn by turn, `context` (written by the template) followed by `generation.ids`
    (written by the model); a turn that begins a row has the whole prompt as context.

    `replies`, `observation`: empty in the trainer, which gets the frames of turns without those of replies
    (`Ledger.read_turns`).

    `generation`: the engine's answer. The answer's `routes` are of the row's tokens up to here without routes
    in an earlier turn; its `scores` are by the scorer of the data source, and absent in validation. `agent`:
    the sender of the request, by the `model` of the request, where an agent program leads the episode.
    `untrained`: the turn answers a side request of the agent (`rollout.untrained_agents`), and counts in no
    loss, baseline or normaliser. `taught`: the teacher's prompt in place of the context of a turn that begins
    a row (`kl.prompt`).
    """

    index: int
    context: tuple[Token, ...]
    generation: Generation
    replies: tuple[ToolReply, ...] = ()
    row: int = 0
    observation: Observation | None = None
    agent: str = ""
    untrained: bool = False
    taught: tuple[Token, ...] = ()


class TurnReply(msgspec.Struct, frozen=True):
    """The replies to a turn, recorded after the turn in a separate frame."""

    replies: tuple[ToolReply, ...] = ()
    observation: Observation | None = None


MAX_VOCABULARY = 1 << 31  # token ids are int32
# A larger reward is an error: gradients would not be finite, and every step would be skipped.
MAX_REWARD = 1e6


class RewardResult(msgspec.Struct, frozen=True):
    """The result of a reward function for an episode. All numbers are finite.

    `score` is the reward of the last turn, `turns` (empty, or one number per turn) adds to each turn.
    `components`: named parts, for advantages that weight parts. `shaping`: the term that `algorithm.shaping`
    adds to the last turn. `notes`: additional texts for transcripts, such as the answer that the function
    read. `agents`: the reward of each agent of the episode, on the agent's last turn; every agent then also
    gets the score.
    """

    score: float
    turns: tuple[float, ...] = ()
    components: dict[str, float] = {}
    shaping: float = 0.0
    notes: dict[str, str] = {}
    agents: dict[str, float] = {}


class EpisodeResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The reward and the end of an episode. The result is passed on unchanged inside other structs: from the
    episode to the worker's last record, into the buffer and the store, and to the trainer as a part of the
    baseline.

    `reward` is the total; `turn_rewards`: the parts of the turns, whose sum is the total (empty: the last
    turn has the total); `components` are named parts, as reported by the reward function. `tokens` counts
    model tokens. `shaping`: the part of `reward` that `algorithm.shaping` added.

    If agents have separate rewards, `agents` is the agent of each turn, and `turn_tokens` the model tokens of
    each turn. The reward is then the sum over agents, 0 in a zero-sum game: baselines compare the parts,
    `of(agent)`.
    """

    reward: float
    tokens: int = 0
    turn_rewards: tuple[float, ...] = ()
    components: dict[str, float] = {}
    shaping: float = 0.0
    end: EpisodeEnd = EpisodeEnd.ANSWERED
    agents: tuple[str, ...] = ()
    turn_tokens: tuple[int, ...] = ()

    @property
    def agent_results(self) -> dict[str, EpisodeResult]:
        """Return `of` for each agent with a separate reward, in the order of the agents' first turns."""
        return {agent: self.of(agent) for agent in dict.fromkeys(self.agents)}

    def of(self, agent: str) -> EpisodeResult:
        """Return the result of an agent's turns, as if these turns were the whole episode."""
        own_turns = [turn for turn, turn_agent in enumerate(self.agents) if turn_agent == agent]
        rewards = tuple(self.turn_rewards[turn] for turn in own_turns)
        return EpisodeResult(
            reward=math.fsum(rewards),
            tokens=sum(self.turn_tokens[turn] for turn in own_turns),
            turn_rewards=rewards,
            components=self.components,
            shaping=self.shaping if self.agents[-1] == agent else 0.0,  # shaping falls on the last turn
            end=self.end,
        )

    @property
    def score(self) -> float:
        """Return the reward before shaping."""
        return self.reward - self.shaping

    @property
    def judged(self) -> float:
        """Return the number that `validation.success` judges: the component `acc`, as in verl, or otherwise
        the score."""
        return self.components.get("acc", self.score)

    @property
    def problem(self) -> str:
        """Name a number that makes the result unusable: not finite or beyond MAX_REWARD; '' if none does."""
        checked_numbers = {"the reward": self.reward, "its shaping": self.shaping}
        checked_numbers |= {
            f"the reward of turn {turn}": value for turn, value in enumerate(self.turn_rewards)
        }
        checked_numbers |= {
            f"component {name!r} of the reward": value for name, value in self.components.items()
        }
        bad_numbers = [
            f"{name} is {value:g}" for name, value in checked_numbers.items() if not abs(value) <= MAX_REWARD
        ]

        return f"{bad_numbers[0]}; it must be within ±{MAX_REWARD:g}" if bad_numbers else ""

    def misfit_text(self, turns: int, tokens: int) -> str:
        """Return why this cannot be the result of an episode of `turns` turns and at most `tokens` tokens; ''
        if it can."""
        list_lengths = [len(self.turn_rewards), len(self.agents), len(self.turn_tokens)]
        if any(length not in (0, turns) for length in list_lengths):
            return f"the per-turn lists have {list_lengths} entries, but the episode has {turns} turns"
        if not all(0 <= count <= tokens for count in (self.tokens, *self.turn_tokens)):
            counts = f"the result has {self.tokens} model tokens ({list(self.turn_tokens)} by turn)"
            return f"{counts}, but at most {tokens} tokens are possible"
        if self.agents and not (self.turn_rewards and self.turn_tokens):
            return "the result names agents, but has no rewards or no tokens for their turns"

        return ""


class EpisodeStats(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Size and duration of a finished episode. `tool_s`: seconds in tools and the environment; `reward_s`: in
    the reward. `longest_row`: tokens; `prompt`: tokens of the first row before the first sampled token. Of
    the `answered` tool calls, `failed` raised or ran out of time, `declined` got a ToolError for an answer,
    and `refused` were malformed. `system_folded`: system messages that the chat template got under another
    role. `repeated`: model tokens, see `conversation.turns.count_repeated`. All figures are of trained turns,
    except `untrained_turns`."""

    turns: int
    tool_calls: int = 0
    rows: int = 1
    longest_row: int = 0
    prompt: int = 0
    seconds: float = 0.0
    tool_s: float = 0.0
    reward_s: float = 0.0
    answered: int = 0
    failed: int = 0
    refused: int = 0
    system_folded: int = 0
    untrained_turns: int = 0
    declined: int = 0
    repeated: int = 0

    def misfit_text(self, tokens: int) -> str:
        """Return why these cannot be figures of an episode of no more than `tokens` tokens; '' if they
        can."""
        figures = msgspec.structs.asdict(self)
        upper_bounds = dict.fromkeys(figures, 1 << 53) | {"longest_row": tokens, "prompt": tokens}
        bad_figures = [
            f"{name} is {value:g}" for name, value in figures.items() if not 0 <= value <= upper_bounds[name]
        ]
        return bad_figures[0] if bad_figures else ""
