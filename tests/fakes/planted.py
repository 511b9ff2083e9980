"""Makes run directories as a coordinator and its processes write them: a small one, and those that have an
answer to a question: what broke, flipped, changed, was lost."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict
from tokenizers import Tokenizer

from asyncrl.buffer.payloads import add_turn
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.buffer.staleness import length_bucket, stale_mask, token_lags
from asyncrl.config import parse
from asyncrl.coordinator.reporting import save_transcripts
from asyncrl.data import samples_path
from asyncrl.errors import ConfigError
from asyncrl.observe.files import write_status
from asyncrl.observe.held_out import HeldOut
from asyncrl.observe.timeline import START_EVENT, Timeline
from asyncrl.observe.transcripts import TokenRatios, save_ratios
from asyncrl.store.launches import LAUNCHES_KEY, LaunchRecord, config_tree
from asyncrl.store.runstore import RunStore
from asyncrl.types import (
    DropReason,
    EpisodeEnd,
    EpisodeResult,
    EpisodeStats,
    Generation,
    Message,
    Sample,
    StopReason,
    ToolCall,
    ToolReply,
    Turn,
    TurnReply,
    VersionSpan,
)
from tests.fakes.data import rows, stored
from tests.unit.buffer.machine import admit, land, make, run, train

MODEL = Path(__file__).resolve().parents[2] / "examples" / "multiturn" / "calculator" / "model"
MARKUP = "</script><img src=x onerror=alert(1)>"
# Steps of each run, groups of a step, max_staleness.
STEPS = 12
GROUPS = 2
BOUND = 2
BEGAN = 1_700_000_000.0
SAMPLES = [
    Sample(row, "sums", (Message("user", f"What is {row} plus {row}?"),), f'"{2 * row}"') for row in range(48)
]
OPEN = "<|im_start|>assistant\n"
SPANS = (VersionSpan(0, 4, 0, 0), VersionSpan(4, 10, 1, 0))
Metrics = Mapping[str, float | Sequence[float]]


class Said(NamedTuple):
    """A turn of an episode. `versions`: the policies that wrote its halves, if not the step's; or `spans`."""

    text: str
    reply: ToolReply | None = None
    read: str = "?"
    row: int = 0
    agent: str = ""
    versions: tuple[int, int] | None = None
    spans: tuple[VersionSpan, ...] = ()


class Played(NamedTuple):
    turns: Sequence[Said]
    answer: str
    score: float
    components: Mapping[str, float] = {}
    end: EpisodeEnd = EpisodeEnd.ANSWERED


Player = Callable[[int, int], Played]  # (row of the question, step) -> episode


def right(row: int, step: int = 0) -> Played:
    return Played([Said(f"It is {2 * row}.")], str(2 * row), 1.0)


def wrong(row: int, step: int = 0) -> Played:
    return Played([Said(f"It is {row + 100}.")], str(row + 100), 0.0)


def chat(*messages: tuple[str, str]) -> str:
    """Write messages as the template does."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


class PlantedRun:
    """Writes a run directory. `keys`: sections of its configuration."""

    def __init__(self, run_dir: Path, samples: Sequence[Sample] = SAMPLES, **keys: Any) -> None:
        self.dir = run_dir
        self.store = RunStore(run_dir)
        self.samples = samples
        sizes = {"max_staleness": BOUND} | keys.pop("buffer", {})
        self.buffer, self.batches = make(rows=len(samples), **sizes)
        self._encode = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode
        needed = {"name": run_dir.name, "model": {"path": str(MODEL)}, "data": {"train": "x", "test": "y"}}
        self.config = parse({**needed, "buffer": sizes, **keys})
        self._metrics: list[dict[str, float]] = []
        self._lags = defaultdict[int, list[list[int]]](list)  # by step: of each episode's tokens

    def train(self, first: Player = right, second: Player = wrong) -> None:
        """Train groups in which the first player has one episode and the second player the other."""
        for step in range(STEPS):
            for _ in range(GROUPS):
                group = self.buffer.admit_group(now=0.0)
                for uid, player in zip(group.members, (first, second), strict=True):
                    self.land(uid, player(group.sample, step), step)
            self.commit()

    def land(self, uid: str, played: Played, step: int = 0) -> None:
        """An episode of the buffer is over."""
        run(self.buffer, uid)
        episode = self.buffer.episodes[uid]
        self.buffer.finish_episode(episode, *self._write(episode, played, step), 0.0)

    def commit(self) -> None:
        step = self.buffer.current_step
        train(self.batches)
        self.store.put_commit(step, 1, self.batches.by_step[step].plan_hash)
        self._index()

    def _index(self) -> None:
        groups, *episodes = self.buffer.pop_changes()
        for group in groups:
            self.store.put_question(group.id, self.samples[group.sample])
        self.store.put_groups(groups, self.buffer.live_groups)
        self.store.put_episodes(*episodes)
        self.store.commit()

    def validate(self, step: int, played: Sequence[Played]) -> None:
        """Validate with the first questions, each once."""
        for row, played_episode in enumerate(played):
            episode = EpisodeRecord(HeldOut(step, "sampled", row).uid, row, 0, state=State.LANDED)
            episode.result, episode.stats = self._write(episode, played_episode, step)
            self.store.put_question(-1 - row, self.samples[row])
            self.store.list_held_out(episode, step, "sampled")

        row_of_metrics = {
            "training/step": float(step),
            "time_s": 20.0 * step,
            "val-aux/samples": float(len(played)),
        }

        row_of_metrics["val-core/all/sampled/success"] = fmean(
            played_episode.score for played_episode in played
        )
        for name in played[0].components:
            row_of_metrics[f"val-aux/all/sampled/{name}/mean@1"] = fmean(
                played_episode.components[name] for played_episode in played
            )

        self._metrics.append(row_of_metrics)

    def _write(
        self, episode: EpisodeRecord, played_episode: Played, version: int
    ) -> tuple[EpisodeResult, EpisodeStats]:
        replies = [turn_text.reply for turn_text in played_episode.turns if turn_text.reply]
        lags = list[int]()
        for at, turn_text in enumerate(played_episode.turns):
            context, ids = (
                tuple(self._encode(text, add_special_tokens=False).ids)
                for text in (turn_text.read, turn_text.text)
            )

            old, new = turn_text.versions or (version, version)
            half = len(ids) // 2
            end = len(ids)
            spans = VersionSpan(0, half, old, old), VersionSpan(half, end, new, new)
            logprobs = tuple(-float(token % 5) for token in range(end))
            turn = Turn(
                at, context, Generation(ids, logprobs, turn_text.spans or spans, StopReason.STOP, seconds=1.5)
            )
            turn = msgspec.structs.replace(turn, row=turn_text.row, agent=turn_text.agent)
            tool_replies = (turn_text.reply,) if turn_text.reply else ()

            add_turn(episode, turn)
            lags += token_lags(turn.generation.spans, version)
            self.store.put_frame(episode.uid, at, "generated", msgspec.msgpack.encode(turn))
            self.store.put_frame(episode.uid, at, "replied", msgspec.msgpack.encode(TurnReply(tool_replies)))
            self.store.put_calls(episode.uid, at, tool_replies)

        failed = [reply.call.name for reply in replies if reply.failed]
        episode.failed_tool = failed[0] if failed else ""
        self.store.put_answer(episode.uid, played_episode.answer)
        if episode.uid in self.buffer.episodes:
            self._lags[version].append(lags)
        earned = (*(0.0 for _ in played_episode.turns[1:]), played_episode.score)
        result = EpisodeResult(
            played_episode.score,
            episode.sampled,
            earned,
            dict(played_episode.components),
            end=played_episode.end,
        )
        return result, EpisodeStats(len(played_episode.turns), len(replies), failed=len(failed), seconds=15.0)

    def close(self, launches: Sequence[LaunchRecord] = ()) -> Path:
        """Write everything except the reports of processes."""
        if launches:
            self.store.put_meta(LAUNCHES_KEY, msgspec.json.encode(launches).decode())
        self._index()
        self.store.close()
        (self.dir / "config.yaml").write_bytes(msgspec.yaml.encode(self.config))

        for split in ("train", "test"):
            stored(self.samples).save(samples_path(self.dir, split))
        return self.dir

    def save(
        self, metrics: Metrics | None = None, launches: Sequence[LaunchRecord] = (), lost: str = ""
    ) -> Path:
        """Save the run. `metrics`: of its steps, which took 20 s each; a number holds for all steps."""
        self.close(launches or [LaunchRecord(0, config_tree(self.config))])
        flow = {f"flow/{name}": float(count) for name, count in asdict(self.buffer.account()).items()}
        scores = {"rollout/score/mean": 0.5, "rollout/score/min": 0.0, "rollout/score/max": 1.0}

        columns = {"timing_s/step": 20.0, "rollout/landed": 2.0 * GROUPS, **scores, **flow, **(metrics or {})}
        for at in range(STEPS):
            row = {
                name: values if isinstance(values, float) else values[at] for name, values in columns.items()
            }
            row |= {"training/step": at + 1.0, "time_s": 20.0 * (at + 1)}
            self._metrics.append(row | _masked(self._lags[at]))

        self._metrics.sort(key=lambda row: row["training/step"])
        report(self.dir, self._metrics)
        status = {"phase": "completed", "step": STEPS, "total_steps": STEPS, "seconds": 20.0 * STEPS}
        write_status(self.dir, status | {"gauges": self._metrics[-1], "lost": lost})

        return self.dir


def _masked(episodes: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the masked shares that a trainer would report of a batch.

    `episodes`: the lags of their tokens.
    """
    lengths = defaultdict[str, list[int]](list)
    for lags in episodes:
        lengths[f"staleness/by_length/{length_bucket(len(lags))}/masked_frac"] += lags
    every = {"staleness/masked_token_frac": [lag for lags in episodes for lag in lags]}
    return {name: fmean(stale_mask(lags, BOUND)) for name, lags in (every | lengths).items() if lags}


def report(run_dir: Path, metrics: Iterable[Mapping[str, float]]) -> None:
    with (run_dir / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in metrics)


# -- the runs ----------------------------------------------------------------------------------------------


def save_run(run_dir: Path, **training: float) -> Path:
    """Groups 0 and 1 are trained in step 1, an episode of group 2 runs, group 3 is dropped. The policy's
    tokens are ten digits; tools answer with markup. Of 12 steps the last one was skipped."""
    planted_run = PlantedRun(run_dir, rows(100), trainer=training)
    admit(planted_run.buffer, 4)

    for number, reward in enumerate((1.0, 0.0, 0.5, 0.5)):
        uid = f"{number // 2}.{number % 2}"
        reply = ToolReply(ToolCall("calculator" if number else "search", '{"a": 1}'), MARKUP)
        turn = Said("0123456789", reply, spans=SPANS)
        planted_run.land(uid, Played([turn], f"the answer of {uid}", reward, {"acc": reward}))

    planted_run.commit()
    run(planted_run.buffer, "2.0")
    land(planted_run.buffer, "3.0")
    planted_run.buffer.drop_group(planted_run.buffer.live_groups[3], DropReason.GROUP_SHORT)
    planted_run.close()

    steps = [
        {"training/step": float(at), "timing_s/step": 1.0, "time_s": 2.0 * at, "actor/entropy": 1.0 / at}
        for at in range(1, 13)
    ]

    steps[-1] |= {"actor/skipped_steps": 1.0, "actor/grad_norm": math.nan}
    report(run_dir, steps)
    entry = {"sample": 7, "mode": "greedy", "score": 1.0, "text": MARKUP}
    save_transcripts(run_dir, "validation", 1, [entry])
    save_ratios(run_dir, 1, 0, [TokenRatios("0.0", [math.log(2), None] + [0.0] * 8, [True] + [False] * 9)])

    timeline = Timeline(run_dir / "timeline" / "trainer-0.jsonl")
    for step in range(4000):
        timeline.record("train", step, step + 1, step=step)
    timeline.close()

    return run_dir


def ended(run_dir: Path) -> str:
    """Take the place of `asyncrl status`, which checks the launcher's lock."""
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"{run_dir}: no run")
    return "completed"


def broken_tool(run_dir: Path) -> Path:
    """Write a run whose episodes earn nothing if they call `search`, which fails."""
    working_reply = ToolReply(ToolCall("calculator", '{"sum": "1 + 1"}'), "2", seconds=0.01)
    failed = ToolReply(ToolCall("search", '{"query": "sums"}'), "", error="connection refused", seconds=2.0)

    def calls(reply: ToolReply, then: Player) -> Player:
        def play(row: int, step: int) -> Played:
            played_episode = then(row, step)
            return played_episode._replace(turns=[Said("I call a tool.", reply), *played_episode.turns])

        return play

    planted_run = PlantedRun(run_dir)
    planted_run.train(calls(working_reply, right), calls(failed, wrong))
    return planted_run.save({"rollout/tool_failed_frac": 0.5})


def slow_reward(run_dir: Path) -> Path:
    """Of an episode's 15 s the reward function takes 12, and the trainer waits."""
    planted_run = PlantedRun(run_dir)
    planted_run.train()
    waits = {"async/trainer_idle_frac": 0.8, "async/rollout_idle_frac": 0.6, "timing_s/wait_data": 16.0}
    parts = {"timing_s/episode/mean": 15.0, "timing_s/reward/mean": 12.0, "timing_s/tools/mean": 0.5}
    return planted_run.save(waits | parts)


def masked_tail(run_dir: Path) -> Path:
    """Write a run with few long episodes, whose first half was written five steps before their batch."""

    def long(row: int, step: int) -> Played:
        text = "Let us count. " * 60
        return Played([Said(text, versions=(max(0, step - 5), step))], str(2 * row), 1.0)

    planted_run = PlantedRun(run_dir)
    planted_run.train(lambda row, step: (right if step % 4 else long)(row, step))
    return planted_run.save()


def regression(run_dir: Path, worse: bool) -> Path:
    """The same questions. `worse`: by a higher learning rate; every second answer has lost its form."""

    def play(row: int, step: int) -> Played:
        bad = worse and step > 0 and row % 2 == 1
        return (wrong if bad else right)(row)._replace(components={"form": float(not bad), "polite": 1.0})

    planted_run = PlantedRun(run_dir, trainer={"lr": 1e-4 if worse else 1e-6})
    planted_run.train()
    for step in (0, STEPS):
        planted_run.validate(step, [play(row, step) for row in range(24)])

    return planted_run.save({"rollout/component/form/mean": 0.5, "rollout/component/polite/mean": 1.0})


def resumed(run_dir: Path) -> Path:
    """From step 7 on the learning rate is ten times as high."""
    planted_run = PlantedRun(run_dir, trainer={"lr": 1e-5})
    planted_run.train()
    old = config_tree(parse(config_tree(planted_run.config) | {"trainer": {"lr": 1e-6}}))
    return planted_run.save(launches=[LaunchRecord(0, old), LaunchRecord(6, config_tree(planted_run.config))])


def flipped(run_dir: Path) -> Path:
    """Question 3 was answered rightly at step 6 and is not at step 12; 5 and 6 are wrong at both, and 7 has
    become right."""
    planted_run = PlantedRun(run_dir)
    planted_run.train()
    for step, mistakes in ((6, (5, 6, 7)), (STEPS, (3, 5, 6))):
        planted_run.validate(step, [(wrong if row in mistakes else right)(row) for row in range(12)])
    return planted_run.save()


def titled(run_dir: Path) -> Path:
    """Write a run whose agent solves its task and requests a title of its session in the last turn."""
    call = ToolReply(ToolCall("calculator", '{"sum": "4 + 4"}'), "8", seconds=0.01)
    task = chat(("system", "You are an agent."), ("user", "Add the numbers in sums.txt.")) + OPEN
    title = chat(("system", "You write titles."), ("user", "A title for: add the numbers")) + OPEN
    turns = [
        Said("I call a tool.<|im_end|>", call, read=task, agent="main"),
        Said("The sum is in total.txt.<|im_end|>", read=f"\n{chat(('tool', '8'))}{OPEN}", agent="main"),
        Said("Adding two numbers<|im_end|>", read=title, row=1, agent="title"),
    ]

    planted_run = PlantedRun(run_dir)
    planted_run.train(lambda row, step: Played(turns, "The sum is in total.txt.", 1.0))
    return planted_run.save()


def crashed(run_dir: Path) -> Path:
    """Worker 1 was killed after 95 s, in step 5, with three episodes; it was begun again."""
    for worker in (0, 1):
        file = Timeline(run_dir / "timeline" / f"rollout-{worker}.jsonl")
        for began, end_second in ((0, 95), (100, 240)):
            if worker or not began:
                file.record(START_EVENT, BEGAN + began, BEGAN + began)
            file.record("decode", BEGAN + began, BEGAN + end_second, calls=9, seconds=80.0)
        file.close()

    planted_run = PlantedRun(run_dir)
    planted_run.train()
    lost = "worker 1 in step 5 (replaced by a new process): MemoryError"
    return planted_run.save(
        {"rollout/attempts_failed/worker_lost": [0.0] * 4 + [3.0] * (STEPS - 4)}, lost=lost
    )


PLANTED = (broken_tool, slow_reward, masked_tail, resumed, flipped, titled, crashed)
