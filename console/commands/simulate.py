"""``kvcensus simulate``: serve captures, a trace or a synthetic fleet as vLLM engines would, or write them as captures."""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, cast

import click

from console.simulate_options import Given, check_applicable, simulate_options
from console.simulate_sources import sources_of
from producers.simulate import recording
from producers.simulate.fleet import RankPlan
from producers.simulate.metrics import Fault
from producers.simulate.server import EngineServer, RankEndpoint, ReplayLayout, ServerOptions
from producers.simulate.source import RankSource
from schemas.records import Declaration, rank_key


@click.command()
@simulate_options
def simulate(
    speed: float,
    rebase: bool,
    scale_time: bool,
    host: str,
    port: int | None,
    replay_port: int | None,
    metrics_port: int | None,
    metrics_fault: str | None,
    wait_subscribers: int,
    wait_timeout: float | None,
    linger: float | None,
    rebind: bool,
    replay_layout: str,
    write: Path | None,
    as_json: bool,
    **what: Any,
) -> None:
    """Serve captures, a trace or a synthetic fleet on vLLM's wire: a PUB and a replay ROUTER for every rank.

    \b
    kvcensus simulate chat=console/data/g_dp2.frames.jsonl.gz --speed max
    kvcensus simulate --synthetic --instances 4 --dp-size 2 --flush-every 20 --rebase
    kvcensus simulate --preset demo --write fleet.frames.jsonl.gz
    """
    given = Given(**what)
    options = ServerOptions(
        speed=None if math.isinf(speed) else speed,
        rebase=rebase,
        scale_time=scale_time,
        host=host,
        port=port,
        replay_port=replay_port,
        metrics_port=metrics_port,
        metrics_fault=cast("Fault | None", metrics_fault),
        wait_subscribers=wait_subscribers,
        wait_timeout_s=wait_timeout,
        rebind=rebind,
        replay_layout=cast("ReplayLayout", replay_layout),
    )
    if scale_time and not rebase:
        raise click.UsageError("--scale-time moves the time that --rebase sets: give both")
    if metrics_fault is not None and metrics_port is None:
        raise click.UsageError("--metrics-fault is about the metrics that --metrics-port serves: give both")
    check_applicable(given, click.get_current_context())
    sources, plans = sources_of(given)
    if write is not None:
        _write(sources, plans, write, as_json)
    else:
        _serve(sources, plans, options, linger, as_json)


def _rejected(plans: Sequence[RankPlan]) -> int:
    return sum(rank.stats.rejected for rank in plans)


def _unfinished(plans: Sequence[RankPlan]) -> int:
    return sum(rank.stats.cut_off for rank in plans)


def _write(sources: list[RankSource], plans: list[RankPlan], path: Path, as_json: bool) -> None:
    written = recording.write(sources, path)
    rejected = _rejected(plans)
    if as_json:
        files = [{"instance_id": name, "path": str(target), "messages": count} for name, (target, count) in written.items()]
        click.echo(
            json.dumps({"event": "written", "files": files, "rejected_requests": rejected, "unfinished_requests": _unfinished(plans)})
        )
        return
    for name, (target, count) in written.items():
        click.echo(f"{name}: {count:,} messages in {target}")
    _say_rejected(rejected)


def _say_rejected(rejected: int) -> None:
    if rejected:
        click.echo(
            f"{rejected:,} requests were refused by engines whose whole pool is smaller than they are: raise --pool-blocks", err=True
        )


def forward_command(rank: RankEndpoint) -> list[str]:
    """The command that relays this rank, as arguments."""
    declared = rank.declaration
    command = ["kvcensus", "forward", "--endpoint", rank.endpoint, "--replay-endpoint", rank.replay_endpoint]
    command += ["--instance", rank.instance_id, "--dp-rank", str(rank.dp_rank)]
    if rank.metrics_url is not None:
        command += ["--metrics-url", rank.metrics_url]
    for option, value in (
        ("--model", declared.model),
        ("--workload", declared.workload),
        ("--kv-connector", declared.kv_connector),
        ("--gpus-per-rank", declared.gpus_per_rank),
        ("--kv-bytes-per-token", declared.kv_bytes_per_token),
        ("--prefill-rate", declared.prefill_rate),
    ):
        if value is not None:
            command += [option, f"{value:.15g}" if isinstance(value, float) else str(value)]
    command += ["--reuse-reporting", declared.reuse_reporting]
    if declared.removals != "per_copy":
        command += ["--removals", declared.removals]
    return command


@contextmanager
def _terminated_like_interrupted() -> Any:
    """SIGTERM ends the command as Ctrl-C does, so that a supervisor gets the same clean end."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(sources: list[RankSource], plans: list[RankPlan], options: ServerOptions, linger: float | None, as_json: bool) -> None:
    server = EngineServer(sources, options)
    with _terminated_like_interrupted():
        try:
            with server:
                _announce(server, options, as_json)
                _watch(server, plans, linger, as_json)
        except KeyboardInterrupt:
            if not all(rank.finished for rank in server.progress()):
                raise


def _announce(server: EngineServer, options: ServerOptions, as_json: bool) -> None:
    if as_json:
        ranks = [{**asdict(rank), "declaration": _shown(rank.declaration), "forward": forward_command(rank)} for rank in server.endpoints()]
        click.echo(json.dumps({"event": "serving", "ranks": ranks}))
        return
    for rank in server.endpoints():
        lives = rank.batches_per_life
        amount = (
            "batches made as they are served"
            if lives is None
            else f"{sum(lives):,} batches" + (f" in {len(lives)} lives" if len(lives) > 1 else "")
        )
        click.echo(f"{rank_key(rank.instance_id, rank.dp_rank)}: events {rank.endpoint}, replay {rank.replay_endpoint}, {amount}")
        if rank.metrics_url is not None:
            click.echo(f"    metrics {rank.metrics_url}")
        click.echo(f"    {shlex.join(forward_command(rank))}")
    if options.wait_subscribers:
        click.echo(f"waiting for {options.wait_subscribers} subscriber(s) on each rank", err=True)


def _shown(declaration: Declaration) -> dict[str, str | float | None]:
    return {
        "reuse_reporting": declaration.reuse_reporting,
        "removals": declaration.removals,
        "workload": declaration.workload,
        "model": declaration.model,
        "kv_connector": declaration.kv_connector,
        "gpus_per_rank": declaration.gpus_per_rank,
        "kv_bytes_per_token": declaration.kv_bytes_per_token,
        "prefill_rate": declaration.prefill_rate,
    }


def _watch(server: EngineServer, plans: list[RankPlan], linger: float | None, as_json: bool) -> None:
    while not server.wait_started(0.2):
        pass
    if as_json:
        click.echo(json.dumps({"event": "started"}))
    live = sys.stderr.isatty()
    told = time.monotonic()
    while not server.wait_finished(0.25):
        # On a terminal one line that moves; in a log a line every ten seconds.
        if not as_json and (live or time.monotonic() - told >= 10):
            told = time.monotonic()
            click.echo(("\r" if live else "") + _progress_line(server), err=True, nl=not live)
    if as_json:
        ranks = [
            {"instance_id": endpoint.instance_id, "dp_rank": endpoint.dp_rank, **asdict(rank)}
            for endpoint, rank in zip(server.endpoints(), server.progress(), strict=True)
        ]
        click.echo(
            json.dumps(
                {"event": "finished", "ranks": ranks, "rejected_requests": _rejected(plans), "unfinished_requests": _unfinished(plans)}
            )
        )
    else:
        click.echo(("\r" if live else "") + _progress_line(server), err=True)
        _say_rejected(_rejected(plans))
        click.echo("all batches are published; replay is answered " + ("until Ctrl-C" if linger is None else f"for {linger:g} s"), err=True)
    until = math.inf if linger is None else time.monotonic() + linger
    while time.monotonic() < until:
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))


def _progress_line(server: EngineServer) -> str:
    ranks = server.progress()
    newest = max((rank.at_us for rank in ranks), default=0)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(newest // 1_000_000)) if newest else "-"
    finished = sum(rank.finished for rank in ranks)
    published = sum(rank.published for rank in ranks)
    replays = sum(rank.replays for rank in ranks)
    done = f"{finished} of {len(ranks)} ranks at their end"
    return f"{published:,} batches published, engine time {at} UTC, {done}, {replays} replays answered  "
