"""A demo from start to end: the one that runs until it is told to stop, and the one that ends by itself with a verdict."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live

from console.broker import BrokerKind
from console.demo import fleet, screen, verdict
from console.demo.folder import DemoFolder
from console.demo.pipeline import Interrupted, Pipeline, Settings
from console.demo.progress import Progress
from console.demo.readings import Figures, Reading
from console.demo.verdict import Published
from producers.config import forwarder_version
from producers.simulate.source import RankSource
from schemas import environment
from schemas.errors import KvcensusError
from schemas.records import rank_key
from sql import rollups
from sql.figures import UNSETTLED, reason_text
from sql.store import StoreUnavailable, connect

T = TypeVar("T")

TIMEOUT_SECONDS = 55.0
"""A finite run of the usual length that takes longer than this has failed."""

_BESIDE_LOAD_SECONDS = 45.0
"""Of the timeout, what is not engine load: start-up and the wait until everything has landed."""

ONCE_SPEED = 4.0
"""Engine seconds per second of a finite run; the figures do not depend on it."""

_LIVE_SECONDS = 2.0
_BLOCK_SECONDS = 5.0
_TICK = 0.2
_POLL_SECONDS = 0.5
_STORE_SILENT_SECONDS = 10.0
_PLAIN_WIDTH = 120
_SHOW_CURSOR = b"\x1b[?25h\n"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    data_dir: Path
    seed: int
    broker: BrokerKind | None = None


def run_live(options: Options) -> None:
    """Run until SIGINT or SIGTERM, which is the normal end. Raises :class:`KvcensusError` when a part of it fails."""
    with _Signals() as signals, DemoFolder(options.data_dir) as folder, Progress() as progress:
        _warn_of_variables(progress)
        settings = Settings(fleet.lasting(options.seed), 1.0, options.broker)
        try:
            with _running(settings, folder, progress, signals) as pipeline:
                progress.say(_beside(folder))
                progress.quiet()
                try:
                    _show_until_told(pipeline, signals)
                except Interrupted:
                    progress.say("stopping engines, forwarders, worker and broker")
                    raise
        except Interrupted:
            pass
        progress.done(f"stopped; the figures stay until the next demo: kvcensus show --data-dir {folder.path}")


def run_once(options: Options, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Run ``seconds`` of engine time and wait until all of it is counted: the document of figures, and what was not as it should be.

    Raises :class:`KvcensusError` when a part fails or the figures do not settle in time, :class:`Interrupted` on SIGINT or SIGTERM.
    """
    began = time.monotonic()
    deadline = began + max(TIMEOUT_SECONDS, seconds / ONCE_SPEED + _BESIDE_LOAD_SECONDS)
    with _Signals() as signals, DemoFolder(options.data_dir) as folder, Progress() as progress:
        sources = fleet.finite(seconds, options.seed)
        settings = Settings(sources, ONCE_SPEED, options.broker)
        with _running(settings, folder, progress, signals) as pipeline:
            run = _Finite(pipeline, sources, progress, deadline)
            try:
                reading = run.settle()
                document = reading.document | {"demo": run.about(reading, options, seconds)}
            finally:
                run.close()
            progress.doing("ending")
        progress.doing("rolling up")
        _roll_up(folder)
        failures = verdict.unexpected(reading.totals) + [f"{name} is zero" for name in verdict.zeros(document)]
        taken = round(time.monotonic() - began, 3)
        document["demo"] |= {"ok": not failures, "failures": failures, "seconds_taken": taken}
        progress.done("everything that was published has been counted; all processes have ended")
        return document, failures


# -- the demo that goes on -------------------------------------------------------------------------------------------


def _show_until_told(pipeline: Pipeline, signals: _Signals) -> None:
    console = Console(highlight=False, markup=False)
    began = time.monotonic()
    reader = _PatientReader(pipeline)

    def moment(width: int) -> screen.Moment:
        reading = reader.read(settled=True)
        published = sum(rank.published for rank in pipeline.engines.progress())
        return screen.Moment(time.monotonic() - began, published, reading, width, _note(pipeline))

    try:
        if console.is_terminal:
            with Live(screen.view(moment(console.width)), console=console, auto_refresh=False) as live:
                while True:
                    live.update(screen.view(moment(console.width)), refresh=True)
                    _pause(pipeline, signals, _LIVE_SECONDS)
        console = Console(highlight=False, markup=False, width=_PLAIN_WIDTH)
        while True:
            _pause(pipeline, signals, _BLOCK_SECONDS)
            console.print(screen.view(moment(_PLAIN_WIDTH)))
            console.print()
            sys.stdout.flush()
    finally:
        reader.close()


def _note(pipeline: Pipeline) -> str:
    """What a viewer might wonder about."""
    ended = {fleet.is_recorded(source.instance_id): True for source, rank in pipeline.served() if rank.finished}
    if False in ended:
        return "the load has ended; the figures stay until Ctrl-C"
    if True in ended:
        return "the recorded ranks were played once and have ended: unobserved from there on"
    return ""


def _pause(pipeline: Pipeline, signals: _Signals, seconds: float) -> None:
    """Let time pass, but notice at once what happens meanwhile."""
    until = time.monotonic() + seconds
    while True:
        pipeline.check()
        left = until - time.monotonic()
        if left <= 0:
            return
        signals.stop.wait(min(_TICK, left))


class _PatientReader:
    """Reads the figures; if the store does not answer, looks first whether its process is still there."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._figures: Figures | None = None

    def read(self, *, settled: bool = False) -> Reading | None:
        """See :meth:`Figures.read`."""
        return self.ask(lambda figures: figures.read(settled=settled))

    def ask(self, question: Callable[[Figures], T]) -> T:
        """The answer of the store."""
        until = time.monotonic() + _STORE_SILENT_SECONDS
        while True:
            try:
                if self._figures is None:
                    self._figures = Figures(self._pipeline.folder.path)
                return question(self._figures)
            except StoreUnavailable:
                time.sleep(_TICK)
                self._pipeline.check()
                if time.monotonic() > until:
                    raise

    def close(self) -> None:
        """Let go of the connection."""
        if self._figures is not None:
            self._figures.close()


# -- the demo that ends by itself ------------------------------------------------------------------------------------


def _roll_up(folder: DemoFolder) -> None:
    """What the worker was not given the time for at its end."""
    with connect(None, folder.path) as store:
        while not rollups.run(store).idle:
            pass


class _Finite:
    """The wait of a finite run."""

    def __init__(self, pipeline: Pipeline, sources: list[RankSource], progress: Progress, deadline: float) -> None:
        self._pipeline = pipeline
        self._sources = sources
        self._progress = progress
        self._deadline = deadline
        self._store = _PatientReader(pipeline)
        self._published: list[Published] = []

    def close(self) -> None:
        """Let go of the connection."""
        self._store.close()

    def settle(self) -> Reading:
        """Wait until everything is published, counted and landed; the figures then."""
        engines = self._pipeline.engines
        total = sum(sum(source.batches_per_life() or ()) for source in self._sources)
        while not engines.wait_finished(_TICK):
            published = sum(rank.published for rank in engines.progress())
            self._pass(f"engines: {published:,} of {total:,} batches published", [f"{total - published:,} batches are not published yet"])
        self._published = self._what_was_published()
        self._progress.done(f"{total:,} batches published")
        before: dict[str, Any] | None = None
        while True:
            reading, pending = self._look()
            # Looked at twice, so that a row which comes late to the same state is in.
            figures = verdict.settled(reading.document) if reading is not None and not pending else None
            if reading is not None and figures is not None and figures == before:
                return reading
            before = figures
            self._pass(f"counting: {pending[0]}" if pending else "counted", pending or ["the figures still move"])
            time.sleep(_POLL_SECONDS)

    def _what_was_published(self) -> list[Published]:
        return [Published(source.instance_id, source.dp_rank, tuple(source.batches_per_life() or ())) for source in self._sources]

    def _look(self) -> tuple[Reading | None, list[str]]:
        """The figures now, and what they still lack."""
        reading = self._store.read()
        if reading is None:
            return None, ["the tables are being made"]
        pending = verdict.missing(self._published, reading.totals)
        rows, blocks = self._store.ask(Figures.recomputes), verdict.recomputed_blocks(reading.totals)
        if rows != blocks:
            pending.append(f"{rows:,} of {blocks:,} recomputed blocks have landed")
        unsettled = UNSETTLED & set(reading.document["duplicate_footprint"]["reasons"])
        pending.extend(reason_text(reason) for reason in sorted(unsettled))
        return reading, pending

    def _pass(self, doing: str, pending: list[str]) -> None:
        self._pipeline.check()
        self._progress.doing(doing)
        if time.monotonic() > self._deadline:
            raise KvcensusError(f"the figures did not settle in time: {'; '.join(pending)}; the logs are in {self._pipeline.folder.logs}")

    def about(self, reading: Reading, options: Options, seconds: float) -> dict[str, Any]:
        """What the document says of the run itself."""
        counted = verdict.counted_lives(reading.totals.lives)
        broker = self._pipeline.broker
        ranks = [
            {
                "instance_id": rank.instance_id,
                "dp_rank": rank.dp_rank,
                "source": fleet.origin(rank.instance_id),
                "published": list(rank.lives),
                "counted": counted.get(rank.key, []),
                "lost": sum(life.lost for life in reading.totals.lives if rank_key(life.instance_id, life.dp_rank) == rank.key),
                "endpoint": where.endpoint,
                "replay_endpoint": where.replay_endpoint,
            }
            for rank, where in zip(self._published, self._pipeline.engines.endpoints(), strict=True)
        ]
        return {
            "versions": {
                "kvcensus": forwarder_version(),
                "python": platform.python_version(),
                "clickhouse": self._store.ask(Figures.version),
            },
            "broker": {"kind": broker.kind, "bootstrap_servers": broker.bootstrap_servers},
            "store_url": self._pipeline.store_url,
            "data_dir": str(self._pipeline.folder.path),
            "seed": options.seed,
            "engine_seconds": seconds,
            "speed": ONCE_SPEED,
            "batches": {
                "published": sum(rank.batches for rank in self._published),
                "counted": sum(sum(lives) for lives in counted.values()),
                "lost": reading.lost,
            },
            "ranks": ranks,
        }


# -- both ------------------------------------------------------------------------------------------------------------


class _Signals:
    """SIGINT, SIGTERM and SIGHUP ask for the end; a second one does not wait for it."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.abandon: Callable[[], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._told) for number in self._NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _told(self, number: int, frame: FrameType | None) -> None:
        if self.stop.is_set():
            if self.abandon is not None:
                self.abandon()
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)
            os._exit(130)
        self.stop.set()


@contextmanager
def _running(settings: Settings, folder: DemoFolder, progress: Progress, signals: _Signals) -> Iterator[Pipeline]:
    pipeline = Pipeline(settings, folder, progress, signals.stop)
    signals.abandon = pipeline.kill
    with pipeline:
        yield pipeline


def _warn_of_variables(progress: Progress, environ: Mapping[str, str] | None = None) -> None:
    env = os.environ if environ is None else environ
    for name in (environment.BOOTSTRAP_SERVERS, environment.CLICKHOUSE_URL):
        if env.get(name):
            progress.say(f"{name} is set: other commands go there; unset it where they are to see this demo")


def _beside(folder: DemoFolder) -> str:
    option = "" if environment.data_dir().absolute() == folder.data_dir else f" --data-dir {folder.data_dir}"
    return f'beside it, in another terminal: kvcensus show{option} · kvcensus sql{option} "SHOW TABLES"; logs in {folder.logs}'
