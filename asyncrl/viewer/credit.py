"""Rewards and advantages of a run's tokens, by the trainer's own code. That imports torch, so it is run in a
process that ends: a viewer would keep 200 MB of it.

    credits ──► python -m asyncrl.viewer.credit, uids on its stdin ──► JSON by uid on its stdout
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.buffer.records import EpisodeRecord
from asyncrl.config import RunConfig, parse, texts
from asyncrl.episodes.recorded import kept_turns
from asyncrl.errors import AsyncrlError, ConfigError, one_line
from asyncrl.observe.held_out import EVAL
from asyncrl.store.launches import at, launches_of
from asyncrl.store.reader import RunReader

SECONDS = 50.0  # for the process; a server answers within 60
Credit = dict[str, Any]  # turns: [{rewards, advantages}]; no_advantage: why there are none


def refused(config: RunConfig, reader: RunReader, episode: EpisodeRecord) -> str:
    """Say why an episode has no advantages, as far as that is known without torch; '' if it may have some.
    Functions that the configuration names are code of the run's: a viewer does not run it."""
    if episode.uid.startswith(EVAL):
        return "it is held out: it is not trained"
    if not episode.stats.turns:
        return "it has not landed"
    if any(":" in text for text in texts(msgspec.to_builtins(config.algorithm))):
        return "algorithm names a function of the user's, which a viewer does not run"
    if episode.greedy:
        return "it is compared with nothing: it is the greedy one"
    settled = reader.baseline(episode.group).results
    return "" if settled else "it is compared with nothing: its group is not settled"


def credits(run_dir: Path, uids: Sequence[str]) -> dict[str, Credit]:
    """Compute those of some episodes, in seconds. ConfigError where that fails."""
    command = [sys.executable, "-P", "-m", "asyncrl.viewer.credit", str(run_dir)]
    try:
        done = subprocess.run(command, input=msgspec.json.encode(uids), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        why = f"not computed within {SECONDS:g} s; ask again when the machine is idle"
        raise ConfigError(f"advantages: {why}") from None
    if done.returncode:
        raise ConfigError(f"advantages: {done.stderr.decode(errors='replace').strip()[-400:]}")
    return msgspec.json.decode(done.stdout, type=dict[str, Credit])


def main() -> None:
    run_dir, uids = Path(sys.argv[1]), msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
    with closing(RunReader.open(run_dir)) as reader:
        found = {uid: _credit(run_dir, reader, uid) for uid in uids}
    sys.stdout.buffer.write(msgspec.json.encode(found))


def _credit(run_dir: Path, reader: RunReader, uid: str) -> Credit:
    from asyncrl.algorithms.recipe import compose
    from asyncrl.trainer.credit import credited

    try:
        episode = reader.episode(uid)
        config = parse(at(launches_of(run_dir), episode.step + 1).config)
        turns, why = kept_turns(reader, episode)
        if why := why or refused(config, reader, episode):
            return {"turns": [], "no_advantage": why}
        found = credited(config, compose(config), episode, reader.baseline(episode.group), turns)
    except (AsyncrlError, ValueError) as error:
        return {"turns": [], "no_advantage": one_line(error)}

    split, start = [], 0
    for turn in turns:
        own = slice(start, start := start + (0 if turn.untrained else len(turn.ids)))
        parts = {"rewards": found.rewards, "advantages": found.advantage}
        split.append({name: part[own].tolist() for name, part in parts.items() if part is not None})
    why = "" if found.advantage is not None else "the advantage reads what models compute"
    return {"turns": split, "no_advantage": why}


if __name__ == "__main__":
    main()
