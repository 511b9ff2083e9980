"""The samples of a run: read, checked, measured and written once, by the launcher."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from asyncrl.config import RolloutConfig, RunConfig, WeightedSource
from asyncrl.data.asked import Asked
from asyncrl.data.columns import check_columns
from asyncrl.data.samples import RowLayout, read_samples
from asyncrl.data.storage import Samples
from asyncrl.errors import ConfigError
from asyncrl.types import Sample

MESSAGE_TOKENS = 64  # more than a template writes around a message
MEASURED = 1000  # prompts whose tokens are counted only for a warning


class Room:
    """Whether prompts leave a turn its room in a row.

    `tokens`: of a sample's prompt as the model reads it, with its tools, or with all of them where
    `extra_info` is `{}`.
    """

    def __init__(self, rollout: RolloutConfig, tokens: Callable[[Sample], int]) -> None:
        self.turn = min(rollout.max_new_tokens, rollout.max_tokens // 2)
        self.limit, self._tokens = rollout.max_tokens - self.turn, tokens
        self.fitting = self.over = self.longest = self.measured = self.unmeasured = 0
        self._fixed: int | None = None  # more than templates and tools take

    def fits(self, sample: Sample) -> bool:
        """Counted, too. A token is a byte of text at least, so most prompts need not be rendered."""
        if self._fixed is None:
            self._fixed = self._tokens(msgspec.structs.replace(sample, extra_info="{}"))
        text = len(msgspec.msgpack.encode(sample.prompt)) + MESSAGE_TOKENS * len(sample.prompt)
        found = 0
        if text + self._fixed > self.limit:
            found = self._tokens(sample)
            self.measured += 1
        fits = found <= self.limit
        self.fitting, self.over = self.fitting + fits, self.over + (not fits)
        self.longest = max(self.longest, found)
        return fits

    def keep(self, samples: Iterable[Sample], everything: bool) -> Iterator[Sample]:
        """Those that fit; or `everything`, and not all of it is measured."""
        for sample in samples:
            if everything and self.measured >= MEASURED:
                self.unmeasured += 1
                yield sample
            elif self.fits(sample) or everything:
                yield sample

    def complaint(self, filtered: bool) -> str:
        """What was found, in a line; '' if all fit. ConfigError if none does."""
        if not self.over:
            return ""
        none = not self.fitting and not self.unmeasured
        some = "all" if none else f"{self.over}" if filtered else f"at least {self.over}"
        found = (
            f"{some} prompts have more than {self.limit} tokens (the longest {self.longest}), which leaves a "
            f"turn less than {self.turn}: rollout.max_new_tokens, of rollout.max_tokens"
        )
        if none:
            raise ConfigError(f"{found}; raise rollout.max_tokens")
        if filtered:
            return f"{found}; they were left out (data.filter_overlong)"
        return f"{found}; their episodes are cut short or fail: set data.filter_overlong=true, or raise it"


def prepare(config: RunConfig, split: str, layout: RowLayout, room: Room | None) -> tuple[Samples, list[str]]:
    """The samples of `train` or `test`, in a file without a name, and warnings. ConfigError for whatever is
    wrong with them."""
    check_columns(config.data.columns)
    key, everything, asked = f"data.{split}", not config.data.filter_overlong, Asked()
    read = (read_samples(config.data, path, split, layout, asked.see) for path in paths(config, split))
    fitting = (room.keep(samples, everything) if room else samples for samples in read)
    try:
        with tempfile.TemporaryFile() as file:
            samples = Samples.write(file, fitting)
        complaint = room.complaint(not everything) if room else ""
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except OSError as error:
        where = tempfile.gettempdir()
        raise ConfigError(f"{key}: no room for the samples in {where} ({error}); set TMPDIR") from error
    unmet = [] if layout.demonstrations else asked.unmet(config)
    return samples, [f"{key}: {line}" for line in (complaint, *unmet) if line]


def paths(config: RunConfig, split: str) -> list[str]:
    """The paths of the sources. ConfigError where some have weights and others none."""
    given = config.data.train if split == "train" else config.data.test
    sources = [given] if isinstance(given, str) else given
    weighted = [source.path for source in sources if isinstance(source, WeightedSource)]
    plain = [source for source in sources if isinstance(source, str)]
    if weighted and plain:
        raise ConfigError(f"data.train: {plain[0]} has no weight; give one to all sources, or to none")
    return weighted or plain


def check_same_data(samples: Samples, kept: str) -> None:
    """ConfigError unless their fingerprint is the `kept` one, or that is empty: a new run. Groups name
    samples by number."""
    if kept not in ("", samples.fingerprint):
        raise ConfigError(
            "data.train: these are other samples, or in another order, than those that the run was begun "
            "with; restore the data, or begin a new run with another name=…"
        )


def samples_path(run_dir: Path, split: str) -> Path:
    """Where the launcher saves the samples for the coordinator."""
    return run_dir / "data" / f"{split}.samples"
