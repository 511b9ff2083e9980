"""The file protocol: what is published is what is read, or WeightsError."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.errors import ConfigError
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk, ranges
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.manifest import WeightsError, WeightsRef
from tests.fakes.weights import publish, snapshot_of


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 4),
        "b": torch.randn(5, dtype=torch.bfloat16),
        "transposed": torch.randn(2, 6).t(),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
    }


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_round_trip_and_manifest(tmp_path, tensors, bucket_bytes):
    """The file is safetensors, whatever the buckets."""
    ref = VersionWriter(tmp_path / "w", bucket_bytes).write_version(snapshot_of(tensors, PolicyVersion(2, 7)))
    manifest, read = disk.read_tensors(ref)
    assert ref.version == (2, 7)
    for found in (read, load_file(Path(ref.path) / disk.PAYLOAD)):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert {entry.name: (entry.shape, entry.dtype) for entry in manifest.tensors} == {
        "a": ((3, 4), "float32"),
        "b": ((5,), "bfloat16"),
        "transposed": ((6, 2), "float32"),
        "scalar": ((), "int64"),
        "flags": ((3,), "bool"),
    }
    assert disk.read_manifest(ref).checksum == manifest.checksum


def test_checksum_tells_versions_apart(tmp_path, tensors):
    first = disk.read_manifest(publish(tensors, tmp_path, PolicyVersion(0, 1))).checksum
    same = disk.read_manifest(publish(tensors, tmp_path, PolicyVersion(0, 2))).checksum
    tensors["a"][0, 0] += 1
    assert first == same != disk.read_manifest(publish(tensors, tmp_path, PolicyVersion(0, 3))).checksum


def test_tied_tensors_are_written_once(tmp_path, tensors):
    _, read = disk.read_tensors(publish(tensors | {"z": tensors["a"]}, tmp_path, PolicyVersion(0, 1)))
    assert read.keys() == tensors.keys()


def test_publishing_again_replaces(tmp_path, tensors):
    publish(tensors, tmp_path, PolicyVersion(0, 1))
    ref = publish({"a": torch.ones(2)}, tmp_path, PolicyVersion(0, 1))
    assert disk.read_tensors(ref)[1]["a"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == [Path(ref.path).name]


@pytest.mark.parametrize("name", [disk.PAYLOAD, disk.MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_is_one_clear_line(tmp_path, tensors, name, damage, monkeypatch):
    monkeypatch.setattr(ranges, "GRID_BYTES", 8)  # what is flipped is in no tensor's first block
    ref = publish(tensors, tmp_path, PolicyVersion(0, 1))
    path = Path(ref.path) / name
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-22] if damage == "truncated" else data)
    with pytest.raises(WeightsError) as caught:
        disk.read_tensors(ref)
    assert ref.path in str(caught.value) and "\n" not in str(caught.value)


def test_manifest_of_another_version_or_other_tensors(tmp_path, tensors):
    ref = publish(tensors, tmp_path, PolicyVersion(0, 1))
    with pytest.raises(WeightsError, match="expected e0-v2, found e0-v1"):
        disk.read_tensors(WeightsRef(PolicyVersion(0, 2), ref.path))
    payload = Path(ref.path) / disk.PAYLOAD
    held = load_file(payload)
    save_file({name: held[name].clone() for name in ("a", "b")}, payload)
    with pytest.raises(WeightsError, match="name different tensors"):
        disk.read_tensors(ref)
    with pytest.raises(WeightsError, match="no usable manifest"):
        disk.read_tensors(WeightsRef(PolicyVersion(0, 1), str(tmp_path / "nowhere")))


def test_a_crashed_publish_leaves_nothing_behind(tmp_path, tensors, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_manifest", full)
        with pytest.raises(OSError, match=f"no space.*{tmp_path}"):
            publish(tensors, tmp_path, PolicyVersion(0, 1))
    assert list(tmp_path.iterdir()) == []
    killed = tmp_path / ".writing-of-a-killed-process"
    killed.mkdir()
    (killed / disk.PAYLOAD).write_bytes(b"half")
    ref = publish(tensors, tmp_path, PolicyVersion(0, 1))
    assert disk.published_versions(tmp_path) == [ref]
    assert not killed.exists()


def test_prune_keeps_the_newest_and_those_that_are_held(tmp_path, tensors):
    versions = [(0, 8), (0, 9), (0, 10), (1, 2), (1, 3)]
    refs = [publish(tensors, tmp_path, PolicyVersion(*version)) for version in versions]
    assert disk.published_versions(tmp_path) == refs
    with disk.lock_version(refs[1]), disk.lock_version(refs[1]):
        assert disk.prune(tmp_path, keep=2) == [refs[0], refs[2]]
        assert disk.published_versions(tmp_path) == [refs[1], *refs[3:]]
    assert disk.prune(tmp_path, keep=2) == [refs[1]]
    assert [disk.prune(tmp_path, keep) for keep in (3, 5)] == [[], []]  # more than the two versions left
    with pytest.raises(WeightsError, match="no usable manifest"), disk.lock_version(refs[0]):
        pass


def test_a_reader_that_died_holds_nothing(tmp_path, tensors):
    old, new = (publish(tensors, tmp_path, PolicyVersion(0, version)) for version in (1, 2))
    code = f"""
from asyncrl import types
from asyncrl.weights import disk, manifest
with disk.lock_version(manifest.WeightsRef(types.PolicyVersion(0, 1), {old.path!r})):
    print("held", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "held\n"
        assert disk.prune(tmp_path, keep=1) == []
        reader.kill()
        reader.wait()
        assert disk.prune(tmp_path, keep=1) == [old]
    assert disk.published_versions(tmp_path) == [new]


def test_a_version_that_is_being_deleted_cannot_be_held(tmp_path, tensors, monkeypatch):
    old, _ = (publish(tensors, tmp_path, PolicyVersion(0, version)) for version in (1, 2))
    found = []

    def read() -> None:
        try:
            with disk.lock_version(old):
                found.append("held")
        except WeightsError as error:
            found.append(str(error))

    def while_it_is_read(ref: WeightsRef) -> None:
        reader.start()
        end = time.monotonic() + 60
        while _opened(Path(old.path) / disk.MANIFEST) < 2 and not found:  # by `prune` and the reader
            assert time.monotonic() < end
        delete(ref)

    delete = disk.delete_version
    reader = threading.Thread(target=read)
    monkeypatch.setattr(disk, "delete_version", while_it_is_read)
    assert disk.prune(tmp_path, keep=1) == [old]
    reader.join(60)
    assert "no usable manifest" in found[0]
    assert _opened(tmp_path) == 0


def _opened(path: Path) -> int:
    """How many times this process has a file, or files below a directory, open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += Path(os.readlink(descriptor)).is_relative_to(path)
    return found


def test_a_version_that_is_replaced_before_it_is_locked_is_not_held(tmp_path, tensors, monkeypatch):
    ref = publish(tensors, tmp_path, PolicyVersion(0, 1))
    lock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        publish(tensors, tmp_path, PolicyVersion(0, 1))
        lock(descriptor, how)

    monkeypatch.setattr(disk.fcntl, "flock", late)
    with pytest.raises(WeightsError, match="no usable manifest"), disk.lock_version(ref):
        pass


def test_exclusive_locks_are_taken_as_nfs_wants_them(tmp_path, tensors, monkeypatch):
    old, _ = (publish(tensors, tmp_path, PolicyVersion(0, version)) for version in (1, 2))
    lock = fcntl.flock

    def as_on_nfs(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "not open for writing")
        lock(descriptor, how)

    monkeypatch.setattr(disk.fcntl, "flock", as_on_nfs)
    with disk.lock_version(old):
        assert disk.prune(tmp_path, keep=1) == []
    assert disk.prune(tmp_path, keep=1) == [old]


def test_where_nothing_can_be_locked_nothing_is_deleted(tmp_path, tensors, monkeypatch, caplog):
    refs = [publish(tensors, tmp_path, PolicyVersion(0, version)) for version in (1, 2)]

    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(disk.fcntl, "flock", without_locks)
    assert disk.prune(tmp_path, keep=1) == []
    assert disk.published_versions(tmp_path) == refs and "no locks available" in caplog.text
    with pytest.raises(WeightsError, match="no locks available"), disk.lock_version(refs[0]):
        pass


def test_what_is_read_outlives_its_version(tmp_path, tensors):
    old, _ = (publish(tensors, tmp_path, PolicyVersion(0, version)) for version in (1, 2))
    _, read = disk.read_tensors(old)
    assert disk.prune(tmp_path, keep=1) == [old]
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(WeightsError, match="no usable manifest"):
        disk.read_tensors(old)


def test_readers_do_without_torch():
    code = "import sys, asyncrl.weights.disk, asyncrl.weights.delta; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_weights_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "SHARED_MEMORY", tmp_path)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage(1000))
    run = tmp_path / "runs" / "demo"
    shared = disk.weights_directory("auto", run, "demo", 1000)
    assert shared.parent == tmp_path and "demo" in shared.name
    assert shared == disk.weights_directory("shm", run, "demo", 10)
    assert shared != disk.weights_directory("shm", tmp_path / "elsewhere" / "demo", "demo", 10)
    assert disk.weights_directory("auto", run, "demo", 1001) == run / "weights"
    assert disk.weights_directory("run", run, "demo", 10) == run / "weights"
    with pytest.raises(ConfigError, match=r"1000 bytes free.* 1001; set weights.directory=run") as caught:
        disk.weights_directory("shm", run, "demo", 1001)
    assert str(tmp_path) in str(caught.value)
    monkeypatch.setattr(disk, "SHARED_MEMORY", tmp_path / "none")
    assert disk.weights_directory("auto", run, "demo", 1) == run / "weights"


def test_a_weights_directory_of_its_own(tmp_path, monkeypatch):
    """On a path that machines share: what is the run's own there, and what stays on each machine."""
    monkeypatch.setattr(disk, "SHARED_MEMORY", tmp_path)
    run = tmp_path / "runs" / "demo"
    path = "/somewhere/shared"
    where = disk.weights_directory(path, run, "demo", 1 << 60)
    assert where.parent == Path(path) and where.name.startswith("demo-")
    assert where != disk.weights_directory(path, tmp_path / "elsewhere" / "demo", "demo", 0)
    assert disk.cache_directory(path, run, "demo", 0, 3).parent == disk.weights_directory(
        "shm", run, "demo", 0
    )
    assert disk.cache_directory("run", run, "demo", 0, 3) == run / "weights" / "cache-3"
    monkeypatch.setattr(disk.socket, "gethostname", lambda: "another-node")
    assert where != disk.weights_directory(path, run, "demo", 0)


@pytest.mark.parametrize("where", ["shared/weights", "ram", "~/weights"])
def test_a_weights_directory_that_is_none(tmp_path, where):
    with pytest.raises(
        ConfigError, match=rf"weights.directory: '{where}' is invalid; use auto, shm, run or an abs"
    ):
        disk.weights_directory(where, tmp_path, "demo", 0)
