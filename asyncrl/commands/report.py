"""`asyncrl report [RUN…]`: one self-contained HTML file about a run, or several, and the same as Markdown."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from asyncrl.commands.arguments import command_parser, find_run
from asyncrl.config import leaves, parse, without_defaults
from asyncrl.errors import ConfigError
from asyncrl.store.launches import differences, launches_of

CELL = 300  # characters; a chat template is longer
HELP = """\
Write a report: results, curves, configuration, transcripts before and after, flow, lag, time and machine.

  asyncrl report                       of the newest run, as runs/NAME/report.html and report.md
  asyncrl report a b --out ab.html     two runs side by side, as ab.html and ab.md

The HTML file needs no other file and no network. The Markdown shows the .png beside it.
"""


def main(argv: list[str]) -> int:
    """Parse the arguments, write the files, and print their paths."""
    parser = command_parser("report", HELP)
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="names of runs, or directories; else the newest"
    )
    parser.add_argument("--out", type=Path, help="report.html in the directory of the first run by default")
    options = parser.parse_intermixed_args(argv)
    found = [find_run(options.run_dir, name) for name in options.runs or [""]]
    page: Path = options.out or found[0] / "report.html"
    if page.suffix != ".html":
        raise ConfigError(f"--out {page}: give a name that ends with .html; .md and .png go beside it")
    from asyncrl.observe.document import Picture, as_html, as_markdown
    from asyncrl.observe.report import RunFiles, report

    names = [path.resolve().name for path in found]
    if len(set(names)) < len(names):
        names = [str(path) for path in dict.fromkeys(found)]  # of one name, in several directories
    paths = dict.fromkeys(found)
    runs = [*map(RunFiles.read, paths, names, map(_configuration, paths))]
    blocks = report(runs, page.with_suffix(".png").name)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(as_html(", ".join(names), blocks), "utf-8", "replace")
    page.with_suffix(".md").write_text(as_markdown(blocks), "utf-8", "replace")
    for block in blocks:
        if isinstance(block, Picture):
            page.with_name(block.name).write_bytes(block.png)
    print(page, page.with_suffix(".md"), sep="\n")
    return 0 if all(run.summary["conserved"] for run in runs) else 1


def _configuration(run_dir: Path) -> dict[str, str]:
    """What differs from the defaults now, and what each later launch has changed."""
    try:
        launches = launches_of(run_dir)
        found = dict(leaves(without_defaults(parse(launches[-1].config))))
        for before, launch in pairwise(launches):
            for key, values in differences([before.config, launch.config]).items():
                found[f"{key}, from step {launch.step + 1}"] = " → ".join(map(str, values))
    except ConfigError as error:
        return {"config.yaml": f"cannot be read by this version ({error})"}
    texts = {key: str(value) for key, value in found.items()}
    return {key: f"{t[:CELL]}… ({len(t)} characters)" if len(t) > CELL else t for key, t in texts.items()}
