"""Images are found by name and digest, imported whole or not at all, listed and removed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.errors import ConfigError
from asyncrl.isolation import importing as importing_module
from asyncrl.isolation.images import find_image
from asyncrl.isolation.importing import MAX_IMAGES_BELOW, import_image, remove_image
from asyncrl.isolation.sandbox import emptying
from asyncrl.isolation.unpacking import Bounds
from tests.fakes.images import small_image

ROOT = str(Path(__file__).resolve().parents[3])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of images of this test."""
    monkeypatch.setenv("ASYNCRL_IMAGES", str(tmp_path / "images"))
    return tmp_path / "images"


def tree(path: Path, *names: str) -> str:
    for name in ("bin/sh", *names):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("#!")
    return str(path)


def left(images: Path) -> list[str]:
    """What is there beside whole images."""
    return [path.name for path in images.iterdir() if path.name[:6] not in ("sha256", "names", ".lock")]


@pytest.mark.full
def test_python_and_packages_of_a_small_image_run_in_it(images: Path) -> None:
    image = small_image(images, "small-python", python=True, packages=("pytest",))
    assert find_image(image.digest) == find_image("small-python") == image
    command = ["unshare", "--user", "--map-root-user", "chroot", image.root, "python3", "-m", "pytest"]
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert shown.stdout.startswith("pytest"), shown.stderr


def test_import_list_and_remove(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tree(tmp_path / "base")
    task = tree(tmp_path / "task", "work/code.py")
    assert main(["image", "import", base]) == 0
    assert main(["image", "import", task, "--over", "base", "--name", "t-1"]) == 0
    assert main(["image", "import", base, "--name", "other"]) == 0
    capsys.readouterr()
    assert main(["image", "list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert sorted(line.split("sha256")[0].split() for line in shown) == [["base", "other"], ["t-1"]]
    image = find_image("t-1")
    assert image.over == (find_image("base").root,) and image.layers == (image.root, *image.over)
    assert (image.files, image.size) == (4, 4)

    assert main(["image", "remove", "base"]) == 0
    assert capsys.readouterr().out == "base was removed; the image still has other names\n"
    assert main(["image", "remove", "other"]) == 2
    assert "'other' lies below 1 other image; remove sha256-" in capsys.readouterr().err
    for name in ("t-1", "other"):
        assert main(["image", "remove", name]) == 0
    assert left(own) == [] and list(own.glob("sha256-*")) == []
    assert main(["image", "remove", "other"]) == 2
    assert "no image named 'other' (available: none)" in capsys.readouterr().err


def test_an_image_over_one_has_its_settings(own: Path, tmp_path: Path) -> None:
    base = import_image(tree(tmp_path / "base"), "base")
    described = own / "names/base/image.json"
    described.write_text(described.read_text().replace('"directory":"/"', '"directory":"/work"'))
    assert import_image(tree(tmp_path / "top"), "top", over="base").directory == "/work"
    most = '"over":' + json.dumps([base.digest] * MAX_IMAGES_BELOW)
    described.write_text(described.read_text().replace('"over":[]', most))
    with pytest.raises(ConfigError, match="already has 8 images below it"):
        import_image(tree(tmp_path / "top"), over="base")


def test_a_directory_over_a_link_is_refused_unless_the_link_is_deleted(own: Path, tmp_path: Path) -> None:
    base = Path(tree(tmp_path / "base", "usr/bin/sh", "usr/lib/x"))
    top = tree(tmp_path / "top", "usr/lib/y")
    shutil.rmtree(base / "bin")
    (base / "bin").symlink_to("usr/bin")
    import_image(str(base), "base")
    with pytest.raises(ConfigError, match="top: 'bin' is a link to 'usr/bin' in the underlying image"):
        import_image(top, "top", over="base")
    assert left(own) == []
    archive = tmp_path / "top.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo(".wh.bin"))
        tar.add(top, ".")
    assert import_image(str(archive), "top", over="base").over == (find_image("base").root,)


def test_a_name_as_long_as_the_kernel_takes_inside(own: Path, tmp_path: Path) -> None:
    """Outside, below the directory of images, it is too long. The image below may have it, too."""
    base = tree(tmp_path / "base")
    archive = tmp_path / "deep.tar"
    import_image(base, "base")
    with tarfile.open(archive, "w") as tar:
        tar.add(base, ".")
        info = tarfile.TarInfo("/".join(["n" * 250] * 16 + ["end"]))
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    for over in ("", "base", "deep"):
        assert import_image(str(archive), "over" if over else "deep", over=over).files == 19
    assert remove_image("over") and remove_image("deep") and left(own) == []


def test_an_image_that_somebody_damaged_can_be_removed(own: Path, tmp_path: Path) -> None:
    image = import_image(tree(tmp_path / "a"), "one")
    Path(own, image.digest, "image.json").write_text("{")
    with pytest.raises(ConfigError, match="image 'one' cannot be read"):
        find_image("one")
    assert main(["image", "list"]) == 0
    assert remove_image(image.digest) and left(own) == [] == os.listdir(own / "names")


def test_odd_names_find_nothing(own: Path, tmp_path: Path) -> None:
    import_image(tree(tmp_path / "a"), "a")
    for name in ("../names/a", "sha256-../a", "a/b", "", ".lock", "a" * 200):
        for call in (find_image, remove_image):
            with pytest.raises(ConfigError, match="no image named"):
                call(name)
        if name:
            with pytest.raises(ConfigError, match="--name"):
                import_image(str(tmp_path / "a"), name)


def test_directories_without_rights_are_imported_and_removed(own: Path, tmp_path: Path) -> None:
    tree(tmp_path / "a", "closed/inner/file")
    for path in (tmp_path / "a/closed/inner", tmp_path / "a/closed"):
        path.chmod(0)
    try:
        image = import_image(str(tmp_path / "a"), "a")
    finally:
        for path in (tmp_path / "a/closed", tmp_path / "a/closed/inner"):
            path.chmod(0o700)
    assert image.files == 5
    assert remove_image("a") and left(own) == [] and list(own.glob("sha256-*")) == []


def test_the_same_image_imported_at_once_by_several(own: Path, tmp_path: Path) -> None:
    source = tree(tmp_path / "a")
    with ThreadPoolExecutor(3) as pool:
        imported_images = list(pool.map(lambda name: import_image(source, name), ("x", "y", "z")))
    assert imported_images[0] == imported_images[1] == imported_images[2] == find_image("z")
    assert left(own) == [] and len(list(own.glob("sha256-*"))) == 1


@contextmanager
def importing(*options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Import the standard input in a process."""
    command = [sys.executable, "-m", "asyncrl.cli", "image", "import", "-", *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ROOT}
    )
    with process:
        yield process
        process.kill()


def test_an_import_that_is_killed_leaves_nothing_for_long(own: Path, tmp_path: Path) -> None:
    with importing("--name", "killed") as process:
        assert process.stdin
        process.stdin.write(bytes(1 << 20))  # more than a pipe holds: it reads, so it holds its lock
        process.stdin.flush()
        running = left(own)
        import_image(tree(tmp_path / "a"), "a")  # leaves alone what is under way
        assert len(running) == 1 and left(own) == running
        process.kill()
        process.wait()
    with pytest.raises(ConfigError, match=r"no image named 'killed' \(available: a\)"):
        find_image("killed")
    import_image(tree(tmp_path / "a"), "b")
    assert left(own) == []


def test_an_archive_comes_by_the_standard_input(own: Path, tmp_path: Path) -> None:
    with importing("--name", "piped") as process:
        with tarfile.open(fileobj=process.stdin, mode="w|gz") as archive:
            archive.add(tree(tmp_path / "a"), ".")
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert find_image("piped").files == 2


REFUSED = {
    "none.tar": "no such file or directory",
    "empty": "/bin/sh is missing, but an image needs a shell; nothing was imported",
    "/dev/null": "the file is not a tar archive",
}


@pytest.mark.parametrize("source", REFUSED)
def test_refused_by_one_line(
    own: Path, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    path = os.path.join(tmp_path, source)
    assert main(["image", "import", path]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"asyncrl: {path}: ") and REFUSED[source] in shown and shown.count("\n") == 1
    assert not own.exists() or left(own) == []


def test_the_help_has_the_unit_and_default_of_each_bound(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["image", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--mib N import: allow at most N MiB of files in all layers (default: 16384)" in shown
    assert "--seconds N import: allow at most N seconds for unpacking (default: 1800)" in shown


def test_more_than_the_bound(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(tree(tmp_path / "a", "large"), "large").write_bytes(bytes(2 << 20))
    assert main(["image", "import", str(tmp_path / "a"), "--mib", "1"]) == 2
    assert "more than 1 MiB of files (--mib)" in capsys.readouterr().err
    assert left(own) == []


@pytest.mark.full
def test_the_time_of_an_import_is_bounded(own: Path, tmp_path: Path) -> None:
    """However long the bomb takes, or the disk hangs."""
    bomb = tmp_path / "bomb.gz"
    with tarfile.open(bomb, "w:gz") as archive:
        archive.add(tree(tmp_path / "a"), ".")
    bomb.write_bytes(bomb.read_bytes() + 200 * gzip.compress(bytes(64 << 20), 1))
    with pytest.raises(
        ConfigError, match=r"unpacking took more than 1 s \(--seconds\); nothing was imported"
    ):
        import_image(str(bomb), bounds=Bounds(seconds=1))
    assert left(own) == []


def test_a_lock_that_is_kept_is_named_with_who_keeps_it(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = import_image(tree(tmp_path / "a"), "a")
    monkeypatch.setattr(importing_module, "LOCK_SECONDS", 0.1)
    with importing_module._lock_images(own):
        for call in (partial(import_image, str(tmp_path / "a")), partial(remove_image, "a")):
            with pytest.raises(
                ConfigError, match=rf"\.lock: process {os.getpid()} has held this lock for 0\.1"
            ):
                call()
    assert find_image("a") == image


def test_litter_is_deleted_while_others_import(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take long."""
    import_image(tree(tmp_path / "a"), "a")
    (own / "incoming-litter").mkdir()
    emptied = list[str]()

    def remove(path: str) -> None:
        if path.endswith("litter"):
            with importing_module._lock_images(own):
                emptied.append(path)
        remove_directory(path)

    remove_directory = emptying.remove_directory
    monkeypatch.setattr(emptying, "remove_directory", remove)
    monkeypatch.setattr(importing_module, "LOCK_SECONDS", 0.1)
    assert remove_image("a") and left(own) == [] and len(emptied) == 1


USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
FORBIDDEN = ["unshare", "--user", "--map-root-user", "sh", "-c"]
ROBBED = "--bounding-set=-all --inh-caps=-all --no-new-privs"
FORBIDDEN += [f'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv {ROBBED} "$@"', "sh"]


@pytest.mark.parametrize(("kind", "code"), [(USER, 0), (FORBIDDEN, 2)])
def test_users_and_machines_that_forbid_namespaces(
    own: Path, tmp_path: Path, kind: list[str], code: int
) -> None:
    command = [*kind, sys.executable, "-m", "asyncrl.cli", "image", "import", tree(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.returncode == code, done.stderr
    if code:
        assert "images need user namespaces, which this machine forbids" in done.stderr and left(own) == []
    else:
        assert find_image("a").files == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "said"),
    [(USER, "sandboxes can use them"), (FORBIDDEN, "sandboxes on this machine cannot use images")],
)
def test_doctor_says_whether_they_work(own: Path, kind: list[str], said: str) -> None:
    look = "from asyncrl.launch.machine import check_images; print(*check_images(None))"
    command = [*kind, sys.executable, "-c", look]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ROOT})
    assert f"0 in {own}" in done.stdout and said in done.stdout, done.stderr


FULL = """
import os, sys
from asyncrl.errors import ConfigError
from asyncrl.isolation.importing import import_image
for source in sys.argv[1:]:
    try:
        import_image(source, "large")
    except ConfigError as error:
        print(error, flush=True)
print(*(name for name in os.listdir(os.environ["ASYNCRL_IMAGES"]) if name.startswith("incoming")))
"""


def test_an_import_that_finds_no_room_names_the_directory(own: Path, tmp_path: Path) -> None:
    """Of an archive, of a directory, and of the standard input."""
    large = tmp_path / "large"
    tree(large)
    (large / "data").write_bytes(os.urandom(1 << 20))
    with tarfile.open(tmp_path / "large.tar", "w") as archive:
        archive.add(large, ".")
    own.mkdir()
    script = f'mount -t tmpfs -o size=512k none {own} && exec "$0" -c "$1" "$2" "$3" -'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, sys.executable, FULL]
    with (tmp_path / "large.tar").open("rb") as given:
        said = subprocess.run(
            [*command, str(tmp_path / "large.tar"), str(large)],
            stdin=given,
            capture_output=True,
            text=True,
            check=False,
        )
    *lines, litter = said.stdout.splitlines()
    assert len(lines) == 3, said.stderr
    for line, source in zip(lines, (tmp_path / "large.tar", large, "-"), strict=True):
        assert line.startswith(f"{source}: {own}: no space left for the image (OSError: [Errno 28]"), line
        assert line.endswith("set ASYNCRL_IMAGES to another directory; nothing was imported")
    assert litter == ""
