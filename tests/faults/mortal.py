"""A worker that is killed at a chosen moment: ``python -m tests.faults.mortal MOMENT:COUNT worker …``.

It is ``kvcensus worker`` in every respect, but that at the COUNTth time of MOMENT the process sends itself SIGKILL: no cleaning up, no
last flush, whatever is in buffers is gone. Moments:

* ``read``: a message was counted, by any agent;
* ``sent``: a result was handed to the producer;
* ``given``: what was sent has been acknowledged, and nothing else was done since;
* ``chunks``: part of what is written to the state topic is on its way (a snapshot is half written);
* ``written``: the state topic has acknowledged it (between a snapshot, its manifest and the deletions);
* ``committed``: the positions were committed;
* ``restored``: the state of the partitions that came here was read.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from console.cli import main
from streams.agents.common import Agent
from streams.emit import Outbox
from streams.snapshots import Snapshots
from streams.state_topic import StateTopic


class Fate:
    """Ends the process at the ``count``-th :meth:`met`."""

    def __init__(self, count: int) -> None:
        self._left = count

    def met(self) -> None:
        """One more time."""
        self._left -= 1
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _after(owner: type, name: str, fate: Fate) -> None:
    plain: Callable[..., Any] = getattr(owner, name)

    def method(*arguments: Any, **named: Any) -> Any:
        result = plain(*arguments, **named)
        fate.met()
        return result

    setattr(owner, name, method)


def _after_awaiting(owner: type, name: str, fate: Fate) -> None:
    plain: Callable[..., Any] = getattr(owner, name)

    async def method(*arguments: Any, **named: Any) -> Any:
        result = await plain(*arguments, **named)
        fate.met()
        return result

    setattr(owner, name, method)


def _within_write(fate: Fate) -> None:
    plain = StateTopic.write

    def write(self: StateTopic, partition: int, pairs: Any) -> list[int]:
        half = len(pairs) // 2
        before = plain(self, partition, pairs[:half]) if half else []
        fate.met()
        return before + plain(self, partition, pairs[half:])

    setattr(StateTopic, "write", write)  # noqa: B010 - mypy refuses the plain assignment


def doom(moment: str, count: int) -> None:
    """Have this process end at the ``count``-th ``moment``."""
    fate = Fate(count)
    if moment == "read":
        _after(Agent, "_read", fate)
    elif moment == "chunks":
        _within_write(fate)
    elif moment in ("written", "committed"):
        _after(StateTopic, {"written": "write", "committed": "commit"}[moment], fate)
    elif moment in ("sent", "given"):
        _after_awaiting(Outbox, {"sent": "send", "given": "settle"}[moment], fate)
    elif moment == "restored":
        _after_awaiting(Snapshots, "restore", fate)
    else:
        raise SystemExit(f"no such moment: {moment}")


if __name__ == "__main__":
    when, _, times = sys.argv[1].partition(":")
    doom(when, int(times))
    sys.argv = ["kvcensus", *sys.argv[2:]]
    main()
