"""The coordinator's side of the engines: pushes versions to them, and tells workers which servers to use.

Embedded engines are reached through their workers, servers through their supervisors.

consumes: hellos and heartbeats of supervisors, confirmations of versions
waits for: engines to confirm pushed versions, each with a deadline
unblocks: engines (versions, one after another), workers (the table of servers)

    published ──► pushed to an engine ──► loaded and checked there ──► acked: may sample training turns

An engine on a restarted peer is new, and holds no version.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, repeat

from asyncrl.buffer.shifts import Shift
from asyncrl.coordinator.mismatches import Mismatches
from asyncrl.coordinator.peers import Peers
from asyncrl.coordinator.scorers import SCORER, ScorerHandler, SupervisorRecord
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.versions import EngineRecord
from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.wire.messages.engine import SupervisorHeartbeat, SupervisorHello
from asyncrl.wire.messages.shared import Loaded, LoadWeights, Prefetch, ProbeSamples
from asyncrl.wire.messages.trainer import ScoredSamples
from asyncrl.wire.messages.worker import EngineEntry, Engines, EngineUse
from asyncrl.wire.sockets import role_of

LOAD_RETRY = 1.0  # seconds before an engine that refused a version is sent the newest version again
# Refusals of the newest version by an engine, while no engine holds it, after which its files count as
# damaged.
MAX_REFUSALS = 5
TABLES_PER_SECOND = 2000  # largest rate of messages to all workers together: four a second to each of 512
VERDICTS_KEY = "verdicts"  # key of the store's meta
USE_COUNTERS = [field for field in EngineUse.__struct_fields__ if field != "name"]
NO_USE = EngineUse("")


class EngineHandler:
    """Tracks which engine has which version, and which engines may sample.

    An engine is identified by its peer, a worker or a supervisor.
    """

    def __init__(self, state: RunState, now: float) -> None:
        self.config = state.config
        self.ledger = state.ledger
        self.fleet = state.fleet
        self.versions = state.fleet.versions
        self.store = state.journal.store
        self.outbox = state.journal.outbox
        self.timeline = state.journal.timeline
        self._send_welcome = state.send_welcome
        self._started_at = now
        self.remote = state.config.engine.remote

        self.supervisors = Peers[SupervisorRecord](
            state,
            "engine",
            state.config.engine.server_count,
            lambda supervisor, *_: self.remove_engine(supervisor.peer),
        )
        self.scorers = ScorerHandler(state)  # their servers are in the same table
        self.supervised_peers = self.supervisors, self.scorers.supervisors

        self.mismatches = Mismatches(state.config)
        self.largest_probe_gap = 0.0  # largest difference between log-probs of an engine and of the trainer
        self.probe_median_gap = 0.0  # median difference, by the newest comparison
        self.probe_tokens = 0  # tokens compared so far

        self.may_wake = False  # the trainer has offloaded: sleeping engines get the newest version
        # Counts since an engine loaded any version.
        self.refusals: Counter[tuple[bytes, PolicyVersion]] = Counter()
        self.last_refusal = ""  # reason of the last refusal

        self._announced_version = NO_VERSION  # newest version that supervisors prefetch
        self._sent_table: dict[str, EngineEntry] = {}  # entries by name, as last sent to workers
        self._informed_workers: set[bytes] = set()  # workers that have the sent table
        self._next_table_at = 0.0  # time before which no change is sent
        # Totals of all workers, by server.
        self._server_uses: defaultdict[str, Counter[str]] = defaultdict(Counter)

    # -- engines of both kinds -----------------------------------------------------------------------

    def add_engine(self, peer: bytes, name: str, up: bool = True) -> None:
        """Add an engine that reported in. The engine will be sent the newest version, whatever it holds."""
        self.versions.engines[peer] = EngineRecord(name, up)
        self.mismatches.forget_predecessors(peer)

    def remove_engine(self, peer: bytes) -> None:
        """Remove the engine of a lost process. A verdict on the process holds if the process comes back."""
        self.versions.engines.pop(peer, None)

    def restore_verdicts(self) -> None:
        """Restore the verdicts of an earlier coordinator of this launch."""
        if stored := self.store.reader.meta(VERDICTS_KEY):
            self.mismatches.restore_verdicts(stored, self.fleet.launch)

    def store_verdicts(self) -> None:
        """Store the verdicts, if they may have changed."""
        if self.mismatches.needs_storing:
            self.mismatches.needs_storing = False
            self.store.put_meta(VERDICTS_KEY, self.mismatches.encode_verdicts(self.fleet.launch))

    def quarantined(self, peer: bytes) -> bool:
        """Return True if the worker's own engine must not sample."""
        engine = self.versions.engines.get(peer)
        return engine is not None and (engine.quarantined or not self.mismatches.may_sample(peer))

    def quarantine(self, peer: bytes, resend_at: float) -> None:
        """Give an engine no more work until the newest version, sent at time `resend_at`, is loaded anew.

        Nothing happens for a worker that uses servers, as there is no engine of its own.
        """
        if (engine := self.versions.engines.get(peer)) is not None:
            engine.quarantined = True
            engine.resend(resend_at)

    def resend_to_worker(self, peer: bytes, version: PolicyVersion, now: float) -> None:
        """Send a worker that said hello all that it may have missed.

        That is the table of servers, and for the worker's own engine, which has `version`, the newest
        version.
        """
        self._informed_workers.discard(peer)
        engine = self.versions.engines.get(peer)
        if engine is not None and engine.pushed > min(version, engine.acked):
            engine.resend(now)

    def confirm_load(self, peer: bytes, message: Loaded, now: float) -> None:
        """Handle the report of an engine that loaded a version, or could not load it."""
        loaded_version = message.ref.version
        if (engine := self.versions.engines.get(peer)) is None:
            return  # the peer will say hello

        engine.push_s = message.seconds
        if message.postponed:
            log.info("%s did not load v%d: %s", engine.name, loaded_version.step, message.error)
            engine.resend(now)
            return

        if message.error:
            log.warning("%s could not load v%d: %s", engine.name, loaded_version.step, message.error)
            engine.resend(now + LOAD_RETRY)
            if not (message.lost or message.process_failed):  # then another trainer might help
                self.refusals[peer, loaded_version] += 1
                self.last_refusal = message.error
            return

        if not self.versions.same_weights(loaded_version, message.checksum):
            log.error(
                "%s loaded the wrong weights for v%d; sending them again", engine.name, loaded_version.step
            )
            self.quarantine(peer, now + LOAD_RETRY)
            return

        if not self.compare_probe(peer, engine.name, message):
            engine.resend(now)  # other servers are not updated while a push is unconfirmed
            return

        engine.asleep = False
        engine.woken = True
        engine.uncompared = self.mismatches.is_uncompared(peer)

        if engine.uncompared:  # sent again with the probe, for a comparison
            engine.resend(now)
            return

        engine.quarantined = False
        self.refusals.clear()
        if loaded_version > engine.acked:
            engine.acked = loaded_version
            self.timeline.record_past(
                "push", now - engine.pushed_at, version=loaded_version, engine=engine.name
            )
            self.fleet.liveness.note_alive(now)

    def pop_load_failure(self) -> str:
        """Return why no engine can load the newest version, once an engine has refused it MAX_REFUSALS times.

        Returns '' if an engine holds the version, or is loading it without a refusal so far. A process that
        fails to load any files ends by itself (runtime/weight_loader.py), and a new process tries.
        """
        newest = self.versions.newest
        often_refused = any(
            count >= MAX_REFUSALS for (_, version), count in self.refusals.items() if version == newest
        )
        may_load = any(
            (engine.acked >= newest and engine.woken)
            or (engine.pushed >= newest and not self.refusals[peer, newest])
            for peer, engine in self.versions.engines.items()
        )
        if not often_refused or may_load:
            return ""

        self.refusals.clear()
        return f"no engine can load v{newest.step}: {self.last_refusal}"

    def compare_probe(self, peer: bytes, name: str, message: Loaded) -> bool:
        """Record the gap between an engine's log-probs and the trainer's, and return True if the engine may
        sample."""
        if message.probe_gap is not None:
            self.largest_probe_gap = max(self.largest_probe_gap, message.probe_gap.largest)
            self.probe_median_gap = message.probe_gap.median
            self.probe_tokens += message.probe_gap.tokens

        probe = self.versions.find_probe(message.ref.version)
        if probe is not None:
            self.mismatches.note_rounding(probe.rounding)

        had_verdict = not self.mismatches.may_load(peer)
        may_sample = self.mismatches.judge_probe(peer, name, message)
        if not may_sample and not had_verdict and self.more_probes_follow:
            self.versions.expire_probe(message.ref.version)
        return may_sample

    @property
    def more_probes_follow(self) -> bool:
        """True if the trainer will score another probe when an engine needs one.

        False once training is over, in an evaluation, and with shifts, where the trainer has offloaded before
        engines are compared: a second comparison with the same texts is better than none.
        """
        return not self.ledger.training_over and not self.config.shifts

    def note_samples(self, peer: bytes, message: ProbeSamples) -> None:
        """Judge the labels and the independence of the sequences that an engine has sampled for a test, and
        hold the sequences until the trainer asks for a plan."""
        engine = self.versions.engines.get(peer)
        if engine is not None and self.mismatches.may_load(peer):
            # While an engine goes back to an older version after a restart of the trainer, both are right.
            if message.version.step <= self.versions.newest.step:
                self.mismatches.judge_labels(peer, engine.name, message)
            self.mismatches.judge_independence(peer, engine.name, message)
            self.fleet.samples.add(peer, message, self.fleet.vocabulary)

    def judge_samples(self, message: ScoredSamples) -> None:
        """Judge engines by their samples, which the trainer has scored."""
        for sums in message.sums:
            peer = sums.engine.encode()
            engine = self.versions.engines.get(peer)
            if engine is not None:
                self.mismatches.judge_samples(peer, engine.name, message.version, sums)

    def usable_versions(self, workers: Iterable[bytes]) -> dict[bytes, list[int]]:
        """Return the versions that the episodes of each worker can start on, ascending.

        These are the version of the worker's own engine, or the versions of all servers.
        """
        engines = self.versions.engines
        if not self.remote:
            return {peer: [engines[peer].acked.step] for peer in workers}
        return dict.fromkeys(
            workers,
            sorted(engines[supervisor.peer].acked.step for supervisor in self._serving_supervisors("train")),
        )

    @property
    def comparison_waits(self) -> list[str]:
        """A wait for each connected engine that gets no work because of a comparison with the trainer."""
        waits = list[str]()
        for peer, engine in self.versions.engines.items():
            if not self.mismatches.may_load(peer):
                waits.append(f"{engine.name} waits to be replaced, because it differs from the trainer")
            elif engine.uncompared or not self.mismatches.may_sample(peer):
                waits.append(f"{engine.name} waits to be compared with the trainer")
        return waits

    @property
    def awake(self) -> bool:
        """True if engines have their devices: always without shifts, else in the rollout shift."""
        return self.fleet.shifts is None or self.fleet.shifts.shift is Shift.ROLLOUT

    def push_newest(self, now: float) -> None:
        """Send the newest version to all engines that lack the version and may load now.

        Servers in use are updated one after another, so that the other servers generate while a server is
        paused. Adapters need no pause. First, silent supervisors are removed. Finally, engines that have not
        confirmed a version within `weights.deadline` are marked, so that the next pass sends it again.
        """
        for peers in self.supervised_peers:
            peers.remove_silent(now)

        versions = self.versions
        engines = versions.engines
        config = self.config
        due_peers: list[bytes] = []
        probe = versions.find_probe(versions.newest)

        if versions.ref is not None:
            if versions.newest > self._announced_version:
                self._announced_version = versions.newest
                for supervisor in self.supervisors:
                    self.outbox.to_control(supervisor.peer, Prefetch(versions.ref))

            # With shifts a replaced server starts, and gets its URL, only when a version arrives.
            if self.awake or self.may_wake:
                due_peers = [
                    peer
                    for peer, engine in engines.items()
                    if engine.pushed < versions.newest
                    and now >= engine.send_at
                    and (probe is not None or not engine.uncompared)
                    and (engine.is_up or config.shifts)
                    and (engine.quarantined or not engine.reserved_for_validation)
                    and self.mismatches.may_load(peer)
                ]

            one_by_one = config.weights.rolling and not config.adapters_apart and not config.shifts
            if self.remote and one_by_one:
                used_peers = {peer for peer, engine in engines.items() if engine.acked != NO_VERSION}
                idle_peers = [peer for peer in due_peers if peer not in used_peers]
                due_used = [peer for peer in due_peers if peer in used_peers]
                due_used.sort(key=lambda peer: engines[peer].pushed_at)
                is_loading = any(engines[peer].acked < engines[peer].pushed for peer in used_peers)
                due_peers = idle_peers if is_loading else idle_peers + due_used[:1]

            for peer in due_peers:
                self.outbox.to_control(peer, LoadWeights(versions.ref, "train", probe))
                engine = engines[peer]
                engine.pushed = versions.newest
                engine.pushed_at = now
                engine.asleep = False

        for engine in engines.values():
            is_unconfirmed = engine.acked < engine.pushed or not engine.woken
            if (
                engine.pushed != NO_VERSION
                and is_unconfirmed
                and now - engine.pushed_at > config.weights.deadline
            ):
                engine.resend(now)
                log.warning(
                    "%s did not load v%d in time; sending it again", engine.name, versions.newest.step
                )

    # -- supervisors -------------------------------------------------------------------------------------

    def welcome_supervisor(self, peer: bytes, message: SupervisorHello, now: float) -> None:
        """Handle the hello of a supervisor, first or repeated: each hello has the whole state."""
        if role_of(peer) == SCORER:
            self.scorers.welcome_supervisor(peer, message, now)
            return

        new_supervisor = SupervisorRecord(peer, f"engine {message.index}", message, now)
        supervisor = self.supervisors.accept_hello(new_supervisor, now)
        if supervisor is None:
            return

        if supervisor is new_supervisor:
            self.add_engine(peer, supervisor.name, bool(message.url))
            self.fleet.liveness.note_alive(now)

        engine = self.versions.engines[peer]
        if message.url and not engine.is_up:
            log.info("%s: %s at %s", supervisor.name, message.engine, message.url)
            self.fleet.liveness.note_alive(now)

        supervisor.hello = message
        engine.is_up = bool(message.url)
        self._send_welcome(peer)

    def note_heartbeat(self, peer: bytes, message: SupervisorHeartbeat, now: float) -> None:
        if role_of(peer) == SCORER:
            self.scorers.note_heartbeat(peer, message, now)
            return

        supervisor = self.supervisors.get(peer)
        if supervisor is None:
            return  # the supervisor will say hello

        supervisor.heartbeat = message
        if message.kv_use is not None:
            self.versions.engines[peer].kv_use = message.kv_use
            self.ledger.live_limit.kv_cap.note_use(supervisor.name, message.kv_use)

        if message.starting:  # a supervisor whose server does not start in time ends by itself
            self.fleet.liveness.note_alive(now)

    # -- the table -----------------------------------------------------------------------------------

    @property
    def can_sample(self) -> bool:
        """True if turns can be sampled. A run with servers needs a server with a published version."""
        return not self.remote or bool(self._serving_supervisors(None))

    @property
    def missing_server(self) -> str:
        """The server that new episodes wait for, to sample or to score; '' if none is missing."""
        return (
            self.scorers.missing_server if self.can_sample else "a server that has loaded a published version"
        )

    def send_table(self, workers: Collection[bytes], now: float) -> None:
        """Send workers the table of servers, or the changes since it was last sent.

        Changes are collected, so that at most TABLES_PER_SECOND messages are sent. A restarted coordinator
        first waits a lease for supervisors to report, as workers take back turns from servers missing in a
        table.
        """
        config = self.config
        if not (self.remote or config.scorers):
            return

        planned_servers = config.engine.server_count
        joined_servers = sum(supervisor.hello.index < planned_servers for supervisor in self.supervisors)
        all_joined = joined_servers >= planned_servers and len(self.scorers.supervisors) == len(
            config.scorer_places
        )
        if not all_joined and now <= self._started_at + config.launch.lease:
            return

        self._informed_workers -= self.outbox.unreachable  # they missed a change
        self._informed_workers &= set(workers)

        if now >= self._next_table_at:
            previous_table = self._sent_table
            self._sent_table = {entry.name: entry for entry in self.server_table()}
            changed_entries = tuple(
                entry for name, entry in self._sent_table.items() if previous_table.get(name) != entry
            )
            removed_names = tuple(previous_table.keys() - self._sent_table.keys())
            if changed_entries or removed_names:
                self._next_table_at = now + len(workers) / TABLES_PER_SECOND
                self._send_entries(self._informed_workers, Engines(changed_entries, removed_names))

        self._send_entries(
            set(workers) - self._informed_workers, Engines(tuple(self._sent_table.values()), whole=True)
        )
        self._informed_workers.update(workers)

    def _send_entries(self, workers: Collection[bytes], message: Engines) -> None:
        for peer in workers:
            self.outbox.to_control(peer, message)

    def server_table(self) -> tuple[EngineEntry, ...]:
        """Return the entries of all servers except those that are to be replaced: their running turns
        continue on other servers."""
        serving_peers = {supervisor.peer for supervisor in self._serving_supervisors(None)}
        engines: list[EngineEntry] = []
        for supervisor in self.supervisors:
            if supervisor.peer in self.mismatches.replacements:
                continue
            engine = self.versions.engines[supervisor.peer]
            entry = supervisor.table_entry(
                version=engine.acked,
                healthy=supervisor.peer in serving_peers,
                lane="eval" if engine.reserved_for_validation else "train",
                asleep=self.fleet.shifts is not None and not engine.woken,
            )
            engines.append(entry)
        return (*engines, *self.scorers.table_entries(engines))

    def add_use(self, previous_uses: Sequence[EngineUse], current_uses: Sequence[EngineUse]) -> None:
        """Count the servers' work for a worker between two heartbeats.

        The later heartbeat names the same servers in the same order, and perhaps further servers.
        """
        for use, previous_use in zip(current_uses, chain(previous_uses, repeat(NO_USE)), strict=False):
            if use != previous_use:
                totals = self._server_uses[use.name]
                for counter_name in USE_COUNTERS:
                    if increase := getattr(use, counter_name) - getattr(previous_use, counter_name):
                        totals[counter_name] += increase
                self.ledger.live_limit.kv_cap.retracted_requests += use.retracted - previous_use.retracted

    def gauges(self) -> dict[str, float]:
        """Return metrics of each server, and the fraction of all prompt tokens found in a prefix cache."""
        metrics: dict[str, float] = {}
        prompt_tokens = 0
        cached_tokens = 0

        for supervisor in self.supervisors:
            use = self._server_uses[supervisor.name]
            engine = self.versions.engines[supervisor.peer]

            totals = {name: float(use[name]) for name in USE_COUNTERS}
            totals["version"] = float(engine.acked.step)
            totals["push_s"] = engine.push_s
            totals["cache_hit"] = use["cached_tokens"] / max(1.0, use["prompt_tokens"])
            if engine.kv_use is not None:
                totals["kv_use"] = engine.kv_use

            prompt_tokens += use["prompt_tokens"]
            cached_tokens += use["cached_tokens"]
            metrics |= {f"engine/{supervisor.hello.index}/{name}": value for name, value in totals.items()}

        if self.remote:
            metrics["async/engines"] = float(len(self._serving_supervisors(None)))
        if prompt_tokens:
            metrics["rollout/prefix_cache_hit"] = cached_tokens / prompt_tokens

        return metrics | self.scorers.gauges(self.server_table(), self._server_uses)

    def _serving_supervisors(self, lane: str | None) -> list[SupervisorRecord]:
        """Return the supervisors of servers that may sample, in all lanes or in the given lane."""
        engines = self.versions.engines
        return [
            supervisor
            for supervisor in self.supervisors
            if (engine := engines[supervisor.peer]).is_up
            and supervisor.heartbeat.healthy
            and not self.quarantined(supervisor.peer)
            and engine.acked != NO_VERSION
            and (lane is None or (lane == "eval") == engine.reserved_for_validation)
        ]

    # -- validation ----------------------------------------------------------------------------------

    def reserve_servers(self, version: PolicyVersion, all_servers: bool) -> bool:
        """Reserve servers for validation, which keep their version. Return True when validation may sample.

        One server with `version` or a newer version is reserved, or all such servers. A single server is
        shared: training goes on, and the weights change as usual.
        """
        engines = self.versions.engines
        any_reserved = any(engine.reserved_for_validation for engine in engines.values())

        if not any_reserved and sum(engine.is_up for engine in engines.values()) < 2:
            return self.can_sample

        for supervisor in self._serving_supervisors("train"):
            engine = engines[supervisor.peer]
            if engine.acked < max(version, engine.pushed):
                continue
            if any_reserved and not all_servers:
                break
            engine.reserved_for_validation = True
            any_reserved = True
            self._next_table_at = 0.0  # workers get the table before episodes of the validation
            log.info("%s is set aside for validation", engine.name)

        return any_reserved

    def release_servers(self) -> None:
        """Return the reserved servers to training, after a validation."""
        for engine in self.versions.engines.values():
            engine.reserved_for_validation = False
