"""Numbers of the run: one metrics row per committed step, gauges for the console, the audit at the end, and
the episodes that are kept as text.

`transcripts/<validation|training>/step-<N>.jsonl`: of a validation the same questions each time; of training
the first episodes of one group for each batch, in the file of the step that was under way when they landed.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import msgspec

from asyncrl.buffer.records import EpisodeRecord, Flow, State
from asyncrl.buffer.replay import USABLE
from asyncrl.config import leaves
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.observe.alerts import alerts, ends
from asyncrl.observe.files import LineFile, read_rows, write_status, write_summary
from asyncrl.observe.metrics import BATCH, FILTERED, OF_STEP, STEP_SECONDS, duration
from asyncrl.observe.summary import failures_line, summarize
from asyncrl.store.checkpoints import checkpoints_of
from asyncrl.store.schema import StoreError
from asyncrl.types import EpisodeEnd, EpisodeResult, FailReason, Sample
from asyncrl.wire.messages.shared import Status

SINGLE = ("rollout/score", "rollout/response_length")  # of single episodes, for the histograms of trackers
MOST_VALUES = 4096  # of each, in a report
LATE = 1.0  # busy seconds that heartbeats, one each half a second, may not have told yet


@dataclass
class Landed:
    """Training episodes that landed since the last row, whatever became of their group: their numbers by
    metric, shares by metric as (part, whole) of each, and how they ended. Of greedy episodes only the score
    is kept, as a metric of its own."""

    columns: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    shares: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    ends: Counter[str] = field(default_factory=Counter)


class Reporter:
    """Collects numbers and writes `metrics.jsonl`. A restarted one reads the run's time there."""

    def __init__(
        self, state: RunState, workers: WorkerHandler, engines: EngineHandler, trainer: TrainerHandler
    ) -> None:
        self.state = state
        self.workers = workers
        self.engines = engines
        self.trainer = trainer

        self.landed = Landed()
        self.started = self.began = self.row_at = time.monotonic()
        self.finished = self.multi_version = self.turns = 0  # totals of this process
        self.longest_turn = 0.0  # seconds of the loop's longest turn since the last row
        self._tokens = 0  # model tokens of durable turns since the last row

        earlier = read_rows(state.run_dir)
        self.seconds_before = earlier[-1].get("time_s", 0.0) if earlier else 0.0
        self._recent = ends(earlier)  # rows, for alerts
        self._keys = dict(leaves(msgspec.to_builtins(state.config)))

        self._file = LineFile(state.run_dir / "metrics.jsonl")
        self._unwritten = b""  # rows that found no room

        self._busy = self._totals()
        self._awake = state.engine_time(self.row_at)  # on the engines' clock, at the last row
        self._over = {"rollout": 0.0, "trainer": 0.0}  # busy seconds of an earlier shift, told late
        self._settled: Counter[str] = Counter()

        self._since: dict[str, float] = {}  # when a wait was found that has been there ever since
        self._own: dict[str, float] = {}  # likewise, the coordinator's own, by their name in the timeline
        self.values: dict[str, list[float]] = {}  # of the episodes of the last row
        self._last: dict[str, float] = {}  # metrics of the last step that `asyncrl status` shows

    def begin(self) -> None:
        """The run leaves its start phase: the first row counts from here."""
        self.began = self.row_at = time.monotonic()
        self._busy, self._awake = self._totals(), self.state.engine_time(self.row_at)

    def on_turn(self, tokens: int) -> None:
        """A turn is durable: its prompt was seen to extend the tokens of its row."""
        self._tokens += tokens
        self.turns += 1

    def on_landed(self, episode: EpisodeRecord) -> None:
        columns = self.landed.columns
        result = episode.result
        stats = episode.stats

        if episode.greedy:
            columns["rollout/greedy_score"].append(result.score)
            return

        numbers = {
            "rollout/score": result.score,  # before shaping
            "num_turns": stats.turns,
            "rollout/rows": stats.rows,
            "tool_call_counts": stats.tool_calls,
            "rollout/response_length": result.tokens,
            "rollout/untrained_turns": stats.untrained_turns,
            "rollout/system_folded": stats.system_folded,
            "timing_s/episode": stats.seconds,
            "timing_s/tools": stats.tool_s,
            "timing_s/reward": stats.reward_s,
        } | {f"rollout/component/{name}": value for name, value in result.components.items()}
        numbers |= {f"rollout/agent/{name}": part.score for name, part in result.parts.items()}

        for name, value in numbers.items():
            columns[name].append(value)

        shares = self.landed.shares
        shares["rollout/tool_failed_frac"].append((stats.failed, stats.answered))
        shares["rollout/tool_declined_frac"].append((stats.declined, stats.answered))
        shares["rollout/tool_refused_frac"].append((stats.refused, stats.answered))

        self.landed.ends[result.end] += 1
        self.finished += 1
        self.multi_version += episode.oldest != episode.newest

    def step_row(self, step: int, trained: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a committed step: the trainer's, and what only the coordinator knows."""
        now = time.monotonic()
        row = {"training/step": float(step), "time_s": self.seconds, STEP_SECONDS: now - self.row_at}
        row |= trained | self.gauges() | self._episodes() | self._groups(step)
        row |= self._shares(now - self.row_at)

        self.row_at = now
        self.longest_turn = 0.0
        self._last = {name: row[name] for name in OF_STEP if name in row}
        self.values = {name: self.landed.columns[name][:MOST_VALUES] for name in SINGLE}
        self.landed = Landed()

        self.write(row)
        return row

    def write(self, row: dict[str, float]) -> None:
        """Append a row to metrics.jsonl. On a full disk it waits for the next one: the run does not."""
        self._recent = ends([*self._recent, row])
        self._unwritten += json.dumps(row).encode() + b"\n"

        try:
            self._file.append(self._unwritten)
            self._unwritten = b""
        except OSError as error:
            log.error("metrics.jsonl: %s; written with the next row", error)

    @property
    def seconds(self) -> float:
        """Wall time of the run, earlier parts of a resumed one included."""
        return self.seconds_before + time.monotonic() - self.started

    def write_status(self, phase: str) -> Status:
        """The state now, for observers; written, too, for whoever looks from outside: `asyncrl status`."""
        state = self.state
        gauges = self.gauges() | {BATCH: self.batch_share()}

        if not self._last and not state.samples[0].demonstration and self.landed.ends:  # no step is over yet
            settled = state.buffer.settled
            gauges |= self._episodes() | {FILTERED: settled[State.FILTERED] / max(1, settled.total())}

        failed = failures_line(state.failed.counts, state.failed.newest)
        step = state.batches.committed
        status = Status(phase, step, state.steps, gauges, self.waits(), failed)

        now = msgspec.structs.asdict(status) | {"time": time.time(), "seconds": self.seconds}
        now |= {"running": time.monotonic() - self.began, "lost": state.failed.lost}
        now |= {"checkpoint_problem": self.trainer.checkpoint_problem}

        status = msgspec.structs.replace(status, alerts=tuple(alerts(self._recent, now, self._keys)))
        write_status(state.run_dir, now | {"alerts": status.alerts, "metrics": self._last})
        return status

    def gauges(self) -> dict[str, float]:
        """The state now, under the names of metrics.jsonl."""
        state = self.state
        counts = self.state.buffer.counts()
        trainer = self.trainer
        flow = msgspec.structs.asdict(state.buffer.flow())
        files = state.config.weights.transport == "disk"  # broadcasts are measured per engine

        return (
            {f"flow/{name}": float(value) for name, value in flow.items()}
            | {
                "async/ready": float(counts[State.READY]),
                "async/running": float(counts[State.RUNNING]),
                "async/credits": float(self.workers.free_slots),
                "async/loop_turn_max_s": self.longest_turn,
                "async/live_groups": float(state.buffer.tally.open(state.buffer.committed)),
                "async/workers": float(len(self.workers.peers)),
                "weights/pushed": float(state.versions.newest.step),
                "weights/acked": float(state.versions.acked_step),
                "weights/acked_lag": float(state.versions.newest.step - state.versions.acked_step),
                "weights/stall_s": trainer.snapshot_s,
                "weights/probe_logprob_diff_max": self.engines.probe_gap,
                "weights/probe_tokens": float(self.engines.probe_tokens),
                "rollout/multi_version_frac": self.multi_version / max(1, self.finished),
                "data/retired_samples": float(len(state.buffer.prompts.retired)),
                "rollout/turns_checked": float(self.turns),
                "rollout/abandoned_tokens": float(state.buffer.abandoned_tokens),
                "wire/refused": float(state.outbox.refused),
            }
            | {
                f"rollout/attempts_failed/{reason}": float(state.failed.counts.get(reason, 0))
                for reason in FailReason
            }
            | ({"weights/push_s": trainer.write_s} if files else {})
            | self.engines.gauges()
            | state.live_limit.gauges()
            | (state.shifts.gauges() if state.shifts else {})
        )

    def batch_share(self) -> float:
        """Measures how far the step under way is: an episode counts half when it has landed, and whole when
        the trainer has taken it."""
        counts = self.state.buffer.counts()
        buffer = self.state.config.buffer
        taken = counts[State.TAKEN]
        landed = taken + counts[State.READY] + counts[State.LANDED]
        return min(1.0, (landed + taken) / (2 * buffer.groups_per_batch * buffer.episodes_per_group))

    def waits(self) -> tuple[str, ...]:
        """Says who waits for what, and for how long, as far as asked: each wait since it was first found
        here. Who waits for the same is named together."""
        keepers = *self.engines.keepers, *self.engines.scorers.keepers
        peers = (*self.workers.peers, *keepers, *self.trainer.ranks.peers)
        named = [(one.name, one.beat.waiting) for one in peers if one.beat]
        own = dict.fromkeys(self.state.waits)
        now = time.monotonic()
        named += self.trainer.starting_waits(now)

        who: dict[str, list[str]] = {}
        for name, waiting in named:
            who.setdefault(waiting, []).append(name)
        more = {waiting: f" and {len(names) - 1} more" * (len(names) > 1) for waiting, names in who.items()}
        found = (*own, *(f"{who[waiting][0]}{more[waiting]}: {waiting}" for waiting in who if waiting))

        self._since = {wait: self._since.get(wait, now) for wait in found}

        # The coordinator's own waits go to the timeline when they are over; numbers in them change.
        names = {re.sub(r"\d+", "#", wait) for wait in self.state.waits}
        for name in self._own.keys() - names:
            self.state.timeline.past(name, now - self._own.pop(name))
        self._own = dict.fromkeys(names, now) | self._own

        seconds = {wait: now - since for wait, since in self._since.items()}
        return tuple(f"{wait} ({duration(seconds[wait])})" if seconds[wait] >= 1 else wait for wait in found)

    def _episodes(self) -> dict[str, float]:
        columns = self.landed.columns
        landed = self.landed.ends.total()
        if not landed:
            return {}

        row = {f"{name}/mean": sum(values) / len(values) for name, values in columns.items()}
        row |= {f"{name}/max": float(max(values)) for name, values in columns.items()}
        row |= {f"{name}/min": float(min(values)) for name, values in columns.items()}

        for name in SINGLE if landed > 1 else ():
            cuts = quantiles(columns[name], n=20, method="inclusive")
            row |= {f"{name}/p{5 * at + 5:02}": cuts[at] for at in (0, 4, 9, 14, 18)}

        sums = {name: tuple(map(sum, zip(*pairs, strict=True))) for name, pairs in self.landed.shares.items()}
        row |= {name: part / whole for name, (part, whole) in sums.items() if whole}
        row |= {f"rollout/end/{end}": self.landed.ends[end] / landed for end in EpisodeEnd}

        row["rollout/landed"] = float(landed)
        return row

    def _groups(self, step: int) -> dict[str, float]:
        """Count what became of the groups settled since the last row, and of cohorts that are over."""
        state = self.state
        now = Counter(state.buffer.settled)
        before = self._settled
        self._settled = now
        settled = (now - before).total()
        row = state.buffer.cohorts.pop_gaps(before_step=step)

        if settled:
            filtered = now[State.FILTERED] - before[State.FILTERED]
            usable = now[USABLE] - before[USABLE]
            row[FILTERED] = filtered / settled
            row["rollout/discarded_group_frac"] = (settled - usable) / settled

        trained = len(state.batches.batches[step - 1].groups)
        if trained:
            row["rollout/groups_per_trained_group"] = settled / trained

        return row

    def _totals(self) -> dict[str, tuple[float, float]]:
        """(busy s, idle s) by process, since each began."""
        return {
            f"{one.name}/{one.hello.incarnation}": (one.beat.busy_s, one.beat.idle_s)
            for one in (*self.workers.peers, *self.trainer.ranks.peers)
            if one.beat
        }

    def _shares(self, seconds: float) -> dict[str, float]:
        """Idle shares and throughput since the last row."""
        before = self._busy
        self._busy = self._totals()

        busy = {"trainer": 0.0, "rollout": 0.0}
        idle = dict(busy)
        for name, (b, i) in self._busy.items():
            b0, i0 = before.get(name, (0.0, 0.0))
            role = "trainer" if name.startswith("trainer") else "rollout"
            busy[role] += b - b0
            idle[role] += i - i0

        if (shifts := self.state.shifts) is not None:  # each side counts its own half
            awake = self._awake
            self._awake = shifts.clock(time.monotonic())
            halves = {"rollout": self._awake - awake, "trainer": seconds - (self._awake - awake)}
            processes = {"rollout": len(self.workers.peers), "trainer": len(self.trainer.ranks.peers)}

            for role in halves:
                half = halves[role] * processes[role]
                over = self._over[role] + busy[role] - half
                self._over[role] = max(0.0, min(over, LATE * processes[role]))
                idle[role] = max(0.0, -over)
                busy[role] = half - idle[role]

        shares = {
            f"async/{role}_idle_frac": idle[role] / (busy[role] + idle[role])
            for role in ("trainer", "rollout")
            if busy[role] + idle[role] > 0
        }

        tokens = self._tokens
        self._tokens = 0
        generating = busy["rollout"] / max(1, sum(not name.startswith("trainer") for name in self._busy))
        shares |= {
            "timing_s/gen": generating,
            "rollout/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        }

        return shares | ({"timing_per_token_ms/gen": 1e3 * generating / tokens} if tokens else {})

    def audit(self) -> tuple[Flow, bool]:
        """Return (the conservation identity, whether it and independent counters agree).

        `issued` comes from the data cursor; the buffer's states, the store's index, the plans of committed
        batches and, if it is of the last step, the checkpoint's own count of the lineage must agree. Raises
        StoreError when the store cannot be read: then nothing is known of the account.
        """
        state = self.state
        if state.damage:
            raise StoreError(state.damage)

        flow = state.buffer.flow()
        counts = state.buffer.counts()
        store = state.store.read.counts()

        agree = all(counts[one] == store.get(one, 0) for one in State)
        planned = state.store.read.trained_in_plans() == flow.trained
        counted = self.trainer.checkpoint_trained in (None, flow.trained)
        held_out = state.held_out.audit()
        return flow, flow.conserved and agree and planned and counted and held_out

    def write_summary(self, outcome: str, error: str) -> None:
        """The last row, and the summary of the run, which is over. Raises StoreError and OSError."""
        state = self.state
        self.write({"training/step": float(state.batches.committed), "time_s": self.seconds} | self.gauges())
        self._file.close()

        flow, conserved = self.audit()
        summary = summarize(read_rows(state.run_dir), msgspec.structs.asdict(flow), conserved)

        ending = {"outcome": outcome, "error": error, "reasons": dict(state.buffer.reasons)}
        ending["held_out"] = msgspec.structs.asdict(state.held_out.flow())
        ending |= {"attempts_failed": state.failed.counts, "newest_failure": state.failed.newest}
        ending["checkpoints"] = checkpoints_of(state.config, state.run_dir).root

        status = {"phase": outcome, "gauges": self.gauges(), "failed": failures_line(state.failed.counts, "")}
        status |= {"checkpoint_problem": self.trainer.checkpoint_problem}

        ending["alerts"] = [alert.line for alert in alerts(self._recent, status, self._keys)]
        ending["agents"] = [*state.config.agents]
        threshold = {"success_threshold": state.config.validation.success}

        write_summary(state.run_dir, summary | threshold | ending)


# -- transcripts -------------------------------------------------------------------------------------------


QUESTIONS = 8  # of a validation, each with its sampled and its greedy episode


def kept_questions(count: int) -> frozenset[int]:
    """Chooses some of `count` held-out samples, evenly spread: files are often sorted by source or
    difficulty."""
    kept = min(QUESTIONS, count)
    return frozenset(index * count // kept for index in range(kept))


def transcript_entry(uid: str, sample: Sample, **more: Any) -> dict[str, Any]:
    """Describes what is asked, and in `more` what came of it."""
    truth = json.loads(sample.ground_truth)
    asked = {"sample": sample.row, "data_source": sample.data_source, "ground_truth": truth}
    return {"uid": uid} | asked | more


def earned(result: EpisodeResult) -> dict[str, Any]:
    """Return the numbers of an entry. `reward`: with what shaping adds."""
    numbers = {"score": result.score, "components": result.components, "end": result.end}
    agents = {name: part.score for name, part in result.parts.items()}
    some = {"agents": agents} if agents else {}
    return numbers | some | ({"reward": result.reward} if result.shaping else {})


def save_transcripts(
    run_dir: Path, kind: str, step: int, entries: Iterable[dict[str, Any]], anew: bool = False
) -> None:
    """Append them to the file of a step, or write it `anew`. A full disk costs no more than them."""
    path = run_dir / "transcripts" / kind / f"step-{step}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            path.unlink(missing_ok=True)

        with closing(LineFile(path)) as file:
            file.append(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    except OSError as error:
        log.error("%s: no transcripts (%s)", path, error)
