"""``kvcensus forward``: relay one engine rank's KV events into Kafka."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import click
from click.core import ParameterSource

from console.broker import find_bootstrap_servers
from console.config_file import FileOptions
from console.forward_config import (
    ForwardOptions,
    RankPlace,
    check,
    forwarder_config,
    is_loopback,
    place,
    ranks,
)
from console.forward_options import FILE_OPTIONS, KEY_NAME, SECTIONS, forward_options
from console.option_types import KeyValue
from console.sectioned_command import ARGUMENTS, SectionedCommand
from console.supervisor import USAGE, Ended, Job, supervise
from producers.delivery import DeliveryError, check_options
from producers.forwarder import Forwarder, Outcome
from producers.identity import IdentityKey, load_key, load_or_create_key
from schemas import environment
from schemas.errors import KvcensusError
from schemas.records import rank_key

_LABEL_VARIABLE = "KVCENSUS_LABEL"
_STRENGTH = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)

_say_lock = threading.Lock()


@click.command(
    cls=SectionedCommand,
    sections=SECTIONS,
    context_settings={"max_content_width": 120},
    epilog="Every option can also stand in an environment variable, KVCENSUS_ and its name in capitals (--dp-rank: KVCENSUS_DP_RANK), or "
    "in the file of --config. The command line wins over the environment, the environment over the file.",
)
@forward_options
@click.pass_context
def forward(
    ctx: click.Context,
    /,
    label: Sequence[tuple[str, str]],
    kafka_option: Sequence[tuple[str, str]],
    child_rank: int | None,
    as_json: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Relay one engine rank's KV events into Kafka, until Ctrl-C.

    Runs beside the engine and reads its event stream only: it sends nothing to the engine but requests for replay, opens no
    port but that of its own metrics, on loopback, and lets no token id leave this host. The engine must publish, on an address to bind to:

    \b
    vllm serve MODEL --kv-events-config \\
      '{"enable_kv_cache_events": true, "publisher": "zmq",
        "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
    kvcensus forward --instance chat-1 --model MODEL \\
      --replay-endpoint tcp://127.0.0.1:5657 --bootstrap-servers kafka:9092

    One forwarder for each data-parallel rank: rank r publishes on port + r, and its replay socket is on that port + r. --dp-size N runs
    N of them. The topics must exist: `kvcensus topics create`.

    A batch that Kafka cannot take yet waits in the spool, on disk; one that was missed and that the engine no longer has is declared
    as lost, with its number. Exits with 0 when all of it was delivered.
    """
    _settle_rivals(ctx, options, "no_spool", "spool_dir")
    _settle_rivals(ctx, options, "no_metrics", "metrics_listen")
    given = ForwardOptions(**options)
    check(given)
    folder = environment.data_dir(given.data_dir)
    places = [place(given, rank, folder) for rank in ([child_rank] if child_rank is not None else ranks(given))]
    file: FileOptions = ctx.meta.get(FILE_OPTIONS, FileOptions())
    labels = {**file.tables.get("labels", {}), **_labels_of_environment(), **dict(label)}
    kafka = {**file.tables.get("kafka", {}), **environment.kafka_options(f"{key}={value}" for key, value in kafka_option)}
    servers = None if given.segments and not given.bootstrap_servers else find_bootstrap_servers(given.bootstrap_servers, folder)
    if servers is not None and child_rank is None:  # a child that ended for them would be started again and again
        try:
            check_options(servers, kafka)
        except DeliveryError as error:
            raise click.UsageError(str(error)) from None
    key = _key(given.key_file, given.key_epoch, folder)
    holds_password = any(word in name for name in file.tables.get("kafka", {}) for word in ("password", "secret", "key.pem"))
    if file.exposed and holds_password and child_rank is None:  # a child reads a copy that nobody else can open
        _say("the configuration file holds a password, and others than its owner can read it: chmod 600")
    if given.dp_size is not None and child_rank is None:
        _run_many(given, ctx.meta[ARGUMENTS], file, as_json)
    else:
        _log_to_stderr(verbose)
        _run_one(given, places[0], key, servers, kafka, labels, as_json, supervised=child_rank is not None)


def _run_one(
    options: ForwardOptions,
    where: RankPlace,
    key: IdentityKey,
    servers: str | None,
    kafka: Mapping[str, str],
    labels: Mapping[str, str],
    as_json: bool,
    *,
    supervised: bool,
) -> None:
    with _stopped_by_signals(supervised) as stop:
        forwarder = Forwarder(forwarder_config(options, where, key, servers, kafka, labels))
        targets = [f"Kafka at {servers}"] if servers else []
        targets += [f"segments in {options.segments}"] if options.segments else []
        rank = options.instance if where.dp_rank is None else rank_key(options.instance, where.dp_rank)
        _say(f"forwarding {rank} from {where.endpoint} to {' and '.join(targets)}")
        if where.replay_endpoint is None:
            _say("no --replay-endpoint: what is missed cannot be asked for again, and is declared lost")
        if where.metrics is not None and not is_loopback(where.metrics.host):
            _say(f"own metrics: other hosts can reach {where.metrics.host}")
        outcome = forwarder.run(stop)
    _report(forwarder, outcome, as_json)


def _run_many(options: ForwardOptions, arguments: Sequence[str], file: FileOptions, as_json: bool) -> None:
    """A process for each rank: this very command, told which one of them it is.

    All of them are told the same until the end: they read a copy of the configuration file, not what becomes of it (on Linux).
    """
    numbers = [rank for rank in ranks(options) if rank is not None]
    # -P: a file in the working folder must not stand in for a module.
    command = (sys.executable, "-P", "-m", "console.cli", "forward", *(word for word in arguments if word != "--"))
    copy: tuple[int, ...] = ()
    if file.source and sys.platform == "linux":
        copy = (os.memfd_create("configuration"),)
        with os.fdopen(copy[0], "wb", closefd=False) as target:
            target.write(file.source)
        command = (*command, "--config", f"/proc/self/fd/{copy[0]}")
    jobs = [Job(f"rank {rank}", (*command, "--child-rank", str(rank)), copy) for rank in numbers]
    _say(f"{len(jobs)} forwarders, for ranks {numbers[0]} to {numbers[-1]} of {options.instance}")
    result = supervise(jobs, _say)
    if as_json:
        documents = [{"dp_rank": rank, **_ended(job)} for rank, job in zip(numbers, result.jobs, strict=True)]
        click.echo(json.dumps({"instance_id": options.instance, "dp_size": len(jobs), "ranks": documents}, indent=2))
    bad = [f"{job.name} ({'never ran' if job.code is None else job.code})" for job in result.jobs if job.code]
    if result.killed:
        raise click.Abort
    if result.code == USAGE:
        click.get_current_context().exit(USAGE)
    if result.code:
        raise KvcensusError(f"{len(bad)} of {len(jobs)} forwarders did not end with 0: {', '.join(bad)}")


def _ended(job: Ended) -> dict[str, Any]:
    """How a child ended, and the document that its last run printed, if it came to that."""
    try:
        document = json.loads(job.output)
    except ValueError:
        document = {}
    return {"exit_code": job.code, "restarts": job.restarts, **document}


def _settle_rivals(ctx: click.Context, options: dict[str, Any], off: str, on: str) -> None:
    """Of two options that exclude each other, the one from the stronger source stands; from one source both are a mistake."""
    if not options[off] or options[on] is None:
        return
    strength = {name: _STRENGTH.index(ctx.get_parameter_source(name) or ParameterSource.DEFAULT) for name in (off, on)}
    if strength[off] == strength[on]:
        raise click.UsageError(f"--{off.replace('_', '-')} and --{on.replace('_', '-')} exclude each other")
    if strength[off] < strength[on]:
        options[off] = False
    else:
        options[on] = None


def _labels_of_environment() -> dict[str, str]:
    """Labels are joined, one by one, from all sources; click takes them from the strongest alone."""
    kind = KeyValue()
    words = os.environ.get(_LABEL_VARIABLE, "")
    try:
        return dict(kind.convert(word, None, None) for word in kind.split_envvar_value(words) if word.strip())
    except click.BadParameter as error:
        raise click.UsageError(f"{_LABEL_VARIABLE}: {error.message}") from None


def _key(given: Path | None, epoch: int, folder: Path) -> IdentityKey:
    if given is not None:
        return load_key(given.expanduser(), epoch)
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
def _stopped_by_signals(supervised: bool) -> Iterator[threading.Event]:
    """An event that SIGINT or SIGTERM sets; the second signal does not wait any longer.

    Not so if ``supervised``: whoever stops a group of processes signals each, and then their supervisor passes it on once more.
    It kills when it is told twice.
    """
    stop = threading.Event()
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    signals = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            if supervised:
                return
            raise click.Abort
        # The code that is interrupted may hold the lock of the event or of the output: another thread has to take them.
        asked.put(True)

    def obey() -> None:
        if asked.get():
            _say("stopping: delivering what was received" + ("" if supervised else "; once more to leave at once"))
            stop.set()

    threading.Thread(target=obey, name="stop", daemon=True).start()
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    # Whoever supervises us holds them back until there are handlers.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    try:
        yield stop
    finally:
        asked.put(False)
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
        why = f" ({outcome.fault})" if outcome.fault else ""
        what = f"they wait in {outcome.waits_in} and go out when the forwarder runs again" if outcome.waits_in else "they are gone"
        raise KvcensusError(f"{outcome.undelivered:,} messages were not delivered to Kafka{why}: {what}")


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
    """A line on standard error, whole; nobody has to listen."""
    with _say_lock, suppress(OSError):
        click.echo(line, err=True)
