"""`asyncrl regrade RUN --reward NEW`: scores recorded episodes with another reward.

The command only reads the run, which may be under way.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import correlation, fmean
from typing import TYPE_CHECKING

import msgspec

from asyncrl.commands import command_parser, find_run
from asyncrl.config import RunConfig
from asyncrl.config.composition import recompose
from asyncrl.data.rows import write_rows
from asyncrl.errors import ConfigError, one_line, users_code
from asyncrl.registry import search_working_directory
from asyncrl.types import NO_STEP
from asyncrl.values import printable

if TYPE_CHECKING:
    from asyncrl.algorithms.recipe import Recipe
    from asyncrl.buffer.records import EpisodeRecord, GroupRecord
    from asyncrl.types import Turn

MAX_CONCURRENT = 32  # Episodes that are scored at once.

HELP = """\
Score recorded episodes with another reward, and compare the scores, the advantages, and the number of
groups with a learning signal (members with different scores).

  asyncrl regrade demo --reward my_reward.py:compute_score
  asyncrl regrade demo --reward '{exact: {}, final_number: {weight: 0.1}}' --steps 40..60
  asyncrl regrade demo --reward final_number --out regraded.parquet algorithm.advantage=rloo

OVERRIDES change keys of the run's configuration, as in `asyncrl train`. Episodes whose turns are no longer
stored are left out (see store.keep_bytes)."""


class Row(msgspec.Struct):
    """The scores of one episode before and after. `step`: the step of its batch, or the step under way when
    the episode was issued."""

    uid: str
    group: int
    sample: int
    step: int
    state: str
    score: float
    score_new: float
    advantage: float | None
    advantage_new: float | None
    taught: bool | None  # whether its group teaches; None: not all of the baseline could be scored
    teaches: bool | None


def main(argv: list[str]) -> int:
    parser = command_parser("regrade", HELP)
    parser.add_argument("run", help="name or directory of a run")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="key=value")
    parser.add_argument(
        "--reward", required=True, help="a reward as in rollout.reward: a name, a function, or a mapping"
    )
    parser.add_argument(
        "--steps", type=_parse_steps, default=(0, sys.maxsize), help="step N, or steps A..B (default: all)"
    )
    parser.add_argument("--out", type=Path, help="write one row per episode to FILE.parquet or FILE.jsonl")
    options = parser.parse_intermixed_args(argv)

    if options.out is not None and options.out.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"--out {options.out}: write FILE.parquet or FILE.jsonl")
    run_dir = find_run(options.run_dir, options.run)
    search_working_directory()

    config = recompose(run_dir, ["~rollout.reward", f"rollout.reward={options.reward}", *options.overrides])
    from asyncrl.launch.models import resolve_models

    rows, problems = asyncio.run(_regrade_episodes(resolve_models(config), run_dir, options.steps))

    if not rows:
        reason = (
            problems[-1]
            if problems
            else "the turns of these steps' episodes are no longer stored (store.keep_bytes)"
        )
        raise ConfigError(f"{run_dir}: no episode could be scored: {reason}")

    _print_comparison(rows, problems)
    if options.out is not None:
        write_rows(options.out, (msgspec.structs.asdict(row) for row in rows))
    return 0


def _parse_steps(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if not first.isdigit() or (dots and not last.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor a range of steps such as 40..60")
    return int(first), int(last or first)


async def _regrade_episodes(
    config: RunConfig, run_dir: Path, steps: tuple[int, int]
) -> tuple[list[Row], list[str]]:
    """Score the episodes of all groups of these steps. Return their rows, and why other episodes could not be
    scored."""
    from asyncrl.algorithms.recipe import compose
    from asyncrl.data import Samples, samples_path
    from asyncrl.episodes.parts import EpisodeParts
    from asyncrl.episodes.recorded import regrade, stored_result, stored_turns
    from asyncrl.store.reader import RunReader

    recipe = compose(config)

    # Environment and agent are not loaded, as their files may be gone.
    parts = EpisodeParts(config).load_parts("rules", "toolbox", "reward")
    samples = Samples.open(samples_path(run_dir, "train"))
    reader = RunReader.open(run_dir)
    scoring_slots = asyncio.Semaphore(MAX_CONCURRENT)
    rows = list[Row]()
    problems = list[str]()

    async def score(group: GroupRecord, episode: EpisodeRecord, turns: list[Turn]) -> EpisodeRecord | None:
        async with scoring_slots:
            try:
                end = episode.result.end
                sample = samples[group.sample]
                result = stored_result(reader, episode.uid, episode.turns)
                with users_code():
                    new_result = await regrade(parts, sample, turns, end, episode.stats.tool_calls, result)
            except Exception as error:
                problems.append(f"episode {episode.uid}: {one_line(error)}")
                return None
        return msgspec.structs.replace(episode, result=new_result)

    try:
        for group in (group for group in reader.groups() if steps[0] <= _batch_step(group) <= steps[1]):
            members = {episode.uid: episode for episode in reader.group_members(group.id)}
            landed = (
                (uid, stored_turns(reader, member)) for uid, member in members.items() if member.stats.turns
            )
            turns = {
                uid: episode_turns
                for uid, (episode_turns, missing) in landed
                if episode_turns and not missing
            }
            scored = await asyncio.gather(*(score(group, members[uid], turns[uid]) for uid in turns))
            regraded_members = members | {episode.uid: episode for episode in scored if episode is not None}
            rows += _regraded_rows(config, recipe, group, members, regraded_members, turns)
    finally:
        reader.close()
        await parts.close()
    return rows, problems


def _batch_step(group: GroupRecord) -> int:
    """Return the step of the group's batch, or the step under way when the group was issued."""
    return group.issued_step if group.step == NO_STEP else group.step


def _regraded_rows(
    config: RunConfig,
    recipe: Recipe,
    group: GroupRecord,
    before: Mapping[str, EpisodeRecord],
    after: Mapping[str, EpisodeRecord],
    turns: Mapping[str, list[Turn]],
) -> Iterator[Row]:
    """Yield a row for each member that was scored. A group is compared if its whole baseline was scored."""
    from asyncrl.buffer.batches import Baseline
    from asyncrl.buffer.prompts import ComparedParts, all_equal
    from asyncrl.episodes.recorded import rewards_and_advantages

    scored = {uid for uid in turns if after[uid] is not before[uid]}
    baseline_uids = {group.members[number] for number in group.baseline}
    compared_parts = ComparedParts(turns=recipe.advantage.turns, components=recipe.advantage.components)

    ordered_uids = sorted(scored, key=lambda uid: before[uid].member)
    compared_uids = [uid for uid in ordered_uids if not before[uid].greedy]  # including late members

    def judge_group(members: Mapping[str, EpisodeRecord]) -> tuple[bool | None, dict[str, float | None]]:
        """Return whether the group teaches, and the advantages of members that may be trained."""
        if not baseline_uids or not baseline_uids <= scored:
            return None, {}
        baseline = Baseline.of_group(group, members)
        is_uniform = all_equal(
            [members[uid].result for uid in compared_uids], baseline.greedy, compared_parts
        )
        advantages_by_uid = {
            uid: rewards_and_advantages(config, members[uid], baseline, turns[uid])[1]
            for uid in compared_uids
        }
        return not is_uniform, {
            uid: None if values is None or not len(values) else float(values.mean())
            for uid, values in advantages_by_uid.items()
        }

    taught, advantages = judge_group(before)
    teaches, advantages_new = judge_group(after)
    for uid in ordered_uids:
        yield Row(
            uid=uid,
            group=group.id,
            sample=group.sample,
            step=_batch_step(group),
            state=before[uid].state,
            score=before[uid].result.score,
            score_new=after[uid].result.score,
            advantage=advantages.get(uid),
            advantage_new=advantages_new.get(uid),
            taught=taught,
            teaches=teaches,
        )


def _print_comparison(rows: Sequence[Row], problems: Sequence[str]) -> None:
    """Print the table, and why some episodes are missing in it."""
    groups = {row.group: row for row in rows if row.teaches is not None}
    scores = [(row.score, row.score_new) for row in rows]
    advantages = [
        (row.advantage, row.advantage_new)
        for row in rows
        if row.advantage is not None and row.advantage_new is not None
    ]

    taught_counts = [sum(getattr(row, name) for row in groups.values()) for name in ("taught", "teaches")]
    print(f"rescored {len(rows)} episodes in {len({row.group for row in rows})} groups")
    print(f"{'':32} {'recorded':>12} {'regraded':>12}")
    recorded_mean = fmean(recorded for recorded, _ in scores)
    regraded_mean = fmean(regraded for _, regraded in scores)
    print(f"{'mean score':32} {recorded_mean:>12.4f} {regraded_mean:>12.4f}")

    if groups:
        counts_text = " ".join(f"{count:>6} {count / len(groups):>5.0%}" for count in taught_counts)
        print(f"{f'groups with a signal (of {len(groups)})':32} {counts_text}")
    if advantages:
        sizes_text = " ".join(f"{fmean(abs(pair[index]) for pair in advantages):>12.4f}" for index in (0, 1))
        print(f"{'mean |advantage| before scaling':32} {sizes_text}")
    print(f"correlation: scores {_correlation(scores)}, advantages {_correlation(advantages)}")
    if problems:
        print(
            printable(f"episodes that could not be scored: {len(problems)}; the last error: {problems[-1]}")
        )


def _correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Return Pearson's correlation; "unknown" if one side does not vary."""
    if len(pairs) < 2 or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return "unknown"
    return f"{correlation(*zip(*pairs, strict=True)):.3f}"
