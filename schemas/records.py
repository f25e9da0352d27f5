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
Register = Literal["exact", "lower_bound", "indeterminate"]

UNKNOWN_PARENT = b"\xff" * ID_BYTES
"""Stands in a packed ``parents`` column where nobody can say which content is before this one; :data:`NO_ID` there is a root."""


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
    Payloads beyond ``max_payload_bytes`` are refused unread. ``kv_bytes_by_group``: bytes per token of each cache group, by its
    index as text, where groups differ; else ``kv_bytes_per_token`` is that of the only group.
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
    kv_bytes_by_group: dict[str, int] = {}


class Scrape(msgspec.Struct, gc=False):
    """What one scrape of the engine's own metrics says that figures are held against; the whole of it is :class:`EngineMetrics`.

    It stands in the order of the rank's batches, behind those that had come in when it was made, so that every reader compares the same
    two things. ``at_ms`` is the forwarder's clock; what the engine does not report is null. ``kv_cache_usage`` is the share (0 to 1) of
    ``num_gpu_blocks`` that running requests hold. Tokens are cumulative since the engine's start.
    """

    at_ms: int
    kv_cache_usage: float | None = None
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    requests_running: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_cached: int | None = None
    external_prefix_cache_hits: int | None = None


class Departure(msgspec.Struct, gc=False):
    """The forwarder stopped on purpose: until the rank's next message nobody expects to hear of it."""

    reason: str


class RankMessage(msgspec.Struct, gc=False):
    """A message on ``kvcensus.batches``, key :func:`rank_key`; exactly one of ``batch`` to ``identity_refused``,
    ``scrape`` and ``departure`` is set.

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
    scrape: Scrape | None = None
    departure: Departure | None = None


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

    ``opened`` and ``closed`` are packed content ids; ``block_size`` is tokens per content. ``parents`` holds, for each of ``opened``, the
    content before it: :data:`NO_ID` at a root, :data:`UNKNOWN_PARENT` where nobody can say. It is empty in messages of versions that did
    not tell.
    """

    source_offset: int
    at_us: int
    tier: str
    block_size: int
    opened: bytes = b""
    closed: bytes = b""
    parents: bytes = b""


class Note(msgspec.Struct, gc=False):
    """``reason`` (a word of :data:`schemas.reasons.REASONS`) stands in the rank's window that holds ``at_us``."""

    at_us: int
    reason: str


class ResidencyChanges(msgspec.Struct, gc=False):
    """One flush of one rank for one content shard, on ``kvcensus.residency`` (partition = shard).

    ``steps`` are in the order of ``source_offset``, the position of the batch in ``kvcensus.batches``. ``watermark_us`` is the rank's
    newest engine time; it goes to every shard, also with no steps. ``workload``, ``model``, ``key_epoch``, ``canary``,
    ``kv_bytes_per_token`` (null: unknown; of several groups, the least) and ``staleness_ms`` (0: undeclared) are as declared for every
    step at hand, and hold since ``declared_at_us`` (0: from the start). What follows is told to shard 0 alone, of what came since the
    flush before: ``observed``, stretches of engine time that were demonstrably observed (from, to, from, to, ...), and ``notes``, reasons
    that newly stand in a window of the rank. ``departed``: the forwarder stopped on purpose and nothing came since.
    """

    instance_id: str
    dp_rank: int
    workload: str | None
    model: str | None
    source_offset: int
    watermark_us: int
    steps: list[ResidencyStep]
    declared_at_us: int = 0
    key_epoch: int = 0
    canary: str = ""
    kv_bytes_per_token: int | None = None
    staleness_ms: int = 0
    observed: list[int] = []
    notes: list[Note] = []
    departed: bool = False


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


class PairStep(msgspec.Struct, gc=False):
    """At ``at_us`` the content that ranks of both workloads hold changes by these amounts (signed).

    ``workload_a`` sorts before ``workload_b``; an empty name is the undeclared workload.
    """

    at_us: int
    tier: str
    workload_a: str
    workload_b: str
    blocks: int
    tokens: int


class SharedContent(msgspec.Struct, gc=False):
    """Content in GPU memory whose holders changed; ``holders`` are indices into the message's ``holder_names``, none if at most one is
    left.

    ``parent_id`` as in :class:`ResidencyStep`; ``block_size`` in tokens; ``first_at_us`` is when any rank was first seen to hold it.
    ``as_of_us`` is the instant of which this is told, where a message closes several (0: the message's ``shared_as_of_us``).
    """

    content_id: bytes
    parent_id: bytes
    block_size: int
    first_at_us: int
    holders: list[int]
    as_of_us: int = 0


class DuplicateSteps(msgspec.Struct, gc=False):
    """A shard's answer to one ``ResidencyChanges``, on ``kvcensus.duplicate-steps`` (one partition is read by the merger).

    ``source_offset`` is the position of that message in the shard, ``previous_offset`` that of the shard's answer before (-1: none, or of
    a version that did not tell). The rank, what is declared of it, its watermark, ``observed``, ``notes`` and ``departed`` are passed on;
    the shard adds notes of its own: ``late_data`` where late changes count instead, ``parent_conflict`` where content was first seen
    behind a second parent. ``first_held_us``: when the rank was first seen to hold content of this shard in GPU memory (0: never).
    Cumulative: ``late_changes``, changes so late that they count at a later time than their own; ``parent_conflicts``, contents that were
    seen behind two different parents; ``shared_late``, changes of shared content at instants already told. ``shared``: what changed up to
    ``shared_as_of_us`` (engine time; 0: nothing is told) in the holders of content that lies on several ranks; ``holder_names`` are rank
    keys.
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
    declared_at_us: int = 0
    key_epoch: int = 0
    canary: str = ""
    kv_bytes_per_token: int | None = None
    staleness_ms: int = 0
    observed: list[int] = []
    notes: list[Note] = []
    departed: bool = False
    previous_offset: int = -1
    late_changes: int = 0
    parent_conflicts: int = 0
    pairs: list[PairStep] = []
    shared_as_of_us: int = 0
    shared: list[SharedContent] = []
    holder_names: list[str] = []
    first_held_us: int = 0
    shared_late: int = 0


class GroupCounters(msgspec.Struct, gc=False):
    """Counters of one cache group of one rank in one window. Blocks count physical copies.

    ``recompute_*`` are by cause; ``recompute_*_gpu_us`` is GPU time in microseconds at the row's prefill rate, and ``unrated_tokens`` are
    recomputed tokens for which no rate was known. ``stored_*`` and ``evicted_*`` are of the GPU tier. ``resident_*`` is the state at the
    end of the row, in the GPU tier, by the copy-counting reading; ``resident_copies`` counts physical copies. ``unreused_*``: evicted
    residencies that the stream never showed to be used again. ``forgotten_blocks``: lost blocks whose history was let go of.

    Histograms are pairs of lists: the bucket (:func:`schemas.histogram.bucket` of microseconds) and how many fell into it.
    ``lifetime_*``: how long evicted residencies had lasted. ``back_*``: how long content was away before it was stored again, by cause.
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
    resident_copies: int = 0
    kv_bytes_per_token: int | None = None
    unreused_blocks: int = 0
    unreused_tokens: int = 0
    forgotten_blocks: int = 0
    unrated_tokens: int = 0
    recompute_evicted_gpu_us: int = 0
    recompute_cleared_gpu_us: int = 0
    recompute_restarted_gpu_us: int = 0
    recompute_concurrent_gpu_us: int = 0
    recompute_ambiguous_gpu_us: int = 0
    lifetime_buckets: list[int] = []
    lifetime_counts: list[int] = []
    back_evicted_buckets: list[int] = []
    back_evicted_counts: list[int] = []
    back_cleared_buckets: list[int] = []
    back_cleared_counts: list[int] = []
    back_restarted_buckets: list[int] = []
    back_restarted_counts: list[int] = []


class Breach(msgspec.Struct, gc=False):
    """What the stream says of a rank contradicts what the engine's own metrics say.

    ``kind`` ``cached_over_pool``: ``found`` blocks are counted as cached, the pool has ``bound``. ``in_use_over_cached``: ``found``
    blocks are in use (usage x pool), at most ``bound`` are cached or being filled (cached + running requests + slack). ``at_us`` engine
    time, ``scraped_at_ms`` the forwarder's clock.
    """

    kind: Literal["cached_over_pool", "in_use_over_cached"]
    at_us: int
    scraped_at_ms: int
    found: int
    bound: int


class RankWindow(msgspec.Struct, gc=False):
    """One rank in one window of one life, on ``kvcensus.rank-windows``; replaces any row of a lower ``version``.

    The window is [``window_start_us``, ``window_start_us + window_us``); ``window_us`` is a multiple of the base window where a long
    stretch holds no batch. ``observed_us`` is the part demonstrably observed. ``first_batch_us`` and ``last_batch_us`` are 0 where the
    row holds no batch. ``register`` is how repeat compute of this row may be read, ``reasons`` why. ``prefill_rate`` is prompt tokens per
    second by which GPU time was estimated, of ``prefill_rate_source`` ``declared`` or ``measured`` (null: neither known). ``breaches``
    are the contradictions with the engine's metrics, the first ten of ``breaches_found``.
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
    register: Register = "indeterminate"
    prefill_rate: float | None = None
    prefill_rate_source: str | None = None
    gpus_per_rank: float | None = None
    pool_blocks: int | None = None
    scrapes: int = 0
    breaches: list[Breach] = []
    breaches_found: int = 0
    departed: bool = False


class Recompute(msgspec.Struct, gc=False):
    """One block that was stored again, on ``kvcensus.recomputes``; ``elapsed_us`` = back − lost (0 for concurrent).

    ``parent_content_id`` and ``parent_block_id`` are of the block before it (null: a root, or unknown). ``gpu_us`` is the estimate of GPU
    time, in microseconds (null: no prefill rate was known).
    """

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
    parent_content_id: bytes | None = None
    parent_block_id: bytes | None = None
    gpu_us: int | None = None


class DuplicateWindow(msgspec.Struct, gc=False):
    """Extra copies of one scope in one window, on ``kvcensus.duplicate-windows``; replaces any row of a lower ``version``.

    ``scope`` is ``fleet``, ``rank``, ``workload`` or ``model`` and ``scope_key`` its value (empty for the fleet and for undeclared); or
    ``workload_pair``, whose key is a JSON list of two workloads, and which counts, under ``between``, content that ranks of both hold,
    once. ``*_us`` sums are extra copies x microseconds over [``window_start_us``, ``as_of_us``), where ``as_of_us`` is the window's end
    or, in the newest window, the engine time reached. ``max`` and ``end`` are copies. ``ranks`` were heard of by every shard that
    reported; ``rank_lag_us`` is how far the shards were behind ``as_of_us`` of the newest window in what they had heard of each rank,
    summed over the ranks: where it exceeds what the ranks' own last batches are behind, changes are on their way.

    ``expected_ranks`` are those that had been heard of and had not departed; ``observed_us`` is summed over them, so that coverage is
    ``observed_us`` / (``expected_ranks`` x (``as_of_us`` - ``window_start_us``)). ``key_epoch`` is the one in which all expected ranks made
    their ids (null: there are several, or no rank was expected). ``register`` is the weaker of ``inside_register`` and
    ``between_register``. Bytes are null where the size of a block is not known of every rank that bears a copy. ``late_changes``: changes
    that came so late that they count at a later time than their own, up to now.
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
    expected_ranks: int = 0
    observed_us: int = 0
    register: Register = "indeterminate"
    inside_register: Register = "indeterminate"
    between_register: Register = "indeterminate"
    reasons: list[str] = []
    late_changes: int = 0
    inside_byte_ms: int | None = None
    between_byte_ms: int | None = None
    extra_bytes_max: int | None = None
    inside_bytes_end: int | None = None
    between_bytes_end: int | None = None
    key_epoch: int | None = None


class SharedPrefix(msgspec.Struct, gc=False):
    """One trunk on ``kvcensus.shared-prefixes``: a longest chain of content with the same holders, at the instant ``as_of_us``.

    Of each instant the trunks with the most extra mass are told, ``place`` 1 having the most; a row replaces any of a lower ``version``
    with the same ``as_of_us`` and ``place``. ``head_content_id`` is its first block, ``content_id`` its last, ``parent_content_id`` what
    lies before it (null: it begins at a root). ``depth_tokens`` counts from the root to its end (null: what lies before it is not known
    all the way). ``extra_*`` is the mass: size x (copies - 1); ``extra_bytes`` null where not known. ``ranks`` are rank keys,
    ``workloads`` and ``models`` of them (empty text: undeclared). ``first_seen_us``: when any rank was first seen to hold its last block.
    Coverage and register are those of the fleet in the window that ends at ``as_of_us``.
    """

    as_of_us: int
    semantics_version: int
    version: int
    place: int
    content_id: bytes
    head_content_id: bytes
    parent_content_id: bytes | None
    blocks: int
    tokens: int
    depth_tokens: int | None
    copies: int
    instances: int
    extra_blocks: int
    extra_tokens: int
    extra_bytes: int | None
    ranks: list[str]
    workloads: list[str]
    models: list[str]
    first_seen_us: int
    coverage: float
    register: Register
    reasons: list[str]


class DeadLetter(msgspec.Struct, gc=False):
    """A message that could not be read or counted, on ``kvcensus.dead-letters``: where it stood, why, and its bytes.

    ``reader`` is what could not use it (an agent's name, or ``sink``). The payload is cut at :data:`schemas.topics.DEAD_LETTER_BYTES`;
    ``payload_bytes`` is its whole length.
    """

    topic: str
    partition: int
    offset: int
    reader: str
    reason: str
    key: bytes | None
    payload: bytes
    payload_bytes: int


class Deploy(msgspec.Struct, gc=False):
    """A label and an instant that somebody declared, on ``kvcensus.deploys``; replaces a lower ``version`` of the same ``deploy_id``.

    ``at_us`` is engine time. ``workload`` and ``model`` are what it concerned (null: all). ``version`` is when the record was written, in
    microseconds of the writer's clock, and above that of the record before. ``removed``: it was taken back.
    """

    deploy_id: str
    version: int
    label: str
    at_us: int
    workload: str | None = None
    model: str | None = None
    removed: bool = False


Record = (
    RankMessage
    | Lifecycle
    | EngineMetrics
    | ResidencyChanges
    | DuplicateSteps
    | RankWindow
    | Recompute
    | DuplicateWindow
    | SharedPrefix
    | DeadLetter
    | Deploy
)


def split_ids(packed: bytes) -> list[bytes]:
    """The ids packed one after another."""
    return [packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)]


def rank_key(instance_id: str, dp_rank: int) -> str:
    """Kafka key of a rank, ``INSTANCE/R``: the one form used on topics, in SQL and on the command line."""
    return f"{instance_id}/{dp_rank}"
