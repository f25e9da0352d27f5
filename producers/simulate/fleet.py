"""A fleet of simulated engines from one seed: who receives which request, and what every rank then publishes.

The same spec gives the same bytes on any machine, whichever rank is asked first: ranks share only the list of requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, get_args

from producers.simulate.engine import Control, EngineRank, EngineSpec, EngineStats
from producers.simulate.source import RankSource, SourceBatch
from producers.simulate.workload import SECOND_US, Request, WorkloadSpec, requests
from schemas.errors import KvcensusError
from schemas.records import Declaration, rank_key

Routing = Literal["round-robin", "random", "prefix"]

DEFAULT_START_US = 1_796_000_000 * SECOND_US
"""Engine time at which a fleet starts unless told otherwise: fixed, so that a seed gives the same bytes on any day."""


@dataclass(frozen=True)
class InstanceSpec:
    """One engine deployment: ``dp_size`` ranks of the same engine. Flushes and restarts are seconds from the start.

    ``gpus_per_rank``, ``kv_bytes_per_token`` and ``prefill_rate`` are what its operator would declare, None: nothing.
    """

    name: str
    workload: str
    engine: EngineSpec = field(default_factory=EngineSpec)
    dp_size: int = 1
    model: str | None = None
    flush_at_s: tuple[float, ...] = ()
    restart_at_s: tuple[float, ...] = ()
    gpus_per_rank: float | None = None
    kv_bytes_per_token: int | None = None
    prefill_rate: float | None = None


@dataclass(frozen=True)
class FleetSpec:
    """Everything a fleet is made of. A workload's requests go to the ranks of the instances that name it, as ``routing`` says."""

    instances: tuple[InstanceSpec, ...]
    workloads: tuple[WorkloadSpec, ...]
    duration_s: float = 20.0
    seed: int = 0
    routing: Routing = "round-robin"
    start_us: int = DEFAULT_START_US

    @property
    def duration_us(self) -> int:
        """Engine time the fleet runs for, in microseconds."""
        return round(self.duration_s * SECOND_US)

    @property
    def ranks(self) -> int:
        """How many ranks the fleet has."""
        return sum(instance.dp_size for instance in self.instances)


class RankPlan:
    """One rank before it has run: iterate it for its batches, as often as wanted. ``stats`` are those of the newest run."""

    def __init__(self, spec: FleetSpec, instance: InstanceSpec, dp_rank: int, received: Sequence[Request]) -> None:
        self.instance = instance
        self.dp_rank = dp_rank
        self.stats = EngineStats()
        self._spec = spec
        self._received = received

    def __iter__(self) -> Iterator[SourceBatch]:
        """The batches of a fresh run of this rank, made as they are asked for."""
        instance = self.instance
        rank = EngineRank(instance.engine, self.dp_rank, _roots(self._spec.seed, instance, self.dp_rank))
        self.stats = rank.stats
        controls = [Control(round(at * SECOND_US), "flush") for at in instance.flush_at_s]
        controls += [Control(round(at * SECOND_US), "restart") for at in instance.restart_at_s]
        return rank.run(self._received, controls, self._spec.start_us, self._spec.duration_us)


def _roots(seed: int, instance: InstanceSpec, dp_rank: int) -> Callable[[int], bytes]:
    if instance.engine.hash_seed == "fixed":
        return lambda life: b"kvcensus simulated engine"
    return lambda life: f"{seed}/{rank_key(instance.name, dp_rank)}/{life}".encode()


def check(spec: FleetSpec) -> None:
    """Raise :class:`KvcensusError` for a fleet that can't be."""
    if not spec.instances:
        raise KvcensusError("a fleet needs at least one instance")
    if spec.duration_s <= 0:
        raise KvcensusError(f"the duration must be above 0 seconds, not {spec.duration_s:g}")
    if spec.routing not in get_args(Routing):
        raise KvcensusError(f"unknown routing {spec.routing!r}; one of {', '.join(get_args(Routing))}")
    names = [instance.name for instance in spec.instances]
    if len(set(names)) != len(names):
        raise KvcensusError(f"two instances of one name in {', '.join(names)}")
    served = {instance.workload for instance in spec.instances}
    for workload in spec.workloads:
        if workload.name not in served:
            raise KvcensusError(f"no instance serves workload {workload.name!r}")
    for instance in spec.instances:
        if instance.dp_size < 1:
            raise KvcensusError(f"instance {instance.name!r}: dp_size must be at least 1, not {instance.dp_size}")
        instance.engine.check(f"instance {instance.name!r}")


def plan(spec: FleetSpec, given: Mapping[str, Sequence[Request]] | None = None) -> list[RankPlan]:
    """The fleet's ranks, each with the requests routed to it, in the order of instances and ranks.

    ``given`` holds requests by workload that come from elsewhere (a trace), beside those of the spec's own workloads.
    """
    check(spec)
    by_workload: dict[str, Sequence[Request]] = dict(given or {})
    for workload in spec.workloads:
        by_workload[workload.name] = requests(workload, spec.seed, spec.duration_us)
    received: dict[tuple[str, int], list[Request]] = {
        (instance.name, rank): [] for instance in spec.instances for rank in range(instance.dp_size)
    }
    for name, sent in by_workload.items():
        targets = [received[i.name, rank] for i in spec.instances if i.workload == name for rank in range(i.dp_size)]
        if not targets:
            raise KvcensusError(f"no instance serves workload {name!r}")
        choose = _router(spec, name, len(targets))
        for request in sent:
            targets[choose(request)].append(request)
    return [
        RankPlan(spec, instance, rank, received[instance.name, rank]) for instance in spec.instances for rank in range(instance.dp_size)
    ]


def _router(spec: FleetSpec, workload: str, targets: int) -> Callable[[Request], int]:
    if spec.routing == "prefix":
        return lambda request: int.from_bytes(request.route_key, "big") % targets
    if spec.routing == "random":
        rng = Random(f"{spec.seed}/routing/{workload}")  # noqa: S311
        return lambda request: rng.randrange(targets)
    turn = iter(range(sys.maxsize))
    return lambda request: next(turn) % targets


def declaration(instance: InstanceSpec) -> Declaration:
    """What an operator would declare about such an instance: its stream never announces reused blocks, and removes per copy."""
    return Declaration(
        reuse_reporting="none",
        removals="per_copy",
        workload=instance.workload,
        model=instance.model,
        gpus_per_rank=instance.gpus_per_rank,
        kv_bytes_per_token=instance.kv_bytes_per_token,
        prefill_rate=instance.prefill_rate,
    )


def sources(spec: FleetSpec, given: Mapping[str, Sequence[Request]] | None = None, *, lazy: bool = False) -> list[RankSource]:
    """The fleet ready to be served or written: one source per rank.

    ``lazy`` leaves the making of batches to whoever iterates them: for long runs that would not fit in memory.
    """
    return [source(spec, rank, lazy=lazy) for rank in plan(spec, given)]


def source(spec: FleetSpec, rank: RankPlan, *, lazy: bool = False) -> RankSource:
    """One planned rank as a source; its ``stats`` are complete once its batches have been made."""
    batches = rank if lazy else list(rank)
    return RankSource(rank.instance.name, rank.dp_rank, batches, declaration(rank.instance), spec.start_us)
