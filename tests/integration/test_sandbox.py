"""The sandbox against code that attacks it: real processes, on whatever this machine allows.

What a machine cannot isolate is skipped by name (`holds`), not passed. test_sandbox_image.py runs this file
again with an image (IMAGE).
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.isolation.images import find_image
from asyncrl.isolation.sandbox.base import RunEnding, RunKind, RunResult, SandboxError, SandboxLimits
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.isolation.wrapper import descendants

SMALL = SandboxLimits(memory=200, processes=8, file=2, disk=4, output=2000)
IMAGE = os.environ.get("ASYNCRL_TEST_IMAGE", "")
USER = os.environ.get("ASYNCRL_TEST_USER", "")
without_image = pytest.mark.skipif(IMAGE != "", reason="is of a sandbox without an image")


def jail(limits: SandboxLimits = SMALL, **options: Any) -> Jail:
    """A sandbox that isolates what it can, with the image of this run if there is one."""
    if IMAGE:
        options |= {"image": find_image(IMAGE), "user": USER, "directory": "/sandbox"}
    return Jail(limits, require=(), **options)


@asynccontextmanager
async def sandbox(needs: str = "") -> AsyncIterator[Jail]:
    async with jail() as box, asyncio.timeout(20):
        if needs and needs not in box.enforced:
            pytest.skip(f"this machine does not isolate {needs}: {box.notes}")
        yield box


async def cells(*codes: str, seconds: float = 5.0, needs: str = "") -> list[RunResult]:
    async with sandbox(needs) as box:
        return [await box.run("cell", code, seconds) for code in codes]


async def side_by_side(*codes: str, then: tuple[str, ...], seconds: float) -> list[list[RunResult]]:
    """Of each code, in a sandbox of its own, and of the cells after it. The first may last `seconds`."""

    async def run_cells(code: str) -> list[RunResult]:
        async with jail() as box:
            await box.run("cell", "n = 7", 20)
            first = await box.run("cell", code, seconds)
            return [first, *[await box.run("cell", cell, 20) for cell in then]]

    return await asyncio.gather(*map(run_cells, codes))


async def program(code: str, needs: str = "", stdin: str = "", seconds: float = 5.0) -> RunResult:
    async with sandbox(needs) as box:
        return await box.run("program", textwrap.dedent(code), seconds, stdin)


# What it is for


async def test_cells_keep_variables_and_print_the_last_value() -> None:
    first, second, third = await cells("import math\nx = 6", "print('hm')\nx * 7", "x = None\nx")
    assert (first.ending, first.output) == (RunEnding.DONE, "")
    assert second.output == "hm\n42\n"
    assert third.output == ""


async def test_a_traceback_shows_the_cell_and_nothing_of_ours() -> None:
    failed, after = await cells("def f(n):\n    return 1 / n\nf(0)", "f(2)")
    assert failed.ending == RunEnding.FAILED and not failed.lost
    assert "return 1 / n" in failed.output and failed.output.endswith("ZeroDivisionError: division by zero\n")
    assert "asyncrl" not in failed.output
    assert after.output == "0.5\n"


async def test_a_cell_that_fails_keeps_the_state() -> None:
    fork = "import os\nprint('before')\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait()"
    outputs = {
        "1 +": "SyntaxError",
        "def f(): return f()\nf()": "RecursionError",
        "input()": "EOFError",
        "raise SystemExit(3)": "SystemExit: 3",
        "print('\\ud800 é')": "\\ud800 é",
        "import subprocess\nsubprocess.run(['echo', 'child'])\nprint('then')": "child\nthen",
        fork: "before",
    }
    _, *results, after = await cells("kept = 1", *outputs, "kept")
    for result, expected in zip(results, outputs.values(), strict=True):
        assert expected in result.output and not result.lost
    assert after.output == "1\n"


async def test_programs_read_stdin_and_end_with_a_status() -> None:
    result = await program(
        "import sys, threading\nprint(int(input()) + int(sys.stdin.read()))\nsys.exit(3)", stdin="1\n41"
    )
    assert (result.ending, result.status, result.output) == (RunEnding.FAILED, 3, "42\n")
    threaded = await program("import threading\nthreading.Thread(target=lambda: print('late')).start()")
    assert (threaded.ending, threaded.output) == (RunEnding.DONE, "late\n")


async def test_a_shell_shares_the_directory_with_the_cells() -> None:
    async with sandbox() as box:
        await box.run("cell", "open('a.txt', 'w').write('hello'); kept = 1", 5)
        assert (await box.run("shell", "cat a.txt; pwd | wc -l; exit 7", 5)).status == 7
        assert (await box.run("shell", "cat", 5, stdin="in")).output == "in"
        assert (await box.run("cell", "kept", 5)).output == "1\n"


TICKS = """
import os, threading, time
def tick():
    while True:
        with open("ticks", "a") as file: file.write(".")
        time.sleep(0.001)
os.mkfifo("pipe")
threading.Thread(target=tick, daemon=True).start()
while not (os.path.exists("ticks") and os.path.getsize("ticks")): pass
"""


async def test_files_are_written_and_read_with_the_rights_of_the_code() -> None:
    async with sandbox("files") as box:
        data = bytes(range(256))
        await box.write_file("new/it's", data)
        assert await box.read_file("new/it's") == data
        assert (await box.run("cell", "len(open(\"new/it's\", 'rb').read())", 5)).output == "256\n"
        await box.run("shell", "ln -s /etc/shadow link", 5)
        missing = ("absent", "No such file"), ("/etc/shadow", "No such|denied")
        for path, why in (*missing, ("link", "link"), ("a\0", "null")):
            with pytest.raises(SandboxError, match=why):
                await box.read_file(path)
        await box.run("cell", TICKS, 5)
        ticks = {await box.read_file("ticks") for _ in range(9)}
        assert len(ticks) == 1 and ticks.pop(), "code runs while files are moved"
        async with asyncio.timeout(9):  # it is not waited for what nobody writes
            assert await box.read_file("pipe") == b""
        await box.write_file("large", bytes(SMALL.output + 1))
        with pytest.raises(SandboxError, match="the file is larger than 2000 bytes"):
            await box.read_file("large")
        with pytest.raises(SandboxError, match="/dev/x"):
            await box.write_file("/dev/x", data)


# Attacks


async def test_an_infinite_loop_is_interrupted_and_keeps_its_variables() -> None:
    _, late_result, after = await cells("n = 7", "while True: pass", "n", seconds=0.4)
    assert (late_result.ending, late_result.lost) == (RunEnding.LATE, False)
    assert "KeyboardInterrupt" in late_result.output and after.output == "7\n"


async def test_loops_that_ignore_signals_are_killed_and_their_loss_is_reported() -> None:
    armed = "print('armed', flush=True)\n"
    codes = (
        f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{armed}while True: pass",
        f"while 1:\n    try:\n        {armed}        while 1: sum(range(9))\n    except BaseException: pass",
        f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n{armed}while True: pass",
    )
    seconds = 0.6
    results = list[list[RunResult]]()
    while not results or not all(
        "armed" in late_result.output for late_result, _ in results
    ):  # a busy machine takes longer
        results = await side_by_side(*codes, then=("'n' in globals()",), seconds=seconds)
        seconds *= 2
    for late_result, after in results:
        assert (late_result.ending, late_result.lost, late_result.status) == (
            RunEnding.LATE,
            True,
            -signal.SIGKILL,
        )
        assert after.output == "False\n"


async def test_an_interpreter_that_ends_is_replaced() -> None:
    for end in ("import os; os._exit(3)", "import os, signal; os.kill(os.getpid(), 9)"):
        _, died, after = await cells("n = 7", end, "'n' in globals()")
        assert (died.ending, died.lost) == (RunEnding.DIED, True)
        assert after.output == "False\n"


async def test_an_interpreter_that_ends_beside_a_shell_is_reported() -> None:
    async with sandbox() as box:
        await box.run("cell", "import os, threading\nthreading.Timer(0.2, os._exit, [3]).start()", 5)
        result = await box.run("shell", "sleep 0.5", 5)
        assert (result.ending, result.lost) == (RunEnding.DONE, True)
        assert (await box.run("cell", "'os' in globals()", 5)).output == "False\n"


POOL = "from multiprocessing import Pool\nwith Pool(2) as p: print(p.map(abs, [-1, -2]))"
THREADS = "from threading import Thread\nfor n in range(4):\n    one = Thread(target=print, args=[n])\n"
PIPES = "import asyncio, multiprocessing as m\nprint(asyncio.run(asyncio.sleep(0, 'slept')), *m.Pipe())"
MAPPED = "import mmap\nlen(mmap.mmap(-1, 9000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))"
ADDRESS = "import socket\nprint(socket.getaddrinfo('localhost', 80)[0][4][0])"
WORKS = {  # what it needs of the sandbox, a cell, what it prints
    "pools": ("", POOL, r"\[1, 2\]"),
    "threads": ("", f"{THREADS}    one.start(); one.join()", "0\n1\n2\n3"),
    "pipes": ("", PIPES, "slept <multiprocessing.*"),
    "zeros": ("files", "open('/dev/zero', 'rb').read(3)", r"b'\\x00\\x00\\x00'|.*denied.*"),
    "zeros in memory": ("files", MAPPED, "9000"),
    "localhost": ("files", ADDRESS, "127.0.0.1|::1"),
}


@pytest.mark.parametrize(("needs", "code", "output"), WORKS.values(), ids=WORKS)
async def test_what_code_can_have(needs: str, code: str, output: str) -> None:
    (result,) = await cells(code, needs=needs)
    assert re.fullmatch(output, result.output.strip(), re.DOTALL)


async def test_a_stack_overflow_ends_only_the_interpreter() -> None:
    deep = "class A:\n    def __repr__(self): return repr(self)\nrepr(A())"
    died, after = await cells(f"import sys\nsys.setrecursionlimit(10**9)\n{deep}", "1")
    assert died.ending in (RunEnding.DIED, RunEnding.FAILED) and after.output == "1\n"


async def test_memory_is_bounded() -> None:
    fill = "held = []\ntry:\n    while True: held.append(bytearray(1 << 20))\n"
    let_go = "finally:\n    count = len(held)\n    held.clear()"  # or there may be none for the next cell
    result, after = await cells(fill + let_go, "count < 200")
    assert "MemoryError" in result.output and after.output == "True\n"


LIBC = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_size_t]
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0: raise OSError(ctypes.get_errno(), "refused")
def cut_mapping(fd, flags):
    "Of shared memory one page is left mapped, and all of it held."
    at = libc.mmap(None, 64 << 20, 3, flags, fd, 0)
    if at in (None, 2**64 - 1): raise OSError(ctypes.get_errno(), "refused")
    ctypes.memset(at, 1, 64 << 20)
    libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t((64 << 20) - 4096))
def grow_input():
    os.ftruncate(0, 1 << 20)
def in_tmpfs():
    call({unshare}, 0x10020000)
    os.makedirs("m")
    if libc.mount(b"none", b"m", b"tmpfs", 0, b""): raise OSError(ctypes.get_errno(), "refused")
"""
UNSHARE, CLONE, SHMGET, MSGGET, KEYS = {
    "x86_64": (272, 56, 29, 68, 248),
    "aarch64": (97, 220, 194, 186, 217),
}[os.uname().machine]


ATTACKS_ON_MEMORY = (
    "os.memfd_create('a')",
    f"call({SHMGET}, 0, ctypes.c_size_t(1 << 20), 0o1600)",
    f"call({MSGGET}, 0, 0o1600)",
    f"call({KEYS}, b'user', b'a', b'x' * 1000, 1000, -1)",
    "cut_mapping(-1, 0x21)",
    "cut_mapping(os.open('/dev/zero', os.O_RDWR), 1)",
    "grow_input()",
    "in_tmpfs()",
    f"call({UNSHARE}, 0x10000000)",
    f"call({CLONE}, 0x10000000 | 17, 0, 0, 0, 0)",
    "call(435, ctypes.create_string_buffer(b'\\0\\0\\0\\x10' + bytes(84)), 88)",  # clone3
    "call(447, 0)",  # memfd_secret
    "call(425, 8, ctypes.create_string_buffer(200))",  # io_uring_setup
    "call(430, b'tmpfs', 0)",  # fsopen
    "open('/dev/shm/f', 'wb').write(bytes(10 << 20))",
)


async def test_memory_that_no_limit_counts_is_refused() -> None:
    refused = "denied|refused|too large|not permitted|Function not impl|No such device"
    async with sandbox("memory") as box:
        for attack in ATTACKS_ON_MEMORY:
            code = LIBC.replace("{unshare}", str(UNSHARE)) + attack
            result = await box.run("program", code, 5, "in")
            assert result.ending == RunEnding.FAILED and re.search(refused, result.output), attack
            assert "NameError" not in result.output, result.output


async def test_a_fork_bomb_is_bounded_and_ended() -> None:
    bomb = """
        import os, time
        count = 0
        try:
            while True:
                if os.fork() == 0: time.sleep(1000)
                count += 1
        finally:
            print(count)
    """
    result = await program(bomb, needs="processes")
    assert "BlockingIOError" in result.output
    assert 1 <= int(result.output.partition("\n")[0]) <= 12


async def test_a_fork_bomb_of_a_shell_is_ended_in_time() -> None:
    async with sandbox("processes") as box:
        started = time.monotonic()
        await box.run("shell", ":(){ :|:& };:", 1.0)
        assert (await box.run("cell", "1", 10)).output in ("1\n", "")  # it may be too crowded to start, once
        await box.run("program", "pass", 5)
        assert (await box.run("cell", "1", 5)).output == "1\n"
        assert time.monotonic() - started < 30  # the deadlines of these calls are 21 s together


async def test_huge_output_is_cut_in_its_middle() -> None:
    result, after = await cells("print('HEAD')\nfor _ in range(200): print('x' * 10**5)\nprint('TAIL')", "1")
    assert result.output.startswith("HEAD\n") and result.output.endswith("TAIL\n")
    assert len(result.output) < 2100
    assert f"[{result.omitted} bytes left out]" in result.output and result.omitted > 19_000_000
    assert after.output == "1\n"


async def test_endless_output_ends_with_its_time() -> None:
    async with sandbox() as box:
        result = await box.run("shell", "yes", 0.4)
        assert result.ending == RunEnding.LATE and len(result.output) < 2100


async def test_files_and_descriptors_are_bounded() -> None:
    large = "open('f', 'wb').write(bytes(10 << 20))"
    many_files = "held = [open('/dev/null') for _ in range(200)]"
    first, second = await cells(large, many_files, needs="files")
    assert "File too large" in first.output and "Too many open files" in second.output


async def test_the_directory_is_bounded() -> None:
    async with sandbox("files") as box:
        if (await box.run("shell", "pwd", 5)).output != "/sandbox\n":
            pytest.skip("without a mount namespace only single files are bounded")
        fill = "for n in range(9):\n    with open(str(n), 'wb') as f: f.write(bytes(1 << 20))"
        assert "No space left" in (await box.run("program", fill, 5)).output


NOT_WRITTEN: tuple[str, ...] = ("/x", "/usr/x", "/usr/bin/x", "/etc/x", "/dev/x", sys.prefix + "/x")
if IMAGE:  # most of it is the code's own
    NOT_WRITTEN = ("/dev/x", "/proc/x", "/proc/sys/kernel/hostname", "/proc/1/oom_score_adj")


async def test_files_outside_are_not_there_and_not_writable(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a key")
    secret.chmod(0o644)
    result = await program(
        f"""
        import os
        def no(action):
            try: action()
            except OSError: return
            raise SystemExit(f"line {{action.__code__.co_firstlineno}} could")
        no(lambda: open({str(secret)!r}))
        no(lambda: open("/etc/shadow"))
        no(lambda: os.listdir({str(Path.home() / ".ssh")!r}))
        no(lambda: open("/proc/1/environ"))
        no(lambda: open("/proc/1/mem"))
        no(lambda: os.listdir("/proc/1/root"))
        no(lambda: os.listdir("/proc/1/fd"))
        no(lambda: os.kill({os.getpid()}, 0))
        for place in {NOT_WRITTEN}:
            no(lambda: open(place, "w"))
        no(lambda: os.mknod("disk", 0o600 | 0o060000, os.makedev(254, 0)))
        no(lambda: os.chroot("."))
        if os.getuid() != 0: no(lambda: os.setuid(0))
        print("nothing")
        """,
        needs="files",
    )
    assert result.output == "nothing\n"


OF_THE_WARDEN = """
import os, resource, sys
attempts = {
    "limits": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (99, 99)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, 1, 5),
    "priority of a user": lambda: os.setpriority(os.PRIO_USER, 0, 5),
    "scheduling": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
}
for name, attempt in attempts.items():
    try: attempt()
    except PermissionError: continue
    print("could:", name)
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
os.setpriority(os.PRIO_PROCESS, 0, 19)
print(resource.getrlimit(resource.RLIMIT_NOFILE), os.nice(0))
"""


async def test_limits_and_priority_can_be_lowered_but_not_those_of_the_warden() -> None:
    assert (await program(OF_THE_WARDEN, needs="files")).output == "(20, 20) 19\n"


async def test_no_signal_from_inside_ends_the_warden() -> None:
    async with sandbox("orphans") as box:
        done = await box.run("shell", "for n in $(seq 64); do kill -$n 1; done 2> /dev/null; echo there", 5)
        assert (done.ending, done.output) == (RunEnding.DONE, "there\n")


async def test_programs_handle_signals_as_by_default_whatever_the_owner_ignores() -> None:
    look = "grep -E '^Sig(Blk|Ign)' /proc/self/status"
    known_signals = sum(1 << number - 1 for number in signal.valid_signals())  # the C library keeps 32 and 33
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        async with sandbox() as box:
            code = f"import subprocess\nsubprocess.run({look!r}, shell=True)\nNone"
            codes: dict[RunKind, str] = {"shell": look, "program": code, "cell": code}
            for kind, source in codes.items():
                run_result = await box.run(kind, source, 5)
                masks = [int(line.split()[1], 16) & known_signals for line in run_result.output.splitlines()]
                assert masks == [0, 0], kind
            late_result = await box.run("cell", "while True: pass", 0.2)
            assert (late_result.ending, late_result.lost) == (RunEnding.LATE, False)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


async def test_links_lead_nowhere_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key")
    async with sandbox("files") as box:
        look = f"ln -s {tmp_path} link; cat link/secret; cat ../../../..{tmp_path}/secret"
        result = await box.run("shell", f"{look}; mount -o remount,rw /usr", 5)
        assert "a key" not in result.output and result.status != 0


async def test_the_network_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()  # it does listen
        result = await program(
            f"""
            import socket
            for target in (("127.0.0.1", {server.getsockname()[1]}), ("1.1.1.1", 53)):
                try: socket.create_connection(target, timeout=2)
                except OSError as error: print("no:", error)
            try: socket.getaddrinfo("example.com", 80)
            except OSError as error: print("no:", error)
            """,
            needs="network",
        )
    assert result.output.count("no:") == 3, result.output


async def test_only_sockets_of_this_machine_and_the_internet_can_be_made() -> None:
    """A network namespace does not hold AF_VSOCK, which reaches the hypervisor."""
    result = await program(
        """
        import errno, socket
        for family in range(46):
            try: socket.socket(family).close()
            except OSError as error: print(family, errno.errorcode[error.errno])
            else: print(family, "made")
        """,
        needs="network",
    )
    became = dict(line.split() for line in result.output.splitlines())
    allowed = {str(int(family)) for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)}
    assert len(became) == 46, result.output
    assert {became[family] for family in became.keys() - allowed} <= {"EAFNOSUPPORT", "EACCES"}
    assert {became[family] for family in allowed} in ({"made"}, {"EACCES"})  # EACCES: no namespace


async def test_abstract_sockets_of_the_host_are_out_of_reach() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0asyncrl-test-of-the-sandbox")
        server.listen()
        code = "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0asyncrl-test-of-the-sandbox')"
        assert re.search("refused|denied", (await program(code, needs="network")).output)


async def test_a_pair_of_sockets_reaches_no_network() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0asyncrl-test-of-the-sandbox-pairs")
        listener.setblocking(False)
        send = "[0].sendto(b'out', '\\0asyncrl-test-of-the-sandbox-pairs')"
        escaped = await program(
            f"import socket\nsocket.socketpair(type=socket.SOCK_DGRAM){send}", needs="network"
        )
        assert "PermissionError" in escaped.output
        with pytest.raises(BlockingIOError):
            listener.recv(10)


async def test_secrets_of_the_environment_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sesame")
    result = await program("import os\nprint(dict(os.environ))")
    assert "sesame" not in result.output and "PATH" in result.output
    async with sandbox() as box:
        look = await box.run("shell", "env; cat /proc/*/environ 2>/dev/null", 5)
        assert "PATH" in look.output and "sesame" not in look.output


EACH = "import os\nfor fd in range(3, 256):\n    try: os.write(fd, {data!r})\n    except OSError: pass\n"


async def test_garbage_on_any_descriptor_harms_only_its_interpreter() -> None:
    codes = (
        EACH.format(data=b"\xff" * 4000),
        EACH.format(data=b"\0\0\0\2\0") + "while True: pass",  # "this cell is done", and it is not
        EACH.format(data=b"\0\0\0\3\0"),  # "the next cell is done"
        "import os\nos.closerange(0, 256)",
    )

    async def one(code: str) -> list[RunResult]:
        async with jail() as box:
            await box.run("cell", "n = 7", 20)
            await box.run("cell", code, 20)
            await box.run("cell", "'this one may be late, or find its interpreter gone'", 0.5)
            return [await box.run("cell", cell, 20) for cell in ("2", "3")]

    for results in await asyncio.gather(*map(one, codes)):
        assert [result.output for result in results] == ["2\n", "3\n"]


async def test_closed_streams_are_open_again_in_the_next_cell() -> None:
    results = await cells("import sys, os\nsys.stdout.close()\nos.close(1)", "print('back')")
    assert results[1].output == "back\n"


async def test_nothing_runs_between_calls() -> None:
    count = (
        "import threading, time\nn = 0\ndef run():\n    global n\n    while True: n += 1; time.sleep(0.001)\n"
    )
    async with sandbox("orphans") as box:
        await box.run(
            "cell", count + "threading.Thread(target=run, daemon=True).start()\ntime.sleep(0.05)", 5
        )
        first = int((await box.run("cell", "n", 5)).output)
        await asyncio.sleep(0.3)
        assert int((await box.run("cell", "n", 5)).output) - first < 100


CONTINUE = """
import os, signal
def spam(other):
    while True: os.kill(other, signal.SIGCONT)
first = os.fork()
if first == 0:
    if (second := os.fork()) == 0: spam(os.getppid())
    spam(second)
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_processes_that_continue_each_other_are_stopped_when_the_reply_comes() -> None:
    async with sandbox("orphans") as box:
        await box.run("cell", CONTINUE, 5)
        for _ in range(30):
            assert (await box.run("shell", ":", 5)).ending == RunEnding.DONE
            assert box.pid is not None
            _warden, *processes = descendants(box.pid)
            assert [*map(state, processes)] == 3 * ["T"]


async def test_the_sandboxes_own_directories_are_not_the_machines() -> None:
    """Files are made in them at the start, by root."""
    async with jail(show=["/dev", "/proc", "/"]) as box:
        listed = await box.run("shell", "ls /dev", 5)
    device_names = "fd full null ptmx pts random shm stderr stdin stdout urandom zero"
    assert set(listed.output.split()) == set(device_names.split())


async def test_background_children_end_with_the_sandbox(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    tmp_path.chmod(0o755)  # noqa: ASYNC240

    async with jail(show=[str(tmp_path)]) as box:
        # setsid and a double fork: neither the group nor the parent knows it any more
        opened = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        result = await box.run(
            "shell", f"(setsid sh -c 'exec 5<>{fifo}; echo up >&5; sleep 1000' &) ; sleep 0.2", 5
        )
        assert result.ending == RunEnding.DONE, result
    data = b""
    until = time.monotonic() + 5
    while time.monotonic() < until:  # end-of-file comes when the last who holds it has gone
        try:
            part = os.read(opened, 100)
        except BlockingIOError:
            continue
        if not part:
            break
        data += part
    else:
        pytest.fail("a background process outlived its sandbox")
    os.close(opened)
    assert data in (b"up\n", b"")


# The owner


def test_processes_end_with_a_killed_owner() -> None:
    script = textwrap.dedent("""
        import asyncio, sys
        from asyncrl.isolation.sandbox.jail import Jail
        async def main():
            box = Jail(require=())
            await box.start()
            print(box.pid, flush=True)
            await box.run("cell", "while True: pass", 1000)
        asyncio.run(main())
    """)
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    guard = os.pidfd_open(int(owner.stdout.readline()))
    owner.kill()
    owner.wait(5)
    owner.stdout.close()
    assert select.select([guard], [], [], 5)[0], "the sandbox outlived its owner"
    os.close(guard)


async def test_a_cancelled_call_ends_everything_and_the_next_reports_the_loss() -> None:
    async with sandbox() as box:
        await box.run("cell", "n = 1", 5)
        task = asyncio.create_task(box.run("cell", "while True: pass", 100))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        after = await box.run("cell", "'n' in globals()", 5)
        assert (after.output, after.lost, after.emptied) == ("False\n", True, True)
        again = await box.run("cell", "1", 5)
        assert (again.lost, again.emptied) == (False, False)


@without_image
async def test_a_program_finds_nothing_of_the_one_before() -> None:
    leave = """
        import os
        os.mkdir("d"); os.mkdir("d/e"); open("json.py", "w").write("planted = 1"); open("d/e/f", "w")
        os.symlink("/usr", "d/link"); os.chmod("d/e", 0); os.chmod("d", 0)
        for _ in range(2000): os.mkdir("deep"); os.chdir("deep")
        if os.fork() == 0:
            import time
            time.sleep(1000)
    """
    async with sandbox() as box:
        await box.run("cell", "kept = 1", 5)
        first = await box.run("program", textwrap.dedent(leave), 0.5)
        assert first.lost
        second = await box.run(
            "program", "import os, json\nprint(os.listdir('.'), hasattr(json, 'planted'))", 5
        )
        assert (second.ending, second.output, second.lost) == (RunEnding.DONE, "[] False\n", False)
        assert "usr" in (await box.run("shell", "ls /", 5)).output


async def test_a_killed_sandbox_is_a_result() -> None:
    async with sandbox() as box:
        task = asyncio.create_task(box.run("cell", "while True: pass", 100))
        await asyncio.sleep(0.05)
        assert box.pid is not None
        os.kill(box.pid, signal.SIGKILL)
        result = await task
        assert (result.ending, result.lost, result.emptied) == (RunEnding.DIED, True, True)
        assert (await box.run("cell", "1", 5)).output == "1\n"


async def test_a_closed_sandbox_stays_closed() -> None:
    box = Jail(require=())
    await box.run("cell", "1", 5)  # it opens by itself
    await box.close()
    await box.close()
    with pytest.raises(SandboxError, match="closed"):
        await box.run("cell", "1", 5)
    assert box.pid is None


def test_a_sandbox_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.isolation.sandbox.jail.GUARD_PROGRAM", "raise SystemExit")
    with pytest.raises(SandboxError, match="did not start: IncompleteReadError"):
        asyncio.run(Jail(require=()).start())


async def test_too_much_code_is_refused() -> None:
    async with sandbox() as box:
        with pytest.raises(ValueError, match="at most 60000"):
            await box.run("cell", "#" * 60_001, 5)
        assert (await box.run("cell", "#" * 60_000, 5)).ending == RunEnding.DONE


async def test_what_must_hold_is_demanded() -> None:
    box = Jail(require=["flight"])
    with pytest.raises(SandboxError, match="no flight isolation"):
        await box.start()


# Machines that allow less

ROBBED = "--bounding-set=-all --inh-caps=-all --no-new-privs"
UNNEEDED = """
import ctypes, errno, fcntl, mmap, os, resource, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0: raise OSError(ctypes.get_errno(), "")
def prctl(*arguments):
    if libc.prctl(*arguments) < 0: raise OSError(ctypes.get_errno(), "")
class Program(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
allow_all = Program(1, struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
users = (2, 7, os.getuid()) * 100
entries = (1, 7, -1, *users, 4, 7, -1, 16, 7, -1, 32, 7, -1)
acl = struct.pack("<I" + "HHi" * 104, 2, *entries)
open("file", "w").close()
file = os.open("file", os.O_RDWR)
lock = struct.pack("hhqqi4x", 1, 0, 0, 1, 0)
pipe = os.pipe()
tries = {
    "landlock_create_ruleset": lambda: call(444, struct.pack("=Q", 8191), 8, 0),
    "landlock_add_rule": lambda: call(445, -1, 1, b"", 0),
    "landlock_restrict_self": lambda: call(446, -1, 0),
    "io_setup": lambda: call(206 if x86 else 0, 1, ctypes.byref(ctypes.c_ulong())),
    "fanotify_init": lambda: call(300 if x86 else 262, 0x200, 0),
    "perf_event_open": lambda: call(298 if x86 else 241, struct.pack("II104x", 1, 112), 0, -1, -1, 0),
    "seccomp": lambda: call(317 if x86 else 277, 1, 0, ctypes.byref(allow_all)),
    "a filter by prctl": lambda: prctl(22, 2, ctypes.byref(allow_all)),
    "a table of futexes": lambda: prctl(78, 1, 1 << 20, 0, 0),
    "an attribute": lambda: os.setxattr("file", "user.name", b"value"),
    "an attribute of an open file": lambda: os.setxattr(file, "user.name", b"value"),
    "an access control list": lambda: os.setxattr("file", "system.posix_acl_access", acl),
    "huge pages": lambda: mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000),
    "mbind": lambda: call(237 if x86 else 235, 0, 0, 0, None, 0, 0),
    "set_mempolicy": lambda: call(238 if x86 else 237, 0, None, 0),
    "splice": lambda: call(275 if x86 else 76, file, None, pipe[1], None, 1, 0),
    "a process that shares open files": lambda: call(56 if x86 else 220, 0x400 | 17, 0, 0, 0, 0),
    "a limit of core files": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    "a label of flows": lambda: socket.socket(10).setsockopt(41, 32, bytes(32)),
    "a filter of a socket": lambda: socket.socketpair()[0].setsockopt(1, 26, allow_all),
    "a lock of an open file": lambda: fcntl.fcntl(file, 37, lock),
}
for name, action in tries.items():
    try: action()
    except OSError as error: print(f"{name}: {errno.errorcode[error.errno]}")
    else: print(f"{name}: done")
print(resource.getrlimit(resource.RLIMIT_CORE))
prctl(4, 0, 0, 0, 0)
print("may be looked at:", libc.prctl(3, 0, 0, 0, 0))
fcntl.lockf(file, fcntl.LOCK_EX)  # locks of processes are counted
mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
prctl(15, b"name", 0, 0, 0)
print("the rest is as ever")
"""
UNNEEDED_ENDS = """landlock_create_ruleset: ENOSYS
landlock_add_rule: ENOSYS
landlock_restrict_self: EACCES
io_setup: ENOSYS
fanotify_init: ENOSYS
perf_event_open: EACCES
seccomp: EACCES
a filter by prctl: EINVAL
a table of futexes: EINVAL
an attribute: ENOTSUP
an attribute of an open file: ENOTSUP
an access control list: ENOTSUP
huge pages: ENOMEM
mbind: ENOSYS
set_mempolicy: ENOSYS
splice: EINVAL
a process that shares open files: EINVAL
a limit of core files: done
a label of flows: EACCES
a filter of a socket: EACCES
a lock of an open file: EINVAL
(1, 1)
may be looked at: 1
the rest is as ever
"""


async def test_objects_of_the_kernel_that_no_program_needs_are_refused() -> None:
    """Each takes memory that no process is charged for, or a supply that the machine has once for all."""
    assert (await program(UNNEEDED, needs="memory")).output == UNNEEDED_ENDS


KINDS = {
    "user": ["unshare", "--user", "--map-user=1000", "--map-group=1000"],
    "container": [
        *("unshare", "--user", "--map-root-user", "sh", "-c"),
        f'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv {ROBBED} "$@"',
        "sh",
    ],
}
TRY = '''
import asyncio
from asyncrl.isolation.sandbox.jail import Jail, SandboxLimits
COUNT = """
import glob, os
def read(path):
    try: return open(path, "rb").read()
    except OSError: return b""
print(sum(read(path).split(bytes(1))[:2] == [b"sleep", b"987"] for path in glob.glob("/proc/*/cmdline")))
print(os.environ["HOME"] == os.getcwd())
"""
async def main():
    async with Jail(SandboxLimits(processes=8), require=()) as box:
        print(sorted(box.enforced))
        print((await box.run("cell", "n = 7", 5)).ending)
        late = await box.run("cell", "while True: pass", 0.2)
        print(late.ending, late.lost, (await box.run("cell", "n", 5)).output.strip())
        print((await box.run("program", "print(input())", 5, "in")).output.strip())
        await box.run("shell", "setsid sleep 987 & sleep 0.1", 5)
        late = await box.run("shell", "setsid sleep 987 & sleep 987", 0.2)
        print((await box.run("program", COUNT, 5)).output.strip())
asyncio.run(main())
'''


@without_image
@pytest.mark.parametrize("kind", KINDS)
def test_it_works_with_fewer_rights(kind: str) -> None:
    root = str(Path(__file__).resolve().parents[2])
    command = [*KINDS[kind], sys.executable, "-c", TRY]
    if subprocess.run([*KINDS[kind], "true"], capture_output=True).returncode != 0:
        pytest.skip(f"this machine cannot play a {kind}")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, env=os.environ | {"PYTHONPATH": root}
    )
    enforced, *output_lines = done.stdout.splitlines()
    assert output_lines == ["done", "late False 7", "in", "0", "True"], done.stderr
    assert (
        enforced
        == {
            "user": "['files', 'memory', 'network', 'orphans', 'processes']",
            "container": "['files', 'memory', 'network', 'orphans']",
        }[kind]
    )


CHANGE = """
import asyncio
from asyncrl.isolation.sandbox.jail import Jail
CODE = "import os\\nos.chmod('/proc/self/exe', os.stat('/proc/self/exe').st_mode)"
async def main():
    async with Jail(require=()) as box:
        for kind in ("cell", "program"):
            print((await box.run(kind, CODE, 5)).output.splitlines()[-1:])
asyncio.run(main())
"""


@without_image
def test_the_file_of_a_users_own_python_keeps_its_mode() -> None:
    """It is reached through a mount that is read-only."""
    command = [*KINDS["user"], sys.executable, "-c", CHANGE]
    if subprocess.run([*KINDS["user"], "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine cannot play a user")
    surroundings = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=surroundings)
    assert done.stdout.count("Read-only file system: '/proc/self/exe'") == 2, done.stdout + done.stderr


DEEP = """
import asyncio, os
from asyncrl.isolation.sandbox.jail import Jail
DIG = "import os\\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\\nprint('dug')"
async def main():
    for killed in (False, True):
        box = Jail(require=())
        await box.start()
        print("memory" in box.enforced, "is in memory" in box.notes)
        print((await box.run("cell", DIG, 10)).output.strip(), len(os.listdir(os.environ["TMPDIR"])))
        if killed:
            os.kill(box.pid, 9)
        await box.close()
        print(os.listdir(os.environ["TMPDIR"]))
asyncio.run(main())
"""


@without_image
def test_a_deep_tree_in_memory_is_cleaned_up_and_no_memory_is_promised() -> None:
    """Where there is no new root: by the guard, or if it was killed, by the owner."""
    if subprocess.run([*KINDS["container"], "test", "-d", "/dev/shm"], capture_output=True).returncode != 0:
        pytest.skip("this machine cannot play a container with a tmpfs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        surroundings = os.environ | {
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TMPDIR": directory
        }  # fmt: skip
        command = [*KINDS["container"], sys.executable, "-c", DEEP]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=surroundings)
    assert done.stdout.splitlines() == 2 * ["False True", "dug 1", "[]"], done.stderr[-500:]


@without_image
def test_attacks_fail_in_a_container_too() -> None:
    """Landlock and seccomp instead of namespaces: those tests above that ask for secrets and ways out."""
    if subprocess.run([*KINDS["container"], "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine cannot play a container")
    chosen = "files_outside or links_lead or network or abstract or secrets or nothing_runs or zeros"
    plain = ["-c", os.devnull, "--rootdir", os.curdir, "-p", "no:cacheprovider", "--noconftest"]
    plain += ["-p", "tests.conftest"]  # it runs async tests
    tests = [sys.executable, "-m", "pytest", "-q", *plain, "-rs", "-k", f"{chosen} or no_limit", __file__]
    quick = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*KINDS["container"], *tests], capture_output=True, text=True, timeout=60, env=quick
    )
    assert done.returncode == 0, done.stdout
    if "skipped" in done.stdout:
        pytest.skip(done.stdout[-300:])
