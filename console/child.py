"""Child processes that end with this one, also when this one is killed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

LOOPBACK = "127.0.0.1"

# Asks the kernel to end this process with its parent, then becomes the program. A step between, instead of code in the
# forked child, because the parent may run threads. If the parent is gone already, the signal would never come.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def dying_with_us(command: Sequence[str]) -> list[str]:
    """What to start so that ``command`` (its first word a path) ends with the thread that starts it; on Linux only."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def spawn(command: Sequence[str], log: Path, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start ``command`` (its first word a path) with its output appended to ``log``.

    On Linux it ends with this process; elsewhere only if :func:`end` is called. It has a session of its own, so that a
    Ctrl-C in the terminal reaches us first and not both at once. ``env`` None passes ours on. Raises :class:`OSError`.
    """
    words = dying_with_us(command)
    started: list[subprocess.Popen[bytes] | OSError] = []
    ready = threading.Event()

    # The kernel's promise is to the thread that started the child: this one lives as long as the child does.
    def keep() -> None:
        try:
            with log.open("ab") as out:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd, env=env, start_new_session=True
                )
        except OSError as error:
            started.append(error)
            ready.set()
            return
        started.append(process)
        ready.set()
        process.wait()

    threading.Thread(target=keep, name=f"child {Path(command[0]).name}", daemon=True).start()
    ready.wait()
    result = started[0]
    if isinstance(result, OSError):
        raise result
    return result


def end(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """SIGTERM, then SIGKILL when ``process`` is still there after ``grace_seconds`` (0: SIGKILL at once). Returns when it is gone."""
    if process.poll() is None and grace_seconds:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    if process.poll() is None:
        process.kill()
        process.wait()


def free_port() -> int:
    """A TCP port that nobody listens on at this moment, on loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether something accepts connections on this loopback port."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True


def log_tail(path: Path) -> str:
    """The last lines of a log, as half a sentence for an error message."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"its log {path} ends: {' | '.join(lines[-3:])[-500:]}" if lines else f"its log {path} is empty"
