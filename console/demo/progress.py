"""What the demo says on standard error while it starts and ends: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status


class Progress:
    """One step after the other. A context manager; what it prints is on standard error only."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._status: Status | None = None
        self._began = time.monotonic()
        self._doing = ""

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.quiet()

    def quiet(self) -> None:
        """End the spinner: from here on the screen belongs to somebody else."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def doing(self, what: str) -> None:
        """What is going on now; shown only on a terminal."""
        if self._status is not None and what != self._doing:
            self._doing = what
            self._status.update(what)

    def done(self, what: str) -> None:
        """Something that is done, with the time since the start."""
        self._console.print(f"[{time.monotonic() - self._began:5.1f} s] {what}")

    def say(self, what: str) -> None:
        """A line of its own."""
        self._console.print(what)
