"""One process at a time in a folder: a lock that the system lets go of when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from schemas.errors import KvcensusError

LOCK_NAME = "lock"


class FolderLock:
    """Holds ``folder`` (made with mode 0700 if it is missing) for ``purpose``, "spool" say, until it is closed.

    Raises :class:`KvcensusError` if another process holds it, named by its process id, or the folder cannot be used.
    """

    def __init__(self, folder: Path, purpose: str) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if all(path.name == LOCK_NAME for path in folder.iterdir()):
                folder.chmod(0o700)  # made for us by somebody else, perhaps; one with other things in it is left as it is
            self._descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise KvcensusError(f"the {purpose} folder {folder} cannot be used: {error.strerror or error}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise KvcensusError(
                f"another forwarder uses the {purpose} folder {folder} (process {holder}): each needs one of its own"
            ) from error
        except OSError as error:
            os.close(self._descriptor)
            raise KvcensusError(f"the {purpose} folder {folder} cannot be locked: {error.strerror or error}") from error
        with suppress(OSError):  # who holds it is only for people to read
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
