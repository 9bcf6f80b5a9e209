"""Valid Unicode for tokenizers: scraped text and foreign encodings may contain invalid characters."""

import re
import sys

_LONE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def well_formed(text: str) -> tuple[str, int]:
    """Replace lone surrogates by U+FFFD; return the text and the number of replacements."""
    return _LONE.subn(REPLACEMENT, text)


def read_standard_input(line: bool = False) -> str:
    """Read standard input, or one line; replace undecodable bytes by U+FFFD, and report their number on stderr."""
    if hasattr(sys.stdin, "reconfigure") and sys.stdin.errors != "replace":
        sys.stdin.reconfigure(errors="replace")
    text = input("> " if sys.stdin.isatty() else "") if line else sys.stdin.read()
    text, _ = well_formed(text)
    if count := text.count(REPLACEMENT):
        print(f"recalkv: {count} characters of the input are not {sys.stdin.encoding}; read as U+FFFD", file=sys.stderr)
    return text
