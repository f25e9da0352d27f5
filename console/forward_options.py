"""The options of ``kvcensus forward``, and the headings that its help lists them under."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from console import config_file
from console.declaration_options import YEAR_SECONDS, declaration_options, rank_facts_options
from console.forward_config import LIVE_PORT, LOOPBACK, METRICS_PORT
from console.number_options import FiniteRange
from console.option_groups import C, with_options
from console.option_types import ByteSize, Endpoint, Folder, HttpUrl, KeyValue, ListenAddress, Name, show_size
from console.sectioned_command import BriefOption
from producers.identity import MAX_EPOCH
from producers.resolver import DEFAULT_MAX_BLOCKS
from producers.wire import MAX_PAYLOAD_BYTES
from schemas import environment

KEY_NAME = "identity.key"
MOST_RANKS = 1_024
TABLES = {"labels": "label", "kafka": "kafka_option"}
"""Tables of the configuration file, and the parameters they stand for."""

NOT_IN_FILE = frozenset({"config", "child_rank", "help"})

FILE_OPTIONS = "kvcensus.file-options"
"""Under this name, ``ctx.meta`` holds the :class:`config_file.FileOptions` of ``--config``."""

SECTIONS = {
    "The engine": ("instance", "dp_rank", "dp_size", "endpoint", "replay_endpoint", "topic", "engine_profile", "max_payload_bytes"),
    "What you declare about it": (
        *("model", "workload", "label", "reuse_reporting", "removals", "kv_connector"),
        *("gpus_per_rank", "kv_bytes_per_token", "prefill_rate", "staleness_seconds"),
    ),
    "Identity": ("key_file", "key_epoch", "max_blocks"),
    "Kafka": ("bootstrap_servers", "kafka_option"),
    "Disk": ("data_dir", "spool_dir", "spool_bytes", "no_spool", "segments", "segments_bytes", "segment_seconds"),
    "Metrics": ("metrics_url", "metrics_interval", "metrics_listen", "no_metrics"),
    "Times": ("heartbeat_seconds", "replay_timeout", "startup_timeout", "stop_timeout", "once_idle"),
}

_SECONDS = FiniteRange(min=0, min_open=True, max=YEAR_SECONDS)
_DISK = ByteSize(least=1 << 20)
_PAYLOAD = ByteSize(least=1 << 10, most=1 << 30)


def _read_file(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Let a file's values stand where neither the command line nor the environment says anything."""
    if path is not None and not ctx.resilient_parsing:
        found = config_file.read(path, ctx.command, TABLES, NOT_IN_FILE, ctx)
        ctx.default_map = found.values
        ctx.meta[FILE_OPTIONS] = found
    return path


def _option(name: str, *others: str, **settings: Any) -> Callable[[C], C]:
    settings.setdefault("envvar", f"KVCENSUS_{name.removeprefix('--').replace('-', '_').upper()}")
    if settings.get("default") is not None:
        settings.setdefault("show_default", True)
    return click.option(name, *others, cls=BriefOption, **settings)


def _seconds(name: str, default: float | None, meaning: str, least: FiniteRange = _SECONDS) -> Callable[[C], C]:
    return _option(name, type=least, metavar="SECONDS", default=default, help=meaning)


def _folder(name: str, meaning: str, **settings: Any) -> Callable[[C], C]:
    return _option(name, type=Folder(), metavar="DIR", help=meaning, **settings)


_OPTIONS: Sequence[Callable[[Any], Any]] = (
    _option("--instance", type=Name(), required=True, metavar="NAME", help="Name of the engine deployment, your choice."),
    _option(
        "--dp-rank",
        type=click.IntRange(0, 2**31 - 1),
        metavar="R",
        help="Data-parallel rank of this engine core.  [default: the one that its batches name]",
    ),
    _option(
        "--dp-size",
        type=click.IntRange(1, MOST_RANKS),
        metavar="N",
        help="Run N forwarders, for ranks --dp-rank (default 0) and up, each a process that is started again when it dies. "
        "Addresses are then those of rank 0: rank r is on port + r.",
    ),
    _option(
        "--endpoint",
        type=Endpoint(),
        metavar="tcp://HOST:PORT",
        help=f"The rank's event socket.  [default: tcp://{LOOPBACK}:{LIVE_PORT} + rank]",
    ),
    _option(
        "--replay-endpoint",
        type=Endpoint(),
        metavar="tcp://HOST:PORT",
        help="The rank's replay socket, if the engine has one: with it, what was missed is asked for instead of declared lost.",
    ),
    _option(
        "--topic",
        type=Name(optional=True),
        default="",
        show_default=False,
        metavar="PREFIX",
        help="ZeroMQ topic prefix.  [default: everything]",
    ),
    _option(
        "--max-payload-bytes",
        type=_PAYLOAD,
        metavar="SIZE",
        default=show_size(MAX_PAYLOAD_BYTES),
        help="A batch larger than this is refused unread.",
    ),
    declaration_options,
    rank_facts_options,
    _option(
        "--key-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Identity key, 64 bytes (`kvcensus key create`). Ids compare only among ranks with the same key: share one file over the "
        f"fleet.  [default: {KEY_NAME} in the data folder, made if missing]",
    ),
    _option(
        "--key-epoch",
        type=click.IntRange(0, MAX_EPOCH),
        metavar="N",
        default=0,
        help="Number of the key in use; part of every id. A new key is a new number.",
    ),
    _option(
        "--max-blocks",
        type=click.IntRange(1, 2**31 - 1),
        metavar="N",
        default=DEFAULT_MAX_BLOCKS,
        help="Blocks whose identity is remembered, about 350 bytes each; those forgotten are declared.",
    ),
    _option(
        "--bootstrap-servers",
        metavar="HOST:PORT[,…]",
        envvar=environment.BOOTSTRAP_SERVERS,
        help="Kafka.  [default: none with --segments; else the embedded broker that runs for the data folder]",
    ),
    click.option(
        "--kafka-option",
        type=KeyValue(lines=True),
        multiple=True,
        metavar="KEY=VALUE",
        help="A librdkafka property; repeatable. Also KVCENSUS_KAFKA_…: KVCENSUS_KAFKA_SECURITY_PROTOCOL=SASL_SSL. "
        "A password belongs there or into the file: others on this host can read a command line.",
    ),
    _folder("--data-dir", "Data folder of this host.  [default: ~/.local/state/kvcensus]", envvar=environment.DATA_DIR),
    _folder(
        "--spool-dir",
        "Keeps what Kafka has not acknowledged, and where the stream stands, over any end of the process. With --dp-size it has a "
        "subfolder for each rank.  [default: spool/INSTANCE/RANK in the data folder]",
    ),
    _option(
        "--spool-bytes",
        type=_DISK,
        metavar="SIZE",
        default="1GiB",
        help="Bound of the spool, e.g. 512MiB or 2GB; what it forces out, oldest first, is declared lost.",
    ),
    _option("--no-spool", is_flag=True, help="Keep all of that in memory alone, with the same bound."),
    _folder("--segments", "Write sealed Parquet segments here: instead of Kafka, or beside it if Kafka is named."),
    _option("--segments-bytes", type=_DISK, metavar="SIZE", default="10GiB", help="Bound of the segments; the oldest go first, declared."),
    _seconds("--segment-seconds", 300.0, "A segment is sealed at that age.", FiniteRange(min=1, max=YEAR_SECONDS)),
    _option("--metrics-url", type=HttpUrl(), metavar="URL", help="The engine's own metrics, e.g. http://127.0.0.1:8000/metrics."),
    _seconds("--metrics-interval", 5.0, "How often to read them.", FiniteRange(min=0.1, max=YEAR_SECONDS)),
    _option(
        "--metrics-listen",
        type=ListenAddress(),
        metavar="HOST:PORT",
        help="Where this forwarder shows its own metrics, for Prometheus.  "
        f"[default: {LOOPBACK}:{METRICS_PORT} + rank, or a free port if that is taken]",
    ),
    _option("--no-metrics", is_flag=True, help="Show no metrics: no port is opened."),
    _seconds(
        "--heartbeat-seconds",
        5.0,
        "How often to say that this forwarder is there, with its counters.",
        FiniteRange(min=0.01, max=YEAR_SECONDS),
    ),
    _seconds("--replay-timeout", 5.0, "Silence after which the replay socket is given up for the gap at hand."),
    _seconds("--startup-timeout", 30.0, "How long Kafka may be away at the start before that is said; all waits in the spool meanwhile."),
    _seconds("--stop-timeout", 30.0, "How long to wait at the end until Kafka has everything."),
    _seconds("--once-idle", None, "Stop by itself when no batch came for that long."),
    _option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        help="TOML file of the options above, by their names, with tables [labels] and [kafka].",
    ),
    _option("--json", "as_json", is_flag=True, help="At the end, print what was forwarded as one JSON document."),
    _option("--verbose", "-v", is_flag=True, help="Also show what the Kafka client has to say."),
    # The same command, as one of the processes that --dp-size starts.
    click.option("--child-rank", type=click.IntRange(0, 2**31 - 1), hidden=True),
)


def forward_options(command: C) -> C:
    """Add all of them."""
    return with_options(command, _OPTIONS)
