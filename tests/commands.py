"""Run the `recalkv` command in this process."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from recalkv.cli import app


def run(*arguments: Any, **options: Any) -> Result:
    """Run a command, whatever its result."""
    return CliRunner().invoke(app, list(map(str, arguments)), **options)


def done(*arguments: Any, **options: Any) -> str:
    """Return the output of a command, which must succeed."""
    result = run(*arguments, **options)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: Any, **options: Any) -> str:
    """Return the output of a command, which must end with an error."""
    result = run(*arguments, **options)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    return result.output


def everything(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
