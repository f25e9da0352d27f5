"""Running a worker in the foreground until it is told to stop: SIGTERM and Ctrl-C end it cleanly, within seconds."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading

from schemas.errors import KvcensusError
from streams.pipeline import CensusApp
from streams.rollup_job import sink_with_rollups
from streams.settings import WorkerSettings
from streams.startup import find_layout

log = logging.getLogger("kvcensus.worker")

STOP_SECONDS = 8.0
"""A worker that has not stopped by itself after this long (a broker that is away, say) is ended; nothing is lost by it."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_worker(settings: WorkerSettings) -> None:
    """Count, and unless the settings say otherwise write to ClickHouse, until a signal comes.

    Raises :class:`KvcensusError` if the worker cannot start or cannot go on.
    """
    layout = find_layout(settings)
    app = CensusApp(settings)
    app.layout = layout
    if app.sink is not None:
        app.sink.sink.prepare()
    asyncio.run(_serve(app))
    if app.failure is not None:
        raise _as_line(app.failure)


def _as_line(failure: BaseException) -> KvcensusError:
    return failure if isinstance(failure, KvcensusError) else KvcensusError(f"the worker stopped: {failure!r}")


async def _serve(app: CensusApp) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, told.set)
    starting = asyncio.ensure_future(app.start())
    ended = [asyncio.ensure_future(wait) for wait in (told.wait(), app.failing.wait(), _until_it_ends(app, starting))]
    await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
    ended[-1].cancel()  # from here on it ends because it was told to
    deadline = _end_after(STOP_SECONDS, app)
    if told.is_set():
        log.info("stopping")
    gc.freeze()  # else the interpreter looks for cycles among millions of blocks before it ends, which takes longer than the stop
    # With the broker away, Faust's consumer thread ends with a traceback that tells nobody anything.
    threading.excepthook = lambda thread: log.debug("while stopping: %r", thread.exc_value)
    await app.stop()
    starting.cancel()
    for task in ended:
        task.cancel()
    await asyncio.gather(starting, *ended, return_exceptions=True)
    deadline.cancel()


async def _until_it_ends(app: CensusApp, starting: asyncio.Future[None]) -> None:
    """Until the app stops by itself, which it does only because of a failure, ours or one inside Faust."""
    try:
        await asyncio.shield(starting)
        await app.wait_until_stopped()
        error: BaseException | None = app.crash_reason
    except Exception as raised:
        error = raised
    if app.failure is None:
        app.failure = error or KvcensusError("the worker stopped, and Faust does not say why")
        if not isinstance(app.failure, KvcensusError):
            log.error("the worker cannot go on", exc_info=app.failure)


def _end_after(seconds: float, app: CensusApp) -> threading.Timer:
    """End the process if it is still there after ``seconds``: clients wait for a broker that is away much longer than a stop may take."""

    def end() -> None:
        if app.failure is None:
            log.warning("did not stop within %.0f s: ending anyway; the next start counts again what was not given out", seconds)
        else:
            sys.stderr.write(f"kvcensus: {_as_line(app.failure)}\n")
            sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def run_sink(settings: WorkerSettings) -> None:
    """Only write to ClickHouse what workers elsewhere count, until a signal comes. Raises :class:`KvcensusError`."""
    find_layout(settings)
    sink = sink_with_rollups(settings)
    sink.prepare()
    before = [(number, signal.signal(number, lambda *_: sink.stop())) for number in _SIGNALS]
    try:
        sink.run()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    log.info("stopped after %d rows", sink.inserted)
