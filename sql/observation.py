"""What observation itself was like: forwarders' runs, gaps, refused identities, and what may be said from them. Pure.

Two clocks occur and never meet: what ends in ``_us`` is engine time, what ends in ``_ms`` the forwarder's clock. A verdict is given in the
clock of the facts that it rests on, whatever the other one reads. :mod:`sql.observation_load` reads the facts from ClickHouse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from schemas.records import Register

Rank = tuple[str, int]
Stretch = tuple[int, int]
Liveness = Literal["live", "departed", "unexplained"]
GapKind = Literal["lost", "refused", "dropped", "undeclared"]

MESSAGES_DROPPED = "messages were dropped"
"""What a refusal says that stands for what only a producer's counters tell of: it came somewhere between two life signs."""

DEFAULT_STALENESS_MS = 60_000
"""So long a run may be silent where it declared no bound of its own."""


@dataclass(frozen=True)
class Drop:
    """Between two life signs of a run its counters grew: ``lost`` batches, ``refused`` ones, and ``spooled`` ones that were forced out."""

    from_ms: int
    to_ms: int
    lost: int = 0
    refused: int = 0
    spooled: int = 0
    unknown_events: int = 0


@dataclass(frozen=True)
class Run:
    """One run of one forwarder for one rank, as its life signs tell: the first and last of them, and whether the last was a stop."""

    instance_id: str
    dp_rank: int
    incarnation: str
    first_ms: int
    last_ms: int
    stopped: bool = False
    stop_reason: str | None = None
    staleness_ms: int = 0
    drops: tuple[Drop, ...] = ()

    @property
    def rank(self) -> Rank:
        """Whose run it is."""
        return self.instance_id, self.dp_rank


@dataclass(frozen=True)
class Gap:
    """A stretch of one rank's stream in which something is missing.

    ``kind``: ``lost`` (a declared range), ``refused`` (batches came and could not be read, or something of unknown extent was missing),
    ``dropped`` (only a run's counters tell), ``undeclared`` (the numbers tell, and no forwarder said so). ``batches``: how many, None if
    nobody knows. ``from_us`` and ``to_us`` are the batches before and after it (None: there is none), ``from_ms`` and ``to_ms`` the life
    signs around its notice. ``narrowed``: two observed numbers of one life enclose all that is missing, so that nothing outside of
    ``from_us`` to ``to_us`` is touched; otherwise the whole stretch between the life signs may be.
    """

    instance_id: str
    dp_rank: int
    life_id: str
    incarnation: str
    kind: GapKind
    reason: str
    batches: int | None = None
    from_us: int | None = None
    to_us: int | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    observed_ms: int | None = None
    narrowed: bool = False

    @property
    def rank(self) -> Rank:
        """Whose stream it is in."""
        return self.instance_id, self.dp_rank


@dataclass(frozen=True)
class RefusedIdentity:
    """A forwarder forgot ``refused`` blocks of one group: what chains onto them in the window (engine time, inclusive) may lack an id."""

    instance_id: str
    dp_rank: int
    group_idx: int
    refused: int
    from_us: int
    to_us: int


@dataclass(frozen=True)
class Declared:
    """What was declared of a rank from one moment on; ``observed_ms`` and ``incarnation`` say by which run."""

    instance_id: str
    dp_rank: int
    incarnation: str
    observed_ms: int
    labels: Mapping[str, str]
    workload: str | None
    model: str | None
    reuse_reporting: str
    heartbeat_ms: int
    staleness_ms: int


@dataclass(frozen=True)
class KeySpace:
    """Ranks whose content ids were made with one key, and so compare with each other and with no others."""

    key_epoch: int
    canary: str
    ranks: tuple[Rank, ...]


@dataclass(frozen=True)
class Breach:
    """The stream and the engine's own metrics contradict each other: ``found`` blocks where at most ``bound`` can be."""

    instance_id: str
    dp_rank: int
    kind: str
    at_us: int
    scraped_at_ms: int
    found: int
    bound: int


@dataclass
class Audit:
    """Removals of an instance, each held against the store of the same block that came before it.

    ``agreed``: both name the same content, or neither names any. ``mismatched``: within one life they name two. ``underresolved``: the
    store named it and the removal in the same life does not. ``indeterminate``: no claim can be made, since the store is of another life
    or of records that belong to none, or itself named no content. ``unjoined``: no store came before it; of one instant nobody can say
    which came first. ``unclaimed``, and not audited: they name no content and never do, as removals of kvcensus' own
    forwarders, which a block's id joins to its store. ``sampled``: one block in so many was looked at.
    """

    instance_id: str
    agreed: int = 0
    mismatched: int = 0
    underresolved: int = 0
    indeterminate: int = 0
    unjoined: int = 0
    unclaimed: int = 0
    sampled: int = 1

    @property
    def audited(self) -> int:
        """All that were looked at."""
        return self.agreed + self.mismatched + self.underresolved + self.indeterminate + self.unjoined


@dataclass(frozen=True)
class DeadLetter:
    """A message that was set aside; where it stood, and why."""

    topic: str
    partition: int
    offset: int
    reader: str
    reason: str
    key: str | None
    payload_bytes: int


@dataclass
class Observation:
    """The facts of a span. Lists are cut to their newest entries; the numbers beside them count all."""

    runs: list[Run] = field(default_factory=list)
    horizon_ms: int | None = None
    """The newest reading of any forwarder's clock: how far the stream itself knows."""
    gaps: list[Gap] = field(default_factory=list)
    gaps_found: int = 0
    refused_identities: list[RefusedIdentity] = field(default_factory=list)
    declared: list[Declared] = field(default_factory=list)
    key_spaces: list[KeySpace] = field(default_factory=list)
    models_undeclared: list[Rank] = field(default_factory=list)
    breaches: list[Breach] = field(default_factory=list)
    breaches_found: int = 0
    audit: list[Audit] = field(default_factory=list)
    parent_conflicts: int = 0
    parent_conflicts_sampled: int = 1
    facts_since_us: int | None = None
    """From which engine time on removals and contents were looked at; None: from the first."""
    unripe_contents: int = 0
    """Contents that two instances hold at the end of the span, for less than the skew allowance: not counted yet."""
    dead_letters: list[DeadLetter] = field(default_factory=list)
    dead_letters_found: int = 0


# -- runs


def liveness(run: Run, horizon_ms: int) -> Liveness:
    """Whether a forwarder is there, has said that it stops, or fell silent for longer than it ever declared to be.

    Silence is measured up to ``horizon_ms``, the newest reading of that clock in the stream, and not to the present: a reader of old
    records knows nothing of what came after them.
    """
    if run.stopped:
        return "departed"
    return "unexplained" if horizon_ms - run.last_ms > (run.staleness_ms or DEFAULT_STALENESS_MS) else "live"


def unwatched(runs: Iterable[Run]) -> list[Stretch]:
    """Where nobody watched, between the runs of one rank (or one instance): from a run's end, or its last life sign, to the next start."""
    found: list[Stretch] = []
    reached: int | None = None
    for run in sorted(runs, key=lambda run: run.first_ms):
        if reached is not None and run.first_ms > reached:
            found.append((reached, run.first_ms))
        reached = run.last_ms if reached is None else max(reached, run.last_ms)
    return found


def counted(runs: Iterable[Run], gaps: Iterable[Gap] = (), *, unknown_events: bool = False) -> list[Stretch]:
    """Where a rank's forwarders vouch that nothing was lost: between two life signs of one run whose counters did not grow.

    Also outside of every gap's life signs. With ``unknown_events`` False a stretch in which events of unknown types came counts as well:
    they were seen, and what they mean was not.
    """
    holes: dict[str, list[Stretch]] = {}
    for gap in gaps:
        if gap.observed_ms is not None or gap.from_ms is not None:
            holes.setdefault(gap.incarnation, []).append(
                (gap.from_ms if gap.from_ms is not None else -(2**62), gap.to_ms if gap.to_ms is not None else 2**62)
            )
    found: list[Stretch] = []
    for run in runs:
        own = holes.get(run.incarnation, [])
        own = own + [
            (drop.from_ms, drop.to_ms)
            for drop in run.drops
            if drop.lost or drop.refused or drop.spooled or (unknown_events and drop.unknown_events)
        ]
        found += without([(run.first_ms, run.last_ms)], own)
    return merged(found)


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The union of ``stretches``, in order, none touching the next."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def without(stretches: Iterable[Stretch], holes: Iterable[Stretch]) -> list[Stretch]:
    """``stretches`` less ``holes``."""
    left = list(stretches)
    for hole_start, hole_end in holes:
        cut: list[Stretch] = []
        for start, end in left:
            if hole_end <= start or hole_start >= end:
                cut.append((start, end))
                continue
            if start < hole_start:
                cut.append((start, hole_start))
            if hole_end < end:
                cut.append((hole_end, end))
        left = cut
    return left


def share(stretches: Iterable[Stretch], span: Stretch) -> float:
    """How much of ``span`` the (merged) ``stretches`` cover, 0 to 1."""
    inside = sum(max(min(end, span[1]) - max(start, span[0]), 0) for start, end in stretches)
    return inside / (span[1] - span[0]) if span[1] > span[0] else 0.0


def counted_share(observation: Observation, span_ms: Stretch, *, unknown_events: bool = False) -> float:
    """How much of a span of the forwarders' clock was counted without loss: the mean over the ranks that any run was heard of."""
    ranks = by_rank(observation.runs)
    whole = [
        share(counted(runs, [gap for gap in observation.gaps if gap.rank == rank], unknown_events=unknown_events), span_ms)
        for rank, runs in ranks.items()
    ]
    return sum(whole) / len(whole) if whole else 0.0


def absence(observation: Observation, span_ms: Stretch) -> Register:
    """How "it did not happen" may be read over a span of the forwarders' clock.

    ``exact`` only where every moment of it was counted by a run of every rank, from its start on; elsewhere a lower bound. Beyond the
    last life sign nobody vouches for anything.
    """
    return "exact" if counted_share(observation, span_ms, unknown_events=True) >= 1 else "lower_bound"


def by_rank(runs: Iterable[Run]) -> dict[Rank, list[Run]]:
    """Runs of each rank, ranks and runs in order."""
    found: dict[Rank, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.rank, run.first_ms, run.incarnation)):
        found.setdefault(run.rank, []).append(run)
    return found


# -- gaps


def explained(gaps: Sequence[Gap], runs: Iterable[Run]) -> list[Gap]:
    """``gaps`` that were declared, and what the counters of ``runs`` tell beyond them.

    A counter localises a loss no better than two life signs. Where declared ranges noticed between the same two account for all of it,
    they are all there is to know; what is left over becomes a gap of its own, with whatever extent in engine time refusals noticed there
    give it.
    """
    found = list(gaps)
    for run in runs:
        own = [gap for gap in gaps if gap.rank == run.rank and gap.incarnation == run.incarnation]
        used: set[int] = set()
        for drop in run.drops:
            for kind, count in (("lost", drop.lost), ("refused", drop.refused)):
                left = count
                for border in (False, True):  # what was noticed in the very millisecond of a life sign may belong to either side of it
                    for gap in own:
                        inside = gap.observed_ms == drop.to_ms if border else gap.from_ms == drop.from_ms
                        if left > 0 and inside and gap.kind == kind and gap.batches and id(gap) not in used:
                            used.add(id(gap))
                            left -= gap.batches
                if left > 0:
                    vague = [
                        gap
                        for gap in own
                        if gap.reason == MESSAGES_DROPPED and (gap.from_ms == drop.from_ms or gap.observed_ms == drop.to_ms)
                    ]
                    found = [gap for gap in found if not any(gap is other for other in vague)]
                    found.append(_unexplained(run, drop, left, vague, MESSAGES_DROPPED if kind == "lost" else "messages were refused"))
    return found


def _unexplained(run: Run, drop: Drop, batches: int, vague: Sequence[Gap], reason: str) -> Gap:
    starts = [gap.from_us for gap in vague]
    ends = [gap.to_us for gap in vague]
    return Gap(
        run.instance_id,
        run.dp_rank,
        vague[0].life_id if vague else "",
        run.incarnation,
        "dropped",
        reason,
        batches,
        min(start for start in starts if start is not None) if starts and None not in starts else None,
        max(end for end in ends if end is not None) if ends and None not in ends else None,
        drop.from_ms,
        drop.to_ms,
        drop.to_ms,
    )


# -- verdicts on single questions


def holder_register(refusals: Iterable[RefusedIdentity], rank: Rank, group_idx: int, span_us: Stretch) -> Register | None:
    """``lower_bound`` for what rests on the content ids of one cache group in a span of engine time, if some were refused there.

    None: nothing was refused of this holder in this span; other holders and other times are none of its business.
    """
    for refusal in refusals:
        same = (refusal.instance_id, refusal.dp_rank) == rank and refusal.group_idx == group_idx
        if same and refusal.from_us <= span_us[1] and refusal.to_us >= span_us[0]:
            return "lower_bound"
    return None
