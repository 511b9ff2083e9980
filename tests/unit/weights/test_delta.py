"""A version published as a delta is the version, for every reader, or a WeightsError."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.types import PolicyVersion
from asyncrl.weights import codec, disk, ranges
from asyncrl.weights.delta import VersionWriter, materialise
from asyncrl.weights.manifest import Superseded, WeightsError, WeightsRef
from asyncrl.weights.snapshot import HeldCopy, Snapshot, Tensors
from tests.fakes import weights as fake_weights
from tests.fakes.weights import snapshot_of

FULL_EVERY = 4


class Training:
    """A model that changes a little with every version, published by a writer."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.tensors: Tensors = {
            "embedding": torch.randn(400, 16).bfloat16(),
            "norm": torch.ones(16),
            "untouched": torch.randn(3, 5),
        }
        self.version = -1
        self.writer = VersionWriter(directory, 4096, FULL_EVERY)
        self.history: dict[PolicyVersion, Tensors] = {}

    def snapshot(self) -> Snapshot:
        self.version += 1
        self.tensors["embedding"].view(-1)[self.version :: 97] += 0.5
        self.tensors["norm"] *= 1.001
        copies = {name: tensor.clone() for name, tensor in self.tensors.items()}
        version = PolicyVersion(0, self.version)
        self.history[version] = copies
        return snapshot_of(copies, version)

    def publish(self, versions: int = 1) -> WeightsRef:
        for _ in range(versions):
            ref = self.writer.write_version(self.snapshot())
        return ref

    def ref(self, version: int) -> WeightsRef:
        return disk.ref_to(self.directory, PolicyVersion(0, version))

    def check(self, ref: WeightsRef) -> None:
        """What any reader gets is what was published."""
        manifest, read = disk.read_tensors(ref)
        same(read, self.history[ref.version])
        assert disk.verify_version(ref) == manifest


def same(received: Tensors, wanted: Tensors) -> None:
    assert received.keys() == wanted.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in wanted.items())


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "weights")


def files(ref: WeightsRef) -> set[str]:
    return {path.name for path in Path(ref.path).iterdir()} - {disk.MANIFEST}


def damage(ref: WeightsRef, name: str) -> None:
    path = Path(ref.path) / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_versions_between_whole_ones_are_deltas(training: Training):
    training.publish(6)
    assert [files(ref) for ref in disk.published_versions(training.directory)] == [
        {disk.PAYLOAD} if version % FULL_EVERY == 0 else {disk.DELTA} for version in range(6)
    ]
    for ref in disk.published_versions(training.directory):
        training.check(ref)
    sizes = [
        (Path(training.ref(v).path) / name).stat().st_size for v, name in ((1, disk.DELTA), (0, disk.PAYLOAD))
    ]
    assert sizes[0] < sizes[1] / 20


def test_a_share_is_cut_into_what_one_message_holds(training: Training, monkeypatch: pytest.MonkeyPatch):
    """MessagePack takes less than 4 GiB at once; a test of ranks sends such shares."""
    monkeypatch.setattr(ranges, "MAX_FIELD_BYTES", 100)
    with training.snapshot().hold_copy() as pinned:
        (embedding,) = pinned.collect_parts(slice(0, 3))[2]
    assert embedding.count == embedding.size == 400 * 16 * 2
    assert max(map(len, embedding.data)) == 100
    for _ in range(3):
        training.check(training.publish())


def test_deltas_that_add_up_to_a_whole_one_end_the_lineage(training: Training):
    training.writer.full_every = 100
    names = []
    for _ in range(6):
        training.tensors["embedding"] = torch.randn(400, 16).bfloat16()
        names.append(files(training.publish()))
    assert names.count({disk.PAYLOAD}) in (2, 3)


def test_prune_keeps_what_kept_versions_build_upon(training: Training):
    training.publish(FULL_EVERY + 3)  # 0 whole, 1 2 3, 4 whole, 5 6
    assert disk.prune(training.directory, keep=2) == [training.ref(v) for v in range(4)]
    for ref in disk.published_versions(training.directory):
        training.check(ref)


def test_a_held_delta_keeps_what_it_builds_upon(training: Training):
    training.publish(FULL_EVERY + 3)
    with disk.lock_version(training.ref(2)):
        assert disk.prune(training.directory, keep=2) == [training.ref(3)]
        training.check(training.ref(2))


def test_a_version_with_other_tensors_is_whole(training: Training):
    training.publish()
    training.tensors["untouched"] = torch.randn(5, 5)
    ref = training.publish()
    assert files(ref) == {disk.PAYLOAD}
    training.check(ref)


def test_a_writer_that_starts_anew_starts_whole(training: Training):
    training.publish(2)
    training.writer = VersionWriter(training.directory, 4096, FULL_EVERY)
    assert files(training.publish()) == {disk.PAYLOAD}


def test_a_delta_that_failed_breaks_no_lineage(training: Training, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "no space left on device")

    training.publish(2)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "encode_changes", full)
        with pytest.raises(OSError, match="no space"):
            training.publish()
    assert disk.published_versions(training.directory)[-1] == training.ref(1)
    ref = training.publish()
    assert files(ref) == {disk.DELTA}
    training.check(ref)


def test_a_version_that_was_never_read_breaks_no_lineage(training: Training):
    @contextmanager
    def gone() -> Iterator[HeldCopy]:
        raise Superseded("a newer one")
        yield

    training.publish()
    with pytest.raises(Superseded):
        training.writer.write_version(replace(training.snapshot(), hold_copy=gone))
    ref = training.publish()
    assert files(ref) == {disk.DELTA}
    training.check(ref)


def test_a_cache_follows_every_version(training: Training, tmp_path: Path):
    cache = tmp_path / "cache"
    for _ in range(2 * FULL_EVERY):
        ref = training.publish()
        own = materialise(ref, cache)
        assert own.version == ref.version and Path(own.path).parent == cache
        training.check(own)
        same(load_file(Path(own.path) / disk.PAYLOAD), training.history[ref.version])
        assert disk.published_versions(cache) == [own]
        assert disk.read_manifest(own).checksum == disk.read_manifest(ref).checksum


def test_a_cache_may_skip_versions_and_load_one_again(training: Training, tmp_path: Path):
    cache = tmp_path / "cache"
    training.publish(8)
    for version in (1, 3, 3, 7, 2, 6):
        training.check(materialise(training.ref(version), cache))


def test_what_the_cache_holds_need_not_be_read_again(training: Training, tmp_path: Path):
    cache = tmp_path / "cache"
    materialise(training.publish(2), cache)
    damage(training.ref(0), disk.PAYLOAD)
    damage(training.ref(1), disk.DELTA)
    training.check(materialise(training.publish(), cache))
    with pytest.raises(WeightsError):
        disk.read_tensors(training.ref(2))


def test_a_cached_version_with_the_number_but_other_bytes_is_not_used(training: Training, tmp_path: Path):
    cache = tmp_path / "cache"
    materialise(training.publish(2), cache)
    other_training = Training(tmp_path / "other")
    other_training.tensors["norm"] += 1
    other_training.check(materialise(other_training.publish(2), cache))


@pytest.mark.parametrize("name", [disk.PAYLOAD, disk.MANIFEST])
@pytest.mark.parametrize("gone", [True, False])
def test_a_damaged_cache_is_made_anew(training: Training, tmp_path: Path, name: str, gone: bool):
    cache = tmp_path / "cache"
    own = materialise(training.publish(2), cache)
    if gone:
        (Path(own.path) / name).unlink()
    else:
        damage(own, name)
    (cache / ".writing-of-a-killed-reader").mkdir()
    own = materialise(training.publish(), cache)
    training.check(own)
    assert list(cache.iterdir()) == [Path(own.path)]


def test_without_any_way_to_a_version_it_is_one_clear_line(training: Training, tmp_path: Path):
    cache = tmp_path / "cache"
    training.publish(3)
    damage(training.ref(1), disk.DELTA)
    for reader in (disk.read_tensors, disk.verify_version, lambda ref: materialise(ref, cache)):
        with pytest.raises(WeightsError) as caught:
            reader(training.ref(2))
        assert str(training.directory) in str(caught.value) and "\n" not in str(caught.value)
    training.check(materialise(training.ref(0), cache))


def test_a_base_of_other_bytes_is_refused(training: Training, tmp_path: Path):
    training.publish(2)
    other = {name: tensor + 1 for name, tensor in training.history[0, 0].items()}
    fake_weights.publish(other, training.directory, PolicyVersion(0, 0))
    with pytest.raises(WeightsError, match="is not the base version of"):
        materialise(training.ref(1), tmp_path / "cache")


def test_a_delta_that_builds_upon_itself_is_refused(training: Training):
    ref = training.publish(2)
    manifest = disk.read_manifest(ref)
    assert manifest.delta is not None
    own_delta = msgspec.structs.replace(manifest.delta, version=ref.version, checksum=manifest.checksum)
    disk.write_manifest(Path(ref.path), msgspec.structs.replace(manifest, delta=own_delta))
    with pytest.raises(WeightsError, match="is not the base version of e0-v1"):
        list(islice(disk.lineage_of(ref), 3))


def test_a_delta_cut_off_is_refused(training: Training):
    ref = training.publish(2)
    path = Path(ref.path) / disk.DELTA
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"no usable delta\.bin \(it is truncated\)"):
        disk.read_tensors(ref)
