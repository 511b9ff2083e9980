"""Reads the episodes of a run's store: a page of those that fit, the text of their transcripts, and one
episode token by token, with what training made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import exp
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.buffer.staleness import stale_mask, token_lags
from asyncrl.config import RunConfig
from asyncrl.conversation.watch import GrowingText
from asyncrl.data import Samples, samples_path
from asyncrl.episodes.recorded import kept_turns
from asyncrl.errors import AsyncrlError, ConfigError, one_line
from asyncrl.observe.files import read_lines
from asyncrl.observe.held_out import EVAL, HeldOut
from asyncrl.observe.transcripts import TokenRatios, read_ratios
from asyncrl.store.reader import RunReader
from asyncrl.types import Observation, Sample, Turn, TurnReply
from asyncrl.viewer.credit import refused

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
    episode had, `text` is what was kept then; `no_advantage` why there are none. StoreError, ConfigError."""
    episode, held_out = reader.episode(uid), uid.startswith(EVAL)
    samples = Samples.open(samples_path(run_dir, "test" if held_out else "train"))
    sample: Sample = samples[episode.group if held_out else reader.group(episode.group).sample]
    turns, missing = kept_turns(reader, episode)
    step = HeldOut.of(uid).step if held_out else episode.step + 1 if episode.step >= 0 else None
    known = read_ratios(run_dir, episode.step + 1, uid) if episode.step >= 0 else None
    return {
        **msgspec.to_builtins(episode),
        "step": step,
        "landed": episode.stats.turns > 0,
        "bound": config.buffer.max_staleness,
        "sample": {
            "row": sample.row,
            "source": sample.data_source,
            "prompt": [message.openai() for message in sample.prompt],
            "truth": sample.ground_truth,
        },
        "turns": list(_turns(turns, decode, known, episode.step, config.buffer.max_staleness)),
        "missing": missing,
        "text": _kept_text(run_dir, uid, step) if missing and step is not None else "",
        "no_advantage": missing or refused(config, reader, episode),
    }


def _kept_text(run_dir: Path, uid: str, step: int) -> str:
    """The text of an episode whose turns are gone, where one was kept; '' else."""
    kind = "validation" if uid.startswith(EVAL) else "training"
    with suppress(OSError):
        for entry in read_lines(run_dir / "transcripts" / kind / f"step-{step}.jsonl"):
            if entry.get("uid") == uid:
                return str(entry.get("text", ""))
    return ""


def _turns(
    turns: Sequence[Turn], decode: Decode, known: TokenRatios | None, step: int, bound: int
) -> Iterator[dict[str, Any]]:
    """Per-token lists are aligned with `ids`, or empty where a turn is not trained; None: not known. `ratios`
    are pi/mu; they and `dropped` may be shorter."""
    start = 0
    for turn in turns:
        own = slice(start, start := start + (0 if turn.untrained else len(turn.ids)))
        spans = [(span.version, span.kv_version) for span in turn.spans for _ in range(span.start, span.end)]
        lags = None if step < 0 else [] if turn.untrained else token_lags(turn.spans, step)
        yield {
            "index": turn.index,
            "row": turn.row,
            "agent": f"{turn.agent} (not trained)" if turn.untrained else turn.agent,
            "stop": turn.stop,
            "seconds": turn.seconds,
            "context": {"ids": turn.context, "text": decode(turn.context)},
            "ids": turn.ids,
            "texts": token_texts(decode, turn.ids),
            "logprobs": turn.logprobs,
            "versions": [version for version, _ in spans],
            "kv_versions": [version for _, version in spans],
            "lags": lags,
            "stale": lags and stale_mask(lags, bound),
            "ratios": known and [None if x is None else exp(min(x, LARGEST)) for x in known.log_ratio[own]],
            "dropped": known and known.dropped[own],
            "replies": msgspec.to_builtins(turn.replies),
            "observation": msgspec.to_builtins(turn.observation),
        }
