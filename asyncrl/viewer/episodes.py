"""Reads the episodes of a run's store: a page of those that fit, the text of their transcripts, and one
episode token by token, with what training made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.buffer.records import EpisodeRecord
from asyncrl.config import RunConfig, texts
from asyncrl.conversation.watch import GrowingText
from asyncrl.data import Samples, samples_path
from asyncrl.episodes.recorded import kept_turns
from asyncrl.errors import AsyncrlError, ConfigError, one_line
from asyncrl.observe.held_out import EVAL, HeldOut
from asyncrl.observe.transcripts import TokenRatios, read_ratios
from asyncrl.store.reader import RunReader
from asyncrl.types import Observation, Sample, Turn, TurnReply

if TYPE_CHECKING:
    from asyncrl.trainer.batch import Example

LARGEST = 20.0  # nats
SEARCH_SECONDS = 1.0  # that one search reads transcripts
MOST_FOUND = 500  # episodes of one search
Decode = Callable[[Sequence[int]], str]


class SampledIds(msgspec.Struct, gc=False):
    """The part of a Turn that a search reads."""

    ids: list[int]


def decoder(model: str) -> Decode:
    """The text of ids, by the tokenizer of a model directory. ConfigError."""
    from tokenizers import Tokenizer  # load_tokenizer has compared the run's with it

    path = Path(model) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # of tokenizers it is a bare Exception
        raise ConfigError(f"{path}: no usable tokenizer ({one_line(error)}); put the model's back") from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; of several tokens that are one character the last one has it."""
    growing, read, found = GrowingText(decode), list[int](), list[str]()
    for token in ids:
        read.append(token)
        before = len(growing.text)
        growing.grow(read)
        found.append(growing.text[before:])
    return found


def search(
    reader: RunReader, episodes: Sequence[tuple[str, int]], words: Sequence[str], decode: Decode | None
) -> tuple[list[str], int]:
    """Return those of the episodes (uid, turns) in whose transcripts all words are, and how many it could
    read within SEARCH_SECONDS, from the first one on."""
    found, wanted, ends = list[str](), [word.lower() for word in words], time.monotonic() + SEARCH_SECONDS
    for looked, (uid, turns) in enumerate(episodes):
        if time.monotonic() > ends or len(found) == MOST_FOUND:
            return found, looked
        with suppress(AsyncrlError):  # deleted since the index was read, or damaged
            text = "\n".join(_said(reader.frames(uid, turns), decode)).lower()
            if all(word in text for word in wanted):
                found.append(uid)
    return found, len(episodes)


def _said(frames: Iterator[bytes], decode: Decode | None) -> Iterator[str]:
    """What the model and the tools wrote, turn by turn: frames of turns and of what answered them."""
    for at, frame in enumerate(frames):
        if frame and at % 2:
            answered = msgspec.msgpack.decode(frame, type=TurnReply)
            yield from (reply.content for reply in answered.replies)
            yield from (said.content for said in (answered.observation or Observation()).messages)
        elif frame and decode is not None:
            yield decode(msgspec.msgpack.decode(frame, type=SampledIds).ids)


def transcript(
    run_dir: Path, config: RunConfig, reader: RunReader, uid: str, decode: Decode
) -> dict[str, Any]:
    """Return an episode as JSON. `turns` are those that are kept; `missing` says why there are fewer than the
    episode had, `no_advantage` why there are none. StoreError, ConfigError."""
    episode, held_out = reader.episode(uid), uid.startswith(EVAL)
    samples = Samples.open(samples_path(run_dir, "test" if held_out else "train"))
    sample: Sample = samples[episode.group if held_out else reader.group(episode.group).sample]
    turns, missing = kept_turns(reader, episode)
    seen, why = (None, missing) if missing else _as_trained(config, reader, episode, turns)
    known = read_ratios(run_dir, episode.step + 1, uid) if episode.step >= 0 else None
    return {
        **msgspec.to_builtins(episode),
        "step": HeldOut.of(uid).step if held_out else episode.step + 1 if episode.step >= 0 else None,
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

    if episode.uid.startswith(EVAL):
        return None, "it is held out: it is not trained"
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
