"""Reads recorded episodes from a run, which may be under way, and scores them again, perhaps by another
reward.

The conversation consists of the recorded turns and replies. Messages that an agent program or an environment
sent before the first turn were not recorded, and are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncrl.algorithms.advantages import configured_advantage
from asyncrl.algorithms.credit import AdvantageInput, by_token, token_rewards
from asyncrl.buffer.batches import Baseline
from asyncrl.buffer.payloads import decode_reply, decode_turn
from asyncrl.buffer.records import EpisodeRecord
from asyncrl.config import RunConfig
from asyncrl.conversation.chat import prefill_of
from asyncrl.conversation.commands import Done, Opened
from asyncrl.conversation.episode import Episode, begin_episode, conversation
from asyncrl.conversation.turns import read_turn, score_turns, without_untrained
from asyncrl.data import Samples, samples_path
from asyncrl.episodes.reward import transcript
from asyncrl.errors import AsyncrlError
from asyncrl.observe.held_out import HeldOut, JudgedEpisode, answer_of, uid_prefix
from asyncrl.rewards import RewardError, RewardInput
from asyncrl.store.reader import RunReader
from asyncrl.types import EpisodeEnd, EpisodeResult, Sample, Turn, TurnReply
from asyncrl.wire.messages.worker import Failed, Finished

if TYPE_CHECKING:
    from asyncrl.episodes.parts import EpisodeParts

# Stands for the tools of agents, which are not recorded.
ANY_TOOL_SCHEMA = '{"type": "function", "function": {"name": "", "parameters": {}}}'


def turns_of(frames: Sequence[bytes]) -> list[Turn]:
    """Decode the turns of an Assign: two frames each, the turn and the replies (empty: not recorded).
    ProtocolError for unreadable frames."""
    turns: list[Turn] = []
    for turn_frame, reply_frame in zip_longest(frames[::2], frames[1::2], fillvalue=b""):
        turn = decode_turn(turn_frame)
        reply = decode_reply(reply_frame) if reply_frame else TurnReply()
        turns.append(msgspec.structs.replace(turn, replies=reply.replies, observation=reply.observation))
    return turns


def stored_turns(reader: RunReader, episode: EpisodeRecord) -> tuple[list[Turn], str]:
    """Return the first turns of an episode that are still stored, and why later turns are missing ('': none
    is)."""
    try:
        frames = list(reader.turn_frames(episode.uid, episode.turns))
        kept_count = next((index for index, frame in enumerate(frames[::2]) if not frame), episode.turns)
        missing_text = "the episode's turns are no longer stored; set a larger store.keep_bytes"
        return turns_of(frames[: 2 * kept_count]), missing_text if kept_count < episode.turns else ""
    except AsyncrlError as error:  # deleted since the index was read, or damaged
        return [], str(error)


def stored_result(reader: RunReader, uid: str, turns: int) -> Any:
    """Return the `result` that the reward saw of an episode of so many turns, side requests included."""
    *_, result_frame = reader.turn_frames(uid, turns, ("result",))
    return msgspec.json.decode(result_frame) if result_frame else None


def evaluated(run_dir: Path) -> tuple[Samples, list[JudgedEpisode]]:
    """Return the samples of an evaluation, and the finished episodes. Raises StoreError and ConfigError."""
    samples = Samples.open(samples_path(run_dir, "test"))
    judged_episodes = list[JudgedEpisode]()
    decode = msgspec.msgpack.Decoder(Finished | Failed).decode

    with closing(RunReader.open(run_dir)) as reader:
        for uid, record in reader.held_out(uid_prefix(0)):
            message = decode(record)
            held_out = HeldOut.from_uid(uid)
            source = samples[held_out.row].data_source
            if isinstance(message, Finished):
                answer = answer_of(message.result, message.notes)
                judged_episodes.append(JudgedEpisode(held_out, source, message.result, message.stats, answer))
            else:
                judged_episodes.append(JudgedEpisode(held_out, source, result=None))

    return samples, judged_episodes


def judged_turns(reader: RunReader, judged: JudgedEpisode) -> tuple[Turn, ...]:
    """Return the trained turns of an episode of an evaluation that did not fail."""
    assert judged.stats is not None
    turn_count = judged.stats.turns + judged.stats.untrained_turns
    return without_untrained(turns_of(list(reader.turn_frames(judged.identity.uid, turn_count))))


def rewards_and_advantages(
    config: RunConfig, episode: EpisodeRecord, baseline: Baseline, turns: Sequence[Turn]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the rewards and advantages of an episode's trained tokens, before the batch scales the
    advantages. The advantages are None if they also depend on values that models compute."""
    advantage = configured_advantage(config)
    token_counts = [len(turn.generation.ids) for turn in turns if not turn.untrained]
    turn_of_token = np.repeat(np.arange(len(token_counts)), token_counts)
    rewards = token_rewards(episode.result, turn_of_token)
    siblings, sibling_index = baseline.siblings(episode)
    if advantage.critic or advantage.whole_group:
        return rewards, None

    advantage_input = AdvantageInput(
        own=episode.result,
        siblings=siblings,
        rewards=rewards,
        turn=turn_of_token,
        issued=baseline.issued,
        position=sibling_index,
        greedy=baseline.greedy,
    )
    return rewards, by_token(advantage_input, advantage)


async def regrade(
    parts: EpisodeParts, sample: Sample, turns: Sequence[Turn], end: EpisodeEnd, calls: int, result: Any
) -> EpisodeResult:
    """Score the trained turns of an episode again. Raises RewardError."""
    turns = without_untrained(turns)
    reward_result = await parts.reward.score_episode(reward_input(parts, sample, turns, end, calls, result))
    outcome = score_turns(turns, end, parts.reward.add_shaping(parts.rules, reward_result, turns, end))
    if not isinstance(outcome, Done):
        raise RewardError(outcome.detail)

    return outcome.result


def reward_input(
    parts: EpisodeParts,
    sample: Sample,
    turns: Sequence[Turn],
    end: EpisodeEnd,
    calls: int,
    result: Any = None,
) -> RewardInput:
    """Make the input of a reward from an episode's turns, end, number of calls and result. The conversation
    of an agent is the row of the last turn. The agent's tools were not recorded: with calls there were
    some."""
    rules = parts.rules
    if rules.config.agent:
        schemas: tuple[str, ...] = (ANY_TOOL_SCHEMA,) if calls else ()
        shown_turns = tuple(turn for turn in turns if turn.row == turns[-1].row)
    else:
        schemas = parts.toolbox.schemas(sample)
        shown_turns = tuple(turns)

    # The first messages of an environment follow the prompt.
    prefill = "" if rules.config.agent or rules.config.environment else prefill_of(sample.prompt)
    parsed_turns = tuple(
        read_turn(rules, turn, schemas, prefill="" if turn.index else prefill) for turn in shown_turns
    )
    episode = Episode(
        sample, begin_episode(sample).command, Opened(schemas), turns=shown_turns, read=parsed_turns
    )

    return RewardInput(
        sample=sample,
        answer=parsed_turns[-1].content,
        messages=conversation(rules, episode),
        turns=len(turns),
        tool_calls=calls,
        end=end,
        transcript=transcript(rules, turns),
        result=result,
        image_token=rules.chat.image_token,
    )
