"""The coordinator's side of the engines: embedded ones, by their workers, and servers, by their keepers.

consumes: hellos and beats of keepers, confirmations of versions
waits for: engines to confirm what they were sent, each with a deadline
unblocks: engines (versions, one after another), workers (the table of servers)

    published ──► pushed to an engine ──► loaded and checked by it ──► acked: it may sample training turns

An engine on a restarted peer is new, and holds no version.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import chain, repeat

from asyncrl.buffer.shifts import Shift
from asyncrl.coordinator.peers import Peers
from asyncrl.coordinator.scorers import SCORER, KeeperRecord, ScorerHandler
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.versions import EngineRecord
from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.wire.messages.engine import KeeperBeat, KeeperHello
from asyncrl.wire.messages.shared import Loaded, Prefetch
from asyncrl.wire.messages.worker import EngineEntry, Engines, EngineUse
from asyncrl.wire.sockets import role_of

LOAD_RETRY = 1.0  # seconds before an engine that refused a version is sent the latest again
REFUSALS = 5  # of the newest version by one engine, while none holds it: then its files count as damaged
TABLES_PER_SECOND = 2000  # messages to all workers together, at most: four a second to each of 512
COUNTS = [field for field in EngineUse.__struct_fields__ if field != "name"]
NO_USE = EngineUse("")


class EngineHandler:
    """Tracks which engine has which version, and who may use it. An engine is named by its peer, a worker or
    a keeper."""

    def __init__(self, state: RunState, now: float) -> None:
        self.state = state
        self._began = now
        self.remote = state.config.engine.remote

        self.keepers = Peers[KeeperRecord](
            state, "engine", state.config.engine.keepers, lambda keeper, *_: self.leave(keeper.peer)
        )
        self.scorers = ScorerHandler(state)  # in the same table
        self.peers = self.keepers, self.scorers.keepers

        # engines against the trainer, over all publishes
        self.probe_gap = 0.0
        self.probe_tokens = 0

        self.wakes = False  # the trainer rests: engines that sleep get the newest version
        self.refused: Counter[tuple[bytes, PolicyVersion]] = Counter()  # since an engine loaded any version
        self.refusal = ""  # why the last was

        self._told = NO_VERSION  # newest version that keepers were told of
        self._table: dict[str, EngineEntry] = {}  # by name: what workers were sent last
        self._informed: set[bytes] = set()  # workers that have it
        self._table_at = 0.0  # no change is sent earlier
        self._uses: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by server: totals of all workers

    # -- engines of both kinds -----------------------------------------------------------------------

    def join(self, peer: bytes, name: str, up: bool = True) -> None:
        """An engine reports in; it is sent the latest version whatever it has."""
        self.state.versions.engines[peer] = EngineRecord(name, up)

    def leave(self, peer: bytes) -> None:
        self.state.versions.engines.pop(peer, None)

    def quarantined(self, peer: bytes) -> bool:
        """True where the worker's own engine must not sample."""
        engine = self.state.versions.engines.get(peer)
        return engine is not None and engine.quarantined

    def quarantine(self, peer: bytes, at: float) -> None:
        """Give the engine no more work until it has loaded the latest version anew; it is sent that at time
        `at`. A worker of servers has no engine."""
        if (engine := self.state.versions.engines.get(peer)) is not None:
            engine.quarantined = True
            engine.resend(at)

    def worker_here(self, peer: bytes, version: PolicyVersion, now: float) -> None:
        """A worker said hello: it may have missed the table, and its own engine, which has `version`, what it
        was sent."""
        self._informed.discard(peer)
        engine = self.state.versions.engines.get(peer)
        if engine is not None and engine.pushed > min(version, engine.acked):
            engine.resend(now)

    def loaded(self, peer: bytes, message: Loaded, now: float) -> None:
        """An engine confirmed a version, or could not load it."""
        versions = self.state.versions
        version = message.ref.version
        if (engine := versions.engines.get(peer)) is None:
            return  # its peer will say hello

        engine.push_s = message.seconds
        if message.postponed:
            log.info("%s has not loaded v%d: %s", engine.name, version.step, message.error)
            engine.resend(now)
            return

        if message.error:
            log.warning("%s could not load v%d: %s", engine.name, version.step, message.error)
            engine.resend(now + LOAD_RETRY)
            if not (message.lost or message.process_failed):  # else another trainer would not help
                self.refused[peer, version] += 1
                self.refusal = message.error
            return

        if not versions.same_weights(version, message.checksum):
            log.error("%s loaded other weights as v%d: sent again", engine.name, version.step)
            self.quarantine(peer, now + LOAD_RETRY)
            return

        self.record_probe(message)
        engine.asleep = False
        engine.woken = True
        engine.unproven = message.unproven

        if message.unproven:  # it is sent the newest version again, with the probe
            engine.resend(now)
            return

        engine.quarantined = False
        self.refused.clear()
        if version > engine.acked:
            engine.acked = version
            self.state.timeline.past("push", now - engine.pushed_at, version=version, engine=engine.name)
            self.state.liveness.alive(now)

    def pop_unloadable_version(self) -> str:
        """Returns why no engine can load the newest version, once its files were refused REFUSALS times; ''
        if an engine holds it, or is loading it and has not refused it. A process that fails to load, whatever
        the files are, ends by itself (runtime/weight_loader.py), and another one tries."""
        held = self.state.versions.engines
        newest = self.state.versions.newest
        refused = self.refused

        often = any(count >= REFUSALS for (_, version), count in refused.items() if version == newest)
        tries = (one for one, engine in held.items() if engine.pushed >= newest and not refused[one, newest])
        holds = any(engine.acked >= newest and engine.woken for engine in held.values())

        if not often or holds or any(tries):
            return ""

        self.refused.clear()
        return f"no engine can load v{newest.step}: {self.refusal}"

    def record_probe(self, message: Loaded) -> None:
        """Keep the largest difference between an engine's log-probs and the trainer's."""
        self.probe_gap = max(self.probe_gap, message.probe_gap)
        self.probe_tokens += message.probe_tokens

    def steps(self) -> Callable[[bytes], list[int]]:
        """By worker: policy versions that its episodes can start on, ascending: that of its own engine, or
        those of all servers."""
        held = self.state.versions.engines
        if not self.remote:
            return lambda worker: [held[worker].acked.step]
        shared = sorted(held[keeper.peer].acked.step for keeper in self._serving("train"))
        return lambda worker: shared

    def tick(self, now: float) -> None:
        """Remove silent keepers, push versions."""
        for peers in self.peers:
            peers.tick(now)

        versions = self.state.versions
        if versions.ref is not None:
            if versions.newest > self._told:
                self._told = versions.newest
                for keeper in self.keepers:
                    self.state.outbox.to_control(keeper.peer, Prefetch(versions.ref))

            for peer in self._due(now) if self.awake or self.wakes else []:
                self.state.outbox.to_control(peer, versions.order(versions.ref, "train"))
                engine = versions.engines[peer]
                engine.pushed = versions.newest
                engine.pushed_at = now
                engine.asleep = False

        for engine in versions.engines.values():
            late = engine.pushed != NO_VERSION and (engine.acked < engine.pushed or not engine.woken)
            if late and now - engine.pushed_at > self.state.config.weights.deadline:
                engine.resend(now)
                step = versions.newest.step
                log.warning("%s has not loaded v%d in time; it is sent again", engine.name, step)

    @property
    def awake(self) -> bool:
        """Engines have their devices: always, unless they share them with the trainer."""
        return self.state.shifts is None or self.state.shifts.shift is Shift.ROLLOUT

    def _due(self, now: float) -> list[bytes]:
        """Engines to send the newest version to. Servers that serve are updated one after another, in turn:
        while one is paused, the others generate. None is for adapters."""
        held = self.state.versions.engines

        free = {
            peer
            for peer, engine in held.items()
            if (engine.up or self.state.config.shifts) and (engine.quarantined or not engine.pinned)
        }
        due = [peer for peer in held if peer in free and self.state.versions.behind(held[peer], now)]

        config = self.state.config
        if not self.remote or not config.weights.rolling or config.adapters_apart or config.shifts:
            return due

        served = {peer for peer in held if held[peer].acked != NO_VERSION}  # whether healthy now or not
        idle = [peer for peer in due if peer not in served]
        if any(held[peer].acked < held[peer].pushed for peer in served):
            return idle
        return idle + sorted(set(due) & served, key=lambda peer: held[peer].pushed_at)[:1]

    # -- keepers -------------------------------------------------------------------------------------

    def hello(self, peer: bytes, message: KeeperHello, now: float) -> None:
        """A keeper reports in, for the first time or again. Both are handled alike: its state is absolute."""
        if role_of(peer) == SCORER:
            self.scorers.hello(peer, message, now)
            return

        keeper = self.keepers.hello(peer, message, now, lambda: self._join_keeper(peer, message, now))
        if keeper is None:
            return

        engine = self.state.versions.engines[peer]
        if message.url and not engine.up:
            log.info("%s: %s at %s", keeper.name, message.engine, message.url)
            self.state.liveness.alive(now)

        keeper.hello = message
        engine.up = bool(message.url)
        self.state.welcome(peer)

    def _join_keeper(self, peer: bytes, message: KeeperHello, now: float) -> KeeperRecord:
        keeper = KeeperRecord(peer, f"engine {message.index}", message, now)
        self.join(peer, keeper.name, bool(message.url))
        self.state.liveness.alive(now)
        return keeper

    def beat(self, peer: bytes, message: KeeperBeat, now: float) -> None:
        if role_of(peer) == SCORER:
            self.scorers.beat(peer, message, now)
            return

        keeper = self.keepers.get(peer)
        if keeper is None:
            return  # it will say hello

        keeper.beat = message
        if message.kv_use is not None:
            self.state.versions.engines[peer].kv_use = message.kv_use
            self.state.live_limit.kv.note_use(keeper.name, message.kv_use)

        if message.starting:  # a keeper whose server does not start in time ends by itself
            self.state.liveness.alive(now)

    # -- the table -----------------------------------------------------------------------------------

    @property
    def samples(self) -> bool:
        """Turns can be sampled: with servers, one of them holds a published version."""
        return not self.remote or bool(self._serving(None))

    @property
    def lacks(self) -> str:
        """Name what new episodes wait for: a server that samples, one of each scorer that reads turns."""
        return self.scorers.lacks if self.samples else "a server that holds a published version"

    def send_table(self, workers: Collection[bytes], now: float) -> None:
        """Send each worker what it does not have yet of the table: all of it, or what changed. Changes are
        collected, so that TABLES_PER_SECOND is kept. A restarted coordinator first gives the keepers a
        lease's time to report: workers take back turns from servers that a table leaves out."""
        config = self.state.config
        planned = self.state.config.engine.keepers
        complete = sum(keeper.hello.index < planned for keeper in self.keepers) >= planned
        complete = complete and len(self.scorers.keepers) == len(config.scorer_places)
        if not (self.remote or config.scorers) or not (complete or now > self._began + config.launch.lease):
            return

        self._informed -= self.state.outbox.unreachable  # a change did not reach them
        self._informed &= set(workers)

        if now >= self._table_at:
            before = self._table
            self._table = {entry.name: entry for entry in self.table()}
            changed = tuple(entry for name, entry in self._table.items() if before.get(name) != entry)
            gone = tuple(before.keys() - self._table.keys())
            if changed or gone:
                self._table_at = now + len(workers) / TABLES_PER_SECOND
                self._tell(self._informed, Engines(changed, gone))

        self._tell(set(workers) - self._informed, Engines(tuple(self._table.values()), whole=True))
        self._informed.update(workers)

    def _tell(self, workers: Collection[bytes], message: Engines) -> None:
        for peer in workers:
            self.state.outbox.to_control(peer, message)

    def table(self) -> tuple[EngineEntry, ...]:
        serving = {keeper.peer for keeper in self._serving(None)}
        held = self.state.versions.engines
        engines = [
            keeper.entry(
                engine.acked,
                keeper.peer in serving,
                "eval" if engine.pinned else "train",
                asleep=self.state.shifts is not None and not engine.woken,
            )
            for keeper, engine in ((keeper, held[keeper.peer]) for keeper in self.keepers)
        ]
        return (*engines, *self.scorers.table(engines))

    def add_use(self, before: Sequence[EngineUse], now: Sequence[EngineUse]) -> None:
        """Count what the servers have done for a worker between two heartbeats. The later one has the same
        servers in the same order, and perhaps more of them."""
        for use, had in zip(now, chain(before, repeat(NO_USE)), strict=False):
            if use != had:
                totals = self._uses[use.name]
                for name in COUNTS:
                    if more := getattr(use, name) - getattr(had, name):
                        totals[name] += more
                self.state.live_limit.kv.retracted_requests += use.retracted - had.retracted

    def gauges(self) -> dict[str, float]:
        """Metrics per server: what it has done for the workers, and its newest update; and the share of all
        prompt tokens that were found in a prefix cache."""
        found: dict[str, float] = {}
        prompt = cached = 0

        for keeper in self.keepers:
            use = self._uses[keeper.name]
            engine = self.state.versions.engines[keeper.peer]

            totals = {name: float(use[name]) for name in COUNTS}
            totals["version"] = float(engine.acked.step)
            totals["push_s"] = engine.push_s
            totals["cache_hit"] = use["cached_tokens"] / max(1.0, use["prompt_tokens"])
            if engine.kv_use is not None:
                totals["kv_use"] = engine.kv_use

            prompt = prompt + use["prompt_tokens"]
            cached = cached + use["cached_tokens"]
            found |= {f"engine/{keeper.hello.index}/{name}": value for name, value in totals.items()}

        if self.remote:
            found["async/engines"] = float(len(self._serving(None)))
        if prompt:
            found["rollout/prefix_cache_hit"] = cached / prompt

        return found | self.scorers.gauges(self.table(), self._uses)

    def _serving(self, lane: str | None) -> list[KeeperRecord]:
        """Keepers of servers that may sample, in all lanes or in one."""
        held = self.state.versions.engines
        return [
            keeper
            for keeper in self.keepers
            if (engine := held[keeper.peer]).up
            and keeper.beat.healthy
            and not engine.quarantined
            and engine.acked != NO_VERSION
            and (lane is None or (lane == "eval") == engine.pinned)
        ]

    # -- validation ----------------------------------------------------------------------------------

    def pin(self, version: PolicyVersion, all_servers: bool) -> bool:
        """True when validation may sample: one server with `version` or newer is set aside for it, or all,
        and keeps what it has. With a single one nothing is pinned: training goes on, on the same weights."""
        held = self.state.versions.engines
        pinned = any(engine.pinned for engine in held.values())

        if not pinned and sum(engine.up for engine in held.values()) < 2:
            return self.samples

        serving = [held[keeper.peer] for keeper in self._serving("train")]
        fit = [engine for engine in serving if engine.acked >= max(version, engine.pushed)]

        for engine in fit if all_servers else fit[: not pinned]:
            engine.pinned = pinned = True
            self._table_at = 0.0  # workers are told before they are given its episodes
            log.info("%s is set aside for validation", engine.name)

        return pinned

    def release(self) -> None:
        """Validation is over: its servers get the latest version and training requests again."""
        for engine in self.state.versions.engines.values():
            engine.pinned = False
