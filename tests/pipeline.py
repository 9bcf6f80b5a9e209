"""Stages run in this process, in the current folder."""

import importlib
from typing import Any

import typer

COMPRESSION = ("reorder", "allocate", "factorize", "calibrate", "fuse")
"""What follows the statistics, up to the compressed checkpoint."""


def invoke(stage: str, **arguments: Any) -> int:
    """Run a stage with the defaults of its options; returns the exit code."""
    try:
        getattr(importlib.import_module(f"stages.{stage}"), stage)(**arguments)
    except typer.Exit as stop:
        return stop.exit_code
    return 0
