"""Makes small images from programs of this machine: for tests that need a root file system, not a Debian."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from asyncrl.isolation.images import Image, find_image

PROGRAMS = (
    *("sh", "bash", "env", "ls", "cat", "cp", "mv", "rm", "ln", "mkdir", "rmdir", "touch", "stat", "wc"),
    *("chmod", "chown", "id", "sleep", "sed", "grep", "find", "head", "tail", "tee", "test", "true"),
    *("false", "sort", "basename", "dirname", "base64", "readlink", "realpath", "mount", "mknod", "kill"),
    *("ps", "dd", "df", "tr", "echo", "yes", "seq", "setsid"),
)
MERGED = ("bin", "sbin", "lib", "lib64")  # links into usr/, as Debian has them
DIRECTORIES = ("root", "home", "etc", "proc", "dev", "sys", "run", "var/tmp", "tmp")
FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hostname": "image\n",
}
LEFT_OUT = (  # parts of Python's library
    *("test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter", "turtledemo", "lib2to3"),
    *("ensurepip", "config-*", "distutils", "pydoc_data", "*.opt-?.pyc", "_test*", "EXTERNALLY-MANAGED"),
)


def small_tree(path: Path, python: bool = False, packages: Iterable[str] = ()) -> Path:
    """Make a root file system of PROGRAMS in `path`, in half a second. `python`: with `python3`, this Python
    and its library, which takes a second more; with `packages` of this environment, and what they require."""
    for name in (*DIRECTORIES, *(f"usr/{name}" for name in MERGED)):
        (path / name).mkdir(parents=True)
    for name in MERGED:
        (path / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "var/tmp"):
        (path / name).chmod(0o1777)
    for name, text in FILES.items():
        (path / "etc" / name).write_text(text)
    searched = "/usr/local/bin:/usr/bin:/bin"
    programs = [program_path for name in PROGRAMS if (program_path := shutil.which(name, path=searched))]
    for program in programs:
        shutil.copy2(program, path / "usr/bin" / Path(program).name)
    if python:
        programs += _copy_python(path, {*packages})

    for library in _libraries(programs):
        inside = re.sub(r"^/(usr/)?", "/usr/", library)
        if not inside.startswith("/usr/lib"):
            inside = f"/usr/lib/{Path(library).name}"
        target = path / inside[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)

    return path


def small_image(
    images: Path, name: str = "small", *, python: bool = False, packages: Iterable[str] = ()
) -> Image:
    """Make an image of `small_tree` in `images` (the fixture: ASYNCRL_IMAGES), unless it is there."""
    directory = images / f"sha256-{hashlib.sha256(name.encode()).hexdigest()}"
    if not directory.exists():  # as an import leaves it, and three times as fast
        small_tree(directory / "root", python, packages)
        image = Image(directory.name, environment={"PATH": "/usr/bin:/bin"})
        (directory / "image.json").write_bytes(msgspec.json.encode(image))
        (images / "names").mkdir(exist_ok=True)
        (images / "names" / name).symlink_to(f"../{directory.name}")

    return find_image(name)


def _copy_python(path: Path, packages: set[str]) -> list[str]:
    """Copy this Python as /usr/bin/python3. Return the files whose libraries the copy needs."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    binary = Path(sys.base_prefix, "bin", version)
    shutil.copy2(binary, path / "usr/bin" / version)
    (path / "usr/bin/python3").symlink_to(version)
    (path / "usr/bin/python").symlink_to(version)

    library = path / "usr/lib" / version
    site = path / "usr/lib" / version / "site-packages"
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=shutil.ignore_patterns(*LEFT_OUT))

    for package in _with_requirements(packages):
        for file in distribution(package).files or ():
            if ".." not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), site / file)

    return [str(binary), *map(str, library.glob("lib-dynload/*.so"))]


def _with_requirements(packages: set[str]) -> set[str]:
    packages_with_requirements = set[str]()
    ahead = list(packages)
    while ahead:
        package = ahead.pop()
        if package not in packages_with_requirements:
            packages_with_requirements.add(package)
            required = map(Requirement, distribution(package).requires or ())
            ahead += [
                requirement.name
                for requirement in required
                if not requirement.marker or requirement.marker.evaluate({"extra": ""})
            ]

    return packages_with_requirements


def _libraries(programs: list[str]) -> Iterator[str]:
    ldd_output = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    yield from sorted(set(re.findall(r"(/\S+) \(0x", ldd_output)))
