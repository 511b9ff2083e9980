"""Programs that a sandbox executes: their streams are pipes of the owner, they live as long as they like."""

from __future__ import annotations

import asyncio
import math
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import pytest

from asyncrl.isolation.sandbox.base import Program, RunEnding, RunResult, SandboxError, SandboxLimits
from asyncrl.isolation.sandbox.guard import GUARD_PROGRAM
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.isolation.sandbox.memory import SOCKET_BYTES
from asyncrl.isolation.sandbox.needs import find_needed_paths
from tests.integration.test_sandbox import IMAGE, KINDS, USER
from tests.integration.test_sandbox import jail as any_jail

GROUPS = Path("/sys/fs/cgroup")
LIMITS = SandboxLimits(memory=0, resident=100, disk=80, file=80)
PATH = {"PATH": "/usr/bin:/bin"}
PYTHON = "python3" if IMAGE else sys.executable
NAME = f"{USER or 'sandbox'}\n".encode()


class Execution:
    """A program that runs, and the owner's ends of its pipes."""

    def __init__(self, box: Jail, program: Program, seconds: float) -> None:
        theirs, self.stdin = os.pipe()
        out, to_out = os.pipe()
        err, to_err = os.pipe()
        self.stdout = os.fdopen(out, "rb")
        self.stderr = os.fdopen(err, "rb")
        self.result = asyncio.ensure_future(box.execute(program, (theirs, to_out, to_err), seconds))

    def write(self, data: bytes) -> None:
        os.write(self.stdin, data)

    async def line(self) -> bytes:
        return await asyncio.to_thread(self.stdout.readline)

    async def end(self) -> tuple[RunResult, bytes, bytes]:
        """Its result, output and errors, after the end of its input."""
        self.close_input()
        output, errors = await asyncio.gather(*map(_remaining_output, (self.stdout, self.stderr)))
        return await self.result, output, errors

    def close_input(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
        self.stdin = -1


async def _remaining_output(stream: IO[bytes]) -> bytes:
    with stream:
        return await asyncio.to_thread(stream.read)


@asynccontextmanager
async def jail(limits: SandboxLimits = LIMITS, listen: bool = False) -> AsyncIterator[Jail]:
    box = any_jail(limits, listen=listen)
    try:
        await box.start()
    except SandboxError as error:
        pytest.skip(str(error))
    async with asyncio.timeout(30):
        yield box
    await box.close()
    if box.listener:
        box.listener.close()


def begin(box: Jail, words: Sequence[str], seconds: float = 20, **environment: str) -> Execution:
    return Execution(box, Program(words, PATH | environment, "work/here"), seconds)


async def run(box: Jail, *words: str, seconds: float = 20) -> tuple[RunResult, bytes, bytes]:
    return await begin(box, words, seconds).end()


async def python(box: Jail, code: str, seconds: float = 20) -> tuple[RunResult, bytes, bytes]:
    return await run(box, PYTHON, "-I", "-S", "-c", code, seconds=seconds)


# What it is for


async def test_words_environment_directory_and_streams_arrive_as_they_were_given() -> None:
    words = ["", "a b", "$(id)", "--flag", "it's", 'a "quote"', "two\nlines", "é", "\udcff"]
    show = 'pwd; env | sort; cat; printf "<%s>" "$@" >&2; echo 1 > file; exit 3'
    async with jail() as box:
        running = begin(box, ["sh", "-c", show, "sh", *words], VALUE="a=b c")
        running.write(b"in\n")
        result, output, errors = await running.end()
        assert (result.ending, result.status) == (RunEnding.FAILED, 3)
        directory = f"{box.home}/work/here"
        assert output == f"{directory}\nPATH=/usr/bin:/bin\nPWD={directory}\nVALUE=a=b c\nin\n".encode()
        assert errors == b"".join(b"<%s>" % os.fsencode(word) for word in words)
        assert await box.read_file("work/here/file") == b"1\n"  # files stay, for the calls that follow
        assert (await run(box, "cat", "file"))[:2][1] == b"1\n"
        assert (await box.run("shell", "cat work/here/file", 5)).output == "1\n"


async def test_output_is_read_while_it_runs_and_ends_when_the_program_closes_it() -> None:
    async with jail() as box:
        running = begin(
            box, ["sh", "-c", "echo up; read a; echo $a; exec >&-; read b; exit $b"], seconds=math.inf
        )
        assert await running.line() == b"up\n"
        running.write(b"more\n")
        assert [await running.line(), await running.line()] == [b"more\n", b""]
        assert not running.result.done()
        running.write(b"7\n")
        assert (await running.end())[0].status == 7


async def test_a_program_has_default_signals_no_limit_of_cpu_and_is_the_first_to_go_without_memory() -> None:
    async with jail() as box:
        look = "yes | head -1; ulimit -t; cat /proc/self/oom_score_adj; ulimit -v"
        _, output, errors = await run(box, "sh", "-c", look)
        assert (output, errors) == (b"y\nunlimited\n1000\nunlimited\n", b"")


async def test_a_program_that_cannot_be_run_says_so() -> None:
    async with jail() as box:
        await box.write_file("work/here/plain", b"")
        for words, why in {
            ("absent",): b"absent cannot be run: No such file or directory\n",
            ("./plain",): b"./plain cannot be run: Permission denied\n",
            ("echo", "x" * (1 << 18)): b"echo cannot be run: Argument list too long\n",
            ("echo", "\ud800"): b"'utf-8' codec can't encode character '\\ud800' in position 0: "
            b"surrogates not allowed\n",
        }.items():
            result, output, errors = await run(box, *words)
            assert (result.ending, result.status, output, errors) == (RunEnding.FAILED, 127, b"", why)
        nowhere = Execution(box, Program(["true"], PATH, "/dev/new"), 20)
        assert (await nowhere.end())[2].startswith(b"true cannot be run: ")


async def test_what_cannot_be_sent_is_refused_and_its_pipes_are_closed() -> None:
    async with jail() as box:
        for words, why in ((["a\0b"], "NUL"), (["x"] * (1 << 20), "at most 1048576")):
            running = begin(box, words)
            with pytest.raises(ValueError, match=why):
                await running.result
            assert running.stdout.read() + running.stderr.read() == b""  # nobody else has their other ends
            running.close_input()
        assert (await run(box, "true"))[0].ending == RunEnding.DONE


async def test_streams_have_names_and_there_are_terminals_of_its_own() -> None:
    terminals = """
        import errno, os
        before = os.listdir("/dev/pts")
        try:
            while True: os.open("/dev/ptmx", os.O_RDWR)
        except OSError as error: print(before, len(os.listdir("/dev/pts")), errno.errorcode[error.errno])
    """
    async with jail() as box:
        shell = "cat <(echo fd) /dev/stdin; echo err > /dev/stderr; id -un; id -gn"
        assert (await run(box, "bash", "-c", shell))[1:] == (b"fd\n" + NAME + NAME, b"err\n")
        output = (await python(box, textwrap.dedent(terminals)))[1]
        assert output == b"['ptmx'] 33 ENOSPC\n"


# How it ends


async def test_its_processes_end_with_it() -> None:
    async with jail() as box:
        await box.run("cell", "n = 7", 5)
        result, output, _ = await run(box, "sh", "-c", "(setsid sleep 987 &); sleep 988 & echo started")
        assert (result.ending, result.lost, output) == (RunEnding.DONE, True, b"started\n")
        late_result, _, _ = await run(
            box, "sh", "-c", "trap '' TERM INT; setsid sleep 987 & sleep 987", seconds=0.3
        )
        assert (late_result.ending, late_result.status) == (RunEnding.LATE, -9)
        died, _, _ = await run(box, "sh", "-c", "kill -SEGV $$")
        assert (died.ending, died.status) == (RunEnding.FAILED, -11)
        assert (await box.run("shell", "cat /proc/*/cmdline | tr '\\0' ' '", 5)).output.count("sleep") == 0


async def test_orphans_that_have_ended_do_not_count_as_processes() -> None:
    async with jail(LIMITS._replace(processes=24)) as box:
        script = "for n in $(seq 60); do (true &); sleep 0.02; done"
        result, _, errors = await run(box, "bash", "-c", script)
        assert (result.ending, errors) == (RunEnding.DONE, b"")


async def test_one_that_listens_does_not_start_again_by_itself() -> None:
    async with jail(listen=True) as box:
        assert box.pid
        os.kill(box.pid, signal.SIGKILL)
        while (result := (await run(box, "true"))[0]).ending is RunEnding.DONE:
            pass  # the warden's end follows that of its guard
        assert result.ending is RunEnding.DIED
        with pytest.raises(SandboxError, match="the sandbox exited, so its listener is closed"):
            await box.run("shell", "true", 20)
        assert box.pid is None


async def test_a_cancelled_one_ends_with_its_files() -> None:
    async with jail() as box:
        running = begin(box, ["sh", "-c", "touch file; echo up; setsid sleep 987 & sleep 987"])
        assert await running.line() == b"up\n"
        running.result.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running.end()
        after = await box.run("shell", "ls", 5)
        assert (after.output, after.lost, after.emptied) == ("", True, True)


OWNER = """
import asyncio, os
from asyncrl.isolation.sandbox.guard import GUARD_PROGRAM
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.isolation.sandbox.base import Program
async def main():
    box = Jail(require=())
    await box.start()
    words = ["sh", "-c", "echo up; setsid sleep 987 & sleep 987"]
    await box.execute(Program(words, dict(os.environ)), (0, 1, 2))
asyncio.run(main())
"""


def test_its_processes_end_with_a_killed_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == b"up\n"
        owner.kill()
        owner.wait(5)
        assert select.select([owner.stdout], [], [], 5)[0] and owner.stdout.read() == b""


# What it may use

FILL = "held = []\nfor n in range({count}): held.append(b'x' * (1 << 20))\nprint('held', flush=True)\ninput()"
TOGETHER = "import os\nfor _ in range(3): os.fork()\n" + FILL.format(count=20)
WITHOUT_LEADER = f"""
import _thread, ctypes
_thread.start_new_thread(exec, ({FILL.format(count=150)!r}, {{}}))
ctypes.CDLL(None).pthread_exit(None)
"""
FILES = "for n in range(75): open(f'{n}', 'wb').write(bytes(1 << 20))\n" + FILL.format(count=40)
TABLES = """
import ctypes
mmap = ctypes.CDLL(None).mmap
mmap.restype, mmap.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 6
start = mmap(0, 80 << 30, 1, 0x4022, 2**64 - 1, 0)
ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(80 << 30), 15)
for page in range(start, start + (80 << 30), 2 << 20): ctypes.c_char.from_address(page).value
input()
"""  # of pages that are only read, which take nothing themselves; small ones
SOCKETS = """
import os, socket
for _ in range(2): os.fork()
held = [socket.socketpair() for _ in range(27)]
input()
"""  # empty ones: they could be filled between two measurements
MAPPINGS = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 6
start = libc.mmap(0, 65000 << 12, 1, 0x4022, 2**64 - 1, 0)
for page in range(0, 64000, 2): libc.mprotect(ctypes.c_void_p(start + (page << 12)), ctypes.c_size_t(4096), 0)
for _ in range(8):
    if os.fork() == 0: break
input()
"""  # 64,000 parts of one address space, copied for each process
UNREADABLE = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n" + MAPPINGS
EPOLLS = """
import os, select
epolls = [select.epoll() for _ in range(30)]
for _ in range(20):
    file = os.eventfd(0)
    for number in range(100, 1000):
        os.dup2(file, number)
        for epoll in epolls: epoll.register(number, 1)
input()
"""  # a watch of a number stays when the number is another file's
OPEN_FILES = """
import os
for _ in range(24):
    if os.fork() == 0: break
held = [os.eventfd(0) for _ in range(1000)]
input()
"""
INOTIFIES = """
import ctypes
for _ in range(14): ctypes.CDLL(None).inotify_init1(0)
input()
"""
LOCKS = """
import fcntl, os
for name in range(400):
    file = os.open(f"{name}", os.O_RDWR | os.O_CREAT)
    for at in range(100): fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * at)
input()
"""
HOLDS: dict[str, object] = {
    "mappings": MAPPINGS,
    "mappings of one that would not be looked at": UNREADABLE,
    "epolls": EPOLLS,
    "inotifies": INOTIFIES,
    "open files": OPEN_FILES,
    "locks": LOCKS,
    "one process": FILL.format(count=150),
    "many together": TOGETHER,
    "a process without its first thread": WITHOUT_LEADER,
    "files and a process": FILES,
    "page tables": TABLES,
    "sockets": SOCKETS,
}


WITHOUT_GROUP = GUARD_PROGRAM.replace(
    "\nmain", "\nfrom asyncrl.isolation.sandbox import guard\nguard.make_group = lambda limit: None\nmain"
)


@pytest.mark.parametrize("code", HOLDS.values(), ids=HOLDS)
async def test_memory_and_files_of_all_together_are_bounded(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.isolation.sandbox.jail.GUARD_PROGRAM", WITHOUT_GROUP)
    async with jail(LIMITS._replace(open_files=1024)) as box:
        running = begin(box, [PYTHON, "-I", "-S", "-c", code])
        result = await running.result  # its input stays open: it waits, or is ended
        assert (result.ending, result.status) == (RunEnding.OVER, -9)
        await running.end()
        assert (await run(box, "true"))[0].ending == RunEnding.DONE


SHORT_OF_MEMORY = GUARD_PROGRAM.replace(
    "\nmain",
    """
from asyncrl.isolation.sandbox import memory, warden
memory.LOW_MEMORY = 1, 1 << 60, 1 << 60
warden.ENDING_CHANCE = 256
main""",
)
"""Starts a sandbox to which the machine always looks short of memory."""

BURST = "held = b'x' * (600 << 20)"


def group_of(box: Jail) -> Path:
    group = next(GROUPS.glob(f"**/asyncrl-sandbox-{box.pid}-*"), None)
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    return group


async def test_a_burst_between_two_measurements_is_seen_where_the_kernel_counts() -> None:
    async with jail() as box:
        group = group_of(box)
        result, _, _ = await python(box, BURST)
        assert result.ending is RunEnding.OVER
        assert (await box.run("program", BURST, 20)).status == -9
        assert (await run(box, "true"))[0].ending is RunEnding.DONE
        assert not (group / "cgroup.procs").read_text()  # only the code is in it
    assert not group.exists()


async def test_a_group_of_a_killed_sandbox_is_removed_by_the_next() -> None:
    async with jail() as box:
        group = group_of(box)
        assert box.pid
        os.kill(box.pid, signal.SIGKILL)
    assert group.exists()
    async with jail():
        assert not group.exists()


async def test_without_memory_on_the_machine_a_sandbox_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.isolation.sandbox.jail.GUARD_PROGRAM", SHORT_OF_MEMORY)
    async with jail() as box:
        result, _, _ = await run(box, "sleep", "25")
        assert (result.ending, result.status) == (RunEnding.STARVED, -9)


LESS = """
import os
print(open("/proc/self/oom_score_adj").read().strip())
try: open("/proc/self/oom_score_adj", "w").write("0")
except OSError as error: print(error.strerror)
print(open(f"/proc/{os.getppid()}/oom_score_adj").read().strip())
"""


async def test_nothing_inside_is_spared_when_the_machine_has_no_memory() -> None:
    async with jail() as box:
        expected = "1000\nRead-only file system\n1000\n"
        assert (await python(box, LESS))[1].decode() == expected
        for kind in ("cell", "program"):
            assert (await box.run(kind, LESS, 20)).output == expected
        assert (await box.run("shell", "echo 0 > /proc/$$/oom_score_adj", 20)).status != 0


BUFFERS = """
import socket
SIZES = socket.SO_SNDBUF, socket.SO_RCVBUF
with socket.create_server(("127.0.0.1", 0)) as server:
    held = [socket.create_connection(server.getsockname())]
    held += server.accept()[0], *socket.socketpair()
for one in held:
    for size in SIZES: one.setsockopt(socket.SOL_SOCKET, size, 1 << 26)
    one.setblocking(False)
    sent = 0
    try:
        while True: sent += one.send(bytes(1 << 12))
    except BlockingIOError: print(sent)
"""


async def test_a_socket_holds_no_more_than_is_counted_for_it() -> None:
    async with jail(listen=True) as box:
        _, output, errors = await run(box, PYTHON, "-I", "-S", "-c", BUFFERS)
        assert not errors and len(output.split()) == 4
        assert all(0 < int(sent) <= SOCKET_BYTES for sent in output.split()), output


async def test_less_than_the_bound_and_any_address_space_are_no_offence() -> None:
    flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000"
    reserve = f"import mmap\nreserved = mmap.mmap(-1, 129 << 30, {flags}, 0)\n"
    async with jail() as box:
        running = begin(box, [PYTHON, "-I", "-S", "-c", reserve + FILL.format(count=60)])
        first_line = await running.line()
        assert first_line == b"held\n", await running.end()
        await asyncio.wait([running.result], timeout=0.8)  # three measurements
        running.write(b"\n")
        assert (await running.end())[0].ending == RunEnding.DONE


SLOW_TO_START = GUARD_PROGRAM.replace(
    "\nmain",
    """
import time
from asyncrl.isolation.sandbox import warden
become_program = warden.Warden._become_program
def become_program_late(*arguments):
    time.sleep(0.3)
    become_program(*arguments)
warden.Warden._become_program = become_program_late
warden.LOOK_SECONDS = 0.01
main""",
)
"""Starts a sandbox in which some measurements come before the program, as on a busy machine."""


async def test_a_process_that_is_no_program_yet_is_no_offence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.isolation.sandbox.jail.GUARD_PROGRAM", SLOW_TO_START)
    async with jail(LIMITS._replace(resident=60)) as box:
        result, output, errors = await python(box, "print('started')")
        assert (result.ending, output, errors) == (RunEnding.DONE, b"started\n", b"")
        running = begin(box, [PYTHON, "-I", "-S", "-c", FILL.format(count=90)])
        assert (await running.result).ending is RunEnding.OVER  # its input stays open: it waits, or is ended
        await running.end()


# Who reaches whom

ASK = """
import socket, sys
for line in sys.stdin:
    try:
        with socket.create_connection(("127.0.0.1", int(line)), 5) as link: print(link.recv(100), flush=True)
    except OSError as error: print("no:", error, flush=True)
"""
TAKE_OVER = """
import errno, fcntl, os, resource, socket, struct, sys
port = int(sys.argv[1])
def try_to(what, action):
    try: action()
    except OSError as error: print(what, errno.errorcode[error.errno], flush=True)
    else: print(what, "done", flush=True)
def bind(family, address, only6=1):
    one = socket.socket(family)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT): one.setsockopt(socket.SOL_SOCKET, option, 1)
    if family == socket.AF_INET6: one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only6)
    one.bind((address, port))
    one.listen()
try_to("same", lambda: bind(socket.AF_INET, "127.0.0.1"))
try_to("any", lambda: bind(socket.AF_INET, "0.0.0.0"))
try_to("both", lambda: bind(socket.AF_INET6, "::", 0))
down = struct.pack("16sh22x", b"lo", 0)
try_to("down", lambda: fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, down))
try_to("netlink", lambda: socket.socket(16, 3, 4))
held = []
def flood():
    while True:
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(("127.0.0.1", port))
try_to("flood", flood)
os.kill(-1, 9)
"""


async def test_only_the_sandbox_reaches_its_listener() -> None:
    async with jail(listen=True) as box, jail(listen=True) as other_box:
        assert box.listener is not None
        host, port = box.listener.getsockname()
        assert host == "127.0.0.1"
        inside = begin(box, [PYTHON, "-I", "-S", "-c", ASK])
        outside = begin(other_box, [PYTHON, "-I", "-S", "-c", ASK])
        for running in (inside, outside):
            running.write(b"%d\n" % port)
        box.listener.settimeout(30)
        link, _ = await asyncio.to_thread(box.listener.accept)
        with link:
            link.sendall(b"from the owner")
        assert await inside.line() == b"b'from the owner'\n"
        assert await outside.line() == b"no: [Errno 111] Connection refused\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), 5)
        box.listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            box.listener.accept()
        await inside.end()
        await outside.end()


async def test_nothing_inside_ends_or_takes_over_the_listener() -> None:
    async with jail(listen=True) as box:
        assert box.listener is not None
        port = box.listener.getsockname()[1]
        _, output, _ = await run(box, PYTHON, "-I", "-S", "-c", TAKE_OVER, str(port))
        results = dict(line.split() for line in output.decode().splitlines())
        assert results == {
            "same": "EADDRINUSE",
            "any": "EADDRINUSE",
            "both": "EADDRINUSE",
            "down": "EPERM",
            "netlink": "EAFNOSUPPORT",
            "flood": "EMFILE",
        }
        asking = begin(box, [PYTHON, "-I", "-S", "-c", ASK])
        asking.write(b"%d\n" % port)

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"served")
            writer.close()

        async with await asyncio.start_server(serve, sock=box.listener):
            assert await asking.line() == b"b'served'\n"
        await asking.end()


LOOK_AROUND = """
import glob, os, sys
open("secret", "w").write(sys.argv[1])
print("ready", flush=True)
others = sys.stdin.read().split()
pids = [path for path in glob.glob("/proc/[0-9]*") if path != f"/proc/{os.getpid()}"] + others[1:]
places = [others[0], "../" * 20 + others[0], "/proc/self/root" + others[0], "/sandbox/work/here/secret"]
for pid in pids:
    places += [f"{pid}/{name}" for name in ("environ", "cmdline", "mem", "root" + others[0], "cwd/secret")]
    places += [f"{pid}/root/sandbox/work/here/secret", f"{pid}/root{others[0]}"]
    places += glob.glob(f"{pid}/fd/*")
for top in ("/tmp", "/dev", "/home", "/var", "/run", "/sandbox"):
    places += [os.path.join(at, "secret") for at, _, names in os.walk(top) if "secret" in names]
for place in places:
    try: sys.stdout.buffer.write(open(os.open(place, os.O_NONBLOCK), "rb").read(4000))
    except (OSError, TypeError): continue
"""


async def test_64_at_once_cannot_read_each_others_files_nor_the_users(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret of the user")
    (tmp_path / "secret").chmod(0o644)

    starting = asyncio.Semaphore(16)

    async def start(number: int) -> tuple[Jail, Execution]:
        box = any_jail(LIMITS)
        async with starting:
            await box.start()
        words = [PYTHON, "-I", "-S", "-c", LOOK_AROUND, f"secret of {number}."]
        running = begin(box, words, 100, KEY=f"secret of {number}.")
        assert await running.line() == b"ready\n"
        return box, running

    started = await asyncio.gather(*map(start, range(64)))
    pids = [f"/proc/{box.pid}" for box, _ in started]
    for _, running in started:
        running.write("\n".join([str(tmp_path / "secret"), *pids]).encode())
    endings = await asyncio.gather(*(running.end() for _, running in started))
    for number, (result, output, errors) in enumerate(endings):
        assert (result.ending, errors) == (RunEnding.DONE, b"")
        secrets = {text.split(b".")[0] for text in output.split(b"secret of ")[1:]}
        assert secrets == {b"%d" % number}
    await asyncio.gather(*(box.close() for box, _ in started))


# What a program needs


def plant(root: Path) -> dict[str, Path]:
    """Programs as they are installed, each of which says "works", with a file called `secret` that is not
    theirs close by."""
    files = {
        ".local/share/tool/1/tool": "#!/bin/sh\necho works",
        "env/bin/script": f"#!{root}/env/bin/python\nimport of_env",
        "env/lib/python{}.{}/site-packages/of_env.py".format(*sys.version_info): "print('works')",
        "lib/node_modules/@us/agent/package.json": "{}",
        "lib/node_modules/@us/agent/bin/cli.js": "#!/usr/bin/env -S node --no-warnings\nrequire('nested')",
        "lib/node_modules/@us/agent/node_modules/nested/index.js": "console.log('works')",
        "project/node_modules/.package-lock.json": "{}",
        "project/node_modules/agent/cli.js": "#!/usr/bin/env node\nrequire('beside')",
        "project/node_modules/beside/index.js": "console.log('works')",
        "unpacked/package.json": '{"files": ["vendor/", "*.md"]}',
        "unpacked/vendor/bin/agent": "#!/bin/sh\ncat ${0%/*}/../said",
        "unpacked/vendor/said": "works\n",
        "package.json": "{}",
        "plain": "#!/bin/sh\necho works",
        "mine/package.json": '{"name": "mine", "files": ["*", "**", "../lib"]}',
        "mine/agent": "#!/bin/sh\necho works",
        "mine/.env": "KEY=of the user",
    }
    links = {
        ".local/bin/tool": "../share/tool/1/tool",
        "bin/agent": "../lib/node_modules/@us/agent/bin/cli.js",
        "project/node_modules/.bin/agent": "../agent/cli.js",
        "current": "env",
        "opt": "project",
    }
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "env"], check=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    for name, target in links.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    for directory in (
        "",
        ".local/bin",
        ".local/share",
        "bin",
        "lib/node_modules/other",
        "project",
        "unpacked",
    ):
        (root / directory).mkdir(exist_ok=True)
        (root / directory / "secret").write_text("of the user")
    return {
        "link": root / ".local/bin/tool",
        "Python": root / "env/bin/script",
        "Python in a directory that is a link": root / "current/bin/script",
        "npm -g": root / "bin/agent",
        "npm": root / "project/node_modules/.bin/agent",
        "npm in a directory that is a link": root / "opt/node_modules/agent/cli.js",
        "unpacked": root / "unpacked/vendor/bin/agent",
        "in a home that is a package": root / "plain",
        "a user's in a project": root / "mine/agent",
    }


async def test_what_a_program_needs_is_shown_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for kind, program in plant(tmp_path).items():
        async with Jail(LIMITS, require=(), show=find_needed_paths(str(program))) as box:
            result, output, errors = await run(box, str(program))
            assert (result.ending, output) == (RunEnding.DONE, b"works\n"), (kind, errors)
            look = f"ls {tmp_path}; cat $(find {tmp_path} -name secret -o -name .env)"
            assert "of the user" not in (await run(box, "sh", "-c", look))[1].decode(), kind


def test_a_program_that_cannot_be_read_is_shown() -> None:
    assert f"/proc/{os.getpid()}/clear_refs" in find_needed_paths("/proc/self/clear_refs")


# Machines that allow less

TRY = """
import asyncio
from asyncrl.isolation.sandbox.jail import Jail, SandboxError, SandboxLimits
from tests.integration.test_sandbox_exec import ASK, FILL, begin, run
async def main():
    async with Jail(SandboxLimits(memory=0), require=()) as box:
        where = (await run(box, "sh", "-c", "setsid sleep 987 & pwd"))[1].decode().strip()
        print(where == f"{box.home}/work/here" or where)
    for options in ({"limits": SandboxLimits(memory=0, resident=60)}, {"listen": True}):
        box = Jail(require=(), **options)
        try: await box.start()
        except SandboxError as error: print(str(error).partition(" (")[0])
        else:
            running = begin(box, ["python3", "-c", ASK if box.listener else FILL.format(count=90)])
            if box.listener:
                running.write(b"%d\\n" % box.listener.getsockname()[1])
                box.listener.settimeout(30)
                (await asyncio.to_thread(box.listener.accept))[0].sendall(b"hello")
                print(await running.line())
                running.close_input()
            print((await running.result).ending)
        await box.close()
asyncio.run(main())
"""
LACKS = "this machine gives the sandbox no "
FEWER = {
    "user": ["True", "over", "b\"b'hello'\\n\"", "done"],
    "container": [
        "True",
        f"{LACKS}process namespace with /proc in which to measure `resident`",
        f"{LACKS}network namespace in which to listen",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_works_with_fewer_rights_or_says_what_is_missing(kind: str) -> None:
    if subprocess.run([*KINDS[kind], "true"], capture_output=True).returncode != 0:
        pytest.skip(f"this machine cannot play a {kind}")
    command = [*KINDS[kind], sys.executable, "-c", TRY]
    surroundings = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=surroundings)
    assert done.stdout.splitlines() == FEWER[kind], done.stderr


async def test_a_program_that_is_stopped_leaves_its_sandbox_and_files() -> None:
    """The second word to stop comes too late, and is not one for the next program."""
    async with jail() as box:
        box.stop()
        line = "echo a > file; echo there; sleep 600"
        running = Execution(box, Program(["sh", "-c", line], PATH), math.inf)
        assert await running.line() == b"there\n"
        box.stop()
        box.stop()
        result, *_ = await running.end()
        assert (result.ending, result.status, result.lost) == (RunEnding.FAILED, -signal.SIGKILL, False)
        box.stop()
        result, output, _ = await Execution(box, Program(["cat", "file"], PATH), math.inf).end()
        assert (result.ending, output) == (RunEnding.DONE, b"a\n")
