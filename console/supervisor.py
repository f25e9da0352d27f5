"""Several processes kept running as one: started again when they die, stopped together, their lines told apart."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import IO

from console.child import dying_with_us

USAGE = 2
"""Exit code of a process that was told something impossible: it would end the same way again."""

FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
STEADY_SECONDS = 60.0

_MOST_OUTPUT = 1 << 20
_LONGEST_LINE = 1 << 16
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Backoff:
    """How long to wait before a process is started again: 0.5 s, doubling to 30 s; from 0.5 s again after a minute of life."""

    def __init__(self) -> None:
        self._delay = FIRST_DELAY

    def after(self, lived: float) -> float:
        """Seconds to wait now that the process has ended after ``lived`` seconds."""
        if lived >= STEADY_SECONDS:
            self._delay = FIRST_DELAY
        delay = self._delay
        self._delay = min(2 * delay, LONGEST_DELAY)
        return delay


@dataclass(frozen=True)
class Job:
    """A process to keep running: ``name`` stands before its lines; the first word of ``command`` is a path.

    ``descriptors`` are open files of ours that it inherits under their numbers.
    """

    name: str
    command: tuple[str, ...]
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a job ended: exit code of its last run (negative: the signal that killed it; None: it never ran), and what that run printed."""

    name: str
    code: int | None
    restarts: int
    output: bytes


@dataclass(frozen=True)
class Result:
    """How all jobs ended. ``killed``: a second signal came and nothing was waited for."""

    jobs: list[Ended]
    killed: bool

    @property
    def code(self) -> int:
        """The exit code that stands for all: 0 only if each is 0; 2 if one was 2; 130 if they were killed."""
        codes = [job.code for job in self.jobs]
        if USAGE in codes:
            return USAGE
        if self.killed:
            return 130
        return 1 if any(codes) or None in codes else 0


@dataclass
class _Slot:
    """Where one job is: running (``child``), waiting to be started (``due``, monotonic), or at its end (neither)."""

    job: Job
    due: float | None = 0.0
    child: _Child | None = None
    code: int | None = None
    starts: int = 0
    output: bytes = b""
    backoff: Backoff = field(default_factory=Backoff)


class _Child:
    """One run of a job, on a thread of its own: on Linux the process ends with the thread that started it, so with us."""

    def __init__(self, slot: _Slot, say: Callable[[str], None], ended: Callable[[_Child], None]) -> None:
        self.slot = slot
        self.code = 1
        self.output = bytearray()
        self.began = self.until = time.monotonic()
        self._say = say
        self._ended = ended
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._keep, name=f"child {slot.job.name}", daemon=True).start()
        self._started.wait()

    def send(self, number: signal.Signals) -> None:
        """Signal the process; nothing happens if it has ended."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.send_signal(number)

    def _keep(self) -> None:
        try:
            # A child that was just started has no handlers yet: what we forward then waits until it has (it unblocks them).
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
            self._process = subprocess.Popen(
                dying_with_us(self.slot.job.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=self.slot.job.descriptors,
            )
        except OSError as error:
            self._say(f"cannot be started: {error.strerror or error}")
        finally:
            self._started.set()
        if self._process is not None:
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            collect = threading.Thread(target=self._collect, args=(self._process.stdout,), daemon=True)
            collect.start()
            for line in _lines(self._process.stderr):
                self._say(line)
            collect.join()
            self.code = self._process.wait()
        self.until = time.monotonic()
        self._ended(self)

    def _collect(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := pipe.read(1 << 12):
                self.output += data[: _MOST_OUTPUT - len(self.output)]


def _lines(pipe: IO[bytes]) -> Iterator[str]:
    with pipe:
        while line := pipe.readline(_LONGEST_LINE):
            yield line.decode(errors="replace").rstrip("\r\n")


class _Supervision:
    """The state of it all, changed by the main thread alone; children and signals speak to it through a queue."""

    def __init__(self, jobs: Sequence[Job], say: Callable[[str], None]) -> None:
        self._slots = [_Slot(job) for job in jobs]
        self._say = say
        # A SimpleQueue: the one that a signal handler may put into.
        self._events: queue.SimpleQueue[_Child | signal.Signals] = queue.SimpleQueue()
        self._stopping = False
        self._killed = False

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self._events.put(signal.Signals(number))

    def run(self) -> Result:
        while True:
            self._start_due()
            due = [slot.due for slot in self._slots if slot.due is not None]
            if not due and not any(slot.child for slot in self._slots):
                break
            try:
                event = self._events.get(timeout=max(0.0, min(due) - time.monotonic()) if due else None)
            except queue.Empty:
                continue
            if isinstance(event, signal.Signals):
                self._on_signal()
            else:
                self._on_end(event)
        return Result([Ended(slot.job.name, slot.code, max(0, slot.starts - 1), slot.output) for slot in self._slots], self._killed)

    def _start_due(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.due is not None and slot.due <= now:
                slot.due = None
                slot.starts += 1
                slot.child = _Child(slot, partial(self._say_for, slot.job.name), self._events.put)

    def _say_for(self, name: str, line: str) -> None:
        self._say(f"{name}: {line}")

    def _on_signal(self) -> None:
        if self._stopping:
            self._killed = True
            self._send_all(signal.SIGKILL)
            return
        self._say("stopping all; once more to leave at once")
        self._stop()

    def _on_end(self, child: _Child) -> None:
        slot = child.slot
        slot.child, slot.code, slot.output = None, child.code, bytes(child.output)
        how = f"was killed by signal {-child.code}" if child.code < 0 else f"ended with code {child.code}"
        if child.code == USAGE and not self._stopping:
            self._say(f"{slot.job.name}: {how}, and would again: stopping all")
            self._stop()
        elif child.code != 0 and not self._stopping:
            delay = slot.backoff.after(child.until - child.began)
            slot.due = time.monotonic() + delay
            self._say(f"{slot.job.name}: {how}; starting it again in {delay:g} s")

    def _stop(self) -> None:
        self._stopping = True
        for slot in self._slots:
            slot.due = None
        self._send_all(signal.SIGTERM)

    def _send_all(self, number: signal.Signals) -> None:
        for slot in self._slots:
            if slot.child is not None:
                slot.child.send(number)


def supervise(jobs: Sequence[Job], say: Callable[[str], None]) -> Result:
    """Keep ``jobs`` running until each has ended with 0, one with 2, or SIGINT or SIGTERM came.

    A job that ends otherwise is started again (:class:`Backoff`). A first signal is passed on to all once, as SIGTERM, and what
    they still do is waited for; a second one kills them. They end with this process, also when it is killed (on Linux). Their
    standard error comes line by line to ``say``, which may be called from several threads at once. For the main thread only.
    """
    supervision = _Supervision(jobs, say)
    with _handled(supervision.signalled):
        return supervision.run()


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _STOP_SIGNALS}
    # Should we be supervised ourselves: the one who does it may have held these back until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
