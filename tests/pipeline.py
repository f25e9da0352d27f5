"""The whole pipeline for one test: simulated engines, forwarders, the Kafka of the test, a worker process, ClickHouse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from producers.forwarder import Forwarder, ForwarderConfig, Outcome
from producers.identity import IdentityKey, ephemeral_key
from producers.simulate.server import EngineServer
from producers.simulate.source import RankSource
from sql.figures import UNSETTLED
from tests.command import kvcensus

SETTLE_SECONDS = 120.0


@dataclass
class Pipeline:
    """A worker beside a Kafka; :meth:`feed` sends ranks through it, :meth:`figures` asks what came of them."""

    bootstrap_servers: str
    data_dir: Path
    key: IdentityKey = field(default_factory=ephemeral_key)
    worker_options: tuple[str, ...] = ()
    worker: subprocess.Popen[bytes] | None = None
    expected_batches: dict[str, int] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        """What names this pipeline to a command."""
        return {**os.environ, "KVCENSUS_DATA_DIR": str(self.data_dir), "KVCENSUS_BOOTSTRAP_SERVERS": self.bootstrap_servers}

    def start_worker(self) -> None:
        """Start ``kvcensus worker`` in a process of its own."""
        log = (self.data_dir / "worker.log").open("ab")
        self.worker = subprocess.Popen(
            [sys.executable, "-m", "console.cli", "worker", *self.worker_options], env=self.environ, stdout=log, stderr=log
        )

    def stop_worker(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End the worker; its exit code."""
        assert self.worker is not None
        self.worker.send_signal(how)
        code = self.worker.wait(30)
        self.worker = None
        return code

    def feed(self, sources: Sequence[RankSource], *, speed: float | None = None, **server: Any) -> list[Outcome]:
        """Serve ``sources`` and forward all of it to Kafka, one forwarder per rank."""
        settings: dict[str, Any] = {"speed": speed, "wait_subscribers": 1, "replay_hwm": 0, **server}
        stop = threading.Event()
        with EngineServer(sources, **settings) as engines, ThreadPoolExecutor(len(sources)) as pool:
            runs: list[Future[Outcome]] = []
            for source, at in zip(sources, engines.endpoints(), strict=True):
                declared = source.declaration
                config = ForwarderConfig(
                    instance_id=source.instance_id,
                    dp_rank=source.dp_rank,
                    endpoint=at.endpoint,
                    replay_endpoint=at.replay_endpoint,
                    bootstrap_servers=self.bootstrap_servers,
                    key=self.key,
                    reuse_reporting=declared.reuse_reporting,
                    removals=declared.removals,
                    workload=declared.workload,
                    model=declared.model,
                )
                runs.append(pool.submit(Forwarder(config).run, stop))
                self.expected_batches[source.key] = sum(source.batches_per_life() or ())
            try:
                assert engines.wait_finished(SETTLE_SECONDS), "the simulated engines did not finish"
                self._until_forwarded(runs, engines)
            finally:
                stop.set()
            return [run.result(60) for run in runs]

    def _until_forwarded(self, runs: Sequence[Future[Outcome]], engines: EngineServer) -> None:
        """A forwarder that stops takes what it has received: give the sockets a moment, and notice one that failed."""
        time.sleep(0.5)
        for run in runs:
            if run.done():
                run.result()

    def show(self, *arguments: str) -> dict[str, Any]:
        """What ``kvcensus show ... --json`` prints beside the worker."""
        done = kvcensus("show", *arguments, "--json", environ=self.environ)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def figures(self) -> dict[str, Any]:
        """``show all``, once every batch that was fed has been counted and the footprint has reached the last of them."""
        deadline = time.monotonic() + SETTLE_SECONDS
        seen: object = None
        while time.monotonic() < deadline:
            if self.worker is not None and self.worker.poll() is not None:
                raise AssertionError(f"the worker ended with {self.worker.returncode}:\n{self.log()}")
            document = self.show("all")
            counted = {f"{rank['instance_id']}/{rank['dp_rank']}": rank["batches"] for rank in document["ranks"]}
            behind = UNSETTLED & set(document["duplicate_footprint"]["reasons"])
            seen = counted, behind
            if counted == self.expected_batches and not behind:
                return document
            time.sleep(0.3)
        raise AssertionError(f"not settled: {seen} of {self.expected_batches}\n{self.log()}")

    def log(self) -> str:
        """The end of the worker's log."""
        return (self.data_dir / "worker.log").read_text(errors="replace")[-3000:]


@contextmanager
def pipeline(bootstrap_servers: str, data_dir: Path, *worker_options: str) -> Iterator[Pipeline]:
    """A running worker on an empty store."""
    data_dir.mkdir(parents=True, exist_ok=True)
    quick = ("--kafka-option", "session.timeout.ms=6000")  # embedded brokers wait half of it before a group starts
    running = Pipeline(bootstrap_servers, data_dir, worker_options=(*quick, *worker_options))
    running.start_worker()
    try:
        yield running
    finally:
        if running.worker is not None:
            running.worker.terminate()
            try:
                running.worker.wait(20)
            except subprocess.TimeoutExpired:
                running.worker.kill()
                running.worker.wait()
