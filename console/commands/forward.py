"""``kvcensus forward``: relay one engine rank's KV events into Kafka."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import cast

import click

from console.broker import find_bootstrap_servers
from console.declaration_options import declaration_options
from console.number_options import FiniteRange
from producers.forwarder import Forwarder, ForwarderConfig, Outcome
from producers.identity import MAX_EPOCH, IdentityKey, load_key, load_or_create_key
from producers.subscription import check_endpoint
from schemas import environment
from schemas.errors import KvcensusError
from schemas.records import Removals, ReuseReporting, rank_key

LIVE_PORT = 5557
"""vLLM's default: data-parallel rank r publishes on this port + r."""

KEY_NAME = "identity.key"

_SECONDS = FiniteRange(min=0, min_open=True)


class _Endpoint(click.ParamType):
    """An address to connect to."""

    name = "endpoint"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address itself, once it is seen to be one."""
        try:
            check_endpoint(str(value))
        except KvcensusError as error:
            self.fail(str(error), param, ctx)
        return str(value)


@click.command(
    epilog="Every option also reads the environment variable that stands with it; the command line wins. Kafka client properties come "
    "from --kafka-option or from variables such as KVCENSUS_KAFKA_SECURITY_PROTOCOL=SASL_SSL."
)
@click.option("--instance", required=True, envvar="KVCENSUS_INSTANCE", show_envvar=True, help="Name of the engine deployment, your choice.")
@click.option(
    "--dp-rank",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    envvar="KVCENSUS_DP_RANK",
    show_envvar=True,
    help="Data-parallel rank of this engine core.",
)
@click.option(
    "--endpoint",
    type=_Endpoint(),
    metavar="tcp://HOST:PORT",
    envvar="KVCENSUS_ENDPOINT",
    show_envvar=True,
    help=f"The rank's event socket.  [default: tcp://127.0.0.1:{LIVE_PORT} + rank]",
)
@click.option(
    "--replay-endpoint",
    type=_Endpoint(),
    metavar="tcp://HOST:PORT",
    envvar="KVCENSUS_REPLAY_ENDPOINT",
    show_envvar=True,
    help="The rank's replay socket, if the engine has one: with it, what was missed is asked for instead of declared lost.",
)
@click.option("--topic", default="", envvar="KVCENSUS_TOPIC", show_envvar=True, help="ZeroMQ topic prefix.  [default: everything]")
@declaration_options
@click.option(
    "--key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="KVCENSUS_KEY_FILE",
    show_envvar=True,
    help="Identity key, 64 bytes. Ids compare only among ranks with the same key: share one file over the fleet.  "
    f"[default: {KEY_NAME} in the data folder, made if missing]",
)
@click.option(
    "--key-epoch",
    type=click.IntRange(0, MAX_EPOCH),
    default=0,
    show_default=True,
    envvar="KVCENSUS_KEY_EPOCH",
    show_envvar=True,
    help="Number of the key in use; part of every id.",
)
@click.option(
    "--bootstrap-servers",
    metavar="HOST:PORT[,…]",
    envvar=environment.BOOTSTRAP_SERVERS,
    show_envvar=True,
    help="Kafka.  [default: the embedded broker that runs for the data folder]",
)
@click.option("--kafka-option", multiple=True, metavar="KEY=VALUE", help="A librdkafka property; repeatable.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar=environment.DATA_DIR,
    show_envvar=True,
    help="Data folder of this host.",
)
@click.option(
    "--heartbeat-seconds",
    type=_SECONDS,
    default=5.0,
    show_default=True,
    envvar="KVCENSUS_HEARTBEAT_SECONDS",
    show_envvar=True,
    help="How often to say that this forwarder is there, with its counters.",
)
@click.option(
    "--replay-timeout",
    type=_SECONDS,
    default=5.0,
    show_default=True,
    envvar="KVCENSUS_REPLAY_TIMEOUT",
    show_envvar=True,
    help="Seconds of silence after which the replay socket is given up for the gap at hand.",
)
@click.option(
    "--startup-timeout",
    type=_SECONDS,
    default=30.0,
    show_default=True,
    envvar="KVCENSUS_STARTUP_TIMEOUT",
    show_envvar=True,
    help="Seconds to wait for Kafka and its topics at the start.",
)
@click.option(
    "--stop-timeout",
    type=_SECONDS,
    default=30.0,
    show_default=True,
    envvar="KVCENSUS_STOP_TIMEOUT",
    show_envvar=True,
    help="Seconds to wait at the end until Kafka has everything.",
)
@click.option(
    "--once-idle",
    type=_SECONDS,
    metavar="SECONDS",
    envvar="KVCENSUS_ONCE_IDLE",
    show_envvar=True,
    help="Stop by itself when no batch came for that long.",
)
@click.option("--json", "as_json", is_flag=True, help="At the end, print what was forwarded as one JSON document.")
@click.option("--verbose", "-v", is_flag=True, help="Also show what the Kafka client has to say.")
def forward(
    instance: str,
    dp_rank: int,
    endpoint: str | None,
    replay_endpoint: str | None,
    topic: str,
    model: str | None,
    workload: str | None,
    reuse_reporting: str,
    removals: str,
    kv_connector: str | None,
    key_file: Path | None,
    key_epoch: int,
    bootstrap_servers: str | None,
    kafka_option: tuple[str, ...],
    data_dir: Path | None,
    heartbeat_seconds: float,
    replay_timeout: float,
    startup_timeout: float,
    stop_timeout: float,
    once_idle: float | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Relay one engine rank's KV events into Kafka, until Ctrl-C.

    Runs beside the engine and reads its event stream only: it opens no port, sends nothing to the engine but requests for
    replay, and lets no token id leave this host. The engine must publish, on an address to bind to:

    \b
    vllm serve MODEL --kv-events-config \\
      '{"enable_kv_cache_events": true, "publisher": "zmq",
        "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
    kvcensus forward --instance chat-1 --model MODEL \\
      --replay-endpoint tcp://127.0.0.1:5657 --bootstrap-servers kafka:9092

    One forwarder for each data-parallel rank: rank r publishes on port + r, and its replay socket on that port + r; set
    --dp-rank r and both endpoints accordingly. The topics must exist: `kvcensus topics create`.

    A batch that Kafka cannot take yet waits in memory; one that was missed and that the engine no longer has is declared as
    lost, with its number. Exits with 0 when all of it was delivered.
    """
    if not instance or not instance.isprintable() or instance != instance.strip():
        raise click.BadParameter("a name without spaces around it, and not empty", param_hint="--instance")
    folder = environment.data_dir(data_dir)
    config = ForwarderConfig(
        instance_id=instance,
        dp_rank=dp_rank,
        endpoint=endpoint or f"tcp://127.0.0.1:{LIVE_PORT + dp_rank}",
        replay_endpoint=replay_endpoint,
        topic=topic,
        bootstrap_servers=find_bootstrap_servers(bootstrap_servers, folder),
        kafka_options=environment.kafka_options(kafka_option),
        key=_key(key_file, key_epoch, folder),
        reuse_reporting=cast("ReuseReporting", reuse_reporting),
        removals=cast("Removals", removals),
        workload=workload or None,
        model=model or None,
        kv_connector=kv_connector or None,
        heartbeat=heartbeat_seconds,
        replay_timeout=replay_timeout,
        startup_timeout=startup_timeout,
        stop_timeout=stop_timeout,
        idle=once_idle,
    )
    _log_to_stderr(verbose)
    _say(f"forwarding {rank_key(instance, dp_rank)} from {config.endpoint} to Kafka at {config.bootstrap_servers}")
    if replay_endpoint is None:
        _say("no --replay-endpoint: what is missed cannot be asked for again, and is declared lost")
    forwarder = Forwarder(config)
    with _stopped_by_signals() as stop:
        outcome = forwarder.run(stop)
    _report(forwarder, outcome, as_json)


def _key(given: Path | None, epoch: int, folder: Path) -> IdentityKey:
    if given is not None:
        return load_key(given, epoch)
    path = folder / KEY_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvcensusError(f"cannot make the data folder {folder}: {error.strerror}; name another with --data-dir") from error
    key, made = load_or_create_key(path, epoch)
    if made:
        _say(f"made a new identity key, {path}: ids compare only among ranks whose forwarders use the same key")
    return key


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGINT or SIGTERM sets; the second signal does not wait any longer."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise click.Abort
        stop.set()
        _say("stopping: delivering what was received; once more to leave at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(forwarder: Forwarder, outcome: Outcome, as_json: bool) -> None:
    tally = forwarder.tally
    if as_json:
        click.echo(json.dumps({**asdict(outcome), "incarnation": forwarder.incarnation, **asdict(tally)}, indent=2))
    _say(
        f"{outcome.reason}: {tally.batches:,} batches, {tally.blocks_stored:,} blocks stored, {tally.blocks_removed:,} removed; "
        f"{tally.lost:,} batches lost, {tally.refused:,} refused; {outcome.delivered:,} messages delivered"
    )
    if outcome.undelivered:
        raise KvcensusError(f"{outcome.undelivered:,} batches or messages were received and not delivered to Kafka")


def _log_to_stderr(verbose: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("kvcensus")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    if verbose:
        logging.getLogger("kvcensus.librdkafka").setLevel(logging.DEBUG)


def _say(line: str) -> None:
    click.echo(line, err=True)
