"""Packages that a bare image lacks, unpacked from wheels in the tree."""

import importlib.metadata
import zipfile
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename


def unpack_missing(wheels: Path, target: Path) -> list[str]:
    """Unpack the wheels that fit this Python and whose package is not installed; return ``name version`` of each.

    A wheel is an archive of files for the search path, so no installer is needed.
    """
    fitting, found = set(sys_tags()), []
    for wheel in sorted(wheels.glob("*.whl")):
        name, version, _, tags = parse_wheel_filename(wheel.name)
        if tags & fitting and not _installed(name):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            found.append(f"{name} {version}")
    return found


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
