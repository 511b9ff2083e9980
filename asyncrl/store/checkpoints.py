"""The checkpoints of a run, in a directory or at a URL: written by the trainer, read by every process.

    step-N/{state/…, hf/…}, each file hashed while it is written ──► step-N/manifest.json, written last

A checkpoint exists when the manifest does: nothing is renamed, because not every file system renames
atomically.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from asyncrl.config import RunConfig
from asyncrl.errors import UNDECODABLE, AsyncrlError, ConfigError, one_line

MANIFEST = "manifest.json"
TOKEN_FILE = "ranks"  # shows the ranks that all of them use the same location
Files = dict[str, tuple[int, str]]  # path in a checkpoint → (bytes, xxh3)


class CheckpointError(AsyncrlError):
    """A checkpoint is missing, damaged, or of another model."""


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a checkpoint. `trained`: uids trained since the checkpoint of step `parent` (-1: since
    the start), in order; `trained_total`: the number of trained uids along the lineage. `state`: the
    learner's numbers beside the models. `files`: the files of all ranks. `trained_total` and `files` are
    filled in when the manifest is written."""

    step: int
    trainer_epoch: int
    parent: int = -1
    trained: tuple[str, ...] = ()
    trained_total: int = 0
    state: dict[str, float] = {}
    files: Files = {}


class HashedFile(io.RawIOBase):
    """A new file that is hashed while it is written, and is on the disk when closed. `on_closed` gets (bytes,
    xxh3), `on_written` the bytes of each write."""

    def __init__(
        self, file: Any, on_written: Callable[[int], None], on_closed: Callable[[int, str], None]
    ) -> None:
        self._file = file
        self._on_written = on_written
        self._on_closed = on_closed
        self._size = 0
        self._digest = xxhash.xxh3_64()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._file.write(data)
        written_bytes = memoryview(data).nbytes
        self._size += written_bytes
        self._on_written(written_bytes)
        return written_bytes

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        self._file.flush()
        with suppress(AttributeError, io.UnsupportedOperation):  # remote files have no descriptor
            os.fsync(self._file.fileno())
        self._file.close()
        self._on_closed(self._size, self._digest.hexdigest())


class Checkpoints:
    """The checkpoints at `location`: a path, or a URL that fsspec supports (`s3://bucket/run`). ConfigError
    for an unsupported URL. (fsspec would read `::` in a path as a chain of locations.)

    `written_bytes`: bytes that this process has written; `is_local`: the location is a directory;
    `write_problem`: why nothing could be written when the trainer began.
    """

    def __init__(self, location: str | Path) -> None:
        if isinstance(location, Path) or "://" not in location:
            self._fs = LocalFileSystem()
            self.root = os.path.abspath(location)
        else:
            with ConfigError.instead_of(
                ValueError,
                ImportError,
                text=f"checkpoint.directory {location}: cannot be opened",
                advice="install the package that fsspec needs (s3fs for s3://), or use a local directory",
            ):
                self._fs, self.root = url_to_fs(location)

        self.is_local = isinstance(self._fs, LocalFileSystem)
        self.written_bytes = 0
        self.write_problem = ""

    def file_path(self, step: int, name: str = "") -> str:
        return "/".join(filter(None, (self.root, f"step-{step}", name)))

    # -- reading ---------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return steps of all complete checkpoints, newest first."""
        return [step for step in self._started_steps() if self._fs.exists(self.file_path(step, MANIFEST))]

    def manifest(self, step: int) -> CheckpointManifest:
        """Return the manifest of a checkpoint. CheckpointError without a manifest, or for the manifest of a
        different step, whose trajectories would count as trained at the wrong step."""
        path = self.file_path(step)
        with CheckpointError.instead_of(OSError, *UNDECODABLE, text=f"{path}: no readable manifest"):
            content = self._fs.cat_file(self.file_path(step, MANIFEST))
            manifest = msgspec.json.decode(content, type=CheckpointManifest)

        if manifest.step != step:
            raise CheckpointError(f"{path}: renamed or copied; its manifest is from step {manifest.step}")

        return manifest

    def lineage(self, step: int, trained_steps: int) -> list[CheckpointManifest]:
        """Return the manifests that lead to the checkpoint of `step`, starting with the first manifest after
        `trained_steps`. CheckpointError when a manifest is gone."""
        manifests: list[CheckpointManifest] = []
        while step > trained_steps:
            manifests.append(self.manifest(step))
            if manifests[-1].parent >= step:
                raise CheckpointError(f"{self.file_path(step)}: the parent is not an earlier checkpoint")
            step = manifests[-1].parent
        return manifests[::-1]

    def find_damage(self, step: int) -> str:
        """Read all files of a checkpoint and describe the damage on one line; '' for none."""
        try:
            manifest = self.manifest(step)
            for file_name, recorded_fingerprint in manifest.files.items():
                with self.open_file(step, file_name) as file:
                    digest = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
                    if (file.seek(0, os.SEEK_END), digest) != recorded_fingerprint:
                        return f"{file_name} differs from its checksum"
        except (CheckpointError, OSError) as error:
            return one_line(error)

        return "" if manifest.files else "the manifest lists no files"

    def open_file(self, step: int, name: str) -> Any:
        """Open a file of a checkpoint to read."""
        return self._fs.open(self.file_path(step, name), "rb")

    # -- writing ---------------------------------------------------------------------------------------

    def prepare_step(self, step: int) -> None:
        """Make room for a checkpoint of this step, where a damaged checkpoint may be."""
        self.remove_step(step)
        self._fs.makedirs(self.file_path(step), exist_ok=True)

    def create_file(self, step: int, name: str, files: Files) -> HashedFile:
        """Create a file of a checkpoint; `files` gets the new entry when the file is closed."""
        path = self.file_path(step, name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

        def record_file(size: int, digest: str) -> None:
            files[name] = (size, digest)

        return HashedFile(self._fs.open(path, "wb"), self._count_written, record_file)

    def write_manifest(self, manifest: CheckpointManifest) -> None:
        """Write the manifest when all files are written. CheckpointError when a file is missing here: the
        ranks do not write to the same location."""
        step = manifest.step
        self._fs.invalidate_cache()
        for name, (size, _) in manifest.files.items():
            path = self.file_path(step, name)
            if not self._fs.exists(path) or self._fs.size(path) != size:
                raise CheckpointError(
                    f"{path}: written by another rank and missing here; set checkpoint.directory to a "
                    "directory that all ranks share"
                )

        self._sync_names(step, manifest.files)
        with self.create_file(step, MANIFEST, {}) as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        self._sync_names(step, {MANIFEST: (0, "")})

    def remove_step(self, step: int) -> None:
        """Remove as much of a checkpoint as possible: without the manifest, the remaining files are no
        checkpoint."""
        with suppress(OSError):
            for path in (self.file_path(step, MANIFEST), self.file_path(step)):
                if self._fs.exists(path):
                    self._fs.rm(path, recursive=True)

    def prune_steps(self, newest_step: int, keep: int, best: int = -1) -> None:
        """Delete all checkpoints but the `keep` newest up to step `newest_step` and that of step `best`.

        Half-written checkpoints of crashed processes are deleted, too. Later checkpoints belong to steps that
        will be repeated, because the checkpoints were found damaged.
        """
        earlier_steps = (step for step in self._started_steps() if step <= newest_step)
        kept_steps = {*islice(filter(self._is_complete, earlier_steps), keep), best}
        for step in self._started_steps():
            if step > newest_step or step not in kept_steps:
                self.remove_step(step)

    # -- the same location for all ranks ---------------------------------------------------------------

    def put_token(self, token: str) -> None:
        self._fs.makedirs(self.root, exist_ok=True)
        self._fs.pipe_file(f"{self.root}/{TOKEN_FILE}", token.encode())

    def sees_token(self, token: str) -> bool:
        self._fs.invalidate_cache()
        with suppress(OSError):
            return bool(self._fs.cat_file(f"{self.root}/{TOKEN_FILE}") == token.encode())
        return False

    def drop_token(self) -> None:
        self._fs.rm_file(f"{self.root}/{TOKEN_FILE}")

    # -- parts -----------------------------------------------------------------------------------------

    def _is_complete(self, step: int) -> bool:
        with suppress(CheckpointError):
            return bool(self.manifest(step).files)
        return False

    def _count_written(self, count: int) -> None:
        self.written_bytes += count

    def _started_steps(self) -> list[int]:
        """Return steps of all directories, complete or not, newest first."""
        self._fs.invalidate_cache()
        try:
            directory_names = [
                path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self.root, detail=False)
            ]
        except (FileNotFoundError, NotADirectoryError):
            return []

        step_texts = [name.removeprefix("step-") for name in directory_names if name.startswith("step-")]
        return sorted((int(number) for number in step_texts if number.isdigit()), reverse=True)

    def _sync_names(self, step: int, files: Files) -> None:
        """Make the names of these files durable, if the disk is local."""
        if not self.is_local:
            return

        folders = {self.file_path(step, name).rpartition("/")[0] for name in files}
        for folder in sorted({*folders, self.file_path(step), self.root}, reverse=True):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def checkpoints_of(config: RunConfig, run_dir: Path) -> Checkpoints:
    """Return the checkpoints of a run. ConfigError where `checkpoint.directory` cannot be used."""
    directory = config.checkpoint.directory.rstrip("/")
    return Checkpoints(f"{directory}/{config.name}" if directory else run_dir / "checkpoints")
