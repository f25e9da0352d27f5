"""Typed form of every record on a kvcensus topic.

Each class mirrors the Avro schema of the same name in ``schemas/avro``. Times named ``*_us`` are engine
time, integer microseconds since the Unix epoch; ``*_ms`` are the forwarder's own clock, milliseconds.
Identities are packed: ``block_ids`` and ``content_ids`` hold one 16-byte id after another.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ID_BYTES = 16
"""Length of a ``content_id`` and of a ``block_id`` on every topic, in bytes."""

NO_ID = bytes(ID_BYTES)
"""Stands in a packed ``content_ids`` column where one block of the run is unresolved."""

NO_SEQ = 2**63 - 1
"""Stands on a refusal that took the place of no batch: its sender gave a number that no batch can have, or it is no part of the order."""

OpKind = Literal["STORE", "REMOVE", "CLEAR"]
ParentState = Literal["ROOT", "CONTENT", "UNKNOWN"]
ReuseReporting = Literal["none", "labelled", "unlabelled"]
EngineProfile = Literal["vllm", "sglang"]
Removals = Literal["per_copy", "last_copy"]
DeclaredKind = Literal["holder_reset", "loss", "refusal", "declaration", "identity_refused"]
Cause = Literal["evicted", "cleared", "restarted", "concurrent", "ambiguous_reload"]


class Op(msgspec.Struct, gc=False):
    """One step of a batch, in the engine's order: a run of blocks stored or removed, or a clear.

    On a CLEAR a null ``group_idx`` or ``tier`` means "all". ``block_size`` is in tokens,
    0 where the event gave none. ``content_ids`` is empty, or as long as ``block_ids``. ``parent_state``,
    ``parent_content_id`` and ``parent_block_id`` (null at a root, and where the run's hashes cannot be assigned) speak of the
    first block of the run; each later block's parent is the one before it, unless the state is UNKNOWN, which holds for every
    block of the run. ``extra_keys`` is empty, or has an entry for each block: the 16-byte pseudonyms of its extra keys, one after
    another. ``session_id`` is a pseudonym as well. On a STORE or REMOVE a null ``tier`` means that the event named none.
    """

    kind: OpKind
    group_idx: int | None = 0
    tier: str | None = "GPU"
    locality: str | None = None
    block_size: int = 0
    block_ids: bytes = b""
    content_ids: bytes = b""
    parent_state: ParentState = "UNKNOWN"
    parent_content_id: bytes | None = None
    spec_kind: str | None = None
    lora_name: str | None = None
    reused: bool = False
    parent_block_id: bytes | None = None
    lora_id: int | None = None
    spec_sliding_window: int | None = None
    extra_keys: list[bytes] = []
    session_id: bytes | None = None
    ownership: str | None = None


class Batch(msgspec.Struct, gc=False):
    """One engine batch. ``unknown_events`` were of a type this version does not know: counted and skipped."""

    ops: list[Op]
    unknown_events: int = 0
    unresolved_blocks: int = 0


class HolderReset(msgspec.Struct, gc=False):
    """Everything known of the rank ends at ``boundary_us``, and another life begins.

    ``cause`` ``restarted``: the engine process came back empty. ``rekeyed``: the engine goes on, but the identity key, its epoch
    or the declared model is another, so that no id from before compares with one from here on.
    """

    boundary_us: int
    reason: str
    cause: Literal["restarted", "rekeyed"] = "restarted"


class Loss(msgspec.Struct, gc=False):
    """Batches ``first_seq`` to ``last_seq`` (inclusive) of this life are gone for good."""

    first_seq: int
    last_seq: int
    reason: str


class Refusal(msgspec.Struct, gc=False):
    """The payload at this ``seq`` could not be read."""

    reason: str
    payload_bytes: int


class IdentityRefused(msgspec.Struct, gc=False):
    """The forwarder forgot ``refused`` blocks of one group, to stay within its bound on blocks.

    What chains onto them from ``window_start_us`` to ``window_end_us`` (engine time, both inclusive) may lack a content id.
    """

    group_idx: int
    refused: int
    window_start_us: int
    window_end_us: int


class Declaration(msgspec.Struct, gc=False):
    """What the operator declared about a rank; holds from here on until the next one.

    ``workload`` and ``model`` null mean undeclared, as does any other null. ``canary`` is a hex value only holders of one key can
    emit. ``prefill_rate`` is prompt tokens per second of the whole rank, ``kv_bytes_per_token`` over all its tensor-parallel shards.
    A forwarder that is there says so every ``heartbeat_ms``; one not heard of for ``staleness_ms`` is not counted on (0: undeclared).
    Payloads beyond ``max_payload_bytes`` are refused unread.
    """

    reuse_reporting: ReuseReporting
    removals: Removals
    workload: str | None = None
    model: str | None = None
    kv_connector: str | None = None
    key_epoch: int = 0
    canary: str = ""
    forwarder_version: str = ""
    labels: dict[str, str] = {}
    engine_profile: EngineProfile = "vllm"
    gpus_per_rank: float | None = None
    kv_bytes_per_token: int | None = None
    prefill_rate: float | None = None
    heartbeat_ms: int = 0
    staleness_ms: int = 0
    max_payload_bytes: int = 0


class RankMessage(msgspec.Struct, gc=False):
    """A message on ``kvcensus.batches``, key :func:`rank_key`; exactly one of ``batch`` to ``identity_refused`` is set.

    ``seq`` is the engine's own number for a batch or refusal; on other messages, the number the next batch of this
    life is expected to carry. ``skipped`` is how many numbers right before ``seq`` belong to other ranks that the engine numbers
    together with this one: they are not missing (on a loss: how many within its range). ``at_us`` is the batch's engine time; on
    other messages, the engine time last seen (0: none).
    (rank, ``life_id``, ``seq``) names a batch for good.
    """

    instance_id: str
    dp_rank: int
    life_id: str
    seq: int
    at_us: int
    observed_at_ms: int
    incarnation: str
    batch: Batch | None = None
    holder_reset: HolderReset | None = None
    loss: Loss | None = None
    refusal: Refusal | None = None
    declaration: Declaration | None = None
    identity_refused: IdentityRefused | None = None
    skipped: int = 0


class Declared(msgspec.Struct, gc=False):
    """In brief what ``kvcensus.batches`` holds in full: a holder_reset, loss, refusal, declaration or identity_refused.

    ``first_seq`` and ``last_seq`` are the lost range; elsewhere both are the message's ``seq``.
    """

    kind: DeclaredKind
    life_id: str
    first_seq: int
    last_seq: int
    at_us: int
    reason: str | None = None


class Lifecycle(msgspec.Struct, gc=False):
    """A forwarder's start, heartbeat or stop on ``kvcensus.lifecycle``; counters are cumulative per incarnation.

    Counters that are nullable are null in records of forwarders that did not count them. ``msgs_seen``: messages that came in;
    ``oversized`` and ``malformed``: those of them (refused all the same) that were too large or no batch; ``too_large``: batches
    that Kafka would not take for their size. ``events_ingested``: events of the batches read. ``content_bridge_entries``: blocks
    whose identity is remembered now; ``content_bridge_evicted``: how many were forgotten for the bound. ``spool_bytes``
    and ``spool_messages`` wait on disk now; ``spool_dropped``: batches that the spool's bound forced out, declared lost.
    ``last_message_at_ms`` is null until the engine has sent something. ``declared`` is what was declared since the record
    before, the first hundred of it, and ``declared_more`` how many more. Bounds as in :class:`Declaration`.
    """

    kind: Literal["start", "heartbeat", "stop"]
    instance_id: str
    dp_rank: int
    life_id: str
    incarnation: str
    at_ms: int
    batches: int
    blocks_stored: int
    blocks_removed: int
    unresolved_blocks: int
    unknown_events: int
    refused: int
    lost: int
    duplicates: int
    replayed: int
    publisher_restarts: int
    canary: str = ""
    key_epoch: int = 0
    reason: str | None = None
    forwarder_version: str = ""
    endpoint: str = ""
    msgs_seen: int | None = None
    oversized: int | None = None
    malformed: int | None = None
    too_large: int | None = None
    events_ingested: int | None = None
    identity_conflicts: int | None = None
    shared_contents: int | None = None
    content_bridge_entries: int | None = None
    content_bridge_evicted: int | None = None
    rank_mismatches: int | None = None
    connections: int | None = None
    spool_bytes: int | None = None
    spool_messages: int | None = None
    spool_dropped: int | None = None
    scrapes: int | None = None
    scrapes_failed: int | None = None
    rss_bytes: int | None = None
    last_message_at_ms: int | None = None
    heartbeat_ms: int = 0
    staleness_ms: int = 0
    declared: list[Declared] = []
    declared_more: int = 0


class Histogram(msgspec.Struct, gc=False):
    """A Prometheus histogram: ``counts[i]`` observations at or below ``bounds[i]`` (cumulative; the last bound is infinity)."""

    bounds: list[float]
    counts: list[int]
    sum: float


class EngineMetrics(msgspec.Struct, gc=False):
    """One scrape of an engine's own ``/metrics``, for one rank, on ``kvcensus.engine-metrics``.

    Null is what the engine does not report. ``process_started_us``: when its process started. ``kv_cache_usage`` is the share
    (0 to 1) of blocks that running requests hold, of ``num_gpu_blocks`` blocks of ``block_size`` tokens. Prefix cache
    figures are in tokens; all counters are cumulative since the engine's start. ``histograms`` are in seconds, cumulative too:
    ``time_to_first_token`` and ``request_prefill_time``.
    """

    instance_id: str
    dp_rank: int
    life_id: str
    incarnation: str
    at_ms: int
    process_started_us: int | None = None
    model_name: str | None = None
    kv_cache_usage: float | None = None
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    preemptions: int | None = None
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    external_prefix_cache_queries: int | None = None
    external_prefix_cache_hits: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_cached: int | None = None
    generation_tokens: int | None = None
    histograms: dict[str, Histogram] = {}


class ResidencyStep(msgspec.Struct, gc=False):
    """What one engine batch changed for one rank, tier, block size and content shard, net of what it undid itself.

    ``opened`` and ``closed`` are packed content ids; ``block_size`` is tokens per content.
    """

    source_offset: int
    at_us: int
    tier: str
    block_size: int
    opened: bytes = b""
    closed: bytes = b""


class ResidencyChanges(msgspec.Struct, gc=False):
    """One flush of one rank for one content shard, on ``kvcensus.residency`` (partition = shard).

    ``steps`` are in the order of ``source_offset``, the position of the batch in ``kvcensus.batches``.
    ``watermark_us`` is the rank's newest engine time; it goes to every shard, also with no steps.
    """

    instance_id: str
    dp_rank: int
    workload: str | None
    model: str | None
    source_offset: int
    watermark_us: int
    steps: list[ResidencyStep]


class DuplicateStep(msgspec.Struct, gc=False):
    """At ``at_us`` the extra copies borne by one rank change by these amounts (signed)."""

    at_us: int
    tier: str
    instance_id: str
    dp_rank: int
    inside_blocks: int
    inside_tokens: int
    between_blocks: int
    between_tokens: int


class DuplicateSteps(msgspec.Struct, gc=False):
    """A shard's answer to one ``ResidencyChanges``, on ``kvcensus.duplicate-steps`` (one partition is read by the merger).

    ``source_offset`` is the position of that message in the shard; the rank and watermark are passed on from it.
    """

    shard: int
    shards: int
    source_offset: int
    instance_id: str
    dp_rank: int
    workload: str | None
    model: str | None
    watermark_us: int
    steps: list[DuplicateStep]


class GroupCounters(msgspec.Struct, gc=False):
    """Counters of one cache group of one rank in one window. Blocks count physical copies.

    ``recompute_*`` are by cause. ``stored_*`` and ``evicted_*`` are of the GPU tier. ``resident_*`` is the state at the
    end of the row, in the GPU tier, by the copy-counting reading.
    """

    group_idx: int
    spec_kind: str | None = None
    gpu: bool = False
    stored_blocks: int = 0
    stored_tokens: int = 0
    resolved_tokens: int = 0
    evicted_blocks: int = 0
    evicted_tokens: int = 0
    cleared_blocks: int = 0
    cleared_tokens: int = 0
    restarted_blocks: int = 0
    restarted_tokens: int = 0
    unjoined_evicts: int = 0
    reloaded_blocks: int = 0
    reloaded_tokens: int = 0
    recompute_evicted_blocks: int = 0
    recompute_evicted_tokens: int = 0
    recompute_cleared_blocks: int = 0
    recompute_cleared_tokens: int = 0
    recompute_restarted_blocks: int = 0
    recompute_restarted_tokens: int = 0
    recompute_concurrent_blocks: int = 0
    recompute_concurrent_tokens: int = 0
    recompute_ambiguous_blocks: int = 0
    recompute_ambiguous_tokens: int = 0
    resident_blocks: int = 0
    resident_tokens: int = 0


class RankWindow(msgspec.Struct, gc=False):
    """One rank in one window of one life, on ``kvcensus.rank-windows``; replaces any row of a lower ``version``.

    The window is [``window_start_us``, ``window_start_us + window_us``); ``window_us`` is a multiple of the base window
    where a long stretch holds no batch. ``observed_us`` is the part demonstrably observed. ``first_batch_us`` and
    ``last_batch_us`` are 0 where the row holds no batch.
    """

    instance_id: str
    dp_rank: int
    life_id: str
    window_start_us: int
    window_us: int
    semantics_version: int
    version: int
    final: bool
    workload: str | None
    model: str | None
    reuse_reporting: str
    removals: str
    kv_connector: str | None
    key_epoch: int
    canary: str
    observed_us: int
    first_batch_us: int
    last_batch_us: int
    batches: int
    duplicate_batches: int
    lost_batches: int
    refused_batches: int
    unknown_events: int
    unresolved_blocks: int
    warmup: bool
    reasons: list[str]
    groups: list[GroupCounters]


class Recompute(msgspec.Struct, gc=False):
    """One block that was stored again, on ``kvcensus.recomputes``; ``elapsed_us`` = back − lost (0 for concurrent)."""

    instance_id: str
    dp_rank: int
    group_idx: int
    life_id: str
    seq: int
    index: int
    semantics_version: int
    version: int
    cause: str
    block_id: bytes
    content_id: bytes | None
    tokens: int
    stored_at_us: int
    lost_at_us: int
    back_at_us: int
    elapsed_us: int


class DuplicateWindow(msgspec.Struct, gc=False):
    """Extra copies of one scope in one window, on ``kvcensus.duplicate-windows``; replaces any row of a lower ``version``.

    ``scope`` is ``fleet``, ``rank``, ``workload`` or ``model`` and ``scope_key`` its value (empty for the fleet and for
    undeclared). ``*_us`` sums are extra copies x microseconds over [``window_start_us``, ``as_of_us``), where ``as_of_us`` is
    the window's end or, in the newest window, the engine time reached. ``max`` and ``end`` are copies. ``ranks`` were heard
    of by every shard that reported; ``rank_lag_us`` is how far the shards were behind ``as_of_us`` of the newest window in what they
    had heard of each rank, summed over the ranks: where it exceeds what the ranks' own last batches are behind, changes are on their way.
    """

    scope: str
    scope_key: str
    tier: str
    window_start_us: int
    window_us: int
    as_of_us: int
    semantics_version: int
    version: int
    final: bool
    shards_reported: int
    shards: int
    ranks: int
    rank_lag_us: int
    inside_token_us: int
    between_token_us: int
    inside_block_us: int
    between_block_us: int
    extra_tokens_max: int
    inside_tokens_max: int
    between_tokens_max: int
    extra_blocks_max: int
    inside_blocks_max: int
    between_blocks_max: int
    inside_tokens_end: int
    between_tokens_end: int
    inside_blocks_end: int
    between_blocks_end: int


Record = RankMessage | Lifecycle | EngineMetrics | ResidencyChanges | DuplicateSteps | RankWindow | Recompute | DuplicateWindow


def rank_key(instance_id: str, dp_rank: int) -> str:
    """Kafka key of a rank, ``INSTANCE/R``: the one form used on topics, in SQL and on the command line."""
    return f"{instance_id}/{dp_rank}"
