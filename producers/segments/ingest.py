"""Sealed segments as the messages that a forwarder would have sent. Reads files, sends nothing.

Runs are told one after another, oldest first, each segment by its number. A segment of ours gives back the very facts that were
written, so that what was sent already is known again by (rank, life, number); where batches between two segments are missing, a
loss says so. Segments of other producers go through :mod:`producers.segments.foreign`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from msgspec import structs

from producers.segments import reader, unshape
from producers.segments.contract import CACHE_KINDS, MARKERS, ContractError, Row, incarnation_order
from producers.segments.foreign import ForeignRun, Survey
from producers.segments.seal import SegmentError
from producers.segments.shape import Fact
from schemas.errors import KvcensusError
from schemas.records import NO_SEQ, EngineMetrics, Lifecycle, Loss, RankMessage

OnFile: TypeAlias = Callable[[Path], None]
"""Told of each file once it is done with, for whoever shows progress."""

_FOREIGN_KINDS = (*CACHE_KINDS, *MARKERS, "holder_reset", "identity_refused", "agent_start", "heartbeat", "agent_stop", "segments_dropped")
_OWN_KINDS = (*MARKERS, "segments_dropped", "orphan_dropped")


@dataclass
class Tally:
    """What an ingest found and made.

    ``vanished_files`` were taken away meanwhile, by the bound on the disk or by whoever ships them. ``segments_missing``: numbers that
    no file has between two that are there. ``segments_dropped``: segments that their producer said it dropped. ``unknown_kinds``:
    records of kinds that mean nothing to us.
    """

    files: int = 0
    refused_files: list[str] = field(default_factory=list)
    repeated_files: int = 0
    skipped_files: int = 0
    vanished_files: int = 0
    incarnations: int = 0
    orphans: int = 0
    segments_missing: int = 0
    segments_dropped: int = 0
    records: int = 0
    unknown_kinds: int = 0
    messages: int = 0
    batches: int = 0
    losses: int = 0
    refusals: int = 0
    lifecycle: int = 0
    metrics: int = 0

    def count(self, fact: Fact) -> None:
        """Add one fact."""
        if isinstance(fact, Lifecycle):
            self.lifecycle += 1
        elif isinstance(fact, EngineMetrics):
            self.metrics += 1
        else:
            self.messages += 1
            self.batches += fact.batch is not None
            self.losses += fact.loss is not None
            self.refusals += fact.refusal is not None


@dataclass(frozen=True)
class _Source:
    """A segment by its header; ``first`` is the record behind that, if there is one. ``digest`` is of the file's bytes."""

    path: Path
    digest: bytes
    header: Row
    first: Row | None

    @property
    def segment_seq(self) -> int:
        return self.header.segment_seq or 0


@dataclass
class _Run:
    """The segments of one incarnation in their order, or one segment without an owner."""

    name: str
    sources: list[_Source]
    order: tuple[float, int, str]
    sequenced: bool
    ours: bool


class Ingest:
    """Sealed segments in some paths. ``on_file`` is told of every file that was looked at, told, or refused.

    Raises :class:`SegmentError` for a path that is not there; a file that cannot be read whole is refused, in :attr:`tally`.
    """

    def __init__(self, paths: Iterable[Path], on_file: OnFile = lambda path: None) -> None:
        self.tally = Tally()
        self._on_file = on_file
        found = reader.find(paths)
        self.files = found.segments
        self.tally.skipped_files = found.skipped
        self._losses = _Losses()
        self._refused: set[Path] = set()

    def facts(self) -> Iterator[Fact]:
        """Every fact in order, run by run; nothing of a file that cannot be read whole. Once."""
        for run in self._runs():
            if run.sequenced:
                self.tally.incarnations += 1
                numbers = [source.segment_seq for source in run.sources]
                self.tally.segments_missing += sum(max(after - before - 1, 0) for before, after in itertools.pairwise(numbers))
            else:
                self.tally.orphans += 1
            for fact in self._run(run):
                self.tally.count(fact)
                yield fact

    # -- which segments there are

    def _runs(self) -> list[_Run]:
        sources: list[_Source] = []
        known: set[bytes] = set()
        for path in self.files:
            try:
                digest, head = reader.digest(path), reader.head(path, 2)
            except SegmentError as error:
                self._refuse(path, error)
                continue
            if digest in known:
                self.tally.repeated_files += 1
                self._on_file(path)
                continue
            known.add(digest)
            sources.append(_Source(path, digest, head[0], head[1] if len(head) > 1 else None))
        return sorted(_grouped(sources), key=lambda run: run.order)

    def _refuse(self, path: Path, error: KvcensusError) -> None:
        if path not in self._refused:
            self._refused.add(path)
            if isinstance(error, reader.VanishedError):
                self.tally.vanished_files += 1
            else:
                self.tally.refused_files.append(str(error))
            self._on_file(path)

    # -- one run

    def _run(self, run: _Run) -> Iterator[Fact]:
        if run.ours:
            for source in run.sources:
                rows = self._read(source)
                if rows is not None:
                    yield from self._own(source, rows)
            return
        survey = Survey()
        for source in run.sources:
            rows = self._read(source)
            if rows is not None and not run.sequenced and any(unshape.is_own(row) for row in rows):
                yield from self._own(source, rows)
                return
            for row in rows or ():
                survey.add(row)
        survey.end()
        converted = ForeignRun(run.name, survey, sequenced=run.sequenced)
        for source in run.sources:
            rows = self._read(source)
            if rows is None:
                continue
            yield from converted.segment(rows, source.segment_seq if run.sequenced else None)
            self.tally.unknown_kinds += sum(row.kind not in _FOREIGN_KINDS for row in rows)
            self._done(source, rows)
        yield from converted.end()

    def _read(self, source: _Source) -> list[Row] | None:
        """The records of a file, None if it is refused."""
        if source.path in self._refused:
            return None
        try:
            return reader.read(source.path)
        except SegmentError as error:
            self._refuse(source.path, error)
            return None

    def _own(self, source: _Source, rows: list[Row]) -> list[Fact]:
        try:
            facts, unknown = own_facts(rows)
        except ContractError as error:
            self._refuse(source.path, SegmentError(f"{source.path}: {error}"))
            return []
        self.tally.unknown_kinds += unknown
        self._done(source, rows)
        return [told for fact in facts for told in self._losses.before(fact)]

    def _done(self, source: _Source, rows: list[Row]) -> None:
        self.tally.files += 1
        self.tally.records += len(rows)
        self.tally.segments_dropped += sum(row.count or 0 for row in rows if row.kind == "segments_dropped")
        self._on_file(source.path)


def own_facts(rows: list[Row]) -> tuple[list[Fact], int]:
    """The facts of a segment of ours, and how many records mean nothing to us. Raises :class:`ContractError`."""
    facts: list[Fact] = []
    unknown = 0
    at = 0
    while at < len(rows):
        row = rows[at]
        at += 1
        if not unshape.is_own(row):
            if row.kind in CACHE_KINDS:
                raise ContractError(f"record {at}: {row.kind} outside of a batch")
            unknown += row.kind not in _OWN_KINDS
            continue
        length = unshape.body_length(row)
        body = rows[at : at + length]
        if len(body) != length:
            raise ContractError(f"batch {row.seq}: its records are not all there")
        at += length
        facts.append(unshape.fact(row, body))
    return facts, unknown


class _Losses:
    """Says of batches that are missing between two that are there what a forwarder would have said: that they are lost."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], tuple[str, int, RankMessage]] = {}

    def before(self, fact: Fact) -> Iterator[Fact]:
        """``fact``, behind the loss before it, if there is one."""
        if isinstance(fact, RankMessage):
            rank = fact.instance_id, fact.dp_rank
            life, expected, last = self._next.get(rank, ("", 0, fact))
            if life != fact.life_id:
                expected = -1
            if fact.batch is not None or (fact.refusal is not None and fact.seq < NO_SEQ):
                first = fact.seq - fact.skipped
                if 0 <= expected < first:
                    loss = Loss(expected, first - 1, "missing in the segments")
                    yield structs.replace(last, batch=None, seq=first, skipped=0, loss=loss, **_NOTHING)
                expected = max(expected, fact.seq + 1)
            elif fact.loss is not None:
                expected = max(expected, fact.loss.last_seq + 1)
            self._next[rank] = fact.life_id, expected, fact
        yield fact


_NOTHING: dict[str, None] = dict.fromkeys(("holder_reset", "refusal", "declaration", "identity_refused", "scrape", "departure"))


def _grouped(sources: Iterable[_Source]) -> Iterator[_Run]:
    """Segments by incarnation; of ours also by rank, since a host may give one process id and start to two containers."""
    runs: dict[tuple[str, str | None, int | None], list[_Source]] = {}
    for source in sources:
        header = source.header
        if header.incarnation is not None:
            runs.setdefault((header.incarnation, header.instance_id, header.dp_rank), []).append(source)
            continue
        first = source.first if source.first is not None else header
        observed = unshape.observed_at_ms(first)
        name = f"orphan-{source.digest[:8].hex()}"  # what it holds, and not how the file is called, is the same in every ingest
        yield _Run(name, [source], (first.at_ms if observed is None else observed, 0, name), sequenced=False, ours=False)
    for (incarnation, instance_id, dp_rank), of_run in runs.items():
        of_run.sort(key=lambda source: source.segment_seq)
        order = incarnation_order(incarnation) or (of_run[0].header.at_ms, 0)
        ours = instance_id is not None and dp_rank is not None
        yield _Run(incarnation, of_run, (*order, incarnation), sequenced=True, ours=ours)
