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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast, get_args

import click
from click.core import ParameterSource

from console.number_options import FiniteRange
from console.option_groups import C, with_options
from console.option_types import ByteSize
from producers.simulate import fleet, presets, recording
from producers.simulate.encode import WIRES, Wire
from producers.simulate.engine import EngineSpec, HashSeed
from producers.simulate.fleet import FleetSpec, InstanceSpec, RankPlan, Routing
from producers.simulate.hashing import HashForm
from producers.simulate.metrics import Fault
from producers.simulate.server import EngineServer, RankEndpoint, ReplayLayout, ServerOptions
from producers.simulate.source import RankSource
from producers.simulate.trace import read_trace
from producers.simulate.workload import Request, WorkloadSpec
from schemas.errors import KvcensusError
from schemas.records import Declaration, Removals, ReuseReporting, rank_key

TRACE_DRAIN_S = 120.0
"""How long a trace's fleet goes on after the last request has arrived."""

_SYNTHETIC_POOL, _TRACE_POOL = 512, 8_285
_FAST = "max"

_MOST_RANKS = 4_096
"""Each rank has two sockets, and its whole workload in memory."""


@dataclass(frozen=True)
class _Given:
    """The options that describe what to serve, as they were given; ``None`` where one was not."""

    captures: tuple[str, ...]
    synthetic: bool
    preset: str | None
    trace: Path | None
    instance: str | None
    model: str | None
    workload: str | None
    reuse_reporting: str | None
    removals: str
    kv_connector: str | None
    gpus_per_rank: float | None
    kv_bytes_per_token: int | None
    prefill_rate: float | None
    topic: str | None
    limit: int | None
    from_s: float
    until_s: float | None
    instances: int | None
    dp_size: int
    ranks: int | None
    pool_blocks: int | None
    block_size: int
    seed: int
    duration: float | None
    rate: float
    routing: str
    flush_every: float | None
    restart_every: float | None
    salts: int
    adapters: int
    hash_seed: str
    hash_form: str
    wire: str


_ONLY_TRACE = {"limit", "from_s", "until_s"}
_NOT_TRACE = {"rate", "salts", "adapters"}
_FLEET_SHAPE = {
    "instances",
    "dp_size",
    "ranks",
    "pool_blocks",
    "block_size",
    "seed",
    "duration",
    "routing",
    "flush_every",
    "restart_every",
    "hash_seed",
    "hash_form",
    "wire",
}


class _Speed(click.ParamType):
    """A factor above 0, or ``max``."""

    name = "speed"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Engine seconds per second; infinity for ``max``."""
        if isinstance(value, float):
            return value
        if value == _FAST:
            return math.inf
        try:
            factor = float(str(value))
        except ValueError:
            factor = math.nan
        if not 0 < factor < math.inf:
            self.fail(f"{value!r} is neither a number above 0 nor {_FAST!r}", param, ctx)
        return factor


_WHAT = (
    click.argument("captures", nargs=-1, metavar="[CAPTURE | NAME=CAPTURE]..."),
    click.option("--synthetic", is_flag=True, help="A synthetic fleet from the options below."),
    click.option("--preset", type=click.Choice(["demo", *presets.test_fleets()]), help="A ready-made synthetic fleet."),
    click.option(
        "--trace", type=click.Path(path_type=Path, dir_okay=False), help="Requests from a Mooncake FAST'25 trace (jsonl or jsonl.gz)."
    ),
)
_DECLARATIONS = (
    click.option("--instance", help="Name of the instance of a single capture; prefix of the names of a fleet's instances."),
    click.option("--model", help="Model to declare."),
    click.option("--workload", help="Workload to declare."),
    click.option(
        "--reuse-reporting",
        type=click.Choice(["none", "labelled", "unlabelled"]),
        help="Default: unlabelled for captures, none for simulated engines (they never announce reused blocks).",
    ),
    click.option("--removals", type=click.Choice(["per_copy", "last_copy"]), default="per_copy", show_default=True),
    click.option("--kv-connector", help="KV connector to declare."),
    click.option("--gpus-per-rank", type=FiniteRange(min=0, min_open=True), help="GPUs of each rank to declare."),
    click.option("--kv-bytes-per-token", type=ByteSize(), metavar="SIZE", help="KV cache of one token to declare."),
    click.option("--prefill-rate", type=FiniteRange(min=0, min_open=True), help="Prompt tokens per second of a rank to declare."),
    click.option("--topic", help="Topic frame. Default: the capture's own, else kv-events."),
)
_FLEET = (
    click.option("--instances", type=click.IntRange(1, _MOST_RANKS), help="Instances of the fleet.  [default: 3]"),
    click.option("--dp-size", type=click.IntRange(1, _MOST_RANKS), default=1, show_default=True, help="Ranks of each instance."),
    click.option("--ranks", type=click.IntRange(1, _MOST_RANKS), help="Ranks in all, instead of --instances: a multiple of --dp-size."),
    click.option("--pool-blocks", type=click.IntRange(1), help="KV blocks of each rank.  [default: 512; with --trace 8285]"),
    click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens per block."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--duration", type=FiniteRange(min=0, min_open=True), help="Seconds of engine time.  [default: 60]"),
    click.option(
        "--rate", type=FiniteRange(min=0, min_open=True), default=6.0, show_default=True, help="Sessions per second, whole fleet."
    ),
    click.option("--routing", type=click.Choice(["round-robin", "random", "prefix"]), default="round-robin", show_default=True),
    click.option("--flush-every", type=FiniteRange(min=0, min_open=True), help="Every so many seconds one instance's cache is reset."),
    click.option("--restart-every", type=FiniteRange(min=0, min_open=True), help="Every so many seconds one instance restarts."),
    click.option("--salts", type=click.IntRange(0), default=0, show_default=True, help="Cache salts in use."),
    click.option("--adapters", type=click.IntRange(0), default=0, show_default=True, help="LoRA adapters in use."),
    click.option(
        "--hash-seed",
        type=click.Choice(["per-life", "fixed"]),
        default="per-life",
        show_default=True,
        help="Whether engine hashes differ between ranks and process lives.",
    ),
    click.option("--hash-form", type=click.Choice(["u64", "bytes32"]), default="u64", show_default=True),
    click.option(
        "--wire", type=click.Choice(WIRES), default="map", show_default=True, help="Encoding of events: 0.24 and later, 0.16, 0.23."
    ),
    click.option("--limit", type=click.IntRange(1), help="At most so many requests of the trace."),
    click.option(
        "--from", "from_s", type=FiniteRange(min=0), default=0.0, show_default=True, help="Start of the trace's window, in seconds."
    ),
    click.option("--until", "until_s", type=FiniteRange(min=0), help="End of the trace's window, in seconds."),
)
_SERVING = (
    click.option("--speed", type=_Speed(), default="1", show_default=True, metavar="FACTOR|max", help="Engine seconds per second."),
    click.option("--rebase", is_flag=True, help="Move engine time so that it starts now."),
    click.option("--scale-time", is_flag=True, help="With --rebase and --speed: engine time keeps up with the clock."),
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind."),
    click.option(
        "--port", type=click.IntRange(1, 65_535), help="Port of the first rank, the next rank takes the next. Default: free ports."
    ),
    click.option("--replay-port", type=click.IntRange(1, 65_535), help="The same for replay. Default: behind the ranks' ports."),
    click.option(
        "--metrics-port",
        type=click.IntRange(0, 65_535),
        help="Serve the engines' own metrics on this port of loopback, each rank's at a path of its own; 0: any free one.",
    ),
    click.option(
        "--metrics-fault",
        type=click.Choice(get_args(Fault)),
        help="Let the metrics of simulated engines contradict their events, as a wrong declaration or missed events would.",
    ),
    click.option(
        "--wait-subscribers", type=click.IntRange(0), default=0, show_default=True, help="Subscribers each rank waits for before it starts."
    ),
    click.option("--wait-timeout", type=FiniteRange(min=0), help="Start without them after so many seconds."),
    click.option("--linger", type=FiniteRange(min=0), help="Answer replay for so many seconds after the end. Default: until Ctrl-C."),
    click.option("--rebind", is_flag=True, help="Close and reopen the sockets when an engine restarts."),
    click.option(
        "--replay-layout", type=click.Choice(["topic", "bare"]), default="topic", show_default=True, help="As vLLM from 0.26 on, or before."
    ),
    click.option(
        "--write", type=click.Path(path_type=Path, dir_okay=False), help="Write captures (raw frames, a file per instance), serve nothing."
    ),
    click.option("--json", "as_json", is_flag=True, help="One JSON document per line and event."),
)


def _options(command: C) -> C:
    return with_options(command, (*_WHAT, *_FLEET, *_DECLARATIONS, *_SERVING))


@click.command()
@_options
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
    given = _Given(**what)
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
    _check_applicable(given, click.get_current_context())
    sources, plans = _sources(given)
    if write is not None:
        _write(sources, plans, write, as_json)
    else:
        _serve(sources, plans, options, linger, as_json)


def _check_applicable(given: _Given, context: click.Context) -> None:
    """There is one thing to serve; an option that has no effect on it is a mistake, and is said."""
    if not (given.captures or given.synthetic or given.preset or given.trace):
        raise click.UsageError("nothing to serve: give captures, --synthetic, --preset or --trace")
    if sum((given.synthetic, given.preset is not None, given.trace is not None)) > 1:
        raise click.UsageError("--synthetic, --preset and --trace are three different fleets: give one")
    if given.trace is not None:
        applicable = _FLEET_SHAPE | _ONLY_TRACE
    elif given.synthetic:
        applicable = _FLEET_SHAPE | _NOT_TRACE
    else:
        applicable = {"seed", "duration"} if given.preset == "demo" else set()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in _FLEET_SHAPE | _ONLY_TRACE | _NOT_TRACE or name in applicable:
            continue
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            kind = (
                "--trace"
                if given.trace
                else "--synthetic"
                if given.synthetic
                else f"--preset {given.preset}"
                if given.preset
                else "captures"
            )
            raise click.UsageError(f"{parameter.opts[0]} has no effect on {kind}")


def _sources(given: _Given) -> tuple[list[RankSource], list[RankPlan]]:
    made = _captures(given)
    plans: list[RankPlan] = []
    if given.preset or given.synthetic or given.trace:
        spec, requests = _fleet(given)
        plans = fleet.plan(spec, requests)
        # Days of a trace don't fit in memory: those batches are made while they are served or written.
        lazy = given.trace is not None
        made += [fleet.source(spec, rank, lazy=lazy) for rank in plans]
    return [_declared(source, given) for source in made], plans


def _captures(given: _Given) -> list[RankSource]:
    if given.instance and len(given.captures) > 1:
        raise click.UsageError("--instance names one capture: with several, write NAME=PATH for each")
    declared = Declaration(reuse_reporting="unlabelled", removals="per_copy")
    made: list[RankSource] = []
    for text in given.captures:
        name, path = _named(text)
        made += recording.from_capture(given.instance or name, path, declared)
    return made


def _named(text: str) -> tuple[str, Path]:
    """``NAME=PATH``, or a path whose file name up to the first dot is the name."""
    name, equals, path = text.partition("=")
    if equals and "/" not in name and not Path(text).exists():
        if not name or not path:
            raise click.UsageError(f"{text!r}: expected NAME=PATH")
        return name, Path(path)
    return Path(text).name.split(".frames.")[0].split(".jsonl")[0], Path(text)


def _declared(source: RankSource, given: _Given) -> RankSource:
    declaration = Declaration(
        reuse_reporting=cast("ReuseReporting", given.reuse_reporting or source.declaration.reuse_reporting),
        removals=cast("Removals", given.removals),
        workload=given.workload or source.declaration.workload,
        model=given.model or source.declaration.model,
        kv_connector=given.kv_connector,
        gpus_per_rank=given.gpus_per_rank or source.declaration.gpus_per_rank,
        kv_bytes_per_token=given.kv_bytes_per_token or source.declaration.kv_bytes_per_token,
        prefill_rate=given.prefill_rate or source.declaration.prefill_rate,
    )
    topic = source.topic if given.topic is None else given.topic.encode()
    return replace(source, declaration=declaration, topic=topic)


def _fleet(given: _Given) -> tuple[FleetSpec, dict[str, list[Request]] | None]:
    if given.preset is not None:
        ready = {"demo": presets.demo_fleet(given.duration or 20.0, given.seed or presets.DEMO_SEED), **presets.test_fleets()}
        return ready[given.preset], None
    if given.ranks is not None and given.instances is not None:
        raise click.UsageError("--ranks and --instances both say how large the fleet is: give one")
    if given.ranks is not None and given.ranks % given.dp_size:
        raise click.UsageError(f"--ranks {given.ranks} is no multiple of --dp-size {given.dp_size}")
    count = given.ranks // given.dp_size if given.ranks is not None else given.instances or 3
    workload = given.workload or ("trace" if given.trace else "synthetic")
    requests: dict[str, list[Request]] | None = None
    duration = given.duration or 60.0
    workloads: tuple[WorkloadSpec, ...] = ()
    if given.trace is not None:
        arriving = list(read_trace(given.trace, limit=given.limit, from_s=given.from_s, until_s=given.until_s))
        if not arriving:
            raise KvcensusError(f"{given.trace}: no request in the window asked for")
        requests = {workload: arriving}
        duration = given.duration or arriving[-1].arrival_us / 1_000_000 + TRACE_DRAIN_S
    else:
        adapters = tuple(f"adapter-{number}" for number in range(1, given.adapters + 1))
        workloads = (WorkloadSpec(workload, rate=given.rate, salts=given.salts, adapters=adapters),)
    engine = _engine(given)
    prefix = given.instance or "sim"
    return (
        FleetSpec(
            tuple(
                InstanceSpec(
                    f"{prefix}-{index}",
                    workload,
                    engine,
                    given.dp_size,
                    given.model,
                    _turns(given.flush_every, index, count, duration),
                    _turns(given.restart_every, index, count, duration),
                )
                for index in range(count)
            ),
            workloads,
            duration,
            given.seed,
            cast("Routing", given.routing),
        ),
        requests,
    )


def _engine(given: _Given) -> EngineSpec:
    seed = cast("HashSeed", given.hash_seed.replace("-", "_"))
    form, wire = cast("HashForm", given.hash_form), cast("Wire", given.wire)
    if given.trace is None:
        return EngineSpec(given.pool_blocks or _SYNTHETIC_POOL, given.block_size, wire, form, seed)
    # Prompts of 12,000 tokens on average need an engine of the size that real ones have.
    return EngineSpec(
        given.pool_blocks or _TRACE_POOL,
        given.block_size,
        wire,
        form,
        seed,
        max_batched_tokens=8_192,
        prefill_chunk=2_048,
        max_running=128,
        step_us=12_000,
    )


def _turns(every_s: float | None, index: int, count: int, duration_s: float) -> tuple[float, ...]:
    """The instances take turns: the first at ``every_s``, the second at twice that, and so on."""
    if every_s is None:
        return ()
    last = int(duration_s / every_s)
    return tuple(every_s * turn for turn in range(index + 1, last + 1, count))


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
