"""What archives hold ends up inside the new root, whatever it is, or is refused by one line."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from asyncrl.isolation.images import Image
from asyncrl.isolation.layers import OCI_ARCHITECTURES
from asyncrl.isolation.sandbox.kernel import MACHINE
from asyncrl.isolation.unpacking import Bounds, Order

FORKS = """
import os, sys, msgspec
from asyncrl.errors import reason
from asyncrl.isolation.unpacking import Order, unpack_order
for line in sys.stdin.buffer:
    if os.fork() == 0:
        try:
            reply = unpack_order(msgspec.json.decode(line, type=Order))
        except BaseException as error:
            reply = reason(error)
        os.write(1, msgspec.json.encode(reply) + b"\\n")
        os._exit(0)
    os.wait()
"""
SHELL = ("bin/sh", b"#!")
BOUNDS = Bounds(mib=4, files=60, seconds=20)
SMALL = 1 << 16


class Unpacker:
    """Unpacks archives, each in a process that is forked from one that has all imports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0
        command = [sys.executable, "-c", FORKS]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.root = directory

    def __call__(self, archive: bytes | Path, over: str = "", bounds: Bounds = BOUNDS) -> Image:
        """Raises RuntimeError with the refusal."""
        self.count += 1
        place = self.directory / str(self.count)
        self.root = place / "root"
        self.root.mkdir(parents=True)
        source = archive if isinstance(archive, Path) else place / "archive"
        if isinstance(archive, bytes):
            source.write_bytes(archive)
        image = Image("", over=(over,) if over else (), environment={"PATH": "/bin"})
        order = Order(str(source), str(place / "spool"), str(self.root), image, bounds)
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()
        reply = msgspec.json.decode(self.process.stdout.readline(), type=Image | str)
        if isinstance(reply, str):
            raise RuntimeError(reply)
        return reply

    def refusal(self, archive: bytes | Path, **given: Any) -> str:
        with pytest.raises(RuntimeError) as caught:
            self(archive, **given)
        return str(caught.value)


@pytest.fixture(scope="module")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unpacker]:
    unpacker = Unpacker(tmp_path_factory.mktemp("unpacked"))
    yield unpacker
    assert unpacker.process.stdin
    unpacker.process.stdin.close()
    unpacker.process.wait()


Entry = tuple[str, bytes | str | None] | tarfile.TarInfo


def tar(*entries: Entry, mode: str = "w") -> bytes:
    """Make an archive: of a file (bytes), a symbolic link to a text, a directory (None), or what is given."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry, io.BytesIO(bytes(entry.size)) if entry.isreg() else None)
                continue
            name, contents = entry
            info = tar_member(name, tarfile.DIRTYPE if contents is None else tarfile.REGTYPE, mode=0o755)
            if isinstance(contents, str):
                info.type = tarfile.SYMTYPE
                info.linkname = contents
            file: IO[bytes] | None = None
            if isinstance(contents, bytes):
                info.size = len(contents)
                file = io.BytesIO(contents)
            archive.addfile(info, file)
    return buffer.getvalue()


def tar_member(name: str, kind: bytes = tarfile.REGTYPE, **given: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in given.items():
        setattr(info, key, value)
    return info


def hard_link(name: str, target: str) -> tarfile.TarInfo:
    return tar_member(name, tarfile.LNKTYPE, linkname=target)


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


# What archives may hold


def test_a_tree_keeps_contents_modes_times_and_links(unpack: Unpacker) -> None:
    file = tar_member("usr/tool", mode=0o755, size=5, mtime=1_000_000_000)
    unpacked_files = unpack(
        tar(SHELL, file, hard_link("usr/same", "usr/tool"), ("etc/link", "/usr/tool"), ("tmp", None))
    )
    root = unpack.root
    tool = (root / "usr/tool").stat()
    assert (tool.st_size, stat.S_IMODE(tool.st_mode), tool.st_mtime) == (5, 0o755, 1_000_000_000)
    assert (root / "usr/same").stat().st_ino == tool.st_ino
    assert os.readlink(root / "etc/link") == "/usr/tool"
    assert (
        unpacked_files.files == 8 and unpacked_files.size == 12
    )  # three directories above files; a file with two names
    assert (unpacked_files.environment, unpacked_files.directory, unpacked_files.user) == (
        {"PATH": "/bin"},
        "/",
        "",
    )


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compression_and_times_do_not_change_the_digest(unpack: Unpacker, mode: str) -> None:
    plain = unpack(tar(SHELL, tar_member("a", mtime=1)))
    assert unpack(tar(tar_member("./a", mtime=2), ("./bin/sh", b"#!"), mode=mode)).digest == plain.digest


@pytest.mark.parametrize(
    "other",
    [
        (SHELL, ("a", b"y")),
        (SHELL, ("b", b"x")),
        (SHELL, ("a", "x")),
        (SHELL, ("a", None)),
        (SHELL, tar_member("a", mode=0o644)),
        (SHELL, ("a", b"x"), ("c", None)),
    ],
)
def test_every_difference_changes_the_digest(unpack: Unpacker, other: tuple[Entry, ...]) -> None:
    assert unpack(tar(SHELL, ("a", b"x"))).digest != unpack(tar(*other)).digest


def test_the_digest_depends_on_the_image_below(unpack: Unpacker) -> None:
    digests = {unpack(tar(SHELL), over=over).digest for over in ("", "sha256-1", "sha256-2")}
    assert len(digests) == 3


def test_a_directory_is_packed_with_its_links_and_without_pipes(unpack: Unpacker, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sh").write_text("#!")
    (tmp_path / "bin/sh").chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    unpack(tmp_path)
    assert os.readlink(unpack.root / "passwd") == "/etc/passwd"
    assert files(unpack.root) == {"bin", "bin/sh", "passwd"}


def test_rights_are_dropped_and_devices_left_out(unpack: Unpacker) -> None:
    unpack(
        tar(
            tar_member("usr/su", mode=0o7755),
            tar_member("mail", tarfile.DIRTYPE, mode=0o2775),
            tar_member("tmp", tarfile.DIRTYPE, mode=0o1777),
            tar_member("dev/sda", tarfile.BLKTYPE, devmajor=8),
            tar_member("dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3),
            tar_member("run/pipe", tarfile.FIFOTYPE),
            tar_member("strange", b"Z"),
            SHELL,
        )
    )
    modes = {name: stat.S_IMODE((unpack.root / name).stat().st_mode) for name in ("usr/su", "mail", "tmp")}
    assert modes == {"usr/su": 0o755, "mail": 0o775, "tmp": 0o1777}
    assert files(unpack.root) == {"usr", "usr/su", "mail", "tmp", "bin", "bin/sh"}


def test_owners_are_the_importing_user_and_directories_without_rights_are_filled(unpack: Unpacker) -> None:
    closed = tar_member("closed", tarfile.DIRTYPE, mode=0, uid=33, gid=33)
    unpack(tar(SHELL, closed, ("closed/inner/file", b"x"), tar_member(".", tarfile.DIRTYPE, mode=0)))
    inner = (unpack.root / "closed").stat()
    assert (inner.st_uid, stat.S_IMODE(inner.st_mode)) == (os.getuid(), 0)
    assert stat.S_IMODE(unpack.root.stat().st_mode) == 0o755


# What hostile archives try


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory of this machine with a file, which stays as it is."""
    (tmp_path / "file").write_text("as it was")
    yield tmp_path
    assert files(tmp_path) == {"file"} and (tmp_path / "file").read_text() == "as it was"


def test_absolute_names_and_links_stay_inside(unpack: Unpacker, outside: Path) -> None:
    unpack(
        tar(
            SHELL,
            (f"{outside}/new", b"x"),
            ("absolute", f"{outside}"),
            ("absolute/through", b"x"),
            ("upwards", "../" * 30 + str(outside)),
            ("upwards/through_it", b"x"),
            ("one", "two"),
            ("two", "/three/../../../absolute"),
            ("three", None),
            ("one/through_three", b"x"),
        )
    )
    inside = unpack.root / str(outside)[1:]
    assert files(inside) == {"new", "through", "through_it", "through_three"}


def test_a_link_at_the_end_of_a_name_is_replaced(unpack: Unpacker, outside: Path) -> None:
    unpack(
        tar(SHELL, ("a", f"{outside}/file"), ("a", b"new"), ("b", f"{outside}"), ("b", None), ("b/c", b"x"))
    )
    assert (unpack.root / "a").read_text() == "new" and files(unpack.root) == {
        "bin",
        "bin/sh",
        "a",
        "b",
        "b/c",
    }


@pytest.mark.parametrize("target", ["{}/file", "../../../../../../../../../..{}/file", "down/file"])
def test_hard_links_reach_no_file_outside(unpack: Unpacker, outside: Path, target: str) -> None:
    link = hard_link("stolen", target.format(outside))
    refused = unpack.refusal(tar(SHELL, ("down", str(outside)), link))
    assert refused.startswith("entry 'stolen': FileNotFoundError")


def test_a_hard_link_to_a_link_is_the_link(unpack: Unpacker, outside: Path) -> None:
    unpack(tar(SHELL, ("a", f"{outside}/file"), hard_link("b", "a"), ("b", b"new")))
    assert os.readlink(unpack.root / "a") == f"{outside}/file"


def test_later_entries_replace_earlier_ones(unpack: Unpacker) -> None:
    unpack(
        tar(
            SHELL,
            *(("a/b/c", b"x"), ("a", b"file over directory")),
            *(("d", b"x"), ("d", None), ("d/e", b"directory over file")),
            *(("f", b"1"), hard_link("g", "f"), ("f", b"22")),
            *(("h/i", b"x"), tar_member("h", tarfile.DIRTYPE, mode=0o700)),
        )
    )
    assert files(unpack.root) == {"bin", "bin/sh", "a", "d", "d/e", "f", "g", "h", "h/i"}
    assert (unpack.root / "g").read_text() == "1"
    assert stat.S_IMODE((unpack.root / "h").stat().st_mode) == 0o700


def sparse(size: int) -> tarfile.TarInfo:
    """A file of which the archive holds nothing."""
    return tar_member("hole", size=0, pax_headers={
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(size),
        "GNU.sparse.map": f"{size},0",
    })  # fmt: skip


def deep() -> list[Entry]:
    """Directories in each other, by names that are short."""
    entries: list[Entry] = []
    for level in range(18):
        above = f"{level}/" if level else ""
        name = "n" * 250
        entries += [(f"{above}{name}", None), (f"{level + 1}", f"{above}{name}")]
    return entries


REFUSED: dict[str, tuple[list[Entry], str]] = {
    "a name upwards": ([("a/../../b", b"x")], "contains .."),
    "a name that only looks upwards": ([("..", None)], "contains .."),
    "a name with a NUL": ([tar_member("x", pax_headers={"path": "a\0b"})], "null"),
    "a long name": ([("n" * 256, b"")], "File name too long"),
    "a deep name": ([("a/" * 3000 + "b", b"")], "the path has too many directories"),
    "a tree that is deep through links": (deep(), "File name too long"),
    "a loop of links": ([("a", "b"), ("b", "a"), ("a/c", b"")], "the parent '/a' is not a directory"),
    "a file as a directory": ([("a", b""), ("a/b", b"")], "the parent '/a' is not a directory"),
    "many files": ([(f"f{number}", b"") for number in range(60)], "more than 60 entries (--files)"),
    "many directories": ([(f"{n}/a/b/c/d/e/f", b"") for n in range(9)], "more than 60 entries (--files)"),
    "a large file": ([tar_member("a", size=5 << 20)], "more than 4 MiB of files (--mib)"),
    "large files": ([tar_member(name, size=3 << 20) for name in "ab"], "more than 4 MiB of files (--mib)"),
    "less than nothing": (
        [tar_member("d", tarfile.DIRTYPE, size=-(1 << 40)), tar_member("a", size=5 << 20)],
        "more than 4 MiB of files (--mib)",
    ),
    "a hole": ([sparse(1 << 50)], "more than 4 MiB of files (--mib)"),
    "a time that is none": ([tar_member("a", pax_headers={"mtime": "nan"})], "Error"),
    "a time that is far": ([tar_member("a", mtime=1 << 80)], "Error"),
    "a hard link to a directory": ([("a", None), hard_link("b", "a")], "PermissionError"),
    "an empty link": ([("a", "")], "Error"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(unpack: Unpacker, case: str) -> None:
    entries, expected = REFUSED[case]
    refused = unpack.refusal(tar(SHELL, *entries))
    assert expected in refused and "\n" not in refused
    assert refused.startswith("entry ")


def test_names_of_any_characters_are_kept(unpack: Unpacker) -> None:
    names = ["new\nline", "\udcff", " ", "-rf", "*", "\\", "é", "\x1b[2J"]
    unpack(tar(SHELL, *((name, b"x") for name in names)))
    assert set(os.listdir(unpack.root)) == {"bin", *names}


def test_a_root_without_a_shell(unpack: Unpacker, outside: Path) -> None:
    assert "/bin/sh is missing" in unpack.refusal(tar(("usr", None)))
    assert "/bin/sh is missing" in unpack.refusal(tar(("bin/sh", f"{outside}/file")))
    assert "/bin/sh is missing" in unpack.refusal(tar(("bin/sh", None)))
    unpack(tar(("bin", "usr/bin"), ("usr/bin/sh", "/usr/bin/dash"), ("usr/bin/dash", b"#!")))


def test_damaged_archives(unpack: Unpacker) -> None:
    content = random.Random(0)  # bytes that contain no name of an entry, unlike those of another run
    whole = tar(SHELL, *((f"f{number}", content.randbytes(3000)) for number in range(9)))
    packed = gzip.compress(whole)
    assert "the file is not a tar archive" in unpack.refusal(b"no archive at all")
    assert "the file is not a tar archive" in unpack.refusal(b"")
    for cut in range(700, 27_000, 5_100):
        unpack.refusal(whole[:cut])
        unpack.refusal(packed[:cut])
    ends = whole.index(b"f8\0") // 512 * 512
    assert "damaged or cut off" in unpack.refusal(whole[:ends])
    assert "damaged or cut off" in unpack.refusal(whole[:ends] + b"?" * 512 + whole[ends + 512 :])
    wrong = bytearray(packed)
    wrong[-6] ^= 1  # of its checksum
    assert "CRC" in unpack.refusal(bytes(wrong))


def test_a_bomb_in_a_header_takes_bounded_memory(unpack: Unpacker) -> None:
    header = tar(tar_member("x", tarfile.XHDTYPE, size=3 << 30))[:512]  # tarfile reads it whole
    assert "the header needs more than 1024 MiB" in unpack.refusal(
        gzip.compress(tar(SHELL)[:1024] + header + bytes(1 << 20), 1)
    )


def test_nothing_is_imported_from_the_archive(unpack: Unpacker) -> None:
    """A module, a codec or a library of the archive would run with the rights of the importing user."""
    directories = [path[1:] for path in sys.path if path.startswith("/")][:4]
    code = b"import os; os.open('/loaded', os.O_CREAT)"
    names = ("zlib", "encodings/idna", "traceback", "linecache", "sitecustomize")
    unpack(
        tar(SHELL, *((f"{path}/{name}.py", code) for path in directories for name in names)), bounds=Bounds()
    )
    assert not (unpack.root / "loaded").exists()


# Archives of layers

CONFIG = {"config": {"Env": ["PATH=/opt/bin", "A=b=c", "=x"], "User": "app:staff", "WorkingDir": "/work"}}


def saved(*layers: bytes, config: object = CONFIG, **more: object) -> bytes:
    """Make what `docker save` writes, the manifest last."""
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "c.json", "RepoTags": None, "Layers": names, **more}]
    files = {"c.json": json.dumps(config).encode(), **dict(zip(names, layers, strict=True))}
    return tar(*files.items(), ("manifest.json", json.dumps(manifest).encode()))


def layout(*layers: bytes, config: object = CONFIG, machines: tuple[str, ...] = ("", "unknown")) -> bytes:
    """Make an OCI layout with a list of images for `machines` ("": this one's), all of which are the same."""
    blobs = dict[str, bytes]()

    def blob(contents: bytes) -> str:
        digest = hashlib.sha256(contents).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = contents
        return f"sha256:{digest}"

    manifest = {
        "config": {"digest": blob(json.dumps(config).encode())},
        "layers": [{"mediaType": "tar+gzip", "digest": blob(gzip.compress(layer))} for layer in layers],
    }
    images = [
        {
            "digest": blob(json.dumps(manifest | {"number": number}).encode()),
            "platform": {"architecture": machine or OCI_ARCHITECTURES[MACHINE], "os": "linux"},
        }
        for number, machine in enumerate(machines)
    ]
    index = {"manifests": [{"digest": blob(json.dumps({"manifests": images}).encode())}]}
    blobs |= {"index.json": json.dumps(index).encode(), **dict([LAYOUT])}
    return tar(*blobs.items())


BASE = tar(
    SHELL, ("a/1", b""), ("a/2", b""), ("b/c/d", b""), ("e", b"old"), ("lib", "usr/lib"), ("usr/lib", None)
)
TOP = tar(
    *(("a/new", b""), ("a/.wh.1", b""), ("b/c/own", b""), ("b/.wh..wh..opq", b""), ("e", b"new")),
    *(("lib/x.so", b""), (".wh.missing", b""), ("no/.wh.such", b""), (".wh..wh.plnk", None)),
)
MERGED = {
    *("bin", "bin/sh", "a", "a/2", "a/new", "b", "b/c", "b/c/own", "e", "lib", "usr", "usr/lib"),
    *("usr/lib/x.so",),
}


@pytest.mark.parametrize("form", [saved, layout])
def test_layers_lie_over_each_other_and_delete_what_is_below(unpack: Unpacker, form: Any) -> None:
    unpacked_files = unpack(form(BASE, TOP))
    assert files(unpack.root) == MERGED and (unpack.root / "e").read_text() == "new"
    assert unpacked_files.environment == {"PATH": "/opt/bin", "A": "b=c"}
    assert (unpacked_files.directory, unpacked_files.user) == ("/work", "app:staff")


def test_the_settings_are_part_of_the_digest(unpack: Unpacker) -> None:
    digests = {unpack(form(BASE)).digest for form in (saved, layout)}
    assert len(digests | {unpack(saved(BASE, config={})).digest}) == 2


def test_a_layer_that_is_a_link_to_another_entry(unpack: Unpacker) -> None:
    """As docker wrote a layer that an image has twice."""
    manifest = [{"Config": "c.json", "Layers": ["0/layer.tar", "1/layer.tar"]}]
    layers: list[Entry] = [("0/layer.tar", BASE), ("1/layer.tar", "../0/layer.tar")]
    unpack(tar(*layers, ("c.json", b"{}"), ("manifest.json", json.dumps(manifest).encode())))
    assert "a/1" in files(unpack.root)


def test_deletions_stay_inside(unpack: Unpacker, outside: Path) -> None:
    links = tar(
        SHELL, ("a", str(outside)), ("b/c", "../../../../../.." + str(outside)), ("f", f"{outside}/file")
    )
    everything = [(f"{name}/{file}", b"") for name in ("a", "b/c") for file in (".wh.file", ".wh..wh..opq")]
    unpack(saved(links, tar(*everything, (".wh.f", b""))))
    assert "f" not in files(unpack.root)


@pytest.mark.parametrize("name", [".wh.", ".wh...", ".wh..", "bin/.wh...", "bin/.wh."])
def test_deletions_of_no_name(unpack: Unpacker, name: str) -> None:
    assert "the entry does not name a file to delete" in unpack.refusal(saved(BASE, tar((name, b""))))


def test_a_layer_may_delete_all(unpack: Unpacker) -> None:
    unpack(saved(BASE, tar(SHELL, (".wh..wh..opq", b""))))
    assert files(unpack.root) == {"bin", "bin/sh"}
    assert "/bin/sh is missing" in unpack.refusal(saved(BASE, tar((".wh.bin", b""))))


def test_deletions_over_an_image_are_those_of_overlayfs(unpack: Unpacker) -> None:
    unpack(
        tar(("a/.wh.x", b""), ("b/.wh..wh..opq", b""), ("b/own", b""), (".wh.c", b""), ("c/d", b"")),
        over="sha256-1",
    )
    hidden = (unpack.root / "a/x").lstat()
    assert stat.S_ISCHR(hidden.st_mode) and hidden.st_rdev == 0
    assert os.getxattr(unpack.root / "b", "user.overlay.opaque") == b"y"
    assert os.getxattr(unpack.root / "c", "user.overlay.opaque") == b"y"
    assert files(unpack.root) == {"a", "a/x", "b", "b/own", "c", "c/d"}
    assert "without --over" in unpack.refusal(tar((".wh..wh..opq", b"")), over="sha256-1")


LAYOUT = ("oci-layout", b"{}")
BROKEN: dict[str, tuple[bytes, str]] = {
    "a missing layer": (saved(BASE, Layers=["0/layer.tar", "9/layer.tar"]), "lists '9/layer.tar', which"),
    "a layer of this machine": (
        saved(BASE, Layers=["../../../../etc/passwd"]),
        "which is not in the archive",
    ),
    "an absolute layer": (saved(BASE, Layers=["/etc/passwd"]), "which is not in the archive"),
    "a missing configuration": (saved(BASE, Config="d.json"), "lists 'd.json', which"),
    "layers without names": (saved(BASE, Layers=None), "manifest.json' cannot be read (Expected `array`"),
    "a configuration of numbers": (saved(BASE, config=[1]), "'c.json' cannot be read"),
    "settings of numbers": (saved(BASE, config={"config": {"Env": [1]}}), "Expected `str`, got `int`"),
    "a NUL in the settings": (saved(BASE, config={"config": {"Env": ["A=\0"]}}), "contain a NUL"),
    "another machine": (saved(BASE, config={"architecture": "s390x"}), "the image is for s390x"),
    "no image for this machine": (layout(BASE, machines=("s390x",)), "contains 0 images for"),
    "two images": (layout(BASE, machines=("", "")), "contains 2 images for"),
    "two saved images": (
        tar(("manifest.json", json.dumps(2 * [{"Config": "", "Layers": []}]).encode())),
        "2 images",
    ),
    "a list of itself": (
        tar(("index.json", b'{"manifests": [{"digest": "../index.json"}]}'), LAYOUT),
        "has no manifest",
    ),
    "no list": (tar(("index.json", b"{}"), LAYOUT), "contains 0 images"),
    "no list at all": (tar(LAYOUT), "lists 'index.json', which is not in the archive"),
    "garbage": (tar(("manifest.json", os.urandom(99))), "cannot be read"),
    "a deep list": (tar(("manifest.json", b"[" * 100_000)), "cannot be read"),
    "a layer that is none": (saved(BASE, b"no layer at all"), "the file is not a tar archive"),
    "a layer cut off": (saved(BASE[:2000]), ""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_archives_of_layers(unpack: Unpacker, case: str) -> None:
    archive, expected = BROKEN[case]
    refused = unpack.refusal(archive)
    assert expected in refused and "\n" not in refused
