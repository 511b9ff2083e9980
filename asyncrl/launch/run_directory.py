"""The run directory: checks before it is used or resumed, and its lock."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.files import mark_start
from asyncrl.store.launches import described, launches_of, tree
from asyncrl.store.reader import meta_of
from asyncrl.store.segments import fsync
from asyncrl.weights.model_files import MODEL, identity

# SQLite's write-ahead log needs shared memory between processes, which these do not give.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
        *("orangefs", "pvfs2", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "fuse.glusterfs"),
        *("fuse.ceph-fuse", "fuse.lustre", "fuse.rclone", "fuse.blobfuse2"),
    }
)
NAME_BYTES = 200  # directories elsewhere are named after it, too: a file system allows 255
EXISTING = ("run.db", "config.yaml")
# What a resumed run must keep: its data cursor, its plans and its checkpoints were made with these.
PATHS = ("data.train", "model.path", "checkpoint.directory")
KEPT = (
    *PATHS,
    *("data.columns", "data.dataset", "data.system_prompt", "data.filter_overlong", "data.order"),
    *("data.shuffle", "seed", "buffer.groups_per_batch", "buffer.episodes_per_group", "critic.backbone"),
    *("algorithm.steps_per_batch", "trainer.optimizer", "model.lora_rank", "model.lora_alpha"),
    *("model.template", "model.template_args", "agents", "kl.prompt"),
)


def run_directory(config: RunConfig) -> Path:
    return Path(config.run_dir) / config.name


def check_paths_are_text(config: RunConfig) -> None:
    """ConfigError where the working directory or the run's has bytes that are no text: files name them."""
    for path, cure in ((Path.cwd(), "work in another"), (run_directory(config).absolute(), "set run_dir=…")):
        try:
            os.fspath(path).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the directory {os.fspath(path)!a} is not UTF-8 text; {cure}") from None


def check_run_directory(config: RunConfig) -> None:
    """ConfigError unless it is writable, on a local disk, and new or to be resumed as `resume` says."""
    run_dir = run_directory(config)

    if "/" in config.name or config.name in (".", "..") or not config.name.isprintable():
        raise ConfigError(
            f"name: {config.name!r} is no directory name; choose one without '/' and line breaks"
        )
    if len(os.fsencode(config.name)) > NAME_BYTES:
        raise ConfigError(f"name: {config.name[:20]}… has more than {NAME_BYTES} bytes; choose a shorter one")

    exists = any((run_dir / name).exists() for name in EXISTING)
    if exists and config.resume == "never":
        raise ConfigError(
            f"{run_dir}: a run of that name exists; continue it with resume=auto, or choose another name=…"
        )
    if not exists and config.resume == "must":
        raise ConfigError(
            f"{run_dir}: resume=must, but there is no run to continue; correct name= or run_dir="
        )

    kind = file_system(creatable(run_dir, "run_dir"))
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            f"{run_dir}: is on a network file system ({kind}), where the run store's write-ahead log fails; "
            "set run_dir=… to a local disk"
        )


def creatable(path: Path, key: str) -> Path:
    """The existing directory in which it lies or can be made. Raises ConfigError, which names the key."""
    parent = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: cannot be created, {parent} is not a writable directory; set {key}=…")
    return parent


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`, e.g. `ext4`; '' if unknown."""
    mounts = enumerate(psutil.disk_partitions(all=True))  # a later mount on a directory hides an earlier one
    inside = [
        (len(mount.mountpoint), at, mount.fstype)
        for at, mount in mounts
        if path.resolve().is_relative_to(mount.mountpoint)
    ]
    return max(inside, default=(0, 0, ""))[2]


def check_resumed(config: RunConfig) -> None:
    """ConfigError if a resumed run would change what its store and its checkpoints are made of."""
    for key, old, new in _changed(config, KEPT):
        begun = f"{key}: {run_directory(config)} was begun with"
        if key == "model.template":
            raise ConfigError(
                f"{begun} another chat template, which is in its config.yaml; restore that, or begin a new "
                "run with another name=…"
            )
        if key not in PATHS or _resolved(old) != _resolved(new):
            raise ConfigError(
                f"{begun} {old!r} and would go on with {new!r}; set {key}={old}, or begin a new run with "
                "another name=…"
            )

    _check_group_size(config, begun_with(config).get("algorithm", {}).get("advantage"))
    _check_model(config)


def changes(config: RunConfig, keys: Iterable[str]) -> list[str]:
    """Describe which of them a resumed run changes, for a person to read."""
    return [f"{key}, which was {old!r} and is {new!r}" for key, old, new in _changed(config, keys)]


def begun_with(config: RunConfig) -> dict[str, Any]:
    """The configuration of the newest launch of the run that is to be continued; {} where there is none.
    ConfigError for one that cannot be read."""
    launches = launches_of(run_directory(config)) if config.resume != "never" else []
    return launches[-1].config if launches else {}


def stored(config: RunConfig, key: str) -> str:
    """Return what the store of the run to be continued holds under a key of `meta`; '' for a new run."""
    return meta_of(run_directory(config), key) if config.resume != "never" else ""


def resumed_with(config: RunConfig) -> str:
    """Describe which keys a resumed run changes, on one line; '' for none."""
    before = begun_with(config)
    return described(before, tree(config)) if before else ""


def _changed(config: RunConfig, keys: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each of them with its value before and now; not what an older one lacks."""
    before = begun_with(config)
    now = tree(config)
    for key in keys:
        old, new = (_value(one, key) for one in (before, now))
        if old not in (None, new):
            yield key, old, new


def _value(section: Any, key: str) -> Any:
    """Return the value of a dotted key; None where there is none."""
    for name in key.split("."):
        section = section.get(name) if isinstance(section, dict) else None
    return section


def _check_group_size(config: RunConfig, before: Any) -> None:
    """The groups of a run are of one size, and some advantages add a greedy episode to each."""
    from asyncrl.algorithms.advantages import advantages, credit_of

    now = config.algorithm.advantage
    began = f"algorithm.advantage of {run_directory(config) / 'config.yaml'}"

    if before not in (None, now) and credit_of(config).greedy != advantages.load(before, began).greedy:
        raise ConfigError(
            f"algorithm.advantage: {run_directory(config)} was begun with {before!r} and would go on with "
            f"{now!r}, but only one of them uses a greedy episode in each group; resume with the one it "
            "began with"
        )


def _check_model(config: RunConfig) -> None:
    """The files of the model are those of the first launch, apart from its weights."""
    before = stored(config, MODEL)
    if changed := described(json.loads(before), identity(config.model.path)) if before else "":
        raise ConfigError(
            f"model.path: {config.model.path} is no longer what {run_directory(config)} was begun with: "
            f"{changed}; restore these files, or begin a new run with another name=…"
        )


def _resolved(path: Any) -> Any:
    """Return a path as absolute, or several, some with weights."""
    if isinstance(path, dict):
        return path | {"path": _resolved(path.get("path"))}
    return list(map(_resolved, path)) if isinstance(path, list) else Path(str(path)).resolve()


@contextmanager
def locked(config: RunConfig) -> Iterator[None]:
    """The run directory with its config.yaml, and that of its checkpoints, locked for one launcher."""
    run_dir = run_directory(config)
    with ExitStack() as held:
        with _writable(run_dir):
            held.enter_context(lock(run_dir, "run_dir"))

        where = config.checkpoint.directory
        elsewhere = Path(where, config.name)
        if where and "://" not in where and elsewhere.resolve() != run_dir.resolve():
            with suppress(OSError):  # it may be writable later
                held.enter_context(lock(elsewhere, "checkpoint.directory"))

        try:
            with _writable(run_dir):
                for name in ("summary.json", "status.json"):
                    (run_dir / name).unlink(missing_ok=True)
                mark_start(run_dir)
                _write_config(run_dir / "config.yaml", msgspec.yaml.encode(config))
            yield
        except ConfigError:  # nothing was started: the corrected command must find no run here
            if not (run_dir / "run.db").exists():
                (run_dir / "config.yaml").unlink(missing_ok=True)
                (run_dir / "started").unlink(missing_ok=True)
            raise


def _write_config(path: Path, content: bytes) -> None:
    """Replace it, whole or not at all also after a power cut. Its time says when the newest launch began."""
    if path.exists() and path.read_bytes() == content:
        path.touch()
        return

    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


def _taken(file: IO[str], after: float = 0.0) -> bool:
    """Lock it, after so many seconds; False while another process has a lock."""
    time.sleep(after)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def lock(directory: Path, key: str) -> Iterator[None]:
    """Makes the directory, too. `key`: by which it was chosen, beside the run's name."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a+") as file:
        if not (_taken(file) or _taken(file, after=0.1)):  # asyncrl status holds it for a moment
            file.seek(0)
            raise ConfigError(
                f"{key}: another run with this name is using {directory} (process {file.read() or '?'}); "
                f"stop it, or change name or {key}"
            )

        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()
        yield


@contextmanager
def _writable(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{run_dir}: cannot be written ({error.strerror}); set run_dir=…") from None
