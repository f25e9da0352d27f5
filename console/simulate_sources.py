"""What the options of ``kvcensus simulate`` ask for: captures and fleets as sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import click

from console.simulate_options import Given
from producers.simulate import fleet, presets, recording
from producers.simulate.encode import Wire
from producers.simulate.engine import EngineSpec, HashSeed
from producers.simulate.fleet import FleetSpec, InstanceSpec, RankPlan, Routing
from producers.simulate.hashing import HashForm
from producers.simulate.source import RankSource
from producers.simulate.trace import read_trace
from producers.simulate.workload import Request, WorkloadSpec
from schemas.errors import KvcensusError
from schemas.records import Declaration, Removals, ReuseReporting

TRACE_DRAIN_S = 120.0
"""How long a trace's fleet goes on after the last request has arrived."""

_SYNTHETIC_POOL, _TRACE_POOL = 512, 8_285


def sources_of(given: Given) -> tuple[list[RankSource], list[RankPlan]]:
    """Every rank to serve, and the plans of those that are simulated.

    Raises :class:`click.UsageError` or :class:`KvcensusError` for options that cannot be.
    """
    made = _captures(given)
    plans: list[RankPlan] = []
    if given.preset or given.synthetic or given.trace:
        spec, requests = _fleet(given)
        plans = fleet.plan(spec, requests)
        # Days of a trace don't fit in memory: those batches are made while they are served or written.
        lazy = given.trace is not None
        made += [fleet.source(spec, rank, lazy=lazy) for rank in plans]
    return [_declared(source, given) for source in made], plans


def _captures(given: Given) -> list[RankSource]:
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


def _declared(source: RankSource, given: Given) -> RankSource:
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


def _fleet(given: Given) -> tuple[FleetSpec, dict[str, list[Request]] | None]:
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


def _engine(given: Given) -> EngineSpec:
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
