"""The processes of a demo: ``kvcensus`` commands of their own, as in production, ended with this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from console import child
from schemas.errors import KvcensusError

_OWN_WORDS = "kvcensus: "
_TAIL_LINES = 5
_TAIL_CHARACTERS = 1_000


@dataclass(frozen=True)
class Child:
    """One process: ``name`` is what it is called in messages."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Children:
    """The processes that were started and not yet ended."""

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd
        self._running: list[Child] = []

    def start(self, name: str, arguments: Sequence[str], log: Path) -> None:
        """Run ``kvcensus`` with these arguments. Raises :class:`KvcensusError` if it cannot be started."""
        # -P: a file in the working folder must not stand in for a module.
        command = [sys.executable, "-P", "-m", "console.cli", *arguments]
        try:
            process = child.spawn(command, log, self._cwd, clean_environment())
        except OSError as error:
            raise KvcensusError(f"cannot start the {name}: {error.strerror or error}") from error
        self._running.append(Child(name, process, log))

    def check(self) -> None:
        """Raise :class:`KvcensusError` with the name and the last words of a process that has ended."""
        for one in self._running:
            if (code := one.process.poll()) is not None:
                raise KvcensusError(died(one.name, one.process.pid, code, one.log))

    def stop(self, prefix: str, grace_seconds: float) -> None:
        """End those whose name begins with ``prefix``, all at once: SIGTERM, then SIGKILL for what is left after the grace."""
        ending = [one for one in self._running if one.name.startswith(prefix)]
        for one in ending:
            with contextlib.suppress(OSError):
                one.process.terminate()
        deadline = time.monotonic() + grace_seconds
        for one in ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, deadline - time.monotonic()))
        for one in ending:
            child.end(one.process, 0)
            self._running.remove(one)

    def kill(self) -> None:
        """Send SIGKILL to all of them, and wait for none: may be called from a signal handler."""
        for one in self._running:
            with contextlib.suppress(OSError):
                one.process.kill()


def clean_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without our own variables: a demo has nothing to do with the Kafka and ClickHouse they name."""
    env = os.environ if environ is None else environ
    return {name: value for name, value in env.items() if not name.startswith("KVCENSUS_")}


def died(name: str, pid: int, code: int | None, log: Path) -> str:
    """One line about a process that ended and should not have. ``code`` None: how it ended is not known."""
    how = "has ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    if lines and lines[-1].startswith(_OWN_WORDS):  # it said itself why: what libraries logged while it stopped says nothing more
        lines = [lines[-1].removeprefix(_OWN_WORDS)]
    tail = " | ".join(line.strip() for line in lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]
    return f"the {name} (process {pid}) {how}; " + (f"its log {log} ends: {tail}" if tail else f"its log {log} is empty")
