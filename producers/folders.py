"""Files and folders on disk: how an instance's is called, writing whole, and names that are to outlive a crash of the machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import quote

_LONGEST_NAME = 200


def folder_name(instance_id: str, plain: str) -> str:
    """The name of an instance's folder: percent-encoded but for ``plain``, not hidden, and no longer than a file system takes."""
    name = quote(instance_id, safe=plain)
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > _LONGEST_NAME:
        digest = hashlib.blake2b(instance_id.encode(), digest_size=8).hexdigest()
        name = f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}"
    return name


def sync_folder(folder: Path) -> None:
    """Make names that were added, changed or removed last durable. Raises :class:`OSError`, also where the file system cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``; raises :class:`OSError`, and then part of it may be there."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
