"""Which named wait has lasted too long. Pure: the caller passes the time in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Overdue:
    """A wait past its limit."""

    name: str
    seconds: float
    limit: float

    def __str__(self) -> str:
        return f"waited {self.seconds:.0f} s for {self.name} (limit {self.limit:g} s)"


class Watchdog:
    """Open waits by name. A wait is over when it ends, and starts anew when something moves."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, float]] = {}

    def begin(self, name: str, limit: float, now: float) -> None:
        """Wait for `name`, from now, at most `limit` seconds. A wait already open keeps its start."""
        since, _ = self._since.get(name, (now, limit))
        self._since[name] = (since, limit)

    def moved(self, name: str, now: float) -> None:
        """Progress: the wait, if open, counts from now."""
        if name in self._since:
            self._since[name] = (now, self._since[name][1])

    def end(self, name: str) -> None:
        self._since.pop(name, None)

    def verdict(self, now: float) -> Overdue | None:
        """The wait that is longest past its limit, or None."""
        late = [
            Overdue(name, now - since, limit)
            for name, (since, limit) in self._since.items()
            if now - since > limit
        ]
        return max(late, key=lambda wait: wait.seconds - wait.limit, default=None)
