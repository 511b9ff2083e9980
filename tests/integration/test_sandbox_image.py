"""The sandbox with an image: what works in it, and attacks on what is outside of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.isolation.images import Image
from asyncrl.isolation.sandbox.base import RunEnding, SandboxLimits
from asyncrl.isolation.sandbox.changes import read_entries
from asyncrl.isolation.sandbox.jail import Jail, check_image, detect_images
from tests.fakes.images import small_image
from tests.integration.test_sandbox import ROBBED

ROOT = str(Path(__file__).resolve().parents[2])
LIMITS = SandboxLimits(memory=0, disk=8)


@pytest.fixture(scope="module")
def image(images: Path) -> Image:
    return small_image(images, "small-python", python=True, packages=("pytest",))


async def test_an_image_is_the_root_and_one_user_owns_it(image: Image) -> None:
    async with Jail(LIMITS, image=image, directory="/srv/work") as box:
        shown = await box.run("shell", "pwd; id -un; echo $HOME; stat -c %U / /etc /bin/ls /sandbox", 5)
        assert shown.output.split() == ["/srv/work", "sandbox", "/sandbox", *["sandbox"] * 4]
        edited = "echo hm >> /etc/group; rm -r /usr/lib/python3*/json; mkdir -p /a/b; mv /usr/bin/wc /a/b/"
        assert (await box.run("shell", edited, 5)).output == ""
        counted = await box.run("shell", "/a/b/wc -l < /etc/group; ls /usr/bin/wc; echo > x", 5)
        assert counted.output[0] == "4" and "No such file" in counted.output
        await box.write_file("sub/file", b"\0\1")
        assert await box.read_file("/srv/work/sub/file") == b"\0\1"
    files = set(os.listdir(image.root)) | set(os.listdir(f"{image.root}/usr/bin"))
    assert "wc" in files and "a" not in files


async def test_cells_and_programs_are_run_by_the_images_python(image: Image) -> None:
    async with Jail(LIMITS, image=image) as box:
        found = await box.run("cell", "import sys\nx = 6\nsys.executable", 9)
        assert found.output == "'/usr/bin/python3'\n"
        failed = await box.run("cell", "1 / 0", 9)
        assert failed.ending == RunEnding.FAILED and "interpreter" not in failed.output
        late = await box.run("cell", "while 1: pass", 0.2)
        assert (late.ending, late.lost, (await box.run("cell", "x", 9)).output) == ("late", False, "6\n")
        program = await box.run("program", "import sys\nprint(input())\nsys.exit(3)", 9, "in")
        assert (program.status, program.output) == (3, "in\n")
        await box.run("shell", "rm /usr/bin/python3*", 9)
        assert "python3 cannot be run: No such file" in (await box.run("cell", "1", 9)).output
        assert "No such file" in (await box.run("program", "1", 9)).output
        await box.run("shell", "rm /bin/bash /bin/sh", 9)
        assert (
            await box.run("shell", "true", 9)
        ).output == "/bin/sh cannot be run: No such file or directory\n"


SERVED = """\
import socket, threading
with socket.create_server(("127.0.0.1", 0)) as server:
    threading.Thread(target=lambda: server.accept()[0].sendall(b"hello")).start()
    print(socket.create_connection(server.getsockname(), 5).recv(9))
try:
    socket.create_connection(("192.0.2.1", 80), 5)
except OSError as error:
    print(error)
"""


async def test_programs_reach_servers_of_their_own_and_nothing_else(image: Image) -> None:
    async with Jail(LIMITS, image=image) as box:
        ran = await box.run("program", SERVED, 9)
        assert ran.output == "b'hello'\n[Errno 101] Network is unreachable\n"


async def test_what_is_shown_lies_over_the_image_and_changes_are_those_of_the_upper_layer(
    image: Image, tmp_path: Path
) -> None:
    (tmp_path / "shown.txt").write_text("shown")
    os.chmod(tmp_path, 0o755)  # the sandbox of root is another user's
    show = (str(tmp_path), (str(tmp_path), "/usr/lib/over"), (f"{tmp_path}/shown.txt", "/bin/ls"))
    async with Jail(LIMITS, image=image, show=show) as box:
        paths = f"{tmp_path}/shown.txt /usr/lib/over/shown.txt /usr/bin/ls"
        assert (await box.run("shell", f"cat {paths}", 5)).output == "shown" * 3
        assert "Read-only" in (await box.run("shell", f"touch {tmp_path}/x", 5)).output
        await box.run("shell", "cd /etc && rm group && echo new > passwd", 5)
        found = {entry.path: entry.kind for entry in read_entries(await box.changes(["/etc"]))}
        assert found["etc/group"] == b"x" and found["etc/passwd"] == b"f"


# Machines and images with which it does not start


async def test_an_image_without_a_shell_is_refused(images: Path) -> None:
    assert detect_images() == detect_images("root") == ""
    shutil.copytree(small_image(images).root, images / "sha256-bare" / "root", symlinks=True)
    for name in ("sh", "bash"):
        os.remove(images / "sha256-bare" / "root/usr/bin" / name)
    (images / "sha256-bare/image.json").write_text('{"digest": "sha256-bare"}')
    assert check_image("small").root.endswith("/root")
    with pytest.raises(ConfigError, match="'sha256-bare' has no shell: /bin/sh cannot be run: No such file"):
        check_image("sha256-bare")


REFUSED = """
from asyncrl.isolation.sandbox.jail import detect_images
print(detect_images())
"""


def test_where_namespaces_are_forbidden_images_are_refused_and_nothing_outside_is_ended() -> None:
    around = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "sh", "-c"]
    if subprocess.run([*around, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine cannot play a container")
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces; sleep 60 &"
    command = [
        *around,
        f'{forbid} setpriv {ROBBED} "$@"; kill $! && echo alive',
        "sh",
        sys.executable,
        "-c",
        REFUSED,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"PYTHONPATH": ROOT},
        check=False,
    )
    assert done.stdout.startswith("no sandbox can have an image here: [Errno 1]"), done.stderr
    assert done.stdout.endswith("\nalive\n"), done.stderr
