"""The policy-version ledger: which versions exist, what each engine was sent and what it confirmed."""

from __future__ import annotations

import msgspec


class Held(msgspec.Struct):
    """One engine's view. Orders are (trainer_epoch, version); (0, 0) is the initial model."""

    pushed: tuple[int, int] = (0, 0)
    acked: tuple[int, int] = (0, 0)
    pushed_at: float = 0.0
    send_at: float = 0.0


class VersionLedger:
    """Pushed against acked, by engine. An engine that missed a version gets the latest one."""

    def __init__(self) -> None:
        self.latest: tuple[int, int] = (0, 0)
        self.engines: dict[str, Held] = {}

    def publish(self, order: tuple[int, int]) -> bool:
        """A version exists now. False for one that is older than the latest (a dead branch's)."""
        if order <= self.latest and order != (0, 0):
            return False
        self.latest = order
        return True

    def join(self, engine: str) -> None:
        self.engines[engine] = Held()

    def leave(self, engine: str) -> None:
        self.engines.pop(engine, None)

    def behind(self, engine: str, now: float) -> bool:
        """True when the engine is to be sent the latest version now."""
        held = self.engines[engine]
        return held.pushed < self.latest and now >= held.send_at

    def push(self, engine: str, now: float) -> None:
        held = self.engines[engine]
        held.pushed, held.pushed_at = self.latest, now

    def ack(self, engine: str, order: tuple[int, int]) -> bool:
        """The engine uses a version. False when that was known."""
        held = self.engines[engine]
        known, held.acked = held.acked, max(held.acked, order)
        return held.acked > known

    def resend(self, engine: str, at: float) -> None:
        """From `at` on, the engine is to be sent the latest version, whatever it was sent before."""
        held = self.engines[engine]
        held.pushed, held.send_at = (0, 0), at

    def version(self, engine: str) -> int:
        """Policy version the engine has confirmed."""
        return self.engines[engine].acked[1]

    def overdue(self, now: float, deadline: float) -> list[str]:
        """Engines that have not confirmed what they were sent `deadline` seconds ago: sent again."""
        found = [
            engine
            for engine, held in self.engines.items()
            if held.acked < held.pushed and now - held.pushed_at > deadline
        ]
        for engine in found:
            self.resend(engine, now)
        return found

    @property
    def all_acked(self) -> bool:
        return all(held.acked >= self.latest for held in self.engines.values())

    @property
    def acked_lag(self) -> int:
        """Versions between the latest published and the slowest engine's."""
        return self.latest[1] - min((held.acked[1] for held in self.engines.values()), default=self.latest[1])
