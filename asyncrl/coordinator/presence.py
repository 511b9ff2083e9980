"""Which of the planned workers and keepers are silent, and for how long."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from asyncrl.config import RunConfig
from asyncrl.wire.messages.keeper import KeeperHello
from asyncrl.wire.messages.observer import Replace
from asyncrl.wire.messages.worker_control import WorkerHello


@dataclass
class _Seen:
    incarnation: str = ""  # of the process that was heard last
    silent_since: float = 0.0


@dataclass
class Presence:
    """A process that is silent, or still starts, is named. One that was heard before and has been silent for
    `limit` seconds hangs: it is to be replaced. How long a start may take is not known here."""

    config: RunConfig
    _seen: defaultdict[tuple[str, int], _Seen] = field(default_factory=lambda: defaultdict(_Seen))

    def extend(self, seconds: float) -> None:
        """The coordinator itself did not run for so long: nobody was silent in that time."""
        for seen in self._seen.values():
            seen.silent_since += seconds

    def absent(
        self, workers: list[WorkerHello], keepers: list[KeeperHello], limit: float, now: float
    ) -> tuple[list[str], list[Replace]]:
        """Waits for those that are not among the hellos of who is here, and whom to replace."""
        here = {("rollout", hello.index): hello.incarnation for hello in workers}
        here |= {("engine", hello.index): hello.incarnation for hello in keepers}
        planned = [("engine", index) for index in range(self.config.engine.keepers)]
        planned += [("rollout", index) for index in range(self.config.rollout.workers)]
        waits, hanging = list[str](), list[Replace]()
        for role, index in planned:
            seen = self._seen[role, index]
            if (role, index) in here:
                seen.incarnation, seen.silent_since = here[role, index], now
                continue
            waits.append(f"{role}-{index} is silent, or starts: it is not used")
            if seen.incarnation and now - seen.silent_since > limit:
                why = f"{role}-{index} has been silent for {limit:g} s"
                hanging.append(Replace(role, why, seen.incarnation))
                seen.silent_since = now
        return waits, hanging
