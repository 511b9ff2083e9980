"""The coordinator's side of the servers of frozen models, by their keepers.

consumes: hellos and beats of keepers
waits for: a sign of life of each, at most launch.lease seconds
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
from asyncrl.wire.messages.engine import KeeperBeat, KeeperHello
from asyncrl.wire.messages.shared import Stop
from asyncrl.wire.messages.worker import EngineEntry

SCORER = "scorer"  # the role of their keepers


@dataclass
class KeeperRecord:
    """Hold a connected keeper and what is known of its server."""

    peer: bytes
    name: str
    hello: KeeperHello
    seen: float
    beat: KeeperBeat = field(default_factory=lambda: KeeperBeat(healthy=False, starting=True))

    def entry(self, version: PolicyVersion, healthy: bool, lane: str, asleep: bool = False) -> EngineEntry:
        """Return what workers are told of its server."""
        return EngineEntry(self.name, self.hello.url, self.hello.incarnation, version, healthy, lane, asleep)


class ScorerHandler:
    """Tracks the servers of scorers. They are no engines: no version is pushed to them. New episodes wait for
    them, as their turns would."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._places = state.config.scorer_places
        self.keepers = Peers[KeeperRecord](state, SCORER, len(self._places), lambda *_: None)

    def hello(self, peer: bytes, message: KeeperHello, now: float) -> None:
        """A keeper reports in, for the first time or again; its state is absolute."""
        if message.index >= len(self._places):
            self.state.outbox.to_control(peer, Stop(f"there is no scorer {message.index}"))
            return

        name = "scorer {} {}".format(*self._places[message.index])
        keeper = self.keepers.hello(peer, message, now, lambda: KeeperRecord(peer, name, message, now))

        if keeper is not None:
            keeper.hello = message
            self.state.liveness.alive(now)
            self.state.welcome(peer)

    def beat(self, peer: bytes, message: KeeperBeat, now: float) -> None:
        if (keeper := self.keepers.get(peer)) is not None:
            keeper.beat = message
            if message.starting:
                self.state.liveness.alive(now)

    @property
    def lacks(self) -> str:
        """Name the first scorer that reads turns and has no server; '': none is lacking."""
        here = {self._places[keeper.hello.index][0] for keeper in self.keepers if keeper.beat.healthy}
        lacking = (name for name, _ in self._places if name not in here and name != "reward")
        return next((f"a server of scorers.{name}" for name in lacking), "")

    def table(self, engines: Sequence[EngineEntry]) -> Iterator[EngineEntry]:
        """Yield the scorers' own servers, and for scorers that have none those of engines once more: they
        score with the base of their adapters, which no version changes."""
        for keeper in self.keepers:
            yield keeper.entry(NO_VERSION, keeper.beat.healthy, self._places[keeper.hello.index][0])
        for name, one in product(self.state.config.scorers_lent, engines):
            if one.lane == "train":
                yield replace(one, name=f"{SCORER} {name} {one.name}", version=NO_VERSION, lane=name)

    def gauges(self, table: Sequence[EngineEntry], uses: Mapping[str, Counter[str]]) -> dict[str, float]:
        """Return metrics per scorer, by what its servers have done for the workers."""
        found: dict[str, float] = {}
        for name in self.state.config.scorers_used:
            lent = name in self.state.config.scorers_lent
            if lent and not self.state.config.engine.remote:
                continue  # the workers' own engines score

            mine = [entry for entry in table if entry.lane == name]
            names = {entry.name for entry in mine}
            if lent:  # those that are a validation's now have scored, too
                names |= {known for known in uses if known.startswith(f"{SCORER} {name} ")}
            total = sum((uses[known] for known in names), Counter[str]())

            found[f"scorer/{name}/servers"] = float(sum(entry.healthy for entry in mine))
            found[f"scorer/{name}/turns"] = float(total["requests"])
            found[f"scorer/{name}/prompt_tokens"] = float(total["prompt_tokens"])
            found[f"scorer/{name}/cache_hit"] = total["cached_tokens"] / max(1.0, total["prompt_tokens"])

        return found
