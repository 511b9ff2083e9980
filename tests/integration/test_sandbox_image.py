"""The sandbox with an image: what works in it, and attacks on what is outside of it."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from asyncrl.errors import ConfigError
from asyncrl.isolation.images import Image
from asyncrl.isolation.sandbox.base import RunEnding, SandboxLimits
from asyncrl.isolation.sandbox.changes import read_entries
from asyncrl.isolation.sandbox.detection import check_image, detect_images
from asyncrl.isolation.sandbox.jail import Jail
from tests.fakes.images import small_image
from tests.integration.test_sandbox import ROBBED

ROOT = str(Path(__file__).resolve().parents[2])
LIMITS = SandboxLimits(memory=0, disk=8)
USERS = ["", pytest.param("root", marks=pytest.mark.full)]


@pytest.fixture(scope="module")
def image(images: Path) -> Image:
    return small_image(images, "small-python", python=True, packages=("pytest",))


async def test_an_image_is_the_root_and_one_user_owns_it(image: Image) -> None:
    async with Jail(LIMITS, image=image, directory="/srv/work") as box:
        run_result = await box.run("shell", "pwd; id -un; echo $HOME; stat -c %U / /etc /bin/ls /sandbox", 5)
        assert run_result.output.split() == ["/srv/work", "sandbox", "/sandbox", *["sandbox"] * 4]
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
        cell_result = await box.run("cell", "import sys\nx = 6\nsys.executable", 9)
        assert cell_result.output == "'/usr/bin/python3'\n"
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
    there, file, link, top = (tmp_path / name for name in ("there", "file", "link", "top"))
    there.mkdir()
    for path in (file, there / "file"):
        path.write_text("shown")
        hidden = top / str(path)[1:]
        hidden.parent.mkdir(parents=True, exist_ok=True)
        hidden.write_text("the image's")
    link.symlink_to("there")
    over = Image("over", root=str(top), over=image.layers, environment=image.environment)
    os.chmod(tmp_path, 0o755)  # the sandbox of root is another user's
    async with Jail(LIMITS, image=over, show=map(str, (there, file, link))) as box:
        assert (await box.run("shell", f"cat {file} {there}/file {link}/file", 5)).output == "shown" * 3
        assert "Read-only" in (await box.run("shell", f"touch {there}/x", 5)).output
        await box.run("shell", "cd /etc && rm hostname && echo > new", 5)
        kinds_by_path = {
            entry.path: entry.kind for entry in read_entries(await box.collect_changes(["/etc"]))
        }
        assert {path: kind for path, kind in kinds_by_path.items() if path != "etc"} == {
            "etc/hostname": b"x",
            "etc/new": b"f",
        }


# Attacks


def contents(top: str) -> dict[str, tuple[object, ...]]:
    """All that is to stay as it is: modes, owners, times and contents, by path."""
    found: dict[str, tuple[object, ...]] = {}
    paths = [f"{above}/{name}" for above, *names in os.walk(top) for name in (*names[0], *names[1])]
    for path in (top, *paths):
        seen = os.lstat(path)
        inside = os.readlink(path) if os.path.islink(path) else ""
        if stat.S_ISREG(seen.st_mode):
            inside = hashlib.blake2b(Path(path).read_bytes()).hexdigest()
        found[path] = (seen.st_mode, seen.st_uid, seen.st_gid, seen.st_mtime_ns, seen.st_ctime_ns, inside)
    return found


def of_the_machine() -> list[tuple[int, int, int]]:
    """Modes and owners of its directories, which are made or changed in an image."""
    place_stats = [os.lstat(f"/{name}") for name in PLACES if os.path.lexists(f"/{name}")]
    return [(each.st_mode, each.st_uid, each.st_gid) for each in place_stats]


def links(target: str) -> Callable[[str, Path], None]:
    """How to make each of PLACES a link: {name} is its own name, {outside} a directory of the machine."""
    return lambda name, path: path.symlink_to(target.format(name=name, outside=path.parents[1] / "outside"))


PLACES = ("etc", "proc", "dev", "tmp", "sandbox", "srv")
SHAPES: dict[str, Callable[[str, Path], object]] = {
    "absolute links": links("{outside}/{name}"),
    "links up": links("../../../../../../../../../../..{outside}/{name}"),
    "links to the root": links("/"),
    "links above the root": links("/.."),
    "links of a process": links("/proc/1/cwd/{name}"),
    "loops": links("/{name}"),
    "links to nothing": links("/nothing/{name}"),
    "files": lambda _, path: path.write_text("a file"),
    "pipes": lambda _, path: os.mkfifo(path),
    "nothing": lambda _, path: None,
}
FILES_OF_ETC: dict[str, Callable[[str, Path], object]] = {
    "passwd": links("{outside}/etc/{name}"),
    "group": lambda _, path: os.mkfifo(path),
    "hosts": lambda _, path: path.mkdir(),
    "nsswitch.conf": links("{name}"),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("shape", [*SHAPES, "files of etc"])
async def test_links_of_an_image_are_never_followed_outside(
    shape: str, user: Literal["", "root"], images: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    top = tmp_path / "top"
    for name in PLACES:
        (outside / name).mkdir(parents=True)
        (outside / name).chmod(0o777)  # rights are not what keeps them
    (outside / "etc/passwd").write_text("outside:x:1:1::/:/bin/sh\n")
    top.mkdir()
    if shape == "files of etc":
        (top / "etc").mkdir()
        for name, make in FILES_OF_ETC.items():
            make(name, top / "etc" / name)
    else:
        for name in PLACES:
            SHAPES[shape](name, top / name)
    thin = Image("thin", root=str(top), over=small_image(images).layers)
    before = contents(str(outside)), contents(str(top)), of_the_machine()
    show = [str(outside / "srv")]
    directory = f"{outside}/work"
    async with Jail(LIMITS, image=thin, user=user, show=show, directory=directory) as box:
        look = f"ls -d /proc/1/task /dev/null {outside}/srv; ls {outside}; echo $HOME"
        seen = await box.run("shell", f"{look}; echo > ~/x && echo > x && echo > /tmp/x && echo > /etc/x", 5)
        assert seen.ending == RunEnding.DONE, seen.output
        places = ["/dev/null", "/proc/1/task", f"{outside}/srv"]
        assert seen.output.split() == [*sorted(places), "srv", "work", "/sandbox"]
    assert before == (contents(str(outside)), contents(str(top)), of_the_machine())


DESTROY = """
import mmap, os, shutil
def attempt(action, *arguments):
    try: action(*arguments)
    except OSError: pass
with open("/usr/bin/tr", "r+b") as file:
    mmap.mmap(file.fileno(), 0)[:4] = b"gone"
for name in ("cat", "ls"): open(f"/usr/bin/{name}", "ab").write(b"more")
os.truncate("/usr/bin/cp", 3)
os.rename("/usr/bin/mv", "/usr/bin/rm")
os.link("/usr/bin/wc", "/usr/bin/linked")
os.chmod("/usr/bin/linked", 0o4777)
attempt(os.setxattr, "/usr/bin", "user.overlay.opaque", b"y")
attempt(os.mknod, "/usr/bin/ln", 0o020666, 0)
os.utime("/usr/bin/id", (1, 1))
os.symlink("/", "/usr/bin/root")
shutil.rmtree("/etc")
os.mkdir("/etc")
print(sorted(os.listdir("/etc")), "env" in os.listdir("/usr/bin"))
shutil.rmtree("/usr", ignore_errors=True)
"""


@pytest.mark.parametrize("user", USERS)
async def test_the_layers_of_an_image_never_change(user: Literal["", "root"], image: Image) -> None:
    before = [contents(layer) for layer in image.layers]
    async with Jail(LIMITS, image=image, user=user) as box:
        assert (await box.run("program", DESTROY, 20)).output == "[] True\n"
        assert "cannot be run" in (await box.run("shell", "true", 5)).output  # nothing is left
    assert [contents(layer) for layer in image.layers] == before


AS_ROOT = """
import ctypes, os, resource, socket, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    "A function of libc that fails raises."
    if getattr(libc, name)(*arguments) < 0: raise OSError(ctypes.get_errno(), name)
def write(path, data="1"):
    with open(path, "w") as file: file.write(data)
handle = ctypes.create_string_buffer(b"\\x08\\0\\0\\0\\x01\\0\\0\\0" + bytes(120))
capability = ctypes.create_string_buffer(b"\\0\\0\\0\\x02" + bytes([255] * 16))
attempts = {
    "a block device": lambda: os.mknod("/disk", 0o060666, os.makedev(254, 0)),
    "a device for characters": lambda: os.mknod("/memory", 0o020666, os.makedev(1, 1)),
    "a deleted file of overlayfs": lambda: os.mknod("/white", 0o020666, 0),
    "chroot": lambda: os.chroot("/tmp"),
    "mount": lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "a bind mount": lambda: call("mount", b"/usr", b"/tmp", b"", 4096, None),
    "remount": lambda: call("mount", b"none", b"/dev", b"", 32 | 4096, None),
    "umount": lambda: call("umount2", b"/dev", 2),
    "pivot_root": lambda: call("syscall", 155 if os.uname().machine == "x86_64" else 41, b"/", b"/tmp"),
    "move_mount": lambda: call("syscall", 429, -100, b"/dev", -100, b"/tmp", 0),
    "mount_setattr": lambda: call("syscall", 442, -100, b"/dev", 0, bytes(32), 32),
    "unshare": lambda: call("unshare", 0x10000000),
    "setns": lambda: call("setns", os.open("/proc/self/ns/mnt", os.O_RDONLY), 0),
    "another user": lambda: os.setuid(33),
    "another group": lambda: os.setgid(33),
    "groups": lambda: os.setgroups([33]),
    "chown": lambda: os.chown("/usr/bin/ls", 33, -1),
    "ptrace": lambda: call("ptrace", 16, 1, 0, 0),
    "the warden's memory": lambda: open("/proc/1/mem", "rb"),
    "the warden's variables": lambda: open("/proc/1/environ", "rb").read(),
    "the warden's files": lambda: os.listdir("/proc/1/fd"),
    "the warden's root": lambda: os.listdir("/proc/1/root/"),
    "the warden's place when memory ends": lambda: write("/proc/1/oom_score_adj", "1000"),
    "names of users": lambda: write("/proc/self/uid_map", "0 0 10"),
    "host name": lambda: socket.sethostname("x"),
    "settings of the kernel": lambda: write("/proc/sys/kernel/core_pattern", "|/x"),
    "settings of its network": lambda: write("/proc/sys/net/ipv4/ip_forward"),
    "settings of its users": lambda: write("/proc/sys/user/max_user_namespaces", "9"),
    "system requests": lambda: write("/proc/sysrq-trigger", "b"),
    "the clock": lambda: time.clock_settime(time.CLOCK_REALTIME, 1),
    "reboot": lambda: call("reboot", 0),
    "a module": lambda: call("init_module", b"", 0, b""),
    "swap": lambda: call("swapon", b"/usr/bin/ls", 0),
    "a file by its number": lambda: call("open_by_handle_at", os.open("/", os.O_RDONLY), handle, 0),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, -1),
    "more memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)),
    "more files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999)),
    "capabilities": lambda: call("capset", b"\\x22\\x05\\x08\\x20\\0\\0\\0\\0", b"\\xff" * 24),
    "capabilities of a file": lambda: os.setxattr("/usr/bin/ls", "security.capability", capability.raw[:20]),
    "trusted attributes": lambda: os.setxattr("/usr/bin", "trusted.overlay.opaque", b"y"),
    "a raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
}
for name, attempt in attempts.items():
    try: attempt()
    except (OSError, ValueError): continue
    print("could:", name)
os.kill(1, 9); os.kill(1, 19)
with open("/proc/self/status") as status:
    print({line.split()[0]: line.split()[1] for line in status if line[:3] == "Cap" or line[:5] == "NoNew"})
"""


@pytest.mark.parametrize("user", ["", "root"])
async def test_its_root_has_rights_over_files_and_no_others(user: Literal["", "root"], image: Image) -> None:
    limits = LIMITS._replace(memory=500)
    async with Jail(limits, image=image, user=user) as box:
        tried = await box.run("program", AS_ROOT, 10)
        kept = 0b11011011 if user else 0  # CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID
        shown = {"CapInh:": 0, "CapPrm:": kept, "CapEff:": kept, "CapAmb:": 0}
        held = ast.literal_eval(tried.output)
        assert {name: int(held[name], 16) for name in shown} == shown and held["NoNewPrivs:"] == "1"
        assert not user or int(held["CapBnd:"], 16) == kept
        allowed = "chmod 0 /etc/group; chown 0:0 /etc/group && cat /etc/group | head -1; id -u"
        shell_result = await box.run("shell", allowed, 5)  # the warden is there
        assert (shell_result.output == "root:x:0:\n0\n") == (user == "root"), shell_result.output


BOUNDED = {
    "files": "for n in range(10**5): open(f'/tmp/{n}', 'w').close()",
    "directories": "for n in range(10**5): os.mkdir(f'/usr/{n}')",
    "copies of the image's files": "for n in range(10**5): os.rename('/usr/bin/cp', '/usr/cp'); copy()",
    "bytes": "for n in range(10**5): open(f'/etc/{n}', 'wb').write(bytes(1 << 20))",
    "deletions": "for n in range(10**5): os.symlink('x' * 200, f'/usr/{n}'); os.link(f'/usr/{n}', f'/{n}')",
}
COPY = "import os, shutil\ndef copy(): [shutil.copy('/usr/cp', to) for to in ('/usr/bin/cp', f'/{n}')]\n"


@pytest.mark.full
@pytest.mark.parametrize("code", BOUNDED.values(), ids=BOUNDED)
async def test_what_it_writes_is_bounded_and_measured(code: str, image: Image) -> None:
    async with Jail(LIMITS._replace(disk=4), image=image, user="root") as box:
        assert "No space left" in (await box.run("program", COPY + code, 20)).output
        assert (await box.run("shell", "ls -d /usr", 5)).output == "/usr\n"


async def test_no_process_of_the_machines_python_is_open_to_the_code(image: Image) -> None:
    async with Jail(LIMITS, image=image) as box:
        await box.run("shell", "while :; do readlink /proc/[0-9]*/exe; done > /tmp/seen &", 5)
        for _ in range(20):
            await box.run("shell", ":", 5)  # which begins as a copy of the warden
        seen = (await box.run("program", "print(*{*open('/tmp/seen')})", 5)).output.split()
        assert "/usr/bin/bash" in seen and not any("python" in path for path in seen), seen


EDIT = """
import asyncio
from asyncrl.isolation.images import find_image
from asyncrl.isolation.sandbox.jail import Jail, SandboxLimits
async def main():
    for user in ("", "root"):
        async with Jail(SandboxLimits(memory=0), image=find_image("sha256-group"), user=user) as box:
            edit = "chmod 700 /usr/bin/ls && mkdir /usr/bin/a && stat -c %a /usr/bin/ls"
            print((await box.run("shell", edit, 5)).output.strip())
asyncio.run(main())
"""


@pytest.mark.parametrize("command", [[], ["unshare", "--user", "--map-user=1000", "--map-group=2000"]])
def test_the_group_of_the_user_who_imported_may_have_any_number(images: Path, command: list[str]) -> None:
    place = images / "sha256-group"
    if not place.exists():
        shutil.copytree(small_image(images).root, place / "root", symlinks=True)
        (place / "image.json").write_text('{"digest": "sha256-group"}')
    if os.getuid() == 0:
        for path in (".", "usr", "usr/bin", "usr/bin/ls"):
            os.chown(place / "root" / path, 0, 0 if command else 4242)
    environment = os.environ | {"PYTHONPATH": ROOT}
    done = subprocess.run(
        [*command, sys.executable, "-c", EDIT], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.split() == ["700", "700"], done.stderr


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
from asyncrl.isolation.sandbox.detection import detect_images
print(detect_images())
"""


def test_where_namespaces_are_forbidden_images_are_refused_and_nothing_outside_is_ended() -> None:
    around = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "sh", "-c"]
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
    assert done.stdout.startswith("sandboxes on this machine cannot use images: [Errno 1]"), done.stderr
    assert done.stdout.endswith("\nalive\n"), done.stderr


# The tests of every sandbox, with an image

KINDS = {"root": [], "user": ["unshare", "--user", "--map-user=1000", "--map-group=1000"]}
OF_ROOT = "fork_bomb_is_bounded or files_outside"  # this user is root outside, who may do more
LACKS = "thread or fewer_rights or is_shown or killed_owner"  # libgcc, or tests of their own sandboxes


def again(file: str, kind: str, user: str, chosen: str) -> None:
    """Run tests of a file with an image."""
    if subprocess.run([*KINDS[kind], "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"this machine cannot play a {kind}")
    chosen += f" and not ({OF_ROOT})" if kind == "user" else ""
    plain = ["-c", os.devnull, "--rootdir", ROOT, "-p", "no:cacheprovider", "--noconftest"]
    tests = [sys.executable, "-m", "pytest", "-q", *plain, "-p", "tests.conftest", "-k", chosen, file]
    given = {"ASYNCRL_TEST_IMAGE": "small-python", "ASYNCRL_TEST_USER": user}
    quick = os.environ | given | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ROOT}
    done = subprocess.run(
        [*KINDS[kind], *tests], cwd=ROOT, capture_output=True, text=True, timeout=300, env=quick, check=False
    )
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout


@pytest.mark.usefixtures("image")
def test_attacks_fail_with_an_image_too() -> None:
    again(
        "tests/integration/test_sandbox.py",
        "user",
        "",
        "links_lead or the_network or secrets or directory_is",
    )


@pytest.mark.full
@pytest.mark.usefixtures("image")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("user", ["", "root"])
@pytest.mark.parametrize("file", ["test_sandbox", "test_sandbox_exec"])
def test_all_attacks_fail_with_an_image_too(file: str, user: str, kind: str) -> None:
    again(f"tests/integration/{file}.py", kind, user, f"not ({LACKS})")
