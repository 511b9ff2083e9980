"""The coordinator's side of the engines: embedded ones, by their workers, and servers, by their keepers.

consumes: hellos and beats of keepers, confirmations of versions
waits for: engines to confirm what they were sent, each with a deadline
unblocks: engines (versions, one after another), workers (the table of servers)

    published ──► pushed to an engine ──► loaded and checked by it ──► acked: it may sample training turns

The version ledger names an engine by its peer's identity: a restarted one is new, and holds no version.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from asyncrl.coordinator.state import RunState, log
from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.wire.messages.keeper import KeeperBeat, KeeperHello
from asyncrl.wire.messages.shared import Loaded, Prefetch, Stop
from asyncrl.wire.messages.worker_control import EngineEntry, Engines, EngineUse

LOAD_RETRY = 1.0  # seconds before an engine that refused a version is sent the latest again
REFUSALS = 5  # of the newest version by one engine, while none holds it: then its files count as damaged
TABLES_PER_SECOND = 2000  # messages to all workers together, at most: four a second to each of 512
COUNTS = [field for field in EngineUse.__struct_fields__ if field != "name"]
NO_USE = EngineUse("")


@dataclass
class KeeperRecord:
    """A connected keeper and what is known of its server."""

    peer: bytes
    hello: KeeperHello
    seen: float
    beat: KeeperBeat = field(default_factory=lambda: KeeperBeat(healthy=False, starting=True))
    push_s: float = 0.0  # seconds of the newest load
    kv_use: float | None = None  # newest known share of its KV memory in use

    @property
    def engine(self) -> str:
        """Its name in the ledger."""
        return self.peer.decode()

    @property
    def name(self) -> str:
        return f"engine {self.hello.index}"


class EngineHandler:
    """Which engine has which version, and who may use it."""

    def __init__(self, state: RunState, now: float) -> None:
        self.state, self._began = state, now
        self.remote = state.config.engine.remote
        self.keepers: dict[bytes, KeeperRecord] = {}
        self.probe_gap, self.probe_tokens = 0.0, 0  # engines against the trainer, over all publishes
        self.quarantined: set[str] = set()  # engines whose weights are not what they should be
        self.refused: Counter[tuple[str, PolicyVersion]] = Counter()  # since an engine loaded any version
        self.refusal = ""  # why the last was
        self._told = NO_VERSION  # newest version that keepers were told of
        self._eval_servers: set[str] = set()  # set aside for validation
        self._table: dict[str, EngineEntry] = {}  # by name: what workers were sent last
        self._informed: set[bytes] = set()  # workers that have it
        self._table_at = 0.0  # no change is sent earlier
        self._uses: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by server: totals of all workers

    # -- engines of both kinds -----------------------------------------------------------------------

    def join(self, engine: str) -> None:
        """An engine reports in; it is sent the latest version whatever it has."""
        self.state.versions.join(engine)

    def leave(self, engine: str) -> None:
        self.state.versions.leave(engine)
        self.quarantined.discard(engine)
        self._eval_servers.discard(engine)

    def quarantine(self, engine: str, at: float) -> None:
        """No more work for it until it has loaded the latest version anew; it is sent that at time `at`."""
        self.quarantined.add(engine)
        self.state.versions.resend(engine, at)

    def loaded(self, engine: str, name: str, message: Loaded, now: float) -> None:
        """An engine confirmed a version, or could not load it."""
        versions, version = self.state.versions, message.ref.version
        if message.superseded:
            log.info("%s has not loaded v%d: %s", name, version.step, message.error)
            versions.resend(engine, now)
            return
        if message.error:
            log.warning("%s could not load v%d: %s", name, version.step, message.error)
            versions.resend(engine, now + LOAD_RETRY)
            self.refused[engine, version] += not message.lost  # another trainer would not help
            self.refusal = message.error
            return
        if not versions.same_weights(version, message.checksum):
            log.error("%s loaded other weights as v%d: sent again", name, version.step)
            self.quarantine(engine, now + LOAD_RETRY)
            return
        self.record_probe(message)
        versions.engines[engine].unproven = message.unproven
        if message.unproven:  # it is sent the newest version again, with the probe
            versions.resend(engine, now)
            return
        self.quarantined.discard(engine)
        self.refused.clear()
        pushed_at = versions.engines[engine].pushed_at
        if versions.ack(engine, version):
            self.state.timeline.past("push", now - pushed_at, version=version, engine=name)
            self.state.liveness.alive(now)

    def take_damage(self) -> str:
        """Why the newest version cannot be loaded, once for REFUSALS of it; '' where an engine holds it."""
        held, newest = self.state.versions.engines, self.state.versions.newest
        often = any(count >= REFUSALS for (_, version), count in self.refused.items() if version == newest)
        if not often or any(engine.acked >= newest for engine in held.values()):
            return ""
        self.refused.clear()
        return f"no engine can load v{newest.step}: {self.refusal}"

    def record_probe(self, message: Loaded) -> None:
        """Keep the largest difference between an engine's log-probs and the trainer's."""
        self.probe_gap = max(self.probe_gap, message.probe_gap)
        self.probe_tokens += message.probe_tokens

    def steps(self, engine: str = "") -> list[int]:
        """Policy versions that a worker's episodes can start on, ascending: that of its own `engine`, or
        those of all servers."""
        engines = [keeper.engine for keeper in self._serving("train")] if self.remote else [engine]
        return sorted(map(self.state.versions.step, engines))

    def extend_leases(self, now: float) -> None:
        for keeper in self.keepers.values():
            keeper.seen = now

    def tick(self, now: float) -> None:
        """Remove silent keepers, push versions."""
        lease = self.state.config.launch.lease
        for keeper in list(self.keepers.values()):
            if now - keeper.seen > lease:
                self._lose(keeper, f"silent for {lease:g} s")
        self._push(now)

    def _push(self, now: float) -> None:
        versions = self.state.versions
        if versions.ref is not None:
            if versions.newest > self._told:
                self._told = versions.newest
                for peer in self.keepers:
                    self.state.outbox.to_control(peer, Prefetch(versions.ref))
            for engine in self._due(now):
                self.state.outbox.to_control(engine.encode(), versions.order(versions.ref, "train"))
                versions.push(engine, now)
        for engine in versions.overdue(now, self.state.config.weights.deadline):
            log.warning("%s has not loaded v%d in time; it is sent again", engine, versions.newest.step)

    def _due(self, now: float) -> list[str]:
        """Engines to send the newest version to. Servers that serve are updated one after another, in turn:
        while one is paused, the others generate."""
        versions, held = self.state.versions, self.state.versions.engines
        due = [engine for engine in held if versions.behind(engine, now) and self._may_load(engine)]
        if not self.remote or not self.state.config.weights.rolling:
            return due
        served = {engine for engine in held if held[engine].acked != NO_VERSION}  # whether healthy now or not
        idle = [engine for engine in due if engine not in served]
        if any(held[engine].acked < held[engine].pushed for engine in served):
            return idle
        return idle + sorted(set(due) & served, key=lambda engine: held[engine].pushed_at)[:1]

    def _may_load(self, engine: str) -> bool:
        if not self.remote:
            return True
        keeper = self.keepers.get(engine.encode())
        pinned = engine in self._eval_servers and engine not in self.quarantined
        return keeper is not None and bool(keeper.hello.url) and not pinned

    # -- keepers -------------------------------------------------------------------------------------

    def hello(self, peer: bytes, message: KeeperHello, now: float) -> None:
        """A keeper reports in, for the first time or again. Both are handled alike: its state is absolute."""
        same = [k for k in self.keepers.values() if k.hello.index == message.index]
        if self.state.dismissed(peer, message.incarnation, same[0].hello.incarnation if same else ""):
            return
        for old in [k for k in same if k.peer != peer]:
            self._lose(old, "replaced by a new process")
        known = self.keepers.get(peer)
        if known is None:
            log.info("engine %d: keeper joined, pid %d", message.index, message.pid)
            known = self.keepers[peer] = KeeperRecord(peer, message, now)
            self.join(known.engine)
            self.state.liveness.alive(now)
        elif message.url and not known.hello.url:
            log.info("engine %d: %s at %s", message.index, message.engine, message.url)
            self.state.liveness.alive(now)
        known.hello, known.seen = message, now
        self.state.welcome(peer)

    def beat(self, peer: bytes, message: KeeperBeat, now: float) -> None:
        keeper = self.keepers.get(peer)
        if keeper is None:
            return  # it will say hello
        keeper.seen, keeper.beat = now, message
        if message.kv_use is not None:
            keeper.kv_use = message.kv_use
            self.state.live_limit.kv.read(keeper.name, message.kv_use)
        if message.starting:  # a keeper whose server does not start in time ends by itself
            self.state.liveness.alive(now)

    def confirmed(self, peer: bytes, message: Loaded, now: float) -> None:
        """A keeper's answer to LoadWeights."""
        keeper = self.keepers.get(peer)
        if keeper is not None:
            keeper.seen = now
            keeper.push_s = message.seconds
            self.loaded(keeper.engine, keeper.name, message, now)

    def left(self, peer: bytes) -> None:
        """A keeper ends, and its server with it or out of its care: workers turn to others at once."""
        if (keeper := self.keepers.get(peer)) is not None:
            self._lose(keeper, "it leaves")

    def stop(self, reason: str) -> None:
        for keeper in self.keepers.values():
            self.state.outbox.to_control(keeper.peer, Stop(reason))

    def _lose(self, keeper: KeeperRecord, why: str) -> None:
        log.warning("%s lost (%s)", keeper.name, why)
        del self.keepers[keeper.peer]
        self.leave(keeper.engine)

    # -- the table -----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Episodes can be sampled: with servers, one of them holds a published version."""
        return not self.remote or bool(self._serving(None))

    def send_table(self, workers: Collection[bytes], now: float) -> None:
        """Send each worker what it does not have yet of the table: all of it, or what changed. Changes are
        collected, so that TABLES_PER_SECOND is kept. A restarted coordinator first gives the keepers a
        lease's time to report: workers take back turns from servers that a table leaves out."""
        planned = self.state.config.engine.keepers
        complete = sum(keeper.hello.index < planned for keeper in self.keepers.values()) >= planned
        if not self.remote or not (complete or now > self._began + self.state.config.launch.lease):
            return
        self._informed -= self.state.outbox.unreachable  # a change did not reach them
        self._informed &= set(workers)
        if now >= self._table_at:
            before, self._table = self._table, {entry.name: entry for entry in self.table()}
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

    def forget_table(self, peer: bytes) -> None:
        """A worker said hello: it may have missed the table."""
        self._informed.discard(peer)

    def table(self) -> tuple[EngineEntry, ...]:
        serving = {keeper.engine for keeper in self._serving(None)}
        return tuple(self._entry(keeper, keeper.engine in serving) for keeper in self.keepers.values())

    def _entry(self, keeper: KeeperRecord, healthy: bool) -> EngineEntry:
        return EngineEntry(
            name=keeper.name,
            url=keeper.hello.url,
            incarnation=keeper.hello.incarnation,
            version=self.state.versions.engines[keeper.engine].acked,
            healthy=healthy,
            lane="eval" if keeper.engine in self._eval_servers else "train",
        )

    def add_use(self, before: Sequence[EngineUse], now: Sequence[EngineUse]) -> None:
        """Count what the servers have done for a worker between two heartbeats. The later one has the same
        servers in the same order, and perhaps more of them."""
        for use, had in zip(now, chain(before, repeat(NO_USE)), strict=False):
            if use != had:
                totals = self._uses[use.name]
                for name in COUNTS:
                    if more := getattr(use, name) - getattr(had, name):
                        totals[name] += more
                self.state.live_limit.kv.retracted += use.retracted - had.retracted

    def gauges(self) -> dict[str, float]:
        """Metrics per server: what it has done for the workers, and its newest update; and the share of all
        prompt tokens that were found in a prefix cache."""
        found: dict[str, float] = {}
        prompt = cached = 0
        for keeper in self.keepers.values():
            use = self._uses[keeper.name]
            totals = {name: float(use[name]) for name in COUNTS}
            totals["version"] = float(self.state.versions.step(keeper.engine))
            totals["push_s"] = keeper.push_s
            totals["cache_hit"] = use["cached_tokens"] / max(1.0, use["prompt_tokens"])
            if keeper.kv_use is not None:
                totals["kv_use"] = keeper.kv_use
            prompt, cached = prompt + use["prompt_tokens"], cached + use["cached_tokens"]
            found |= {f"engine/{keeper.hello.index}/{name}": value for name, value in totals.items()}
        if self.remote:
            found["async/engines"] = float(len(self._serving(None)))
        if prompt:
            found["rollout/prefix_cache_hit"] = cached / prompt
        return found

    def _serving(self, lane: str | None) -> list[KeeperRecord]:
        """Keepers of servers that may sample, in all lanes or in one."""
        return [
            keeper
            for keeper in self.keepers.values()
            if keeper.hello.url
            and keeper.beat.healthy
            and keeper.engine not in self.quarantined
            and self.state.versions.engines[keeper.engine].acked != NO_VERSION
            and (lane is None or (lane == "eval") == (keeper.engine in self._eval_servers))
        ]

    # -- validation ----------------------------------------------------------------------------------

    def pin(self, version: PolicyVersion, all_servers: bool) -> bool:
        """True when validation may sample: one server with `version` or newer is set aside for it, or all,
        and keeps what it has. With a single one nothing is pinned: training goes on, on the same weights."""
        if not self._eval_servers and sum(bool(keeper.hello.url) for keeper in self.keepers.values()) < 2:
            return self.ready
        held = self.state.versions.engines
        fit = [
            keeper
            for keeper in self._serving("train")
            if held[keeper.engine].acked >= max(version, held[keeper.engine].pushed)
        ]
        for keeper in fit if all_servers else fit[: not self._eval_servers]:
            self._eval_servers.add(keeper.engine)
            self._table_at = 0.0  # workers are told before they are given its episodes
            log.info("%s is set aside for validation", keeper.name)
        return bool(self._eval_servers)

    def release(self) -> None:
        """Validation is over: its servers get the latest version and training requests again."""
        self._eval_servers.clear()
