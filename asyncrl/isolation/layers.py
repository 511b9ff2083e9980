"""Reads archives of layers, as `docker save`, `podman save` and `skopeo copy` write them."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator
from typing import IO, NoReturn, TypeVar

import msgspec

from asyncrl.errors import UNDECODABLE, ConfigError
from asyncrl.isolation.images import DEFAULT_PATH, Image
from asyncrl.isolation.sandbox.kernel import MACHINE

# Names of machines in OCI manifests, by the kernel's names.
OCI_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
}
MAX_JSON_BYTES = 4 << 20

T = TypeVar("T")


def refuse(text: str) -> NoReturn:
    raise ConfigError(text)


class _Platform(msgspec.Struct):
    architecture: str = ""


class _Descriptor(msgspec.Struct):
    digest: str
    platform: _Platform | None = None

    @property
    def name(self) -> str:
        return f"blobs/{self.digest.replace(':', '/')}"


class _Manifest(msgspec.Struct):
    """Hold an OCI manifest, or a list of the manifests for several machines."""

    manifests: list[_Descriptor] = []
    config: _Descriptor | None = None
    layers: list[_Descriptor] = []


class _Saved(msgspec.Struct, rename="pascal"):
    """Hold an entry of docker's manifest.json."""

    config: str
    layers: list[str]


class _Settings(msgspec.Struct, rename={"environment": "Env", "directory": "WorkingDir", "user": "User"}):
    environment: list[str] | None = None
    directory: str | None = None
    user: str | None = None


class _Config(msgspec.Struct):
    architecture: str = ""
    config: _Settings | None = None


def find_layers(
    tar: tarfile.TarFile, index: dict[str, tarfile.TarInfo], image: Image
) -> tuple[Iterator[IO[bytes]], Image]:
    """Find the layers of an archive's only image, the lowest first, and put the settings into `image`."""

    def open_member(name: str) -> IO[bytes]:
        member = index.get(posixpath.normpath(name))
        file = tar.extractfile(member) if member else None  # extractfile follows links inside the archive
        return file or refuse(f"the manifest lists {name[:200]!r}, which is not in the archive")

    def read_json(name: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(open_member(name).read(MAX_JSON_BYTES), type=kind)
        except UNDECODABLE as error:
            refuse(f"{name[:200]!r} cannot be read ({error})")

    architecture = OCI_ARCHITECTURES.get(MACHINE, MACHINE)

    if "manifest.json" in index:
        saved_images = read_json("manifest.json", list[_Saved])
        if len(saved_images) != 1:
            refuse(f"the archive contains {len(saved_images)} images; save exactly one")
        config_name = saved_images[0].config
        layer_names = saved_images[0].layers
    else:
        manifest = read_json("index.json", _Manifest)
        for _ in range(3):  # a list of manifests may contain lists
            if manifest.config:
                break
            platforms = {
                descriptor.name: descriptor.platform or _Platform(architecture)
                for descriptor in manifest.manifests
            }
            matching_names = [
                name for name, platform in platforms.items() if platform.architecture == architecture
            ]
            if len(matching_names) != 1:
                refuse(
                    f"the archive contains {len(matching_names)} images for {architecture}; save exactly one"
                )
            manifest = read_json(matching_names[0], _Manifest)
        if not manifest.config:
            refuse("the archive has no manifest with a configuration")
        config_name = manifest.config.name
        layer_names = [layer.name for layer in manifest.layers]

    image_config = read_json(config_name, _Config)
    if image_config.architecture not in ("", architecture):
        refuse(f"the image is for {image_config.architecture}, but this machine is {architecture}")

    settings = image_config.config or _Settings()
    variable_pairs = (line.partition("=")[::2] for line in settings.environment or ())
    # Without PATH no program can start.
    environment = {"PATH": DEFAULT_PATH} | {name: value for name, value in variable_pairs if name}
    directory = posixpath.join("/", settings.directory or "")
    user = settings.user or ""

    if "\0" in "".join((*environment, *environment.values(), directory, user)):
        refuse("the image's settings contain a NUL character")

    directory = posixpath.normpath(directory)
    image = msgspec.structs.replace(image, environment=environment, directory=directory, user=user)
    return map(open_member, layer_names), image
