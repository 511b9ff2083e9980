"""`asyncrl image import | list | remove`: root file systems for sandboxes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.commands import command_parser
from asyncrl.errors import ConfigError
from asyncrl.isolation.images import find_image, list_images
from asyncrl.isolation.importing import import_image, remove_image
from asyncrl.isolation.unpacking import Bounds

HELP = """\
Manage the root file systems that sandboxes start from. Nothing is downloaded, and no Dockerfile is built.

  asyncrl image import debian.tar                  a root file system, or the output of `docker save`
                                                   or `skopeo copy … oci-archive:FILE`, as "debian"
  asyncrl image import DIR --name task --over debian     only the files that differ
  docker save IMAGE | asyncrl image import - --name NAME
  asyncrl image list
  asyncrl image remove NAME
"""


def main(argv: list[str]) -> int:
    parser = command_parser("image", HELP, run_dir_help="")
    parser.add_argument("action", choices=("import", "list", "remove"))
    parser.add_argument(
        "source",
        nargs="?",
        default="",
        metavar="FILE|DIR|-|NAME",
        help="file or directory to import, or image to remove",
    )
    parser.add_argument("--name", default="", help="import: name of the image (default: name of the file)")
    parser.add_argument(
        "--over", default="", metavar="IMAGE", help="import: base image to layer the imported files on"
    )

    for bound in msgspec.structs.fields(Bounds):
        (unit,) = bound.type.__metadata__
        text = f"import: allow at most N {unit.description} (default: {bound.default})"
        parser.add_argument(f"--{bound.name}", type=int, default=bound.default, metavar="N", help=text)
    options = parser.parse_intermixed_args(argv)

    if options.action == "list":
        for digest, names in list_images().items():
            print(_image_line(digest, names))
        return 0

    if not options.source:
        parser.error(f"{options.action} needs a FILE, DIR or - to import, or a NAME to remove")

    if options.action == "remove":
        is_removed = remove_image(options.source)
        print(f"{options.source} was removed{'' if is_removed else '; the image still has other names'}")
        return 0

    bounds = Bounds(**{name: getattr(options, name) for name in Bounds.__struct_fields__})
    name = options.name or Path(options.source).name.split(".")[0]
    image = import_image(options.source, "" if name == "-" else name, options.over, bounds)
    print(_image_line(image.digest, [name]))
    return 0


def _image_line(digest: str, names: list[str]) -> str:
    try:
        image = find_image(digest)
    except ConfigError as error:
        return str(error)
    base_text = f"  over {Path(image.over[0]).parent.name[:19]}" if image.over else ""
    name = " ".join(names) or "–"
    return f"{name:<24} {digest}  {image.files:>7} files {image.size / 2**20:>8.1f} MiB{base_text}"
