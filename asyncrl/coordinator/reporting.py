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

from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.buffer.replay import USABLE
from asyncrl.config import leaves
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.observe.alerts import find_alerts
from asyncrl.observe.answers import answer_metrics
from asyncrl.observe.evidence import rows_for_rules
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
    tool_calls: number of calls of the run's tools: all `answered` calls, and those that `failed`, were
        `declined` or were `refused`.
    end_counts: number of episodes by ending.
    answer_counts: number of episodes by sample and answer, shortened; '' is an empty answer.
    """

    columns: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tool_calls: Counter[str] = field(default_factory=Counter)
    end_counts: Counter[str] = field(default_factory=Counter)
    answer_counts: Counter[tuple[int, str]] = field(default_factory=Counter)


class Reporter:
    """Collects numbers and writes `metrics.jsonl`, from which a restarted reporter reads the run's time."""

    def __init__(
        self, state: RunState, workers: WorkerHandler, engines: EngineHandler, trainer: TrainerHandler
    ) -> None:
        self.config = state.config
        self.run_dir = state.run_dir
        self.ledger = state.ledger
        self.buffer = state.ledger.buffer
        self.fleet = state.fleet
        self.versions = state.fleet.versions
        self.journal = state.journal
        self.workers = workers
        self.engines = engines
        self.trainer = trainer

        self.landed_episodes = LandedEpisodes()
        self.started = time.monotonic()
        self.begin_running()

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
        """Begin the first row: once at the start, and again as the run leaves the start phase."""
        now = time.monotonic()
        self.running_since = now
        self.row_at = now
        self._process_totals = self._busy_totals()
        self._engine_time = self.fleet.engine_time(now)  # time of the engines' clock at the last row

    def count_turn(self, tokens: int) -> None:
        """Count a durable turn, whose prompt was checked to extend the tokens of its sequence."""
        self._new_tokens += tokens
        self.checked_turns += 1

    def note_landed(self, episode: EpisodeRecord, sample: int, answer: str) -> None:
        """Count an episode of a sample, which ended with this answer."""
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
            "rollout/repeated_frac": stats.repeated / max(1, result.tokens),
            "rollout/untrained_turns": stats.untrained_turns,
            "rollout/system_folded": stats.system_folded,
            "timing_s/episode": stats.seconds,
            "timing_s/tools": stats.tool_s,
            "timing_s/reward": stats.reward_s,
        } | {f"rollout/component/{name}": value for name, value in result.components.items()}
        numbers |= {f"rollout/agent/{name}": part.score for name, part in result.agent_results.items()}

        for name, value in numbers.items():
            columns[name].append(value)

        self.landed_episodes.tool_calls.update(
            answered=stats.answered, failed=stats.failed, declined=stats.declined, refused=stats.refused
        )
        self.landed_episodes.end_counts[result.end] += 1
        self.landed_episodes.answer_counts[sample, answer] += 1
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
            log.error("metrics.jsonl: %s; retrying with the next row", error)

    @property
    def seconds(self) -> float:
        """Wall time of the run, including the parts before a resume."""
        return self.seconds_before + time.monotonic() - self.started

    def write_status(self, phase: str) -> Status:
        """Return the present status for observers, and write the status file for `asyncrl status`."""
        gauges = self.gauges() | {BATCH: self.batch_fraction()}

        # Before the end of the first step, landed episodes give the numbers.
        if (
            not self._last_metrics
            and not self.ledger.samples[0].demonstration
            and self.landed_episodes.end_counts
        ):
            settled = self.buffer.settled_counts
            gauges |= self._episode_metrics() | {FILTERED: settled[State.FILTERED] / max(1, settled.total())}

        failed_attempts = self.ledger.failed_attempts
        status = Status(
            phase,
            self.ledger.batches.committed,
            self.ledger.total_batches,
            gauges,
            self.describe_waits(),
            failures_line(failed_attempts.counts, failed_attempts.newest),
        )

        snapshot = msgspec.structs.asdict(status) | {
            "time": time.time(),
            "seconds": self.seconds,
            "running": time.monotonic() - self.running_since,
            "lost": failed_attempts.lost,
            "checkpoint_problem": self.trainer.checkpoint_problem,
            "mismatch": self.engines.mismatches.newest,
        }
        alerts = tuple(find_alerts(self._recent_rows, snapshot, self._config_leaves))
        write_status(self.run_dir, snapshot | {"alerts": alerts, "metrics": self._last_metrics})
        return msgspec.structs.replace(status, alerts=alerts)

    def gauges(self) -> dict[str, float]:
        """Return present values, under the names of metrics.jsonl."""
        counts = self.buffer.state_counts()
        account = msgspec.structs.asdict(self.buffer.account())
        reprefilled_tokens = self.workers.reprefilled_tokens
        by_files = self.config.weights.transport == "disk"  # broadcasts are measured per engine

        return (
            {f"flow/{name}": float(value) for name, value in account.items()}
            | {
                "async/ready": float(counts[State.READY]),
                "async/running": float(counts[State.RUNNING]),
                "async/credits": float(self.workers.free_slots),
                "async/loop_turn_max_s": self.longest_pass,
                "async/live_groups": float(self.buffer.tally.count_live(self.buffer.committed)),
                "async/workers": float(len(self.workers.peers)),
                "weights/pushed": float(self.versions.newest.step),
                "weights/acked": float(self.versions.acked_step),
                "weights/acked_lag": float(self.versions.newest.step - self.versions.acked_step),
                "weights/stall_s": self.trainer.snapshot_s,
                "weights/probe_logprob_diff_max": self.engines.largest_probe_gap,
                "weights/probe_logprob_diff_median": self.engines.probe_median_gap,
                "weights/sample_surprisal_z": self.engines.mismatches.sample_z,
                "weights/sample_tokens": float(self.engines.mismatches.sample_tokens),
                "weights/mismatches": float(self.engines.mismatches.count),
                "weights/probe_tokens": float(self.engines.probe_tokens),
                "rollout/multi_version_frac": self.multi_version_episodes / max(1, self.finished_episodes),
                "data/retired_samples": float(len(self.buffer.prompts.retired_samples)),
                "rollout/turns_checked": float(self.checked_turns),
                "rollout/abandoned_tokens": float(self.buffer.abandoned_tokens),
                "wire/refused": float(self.journal.outbox.refused),
            }
            | {
                f"rollout/attempts_failed/{reason}": float(self.ledger.failed_attempts.counts.get(reason, 0))
                for reason in FailReason
            }
            | ({"weights/push_s": self.trainer.write_s} if by_files else {})
            | ({"rollout/reprefilled_tokens": float(reprefilled_tokens)} if reprefilled_tokens else {})
            | self.engines.gauges()
            | self.ledger.live_limit.gauges()
            | (self.fleet.shifts.gauges() if self.fleet.shifts else {})
        )

    def batch_fraction(self) -> float:
        """Return the progress of the current step in [0, 1].

        An episode counts half once landed, and full once taken by the trainer.
        """
        counts = self.buffer.state_counts()
        buffer_config = self.config.buffer
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
        now = time.monotonic()
        process_waits += self.trainer.starting_waits(now)

        names_by_wait: dict[str, list[str]] = {}
        for name, waiting in process_waits:
            names_by_wait.setdefault(waiting, []).append(name)

        all_waits = [*dict.fromkeys(self.fleet.waits)]
        for waiting, names in names_by_wait.items():
            if waiting:
                suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
                all_waits.append(f"{names[0]}{suffix}: {waiting}")
        self._wait_since = {wait: self._wait_since.get(wait, now) for wait in all_waits}

        # The coordinator's own waits go to the timeline when they are over; numbers in them change.
        wait_keys = {re.sub(r"\d+", "#", wait) for wait in self.fleet.waits}
        for name in self._coordinator_waits.keys() - wait_keys:
            self.journal.timeline.record_past(name, now - self._coordinator_waits.pop(name))
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

        tool_calls = self.landed_episodes.tool_calls
        if answered := tool_calls["answered"]:
            row["rollout/tool_failed_frac"] = tool_calls["failed"] / answered
            row["rollout/tool_declined_frac"] = tool_calls["declined"] / answered
            row["rollout/tool_refused_frac"] = tool_calls["refused"] / answered

        row |= {
            f"rollout/end/{end}": self.landed_episodes.end_counts[end] / landed_count for end in EpisodeEnd
        }

        row["rollout/landed"] = float(landed_count)
        return row | answer_metrics(self.landed_episodes.answer_counts)

    def _group_metrics(self, step: int) -> dict[str, float]:
        """Return metrics of the groups settled since the last row."""
        settled_counts: Counter[str] = Counter(self.buffer.settled_counts)
        earlier_counts = self._settled_counts
        self._settled_counts = settled_counts
        settled_groups = (settled_counts - earlier_counts).total()
        row = dict[str, float]()

        if settled_groups:
            filtered_groups = settled_counts[State.FILTERED] - earlier_counts[State.FILTERED]
            usable_groups = settled_counts[USABLE] - earlier_counts[USABLE]
            row[FILTERED] = filtered_groups / settled_groups
            row["rollout/discarded_group_frac"] = (settled_groups - usable_groups) / settled_groups

        trained_groups = len(self.ledger.batches.by_step[step].groups)
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

        if (shifts := self.fleet.shifts) is not None:  # a side has the devices for a part of the time alone
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

        if token_count:
            idle_metrics["timing_per_token_ms/gen"] = 1e3 * generating_seconds / token_count
        return idle_metrics

    def audit(self) -> bool:
        """Return True if the account of all episodes is exact, and agrees with independent counters.

        `issued` comes from the data cursor. The buffer's states, the store's index, the plans of committed
        batches and a checkpoint's count of the lineage, if the checkpoint is of the last step, must agree.
        Raises StoreError if the store cannot be read, as the account is unknown then.
        """
        if self.journal.damage:
            raise StoreError(self.journal.damage)

        account = self.buffer.account()
        counts = self.buffer.state_counts()
        reader = self.journal.store.reader
        stored_counts = reader.counts()
        states_agree = all(counts[state] == stored_counts.get(state, 0) for state in State)
        plans_agree = reader.trained_in_plans() == account.trained
        checkpoint_agrees = self.trainer.checkpoint_trained in (None, account.trained)
        held_out_agrees = self.ledger.held_out.audit()
        return account.conserved and states_agree and plans_agree and checkpoint_agrees and held_out_agrees

    def write_summary(self, outcome: str, error: str) -> None:
        """Write the last row and the summary of the ended run. Raises StoreError and OSError."""
        self.write_row(
            {"training/step": float(self.ledger.batches.committed), "time_s": self.seconds} | self.gauges()
        )
        self._metrics_file.close()

        account = msgspec.structs.asdict(self.buffer.account())
        summary = summarize(read_rows(self.run_dir), account, self.audit())

        failed_attempts = self.ledger.failed_attempts
        status = {
            "phase": outcome,
            "gauges": self.gauges(),
            "failed": failures_line(failed_attempts.counts, ""),
            "checkpoint_problem": self.trainer.checkpoint_problem,
        }
        alerts = find_alerts(self._recent_rows, status, self._config_leaves)

        details = {
            "success_threshold": self.config.validation.success,
            "outcome": outcome,
            "error": error,
            "reasons": dict(self.buffer.reasons),
            "held_out": msgspec.structs.asdict(self.ledger.held_out.account()),
            "attempts_failed": failed_attempts.counts,
            "newest_failure": failed_attempts.newest,
            "checkpoints": checkpoints_of(self.config, self.run_dir).root,
            "alerts": [alert.line for alert in alerts],
            "agents": [*self.config.agents],
        }
        write_summary(self.run_dir, summary | details)


# -- transcripts -------------------------------------------------------------------------------------------


MAX_QUESTIONS = 8  # transcribed questions of a validation, each with sampled and greedy episodes


def transcribed_questions(count: int) -> frozenset[int]:
    """Choose some of `count` held-out samples, evenly spread, as files are often sorted by difficulty."""
    question_count = min(MAX_QUESTIONS, count)
    return frozenset(index * count // question_count for index in range(question_count))


def transcript_entry(uid: str, sample: Sample, **outcome: Any) -> dict[str, Any]:
    """Return a transcript: the question, and the outcome of the episode."""
    question = {
        "sample": sample.row,
        "data_source": sample.data_source,
        "ground_truth": sample.ground_truth,
    }
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
