"""Keep the code of one GPU architecture in a library that was compiled for several.

The section .nv_fatbin is a row of fat binaries, one for each translation unit. The library has their
addresses, so that none of them may move:

    fat binary   magic (4 bytes), version (2), size of this header (2), size of its entries (8), entries
    entry        kind (2), version (2), size of this header (4), size of its code (8), …,
                 architecture at byte 28 (4; 90 for sm_90 and sm_90a), code

Entries for other architectures are dropped, and the size of the entries shrinks. Zeros fill the gap that
this leaves before the next fat binary: the file keeps its size, and compresses to less.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

MAGIC = b"\x50\xed\x55\xba"
ALIGNMENT = 8
FAT_HEADER = struct.Struct("<4sHHQ")
ENTRY_HEADER = struct.Struct("<HHIQ12xI")


def keep_architecture(library: Path, architecture: int) -> None:
    """Drop the code for all other architectures from this shared library, in place. ValueError: the library
    has no section .nv_fatbin, or one that is not laid out as above."""
    data = bytearray(library.read_bytes())
    drop_entries(data, *fatbin_section(library), architecture)
    library.write_bytes(data)


def drop_entries(data: bytearray, begin: int, end: int, architecture: int) -> None:
    """Drop the entries for other architectures in this part of a file. A fat binary that has none for this
    one is left as it is."""
    for start, header_size, entries_size in fat_binaries(data, begin, end):
        first = start + header_size
        entries = fat_entries(data, first, first + entries_size)
        kept_data = b"".join(
            data[at : at + size] for at, size, entry_of in entries if entry_of == architecture
        )
        if kept_data:
            data[first : first + entries_size] = kept_data.ljust(entries_size, b"\0")
            FAT_HEADER.pack_into(data, start, *FAT_HEADER.unpack_from(data, start)[:3], len(kept_data))


def fatbin_section(library: Path) -> tuple[int, int]:
    """Return where .nv_fatbin begins and ends in the file."""
    command = ["readelf", "--section-headers", "--wide", str(library)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        fields = line.partition("]")[2].split()
        if fields[:1] == [".nv_fatbin"]:
            offset = int(fields[3], 16)
            return offset, offset + int(fields[4], 16)
    raise ValueError(f"{library} has no section .nv_fatbin: it holds no code for GPUs")


def fat_binaries(data: bytearray, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, size of the header and size of the entries of each fat binary in this part of the file."""
    position = begin
    while position < end:
        if not any(data[position : position + ALIGNMENT]):  # between two of them
            position += ALIGNMENT
            continue
        magic, _, header_size, entries_size = FAT_HEADER.unpack_from(data, position)
        if magic != MAGIC or position + header_size + entries_size > end:
            raise ValueError(f"there is no fat binary at byte {position:,}")
        yield position, header_size, entries_size
        position += header_size + entries_size


def fat_entries(data: bytearray, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, size with its header, and architecture of each entry of a fat binary."""
    position = first
    while position < end:
        _, _, header_size, code_size, architecture = ENTRY_HEADER.unpack_from(data, position)
        size = header_size + code_size
        if not header_size or position + size > end:
            raise ValueError(f"there is no entry of a fat binary at byte {position:,}")
        yield position, size, architecture
        position += size
