"""The parts that all episodes of a worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.conversation.commands import Rules
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.rollout.images import WorkerImages
from asyncrl.rollout.samplers import LocalSampler
from asyncrl.rollout.server_pool import ServerPool
from asyncrl.runtime.activity import Waits
from asyncrl.tools.snapshots import Snapshots
from asyncrl.wire.outbox import Outbox

Sampler = LocalSampler | ServerPool
"""The source of an episode's turns: an engine in this process, or a pool of servers."""


@dataclass
class EpisodeContext:
    """Holds the parts that all episodes of a worker share. `min_version`: the oldest version that may sample
    a training turn. `scorer_of`: the scorer for the turns of a data source, which also names the `top_tokens`
    likeliest tokens at each position."""

    rules: Rules
    reward: EpisodeReward
    outbox: Outbox
    waits: Waits
    images: WorkerImages
    min_version: Callable[[], int]
    snapshots: Snapshots | None = None
    scorer_of: Callable[[str], Sampler | None] = lambda source: None
    top_tokens: int = 0
