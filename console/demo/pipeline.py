"""The whole pipeline of a demo: started part by part, watched, and ended from its source on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from console.broker import Broker, BrokerKind, start_broker
from console.commands.simulate import forward_command
from console.demo.children import Children, died
from console.demo.folder import DemoFolder
from console.demo.progress import Progress
from console.topic_admin import create_topics
from producers.identity import load_or_create_key
from producers.simulate.server import EngineServer, RankProgress
from producers.simulate.source import RankSource
from schemas.errors import KvcensusError
from schemas.records import rank_key
from sql.loopback import live_owner

KEY_NAME = "identity.key"
"""The key of the data folder, as ``kvcensus forward`` has it: whoever attaches a rank of their own beside the demo compares with it."""

START_SECONDS = 60.0
"""How long worker and forwarders may take to come up."""

_PARTITIONS = 4
_SESSION_MS = 6_000
"""Tansu lets a consumer in after half of its session timeout, which by default is the better part of a minute."""

_SCRAPE_SECONDS = 2.0
_TICK = 0.1
_FORWARDERS, _WORKER = "forwarder of ", "worker"
_FORWARDER_GRACE, _WORKER_GRACE = 5.0, 8.0


class Interrupted(Exception):
    """Somebody asked the demo to end."""


@dataclass(frozen=True)
class Settings:
    """What a pipeline is made of. ``speed`` is engine seconds per second."""

    sources: Sequence[RankSource]
    speed: float
    broker: BrokerKind | None = None


class Pipeline:
    """Broker, topics, worker, forwarders and engines. A context manager: leaving it ends all of them.

    ``stop`` ends a start that is under way (:class:`Interrupted`).
    """

    def __init__(self, settings: Settings, folder: DemoFolder, progress: Progress, stop: threading.Event) -> None:
        self.folder = folder
        self.engines = EngineServer(
            settings.sources,
            speed=settings.speed,
            rebase=True,
            wait_subscribers=1,
            rebind=True,
            metrics_port=0,
        )
        self.store_url = ""
        self._settings = settings
        self._progress = progress
        self._stop = stop
        self._children = Children(folder.path)
        self._broker: Broker | None = None
        self._serving = False

    @property
    def broker(self) -> Broker:
        """The broker, once it was started."""
        assert self._broker is not None
        return self._broker

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def check(self) -> None:
        """Raise :class:`KvcensusError` if a part has ended, :class:`Interrupted` if it is time to stop."""
        if self._stop.is_set():
            raise Interrupted
        if self._broker is not None and not self._broker.running:
            broker = self._broker
            raise KvcensusError(died(f"{broker.kind} broker", broker.pid, None, broker.log_path))
        self._children.check()
        if self._serving:
            self.engines.wait_finished(0)  # raises what ended its thread, if something did

    def served(self) -> list[tuple[RankSource, RankProgress]]:
        """Every rank and how far it is."""
        return list(zip(self._settings.sources, self.engines.progress(), strict=True))

    def end(self) -> None:
        """End everything: engines, forwarders, worker, broker. May be called twice."""
        with contextlib.suppress(Exception):  # an engine that failed was reported by check()
            self.engines.stop()
        self._serving = False
        self._children.stop(_FORWARDERS, _FORWARDER_GRACE)
        self._children.stop(_WORKER, _WORKER_GRACE)
        if self._broker is not None:
            self._broker.stop()

    def kill(self) -> None:
        """Send SIGKILL to every process, and wait for none: may be called from a signal handler, also during :meth:`end`."""
        self._children.kill()
        if self._broker is not None and self._broker.running:
            with contextlib.suppress(OSError):
                os.kill(self._broker.pid, signal.SIGKILL)  # not its own kill(), whose lock may be taken

    # -- start

    def _start(self) -> None:
        said = self._progress
        said.doing("starting the broker")
        self._broker = start_broker(self._settings.broker, self.folder.path)
        servers = self._broker.bootstrap_servers
        self.folder.point_to_broker()
        said.done(f"broker ({self._broker.kind}) on {servers}")
        said.doing("creating topics")
        report = create_topics(servers, _PARTITIONS)
        said.done(f"{len(report.created)} topics, {report.partitions} partitions")
        self.check()

        said.doing("starting the worker, forwarders and engines")
        self._start_worker(servers)
        self.engines.start()
        self._serving = True
        self._start_forwarders(servers)
        ranks = self.engines.endpoints()
        self._wait(
            lambda: self.engines.wait_started(0),
            lambda: f"forwarders: {self._attached()} of {len(ranks)} attached",
        )
        said.done(f"{len(ranks)} engine ranks publish, each to a forwarder of its own")
        self._wait(self._store_answers, lambda: "the worker opens its ClickHouse")
        said.done(f"worker, with its ClickHouse on {self.store_url.removeprefix('http://')}")

    def _start_worker(self, servers: str) -> None:
        arguments = ["worker", "--bootstrap-servers", servers, "--data-dir", str(self.folder.path)]
        arguments += ["--kafka-option", f"session.timeout.ms={_SESSION_MS}"]
        self._children.start(_WORKER, arguments, self.folder.log("worker"))

    def _start_forwarders(self, servers: str) -> None:
        key = self.folder.data_dir / KEY_NAME
        load_or_create_key(key)
        for rank in self.engines.endpoints():
            name = rank_key(rank.instance_id, rank.dp_rank)
            # What `kvcensus simulate` tells people to type, but for the program's name.
            arguments = [*forward_command(rank)[1:], "--bootstrap-servers", servers, "--key-file", str(key)]
            # Broker and engines are this demo's own and gone with it: what a spool kept would belong to nobody.
            arguments += ["--data-dir", str(self.folder.path), "--no-spool", "--metrics-interval", f"{_SCRAPE_SECONDS:g}"]
            self._children.start(_FORWARDERS + name, arguments, self.folder.log(f"forward-{name}"))

    def _attached(self) -> int:
        return sum(rank.subscribers > 0 for rank in self.engines.progress())

    def _store_answers(self) -> bool:
        owner = live_owner(self.folder.path)
        if owner is None:
            return False
        self.folder.point_to_store()
        self.store_url = owner.url
        return True

    def _wait(self, until: Callable[[], bool], waiting_for: Callable[[], str]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not until():
            self.check()
            self._progress.doing(waiting_for())
            if time.monotonic() > deadline:
                raise KvcensusError(f"not up after {START_SECONDS:.0f} s: {waiting_for()}; the logs are in {self.folder.logs}")
            self._stop.wait(_TICK)
