"""The sink as a service beside the Faust app."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from mode import Service

from streams.rollup_job import sink_with_rollups
from streams.settings import WorkerSettings

log = logging.getLogger("kvcensus.sink")

_STOP_SECONDS = 6.0


class SinkService(Service):
    """The sink beside the Faust app, in a thread of its own."""

    def __init__(self, settings: WorkerSettings, failed: Callable[[BaseException], None]) -> None:
        super().__init__()
        self.sink = sink_with_rollups(settings)
        self._failed = failed
        self._thread: threading.Thread | None = None

    async def on_start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvcensus-sink", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.sink.run()
        except BaseException as error:
            self._failed(error)

    async def on_stop(self) -> None:
        """End the thread; it gets some seconds to insert what it has."""
        self.sink.stop()
        if self._thread is not None:
            await self.loop.run_in_executor(None, self._thread.join, _STOP_SECONDS)
            if self._thread.is_alive():
                log.warning("the sink did not end within %.0f s; what it had is read again by the next worker", _STOP_SECONDS)
