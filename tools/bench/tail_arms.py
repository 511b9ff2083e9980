"""What a heavy tail costs in learning, in simulated time: a policy learns inside planning/simulator.py.

    python tools/bench/tail_arms.py --out tail.jsonl --arms sync 4 16 4-instalments     # 25 s an arm and seed
    python tools/bench/tail_arms.py --out harder.jsonl --workload harder --slots 256 --steps 32 \\
        --arms 4 16 4-weights 4-instalments unbounded -- trainer.lr=2e-4 buffer.target_staleness=4
    python tools/bench/tail_arms.py --out tail.jsonl --table

The clock, the engines' speed and the delays of the tool are simulated. The buffer, the plans, flow control,
the episode machine, the sampler, the learner and the calculator's questions are real. So a run takes the CPU
seconds of its tokens, however long its tail is, and all arms of a seed have the same questions, random
numbers and delays. A whole turn is sampled by the version with which it begins. Delays are in units of g,
the seconds in which the engines sample a batch. Every few steps the policy plays held-out questions, each
sampled once.

An arm is a bound, buffer.max_staleness, and perhaps one of these, which the package does not have:
    weights       tokens that are in time count 1/P: P is the share that was in time, in earlier batches, of
                  the tokens with as many turns after them; at least 1/5
    instalments   what would expire is trained in the last batch that may take it, with the value V of its
                  episode in place of its reward: the mean reward of four continuations that the policy plays
                  then. V has no bias, which no table and no critic can promise; only groups whose baseline
                  is fixed are trained in instalments
    unbounded     nothing expires
or the name of an algorithm, as in 16-icepop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import table
from lagged import Weights, samples, snapshot, world
from msgspec.structs import replace
from tail_learning import bounds, write_questions
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.recipe import compose as compose_recipe
from asyncrl.buffer.batches import Baseline
from asyncrl.buffer.prompts import Prompts, shuffled
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.config import RunConfig
from asyncrl.config.composition import compose
from asyncrl.conversation import commands
from asyncrl.conversation import episode as machine
from asyncrl.conversation.episode import Episode
from asyncrl.coordinator.workers import sampling_key
from asyncrl.data import load_samples
from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.batch import Batcher
from asyncrl.engines.torch.engine import PREFILL_TOKENS, replace_weights
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.planning.simulator import RecordedTurn, Simulation, Workload, _Play
from asyncrl.rewards import RewardInput
from asyncrl.tools import ToolSession
from asyncrl.trainer.batch import Example
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.report import MetricSums
from asyncrl.types import EpisodeResult, EpisodeStats, Sample, Turn
from asyncrl.wire.messages.trainer import PlannedTrajectory

TURN = 7.3  # tokens that a turn takes the simulated engines, whatever it samples
G = 0.11  # seconds: 32 episodes of 1.9 such turns, at 4000 tokens/s
CALLS = {"tail": (0.5, 1.5), "harder": (1.5, 1.5), "hundred": (5.0, 1.5)}  # median in g, sigma
WEIGHTS = "weights"
INSTALMENTS = "instalments"
UNBOUNDED = "unbounded"
CONTINUATIONS = 4
CAP = 5.0  # of a weight
FORGETS = 0.9  # of the counts of earlier batches, what the next one keeps
MOST_TURNS = 64
NAMED = {"sync": 0, UNBOUNDED: 4}  # bounds of arms
HEADER = ["arm", "seeds", "success", "minus sync, 95% bound", "steps to 90%", "simulated s to 90%", "T / g",
          "masked", "in instalments", "lag"]  # fmt: skip


class TailLearner(Learner):
    """A learner that knows weights and instalments. `paid`: by episode, how many of its first tokens were
    trained before it ended. `counts`: tokens of all batches."""

    def __init__(self, config: RunConfig, kind: str) -> None:
        super().__init__(config, world())
        self.kind = kind
        self.paid: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self._seen = np.zeros((MOST_TURNS, 2))  # by turns after a token: masked ones, all
        self._weights = np.ones(MOST_TURNS)

    def _train(self, examples: Sequence[Example], tally: MetricSums, progress: float = 0.0) -> None:
        super()._train([self._rest(e) for e in examples], tally, progress)
        for e in examples:
            np.add.at(self._seen, e.turns - 1 - e.turn, np.stack([e.stale, np.ones(e.tokens)], 1))

    def _rest(self, e: Example) -> Example:
        """What is left to train of an episode: each token counts in one denominator."""
        paid = self.paid.get(e.planned.uid, 0)
        done = np.arange(e.tokens) < paid
        stale = done if self.kind == UNBOUNDED else e.stale | done
        self.counts["all"] += e.tokens - paid
        self.counts["trained"] += int(np.count_nonzero(~stale))
        self.counts["lag"] += int(e.lag[~stale].sum())
        return changed(e, stale=stale, denominator=e.denominator * (e.tokens - paid) / e.tokens)

    def _credited(self, examples: Sequence[Example], tally: MetricSums) -> list[Example]:
        credited = super()._credited(examples, tally)
        if self.kind != WEIGHTS:
            return credited
        return [changed(e, advantage=e.advantage * self._weights[e.turns - 1 - e.turn]) for e in credited]

    def finish(self) -> dict[str, float]:
        metrics = super().finish()
        masked, seen = self._seen.T
        self._weights = np.minimum(CAP, np.maximum(seen, 1e-9) / np.maximum(seen - masked, 1e-9))
        self._seen *= FORGETS
        return metrics


class LearningPlay(_Play):
    """An episode that runs. `state`: of its machine; without a turn under way, until that is sampled."""

    def __init__(self, episode: EpisodeRecord, sample: Sample, key: int, now: float) -> None:
        super().__init__(episode, (RecordedTurn(TURN, 0.0),), now)
        self.sample = sample
        self.key = key
        self.calls = 0
        self.state: Episode = machine.begin(sample)
        self.tools: ToolSession


class Learning(Simulation):
    """A simulated run in which a policy learns. `call`: median seconds and sigma of a tool's delay."""

    def __init__(self, config: RunConfig, kind: str, call: tuple[float, float], slots: int) -> None:
        partial = config.buffer.max_staleness > 0
        keys = replace(config.buffer, group_policy="partial" if partial else "complete")
        super().__init__(Workload((), keys, slots=slots, speed=600.0, train=0.045, publish=0.02, limit=1e9))
        self.config = config
        self.call = call
        self.samples = samples(config.data.train, MOST_TURNS)
        numbers = range(len(self.samples))
        self.buffer.prompts = Prompts(len(numbers), lambda epoch: shuffled(numbers, f"{config.seed}/{epoch}"))
        torch.manual_seed(config.seed)
        self.learner = TailLearner(config, kind)
        if kind in (INSTALMENTS, UNBOUNDED):  # flow control sees that nothing expires
            self.crossings.committed = lambda masked_fraction, model_tokens, now: 0.0
        self.parts = EpisodeParts(config)
        self.model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self.batcher = self._engine(slots + CONTINUATIONS * slots)
        self.loop = asyncio.new_event_loop()
        self.plays: dict[str, LearningPlay] = {}
        self.sampling: list[LearningPlay] = []  # whose turn is not sampled yet
        self.landed: dict[str, tuple[Turn, ...]] = {}
        self.snapshots: deque[Weights] = deque()  # committed, not published
        self.newest = snapshot(self.learner)
        self.in_instalments = 0

    def _engine(self, slots: int) -> Batcher:
        return Batcher(self.model, slots, self.config.rollout.max_tokens, PREFILL_TOKENS, 0)

    # -- episodes ------------------------------------------------------------------------------------

    def _begin(self, episode: EpisodeRecord, version: int) -> None:
        self._held += 1
        self.buffer.assign(episode, "", 0, version, self.now)
        group = self.buffer.live[episode.group]
        if group.id not in self._groups:
            self._groups[group.id] = (), False
            if group.patience < math.inf:
                self._after(group.patience, self._deadline)
        key = sampling_key(self.config.seed, episode.uid, 0)
        play = LearningPlay(episode, self.samples[group.sample], key, self.now)
        play.tools, play.state = self._opened(play.sample)
        self.plays[episode.uid] = play
        self._sample(play)

    def _opened(self, sample: Sample) -> tuple[ToolSession, Episode]:
        tools = self.parts.toolbox.session(sample)
        self._do(tools.open())
        begun = machine.begin(sample)
        return tools, machine.advance(self.parts.rules, begun, commands.Opened(tools.schemas))

    def _do(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def _sample(self, play: Any) -> None:
        play.left = 1
        super()._sample(play)
        self.sampling.append(play)

    def _sample_all(self) -> None:
        """Sample the turns that have begun with these weights."""
        plays = self.sampling
        self.sampling = []
        states = self._with_turns({play.episode.uid: (play.state, play.key) for play in plays})
        for play in plays:
            play.state = states[play.episode.uid]

    def _with_turns(self, asked: Mapping[str, tuple[Episode, int]]) -> dict[str, Episode]:
        """The episodes, by name, with one more turn each, sampled with these keys."""
        runs = {}
        found = {}
        for name, (state, key) in asked.items():
            limit = state.command.max_new_tokens
            stops = self.parts.rules.chat.stop_ids
            sampling = Sampling(limit, stops, self.config.rollout.temperature)
            runs[self.batcher.add(Request(name, state.command.ids, sampling, key))] = name
        while len(found) < len(runs):
            for run in self.batcher.step():
                name = runs[run]
                event = commands.TurnGenerated(self.batcher.end(run))
                found[name] = machine.advance(self.parts.rules, asked[name][0], event)
        return found

    def _replied(self, state: Episode, tools: ToolSession) -> Episode:
        """The episode with the replies of its tools and its score, up to where it asks for a turn."""
        while not state.over and not isinstance(state.command, commands.Generate):
            match state.command:
                case commands.CallTools(calls=calls):
                    replies = tuple(self._do(tools.call(call)) for call in calls)
                    event: commands.Event = commands.ToolsReplied(replies)
                case commands.Score(answer=answer, end=end):
                    asked = RewardInput(state.sample, answer, end=end)
                    event = commands.EpisodeScored(self._do(self.parts.reward.score(asked)))
                case command:
                    raise AssertionError(type(command).__name__)
            state = machine.advance(self.parts.rules, state, event)
        return state

    def _turn_ended(self, play: Any) -> None:
        if play in self.sampling:
            self._sample_all()
        turn = play.state.turns[-1]
        episode = play.episode
        version = turn.spans[0].version
        tokens = len(turn.ids)
        wait = 0.0
        play.turns.append((play.turn_began, self.now, float(tokens)))
        self.buffer.waiting_tokens.begin(episode.uid, self.now, float(tokens))
        episode.extend(len(turn.context) + tokens, tokens, version, version)
        self.buffer.touch(episode)
        if isinstance(play.state.command, commands.CallTools):
            play.calls += 1
            drawn = random.Random(f"{self.config.seed}/{episode.uid}/{play.calls}")
            wait = drawn.lognormvariate(math.log(self.call[0]), self.call[1])
        self._after(wait, lambda: self._goes_on(play))

    def _goes_on(self, play: LearningPlay) -> None:
        play.state = self._replied(play.state, play.tools)
        if play.state.over:
            self._landed(play)
        else:
            self._sample(play)

    def _landed(self, play: Any) -> None:
        episode = play.episode
        turns = play.state.turns
        self._changed = True
        self._held = self._held - 1
        self._turns[episode.uid], self.landed[episode.uid] = play.turns, turns
        del self.plays[episode.uid]
        self.batcher.slots.release(episode.uid)
        self._do(play.tools.close())
        stats = EpisodeStats(len(turns), longest_row=episode.tokens, prompt=len(turns[0].context))
        self.buffer.finish(episode, play.state.command.result, stats, self.now)

    # -- training ------------------------------------------------------------------------------------

    def _train(self) -> None:
        before = self._micro
        super()._train()
        if self._micro == before:
            return
        work = []
        heat = self.config.rollout.temperature
        for uid in self.batches.batches[self.buffer.committed].micros[-1]:
            episode = self.batches.planned_episodes[uid]
            planned = PlannedTrajectory.of(episode, self.batches.baselines[episode.group], heat)
            work.append((planned, self.landed.pop(uid)))
        self.learner.accumulate(work)
        for planned, _ in work:
            self.learner.paid.pop(planned.uid, None)

    def _commit(self) -> None:
        self._sample_all()
        if self.learner.kind == INSTALMENTS:
            for play in list(self.plays.values()):
                self._pay(play)
        self.learner.finish()
        self.newest = snapshot(self.learner)
        self.snapshots.append(self.newest)
        super()._commit()

    def _pay(self, play: LearningPlay) -> None:
        """An instalment, if the oldest untrained token of an episode that runs would be over the bound in the
        next batch and its baseline is fixed: all turns so far."""
        episode = play.episode
        turns = play.state.turns
        group = self.buffer.live[episode.group]
        paid = self.learner.paid.get(episode.uid, 0)
        ends = np.cumsum([len(turn.ids) for turn in turns])
        oldest = int(np.searchsorted(ends, paid, "right"))
        last = self.buffer.committed - self.config.buffer.max_staleness
        if oldest == len(turns) or turns[oldest].spans[0].version > last or not group.settled:
            return
        assert episode.state is State.RUNNING
        baseline = Baseline.of(group, self.buffer.episodes)
        siblings, place = baseline.siblings(episode)
        value = self._value(play)
        heat = self.config.rollout.temperature
        own = EpisodeResult(value, int(ends[-1]), (0.0,) * (len(turns) - 1) + (value,))
        planned = PlannedTrajectory(
            *(episode.uid, str(group.id), len(turns), own, siblings, place, baseline.issued, heat),
            tokens=episode.tokens,
            width=episode.tokens,
        )
        self.learner.accumulate([(planned, turns)])
        self.learner.paid[episode.uid] = int(ends[-1])
        self.in_instalments += int(ends[-1]) - paid

    def _value(self, play: LearningPlay) -> float:
        """The mean reward of continuations that the engines' weights play."""
        tools, _ = self._opened(play.sample)
        states = {f"{play.episode.uid}/{k}": play.state for k in range(CONTINUATIONS)}
        keys = {name: random.Random(f"{name}/{self.now}").getrandbits(31) for name in states}
        value = statistics.fmean(state.command.result.reward for state in self._played(states, keys, tools))
        self._do(tools.close())
        return value

    def _played(
        self, states: Mapping[str, Episode], keys: Mapping[str, int], tools: ToolSession
    ) -> list[Episode]:
        """The episodes, by name, played to their end; these tools know nothing of what was called before."""
        states = {name: self._replied(state, tools) for name, state in states.items()}
        while asked := {name: (state, keys[name]) for name, state in states.items() if not state.over}:
            for name, state in self._with_turns(asked).items():
                states[name] = self._replied(state, tools)
        for name in states:
            self.batcher.slots.release(name)
        return list(states.values())

    def _publish(self) -> None:
        self._sample_all()
        super()._publish()
        replace_weights(self.model, self.snapshots.popleft())
        self.batcher.mark(len(self._published))

    def success(self, questions: Sequence[Sample], at_once: int = 256) -> float:
        """Share of the questions that the newest weights answer."""
        serving = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        engine = self.batcher
        self.batcher = self._engine(at_once)
        replace_weights(self.model, self.newest)
        right = 0.0
        for start in range(0, len(questions), at_once):
            states = {}
            tools = self.parts.toolbox.session(questions[start])
            for sample in questions[start : start + at_once]:
                opened, states[f"h{sample.row}"] = self._opened(sample)
                self._do(opened.close())
            self._do(tools.open())
            keys = {name: sampling_key(0, name, 0) for name in states}
            ended = self._played(states, keys, tools)
            right += sum(state.command.result.reward == 1.0 for state in ended)
            self._do(tools.close())
        self.batcher = engine
        replace_weights(self.model, serving)
        return right / len(questions)


# -- arms ----------------------------------------------------------------------------------------------


def play(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: its curve, rows of (step, simulated seconds, success), and what else is in the table."""
    bound, _, kind = arm.partition("-")
    own = [f"buffer.max_staleness={NAMED.get(bound, bound)}"]
    if kind and kind not in (WEIGHTS, INSTALMENTS):
        own.append(f"algorithm={kind}")
    common = ["name=tail", "experiment=calculator", "model.device=cpu", "trainer.micro_batch_tokens=2048"]
    given = [one for one in options.overrides if bound != "sync" or "target_staleness" not in one]
    config = compose([*common, f"seed={seed}", f"total_steps={options.steps}", *own, *given])
    compose_recipe(config)
    median, sigma = CALLS[options.workload]
    run = Learning(config, UNBOUNDED if bound == UNBOUNDED else kind, (median * G, sigma), options.slots)
    questions = load_samples(str(write_questions(options.out.parent, 2048)))
    curve = []
    for step in range(options.every, options.steps + 1, options.every):
        run.run(step)
        tests = questions if step == options.steps else questions[: options.tests]
        curve.append((step, run.now, run.success(tests)))
    counts = run.learner.counts
    window = run.steps[2 * options.steps // 5 :]
    return {
        "arm": arm,
        "seed": seed,
        "curve": curve,
        "T": statistics.fmean(step.seconds for step in window),
        "masked": 1 - (counts["trained"] / counts["all"]),
        "instalments": run.in_instalments / counts["all"],
        "lag": counts["lag"] / counts["trained"],
    }


def report(found: Sequence[Mapping[str, Any]]) -> str:
    """One line per arm."""
    arms: dict[str, dict[int, Mapping[str, Any]]] = {}
    for one in found:
        arms.setdefault(one["arm"], {})[one["seed"]] = one
    final = {arm: {seed: one["curve"][-1][-1] for seed, one in runs.items()} for arm, runs in arms.items()}
    lines = []
    for arm, runs in arms.items():
        sync = final.get("sync", {})
        difference, bound = bounds([final[arm][seed] - sync[seed] for seed in runs if seed in sync])
        at_90 = [next((row for row in one["curve"] if row[-1] >= 0.9), None) for one in runs.values()]

        def mean(key: str, runs: Mapping[int, Mapping[str, Any]] = runs) -> float:
            return statistics.fmean(one[key] for one in runs.values())

        reached = [row for row in at_90 if row]
        steps, seconds = (
            f"{statistics.fmean(row[place] for row in reached):.1f}"
            if len(reached) == len(runs)
            else "not all"
            for place in (0, 1)
        )
        lines.append(
            [
                *(arm, f"{len(runs)}", f"{statistics.fmean(final[arm].values()):.2%}"),
                f"{100 * difference:+.2f}, {100 * bound:+.2f}" if arm != "sync" else "",
                *(steps, seconds, f"{mean('T') / G:.1f}", f"{mean('masked'):.2%}"),
                *(f"{mean('instalments'):.1%}", f"{mean('lag'):.2f}"),
            ]
        )
    return table(HEADER, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=["sync", "4", "16", "4-instalments"])
    parser.add_argument("--workload", default="tail", choices=CALLS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--every", type=int, default=4, help="steps between two tests; divides --steps")
    parser.add_argument("--tests", type=int, default=256, help="questions of each; the last one asks 2,048")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True, help="a line is added for each run")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in [] if options.table else options.seeds:
        for arm in options.arms:
            found = play(arm, seed, options)
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(arm, seed, found["curve"][-1], flush=True)
    print(report([json.loads(line) for line in options.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
