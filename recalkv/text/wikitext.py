"""Extract prose from Wikipedia markup, for the embedded articles."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from recalkv.errors import needing

# Templates used inside sentences, and which of their arguments are visible.
_INLINE_TEMPLATES: dict[str, Sequence[int]] = {"convert": (1, 2), "cvt": (1, 2), "lang": (2,), "transl": (2,)}
_INLINE_TEMPLATES |= dict.fromkeys(["angbr", "nihongo", "nowrap", "quote", "small", "smaller", "vanchor"], (1,))
_HIDDEN_TAGS = {"ref", "references", "table", "gallery", "timeline", "imagemap", "score", "style", "script"}
_HIDDEN_LINK = re.compile(r"\s*(?:file|image|category|media|[a-z]{2,3}(?:-[a-z]+)*)\s*:", re.IGNORECASE)
_HIDDEN_SECTIONS = {"see also", "references", "external links", "further reading", "notes", "footnotes"}
_HIDDEN_SECTIONS |= {"citations", "sources", "bibliography", "notes and references", "references and notes"}
_LEFTOVERS = re.compile(r"'{2,}|\[\[|\]\]|\{\{|\}\}|__[A-Z]+__|</?[a-zA-Z][^<>]*>|\[?https?://\S+")
_MARKUP_LINE = re.compile(r"\{\||[|!]|(?:File|Image):")
# Remains of hidden templates: stray punctuation, empty brackets, extra spaces.
_HOLES = re.compile(r" ?\([\s,;]*\)|(?<=\()[\s,;]+|\s*[,;](?=\s*[,;)])| +(?=[,.;:)](?:\s|$))")


def prose(wikitext: str) -> str:
    """Return the prose and headings of an article, one paragraph, heading or list item per line."""
    with needing("pipeline"):
        import mwparserfromhell

    lines: list[str] = []
    headings: list[tuple[int, str]] = []  # levels and titles not yet in `lines`: dropped if no text follows
    hidden = 0  # level of the hidden section around the line, 0 outside
    for line in _render(mwparserfromhell.parse(wikitext)).split("\n"):
        level = len(line) - len(line.lstrip("\0"))
        text = _tidy(line[level:])
        if level and (not hidden or level <= hidden):
            hidden = level if text.lower() in _HIDDEN_SECTIONS else 0
            headings = [heading for heading in headings if heading[0] < level] + [(level, text)]
        elif text and not level and not hidden:
            lines += ["", *(title for _, title in headings), text] if headings else [text]
            headings = []
    return "\n".join(lines).strip()


def _render(code: Any) -> str:
    """Render visible text bottom-up; headings become lines that start with one NUL per level."""
    return "".join(_RENDERERS.get(type(node).__name__, str)(node) for node in code.nodes) if code else ""


def _tag(node: Any) -> str:
    name = str(node.tag).strip().lower()
    if name == "math":  # keep LaTeX; the spaces separate double braces, which would be removed as broken templates
        return re.sub(r"(?<=[{}])(?=[{}])", " ", " ".join(str(node.contents).split()))
    contents = "" if name in _HIDDEN_TAGS else _render(node.contents)
    return f"\n{contents}\n" if name in ("br", "p", "div", "blockquote") else contents


def _template(node: Any) -> str:
    shown = _INLINE_TEMPLATES.get(str(node.name).strip().lower(), ())
    if shown == (1, 2) and node.has(4) and re.match(r"(to|by|and|-|\u2013)(?!\w)", str(node.get(2).value)):
        shown = (1, 2, 3, 4)  # a range: {{convert|10|to|30|km}}
    return " ".join(_render(node.get(index).value).strip() for index in shown if node.has(index))


_RENDERERS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("Argument", "Comment"), lambda node: ""),
    "ExternalLink": lambda node: _render(node.title),
    "HTMLEntity": lambda node: node.normalize(),
    "Heading": lambda node: "\n" + "\0" * node.level + _render(node.title).replace("\n", " ") + "\n",
    "Tag": _tag,
    "Template": _template,
    "Wikilink": lambda node: "" if _HIDDEN_LINK.match(str(node.title)) else _render(node.text or node.title),
}


def _tidy(line: str) -> str:
    line = _HOLES.sub("", " ".join(_LEFTOVERS.sub("", line).lstrip(" :;*#").split()))
    return "" if _MARKUP_LINE.match(line) or not any(map(str.isalnum, line)) else line
