"""What changed in a sandbox is collected, and applied in another one."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from asyncrl.isolation.images import Image
from asyncrl.isolation.sandbox import changes
from asyncrl.isolation.sandbox.base import RunEnding, SandboxError, SandboxLimits
from asyncrl.isolation.sandbox.changes import Entry, pack_entries, read_entries
from asyncrl.isolation.sandbox.jail import Jail
from tests.fakes.images import small_image

SMALL = SandboxLimits(memory=300, processes=8, file=2, disk=8, output=200_000)
END = Entry(changes.END, "").frame()
WRITE = """
import os, shutil
def write(path, flag, data):
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK | flag)
    os.write(fd, data)
    os.close(fd)
"""
LISTING = """
import os, stat
def listing(top):
    found = []
    for name in sorted(os.listdir(top)):
        path = top + "/" + name
        status = os.lstat(path)
        kind, mode, content = stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), ""
        if kind == stat.S_IFLNK:
            content = os.readlink(path)
        elif kind in (stat.S_IFREG, stat.S_IFDIR):
            os.chmod(path, 0o700)
            content = listing(path) if kind == stat.S_IFDIR else open(path, "rb").read()
            os.chmod(path, mode)
        else:
            continue
        found.append((name, kind, mode, status.st_mtime_ns, content))
    return found
"""


TREE = ("a/b/c d", "a/.git", "b/ü", "c d", "a/a/a")  # files of the image, in /testbed


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with pytest.MonkeyPatch.context() as patch:
        images = tmp_path_factory.mktemp("images")
        patch.setenv("ASYNCRL_IMAGES", str(images))
        images.chmod(0o755)
        new_image = small_image(images, python=True)
        for name in TREE:
            file = Path(new_image.root, "testbed", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(name)
        yield new_image


def box(image: Image | None = None, user: Literal["", "root"] = "") -> Jail:
    return Jail(SMALL, require=(), image=image, user=user)


async def cell(jail: Jail, code: str) -> str:
    result = await jail.run("cell", textwrap.dedent(code), 20)
    assert result.ending is RunEnding.DONE, result.output
    return result.output


async def listing(jail: Jail, top: str) -> str:
    return await cell(jail, f"{LISTING}\nprint(listing({top!r}))")


@dataclass
class Operations:
    """Random operations on few names, so that they meet: statements of Python that may fail."""

    seed: int
    top: str
    lines: list[str] = field(default_factory=list)

    def code(self, count: int) -> str:
        draw = random.Random(self.seed)
        for _ in range(count):
            name = self._path(draw)
            other_name = self._path(draw)
            mode = draw.choice((0, 0o400, 0o555, 0o700, 0o644, 0o1777))
            data = f"b'%d' % {draw.randrange(10**9)} * {draw.choice((0, 1, 9000))}"
            self.lines.append(
                draw.choice(
                    (
                        f"os.makedirs({name!r})",
                        f"os.makedirs({name!r})",
                        f"write({name!r}, os.O_TRUNC, {data})",
                        f"write({name!r}, os.O_APPEND, b'more')",
                        f"os.path.islink({name!r}) or os.chmod({name!r}, {mode})",
                        f"os.remove({name!r})",
                        f"os.path.isdir({name!r}) and shutil.rmtree({name!r})",
                        f"os.rename({name!r}, {other_name!r})",
                        f"os.path.isdir({name!r}) and shutil.move({name!r}, {other_name!r})",
                        f"os.symlink({draw.choice((other_name, '/etc', '..'))!r}, {name!r})",
                        f"os.link({name!r}, {other_name!r})",
                        f"os.mkfifo({name!r})",
                        f"os.utime({name!r}, ns=(0, {draw.randrange(-(10**18), 2 * 10**18)}))",
                    )
                )
            )
        tries = "\n".join(f"try: {line}\nexcept OSError: pass" for line in self.lines)
        return f"{WRITE}\n{tries}"

    def _path(self, draw: random.Random) -> str:
        names = [draw.choice(("a", "b", "c d", "ü", ".git")) for _ in range(draw.choice((1, 1, 2, 3)))]
        return "/".join((self.top, *names))


async def check_copy(seed: int, image: Image | None, user: Literal["", "root"] = "") -> None:
    async with box(image, user) as first, box(image, user) as second:
        top = "/testbed" if image else first.home
        await cell(first, Operations(seed, top).code(60))
        before = await listing(first, top)
        archive = await first.collect_changes((top,))
        assert await listing(first, top) == before
        await second.apply_changes(archive)
        assert await listing(second, top) == before
        assert image or await second.collect_changes((top,)) == archive


async def test_what_changed_is_the_same_in_another_sandbox(image: Image) -> None:
    for seed in (3, 4):
        await check_copy(seed, None)
        await check_copy(seed, image)


@pytest.mark.full
async def test_what_changed_is_the_same_after_many_random_operations(image: Image) -> None:
    for seed in range(1000, 1100):
        await check_copy(seed, None)
        await check_copy(seed, image)
        await check_copy(seed, image, "root")


async def test_only_what_is_asked_for_is_collected() -> None:
    async with box() as jail:
        await jail.run(
            "shell", "mkdir -p a/.git a/b c; touch a/x a/x.pyc a/.git/y a/b/z c/w; ln -s a link", 5
        )
        home = jail.home

        async def paths(*roots: str) -> list[str]:
            archive = await jail.collect_changes(roots, (".git", "*.pyc"))
            return [entry.path for entry in read_entries(archive)]

        assert await paths(f"{home}/a") == ["a", "a/x", "a/b", "a/b/z"]
        assert await paths(f"{home}/absent") == []
        assert await paths(f"{home}/c", f"{home}/a/b") == ["a/b", "a/b/z", "c", "c/w"]
        with pytest.raises(SandboxError, match="link is a link; name the link's target directory"):
            await paths(f"{home}/link")
        with pytest.raises(SandboxError, match="link is a link"):
            await paths(f"{home}/link/b")
        with pytest.raises(ValueError, match="changes are collected only from directories below"):
            await paths("/etc")


async def test_of_an_image_only_what_changed_is_collected(image: Image) -> None:
    async with box(image) as first, box(image) as second:
        assert {entry.path for entry in read_entries(await first.collect_changes())} <= {
            *("etc", "etc/hosts", "etc/nsswitch.conf", "sandbox", "tmp")  # made at the start
        }
        command = (
            "cd /testbed && rm -r a b && mkdir -p a/a && echo x > a/a/x && echo hi > /etc/motd && rm /bin/dd"
        )
        assert (await first.run("shell", command, 5)).status == 0

        async def collected(*roots: str) -> list[tuple[bytes, str]]:
            return [entry[:2] for entry in read_entries(await first.collect_changes(roots))]

        hidden = changes.OPAQUE
        file_kind = changes.FILE
        assert await collected("/testbed/a/a") == [(hidden, "testbed/a/a"), (file_kind, "testbed/a/a/x")]
        assert await collected("/testbed/b", "/testbed/b/deep") == [
            (changes.DELETED, "testbed/b"),
            (changes.DELETED, "testbed/b/deep"),
        ]
        assert await collected("/usr") == [
            *((changes.DIRECTORY, "usr"), (changes.DIRECTORY, "usr/bin"), (changes.DELETED, "usr/bin/dd"))
        ]
        await first.run("shell", "rm -r /var && mkdir /var", 5)
        assert await collected("/var/tmp") == [(changes.DELETED, "var/tmp")]
        with pytest.raises(SandboxError, match="bin is a link"):
            await collected("/bin")
        await second.apply_changes(await first.collect_changes(("/testbed/b", "/testbed/b/deep")))
        assert (await second.run("shell", "ls /testbed", 5)).output.split() == ["a", "c", "d"]
        everything = await first.collect_changes()
        assert not any(entry.path in ("etc/passwd", "proc", "dev") for entry in read_entries(everything))
        await second.apply_changes(everything)
        for command in ("find / -xdev | sort", "cat /etc/motd /testbed/a/a/x", "id"):
            results = [await jail.run("shell", command, 5) for jail in (first, second)]
            assert results[0].output == results[1].output or command == "id"
        assert "sandbox" in results[1].output


async def test_what_changed_is_bounded() -> None:
    async with box() as jail:
        await jail.run("shell", "head -c 1000000 /dev/urandom > large; kept=1", 5)
        with pytest.raises(SandboxError, match="more than 900000 bytes"):
            await jail.collect_changes(max_bytes=900_000)
        await cell(jail, "import os\nfor _ in range(30):\n    os.mkdir('x' * 200)\n    os.chdir('x' * 200)")
        with pytest.raises(SandboxError, match="more than 4095 bytes in the path"):
            await jail.collect_changes()


DEEP = """
import os
for _ in range({levels}):
    os.mkdir({name!r})
    os.chdir({name!r})
open("f", "w").close()
"""


async def test_a_deep_tree_is_moved_in_steps_that_do_not_grow_with_its_depth() -> None:
    async with box() as first, box() as second:
        await first.run("shell", "mkdir sub", 5)
        await first.run("program", DEEP.format(levels=1363, name="é"), 20)
        archive = await first.collect_changes()
        deepest = max((entry.path for entry in read_entries(archive)), key=len)
        assert len(deepest.encode()) == 1363 * 3 + 1
        await second.apply_changes(archive)
        assert await second.collect_changes() == archive
        await second.run("program", DEEP.format(levels=3000, name="a"), 20)
        await second.apply_changes(Entry(changes.DELETED, "a").frame() + END)  # deeper than any path
        assert await second.collect_changes() == pack_entries([])
        await second.apply_changes(archive)
        linked = "d=$(pwd); for n in 1 2 3 4; do cd é; done; mv é moved; ln -s moved é"
        assert (await second.run("shell", linked, 5)).status == 0
        below = Entry(changes.FILE, "é/" * 9 + "x").frame() + END
        with pytest.raises(SandboxError, match="Not a directory"):
            await second.apply_changes(below)


async def test_nothing_runs_meanwhile_and_all_goes_on_afterwards() -> None:
    async with box() as jail:
        await cell(jail, "kept = 42")
        await jail.run("shell", "while :; do echo x >> log; done & sleep 0.05", 5)
        first = await jail.collect_changes()
        assert await jail.collect_changes() == first
        assert await cell(jail, "kept") == "42\n"
        await jail.run("shell", "sleep 0.05; chmod 0 .", 5)
        assert len(await jail.collect_changes()) > len(first)
        assert await cell(jail, f"import os\nos.stat({jail.home!r}).st_mode & 0o777") == "0\n"


CONTINUED = """
import ctypes, fcntl, os, signal
libc, event = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint64 * 8)(0, signal.SIGCONT)
print(libc.timer_create(1, event, event), os.strerror(ctypes.get_errno()))
try:
    fcntl.fcntl(1, fcntl.F_SETSIG, signal.SIGCONT)
except OSError as error:
    print(error.strerror)
"""


async def test_nothing_asks_the_kernel_to_continue_it() -> None:
    async with box() as jail:
        assert await cell(jail, CONTINUED) == "-1 Function not implemented\nPermission denied\n"
        assert (await jail.run("shell", "timeout 5 true", 5)).output == ""


async def test_names_that_are_kept_stay_as_they_are() -> None:
    async with box() as first, box() as second:
        await first.run("shell", "mkdir -p a/b; touch a/x.pyc a/b/conftest.py a/y; chmod 700 a", 5)
        await second.run("shell", "mkdir -p a/b; echo own > a/b/conftest.py; touch a/b/old", 5)
        archive = await first.collect_changes()
        await second.apply_changes(archive, ("conftest.py", "*.pyc"))
        listing = await second.run("shell", "find a | sort; cat a/b/conftest.py", 5)
        assert listing.output.split() == ["a", "a/b", "a/b/conftest.py", "a/b/old", "a/y", "own"]
        deleted = Entry(changes.DELETED, "a").frame() + END
        await second.apply_changes(deleted, ("conftest.py",))
        listing = await second.run("shell", "find a | sort", 5)
        assert listing.output.split() == ["a", "a/b", "a/b/conftest.py"]
        hidden = Entry(changes.OPAQUE, "a", 0o755).frame() + END
        await second.apply_changes(hidden, ("/a/b/c*",))
        assert (await second.run("shell", "find a | sort", 5)).output.split() == listing.output.split()
        await second.apply_changes(hidden)
        assert (await second.run("shell", "find a | sort", 5)).output.split() == ["a"]


FORGED = [
    (Entry(changes.FILE, "../up", 0o644).frame() + END, "invalid entry: '../up'"),
    (Entry(changes.FILE, "/etc/x", 0o644).frame() + END, "invalid entry"),
    (Entry(changes.FILE, "a/./b", 0o644).frame() + END, "invalid entry"),
    (Entry(b"c", "device", 0o644).frame() + END, "invalid entry"),
    (Entry(changes.FILE, "x", 0o100644).frame() + END, "invalid entry"),
    (Entry(changes.FILE, "x", 0o644).frame(), "is incomplete"),
    (END[:-1], "is incomplete"),
    (b"", "is incomplete"),
    (changes.ENTRY_HEADER.pack(changes.FILE, 0, 0, 1, 1 << 62) + b"x", "invalid entry"),
]
THROUGH_A_LINK = (
    Entry(changes.LINK, "l", content=b"/var/tmp").frame() + Entry(changes.FILE, "l/x").frame() + END
)


async def test_a_forged_archive_is_refused() -> None:
    async with box() as jail:
        for archive, why in FORGED:
            with pytest.raises(changes.ChangesError, match=why):
                list(read_entries(archive))
            with pytest.raises(SandboxError, match=why):
                await jail.apply_changes(archive)
        with pytest.raises(SandboxError, match="Not a directory: 'l'"):
            await jail.apply_changes(THROUGH_A_LINK)
        assert (await jail.run("shell", "ls", 5)).output.split() == ["l", "x"]


async def test_files_of_a_sandbox_that_ended_are_gone() -> None:
    async with box() as jail:
        assert jail.pid is not None
        await jail._end_process()
        with pytest.raises(SandboxError, match="the sandbox exited, so the changed files are lost"):
            await jail.collect_changes()
