"""Checks that need a machine we do not have: file systems, extras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.launch import preflight

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/local ext4 rw 0 0
//server/share /mnt/my\\040share cifs rw 0 0
"""


def config(run_dir: Path, **keys: Any) -> RunConfig:
    least = {"name": "x", "run_dir": str(run_dir), "model": {"path": "m"}, "data": {"train": "t"}}
    return parse(least | keys)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/x", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/runs", "nfs4"),
        ("/homework", "ext4"),
        ("/home/local/runs", "ext4"),
        ("/mnt/my share/runs", "cifs"),
    ],
)
def test_the_nearest_mount_decides(path: str, kind: str) -> None:
    assert preflight.file_system(Path(path), MOUNTS) == kind


def test_a_later_mount_hides_an_earlier_one() -> None:
    assert preflight.file_system(Path("/home"), MOUNTS + "/dev/sdc1 /home xfs rw 0 0\n") == "xfs"
    assert preflight.file_system(Path("/home"), "") == ""


def test_a_run_store_on_a_network_file_system_is_refused_with_the_reason(tmp_path: Path) -> None:
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path.resolve()} nfs rw 0 0\n"
    with pytest.raises(ConfigError, match=r"network file system \(nfs\).*write-ahead log.*local disk"):
        preflight.check_run_directory(config(tmp_path / "runs"), mounts)
    preflight.check_run_directory(config(tmp_path / "runs"), mounts.replace(" nfs ", " ext4 "))


def test_resume_decides_about_an_existing_run(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    preflight.check_run_directory(config(tmp_path))  # an empty directory is no run
    (tmp_path / "x" / "run.db").touch()
    with pytest.raises(ConfigError, match="resume=auto"):
        preflight.check_run_directory(config(tmp_path))
    preflight.check_run_directory(config(tmp_path, resume="auto"))
    preflight.check_run_directory(config(tmp_path, resume="must"))
    with pytest.raises(ConfigError, match="no run to continue"):
        preflight.check_run_directory(config(tmp_path / "else", resume="must"))


@pytest.mark.parametrize("keys", [{"observe": {"trackers": ["wandb"]}}, {"launch": {"kind": "ray"}}])
def test_a_missing_extra_is_named(tmp_path: Path, keys: dict[str, Any]) -> None:
    extra = "wandb" if "observe" in keys else "ray"
    with pytest.raises(ConfigError, match=rf"{extra} is not installed; pip install 'asyncrl\[{extra}\]'"):
        preflight.check_installed(config(tmp_path, **keys), find=lambda name: None)
    preflight.check_installed(config(tmp_path, **keys), find=lambda name: object())
