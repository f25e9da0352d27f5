"""Our records as those of the segment contract. Pure.

A batch becomes one record of our own kind ``batch``, which names it and says what the contract has no field for, and right behind it
``records`` records of the contract's: one for each block stored or evicted, one for each clear. What else rides
``kvcensus.batches`` is one record each: ``holder_reset`` and ``identity_refused`` of the contract's kinds, ``loss``, ``refusal``,
``declaration``, ``scrape`` and ``departure`` of ours. Fields that the contract does not know are named as in :mod:`schemas.records`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from producers.segments.contract import VERSION, Endpoint, Record
from schemas.records import ID_BYTES, NO_ID, Declaration, EngineMetrics, Lifecycle, Op, RankMessage, split_ids

EGRESS = "pseudonymized"
"""What leaves the host: engine hashes, salts and sessions as keyed pseudonyms, tokens never."""

Fact: TypeAlias = RankMessage | Lifecycle | EngineMetrics
"""What a forwarder has to say, to Kafka or to a segment."""

_LIFECYCLE_KINDS = {"start": "agent_start", "heartbeat": "heartbeat", "stop": "agent_stop"}
_GPU_LABELS = ("gpu", "hardware")
_ENGINE_LABELS = ("vllm_version", "engine_version", "version")


@dataclass
class Stats:
    """Counters of a producer in ``heartbeat`` and ``agent_stop``, cumulative over its incarnation. None: not counted, left out."""

    msgs_seen: int
    dropped: int
    oversized: int
    unknown_types: int
    events_ingested: int
    content_unresolved: int
    content_bridge_entries: int
    content_bridge_evicted: int
    publisher_restarts: int
    endpoints: list[Endpoint] = field(default_factory=list)
    canary: str | None = None
    reuse_reporting: str | None = None
    noraw_scanned: int | None = None
    rss_bytes: int | None = None


def agent_start(
    at_ms: float,
    *,
    agent_version: str,
    endpoint_count: int,
    max_payload_bytes: int,
    egress: str = EGRESS,
    canary: str | None = None,
    reuse_reporting: str | None = None,
) -> Record:
    """A producer began. ``at_ms``: its own clock, as in every lifecycle record."""
    return _present(
        kind="agent_start",
        at_ms=float(at_ms),
        agent_version=agent_version,
        endpoint_count=endpoint_count,
        max_payload_bytes=max_payload_bytes,
        egress=egress,
        canary=canary or None,
        reuse_reporting=reuse_reporting,
    )


def heartbeat(at_ms: float, stats: Stats) -> Record:
    """A producer is there."""
    return _present(kind="heartbeat", at_ms=float(at_ms), **_stats(stats), noraw_scanned=stats.noraw_scanned, rss_bytes=stats.rss_bytes)


def agent_stop(at_ms: float, reason: str, stats: Stats) -> Record:
    """A producer ended, and says why."""
    return _present(kind="agent_stop", at_ms=float(at_ms), reason=reason, **_stats(stats))


def segment_open(
    at_ms: float,
    *,
    incarnation: str,
    segment_seq: int,
    instance_id: str,
    dp_rank: int,
    declaration: Declaration,
    max_segment_seconds: float,
) -> Record:
    """What opens every segment: whose it is, and what its producer declared. Bounds in whole seconds, rounded up."""
    labels = declaration.labels
    return _present(
        kind="segment_open",
        at_ms=float(at_ms),
        gpu=_first_of(labels, _GPU_LABELS),
        vllm_version=_first_of(labels, _ENGINE_LABELS) if declaration.engine_profile == "vllm" else None,
        event_schema_version=labels.get("event_schema_version"),
        contract_version=VERSION,
        workload_class=declaration.workload,
        heartbeat_secs=math.ceil(declaration.heartbeat_ms / 1_000),
        max_segment_secs=math.ceil(max_segment_seconds),
        key_epoch=declaration.key_epoch,
        incarnation=incarnation,
        segment_seq=segment_seq,
        instance_id=instance_id,
        dp_rank=dp_rank,
    )


def segment_recovered(at_ms: float, *, attributed: bool, dropped_bytes: int) -> Record:
    """A segment whose writer died was sealed by the next one, after ``dropped_bytes`` of it that could not be read were cut."""
    return {"kind": "segment_recovered", "at_ms": float(at_ms), "attributed": attributed, "dropped_bytes": dropped_bytes}


def segments_dropped(at_ms: float, *, incarnation: str, names: list[str], seqs: list[int], lost: list[tuple[str, int, int]]) -> Record:
    """Segments of one incarnation gave way to the bound on the disk. ``lost``: life, first and last number of the batches in them."""
    return {
        "kind": "segments_dropped",
        "at_ms": float(at_ms),
        "incarnation": incarnation,
        "count": len(seqs),
        "first": names[0],
        "last": names[-1],
        "first_seq": seqs[0],
        "last_seq": seqs[-1],
        **({"lost": msgspec.json.encode(lost).decode()} if lost else {}),
    }


def records(fact: Fact, declaration: Declaration) -> list[Record]:
    """``fact`` as records, in their order. ``declaration`` is the one that holds for it."""
    if isinstance(fact, Lifecycle):
        return [lifecycle(fact, declaration)]
    if isinstance(fact, EngineMetrics):
        return [_json_record("engine_metrics", float(fact.at_ms), fact, instance_id=fact.instance_id, dp_rank=fact.dp_rank)]
    return list(message(fact))


# -- the lifecycle


def lifecycle(record: Lifecycle, declaration: Declaration) -> Record:
    """A start, heartbeat or stop. The whole of it rides along as ``lifecycle``, JSON of our own record."""
    kind = _LIFECYCLE_KINDS[record.kind]
    own = {"lifecycle": msgspec.json.encode(record).decode()}
    if kind == "agent_start":
        start = agent_start(
            record.at_ms,
            agent_version=record.forwarder_version or declaration.forwarder_version,
            endpoint_count=1,
            max_payload_bytes=declaration.max_payload_bytes,
            canary=record.canary,
            reuse_reporting=declaration.reuse_reporting,
        )
        return start | own
    stats = _own_stats(record, declaration)
    if kind == "heartbeat":
        return heartbeat(record.at_ms, stats) | own
    return agent_stop(record.at_ms, record.reason or "stopped", stats) | own


def _own_stats(record: Lifecycle, declaration: Declaration) -> Stats:
    seen = record.batches + record.refused if record.msgs_seen is None else record.msgs_seen
    return Stats(
        msgs_seen=seen,
        dropped=record.lost,
        oversized=record.oversized or 0,
        unknown_types=record.unknown_events,
        events_ingested=record.events_ingested or 0,
        content_unresolved=record.unresolved_blocks,
        content_bridge_entries=record.content_bridge_entries or 0,
        content_bridge_evicted=record.content_bridge_evicted or 0,
        publisher_restarts=record.publisher_restarts,
        canary=record.canary,
        reuse_reporting=declaration.reuse_reporting,
        rss_bytes=record.rss_bytes,
        endpoints=[
            Endpoint(
                source=record.instance_id,
                endpoint=record.endpoint,
                msgs_seen=seen,
                dropped=record.lost,
                last_msg_at_ms=None if record.last_message_at_ms is None else float(record.last_message_at_ms),
                publisher_restarts=record.publisher_restarts,
            )
        ],
    )


def _stats(stats: Stats) -> Record:
    return {
        "msgs_seen": stats.msgs_seen,
        "dropped": stats.dropped,
        "oversized": stats.oversized,
        "unknown_types": stats.unknown_types,
        "events_ingested": stats.events_ingested,
        "content_unresolved": stats.content_unresolved,
        "content_bridge_entries": stats.content_bridge_entries,
        "content_bridge_evicted": stats.content_bridge_evicted,
        "publisher_restarts": stats.publisher_restarts,
        "canary": stats.canary or None,
        "reuse_reporting": stats.reuse_reporting,
        "endpoints": msgspec.to_builtins(stats.endpoints),
    }


# -- messages of a rank


def message(fact: RankMessage) -> Iterator[Record]:
    """The records of one message."""
    envelope: Record = {
        "instance_id": fact.instance_id,
        "dp_rank": fact.dp_rank,
        "seq": fact.seq,
        "life_id": fact.life_id,
        "incarnation": fact.incarnation,
        "at_us": fact.at_us,
        "observed_at_ms": fact.observed_at_ms,
    }
    if fact.skipped:
        envelope["skipped"] = fact.skipped
    observed = float(fact.observed_at_ms)
    if fact.batch is not None:
        batch = fact.batch
        body = [record for op in batch.ops for record in _op(op, fact)]
        yield {
            "kind": "batch",
            "at_ms": fact.at_us / 1_000,
            **envelope,
            "unknown_events": batch.unknown_events,
            "unresolved_blocks": batch.unresolved_blocks,
            "records": len(body),
            "ops": msgspec.json.encode([_beside(op) for op in batch.ops]).decode(),
        }
        yield from body
    elif fact.holder_reset is not None:
        reset = fact.holder_reset
        yield {
            "kind": "holder_reset",
            "at_ms": observed,
            **envelope,
            "boundary_ms": reset.boundary_us / 1_000,
            "reason": reset.reason,
            "cause": reset.cause,
        }
    elif fact.identity_refused is not None:
        refused = fact.identity_refused
        yield {
            "kind": "identity_refused",
            "at_ms": observed,
            **envelope,
            "group_idx": refused.group_idx,
            "refused": refused.refused,
            "window_start_ms": refused.window_start_us / 1_000,
            "window_end_ms": refused.window_end_us / 1_000,
        }
    elif fact.loss is not None:
        loss = fact.loss
        yield {
            "kind": "loss",
            "at_ms": observed,
            **envelope,
            "first_seq": loss.first_seq,
            "last_seq": loss.last_seq,
            "reason": loss.reason,
        }
    elif fact.refusal is not None:
        refusal = fact.refusal
        yield {"kind": "refusal", "at_ms": observed, **envelope, "reason": refusal.reason, "payload_bytes": refusal.payload_bytes}
    elif fact.declaration is not None:
        yield _json_record("declaration", observed, fact.declaration, **envelope)
    elif fact.scrape is not None:
        yield _json_record("scrape", observed, fact.scrape, **envelope)
    elif fact.departure is not None:
        yield {"kind": "departure", "at_ms": observed, **envelope, "reason": fact.departure.reason}


def _json_record(kind: str, at_ms: float, content: msgspec.Struct, **fields: Any) -> Record:
    return {"kind": kind, "at_ms": at_ms, **fields, kind: msgspec.json.encode(content).decode()}


def _op(op: Op, fact: RankMessage) -> Iterator[Record]:
    at_ms = fact.at_us / 1_000
    if op.kind == "CLEAR":
        yield _present(
            kind="clear",
            at_ms=at_ms,
            instance_id=fact.instance_id,
            scope="all",
            dp_rank=fact.dp_rank,
            group_idx=op.group_idx,
            tier=op.tier,
            locality=op.locality,
            seq=fact.seq,
        )
        return
    store = op.kind == "STORE"
    common: Record = {
        "kind": "store" if store else "evict",
        "at_ms": at_ms,
        "instance_id": fact.instance_id,
        "dp_rank": fact.dp_rank,
        "seq": fact.seq,
        "tier": op.tier,
    }
    if op.group_idx is not None:
        common["group_idx"] = op.group_idx
    if op.locality is not None:
        common["locality"] = op.locality
    if store:
        common |= _present(
            n_tokens=op.block_size,
            spec_kind=op.spec_kind,
            spec_sliding_window=op.spec_sliding_window,
            lora_id=op.lora_id,
            lora_name=op.lora_name,
            reused=True if op.reused else None,
        )
    contents = split_ids(op.content_ids)
    unknown = store and op.parent_state == "UNKNOWN" and op.parent_block_id is None
    parent = op.parent_block_id.hex() if op.parent_block_id is not None else None
    for index, block in enumerate(split_ids(op.block_ids)):
        record = dict(common)
        block_id = record["block_id"] = block.hex()
        if index < len(contents) and contents[index] != NO_ID:
            record["content_id"] = contents[index].hex()
        if unknown or (store and parent is None and op.parent_state != "ROOT"):
            record["parent_unknown"] = True
        elif store and parent is not None:
            record["parent_id"] = parent
        parent = block_id
        if index < len(op.extra_keys) and op.extra_keys[index]:
            record["extra_keys"] = [key.hex() for key in split_ids(op.extra_keys[index])]
        yield record


def _beside(op: Op) -> Record:
    """What the contract's records of this op do not say: how many there are, and the fields they have no room for."""
    if not _is_plain(op):
        return {
            "records": 1 if op.kind == "CLEAR" else len(split_ids(op.block_ids)),
            "op": base64.b64encode(msgspec.msgpack.encode(op)).decode(),
        }
    if op.kind == "CLEAR":
        return {"records": 1}
    return _present(
        records=len(op.block_ids) // ID_BYTES,
        parent_state=op.parent_state if op.kind == "STORE" else None,
        parent_content_id=op.parent_content_id.hex() if op.parent_content_id is not None else None,
        session_id=op.session_id.hex() if op.session_id is not None else None,
        ownership=op.ownership,
    )


def _is_plain(op: Op) -> bool:
    """Whether the op can be put together again from its records; one that cannot rides along whole."""
    blocks = len(op.block_ids)
    if op.kind == "CLEAR":
        return op == Op("CLEAR", op.group_idx, op.tier, op.locality)
    if not blocks or blocks % ID_BYTES or len(op.content_ids) not in (0, blocks):
        return False
    if op.content_ids and not any(op.content_ids):
        return False
    if op.kind == "REMOVE":
        return op == Op(
            "REMOVE",
            op.group_idx,
            op.tier,
            op.locality,
            block_ids=op.block_ids,
            content_ids=op.content_ids,
            session_id=op.session_id,
            ownership=op.ownership,
        )
    if op.extra_keys:
        if len(op.extra_keys) * ID_BYTES != blocks or not any(op.extra_keys):
            return False
        return all(len(keys) % ID_BYTES == 0 for keys in op.extra_keys)
    return True


def _present(**fields: Any) -> Record:
    return {name: value for name, value in fields.items() if value is not None}


def _first_of(labels: dict[str, str], names: tuple[str, ...]) -> str | None:
    return next((labels[name] for name in names if name in labels), None)
