"""The interpreter that keeps its variables: one cell after the other, as a notebook does.

A Python inside the sandbox runs the source of this file, as `-c`: it imports nothing of ours and nothing that
is slow to import, and Python 3.8 is enough.
"""

from __future__ import annotations

import builtins
import os
import struct
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn
else:
    import _signal as signal

ONLY_TREE = 0x400  # ast.PyCF_ONLY_AST; the module ast is slow to import
SHOWN_FRAMES = 6
CELL = struct.Struct("!II")  # number of the cell, bytes of its source, which follows
DONE = struct.Struct("!I?")  # number of the cell, whether it raised
SOURCES: dict[str, str] = {}
"""Sources of the cells, by the name that tracebacks give them."""
OURS = (lambda: 0).__code__.co_filename
UNHEARD = lambda *_: None  # noqa: E731 (a handler: programs that code starts do not inherit it)


def serve_cells(control: int) -> NoReturn:
    """Run the cells that come from a socket; each is answered there when it has ended. What they print goes
    to the present standard output. EOFError when the socket closes."""
    signal.signal(signal.SIGINT, UNHEARD)
    main = fresh_main()
    process = os.getpid()
    output = os.dup(1)
    while True:
        number, size = CELL.unpack(_read(control, CELL.size))
        source = _read(control, size)
        open_streams(output)
        raised = _raises(source, f"<cell {number}>", main)
        _flush()
        if os.getpid() != process:
            os._exit(0)  # the cell forked, and this is the copy
        os.write(control, DONE.pack(number, raised))


def run_program(source: bytes) -> None:
    """Run a whole program as `python FILE` would."""
    open_streams(1)
    main = fresh_main()
    sys.excepthook = lambda kind, error, frames: show(error)
    exec(_compiled(source, "<program>"), main.__dict__)


def fresh_main() -> types.ModuleType:
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the module site has it, which is slow to import
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    return main


def open_streams(output: int) -> None:
    """Replace the standard streams, whatever the last cell did to them. They are line-buffered, so that lines
    of child processes appear in order."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = _stream(0, "r")
    sys.stdout = _stream(1, "w")
    sys.stderr = _stream(2, "w")


def _stream(fd: int, mode: str) -> Any:
    errors = "replace" if mode == "r" else "backslashreplace"
    return open(fd, mode, 1, encoding="utf-8", errors=errors, closefd=False)


def _raises(source: bytes, name: str, main: types.ModuleType) -> bool:
    """Run a cell. An interrupt that comes too late for it is ignored."""
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _cell(source, name, main)
        finally:
            signal.signal(signal.SIGINT, UNHEARD)
    except BaseException as error:
        show(error)
        return True
    return False


def _cell(source: bytes, name: str, main: types.ModuleType) -> None:
    """Run the statements; the value of a last expression is printed, as at a prompt."""
    tree = _compiled(source, name, ONLY_TREE)
    last = tree.body[-1:] if tree.body and type(tree.body[-1]).__name__ == "Expr" else []
    tree.body = tree.body[: len(tree.body) - len(last)]
    exec(compile(tree, name, "exec"), main.__dict__)
    if last:
        from _ast import Interactive

        exec(compile(Interactive(last), name, "single"), main.__dict__)


def _compiled(source: bytes, name: str, flags: int = 0) -> Any:
    text = source.decode("utf-8", "replace")
    SOURCES[name] = text
    return compile(text, name, "exec", flags, dont_inherit=True)


def show(error: BaseException) -> None:
    """Print the traceback without the frames of this file, with the source lines of the cells."""
    if isinstance(error, MemoryError):
        os.write(2, b"MemoryError\n")  # there may be no memory for a traceback
        return
    import linecache
    import traceback

    for name, text in SOURCES.items():
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == OURS:
        frame = frame.tb_next
    sys.stderr = _stream(2, "w")
    traceback.print_exception(type(error), error.with_traceback(frame), frame, limit=-SHOWN_FRAMES)
    sys.stderr.flush()


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the code may have closed or replaced it
            continue
