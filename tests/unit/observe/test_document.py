"""Nothing in a text can become a part of the page."""

from __future__ import annotations

from html.parser import HTMLParser

from asyncrl.observe.document import Block, Grid, Heading, Paragraph, Picture, Texts, as_html, as_markdown

EVIL = "</pre><script src=http://x.example/a.js></script>\"'><img src=x onerror=y> & `a` |b| $c$\n```\n# d"
BLOCKS: list[Block] = [
    Heading(EVIL),
    Paragraph(EVIL),
    Grid([EVIL, "b"], [["1", EVIL]]),
    Picture("a b.png", b"\x89PNG", EVIL),
    Texts(EVIL, [(EVIL, EVIL), ("c", "d")]),
]


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html_has_the_text_as_text_and_asks_nobody_for_anything() -> None:
    reader = Reader()
    reader.feed(as_html(EVIL, BLOCKS))
    names = [tag for tag, _ in reader.tags]
    assert "script" not in names and names.count("img") == 1 and names.count("pre") == 2
    links = [value for _, found in reader.tags for key, value in found.items() if key in ("src", "href")]
    assert links == ["data:image/png;base64,iVBORw=="]
    assert all(not key.startswith("on") for _, found in reader.tags for key in found)
    # title, heading, paragraph, two cells, and of the texts summary, caption and text
    assert reader.texts.count(EVIL) == 8
    (policy,) = (found for _, found in reader.tags if found.get("http-equiv"))
    assert str(policy["content"]).startswith("default-src 'none';")


def test_markdown_keeps_tables_and_fences_whole() -> None:
    lines = as_markdown(BLOCKS).splitlines()
    table = [line for line in lines if line.startswith("| ")]
    columns = [line.replace("\\\\", "").replace("\\|", "").count("|") - 1 for line in table]
    assert columns == [2, 2, 2]
    fences = [at for at, line in enumerate(lines) if line.startswith("````")]
    assert lines[fences[0] + 1 : fences[1]] == EVIL.splitlines()  # its own fence of three does not end it
    assert "![" in "\n".join(lines) and "(<a b.png>)" in "\n".join(lines)
    outside = lines[: fences[0]]
    assert not any("<script" in line.replace("\\<", "") for line in outside)
