"""Captures as sources, and sources as captures: raw frames, one JSON line per message, gzipped."""

from __future__ import annotations

import base64
import gzip
import heapq
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from producers import capture, wire
from producers.simulate.metrics import beside
from producers.simulate.source import RankSource, SourceBatch
from schemas.errors import KvcensusError
from schemas.records import Declaration

SUFFIX = ".frames.jsonl.gz"


def from_capture(instance_id: str, path: Path, declaration: Declaration) -> list[RankSource]:
    """One source per rank of a capture, by the batches' own rank numbers; sequence numbers and payloads as they were recorded.

    A sequence number that falls back starts a new process life. All ranks of a capture share the time of its first batch as
    their origin, and the metrics pages recorded beside it, if there are any. Raises :class:`KvcensusError` for a file that is no capture
    or holds no message.
    """
    ranks = {rank: list(frames) for rank, frames in capture.ranks(path).items()}
    timed = {rank: list(_lives(frames)) for rank, frames in ranks.items()}
    if not any(timed.values()):
        raise KvcensusError(f"{path}: holds no message of an engine")
    origin_us = min(batch.at_us for batches in timed.values() for batch in batches)
    return [
        RankSource(instance_id, rank, batches, declaration, origin_us, ranks[rank][0].topic, beside(path))
        for rank, batches in sorted(timed.items())
        if batches
    ]


def _lives(frames: Iterable[capture.Frame]) -> Iterator[SourceBatch]:
    life, newest, at_us = 0, -1, 0
    sent: dict[int, bytes] = {}
    for frame in frames:
        try:
            at_us = wire.micros(wire.timestamp(frame.payload))
        except wire.WireError:
            # Served like any other: refusing it is the reader's part. It stands at the time of the one before it.
            at_us = at_us or round(frame.received_at_s * 1_000_000)
        if frame.seq <= newest and sent.get(frame.seq) != frame.payload:
            life += 1
            newest = -1
            sent.clear()
        newest = max(newest, frame.seq)
        sent[frame.seq] = frame.payload
        yield SourceBatch(life, frame.seq, at_us, frame.payload)


def paths_for(sources: Sequence[RankSource], path: Path) -> dict[str, Path]:
    """Which file each instance goes to: ``path`` itself for a single one, else ``NAME`` before the suffix."""
    names = list(dict.fromkeys(source.instance_id for source in sources))
    if len(names) == 1:
        return {names[0]: path}
    suffix = SUFFIX if path.name.endswith(SUFFIX) else "".join(path.suffixes[-2:])
    stem = path.name.removesuffix(suffix) if suffix else path.name
    return {name: path.with_name(f"{stem}.{name.replace('/', '_')}{suffix}") for name in names}


def write(sources: Sequence[RankSource], path: Path) -> dict[str, tuple[Path, int]]:
    """Write one capture per instance, its ranks' messages in the order of engine time; returns (file, messages) by instance.

    The same sources give the same bytes. Raises :class:`KvcensusError` when a file can't be written.
    """
    written: dict[str, tuple[Path, int]] = {}
    for name, target in paths_for(sources, path).items():
        ranks = [source for source in sources if source.instance_id == name]
        try:
            with _whole(target) as raw:
                written[name] = (target, _write_one(ranks, raw))
        except OSError as error:
            raise KvcensusError(f"{target}: can't be written: {error.strerror or error}") from error
    return written


@contextmanager
def _whole(target: Path) -> Iterator[io.BufferedWriter]:
    """``target`` to write to: all of it is there afterwards, or what was there before."""
    if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
        with target.open("wb") as file:
            yield file
        return
    draft = target.with_name(f".{target.name}.part")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(target)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _write_one(ranks: Sequence[RankSource], raw: io.BufferedIOBase | io.BufferedWriter) -> int:
    def tagged(source: RankSource, index: int) -> Iterator[tuple[int, int, RankSource, SourceBatch]]:
        for batch in source.batches:
            yield batch.at_us, index, source, batch

    count = 0
    # No name and no time in the header, so that equal content is an equal file.
    with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as packed:
        streams = (tagged(source, index) for index, source in enumerate(ranks))
        for at_us, _, source, batch in heapq.merge(*streams, key=lambda entry: entry[:2]):
            frames = (source.topic, batch.seq.to_bytes(8, "big"), batch.payload)
            line = {"t": at_us / 1_000_000, "frames": [base64.b64encode(frame).decode() for frame in frames]}
            packed.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            count += 1
    return count
