"""A sink that is killed between an insert and its commit: ``python -m tests.faults.mortal_sink COUNT ROWS worker --sink-only …``.

It is ``kvcensus worker`` in every respect, but that it gathers ROWS rows a delivery, and that the process sends itself SIGKILL when the
rows of the COUNTth delivery are in the store and their offsets are not committed.
"""

from __future__ import annotations

import os
import signal
import sys

from console.cli import main
from streams import sink

if __name__ == "__main__":
    deliveries, sink.MAX_ROWS = int(sys.argv[1]), int(sys.argv[2])
    commit = sink.Sink._commit

    def die_at_last(self: sink.Sink) -> None:
        if self._deliveries >= deliveries:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self)

    sink.Sink._commit = die_at_last  # type: ignore[method-assign]
    del sys.argv[1:3]
    main()
