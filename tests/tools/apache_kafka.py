"""Apache Kafka itself, for running the tests against the reference: fetched with Maven, started with Java 17 or newer.

    python -m tests.tools.apache_kafka -- pytest          # a fresh Kafka, the tests against it, exit code of the tests
    python -m tests.tools.apache_kafka --port 9092        # a Kafka until Ctrl-C

Needs ``mvn`` and ``java`` on the PATH. The jar files (about 45 MB) are kept in a cache folder and used again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from console import child
from console.topic_admin import connect
from schemas.errors import KvcensusError
from tests.kafka import EXTERNAL_VARIABLE

VERSION = "4.4.0"
LOG4J_VERSION = "2.25.5"
"""Of the bridge from Kafka's log calls to Log4j; the version of Log4j that Kafka brings."""

_POM = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>kvcensus.tests</groupId>
  <artifactId>apache-kafka</artifactId>
  <version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId><version>{LOG4J_VERSION}</version>
    </dependency>
  </dependencies>
</project>
"""

_CLUSTER_ID = "kvcensusAAAAAAAAAAAAAA"
_START_SECONDS = 60.0
_HEAP = "-Xmx384m"


def cache_folder() -> Path:
    """Where the jar files are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvcensus" / f"apache-kafka-{VERSION}"


def fetch(cache: Path) -> Path:
    """The folder of jar files, fetched if it isn't there. Raises :class:`KvcensusError` when Maven can't."""
    jars = cache / "jars"
    if (cache / "complete").exists():
        return jars
    if shutil.which("mvn") is None:
        raise KvcensusError("Apache Kafka is fetched with Maven: install mvn, or point the tests at a Kafka that runs already")
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "pom.xml").write_text(_POM, encoding="utf-8")
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={jars}"]
    done = subprocess.run(["mvn", "-q", "-B", "-f", cache / "pom.xml", *goal], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KvcensusError(f"Maven could not fetch Apache Kafka {VERSION}: {(done.stdout + done.stderr).strip()[-1000:]}")
    (cache / "complete").touch()
    return jars


def _settings(port: int, controller_port: int, data_dir: Path) -> str:
    """One broker that is its own controller, on loopback. Topics are never made by themselves: the tests would not see it."""
    return "\n".join(
        (
            "process.roles=broker,controller",
            "node.id=1",
            f"controller.quorum.voters=1@{child.LOOPBACK}:{controller_port}",
            f"listeners=PLAINTEXT://{child.LOOPBACK}:{port},CONTROLLER://{child.LOOPBACK}:{controller_port}",
            f"advertised.listeners=PLAINTEXT://{child.LOOPBACK}:{port}",
            "controller.listener.names=CONTROLLER",
            "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            f"log.dirs={data_dir}",
            "auto.create.topics.enable=false",
            "offsets.topic.replication.factor=1",
            "offsets.topic.num.partitions=4",
            "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1",
            "group.initial.rebalance.delay.ms=0",
            "",
        )
    )


class ApacheKafka:
    """A Kafka of one process. ``folder`` holds its settings, data and log."""

    def __init__(self, folder: Path, port: int = 0, cache: Path | None = None) -> None:
        jars = fetch(cache or cache_folder())
        java = shutil.which("java")
        if java is None:
            raise KvcensusError("Apache Kafka needs Java 17 or newer: no `java` on the PATH")
        self._java = [java, _HEAP, "-Dlog4j2.level=WARN", "-cp", f"{jars}/*"]
        self._folder = folder.resolve()
        self._port = port or child.free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.bootstrap_servers = f"{child.LOOPBACK}:{self._port}"
        self.log_path = self._folder / "kafka.log"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._settings_path = self._folder / "server.properties"
        self._settings_path.write_text(_settings(self._port, child.free_port(), self._folder / "data"), encoding="utf-8")
        formatted = subprocess.run(
            [*self._java, "kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", _CLUSTER_ID, "-c", self._settings_path],
            capture_output=True,
            text=True,
            check=False,
        )
        if formatted.returncode:
            raise KvcensusError(f"Kafka's storage could not be prepared: {(formatted.stdout + formatted.stderr).strip()[-500:]}")

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start, again after :meth:`stop` or :meth:`kill` if need be, with the same data and port; returns when it answers."""
        self._process = child.spawn([*self._java, "kafka.Kafka", str(self._settings_path)], self.log_path, self._folder)
        deadline = time.monotonic() + _START_SECONDS
        while not child.listens(self._port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise KvcensusError(f"Apache Kafka did not start; {child.log_tail(self.log_path)}")
            time.sleep(0.1)
        connect(self.bootstrap_servers)

    def stop(self) -> None:
        """An orderly end."""
        if self._process:
            child.end(self._process, 30)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process:
            child.end(self._process, 0)


@contextmanager
def running(folder: Path, port: int = 0) -> Iterator[ApacheKafka]:
    """A Kafka in ``folder`` while the block runs."""
    kafka = ApacheKafka(folder, port)
    kafka.start()
    try:
        yield kafka
    finally:
        kafka.stop()


def main() -> int:
    """Run a Kafka, and a command against it if one is given."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.apache_kafka", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("command", nargs="*", help=f"run with {EXTERNAL_VARIABLE} set; without one, Kafka runs until Ctrl-C")
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="kvcensus-kafka-") as folder, running(Path(folder), given.port) as kafka:
            sys.stderr.write(f"Apache Kafka {VERSION} listens on {kafka.bootstrap_servers}\n")
            if not given.command:
                with contextlib.suppress(KeyboardInterrupt):
                    while True:
                        time.sleep(3600)
                return 0
            env = {**os.environ, EXTERNAL_VARIABLE: kafka.bootstrap_servers}
            return subprocess.run(given.command, env=env, check=False).returncode
    except KvcensusError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
