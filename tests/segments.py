"""What the tests of segments share: facts to write, records as they lie on disk, and the contract's own schema to hold them against."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from producers.identity import IdentityKey
from producers.segments.contract import COLUMNS
from producers.segments.ingest import Ingest
from producers.segments.shape import Fact
from producers.segments.writer import SegmentWriter, rank_folder
from schemas.records import Batch, Declaration, Lifecycle, Op, RankMessage
from tests.counting import capture_sources, messages
from tests.shared_data import SHIPPED, shared_folder

CORPUS = "corpora/inference-events-1.10"
STARTED_MS = 1_785_153_670_000
KEY = IdentityKey(b"k" * 32, b"n" * 32, 3)
DECLARED = Declaration("unlabelled", "per_copy", workload="agentic", key_epoch=3, canary=KEY.canary, heartbeat_ms=60_000)

_TYPES: dict[str, tuple[type, ...]] = {"utf8": (str,), "int64": (int,), "float64": (float,), "bool": (bool,), "list<utf8>": (list,)}


def shipped_messages() -> list[list[RankMessage]]:
    """What forwarders would send for the captures that the project ships, a list per rank."""
    sources = [
        source
        for path in sorted(SHIPPED.glob("*.frames.jsonl.gz"))
        for source in capture_sources((path.name.split(".")[0], path), declaration=DECLARED)
    ]
    return messages(sources, KEY)


def batch(seq: int, life: str = "life", *, blocks: int = 1, instance: str = "i0", dp_rank: int = 0) -> RankMessage:
    """A batch of one root run, all its own."""
    ids = b"".join((seq * 1_000 + index + 1).to_bytes(16, "big") for index in range(blocks))
    at_us = STARTED_MS * 1_000 + seq * 10_000
    op = Op("STORE", 0, "GPU", None, 16, ids, ids, "ROOT", spec_kind="full_attention")
    return RankMessage(instance, dp_rank, life, seq, at_us, at_us // 1_000, "run", batch=Batch([op]))


def heartbeat(at_ms: int = STARTED_MS, **fields: Any) -> Lifecycle:
    """A heartbeat of rank i0/0."""
    counters = dict.fromkeys(
        (
            "batches",
            "blocks_stored",
            "blocks_removed",
            "unresolved_blocks",
            "unknown_events",
            "refused",
            "lost",
            "duplicates",
            "replayed",
            "publisher_restarts",
        ),
        0,
    )
    return Lifecycle(kind="heartbeat", instance_id="i0", dp_rank=0, life_id="life", incarnation="run", at_ms=at_ms, **(counters | fields))


def open_writer(folder: Path, *, started_ms: int = STARTED_MS, instance: str = "i0", dp_rank: int = 0, **options: Any) -> SegmentWriter:
    """A writer for one rank."""
    options.setdefault("declaration", DECLARED)
    options.setdefault("pid", 4242)
    return SegmentWriter(folder, instance_id=instance, dp_rank=dp_rank, started_ms=started_ms, **options)


def write_ranks(parent: Path, ranks: Iterable[Sequence[Fact]], **options: Any) -> None:
    """Segments of several ranks under ``parent``, a message at a time."""
    for facts in ranks:
        instance, dp_rank = facts[0].instance_id, facts[0].dp_rank
        with open_writer(rank_folder(parent, instance, dp_rank), instance=instance, dp_rank=dp_rank, **options) as writer:
            for fact in facts:
                assert writer.write([fact])


def ingested(*paths: Path) -> tuple[list[Fact], Ingest]:
    """Every fact in the segments of ``paths``."""
    ingest = Ingest(paths)
    return list(ingest.facts()), ingest


def by_rank(facts: Iterable[Fact]) -> dict[tuple[str, int], list[RankMessage]]:
    """The messages of each rank, in order."""
    ranks: dict[tuple[str, int], list[RankMessage]] = {}
    for fact in facts:
        if isinstance(fact, RankMessage):
            ranks.setdefault((fact.instance_id, fact.dp_rank), []).append(fact)
    return ranks


def records_of(path: Path) -> list[dict[str, Any]]:
    """The records of a segment as they lie on disk, absent fields left out; each held against the contract's schema."""
    if path.suffix == ".parquet":
        found = []
        for columns in pq.read_table(path).to_pylist():
            extra = dict(columns.pop("extra") or ())
            keep_null = {"tier"} if columns["kind"] in ("store", "evict") else set()
            record = {name: value for name, value in columns.items() if value is not None or name in keep_null}
            if "endpoints" in record:
                record["endpoints"] = [{k: v for k, v in endpoint.items() if v is not None} for endpoint in record["endpoints"]]
            found.append(record | extra)
    else:
        found = [json.loads(line) for line in path.read_bytes().splitlines()]
    for record in found:
        assert violations(record) == [], record
    return found


def write_lines(folder: Path, segments: Iterable[Sequence[dict[str, Any]]]) -> Path:
    """Segments of whoever wrote these records, as JSON lines, named as their headers say."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, records in enumerate(segments):
        first = records[0]
        name = f"seg-{first['incarnation']}-{first['segment_seq']}" if "incarnation" in first else f"orphan-{STARTED_MS + number}"
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder


@functools.cache
def contract_schema() -> dict[str, Any] | None:
    """The contract's schema, where the shared data is there."""
    folder = shared_folder()
    path = folder / CORPUS / "schema" / "records.json" if folder is not None else None
    if path is None or not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def violations(record: dict[str, Any]) -> list[str]:
    """What the contract's schema says against ``record``. A kind that it does not know it says nothing against."""
    schema = contract_schema()
    fields = schema["kinds"].get(record["kind"], {}).get("fields") if schema is not None else None
    if schema is None or fields is None:
        return []
    return [*_violations(record, fields), *_unequal_nulls(record), *_endpoints(record, schema["endpoints_element"])]


def _violations(record: dict[str, Any], fields: dict[str, Any]) -> list[str]:
    found = []
    for name, field in fields.items():
        if name not in record:
            if field["presence"] == "required":
                found.append(f"no {name}")
            continue
        value = record[name]
        expected = _TYPES.get(field["type"])
        if value is not None and expected is not None and type(value) not in expected:
            found.append(f"{name} is {value!r}, not {field['type']}")
        if "const" in field and value != field["const"]:
            found.append(f"{name} is {value!r}, not {field['const']!r}")
    return found


def _unequal_nulls(record: dict[str, Any]) -> list[str]:
    if record["kind"] in ("store", "evict") and "tier" not in record:
        return ["no tier, not even null"]
    return [f"{name} is null" for name, value in record.items() if value is None and name in COLUMNS and name != "tier"]


def _endpoints(record: dict[str, Any], element: dict[str, Any]) -> list[str]:
    return [fault for endpoint in record.get("endpoints", ()) for fault in _violations(endpoint, element)]
