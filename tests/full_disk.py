"""A disk that runs full when a test says so."""

from __future__ import annotations

import errno
import os


class Disk:
    """``os.write`` on a disk with ``room`` bytes left (None: plenty); the last one that fits is written in part."""

    def __init__(self) -> None:
        self.room: int | None = None
        self._write = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        """As ``os.write``."""
        if self.room is None:
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self._write(descriptor, data[: self.room])
        self.room -= done
        return done
