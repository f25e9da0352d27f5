"""Where a demo keeps its files, so that no other file is ever touched.

Everything is in ``DATA_DIR/demo``, which the demo makes, marks as its own, and empties at its next start. While it runs,
``DATA_DIR/broker.json`` and ``DATA_DIR/store.json`` point there, which is how other commands find it with no option given.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from console.broker import POINTER, running_broker
from schemas.errors import KvcensusError
from sql.embedded import holder_of
from sql.loopback import STORE_FILE, live_owner
from sql.store import store_folder

NAME = "demo"
MARK = "made-by-kvcensus-demo"
"""Empty file that says whose the folder is."""

LOGS = "logs"

_LOCK = "lock"
_OURS = ("broker.json", "broker.log", "clickhouse", LOGS, "noida", "store.json", "tansu", "worker")
"""What a demo and its children make there; a new demo removes these, and nothing else."""

_OLD_CHILDREN_SECONDS = 10.0


class DemoFolder:
    """The folder of one running demo: locked, and empty but for what it makes itself. A context manager.

    Raises :class:`KvcensusError` when a demo, a broker or a store owner already runs on ``data_dir``, and when what lies at
    ``DATA_DIR/demo`` was not made by a demo.
    """

    def __init__(self, data_dir: Path) -> None:
        # Children run elsewhere, so every path they are given has to be absolute.
        self.data_dir = data_dir.absolute()
        self.path = self.data_dir / NAME
        self.logs = self.path / LOGS
        self._lock: int | None = None
        self._pointers: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        try:
            self._take()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pointer, content in self._pointers.items():
            if _read(pointer) == content:
                pointer.unlink(missing_ok=True)
        self._release()

    def log(self, name: str) -> Path:
        """Log file of the child ``name``."""
        return self.logs / f"{name.replace('/', '-')}.log"

    def point_to_broker(self) -> None:
        """Let other commands find the broker that runs in the demo's folder."""
        self._point(POINTER)

    def point_to_store(self) -> None:
        """Let other commands find the owner of the demo's store."""
        self._point(STORE_FILE)

    def _take(self) -> None:
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(exist_ok=True)
            if any(self.path.iterdir()) and not (self.path / MARK).exists():
                raise KvcensusError(f"{self.path} was not made by a demo: move it away, or use another --data-dir")
            (self.path / MARK).touch()
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise KvcensusError(
                f"cannot use the data folder {self.data_dir}: {error.strerror or error}; name another with --data-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            raise KvcensusError(
                f"a demo is already running on {self.data_dir} (process {pid or 'unknown'}): see its figures with `kvcensus show`, end it, "
                "or use another --data-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self._await_old_children()
        if (servers := running_broker(self.data_dir)) is not None:
            raise KvcensusError(f"a broker is already running on {servers} for {self.data_dir}: use another --data-dir for the demo")
        if (owner := live_owner(self.data_dir)) is not None:
            raise KvcensusError(
                f"process {owner.pid} already answers for the store of {self.data_dir}: use another --data-dir for the demo"
            )
        self._empty()

    def _await_old_children(self) -> None:
        """Children of a demo that was killed end with it, but the store's folder is free only a moment later."""
        deadline = time.monotonic() + _OLD_CHILDREN_SECONDS
        while (pid := holder_of(store_folder(self.path))) is not None or running_broker(self.path) is not None:
            if time.monotonic() > deadline:
                who = f"process {pid}" if pid else "a process"
                raise KvcensusError(f"{who} of an earlier demo still runs on {self.path}: end it, or use another --data-dir")
            time.sleep(0.1)

    def _empty(self) -> None:
        try:
            for name in _OURS:
                old = self.path / name
                if old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
                else:
                    old.unlink(missing_ok=True)
            self.logs.mkdir()
        except OSError as error:
            raise KvcensusError(f"cannot clear what an earlier demo left in {self.path}: {error.strerror or error}") from error

    def _point(self, name: str) -> None:
        pointer = self.data_dir / name
        content = _read(self.path / name)
        draft = self.data_dir / f".{name}.{os.getpid()}"
        # As private as the file it points to: the store's holds a token.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
        draft.replace(pointer)
        self._pointers[pointer] = content

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _read(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None
