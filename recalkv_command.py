"""The command ``recalkv``. Its help does not wait for torch: whoever imports `recalkv` else has all of it at once."""


def main() -> None:
    """Run the command."""
    from recalkv.cli import app

    app()
