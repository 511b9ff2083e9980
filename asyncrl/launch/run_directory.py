"""Checks the run directory before it is used or resumed, and locks the directory."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.files import mark_start
from asyncrl.store.launches import config_tree, describe_differences, launches_of
from asyncrl.store.reader import read_meta
from asyncrl.store.segments import fsync
from asyncrl.weights.model_files import MODEL_KEY, model_identity

# SQLite's write-ahead log needs memory shared between processes, which these file systems lack.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
        *("orangefs", "pvfs2", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "fuse.glusterfs"),
        *("fuse.ceph-fuse", "fuse.lustre", "fuse.rclone", "fuse.blobfuse2"),
    }
)
MAX_NAME_BYTES = 200  # Directories elsewhere are named after the run, too; a file system allows 255 bytes.
RUN_FILES = ("run.db", "config.yaml")
# Keys that a resumed run must keep: its data cursor, plans and checkpoints were made with their values.
PATH_KEYS = ("data.train", "model.path", "checkpoint.directory")
KEPT_KEYS = (
    *PATH_KEYS,
    *("data.columns", "data.dataset", "data.system_prompt", "data.filter_overlong", "data.order"),
    *("data.shuffle", "seed", "buffer.groups_per_batch", "buffer.episodes_per_group"),
    *("algorithm.steps_per_batch", "trainer.optimizer", "model.lora_rank", "model.lora_alpha"),
    "model.lora_modules",
    *("model.template", "model.template_args", "agents", "kl.prompt"),
)


def run_directory(config: RunConfig) -> Path:
    return Path(config.run_dir) / config.name


def check_paths_are_text(config: RunConfig) -> None:
    """Raise ConfigError if the path of the working directory or of the run directory is not UTF-8 text: files
    contain these paths."""
    for path, cure in (
        (Path.cwd(), "work in another directory"),
        (run_directory(config).absolute(), "set run_dir=…"),
    ):
        try:
            os.fspath(path).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the directory path {os.fspath(path)!a} is not valid UTF-8; {cure}") from None


def check_run_directory(config: RunConfig) -> None:
    """Raise ConfigError unless the run directory is writable, on a local disk, and new or to be resumed as
    `resume` says."""
    run_dir = run_directory(config)

    if "/" in config.name or config.name in (".", "..") or not config.name.isprintable():
        raise ConfigError(
            f"name: {config.name!r} is not a valid directory name; choose a name without '/' or line breaks"
        )
    if len(os.fsencode(config.name)) > MAX_NAME_BYTES:
        raise ConfigError(
            f"name: {config.name[:20]}… has more than {MAX_NAME_BYTES} bytes; choose a shorter name"
        )

    exists = any((run_dir / name).exists() for name in RUN_FILES)
    if exists and config.resume == "never":
        raise ConfigError(
            f"{run_dir}: a run with this name exists; continue that run with resume=auto, or choose "
            "another name=…"
        )
    if not exists and config.resume == "must":
        raise ConfigError(
            f"{run_dir}: resume=must, but there is no run to continue; correct name= or run_dir="
        )

    file_system_type = file_system_of(check_creatable(run_dir, "run_dir"))
    if file_system_type in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            f"run_dir: {run_dir} is on a network file system ({file_system_type}), where the run store's "
            "write-ahead log fails; set run_dir to a directory on a local disk"
        )


def check_creatable(path: Path, key: str) -> Path:
    """Return the existing directory in which `path` lies or can be created. Raises ConfigError, which names
    the key."""
    existing_parent = next(ancestor for ancestor in (path, *path.absolute().parents) if ancestor.exists())
    if not existing_parent.is_dir() or not os.access(existing_parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{path}: cannot be created, because {existing_parent} is not a writable directory; set {key}=…"
        )
    return existing_parent


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds `path`, e.g. `ext4`; '' if unknown."""
    # A later mount on a directory hides an earlier mount.
    mounts = enumerate(psutil.disk_partitions(all=True))
    containing_mounts = [
        (len(mount.mountpoint), index, mount.fstype)
        for index, mount in mounts
        if path.resolve().is_relative_to(mount.mountpoint)
    ]
    return max(containing_mounts, default=(0, 0, ""))[2]


def check_resumed(config: RunConfig) -> None:
    """Raise ConfigError if a resumed run would change settings on which its store and its checkpoints depend:
    kept keys, the size of groups, or the files of the model apart from its weights."""
    from asyncrl.algorithms.advantages import advantages, configured_advantage

    run_dir = run_directory(config)
    for key, old_value, new_value in _changed_values(config, KEPT_KEYS):
        begun_text = f"{key}: {run_dir} was started with"
        if key == "model.template":
            raise ConfigError(
                f"{begun_text} another chat template (see its config.yaml); restore that template, or "
                "start a new run with another name=…"
            )
        if key not in PATH_KEYS or _absolute_paths(old_value) != _absolute_paths(new_value):
            raise ConfigError(
                f"{begun_text} {old_value!r} and would continue with {new_value!r}; set {key}={old_value}, "
                "or "
                "start a new run with another name=…"
            )

    # Some advantages add a greedy episode to each group.
    advantage = config.algorithm.advantage
    previous_advantage = previous_config(config).get("algorithm", {}).get("advantage")
    config_key = f"algorithm.advantage of {run_dir / 'config.yaml'}"
    if (
        previous_advantage not in (None, advantage)
        and configured_advantage(config).greedy != advantages.load(previous_advantage, config_key).greedy
    ):
        raise ConfigError(
            f"algorithm.advantage: {run_dir} was started with {previous_advantage!r} and would continue with "
            f"{advantage!r}, but only one of them uses a greedy episode in each group; resume with "
            "the original advantage"
        )

    if stored_identity := stored_meta(config, MODEL_KEY):
        model_files = model_identity(config.model.path)
        if changes_text := describe_differences(json.loads(stored_identity), model_files):
            raise ConfigError(
                f"model.path: {config.model.path} has changed since {run_dir} was started: {changes_text}; "
                "restore these files, or start a new run with another name=…"
            )


def describe_changes(config: RunConfig, keys: Iterable[str]) -> list[str]:
    """Describe for people which of these keys a resumed run changes."""
    return [
        f"{key}, which was {old_value!r} and is {new_value!r}"
        for key, old_value, new_value in _changed_values(config, keys)
    ]


def previous_config(config: RunConfig) -> dict[str, Any]:
    """Return the configuration of the newest launch of the run to be continued; {} if there is none. Raises
    ConfigError if the configuration cannot be read."""
    launches = launches_of(run_directory(config)) if config.resume != "never" else []
    return launches[-1].config if launches else {}


def stored_meta(config: RunConfig, key: str) -> str:
    """Return the value of a key of `meta` in the store of the run to be continued; '' for a new run."""
    return read_meta(run_directory(config), key) if config.resume != "never" else ""


def describe_resumed_changes(config: RunConfig) -> str:
    """Describe on one line which keys a resumed run changes; '' for none."""
    previous_tree = previous_config(config)
    return describe_differences(previous_tree, config_tree(config)) if previous_tree else ""


def _changed_values(config: RunConfig, keys: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each changed key with its previous and its current value. Keys that an older configuration lacks
    are skipped."""
    previous_tree = previous_config(config)
    current_tree = config_tree(config)
    for key in keys:
        old_value, new_value = (_value_at(config_tree, key) for config_tree in (previous_tree, current_tree))
        if old_value not in (None, new_value):
            yield key, old_value, new_value


def _value_at(section: Any, key: str) -> Any:
    """Return the value of a dotted key; None if the key is missing."""
    for name in key.split("."):
        section = section.get(name) if isinstance(section, dict) else None
    return section


def _absolute_paths(path: Any) -> Any:
    """Return a path, or several paths with or without weights, as absolute paths."""
    if isinstance(path, dict):
        return path | {"path": _absolute_paths(path.get("path"))}
    return list(map(_absolute_paths, path)) if isinstance(path, list) else Path(str(path)).resolve()


@contextmanager
def prepare_and_lock(config: RunConfig) -> Iterator[None]:
    """Lock the run directory and the directory of its checkpoints for one launcher. Remove the previous
    summary and status, and write config.yaml; if no process was started, config.yaml is removed again after a
    ConfigError."""
    run_dir = run_directory(config)
    with ExitStack() as locks:
        with _naming_directory(run_dir):
            locks.enter_context(lock_directory(run_dir, "run_dir"))

        checkpoint_directory = config.checkpoint.directory
        checkpoint_run_directory = Path(checkpoint_directory, config.name)
        if (
            checkpoint_directory
            and "://" not in checkpoint_directory
            and checkpoint_run_directory.resolve() != run_dir.resolve()
        ):
            with suppress(OSError):  # The directory may become writable later
                locks.enter_context(lock_directory(checkpoint_run_directory, "checkpoint.directory"))

        try:
            with _naming_directory(run_dir):
                for name in ("summary.json", "status.json"):
                    (run_dir / name).unlink(missing_ok=True)
                mark_start(run_dir)
                _write_config(run_dir / "config.yaml", msgspec.yaml.encode(config))
            yield
        except ConfigError:  # Nothing was started: the corrected command must find no run here
            if not (run_dir / "run.db").exists():
                (run_dir / "config.yaml").unlink(missing_ok=True)
                (run_dir / "started").unlink(missing_ok=True)
            raise


def _write_config(path: Path, content: bytes) -> None:
    """Replace config.yaml as a whole, also if the power fails. Its modification time is the start of the
    newest launch."""
    if path.exists() and path.read_bytes() == content:
        path.touch()
        return

    temporary_path = path.with_suffix(".tmp")
    temporary_path.write_bytes(content)
    fsync(temporary_path)
    temporary_path.replace(path)
    fsync(path.parent)


@contextmanager
def lock_directory(directory: Path, key: str) -> Iterator[None]:
    """Create a directory and lock it for the body. `key`: the configuration key that chose the directory,
    beside the run's name. Raises ConfigError if another process has locked the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a+") as file:
        for delay in (0.0, 0.1):  # `asyncrl status` holds the lock for a moment
            time.sleep(delay)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        else:
            file.seek(0)
            raise ConfigError(
                f"{key}: another run with this name is using {directory} (process {file.read() or '?'}); "
                f"stop that run, or change name or {key}"
            )

        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()
        yield


@contextmanager
def _naming_directory(run_dir: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the run directory."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{run_dir}: cannot be written ({error.strerror}); set run_dir=…") from None
