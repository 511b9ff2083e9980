"""Reports the run: a metrics row per committed step, gauges for the console, the final audit, transcripts.

`transcripts/<validation|training>/step-<N>.jsonl`: a validation has the same questions each time. Training
has the first episodes of a group for each batch, in the file of the step that was under way when they landed.
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

from asyncrl.buffer.records import EpisodeAccount, EpisodeRecord, State
from asyncrl.buffer.replay import USABLE
from asyncrl.config import leaves
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.observe.alerts import find_alerts, rows_for_rules
from asyncrl.observe.files import LineFile, read_rows, write_status, write_summary
from asyncrl.observe.metrics import BATCH, FILTERED, OF_STEP, STEP_SECONDS, duration_text
from asyncrl.observe.summary import failures_line, summarize
from asyncrl.store.checkpoints import checkpoints_of
from asyncrl.store.schema import StoreError
from asyncrl.types import EpisodeEnd, EpisodeResult, FailReason, Sample
from asyncrl.wire.messages.shared import Status

# Metrics whose values for single episodes go into the histograms of trackers.
HISTOGRAM_METRICS = (
    "rollout/score",
    "rollout/response_length",
)
MAX_VALUES = 4096  # values of a metric in a report
MAX_LATE_SECONDS = 1.0  # busy seconds that heartbeats, sent every half second, may not have reported yet


@dataclass
class LandedEpisodes:
    """Training episodes that landed since the last row, whatever the outcome of their groups.

    columns: numbers of the episodes by metric. Of greedy episodes only the score counts, as a separate
        metric.
    fractions: pairs (numerator, denominator) of the episodes by metric.
    end_counts: number of episodes by ending.
    """

    columns: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fractions: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    end_counts: Counter[str] = field(default_factory=Counter)


class Reporter:
    """Collects numbers and writes `metrics.jsonl`, from which a restarted reporter reads the run's time."""

    def __init__(
        self, state: RunState, workers: WorkerHandler, engines: EngineHandler, trainer: TrainerHandler
    ) -> None:
        self.state = state
        self.workers = workers
        self.engines = engines
        self.trainer = trainer

        self.landed_episodes = LandedEpisodes()
        now = time.monotonic()
        self.started = now
        self.running_since = now
        self.row_at = now

        # Totals of this process.
        self.finished_episodes = 0
        self.multi_version_episodes = 0
        self.checked_turns = 0
        self.longest_pass = 0.0  # seconds of the longest pass of the loop since the last row
        self._new_tokens = 0  # model tokens of durable turns since the last row

        earlier_rows = read_rows(state.run_dir)
        self.seconds_before = earlier_rows[-1].get("time_s", 0.0) if earlier_rows else 0.0
        self._recent_rows = rows_for_rules(earlier_rows)  # rows, for alerts
        self._config_leaves = dict(leaves(msgspec.to_builtins(state.config)))

        self._metrics_file = LineFile(state.run_dir / "metrics.jsonl")
        self._unwritten_rows = b""  # rows that did not fit on a full disk

        self._process_totals = self._busy_totals()
        self._engine_time = state.engine_time(self.row_at)  # time of the engines' clock at the last row
        # Busy seconds of an earlier shift, reported late.
        self._excess_busy = {"rollout": 0.0, "trainer": 0.0}
        self._settled_counts: Counter[str] = Counter()

        # Time at which a present wait was first found: of all waits, and of the coordinator's waits by their
        # name in the timeline.
        self._wait_since: dict[str, float] = {}
        self._coordinator_waits: dict[str, float] = {}

        self.episode_values: dict[str, list[float]] = {}  # values of single episodes of the last row
        self._last_metrics: dict[str, float] = {}  # metrics of the last step that `asyncrl status` shows

    def begin_running(self) -> None:
        """Begin the first row, as the run leaves the start phase."""
        now = time.monotonic()
        self.running_since = now
        self.row_at = now
        self._process_totals = self._busy_totals()
        self._engine_time = self.state.engine_time(now)

    def count_turn(self, tokens: int) -> None:
        """Count a durable turn, whose prompt was checked to extend the tokens of its sequence."""
        self._new_tokens += tokens
        self.checked_turns += 1

    def note_landed(self, episode: EpisodeRecord) -> None:
        columns = self.landed_episodes.columns
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
        numbers |= {f"rollout/agent/{name}": part.score for name, part in result.agent_results.items()}

        for name, value in numbers.items():
            columns[name].append(value)

        shares = self.landed_episodes.fractions
        shares["rollout/tool_failed_frac"].append((stats.failed, stats.answered))
        shares["rollout/tool_declined_frac"].append((stats.declined, stats.answered))
        shares["rollout/tool_refused_frac"].append((stats.refused, stats.answered))

        self.landed_episodes.end_counts[result.end] += 1
        self.finished_episodes += 1
        self.multi_version_episodes += episode.oldest != episode.newest

    def step_row(self, step: int, trainer_metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a committed step, by trainer and coordinator, and write the row."""
        now = time.monotonic()
        row = {"training/step": float(step), "time_s": self.seconds, STEP_SECONDS: now - self.row_at}
        row |= trainer_metrics | self.gauges() | self._episode_metrics() | self._group_metrics(step)
        row |= self._idle_metrics(now - self.row_at)

        self.row_at = now
        self.longest_pass = 0.0
        self._last_metrics = {name: row[name] for name in OF_STEP if name in row}
        self.episode_values = {
            name: self.landed_episodes.columns[name][:MAX_VALUES] for name in HISTOGRAM_METRICS
        }
        self.landed_episodes = LandedEpisodes()

        self.write_row(row)
        return row

    def write_row(self, row: dict[str, float]) -> None:
        """Append a row to metrics.jsonl. On a full disk the row is written together with the next row."""
        self._recent_rows = rows_for_rules([*self._recent_rows, row])
        self._unwritten_rows += json.dumps(row).encode() + b"\n"

        try:
            self._metrics_file.append(self._unwritten_rows)
            self._unwritten_rows = b""
        except OSError as error:
            log.error("metrics.jsonl: %s; written with the next row", error)

    @property
    def seconds(self) -> float:
        """Wall time of the run, including the parts before a resume."""
        return self.seconds_before + time.monotonic() - self.started

    def write_status(self, phase: str) -> Status:
        """Return the present status for observers, and write the status file for `asyncrl status`."""
        state = self.state
        gauges = self.gauges() | {BATCH: self.batch_fraction()}

        # Before the end of the first step, landed episodes give the numbers.
        if not self._last_metrics and not state.samples[0].demonstration and self.landed_episodes.end_counts:
            settled = state.buffer.settled_counts
            gauges |= self._episode_metrics() | {FILTERED: settled[State.FILTERED] / max(1, settled.total())}

        failure_summary = failures_line(state.failed_attempts.counts, state.failed_attempts.newest)
        step = state.batches.committed
        status = Status(phase, step, state.total_batches, gauges, self.describe_waits(), failure_summary)

        snapshot = msgspec.structs.asdict(status) | {"time": time.time(), "seconds": self.seconds}
        snapshot |= {"running": time.monotonic() - self.running_since, "lost": state.failed_attempts.lost}
        snapshot |= {"checkpoint_problem": self.trainer.checkpoint_problem}

        status = msgspec.structs.replace(
            status, alerts=tuple(find_alerts(self._recent_rows, snapshot, self._config_leaves))
        )
        write_status(state.run_dir, snapshot | {"alerts": status.alerts, "metrics": self._last_metrics})
        return status

    def gauges(self) -> dict[str, float]:
        """Return present values, under the names of metrics.jsonl."""
        state = self.state
        counts = self.state.buffer.state_counts()
        trainer = self.trainer
        account = msgspec.structs.asdict(state.buffer.account())
        by_files = state.config.weights.transport == "disk"  # broadcasts are measured per engine

        return (
            {f"flow/{name}": float(value) for name, value in account.items()}
            | {
                "async/ready": float(counts[State.READY]),
                "async/running": float(counts[State.RUNNING]),
                "async/credits": float(self.workers.free_slots),
                "async/loop_turn_max_s": self.longest_pass,
                "async/live_groups": float(state.buffer.tally.count_live(state.buffer.committed)),
                "async/workers": float(len(self.workers.peers)),
                "weights/pushed": float(state.versions.newest.step),
                "weights/acked": float(state.versions.acked_step),
                "weights/acked_lag": float(state.versions.newest.step - state.versions.acked_step),
                "weights/stall_s": trainer.snapshot_s,
                "weights/probe_logprob_diff_max": self.engines.probe_gap,
                "weights/probe_tokens": float(self.engines.probe_tokens),
                "rollout/multi_version_frac": self.multi_version_episodes / max(1, self.finished_episodes),
                "data/retired_samples": float(len(state.buffer.prompts.retired_samples)),
                "rollout/turns_checked": float(self.checked_turns),
                "rollout/abandoned_tokens": float(state.buffer.abandoned_tokens),
                "wire/refused": float(state.outbox.refused),
            }
            | {
                f"rollout/attempts_failed/{reason}": float(state.failed_attempts.counts.get(reason, 0))
                for reason in FailReason
            }
            | ({"weights/push_s": trainer.write_s} if by_files else {})
            | self.engines.gauges()
            | state.live_limit.gauges()
            | (state.shifts.gauges() if state.shifts else {})
        )

    def batch_fraction(self) -> float:
        """Return the progress of the current step in [0, 1].

        An episode counts half once landed, and full once taken by the trainer.
        """
        counts = self.state.buffer.state_counts()
        buffer_config = self.state.config.buffer
        taken_count = counts[State.TAKEN]
        landed_count = taken_count + counts[State.READY] + counts[State.LANDED]
        return min(
            1.0,
            (landed_count + taken_count)
            / (2 * buffer_config.groups_per_batch * buffer_config.episodes_per_group),
        )

    def describe_waits(self) -> tuple[str, ...]:
        """Return a line for each wait, with its duration since a call of this method first found the wait.

        Processes with the same wait share a line.
        """
        supervisors = *self.engines.supervisors, *self.engines.scorers.supervisors
        peers = (*self.workers.peers, *supervisors, *self.trainer.ranks.peers)
        process_waits = [(process.name, process.heartbeat.waiting) for process in peers if process.heartbeat]
        coordinator_waits = dict.fromkeys(self.state.waits)
        now = time.monotonic()
        process_waits += self.trainer.starting_waits(now)

        names_by_wait: dict[str, list[str]] = {}
        for name, waiting in process_waits:
            names_by_wait.setdefault(waiting, []).append(name)

        all_waits = [*coordinator_waits]
        for waiting, names in names_by_wait.items():
            if waiting:
                suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
                all_waits.append(f"{names[0]}{suffix}: {waiting}")
        self._wait_since = {wait: self._wait_since.get(wait, now) for wait in all_waits}

        # The coordinator's own waits go to the timeline when they are over; numbers in them change.
        wait_keys = {re.sub(r"\d+", "#", wait) for wait in self.state.waits}
        for name in self._coordinator_waits.keys() - wait_keys:
            self.state.timeline.record_past(name, now - self._coordinator_waits.pop(name))
        self._coordinator_waits = dict.fromkeys(wait_keys, now) | self._coordinator_waits

        wait_seconds = {wait: now - since for wait, since in self._wait_since.items()}
        return tuple(
            f"{wait} ({duration_text(wait_seconds[wait])})" if wait_seconds[wait] >= 1 else wait
            for wait in all_waits
        )

    def _episode_metrics(self) -> dict[str, float]:
        columns = self.landed_episodes.columns
        landed_count = self.landed_episodes.end_counts.total()
        if not landed_count:
            return {}

        row = {f"{name}/mean": sum(values) / len(values) for name, values in columns.items()}
        row |= {f"{name}/max": float(max(values)) for name, values in columns.items()}
        row |= {f"{name}/min": float(min(values)) for name, values in columns.items()}

        for name in HISTOGRAM_METRICS if landed_count > 1 else ():
            quantile_values = quantiles(columns[name], n=20, method="inclusive")
            row |= {
                f"{name}/p{5 * cut_index + 5:02}": quantile_values[cut_index]
                for cut_index in (0, 4, 9, 14, 18)
            }

        fraction_sums = {
            name: tuple(map(sum, zip(*pairs, strict=True)))
            for name, pairs in self.landed_episodes.fractions.items()
        }
        row |= {
            name: numerator / denominator
            for name, (numerator, denominator) in fraction_sums.items()
            if denominator
        }
        row |= {
            f"rollout/end/{end}": self.landed_episodes.end_counts[end] / landed_count for end in EpisodeEnd
        }

        row["rollout/landed"] = float(landed_count)
        return row

    def _group_metrics(self, step: int) -> dict[str, float]:
        """Return metrics of the groups settled since the last row."""
        state = self.state
        settled_counts: Counter[str] = Counter(state.buffer.settled_counts)
        earlier_counts = self._settled_counts
        self._settled_counts = settled_counts
        settled_groups = (settled_counts - earlier_counts).total()
        row = dict[str, float]()

        if settled_groups:
            filtered_groups = settled_counts[State.FILTERED] - earlier_counts[State.FILTERED]
            usable_groups = settled_counts[USABLE] - earlier_counts[USABLE]
            row[FILTERED] = filtered_groups / settled_groups
            row["rollout/discarded_group_frac"] = (settled_groups - usable_groups) / settled_groups

        trained_groups = len(state.batches.by_step[step - 1].groups)
        if trained_groups:
            row["rollout/groups_per_trained_group"] = settled_groups / trained_groups

        return row

    def _busy_totals(self) -> dict[str, tuple[float, float]]:
        """Return the pair of busy and idle seconds of each process, since its start."""
        return {
            f"{process.name}/{process.hello.incarnation}": (
                process.heartbeat.busy_s,
                process.heartbeat.idle_s,
            )
            for process in (*self.workers.peers, *self.trainer.ranks.peers)
            if process.heartbeat
        }

    def _idle_metrics(self, seconds: float) -> dict[str, float]:
        """Return idle fractions and throughput since the last row."""
        earlier_totals = self._process_totals
        self._process_totals = self._busy_totals()

        busy_seconds = {"trainer": 0.0, "rollout": 0.0}
        idle_seconds = dict(busy_seconds)
        for name, (busy, idle) in self._process_totals.items():
            earlier_busy, earlier_idle = earlier_totals.get(name, (0.0, 0.0))
            role = "trainer" if name.startswith("trainer") else "rollout"
            busy_seconds[role] += busy - earlier_busy
            idle_seconds[role] += idle - earlier_idle

        if (shifts := self.state.shifts) is not None:  # a side has the devices for a part of the time alone
            awake_before = self._engine_time
            self._engine_time = shifts.clock(time.monotonic())
            side_seconds = {
                "rollout": self._engine_time - awake_before,
                "trainer": seconds - (self._engine_time - awake_before),
            }
            process_counts = {"rollout": len(self.workers.peers), "trainer": len(self.trainer.ranks.peers)}

            for role in side_seconds:
                available_seconds = side_seconds[role] * process_counts[role]
                excess_seconds = self._excess_busy[role] + busy_seconds[role] - available_seconds
                self._excess_busy[role] = max(
                    0.0, min(excess_seconds, MAX_LATE_SECONDS * process_counts[role])
                )
                idle_seconds[role] = max(0.0, -excess_seconds)
                busy_seconds[role] = available_seconds - idle_seconds[role]

        idle_metrics = {
            f"async/{role}_idle_frac": idle_seconds[role] / (busy_seconds[role] + idle_seconds[role])
            for role in ("trainer", "rollout")
            if busy_seconds[role] + idle_seconds[role] > 0
        }

        token_count = self._new_tokens
        self._new_tokens = 0
        generating_seconds = busy_seconds["rollout"] / max(
            1, sum(not name.startswith("trainer") for name in self._process_totals)
        )
        idle_metrics |= {
            "timing_s/gen": generating_seconds,
            "rollout/tokens_per_s": token_count / seconds if seconds > 0 else 0.0,
        }

        return idle_metrics | (
            {"timing_per_token_ms/gen": 1e3 * generating_seconds / token_count} if token_count else {}
        )

    def audit(self) -> tuple[EpisodeAccount, bool]:
        """Return the account of all episodes, and whether the account agrees with independent counters.

        `issued` comes from the data cursor. The buffer's states, the store's index, the plans of committed
        batches and a checkpoint's count of the lineage, if the checkpoint is of the last step, must agree.
        Raises StoreError if the store cannot be read, as the account is unknown then.
        """
        state = self.state
        if state.damage:
            raise StoreError(state.damage)

        account = state.buffer.account()
        counts = state.buffer.state_counts()
        stored_counts = state.store.reader.counts()

        states_agree = all(
            counts[episode_state] == stored_counts.get(episode_state, 0) for episode_state in State
        )
        plans_agree = state.store.reader.trained_in_plans() == account.trained
        checkpoint_agrees = self.trainer.checkpoint_trained in (None, account.trained)
        held_out_agrees = state.held_out.audit()
        return (
            account,
            account.conserved and states_agree and plans_agree and checkpoint_agrees and held_out_agrees,
        )

    def write_summary(self, outcome: str, error: str) -> None:
        """Write the last row and the summary of the ended run. Raises StoreError and OSError."""
        state = self.state
        self.write_row(
            {"training/step": float(state.batches.committed), "time_s": self.seconds} | self.gauges()
        )
        self._metrics_file.close()

        account, conserved = self.audit()
        summary = summarize(read_rows(state.run_dir), msgspec.structs.asdict(account), conserved)

        details = {"outcome": outcome, "error": error, "reasons": dict(state.buffer.reasons)}
        details["held_out"] = msgspec.structs.asdict(state.held_out.account())
        details |= {
            "attempts_failed": state.failed_attempts.counts,
            "newest_failure": state.failed_attempts.newest,
        }
        details["checkpoints"] = checkpoints_of(state.config, state.run_dir).root

        status = {
            "phase": outcome,
            "gauges": self.gauges(),
            "failed": failures_line(state.failed_attempts.counts, ""),
        }
        status |= {"checkpoint_problem": self.trainer.checkpoint_problem}

        details["alerts"] = [
            alert.line for alert in find_alerts(self._recent_rows, status, self._config_leaves)
        ]
        details["agents"] = [*state.config.agents]
        success_threshold = {"success_threshold": state.config.validation.success}

        write_summary(state.run_dir, summary | success_threshold | details)


# -- transcripts -------------------------------------------------------------------------------------------


MAX_QUESTIONS = 8  # transcribed questions of a validation, each with sampled and greedy episodes


def transcribed_questions(count: int) -> frozenset[int]:
    """Choose some of `count` held-out samples, evenly spread, as files are often sorted by difficulty."""
    question_count = min(MAX_QUESTIONS, count)
    return frozenset(index * count // question_count for index in range(question_count))


def transcript_entry(uid: str, sample: Sample, **outcome: Any) -> dict[str, Any]:
    """Return a transcript: the question, and the outcome of the episode."""
    truth = json.loads(sample.ground_truth)
    question = {"sample": sample.row, "data_source": sample.data_source, "ground_truth": truth}
    return {"uid": uid} | question | outcome


def result_entry(result: EpisodeResult) -> dict[str, Any]:
    """Return the numbers of a transcript. `reward` is present only with shaping, which it includes."""
    numbers = {"score": result.score, "components": result.components, "end": result.end}
    scores_by_agent = {name: part.score for name, part in result.agent_results.items()}
    agent_scores = {"agents": scores_by_agent} if scores_by_agent else {}
    return numbers | agent_scores | ({"reward": result.reward} if result.shaping else {})


def save_transcripts(
    run_dir: Path, kind: str, step: int, entries: Iterable[dict[str, Any]], replace: bool = False
) -> None:
    """Append transcripts to the file of a step, or replace the file. On a full disk they are left out."""
    path = run_dir / "transcripts" / kind / f"step-{step}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if replace:
            path.unlink(missing_ok=True)

        with closing(LineFile(path)) as file:
            file.append(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    except OSError as error:
        log.error("%s: no transcripts (%s)", path, error)
