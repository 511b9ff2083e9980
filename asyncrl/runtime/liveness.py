"""Finds that a run has stalled, or that a process has lost its coordinator, by the time without signs of life
and without progress."""

from __future__ import annotations

import enum

from asyncrl.config import RunConfig
from asyncrl.weights.model_files import weight_bytes

READ_BYTES_PER_SECOND = 50e6  # of the slowest disk
# Bytes read for a checkpoint, per byte of a model in bfloat16: float32 weights and moments, hashed, then
# loaded.
CHECKPOINT_FACTOR = 12


def start_limit(config: RunConfig) -> float:
    """Return the seconds for a role to report in: `launch.start_timeout`, and the time to read models and
    checkpoint."""
    model_path = config.model.path
    read_bytes = sum(
        map(weight_bytes, (model_path, config.critic.path or model_path, config.kl.reference or model_path))
    )
    return (
        config.launch.start_timeout
        + (read_bytes + CHECKPOINT_FACTOR * weight_bytes(model_path)) / READ_BYTES_PER_SECOND
    )


def silence_limit(config: RunConfig) -> float:
    """Return the seconds without any sign of life after which the run has stalled: `launch.stall_timeout`
    beyond the longest deadline of a silent wait (a process that loads, an engine that loads a version, a
    server's stream)."""
    silent_waits = [start_limit(config), config.weights.deadline]
    silent_waits += [config.engine.request_timeout] if config.engine.remote or config.scorers else []
    return config.launch.stall_timeout + max(silent_waits)


def progress_limit(config: RunConfig) -> float:
    """Return the seconds in which an episode must land, or a batch be trained, whatever the signs of life:
    all attempts of an episode, each up to its deadlines, and the start of the servers."""
    rollout = config.rollout
    servers = config.engine.remote or config.scorers
    return (
        silence_limit(config)
        + (1 + rollout.retries) * (rollout.episode_timeout + rollout.reward_timeout)
        + (config.engine.start_timeout if servers else 0.0)
    )


class Liveness:
    """Remembers the last progress and the last sign of life of a run. Pure: `now` is passed in, in seconds of
    one monotonic clock. `start_seconds`: seconds for a role to report in."""

    def __init__(self, config: RunConfig, now: float) -> None:
        self.start_seconds = start_limit(config)
        self._silence_limit = silence_limit(config)
        self._progress_limit = progress_limit(config)
        self.progress_at = now
        self.alive_at = now

    def note_progress(self, now: float) -> None:
        """Note progress: an episode has landed, or a micro-batch, a batch, a checkpoint or a phase is
        done."""
        self.progress_at = now
        self.alive_at = now

    def note_alive(self, now: float) -> None:
        """Note a sign of life: a process moved, or waits within its own deadline."""
        self.alive_at = now

    def stall_reason(self, now: float) -> str:
        """Say why the run counts as stalled; '' for a run that has not."""
        if now - self.alive_at > self._silence_limit:
            limit = f"{self._silence_limit:g} s (launch.stall_timeout plus the longest silent wait)"
            return f"no sign of life for {limit}"
        if now - self.progress_at > self._progress_limit:
            limit = f"{self._progress_limit:g} s (the sum of an episode's deadlines)"
            return f"no episode has finished and the trainer has made no progress for {limit}"
        return ""


QUIET_SECONDS = 5.0  # without a message, after which the coordinator may have restarted


class ContactState(enum.Enum):
    """A process's contact with its coordinator, which decides what the process sends at a tick."""

    FINE = "fine"  # send a heartbeat
    QUIET = "quiet"  # send a hello: the coordinator may have restarted, or lost us
    EXPIRED = "expired"  # as QUIET, and our episodes have been given to others
    GONE = "gone"  # the coordinator does not come back: leave


class Contact:
    """Watches the contact of one process with the coordinator. Pure: times are passed in, in seconds of one
    monotonic clock.

    Args:
        seconds: silence after which the coordinator, and so this worker too, counts our episodes as lost.
        give_up: silence after which the worker leaves.
    """

    def __init__(self, seconds: float, give_up: float, now: float) -> None:
        self.lost_after = seconds
        self.leave_after = max(give_up, seconds)
        self.tick_interval = min(seconds / 5, 0.5)
        self.welcomed = False
        self._last_message_at = now
        self._last_tick_at = now

    def message_arrived(self, now: float) -> None:
        """Note that a message of the coordinator arrived."""
        self._last_message_at = now

    def contact_state(self, now: float) -> ContactState:
        """Return the state of the contact; call this every `tick_interval`. A gap in the calls means that
        this process did not run (stopped, swapped out), perhaps with unread messages, and does not count as
        silence of the coordinator."""
        missed_seconds = now - self._last_tick_at - self.tick_interval
        if missed_seconds > self.lost_after / 4:
            self._last_message_at += missed_seconds

        self._last_tick_at = now
        silent_seconds = now - self._last_message_at
        if silent_seconds > self.leave_after:
            return ContactState.GONE
        if silent_seconds > self.lost_after:
            return ContactState.EXPIRED
        if silent_seconds > min(self.lost_after / 2, QUIET_SECONDS) or not self.welcomed:
            return ContactState.QUIET

        return ContactState.FINE
