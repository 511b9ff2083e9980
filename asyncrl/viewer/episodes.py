"""Reads the episodes of a run's store: a page of matching episodes, the text of transcripts, and an episode
token by token, with the values from training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import asdict

from asyncrl.algorithms.advantages import advantages
from asyncrl.buffer.records import EpisodeRecord
from asyncrl.buffer.staleness import stale_mask, token_lags
from asyncrl.config import RunConfig
from asyncrl.conversation.watch import GrowingText
from asyncrl.data.run_images import RunImages
from asyncrl.episodes.recorded import rewards_and_advantages, stored_turns, turns_of
from asyncrl.errors import AsyncrlError, ConfigError, one_line, users_code
from asyncrl.observe.files import read_lines
from asyncrl.observe.held_out import UID_START
from asyncrl.observe.transcripts import read_ratios
from asyncrl.registry import name_and_options
from asyncrl.store.reader import RunReader
from asyncrl.types import NO_STEP, Message, Observation, ToolReply, Turn, readable_content, start_version
from asyncrl.vision.content import IMAGE_NOTE
from asyncrl.vision.files import data_url, is_image_file
from asyncrl.vision.image_ids import DIGEST_DIGITS, find_runs

MAX_LOG_RATIO = 20.0  # nats
SEARCH_SECONDS = 1.0  # time limit for reading transcripts in a search
MAX_MATCHES = 500  # episodes of a search
Decode = Callable[[Sequence[int]], str]


def load_decoder(model: str) -> Decode:
    """Return a function that decodes ids with the tokenizer of a model directory; an image becomes
    IMAGE_NOTE. Raises ConfigError."""
    from tokenizers import Tokenizer  # load_tokenizer has compared the run's tokenizer with this library's

    path = Path(model) / "tokenizer.json"
    try:
        with users_code():  # the library is in Rust, and panics
            tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a bare Exception
        raise ConfigError(
            f"{path}: no usable tokenizer ({one_line(error)}); restore the model's tokenizer files"
        ) from error

    def decode(ids: Sequence[int]) -> str:
        texts: list[str] = []
        text_start = 0
        for run in find_runs(ids):
            texts.append(tokenizer.decode(list(ids[text_start : run.start]), skip_special_tokens=False))
            text_start = run.end
        texts.append(tokenizer.decode(list(ids[text_start:]), skip_special_tokens=False))
        return IMAGE_NOTE.join(texts)

    return decode


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; of several tokens that form a character the last token has the text."""
    growing = GrowingText(decode)
    read_ids = list[int]()
    texts = list[str]()
    for token in ids:
        read_ids.append(token)
        text_length = len(growing.text)
        growing.read_new_ids(read_ids)
        texts.append(growing.text[text_length:])

    return texts


def search(
    reader: RunReader, episodes: Sequence[tuple[str, int]], search_words: Sequence[str], decode: Decode | None
) -> tuple[list[str], int]:
    """Return the uids of the episodes (uid, turns) whose transcripts contain all words, and how many episodes
    could be read within SEARCH_SECONDS, from the first on."""
    matching_uids = list[str]()
    lowered_words = [word.lower() for word in search_words]
    deadline = time.monotonic() + SEARCH_SECONDS
    for read_count, (uid, turns) in enumerate(episodes):
        if time.monotonic() > deadline or len(matching_uids) == MAX_MATCHES:
            return matching_uids, read_count
        with suppress(AsyncrlError):  # deleted since the index was read, or damaged
            text = "\n".join(_written_texts(turns_of(list(reader.turn_frames(uid, turns))), decode)).lower()
            if all(word in text for word in lowered_words):
                matching_uids.append(uid)

    return matching_uids, len(episodes)


def _written_texts(turns: Sequence[Turn], decode: Decode | None) -> Iterator[str]:
    """Yield everything that the model, the tools and the environment wrote, including calls and errors."""
    for turn in turns:
        if decode is not None:
            yield decode(turn.generation.ids)
        for reply in turn.replies:
            yield f"{reply.call.name} {reply.call.arguments}\n{readable_content(reply)}\n{reply.error or ''}"
        yield from (readable_content(message) for message in (turn.observation or Observation()).messages)


def masked_fraction(reader: RunReader, episode_row: Mapping[str, Any], max_staleness: int) -> float | None:
    """Return the fraction of an episode's trained tokens that are too old; None where the tokens are gone."""
    with suppress(AsyncrlError):
        turns = turns_of(list(reader.turn_frames(episode_row["uid"], episode_row["turns"])))
        spans = [span for turn in turns if not turn.untrained for span in turn.generation.spans]
        return fmean(stale_mask(token_lags(spans, start_version(episode_row["step"])), max_staleness))
    return None


def transcript(
    run_dir: Path, config: RunConfig, reader: RunReader, episode_row: dict[str, Any], decode: Decode
) -> dict[str, Any]:
    """Return an episode as JSON. `turns` are the stored turns; `missing` says why there are fewer turns than
    in the episode, `text` is the stored transcript in that case, '' without one; `no_advantage` says why no
    token has an advantage. Raises StoreError and ConfigError."""
    uid = episode_row["uid"]
    episode = reader.episode(uid)
    turns, missing = stored_turns(reader, episode)
    token_values = dict[str, list[Any]]()  # lists of all trained tokens, or shorter
    if episode.step != NO_STEP and (ratio_record := read_ratios(run_dir, episode.step, uid)):
        ratios = [
            None if log_ratio is None else exp(min(log_ratio, MAX_LOG_RATIO))
            for log_ratio in ratio_record.log_ratio
        ]
        token_values |= {"ratios": ratios, "dropped": ratio_record.dropped}

    if not (no_advantage := missing or _missing_advantage_reason(config, reader, episode)):
        try:
            parts = rewards_and_advantages(config, episode, reader.baseline(episode.group), turns)
            named_parts = zip(("rewards", "advantages"), parts, strict=True)
            token_values |= {
                name: token_tensor.tolist() for name, token_tensor in named_parts if token_tensor is not None
            }
            no_advantage = (
                "" if "advantages" in token_values else "the algorithm needs values that a model computes"
            )
        except (AsyncrlError, ValueError) as error:
            no_advantage = one_line(error)

    stored_text = ""
    if missing:
        transcript_kind = "training" if episode_row["kind"] == "train" else "validation"
        transcript_file = run_dir / "transcripts" / transcript_kind / f"step-{episode_row['step']}.jsonl"
        with suppress(OSError):
            entries = (entry for entry in read_lines(transcript_file) if entry.get("uid") == uid)
            stored_text = str(next(entries, {}).get("text", ""))

    return {
        **asdict(episode),
        "result": asdict(episode.result),
        "stats": asdict(episode.stats),
        "listed": episode_row,
        "step": episode_row["step"],
        "bound": config.buffer.max_staleness,
        "turns": list(_turn_answers(turns, decode, token_values, episode.step, config.buffer.max_staleness)),
        "missing": missing,
        "text": stored_text,
        "no_advantage": no_advantage,
    }


def _missing_advantage_reason(config: RunConfig, reader: RunReader, episode: EpisodeRecord) -> str:
    """Return why an episode has no advantages; '' if there are some. A viewer runs no code of users."""
    advantage_name, _ = name_and_options(config.algorithm.advantage)
    if episode.uid.startswith(UID_START):
        return "held-out episodes are not used for training"
    if not episode.stats.turns:
        return "the episode has not finished"

    if advantage_name not in advantages:
        return f"algorithm.advantage {advantage_name} is a custom function, which the viewer does not run"

    if episode.greedy or not reader.baseline(episode.group).results:
        reason = "it is the greedy episode" if episode.greedy else "its group is not settled"
        return f"nothing to compare the episode with: {reason}"

    return ""


def _turn_answers(
    turns: Sequence[Turn],
    decode: Decode,
    token_values: Mapping[str, list[Any]],
    step: int,
    max_staleness: int,
) -> Iterator[dict[str, Any]]:
    """Yield the turns as JSON. Per-token lists are aligned with `ids`, or empty where a turn is not
    trained."""
    token_offset = 0
    for turn in turns:
        generation = turn.generation
        trained_tokens = 0 if turn.untrained else len(generation.ids)
        turn_slice = slice(token_offset, token_offset + trained_tokens)
        token_offset += trained_tokens

        spans = [
            (span.version, span.kv_version) for span in generation.spans for _ in range(span.start, span.end)
        ]
        is_counted = not turn.untrained and step != NO_STEP
        lags = token_lags(generation.spans, start_version(step)) if is_counted else []
        yield {
            "index": turn.index,
            "row": turn.row,
            "stop": generation.stop,
            "seconds": generation.seconds,
            "ids": generation.ids,
            "logprobs": generation.logprobs,
            "agent": f"{turn.agent} (not trained)" if turn.untrained else turn.agent,
            "context": {
                "ids": turn.context,
                "text": decode(turn.context),
                "images": [run.digest for run in find_runs(turn.context)],
            },
            "texts": token_texts(decode, generation.ids),
            "versions": [version for version, _ in spans],
            "kv_versions": [version for _, version in spans],
            "lags": lags,
            "stale": stale_mask(lags, max_staleness),
            **{name: values[turn_slice] for name, values in token_values.items()},
            "replies": [_readable_json(reply) for reply in turn.replies],
            "observation": _observation_json(turn.observation),
        }


def _readable_json(message: Message | ToolReply) -> dict[str, Any]:
    message_json: dict[str, Any] = msgspec.to_builtins(message)
    return message_json | {"content": readable_content(message)}


def _observation_json(observation: Observation | None) -> dict[str, Any] | None:
    if observation is None:
        return None
    observation_json: dict[str, Any] = msgspec.to_builtins(observation)
    return observation_json | {"messages": [_readable_json(message) for message in observation.messages]}


def image_url(images: RunImages, digest: str) -> str:
    """Return the file of an image of the run as a data URL. ConfigError for an image that is not stored."""
    file = images.file_of(digest)
    if file is None or not is_image_file(file):
        raise ConfigError(f"image {digest[:DIGEST_DIGITS]} is not stored in the run")
    return data_url(file)
