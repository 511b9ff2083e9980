"""Represents runs in Python: their files, and the launchers of runs that were started here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.api.evaluation import Evaluation, evaluate_model
from asyncrl.api.live_view import Show, open_view
from asyncrl.types import EpisodeEnd, Message, Sample

if TYPE_CHECKING:
    import pyarrow

    from asyncrl.api.launcher import LauncherProcess
    from asyncrl.buffer.records import EpisodeRecord
    from asyncrl.episodes.parts import EpisodeParts
    from asyncrl.store.reader import RunReader


class RunStatus(msgspec.Struct, frozen=True):
    """A run at this moment. `phase`: starting, running, stopping, or ended; `ending`: how and why it ended,
    '' while it goes on; `waits`: who waits for what."""

    phase: str
    step: int
    total_steps: int
    ending: str
    waits: tuple[str, ...] = ()


class RunTurn(msgspec.Struct, frozen=True):
    """A turn of a recorded episode. `context`: the token ids that the template wrote before `ids`. The model
    sampled `ids` with these `logprobs` (natural logs). `versions`: the policy version that sampled each
    token."""

    context: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


class RunEpisode(msgspec.Struct, frozen=True):
    """A recorded episode. `step`: the step of its batch, None without a batch. `state`: trained, filtered,
    dropped or failed, or the state of a running episode. `conversation`: the messages as the reward saw them,
    without the text that `reset` of a tool class added to the prompt. `missing`: why turns are not stored; ''
    if all are stored."""

    uid: str
    group: int
    step: int | None
    state: str
    sample: Sample
    end: EpisodeEnd
    reward: float
    components: dict[str, float]
    conversation: tuple[Message, ...]
    turns: tuple[RunTurn, ...]
    missing: str = ""

    def __repr__(self) -> str:
        outcome = f"{self.state}, {self.end}, reward {self.reward:g}, {len(self.turns)} turns"
        return f"<{type(self).__name__} {self.uid}: {outcome}>"


class Run:
    """A running or finished run, identified by its directory. Methods read its files, and may be called in
    any thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.directory}>"

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def model(self) -> Path:
        """The Hugging Face directory of the newest checkpoint, which `model=` of another run takes, too.
        Raises ConfigError if there is none yet."""
        from asyncrl.commands.eval import resolve_target

        return Path(resolve_target(str(self.directory), self.directory.parent).model)

    def status(self) -> RunStatus:
        from asyncrl.commands.status import describe_ending
        from asyncrl.observe.files import read_status

        status = read_status(self.directory)
        ending = describe_ending(self.directory)
        return RunStatus(
            phase="ended" if ending else status.get("phase", "starting"),
            step=status.get("step", 0),
            total_steps=status.get("total_steps", 0),
            ending=ending,
            waits=() if ending else tuple(status.get("waits", ())),
        )

    def metrics(self) -> pyarrow.Table:
        """Return metrics.jsonl as a table: a row per step and per validation, a column per metric
        (docs/reference/metrics.md), null where a row has no value."""
        import pyarrow

        from asyncrl.observe.files import read_rows

        rows = read_rows(self.directory)
        columns = dict.fromkeys(name for row in rows for name in row)
        return pyarrow.table({name: [row.get(name) for row in rows] for name in columns})

    def episodes(self, step: int | None = None) -> Iterator[RunEpisode]:
        """Yield the recorded training episodes, oldest group first: those of a step's batch, or all that are
        still stored (`store.keep_bytes`). Loads the tools and the tokenizer of the run."""
        from asyncrl.config import read_config
        from asyncrl.data import Samples, samples_path
        from asyncrl.episodes.parts import EpisodeParts
        from asyncrl.launch.models import resolve_models
        from asyncrl.store.reader import RunReader

        parts = EpisodeParts(resolve_models(read_config(self.directory))).load_parts("rules", "toolbox")
        samples = Samples.open(samples_path(self.directory, "train"))
        try:
            with closing(RunReader.open(self.directory)) as reader:
                for group in reader.groups():
                    for episode in reader.group_members(group.id):
                        if step is None or episode.step == step:
                            yield _read_episode(reader, parts, samples[group.sample], episode)
        finally:
            with ThreadPoolExecutor(1) as executor:  # the caller's thread may have a loop of its own
                executor.submit(asyncio.run, parts.close()).result()

    def evaluate(
        self,
        data: Any = None,
        *settings: str | Mapping[str, Any],
        samples: int | None = None,
        episodes: int | None = None,
        **keywords: Any,
    ) -> Evaluation:
        """Evaluate the newest checkpoint with the configuration of this run. The arguments are those of
        `asyncrl.evaluate`; without `data`, the run's test data are used."""
        return evaluate_model(
            str(self.directory),
            settings,
            {"test": data, "validation.samples": samples, "validation.episodes": episodes, **keywords},
            runs=self.directory.parent,
            saved_directory=self.directory,
        )

    def export(self, directory: str | Path, adapters: str = "merged") -> Path:
        """Write the model of the newest checkpoint to a new directory for transformers, SGLang or vLLM, like
        `asyncrl merge`; with `adapters="apart"`, write only the adapters. Return the directory."""
        from asyncrl.commands import merge

        merge.main([str(self.directory), str(directory), "--adapters", adapters])
        return Path(directory)


class StartedRun(Run):
    """A run whose launcher was started by this process. The run ends, with a checkpoint, when this process
    ends."""

    def __init__(
        self,
        directory: Path,
        launcher: LauncherProcess,
        show: Show,
        caller_draws: bool = False,
    ) -> None:
        super().__init__(directory)
        self._launcher = launcher
        self._show = show
        self._caller_draws = caller_draws
        self._started_at = time.monotonic()

    def wait(self, seconds: float = math.inf) -> StartedRun:
        """Wait for the end of the run, and show it: in a live view on a terminal (in the main thread) or in a
        notebook, elsewhere by printing the lines of its launcher. Ctrl-C stops the run with a checkpoint; a
        second Ctrl-C kills it. In both cases KeyboardInterrupt is raised once the run has ended. Raises
        RunError if the run failed, ConfigError if it found bad input after its start, TimeoutError if it did
        not end within `seconds`."""
        with open_view(self.directory, self._show, self._started_at, self._caller_draws) as view:
            self._launcher.wait(view, seconds)
        return self

    @property
    def is_running(self) -> bool:
        return self._launcher.is_running

    def stop(self) -> None:
        """Request the end of the run with a checkpoint (`launch.stop_timeout`), and return at once; `wait`
        waits for it. `resume="auto"` continues the run later."""
        self._launcher.stop()

    def kill(self) -> None:
        """End all processes of the run now, without a checkpoint."""
        self._launcher.kill()


def _read_episode(
    reader: RunReader, parts: EpisodeParts, sample: Sample, episode: EpisodeRecord
) -> RunEpisode:
    from asyncrl.episodes.recorded import reward_input, stored_result, stored_turns
    from asyncrl.store.schema import StoreError
    from asyncrl.types import NO_STEP

    turns, missing = stored_turns(reader, episode)
    result = None
    with suppress(StoreError):
        result = stored_result(reader, episode.uid, episode.turns)

    messages: tuple[Message, ...] = ()
    if turns:
        end = episode.result.end
        messages = reward_input(parts, sample, turns, end, episode.stats.tool_calls, result).messages

    run_turns = [
        RunTurn(
            context=turn.context,
            ids=turn.generation.ids,
            logprobs=turn.generation.logprobs,
            versions=tuple(
                span.version for span in turn.generation.spans for _ in range(span.start, span.end)
            ),
        )
        for turn in turns
    ]
    return RunEpisode(
        uid=episode.uid,
        group=episode.group,
        step=None if episode.step == NO_STEP else episode.step,
        state=str(episode.state),
        sample=sample,
        end=episode.result.end,
        reward=episode.result.reward,
        components=episode.result.components,
        conversation=messages,
        turns=tuple(run_turns),
        missing=missing,
    )
