"""A buffer with workers and a trainer of the simplest kind, for tests to drive."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from asyncrl.buffer.batches import Batches
from asyncrl.buffer.prompts import ComparedParts, Prompts, shuffled
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.buffer.staleness import oldest_version_of
from asyncrl.config import BufferConfig
from asyncrl.types import (
    NO_STEP,
    EpisodeResult,
    EpisodeStats,
    FailReason,
    Generation,
    StopReason,
    Turn,
    VersionSpan,
)


def make(
    rows: int = 100,
    total_groups: int = 10_000,
    epochs: int = 0,
    greedy: bool = False,
    reads: ComparedParts = ComparedParts(),
    **keys: object,
) -> tuple[ReplayBuffer, Batches]:
    """A buffer of 2 groups of 2 per batch, a bound of 4, unless given otherwise; one micro-batch fits all."""
    config = BufferConfig(
        **{"groups_per_batch": 2, "episodes_per_group": 2, "max_staleness": 4, "filter_zero_variance": False}
        | keys
    )
    prompts = Prompts(rows, lambda epoch: shuffled(range(rows), f"0/{epoch}"), epochs)
    buffer = ReplayBuffer(
        config, prompts, total_groups, retries=1, group_bytes=1, greedy=greedy, compared=reads
    )
    return buffer, Batches(buffer, micro_batch_tokens=1 << 20, flush_at_end=True)


def admit(buffer: ReplayBuffer, groups: int) -> None:
    for _ in range(groups):
        buffer.admit_group(now=0.0)


def run(buffer: ReplayBuffer, uid: str) -> None:
    """Assign a pending episode."""
    buffer.assign(buffer.episodes[uid], "w", 1, 0, 0.0)


def land(
    buffer: ReplayBuffer,
    uid: str,
    reward: float = 1.0,
    version: int = 0,
    now: float = 0.0,
    tokens: int = 10,
    **earned: Any,
) -> EpisodeRecord:
    """Run an episode of one turn, of ten tokens unless given otherwise, to its end."""
    episode = buffer.episodes[uid]
    if episode.state is State.PENDING:
        buffer.assign(episode, "w", 1, version, 0.0)
    episode.add_turn(tokens=tokens + 10, model_tokens=tokens, oldest=version, newest=version)
    buffer.mark_changed(episode)
    result = EpisodeResult(reward, tokens, (reward,), **earned)
    buffer.finish_episode(episode, result, EpisodeStats(1), now)
    return episode


def land_group(buffer: ReplayBuffer, group: int, *rewards: float, version: int = 0) -> None:
    """Land a group's first members, in order."""
    for member, reward in enumerate(rewards):
        land(buffer, f"{group}.{member}", reward, version)


def give_up(buffer: ReplayBuffer, uid: str, now: float = 0.0) -> list[EpisodeRecord]:
    """Fail an episode for good. What was running and is dropped with it."""
    if buffer.episodes[uid].state is State.PENDING:
        run(buffer, uid)
    return buffer.fail_attempt(buffer.episodes[uid], FailReason.PROMPT_TOO_LONG, now)


def play(buffer: ReplayBuffer, batches: Batches, events: str) -> list[list[str]]:
    """Let these happen in order, and return the batches that were trained.

    `+2` two groups are issued; `a2` admission issues two and no more; `0.1~` an episode runs, `0.1=0.5`
    lands with that reward, `0.1!` fails for good, `0.1x` is tried again. `3e`, `3m`: all of a group land,
    with equal rewards or not. `@5`: it is 5 s. `T`: the next batch is trained; `M`: a micro-batch is there;
    `?`: none is.
    """
    now = 0.0
    trained = []
    for word in events.split():
        first = word[0]
        arguments = word[1:]
        last = word[-1]
        uid, _, reward = word.partition("=")
        if first == "+":
            admit(buffer, int(arguments))
        elif first == "a":
            before = buffer.next_group
            while buffer.can_admit(100, 100):
                buffer.admit_group(now)
            assert buffer.next_group - before == int(arguments), word
        elif first == "@":
            buffer.settle_overdue(now := float(arguments))
        elif first == "T":
            trained.append(sorted(train(batches)))
        elif first in "M?":
            current_batch = batches.by_step.get(buffer.current_step)
            plan = batches.next_part(buffer.current_step, len(current_batch.parts) if current_batch else 0, 1)
            assert bool(plan) is (first == "M") and plan != [], (word, plan)
        elif reward:
            land(buffer, uid, float(reward), now=now)
        elif last in "em":
            for member, uid in enumerate(list(buffer.live_groups[int(word[:-1])].members)):
                land(buffer, uid, float(last == "e" or member == 0), now=now)
        elif last == "~":
            run(buffer, word[:-1])
        elif last == "!":
            give_up(buffer, word[:-1], now)
        else:
            buffer.fail_attempt(buffer.episodes[word[:-1]], FailReason.ENGINE_ERROR, now)
    return trained


def count_again(buffer: ReplayBuffer) -> None:
    """What the buffer keeps as it goes is what a look at all groups and episodes finds."""
    tally = buffer.tally
    groups = list(buffer.live_groups.values())
    episodes = buffer.episodes
    assert +tally.state_counts == Counter(episode.state for episode in episodes.values())
    for state in State:
        members = {episode.group for episode in episodes.values() if episode.state is state}
        assert tally.groups_by_state[state] == members, state
    for step in {group.step for group in groups} | set(tally.groups_by_step):
        ids = tally.untaken_groups if step == NO_STEP else tally.groups_by_step[step]
        assert ids == {g.id for g in groups if g.step == step and not g.filtered}
    is_open = [not g.filtered and (g.step == NO_STEP or g.step > buffer.committed) for g in groups]
    assert tally.count_live(buffer.committed) == sum(is_open)
    ranks = [sum(is_open[:position]) for position in range(len(groups))]
    assert tally.count_older(list(buffer.live_groups), buffer.committed) == ranks
    over = [all(episodes[uid].state.over for uid in group.members) for group in groups]
    assert not any(over) and not any(map(tally.is_over, groups))
    cached_versions = buffer.oldest_versions
    buffer.oldest_versions = {}
    assert all(
        oldest_version_of(buffer, buffer.live_groups[number]) == floor
        for number, floor in cached_versions.items()
    )


def train(batches: Batches) -> list[str]:
    """Take and commit the batch of the current step; the uids in it."""
    step = batches.buffer.current_step
    micro = 0
    uids = []
    while plan := batches.next_part(step, micro, 1):
        uids += plan
        micro += 1
    assert plan == [], "the batch must be complete"
    batches.commit_batch(step, uids)
    return uids


def turn_payload(index: int = 0, version: int = 0, **fields: Any) -> bytes:
    """What a worker sends of a turn of ten tokens after ten of context, as `land` counts them.

    `fields`: other values for fields of the turn or of its generation.
    """
    generation = Generation(
        ids=tuple(range(10)),
        logprobs=(-0.5,) * 10,
        spans=(VersionSpan(0, 10, version, version),),
        stop=StopReason.STOP,
    )
    changed_names = [name for name in Generation.__struct_fields__ if name in fields]
    generation = msgspec.structs.replace(generation, **{name: fields.pop(name) for name in changed_names})
    turn = Turn(index, (1,) * 10, generation)

    return msgspec.msgpack.encode(msgspec.structs.replace(turn, **fields))
