"""Texts in several languages: the Debian handbook, which its Debian package contains in twenty-six languages."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated

import typer


class _Paragraphs(HTMLParser):
    """Texts of the elements ``<div class="para">``, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._depth = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "div":
            return
        if self._depth:
            self._depth += 1
        elif ("class", "para") in attrs:
            self._depth = 1
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._depth and tag == "div":
            self._depth -= 1

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.texts[-1] += data


def handbook(
    out: Annotated[Path, typer.Argument(help="Folder of the texts.")],
    pages: Annotated[list[Path], typer.Argument(help="Folders of HTML, each named after its language.")],
) -> None:
    """Write each language's sections alternately to OUT/LANGUAGE.train.jsonl and OUT/LANGUAGE.test.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in pages:
        sections = [_text(page) for page in sorted(folder.glob("sect.*.html"))]
        for part, rows in (("train", sections[::2]), ("test", sections[1::2])):
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in rows)
            (out / f"{folder.name}.{part}.jsonl").write_text("".join(lines), encoding="utf-8")


def _text(page: Path) -> str:
    """Return the paragraphs of a page, one per line."""
    paragraphs = _Paragraphs(page.read_text(encoding="utf-8")).texts
    return "\n".join(" ".join(each.split()) for each in paragraphs if each.strip())


if __name__ == "__main__":
    typer.run(handbook)
