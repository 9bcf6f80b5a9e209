"""``python -m recalkv``, the command."""

from recalkv.cli import app

app()
