"""Validates: samples held-out episodes with a fixed version, in a ledger beside the training buffer.

With embedded engines each worker has a second engine for the validation; of several servers one is reserved.
With a single server the weights go on changing, and the versions that sampled are reported.

consumes: validation episodes' records, from the worker handler
waits for: a fraction of the slots, engines that hold the fixed version and may sample; with a deadline
unblocks: the end of the run (the last validation)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncrl.buffer.records import EpisodeRecord
from asyncrl.coordinator.engines import LOAD_RETRY, EngineHandler
from asyncrl.coordinator.reporting import (
    result_entry,
    save_transcripts,
    transcribed_questions,
    transcript_entry,
)
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.workers import WorkerHandler
from asyncrl.observe.held_out import (
    GREEDY,
    SAMPLED,
    SCORED,
    UID_START,
    HeldOut,
    JudgedEpisode,
    answer_of,
    mean_losses,
    mean_sizes,
    numbers_per_sample,
    sample_means,
    succeeds,
    threshold_of,
    uid_prefix,
)
from asyncrl.observe.metrics import ASKED, HIGHEST
from asyncrl.types import FailReason, Sample
from asyncrl.weights import disk
from asyncrl.weights.manifest import Probe, WeightsError, WeightsRef
from asyncrl.wire.messages.shared import Loaded, LoadWeights
from asyncrl.wire.messages.worker import Failed, Finished

MID_RUN_FRACTION = 0.5  # fraction of a worker's slots for a validation during training
NO_SESSION = "null"  # stored after a session has ended


class SessionStart(msgspec.Struct, frozen=True):
    """A session under way, as stored beside its episodes.

    final: the session is at the start or the end of training.
    settings: settings under which the session samples.
    """

    step: int
    final: bool
    ref: WeightsRef
    settings: str = ""


class Validation:
    """Runs at most one session at a time.

    A session that is not over by its deadline is abandoned and logged.
    """

    def __init__(
        self, state: RunState, workers: WorkerHandler, engines: EngineHandler, samples: Sequence[Sample]
    ) -> None:
        self.config = state.config
        self.run_dir = state.run_dir
        self.ledger = state.ledger
        self.fleet = state.fleet
        self.journal = state.journal
        self.workers = workers
        self.engines = engines
        self.samples = samples
        self.episodes = state.ledger.held_out
        self.session: SessionStart | None = None
        self._probe: Probe | None = None  # of the session's version, once scored
        self.deadline = math.inf
        self.results: list[tuple[int, dict[str, float]]] = []
        self._session_resources = ExitStack()
        self._resumed = False  # resume_session was called

    def begin_session(self, step: int, final: bool, now: float) -> bool:
        """Start validating the newest published version.

        Return False without a version, or without samples.
        """
        ref = self.fleet.versions.ref
        if not self._sample_count:
            return False

        if self.session is not None:
            log.warning(
                "skipping the validation of step %d: the validation of step %d has not finished",
                step,
                self.session.step,
            )
        if self.session is not None or ref is None:
            return False

        return self._start_session(SessionStart(step, final, ref, self.config.held_out_settings), now)

    def resume_session(self, now: float, training_over: bool) -> None:
        """Resume the session that was under way when the coordinator ended, or validate step 0 of a new run.

        `training_over`: training has ended, and the last validation is still to come.
        """
        self._resumed = True
        stored = self.journal.store.reader.meta("validation")
        start = self._stored_session()
        committed = self.ledger.batches.committed

        if not stored and committed == 0:
            self.begin_session(0, True, now)
        elif start is not None and not (training_over and start.step == committed):
            log.warning("continuing the interrupted validation of step %d", start.step)
            restarted = replace(start, settings=self.config.held_out_settings)
            if self._is_evaluation and self.fleet.versions.ref is not None:
                restarted = replace(restarted, ref=self.fleet.versions.ref)  # the version with a probe
            if not self._start_session(restarted, now):
                self.begin_session(committed, start.final, now)

    def _stored_session(self) -> SessionStart | None:
        """Read the session that was under way when the coordinator ended."""
        stored = self.journal.store.reader.meta("validation", NO_SESSION)
        return msgspec.json.decode(stored, type=SessionStart | None)

    @property
    def _is_evaluation(self) -> bool:
        """True if nothing is trained: every sampled episode is kept, and there is no deadline."""
        return not self.config.total_steps

    @property
    def has_probe(self) -> bool:
        """True if the trainer has scored the probe with the newest version.

        An evaluation begins only then: all its engines are compared before their first episode.
        """
        return self.fleet.versions.find_probe(self.fleet.versions.newest) is not None

    @property
    def _transcribed_rows(self) -> frozenset[int]:
        if self._is_evaluation:
            return frozenset(range(self._sample_count))
        return transcribed_questions(self._sample_count)

    @property
    def _sample_count(self) -> int:
        return min(self.config.validation.samples, len(self.samples))

    def _episode_uids(self, step: int, row: int) -> list[str]:
        if self.samples[row].demonstration:
            return [HeldOut(step, SCORED, row).uid]
        validation_config = self.config.validation
        sampled = [HeldOut(step, SAMPLED, row, draw).uid for draw in range(validation_config.episodes)]
        greedy = [HeldOut(step, GREEDY, row).uid] if validation_config.greedy else []
        return sampled + greedy

    def _start_session(self, start: SessionStart, now: float) -> bool:
        try:
            # Workers load the files themselves, perhaps late: they must not be pruned.
            if not self.engines.remote:
                self._session_resources.enter_context(disk.lock_version(start.ref))
        except WeightsError as error:
            log.warning(
                "skipping the validation of step %d: its weights no longer exist (%s)", start.step, error
            )
            if start.step:  # the weights of step 0 are published again
                self.workers.cancel_episodes(self.episodes.end_session("the weights no longer exist"))
                self._store_session(None)
            return False

        # Stored episodes go on under the same weights and settings. The weights of step 0 are the model's,
        # whichever trainer has published them.
        step = start.step
        earlier = self._stored_session()
        continues = (
            earlier is not None
            and (earlier.step, earlier.settings) == (step, start.settings)
            and (step == 0 or earlier.ref.version == start.ref.version)
        )
        uids = [uid for row in range(self._sample_count) for uid in self._episode_uids(step, row)]
        self.episodes.begin_session(uid_prefix(step), uids, continues)

        end_time = self.fleet.engine_time(now) + self.config.rollout.episode_timeout * (1 + start.final)
        self.session = start
        self._probe = None
        self.deadline = math.inf if self._is_evaluation else end_time

        self._session_resources.enter_context(self.journal.timeline.span("validation", step=step))
        self._store_session(start)
        return True

    def _store_session(self, start: SessionStart | None) -> None:
        self.journal.store.put_meta("validation", msgspec.json.encode(start).decode())

    def assign_episodes(self, now: float, exclusive: bool) -> None:
        """Assign episodes to free slots.

        `exclusive`: training has ended, so the validation may use all slots.
        """
        session = self.session
        if session is None:
            return

        is_late = self.fleet.engine_time(now) > self.deadline
        if is_late:
            log.error("abandoning the validation of step %d: its deadline has passed", session.step)
        if is_late or not self._in_flight:
            self._end_session(session)
            return

        if not self.engines.awake:
            return

        workers = list(self.workers.peers)
        if self.engines.remote:
            # Servers are reserved, and workers know before they get episodes.
            servers_ready = self.engines.reserve_servers(session.ref.version, all_servers=exclusive)
            self.engines.send_table([worker.peer for worker in workers], now)
            able_workers = workers if servers_ready else []
        else:
            # A worker's own engine gets the version, again after a refusal or a long silence.
            version = session.ref.version
            self._probe = self.fleet.versions.find_probe(version) or self._probe
            workers = [worker for worker in workers if self.engines.mismatches.may_sample(worker.peer)]
            able_workers = [worker for worker in workers if worker.eval_version == version]
            for worker in workers:
                is_due = now - worker.eval_requested_at > self.config.weights.deadline
                if worker.eval_version != version and is_due:
                    worker.eval_requested_at = now
                    self.fleet.versions.engines[worker.peer].asleep = False
                    self.journal.outbox.to_control(worker.peer, LoadWeights(session.ref, "eval", self._probe))

        waiting = iter(self.episodes.waiting)
        transcribed_rows = self._transcribed_rows
        for worker in able_workers:
            slot_limit = math.ceil((1.0 if exclusive else MID_RUN_FRACTION) * worker.hello.slots)
            free_slots = min(
                worker.free_slots, slot_limit - sum(uid.startswith(UID_START) for uid in worker.running)
            )
            for episode in islice(waiting, max(0, free_slots)):
                row = HeldOut.from_uid(episode.uid).row
                self.workers.give_episode(worker, episode, self.samples[row], 0, row in transcribed_rows, now)

        episode_count = len(self.episodes.episodes)
        ended_count = episode_count - self._in_flight
        self.fleet.waits.append(
            f"the validation of step {session.step}: {ended_count} of {episode_count} episodes finished"
        )

    @property
    def _in_flight(self) -> int:
        return self.episodes.account().in_flight

    @property
    def is_busy(self) -> bool:
        return self.session is not None

    @property
    def needs_engines(self) -> bool:
        """True if a session is under way, or will be resumed once the run has started."""
        return self.is_busy or (not self._resumed and self._stored_session() is not None)

    def confirm_load(self, peer: bytes, message: Loaded, now: float) -> None:
        """Handle the report of a worker's second engine that loaded a version, or could not load it."""
        if (worker := self.workers.peers.get(peer)) is None:
            return

        if message.error:
            log.warning("%s could not load v%d: %s", worker.name, message.ref.version.step, message.error)
            worker.eval_requested_at = now + LOAD_RETRY - self.config.weights.deadline
        elif self.engines.compare_probe(peer, f"{worker.name} (validation)", message):
            worker.eval_version = message.ref.version
        else:
            self._probe = None  # no successor is judged by the same texts, once the probe has expired

    def _end_session(self, session: SessionStart) -> None:
        self.session = None
        self._store_session(None)

        for episode in self.episodes.waiting:
            if episode.failures:  # no time for another attempt
                self.episodes.give_up_episode(episode, FailReason(episode.reason))

        episodes = list(self.episodes.episodes.values())
        unfinished_count = self._in_flight
        self.workers.cancel_episodes(self.episodes.end_session())
        for worker in self.workers.peers:
            worker.eval_requested_at = 0.0
        self.results.append((session.step, self._metrics(session, episodes, unfinished_count)))

        # Transcribe the same questions at each validation, whatever their outcome.
        uids = (
            (row, uid)
            for row in sorted(self._transcribed_rows)
            for uid in self._episode_uids(session.step, row)
        )
        entries = (transcript_entry(uid, self.samples[row], **self._outcome_entry(uid)) for row, uid in uids)
        save_transcripts(self.run_dir, "validation", session.step, entries, replace=True)

        self._session_resources.close()
        if self.engines.remote:
            self.engines.release_servers()

    def _metrics(
        self, session: SessionStart, episodes: Sequence[EpisodeRecord], unfinished: int
    ) -> dict[str, float]:
        """Return the metrics of a session (observe/held_out.py). An abandoned session has no scores."""
        judged_episodes = [self._judged_episode(uid) for uid in self.episodes.results]
        scored_results = [judged.result for judged in judged_episodes if judged.result is not None]
        played_results = [
            judged.result
            for judged in judged_episodes
            if judged.result is not None and not judged.identity.scored
        ]

        metrics: dict[str, float] = {}
        if not unfinished:  # without the missing episodes, which are long, means would be biased
            threshold = threshold_of(self.config, judged_episodes)
            metrics = (
                sample_means(numbers_per_sample(judged_episodes, threshold))
                | mean_sizes(judged_episodes)
                | mean_losses(judged_episodes)
            )
            metrics |= {HIGHEST: max(result.judged for result in played_results)} if played_results else {}

        step = session.ref.version.step
        sampled_episodes = [judged for judged in episodes if judged.oldest >= 0]
        return metrics | {
            ASKED: float(len({judged.identity.row for judged in judged_episodes})),
            "val-aux/episodes": float(len(scored_results)),
            "val-aux/failed": float(len(judged_episodes) - len(scored_results)),
            "val-aux/policy_version": float(
                max((judged.newest for judged in sampled_episodes), default=step)
            ),
            "val-aux/policy_version_min": float(
                min((judged.oldest for judged in sampled_episodes), default=step)
            ),
        }

    def _judged_episode(self, uid: str) -> JudgedEpisode:
        identity = HeldOut.from_uid(uid)
        ending = self.episodes.results[uid]
        source = self.samples[identity.row].data_source

        if isinstance(ending, Failed):
            return JudgedEpisode(identity, source, None)
        return JudgedEpisode(
            identity, source, ending.result, ending.stats, answer_of(ending.result, ending.notes)
        )

    def _outcome_entry(self, uid: str) -> dict[str, Any]:
        ending = self.episodes.results[uid]
        mode = HeldOut.from_uid(uid).mode

        if isinstance(ending, Failed):
            return {"mode": mode, "failed": f"{ending.reason}: {ending.detail}"}

        outcome: dict[str, Any] = {"components": ending.result.components}
        if mode != SCORED:
            success = succeeds(ending.result, self.config.validation.success)
            outcome = {"success": success, **result_entry(ending.result)}

        text = self.episodes.texts.get(uid)
        if text is None:
            text = msgspec.msgpack.decode(self.journal.store.reader.held_out_record(uid), type=Finished).text

        return {"mode": mode} | outcome | {"turns": ending.stats.turns, "notes": ending.notes, "text": text}
