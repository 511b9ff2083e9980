"""Reads the episodes of a run's store: a page of those that fit a filter, the members of a group, and one
episode token by token, with what training made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.buffer.staleness import lag
from asyncrl.config import RunConfig, texts
from asyncrl.conversation.watch import GrowingText
from asyncrl.data import Samples, samples_path
from asyncrl.episodes.recorded import kept_turns
from asyncrl.errors import AsyncrlError, ConfigError, one_line
from asyncrl.observe.transcripts import TokenRatios, read_ratios
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StoreError
from asyncrl.types import Sample, Turn, TurnReply

if TYPE_CHECKING:
    from asyncrl.trainer.batch import Example

PAGE = 100  # episodes
LOOKED_AT = 5000  # episodes of which one search for a tool reads the replies
LAST = 1 << 60
Number = Annotated[int, msgspec.Meta(ge=0, le=LAST)]  # SQLite has no larger ones


class Earned(msgspec.Struct, gc=False):
    """The part of an EpisodeResult that the list needs."""

    reward: float
    tokens: int = 0
    end: str = "answered"


class Size(msgspec.Struct, gc=False):
    """The part of an EpisodeStats that the list needs."""

    turns: int
    tool_calls: int = 0
    seconds: float = 0.0
    failed: int = 0


class Listed(msgspec.Struct, gc=False):
    """The part of an EpisodeRecord that the list shows. `step`: 0-based, -1: it was not taken."""

    uid: str
    group: int
    member: int
    state: State
    reason: str
    turns: int
    oldest: int
    newest: int
    step: int
    greedy: bool
    result: Earned
    stats: Size


def lag_of(episode: Listed) -> int | None:
    """The largest lag of its tokens, where a batch took it."""
    if episode.step < 0 or episode.oldest < 0:
        return None
    return max(lag(episode.step, version) for version in (episode.oldest, episode.newest))


ORDERS: dict[str, Callable[[Listed], Any]] = {
    "newest": lambda e: (-e.group, e.member),
    "reward": lambda e: e.result.reward,
    "-reward": lambda e: -e.result.reward,
    "length": lambda e: e.result.tokens,
    "-length": lambda e: -e.result.tokens,
    "-lag": lambda e: 1 if (oldest := lag_of(e)) is None else -oldest,
}


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chooses from a list; the defaults let all through. Steps are counted from 1, lengths are model
    tokens; `tool`: its name, as the model called it."""

    state: str = ""
    reason: str = ""
    end: str = ""
    group: Number | None = None
    tool: str = ""
    step_from: Number | None = None
    step_to: Number | None = None
    reward_from: float = -math.inf
    reward_to: float = math.inf
    length_from: Number = 0
    length_to: Number = LAST
    order: str = "newest"
    start: Number = 0

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """Read it from the parameters of an address; empty ones do not count. ConfigError."""
        try:
            found = msgspec.convert({k: v for k, v in query.items() if v}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"episodes: {error}; correct the address") from None
        if found.order not in ORDERS:
            raise ConfigError(f"episodes: order is one of {', '.join(ORDERS)}")
        return found


def page(reader: RunReader, wanted: Filter) -> dict[str, Any]:
    """Return the PAGE episodes from `start` on, and how many fit (`total`). A tool filter reads replies of at
    most LOOKED_AT matching episodes; `searched` is how many were read."""
    bounded = wanted.step_from is not None or wanted.step_to is not None
    steps = ((wanted.step_from or 1) - 1, (wanted.step_to or LAST) - 1)
    rewarded = (wanted.reward_from, wanted.reward_to) != (-math.inf, math.inf)
    found = reader.select(
        Listed,
        state=wanted.state or None,
        reason=wanted.reason or None,
        group=wanted.group,
        steps=steps if bounded else None,
        rewards=(wanted.reward_from, wanted.reward_to) if rewarded else None,
    )
    long = (e for e in found if wanted.length_from <= e.result.tokens <= wanted.length_to)
    ended = (e for e in long if not wanted.end or (e.stats.turns > 0 and e.result.end == wanted.end))
    fitting = sorted(ended, key=ORDERS[wanted.order])
    searched = None
    if wanted.tool:
        searched = min(len(fitting), LOOKED_AT)
        fitting = [e for e in fitting[:LOOKED_AT] if e.stats.tool_calls and wanted.tool in tools(reader, e)]
    rows = [shown(e) for e in islice(fitting, wanted.start, wanted.start + PAGE)]
    return {"episodes": rows, "total": len(fitting), "start": wanted.start, "searched": searched}


def tools(reader: RunReader, episode: Listed) -> set[str]:
    """Return the names of the tools that an episode called, as far as its replies are kept."""
    try:
        frames = list(reader.frames(episode.uid, episode.turns, ("replied",)))
    except StoreError:  # deleted since the index was read
        return set()
    replies = (msgspec.msgpack.decode(frame, type=TurnReply).replies for frame in frames if frame)
    return {reply.call.name for some in replies for reply in some}


def shown(episode: Listed) -> dict[str, Any]:
    """A row of the list."""
    landed, taken = episode.stats.turns > 0, episode.step >= 0
    return {
        "uid": episode.uid,
        "group": episode.group,
        "member": episode.member,
        "state": episode.state,
        "reason": episode.reason,
        "step": episode.step + 1 if taken else None,
        "reward": episode.result.reward if landed else None,
        "end": episode.result.end if landed else "",
        "tokens": episode.result.tokens,
        "turns": episode.turns,
        "calls": episode.stats.tool_calls,
        "failed_calls": episode.stats.failed,
        "seconds": episode.stats.seconds,
        "lag": lag_of(episode),
        "greedy": episode.greedy,
    }


LARGEST = 20.0  # nats
Decode = Callable[[Sequence[int]], str]


def decoder(model: str) -> Decode:
    """The text of ids, by the tokenizer of a model directory; takes a second or two. ConfigError."""
    from asyncrl.conversation.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda ids: tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; of several tokens that are one character the last one has it."""
    growing, read, found = GrowingText(decode), list[int](), list[str]()
    for token in ids:
        read.append(token)
        before = len(growing.text)
        growing.grow(read)
        found.append(growing.text[before:])
    return found


def transcript(
    run_dir: Path, config: RunConfig, reader: RunReader, uid: str, decode: Decode
) -> dict[str, Any]:
    """Return an episode as JSON. `turns` are those that are kept; `missing` says why there are fewer than the
    episode had, `no_advantage` why there are none. StoreError, ConfigError."""
    episode = reader.episode(uid)
    sample: Sample = Samples.open(samples_path(run_dir, "train"))[reader.group(episode.group).sample]
    turns, missing = kept_turns(reader, episode)
    seen, why = (None, missing) if missing else _as_trained(config, reader, episode, turns)
    known = read_ratios(run_dir, episode.step + 1, uid) if episode.step >= 0 else None
    return {
        **msgspec.to_builtins(episode),
        "step": episode.step + 1 if episode.step >= 0 else None,
        "landed": episode.stats.turns > 0,
        "bound": config.buffer.max_staleness,
        "sample": {
            "row": sample.row,
            "source": sample.data_source,
            "prompt": [message.openai() for message in sample.prompt],
            "truth": sample.ground_truth,
        },
        "turns": list(_turns(turns, decode, seen, known, episode.step >= 0)),
        "missing": missing,
        "no_advantage": why,
    }


def _as_trained(
    config: RunConfig, reader: RunReader, episode: EpisodeRecord, turns: Sequence[Turn]
) -> tuple[Example | None, str]:
    """Compute the advantages of an episode that landed, by the trainer's own code; or say why it has none.
    Functions that the configuration names are code of the run's: it is not run here."""
    if not turns or not episode.stats.turns:
        return None, "it has not landed"
    if any(":" in text for text in texts(msgspec.to_builtins(config.algorithm))):
        return None, "algorithm names a function of the user's, which a viewer does not run"
    from asyncrl.algorithms.recipe import compose
    from asyncrl.trainer.retrain import credited

    try:
        baseline = reader.baseline(episode.group)
        if episode.greedy or not baseline.results:
            return None, "it is compared with nothing: " + (
                "it is the greedy one" if episode.greedy else "its group is not settled"
            )
        found = credited(config, compose(config), episode, baseline, turns)
    except (AsyncrlError, ValueError) as error:
        return None, one_line(error)
    return found, "" if found.advantage is not None else "the advantage reads what models compute"


def _turns(
    turns: Sequence[Turn], decode: Decode, seen: Example | None, known: TokenRatios | None, taken: bool
) -> Iterator[dict[str, Any]]:
    """Per-token lists are aligned with `ids`, or empty where a turn is not trained; None: not known. `ratios`
    are pi/mu; they and `dropped` may be shorter."""
    start = 0
    for turn in turns:
        own = slice(start, start := start + (0 if turn.untrained else len(turn.ids)))
        spans = [(span.version, span.kv_version) for span in turn.spans for _ in range(span.start, span.end)]
        yield {
            "index": turn.index,
            "row": turn.row,
            "agent": f"{turn.agent} (not trained)" if turn.untrained else turn.agent,
            "stop": turn.stop,
            "seconds": turn.seconds,
            "context": {"ids": turn.context, "texts": token_texts(decode, turn.context)},
            "ids": turn.ids,
            "texts": token_texts(decode, turn.ids),
            "logprobs": turn.logprobs,
            "versions": [version for version, _ in spans],
            "kv_versions": [version for _, version in spans],
            "lags": seen.lag[own].tolist() if seen is not None and taken else None,
            "stale": seen.stale[own].tolist() if seen is not None and taken else None,
            "ratios": known and [None if x is None else exp(min(x, LARGEST)) for x in known.log_ratio[own]],
            "dropped": known and known.dropped[own],
            "rewards": seen.rewards[own].tolist() if seen is not None else None,
            "advantages": None if seen is None or seen.advantage is None else seen.advantage[own].tolist(),
            "replies": msgspec.to_builtins(turn.replies),
            "observation": msgspec.to_builtins(turn.observation),
        }
