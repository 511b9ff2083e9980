"""Relative links of the documentation lead to files that are there, and to headings that these have."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "docker", "examples") for path in (ROOT / folder).rglob("*.md")),
]
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)|<(?:img|a)[^>]* (?:src|href)=\"([^\"]+)\"")


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them: lower case, words joined by `-`, repeated ones numbered."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.M | re.S)
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.M):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(page: Path) -> list[str]:
    """Links of a page without a target."""
    wrong = []
    for link in (a or b for a, b in LINK.findall(CODE.sub("", page.read_text()))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    assert not broken(page)


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: three\n# One two three\n[a](#one-two-three) [b](#one-two-three-1) [c](#one)\n"
        "[d](missing.md) [e](https://example.org/x) `[f](missing.md)`\n"
    )
    assert broken(page) == ["#one", "missing.md"]


def test_every_page_is_in_the_navigation() -> None:
    """Of the site: `make site` fails otherwise."""
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in nav]
