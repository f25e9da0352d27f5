"""The options of ``kvcensus simulate``, and which of them have an effect on what is served."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click
from click.core import ParameterSource

from console.number_options import FiniteRange
from console.option_groups import C, with_options
from console.option_types import ByteSize
from producers.simulate import presets
from producers.simulate.encode import WIRES
from producers.simulate.metrics import Fault

_FAST = "max"

_MOST_RANKS = 4_096
"""Each rank has two sockets, and its whole workload in memory."""


@dataclass(frozen=True)
class Given:
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


def simulate_options(command: C) -> C:
    """Add all of them; those that describe what to serve are the fields of :class:`Given`."""
    return with_options(command, (*_WHAT, *_FLEET, *_DECLARATIONS, *_SERVING))


def check_applicable(given: Given, context: click.Context) -> None:
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
