"""The files of one checkpoint, as the file system that torch's distributed checkpointing wants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter

from asyncrl.store.checkpoints import Checkpoints, Files

STATE = "state"  # the folder of torch's files
Name = str | os.PathLike[str]


class StepFiles(FileSystemBase):
    """Paths are relative to the checkpoint. `written`: the files of this rank."""

    def __init__(self, checkpoints: Checkpoints, step: int) -> None:
        self._all, self._step = checkpoints, step
        self.written: Files = {}

    def create(self, name: str) -> Any:
        return self._all.create(self._step, name, self.written)

    @contextmanager
    def create_stream(self, path: Name, mode: str) -> Iterator[Any]:
        name = os.fspath(path).removesuffix(".tmp")  # there is no need to rename: the manifest comes last
        with self._all.open(self._step, name) if "r" in mode else self.create(name) as stream:
            yield stream

    def rename(self, path: Name, new_path: Name) -> None:
        """Nothing: see `create_stream`."""

    def concat_path(self, path: Name, suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def init_path(self, path: Name) -> Name:
        return path

    def mkdir(self, path: Name) -> None:
        """Nothing: `create` makes directories."""

    def exists(self, path: Name) -> bool:
        return False  # a checkpoint is written to an empty directory

    def rm_file(self, path: Name) -> None:
        raise AssertionError("nothing is there to be removed")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Name) -> bool:
        return True


def writer(files: StepFiles) -> FileSystemWriter:
    found: Any = FileSystemWriter(STATE, sync_files=False)  # they are synchronised when they are closed
    found.fs, found.path = files, STATE
    return cast(FileSystemWriter, found)


def reader(files: StepFiles) -> FileSystemReader:
    found: Any = FileSystemReader(STATE)
    found.fs, found.path = files, STATE
    return cast(FileSystemReader, found)
