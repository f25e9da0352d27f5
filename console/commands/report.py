"""``kvcensus report``: the figures of capture files, by the same counting cores, without broker or database."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import click
from rich.progress import Progress

from console.declaration_options import cost_options, declaration_options
from console.figure_tables import console_for_output, render
from console.option_types import sizes_by_group
from producers import capture
from producers.identity import Identity, IdentityKey, ephemeral_key, load_key
from producers.resolver import RankResolver
from producers.stream import RankStream
from schemas.environment import DEFAULT_WINDOW_SECONDS, WINDOW_SECONDS
from schemas.errors import KvcensusError
from schemas.records import Declaration, RankMessage, Removals, ReuseReporting
from sql.figures import By, assemble
from sql.totals import totals_from_records
from streams.offline import OfflineFleet


@click.command()
@click.argument("captures", nargs=-1, required=True, metavar="[NAME=]CAPTURE...")
@declaration_options
@cost_options
@click.option("--key-file", type=click.Path(path_type=Path, dir_okay=False), help="Identity key.  [default: one for this run only]")
@click.option("--key-epoch", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Number of the key in use.")
@click.option(
    "--window",
    type=click.IntRange(1, 86_400),
    default=DEFAULT_WINDOW_SECONDS,
    show_default=True,
    envvar=WINDOW_SECONDS,
    help="Seconds of engine time per window; changes no figure of the whole span.",
)
@click.option("--by", type=click.Choice(["rank", "workload", "model"]), help="One line per rank, workload or model.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, as `kvcensus show --json` prints it.")
def report(
    captures: Sequence[str],
    model: str | None,
    workload: str | None,
    reuse_reporting: str,
    removals: str,
    kv_connector: str | None,
    gpus_per_rank: float | None,
    kv_bytes_per_token: tuple[tuple[int | None, int], ...],
    prefill_rate: float | None,
    key_file: Path | None,
    key_epoch: int,
    window: int,
    by: str | None,
    as_json: bool,
) -> None:
    """Repeat compute and duplicate footprint of capture files.

    Each CAPTURE is one instance, called after its file or NAME; its ranks are those the batches name. Raw frames, hex dumps and
    recorded replay exchanges are read, gzipped or not. Several captures are one fleet: what was recorded at the same time is
    compared across them.
    """
    named = _named(captures)
    try:
        bytes_per_token, bytes_by_group = sizes_by_group(kv_bytes_per_token)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--kv-bytes-per-token") from error
    key = load_key(key_file, key_epoch) if key_file else ephemeral_key(key_epoch)
    declaration = Declaration(
        reuse_reporting=cast(ReuseReporting, reuse_reporting),
        removals=cast(Removals, removals),
        workload=workload,
        model=model,
        kv_connector=kv_connector,
        key_epoch=key_epoch,
        canary=key.canary,
        gpus_per_rank=gpus_per_rank,
        kv_bytes_per_token=bytes_per_token,
        prefill_rate=prefill_rate,
        kv_bytes_by_group={str(group): size for group, size in bytes_by_group.items()},
    )
    fleet = OfflineFleet(window_us=window * 1_000_000)
    console = console_for_output()
    with Progress(transient=True, disable=as_json or not console.is_terminal) as progress:
        ranks = []
        for name, path in progress.track(named.items(), description="reading captures"):
            ranks += _messages(name, path, declaration, key)
        total = sum(len(messages) for messages in ranks)
        in_time = heapq.merge(*ranks, key=lambda message: message.at_us)
        for message in progress.track(in_time, total=total, description="counting"):
            fleet.apply(message)
    counted = fleet.drain()
    totals = totals_from_records(
        counted.rank_windows, counted.duplicate_windows, by=cast("By | None", by), shared_prefixes=counted.shared_prefixes
    )
    document = assemble(totals)
    document["provisional"] = False  # a capture is whole: no batch will come to change its last window
    if as_json:
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        render(document, "all", console)


def _named(captures: Sequence[str]) -> dict[str, Path]:
    """Instance name -> file. A name that stands twice is a usage error: two captures are two instances."""
    named: dict[str, Path] = {}
    for given in captures:
        name, equals, path = given.partition("=")
        if not equals or Path(given).exists():
            path = given
            name = Path(given).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".frames")
        if not name:
            raise click.BadParameter(f"{given}: the name before = is empty", param_hint="CAPTURE")
        if name in named:
            raise click.UsageError(f"two captures are called {name}: tell them apart with NAME=PATH")
        if not Path(path).is_file():
            raise KvcensusError(f"{path}: {'not a regular file' if Path(path).exists() else 'no such file'}")
        named[name] = Path(path)
    return named


def _messages(name: str, path: Path, declaration: Declaration, key: IdentityKey) -> list[list[RankMessage]]:
    """What a forwarder would send for each rank of a capture, in order."""
    return [list(_rank_messages(name, dp_rank, frames, declaration, key)) for dp_rank, frames in sorted(capture.ranks(path).items())]


def _rank_messages(
    name: str, dp_rank: int, frames: Sequence[capture.Frame], declaration: Declaration, key: IdentityKey
) -> Iterator[RankMessage]:
    lives = itertools.count()
    resolver = RankResolver(Identity(key, declaration.model), key)
    stream = RankStream(name, dp_rank, resolver, declaration, "report", lambda *_: f"{name}/{dp_rank}-{next(lives)}")
    yield from stream.start(0)
    for frame in frames:
        yield from stream.feed(frame.seq, frame.payload, round(frame.received_at_s * 1_000))
