"""The coordinator's side of scorers: the servers of frozen models, reached through their supervisors.

consumes: hellos and heartbeats of supervisors
waits for: a sign of life of each supervisor, at most launch.lease seconds
unblocks: workers (their entries in the table of servers)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from msgspec.structs import replace

from asyncrl.coordinator.peers import Peers
from asyncrl.coordinator.state import RunState
from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.wire.messages.engine import SupervisorHeartbeat, SupervisorHello
from asyncrl.wire.messages.shared import Stop
from asyncrl.wire.messages.worker import EngineEntry

SCORER = "scorer"  # the role of the supervisors of scorers


@dataclass
class SupervisorRecord:
    """A connected supervisor with the reported state of its server."""

    peer: bytes
    name: str
    hello: SupervisorHello
    seen: float
    heartbeat: SupervisorHeartbeat = field(
        default_factory=lambda: SupervisorHeartbeat(healthy=False, starting=True)
    )

    def table_entry(
        self, version: PolicyVersion, healthy: bool, lane: str, asleep: bool = False
    ) -> EngineEntry:
        """Return the entry for the supervisor's server in the table of the workers."""
        return EngineEntry(self.name, self.hello.url, self.hello.incarnation, version, healthy, lane, asleep)


class ScorerHandler:
    """Tracks the servers of scorers, to which no version is ever pushed.

    New episodes wait for these servers, as the turns of the episodes would.
    """

    def __init__(self, state: RunState) -> None:
        self.config = state.config
        self.fleet = state.fleet
        self.journal = state.journal
        self._send_welcome = state.send_welcome
        self._servers = state.config.scorer_places
        self.supervisors = Peers[SupervisorRecord](state, SCORER, len(self._servers), lambda *_: None)

    def welcome_supervisor(self, peer: bytes, message: SupervisorHello, now: float) -> None:
        """Handle the hello of a supervisor, first or repeated."""
        if message.index >= len(self._servers):
            self.journal.outbox.to_control(peer, Stop(f"no scorer has the index {message.index}"))
            return

        name = "scorer {} {}".format(*self._servers[message.index])
        supervisor = self.supervisors.accept_hello(SupervisorRecord(peer, name, message, now), now)
        if supervisor is not None:
            supervisor.hello = message
            self.fleet.liveness.note_alive(now)
            self._send_welcome(peer)

    def note_heartbeat(self, peer: bytes, message: SupervisorHeartbeat, now: float) -> None:
        if (supervisor := self.supervisors.get(peer)) is not None:
            supervisor.heartbeat = message
            if message.starting:
                self.fleet.liveness.note_alive(now)

    @property
    def missing_server(self) -> str:
        """The first scorer that reads turns and has no server, as text; '' if no server is missing."""
        connected_scorers = {
            self._servers[supervisor.hello.index][0]
            for supervisor in self.supervisors
            if supervisor.heartbeat.healthy
        }
        missing_scorers = (
            name for name, _ in self._servers if name not in connected_scorers and name != "reward"
        )
        return next((f"a scorers.{name} server" for name in missing_scorers), "")

    def table_entries(self, engines: Sequence[EngineEntry]) -> Iterator[EngineEntry]:
        """Yield the entries of the scorers' own servers, and of engines that serve scorers without servers.

        Such engines score with the base model below their adapters, which no version changes.
        """
        for supervisor in self.supervisors:
            yield supervisor.table_entry(
                NO_VERSION, supervisor.heartbeat.healthy, self._servers[supervisor.hello.index][0]
            )
        for name, engine in product(self.config.scorers_lent, engines):
            if engine.lane == "train":
                yield replace(engine, name=f"{SCORER} {name} {engine.name}", version=NO_VERSION, lane=name)

    def gauges(self, table: Sequence[EngineEntry], uses: Mapping[str, Counter[str]]) -> dict[str, float]:
        """Return metrics of each scorer, by the work of its servers."""
        metrics: dict[str, float] = {}
        for name in self.config.scorers_used:
            is_lent = name in self.config.scorers_lent
            if is_lent and not self.config.engine.remote:
                continue  # the workers' own engines score

            scorer_entries = [entry for entry in table if entry.lane == name]
            server_names = {entry.name for entry in scorer_entries}
            if is_lent:  # include engines that are reserved for a validation now
                server_names |= {
                    server_name for server_name in uses if server_name.startswith(f"{SCORER} {name} ")
                }
            total_use = sum((uses[server_name] for server_name in server_names), Counter[str]())

            metrics[f"scorer/{name}/servers"] = float(sum(entry.healthy for entry in scorer_entries))
            metrics[f"scorer/{name}/turns"] = float(total_use["requests"])
            metrics[f"scorer/{name}/prompt_tokens"] = float(total_use["prompt_tokens"])
            metrics[f"scorer/{name}/cache_hit"] = total_use["cached_tokens"] / max(
                1.0, total_use["prompt_tokens"]
            )

        return metrics
