"""The interpreter that keeps its variables and runs one cell after the other, as a notebook does.

A Python inside the sandbox runs the source of this file, as `-c`. The source imports nothing of ours and
nothing that is slow to import, and Python 3.8 is enough."""

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

TREE_ONLY_FLAG = 0x400  # ast.PyCF_ONLY_AST; the module ast is slow to import
MAX_SHOWN_FRAMES = 6
CELL_HEADER = struct.Struct("!II")  # number of the cell, bytes of its source, which follows
CELL_REPLY = struct.Struct("!I?")  # number of the cell, whether it raised
CELL_SOURCES: dict[str, str] = {}
"""Sources of the cells, by the cell's file name in tracebacks."""
THIS_FILE = (lambda: 0).__code__.co_filename
IGNORE_SIGNAL = lambda *_: None  # noqa: E731 (a handler, as started programs inherit SIG_IGN)


def serve_cells(control_fd: int) -> NoReturn:
    """Run the cells that come from a socket, and answer each cell there when it has ended. Prints go to the
    present standard output. EOFError: the socket was closed."""
    signal.signal(signal.SIGINT, IGNORE_SIGNAL)
    main_module = new_main_module()
    process_id = os.getpid()
    output_fd = os.dup(1)

    while True:
        cell_number, source_size = CELL_HEADER.unpack(_read_exactly(control_fd, CELL_HEADER.size))
        source = _read_exactly(control_fd, source_size)
        open_streams(output_fd)
        raised = _cell_raises(source, f"<cell {cell_number}>", main_module)

        _flush_streams()
        if os.getpid() != process_id:
            os._exit(0)  # the cell forked, and this is the copy
        os.write(control_fd, CELL_REPLY.pack(cell_number, raised))


def run_program(source: bytes) -> None:
    """Run a program as `python FILE` would."""
    open_streams(1)
    main_module = new_main_module()
    sys.excepthook = lambda kind, error, frames: print_traceback(error)
    exec(_compile_source(source, "<program>"), main_module.__dict__)


def new_main_module() -> types.ModuleType:
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the module site does, which is slow to import
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    return main_module


def open_streams(output_fd: int) -> None:
    """Replace the standard streams, whatever the last cell did to them. The streams are line-buffered, so
    that lines of child processes appear in order."""
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    sys.stdin = _open_stream(0, "r")
    sys.stdout = _open_stream(1, "w")
    sys.stderr = _open_stream(2, "w")


def _open_stream(fd: int, mode: str) -> Any:
    errors = "replace" if mode == "r" else "backslashreplace"
    return open(fd, mode, 1, encoding="utf-8", errors=errors, closefd=False)


def _cell_raises(source: bytes, name: str, main_module: types.ModuleType) -> bool:
    """Run a cell; return whether the cell raised. An interrupt after the end of the cell is ignored."""
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _run_cell(source, name, main_module)
        finally:
            signal.signal(signal.SIGINT, IGNORE_SIGNAL)
    except BaseException as error:
        print_traceback(error)
        return True
    return False


def _run_cell(source: bytes, name: str, main_module: types.ModuleType) -> None:
    """Run the statements, and print the value of a final expression, as at a prompt."""
    tree = _compile_source(source, name, TREE_ONLY_FLAG)
    last_expression = tree.body[-1:] if tree.body and type(tree.body[-1]).__name__ == "Expr" else []
    tree.body = tree.body[: len(tree.body) - len(last_expression)]
    exec(compile(tree, name, "exec"), main_module.__dict__)
    if last_expression:
        from _ast import Interactive

        exec(compile(Interactive(last_expression), name, "single"), main_module.__dict__)


def _compile_source(source: bytes, name: str, flags: int = 0) -> Any:
    text = source.decode("utf-8", "replace")
    CELL_SOURCES[name] = text
    return compile(text, name, "exec", flags, dont_inherit=True)


def print_traceback(error: BaseException) -> None:
    """Print the traceback without the frames of this file, with the source lines of the cells."""
    if isinstance(error, MemoryError):
        os.write(2, b"MemoryError\n")  # there may be no memory for a traceback
        return
    import linecache
    import traceback

    for name, text in CELL_SOURCES.items():
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)

    traceback_entry = error.__traceback__
    while traceback_entry is not None and traceback_entry.tb_frame.f_code.co_filename == THIS_FILE:
        traceback_entry = traceback_entry.tb_next

    sys.stderr = _open_stream(2, "w")
    traceback.print_exception(
        type(error), error.with_traceback(traceback_entry), traceback_entry, limit=-MAX_SHOWN_FRAMES
    )
    sys.stderr.flush()


def _read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the code may have closed or replaced the stream
            continue
