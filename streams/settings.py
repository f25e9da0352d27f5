"""How a worker is configured: from the environment, or from the command line on top of it.

Kafka client options are given the way librdkafka names them (``sasl.mechanism``), because the sink uses that client; the
Faust half uses another client, so the properties it shares are translated here.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.environment import (
    BOOTSTRAP_SERVERS,
    CLICKHOUSE_URL,
    DEFAULT_WINDOW_SECONDS,
    WINDOW_SECONDS,
    data_dir,
    kafka_options,
)
from schemas.errors import KvcensusError

FLUSH_SECONDS = "KVCENSUS_FLUSH_SECONDS"
SINK = "KVCENSUS_SINK"
"""``0``, ``no``, ``off`` or ``false``: results stay on the topics, nothing is written to ClickHouse."""

GRACE_SECONDS = "KVCENSUS_GRACE_SECONDS"
HISTORY_HOURS = "KVCENSUS_HISTORY_HOURS"
HISTORY_BLOCKS = "KVCENSUS_HISTORY_BLOCKS"
SNAPSHOT_SECONDS = "KVCENSUS_SNAPSHOT_SECONDS"

DEFAULT_FLUSH_SECONDS = 1.0
DEFAULT_GRACE_SECONDS = 2.0
DEFAULT_HISTORY_HOURS = 24.0
DEFAULT_HISTORY_BLOCKS = 1_000_000
DEFAULT_SNAPSHOT_SECONDS = 60.0
DEFAULT_BOOTSTRAP_SERVERS = "127.0.0.1:9092"

MOST_WINDOW_SECONDS = 86_400
MOST_GRACE_SECONDS = 366 * 86_400
MOST_HISTORY_HOURS = 100 * 366 * 24
MOST_HISTORY_BLOCKS = 10**12
"""Beyond these an option is taken for a slip; microseconds, and every number in a snapshot, have to fit 63 bits."""

GROUP = "kvcensus-worker"
SINK_GROUP = "kvcensus-sink"
DEFAULT_SESSION_MS = 10_000


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything a worker is told. ``*_us`` in engine microseconds; ``clickhouse_url`` null: the embedded store in ``data_dir``.

    ``grace_us``: how far every rank must be past a window before it closes. What is remembered of lost blocks is bounded by ``history_us``
    and by ``history_blocks`` per rank. Every ``snapshot_seconds`` what changed of the block-level state is written down.
    """

    bootstrap_servers: str
    data_dir: Path
    options: dict[str, str] = field(default_factory=dict)
    clickhouse_url: str | None = None
    window_us: int = DEFAULT_WINDOW_SECONDS * 1_000_000
    flush_seconds: float = DEFAULT_FLUSH_SECONDS
    sink: bool = True
    grace_us: int = round(DEFAULT_GRACE_SECONDS * 1_000_000)
    history_us: int = round(DEFAULT_HISTORY_HOURS * 3_600_000_000)
    history_blocks: int = DEFAULT_HISTORY_BLOCKS
    snapshot_seconds: float = DEFAULT_SNAPSHOT_SECONDS

    @property
    def group(self) -> str:
        """Consumer group of the counting half."""
        return self.options.get("group.id", GROUP)

    @property
    def sink_group(self) -> str:
        """Consumer group of the sink: its positions are its own, committed after each insert."""
        return f"{self.options['group.id']}-sink" if "group.id" in self.options else SINK_GROUP

    def client_config(self) -> dict[str, str | int | float | bool]:
        """librdkafka configuration shared by every client of that kind, without a group."""
        options = {key: value for key, value in self.options.items() if not key.startswith("group.")}
        return {"bootstrap.servers": self.bootstrap_servers, "log.connection.close": "false", **options}


def window_us(seconds: float) -> int:
    """A window's length in microseconds. Raises :class:`KvcensusError` unless it is whole milliseconds, above 0, a day at most."""
    length = round(seconds * 1_000_000) if 0 < seconds <= MOST_WINDOW_SECONDS else 0
    if length <= 0 or length % 1_000:
        raise KvcensusError(f"window of {seconds} s: expected a length in whole milliseconds, at most {MOST_WINDOW_SECONDS} s, e.g. 10")
    return length


def positive_seconds(name: str, value: str | float) -> float:
    """``value`` as seconds. Raises :class:`KvcensusError` naming ``name`` if it is not a number above 0."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise KvcensusError(f"{name}={value!r}: expected a number of seconds above 0")
    return seconds


def grace_us(seconds: float) -> int:
    """A grace in microseconds. Raises :class:`KvcensusError` unless it is 0 or more, and a year at most."""
    if not 0 <= seconds <= MOST_GRACE_SECONDS:
        raise KvcensusError(f"grace of {seconds} s: expected 0 to {MOST_GRACE_SECONDS} seconds")
    return round(seconds * 1_000_000)


def history_us(hours: float) -> int:
    """So many hours of history in microseconds. Raises :class:`KvcensusError` unless they are 0 or more, and a century at most."""
    if not 0 <= hours <= MOST_HISTORY_HOURS:
        raise KvcensusError(f"history of {hours} hours: expected 0 to {MOST_HISTORY_HOURS}")
    return round(hours * 3_600_000_000)


def _number(name: str, value: str, most: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 <= number <= most:
        raise KvcensusError(f"{name}={value!r}: expected a number, 0 to {most:g}")
    return number


def history_blocks(name: str, value: str) -> int:
    """``value`` as a bound on remembered blocks. Raises :class:`KvcensusError` naming ``name`` unless it is a whole number, 0 to 10^12."""
    if not value.strip().isdecimal() or int(value) > MOST_HISTORY_BLOCKS:
        raise KvcensusError(f"{name}={value!r}: expected a whole number of blocks, at most {MOST_HISTORY_BLOCKS}")
    return int(value)


def found_broker(folder: Path) -> str | None:
    """Bootstrap servers of a demo's broker that runs on this data folder, or ``None``."""
    try:
        found = json.loads((folder / "broker.json").read_text(encoding="utf-8"))
        os.kill(int(found["pid"]), 0)
        return str(found["bootstrap_servers"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def from_environment(environ: Mapping[str, str] | None = None, option_pairs: Iterable[str] = ()) -> WorkerSettings:
    """Settings from ``KVCENSUS_*``; without a broker there, a demo's broker on the data folder, else one on port 9092 of this machine."""
    env = os.environ if environ is None else environ
    folder = data_dir(env.get("KVCENSUS_DATA_DIR"))
    return WorkerSettings(
        bootstrap_servers=env.get(BOOTSTRAP_SERVERS) or found_broker(folder) or DEFAULT_BOOTSTRAP_SERVERS,
        data_dir=folder,
        options=kafka_options(option_pairs, env),
        clickhouse_url=env.get(CLICKHOUSE_URL) or None,
        window_us=window_us(positive_seconds(WINDOW_SECONDS, env.get(WINDOW_SECONDS) or DEFAULT_WINDOW_SECONDS)),
        flush_seconds=positive_seconds(FLUSH_SECONDS, env.get(FLUSH_SECONDS) or DEFAULT_FLUSH_SECONDS),
        sink=(env.get(SINK) or "1").strip().lower() not in ("0", "no", "off", "false"),
        grace_us=grace_us(_number(GRACE_SECONDS, env.get(GRACE_SECONDS) or str(DEFAULT_GRACE_SECONDS), MOST_GRACE_SECONDS)),
        history_us=history_us(_number(HISTORY_HOURS, env.get(HISTORY_HOURS) or str(DEFAULT_HISTORY_HOURS), MOST_HISTORY_HOURS)),
        history_blocks=history_blocks(HISTORY_BLOCKS, env.get(HISTORY_BLOCKS) or str(DEFAULT_HISTORY_BLOCKS)),
        snapshot_seconds=positive_seconds(SNAPSHOT_SECONDS, env.get(SNAPSHOT_SECONDS) or DEFAULT_SNAPSHOT_SECONDS),
    )


# -- the Faust half ---------------------------------------------------------------------------------------------

_SECURITY = frozenset(
    {
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "sasl.kerberos.service.name",
        "ssl.ca.location",
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.endpoint.identification.algorithm",
        "enable.ssl.certificate.verification",
    }
)


_TRANSLATED = frozenset({"group.id", "group.instance.id", "client.id", "session.timeout.ms", "heartbeat.interval.ms", "compression.type"})


def _milliseconds(options: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(options.get(name, default))
    except ValueError:
        raise KvcensusError(f"--kafka-option {name}={options[name]}: expected a number of milliseconds") from None


def _no(value: str) -> bool:
    return value.strip().lower() in ("", "none", "false", "0", "no")


def tls_context(options: Mapping[str, str]) -> ssl.SSLContext:
    """The TLS context that these ``ssl.*`` properties describe. Raises :class:`KvcensusError` for files that cannot be used."""
    location = options.get("ssl.ca.location")
    try:
        if location is None:
            context = ssl.create_default_context()
        elif Path(location).is_dir():
            context = ssl.create_default_context(capath=location)
        else:
            context = ssl.create_default_context(cafile=location)
        if "ssl.certificate.location" in options:
            context.load_cert_chain(options["ssl.certificate.location"], options.get("ssl.key.location"), options.get("ssl.key.password"))
    except OSError as error:  # ssl.SSLError is one
        raise KvcensusError(f"Kafka TLS: cannot use the certificate files given: {error}") from error
    if _no(options.get("ssl.endpoint.identification.algorithm", "https")):
        context.check_hostname = False
    if _no(options.get("enable.ssl.certificate.verification", "true")):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def faust_security(options: Mapping[str, str]) -> dict[str, Any]:
    """``broker_credentials`` for Faust from librdkafka's security properties; empty for plaintext.

    Raises :class:`KvcensusError` for a protocol or mechanism that the Faust half cannot speak.
    """
    from faust import auth  # noqa: PLC0415 - slow to import, and most commands read settings only

    protocol = options.get("security.protocol", "plaintext").upper()
    if protocol not in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        raise KvcensusError(f"--kafka-option security.protocol={protocol}: expected plaintext, ssl, sasl_plaintext or sasl_ssl")
    context = tls_context(options) if protocol.endswith("SSL") else None
    if protocol == "PLAINTEXT":
        return {}
    if protocol == "SSL":
        return {"broker_credentials": auth.SSLCredentials(context)}
    mechanism = options.get("sasl.mechanism", options.get("sasl.mechanisms", "GSSAPI")).upper()
    if mechanism == "GSSAPI":
        service = options.get("sasl.kerberos.service.name", "kafka")
        return {"broker_credentials": auth.GSSAPICredentials(kerberos_service_name=service, ssl_context=context)}
    if mechanism not in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        raise KvcensusError(f"--kafka-option sasl.mechanism={mechanism}: the worker speaks PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 and GSSAPI")
    return {
        "broker_credentials": auth.SASLCredentials(
            username=options.get("sasl.username"),
            password=options.get("sasl.password"),
            ssl_context=context,
            mechanism=mechanism,
        )
    }


def faust_config(settings: WorkerSettings) -> dict[str, Any]:
    """Faust settings for these settings, but for topics and agents. Raises :class:`KvcensusError` for options it cannot use."""
    options = settings.options
    session = _milliseconds(options, "session.timeout.ms", DEFAULT_SESSION_MS) / 1000
    heartbeat = _milliseconds(options, "heartbeat.interval.ms", min(3_000, int(session * 1000) // 6)) / 1000
    config: dict[str, Any] = {
        "broker": [f"kafka://{server.strip()}" for server in settings.bootstrap_servers.split(",") if server.strip()],
        "broker_client_id": options.get("client.id", "kvcensus-worker"),
        "broker_session_timeout": session,
        "broker_heartbeat_interval": heartbeat,
        "broker_rebalance_timeout": max(30.0, session),
        "broker_request_timeout": max(90.0, session),
        **faust_security(options),
    }
    if "group.instance.id" in options:
        config["consumer_group_instance_id"] = options["group.instance.id"]
    if "compression.type" in options:
        config["producer_compression_type"] = None if _no(options["compression.type"]) else options["compression.type"]
    return config


def untranslated(settings: WorkerSettings) -> list[str]:
    """Names of Kafka options that reach the sink's client only."""
    return sorted(settings.options.keys() - _SECURITY - _TRANSLATED)
