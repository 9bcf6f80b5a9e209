"""Text that tokenizers take: scraped text and foreign encodings may hold what is no Unicode."""

import re
import sys

_LONE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def well_formed(text: str) -> tuple[str, int]:
    """The text with lone surrogates replaced by U+FFFD, and how many there were."""
    return _LONE.subn(REPLACEMENT, text)


def read_standard_input(line: bool = False) -> str:
    """All of standard input, or a line of it; bytes that are not of its encoding become U+FFFD, and are counted."""
    if hasattr(sys.stdin, "reconfigure") and sys.stdin.errors != "replace":
        sys.stdin.reconfigure(errors="replace")
    text = input("> " if sys.stdin.isatty() else "") if line else sys.stdin.read()
    text, _ = well_formed(text)
    if count := text.count(REPLACEMENT):
        print(f"recalkv: {count} characters of the input are not {sys.stdin.encoding}; read as U+FFFD", file=sys.stderr)
    return text
