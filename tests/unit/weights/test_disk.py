"""The file protocol: what is published is what is read, or WeightsError."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.errors import ConfigError
from asyncrl.weights import disk
from asyncrl.weights.manifest import WeightsError, WeightsRef


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 4),
        "b": torch.randn(5, dtype=torch.bfloat16),
        "transposed": torch.randn(2, 6).t(),
        "scalar": torch.tensor(3.0),
    }


def test_round_trip_and_manifest(tmp_path, tensors):
    ref = disk.publish(tensors, tmp_path / "w", trainer_epoch=2, version=7)
    manifest, read = disk.read(ref)
    assert ref.order == (2, 7)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert {entry.name: (entry.shape, entry.dtype) for entry in manifest.tensors} == {
        "a": ((3, 4), "float32"),
        "b": ((5,), "bfloat16"),
        "transposed": ((6, 2), "float32"),
        "scalar": ((), "float32"),
    }
    assert disk.read_manifest(ref).checksum == manifest.checksum


def test_checksum_tells_versions_apart(tmp_path, tensors):
    first = disk.read_manifest(disk.publish(tensors, tmp_path, 0, 1)).checksum
    same = disk.read_manifest(disk.publish(tensors, tmp_path, 0, 2)).checksum
    tensors["a"][0, 0] += 1
    assert first == same != disk.read_manifest(disk.publish(tensors, tmp_path, 0, 3)).checksum


def test_tied_tensors_are_written_once(tmp_path, tensors):
    _, read = disk.read(disk.publish(tensors | {"z": tensors["a"]}, tmp_path, 0, 1))
    assert read.keys() == tensors.keys()


def test_publishing_again_replaces(tmp_path, tensors):
    disk.publish(tensors, tmp_path, 0, 1)
    ref = disk.publish({"a": torch.ones(2)}, tmp_path, 0, 1)
    assert disk.read(ref)[1]["a"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == [Path(ref.path).name]


@pytest.mark.parametrize("name", [disk.PAYLOAD, disk.MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_is_one_clear_line(tmp_path, tensors, name, damage):
    ref = disk.publish(tensors, tmp_path, 0, 1)
    path = Path(ref.path) / name
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-12] if damage == "truncated" else data)
    with pytest.raises(WeightsError) as caught:
        disk.read(ref)
    assert ref.path in str(caught.value) and "\n" not in str(caught.value)


def test_manifest_of_another_version_or_other_tensors(tmp_path, tensors):
    ref = disk.publish(tensors, tmp_path, 0, 1)
    with pytest.raises(WeightsError, match="expected epoch 0, version 2; found epoch 0, version 1"):
        disk.read(WeightsRef(0, 2, ref.path))
    payload = Path(ref.path) / disk.PAYLOAD
    held = load_file(payload)
    save_file({name: held[name].clone() for name in ("a", "b")}, payload)
    with pytest.raises(WeightsError, match="name different tensors"):
        disk.read(ref)
    with pytest.raises(WeightsError, match="no usable manifest"):
        disk.read(WeightsRef(0, 1, str(tmp_path / "nowhere")))


def test_a_crashed_publish_leaves_nothing_behind(tmp_path, tensors, monkeypatch):
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "save_file", full)
        with pytest.raises(OSError, match="no space"):
            disk.publish(tensors, tmp_path, 0, 1)
    assert list(tmp_path.iterdir()) == []
    killed = tmp_path / ".writing-of-a-killed-process"
    killed.mkdir()
    (killed / disk.PAYLOAD).write_bytes(b"half")
    ref = disk.publish(tensors, tmp_path, 0, 1)
    assert disk.published(tmp_path) == [ref]
    assert not killed.exists()


def test_prune_keeps_the_newest_and_those_in_use(tmp_path, tensors):
    refs = [disk.publish(tensors, tmp_path, *order) for order in ((0, 8), (0, 9), (0, 10), (1, 2), (1, 3))]
    assert disk.published(tmp_path) == refs
    assert disk.prune(tmp_path, keep=2, in_use=[refs[1]]) == [refs[0], refs[2]]
    assert disk.published(tmp_path) == [refs[1], *refs[3:]]
    assert disk.prune(tmp_path, keep=5) == []


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
