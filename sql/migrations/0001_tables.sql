-- One table per record of the result topics and the facts behind them.
--
-- What holds for all of them:
-- * Every row has a natural key (its ORDER BY) that names a fact or a result for good, and replacing engines keep one row
--   per key: inserting a row again, in whatever order, changes nothing. Read with FINAL, or through the views.
-- * Partitions are a function of the key's time, or a replaced row would never meet the row it replaces.
-- * Keys begin with the hour, then the rank: an hour of the whole fleet and an hour of one rank are each one short range.
--   The exact time stands in them only inside a function: were the bare column part of the key, a condition on it would be
--   matched with that later part and never with the hour.
-- * Times are engine time, microseconds, UTC, unless their comment says otherwise. inserted_at is this server's clock.

CREATE TABLE IF NOT EXISTS rank_windows
(
    `instance_id` LowCardinality(String) COMMENT 'the engine deployment, as its operator names it',
    `dp_rank` Int32 COMMENT 'data-parallel rank in the instance',
    `life_id` LowCardinality(String) COMMENT 'one process life of the engine',
    `window_start` DateTime64(6, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    `window_us` Int64 COMMENT 'length in microseconds; a multiple of the base window where a long stretch holds no batch' CODEC(ZSTD(1)),
    `window_end` DateTime64(6, 'UTC') DEFAULT window_start + toIntervalMicrosecond(window_us) CODEC(DoubleDelta, ZSTD(1)),
    `semantics_version` Int32 COMMENT 'version of the counting rules; never sum across two',
    `version` UInt64 COMMENT 'a row replaces those of the same key with a lower version' CODEC(ZSTD(1)),
    `is_final` Bool COMMENT 'false while the window is open: the row will be replaced',
    `workload` LowCardinality(Nullable(String)) COMMENT 'declared; NULL: undeclared',
    `model` LowCardinality(Nullable(String)) COMMENT 'declared; NULL: undeclared',
    `reuse_reporting` LowCardinality(String) COMMENT 'declared: none, labelled or unlabelled',
    `removals` LowCardinality(String) COMMENT 'declared: per_copy or last_copy',
    `kv_connector` LowCardinality(Nullable(String)) COMMENT 'declared; not NULL: repeat compute of this rank is not measurable',
    `key_epoch` Int64 COMMENT 'content ids compare only within one epoch and one canary' CODEC(ZSTD(1)),
    `canary` LowCardinality(String) COMMENT 'equal for ranks whose content ids were made with one key',
    `observed_us` Int64 COMMENT 'part of the window demonstrably observed, microseconds; coverage = observed_us / window_us' CODEC(ZSTD(1)),
    `first_batch` Nullable(DateTime64(6, 'UTC')) COMMENT 'NULL: no batch in the window' CODEC(ZSTD(1)),
    `last_batch` Nullable(DateTime64(6, 'UTC')) CODEC(ZSTD(1)),
    `batches` Int64 CODEC(ZSTD(1)),
    `duplicate_batches` Int64 CODEC(ZSTD(1)),
    `lost_batches` Int64 CODEC(ZSTD(1)),
    `refused_batches` Int64 COMMENT 'batches that could not be read' CODEC(ZSTD(1)),
    `unknown_events` Int64 CODEC(ZSTD(1)),
    `unresolved_blocks` Int64 COMMENT 'blocks without a content id' CODEC(ZSTD(1)),
    `warmup` Bool COMMENT 'the forwarder attached to a cache that already held blocks',
    `reasons` Array(LowCardinality(String)) COMMENT 'why the window is not fully observed',
    -- One element per cache group. In the row itself, so that a row is replaced as a whole, groups and all.
    `groups.group_idx` Array(Int32) CODEC(ZSTD(1)),
    `groups.spec_kind` Array(LowCardinality(Nullable(String))) CODEC(ZSTD(1)),
    `groups.gpu` Array(Bool) CODEC(ZSTD(1)),
    `groups.stored_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.stored_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.resolved_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.evicted_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.evicted_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.cleared_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.cleared_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.restarted_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.restarted_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.unjoined_evicts` Array(Int64) CODEC(ZSTD(1)),
    `groups.reloaded_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.reloaded_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_evicted_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_evicted_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_cleared_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_cleared_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_restarted_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_restarted_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_concurrent_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_concurrent_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_ambiguous_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.recompute_ambiguous_tokens` Array(Int64) CODEC(ZSTD(1)),
    `groups.resident_blocks` Array(Int64) CODEC(ZSTD(1)),
    `groups.resident_tokens` Array(Int64) CODEC(ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)),
    INDEX window_end_range window_end TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toYYYYMM(window_start)
ORDER BY (toStartOfHour(window_start), instance_id, dp_rank, toUnixTimestamp64Micro(window_start), life_id, semantics_version)
COMMENT 'One row per rank, life and window: what was observed, and per cache group what was stored, lost and computed again. Unit: blocks and tokens.';

CREATE TABLE IF NOT EXISTS life_groups
(
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `life_id` LowCardinality(String),
    `semantics_version` Int32,
    `group_idx` Int32,
    `gpu` SimpleAggregateFunction(max, Bool) COMMENT 'whether the group was ever seen in GPU memory in this life',
    `spec_kind` SimpleAggregateFunction(max, Nullable(String)) COMMENT 'kind of KV cache of the group, where an event told it'
)
ENGINE = AggregatingMergeTree
ORDER BY (instance_id, dp_rank, life_id, semantics_version, group_idx)
COMMENT 'The cache groups of each process life, over all its windows: what its primary group is chosen from. Filled by life_groups_fill.';

-- An insert trigger is right here, as maxima do not change when a row arrives twice or is replaced.
CREATE MATERIALIZED VIEW IF NOT EXISTS life_groups_fill TO life_groups AS
SELECT instance_id, dp_rank, life_id, semantics_version, group_idx, max(is_gpu) AS gpu, max(kind) AS spec_kind
FROM
(
    SELECT instance_id, dp_rank, life_id, semantics_version, g AS group_idx, on_gpu AS is_gpu, CAST(k, 'Nullable(String)') AS kind
    FROM rank_windows
    ARRAY JOIN `groups.group_idx` AS g, `groups.gpu` AS on_gpu, `groups.spec_kind` AS k
)
GROUP BY instance_id, dp_rank, life_id, semantics_version, group_idx;

CREATE TABLE IF NOT EXISTS recomputes
(
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `group_idx` Int32 CODEC(ZSTD(1)),
    `life_id` LowCardinality(String),
    `seq` Int64 COMMENT 'engine sequence number of the batch that stored the block again' CODEC(Delta, ZSTD(1)),
    `block_index` Int64 COMMENT 'position of the block in that batch' CODEC(ZSTD(1)),
    `semantics_version` Int32,
    `version` UInt64 CODEC(ZSTD(1)),
    `cause` LowCardinality(String) COMMENT 'how the earlier residency ended: evicted, cleared, restarted, ambiguous_reload; concurrent: it had not. Never sum causes',
    `block_id` FixedString(16) COMMENT 'pseudonym of the engine''s own block hash; means something within one rank, group and life only',
    `content_id` Nullable(FixedString(16)) COMMENT 'identity of the content across ranks and restarts; NULL: unresolved',
    `tokens` Int64 CODEC(ZSTD(1)),
    `stored_at` DateTime64(6, 'UTC') COMMENT 'when the lost copy had been stored' CODEC(ZSTD(1)),
    `lost_at` DateTime64(6, 'UTC') CODEC(ZSTD(1)),
    `back_at` DateTime64(6, 'UTC') COMMENT 'when it was stored again' CODEC(DoubleDelta, ZSTD(1)),
    `elapsed_us` Int64 COMMENT 'back_at - lost_at, microseconds; 0 for concurrent' CODEC(ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toYYYYMM(back_at)
ORDER BY (toStartOfHour(back_at), instance_id, dp_rank, life_id, seq, block_index, group_idx, semantics_version)
COMMENT 'One row per block that was stored again after the rank had lost it, with the cause and the time it was away.';

CREATE TABLE IF NOT EXISTS duplicate_windows
(
    `scope` LowCardinality(String) COMMENT 'fleet, rank, workload or model; never sum two scopes',
    `scope_key` LowCardinality(String) COMMENT 'which rank (INSTANCE/R), workload or model; empty for the fleet and for undeclared',
    `tier` LowCardinality(String) COMMENT 'GPU is the headline; never sum tiers',
    `window_start` DateTime64(6, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    `window_us` Int64 CODEC(ZSTD(1)),
    `window_end` DateTime64(6, 'UTC') DEFAULT window_start + toIntervalMicrosecond(window_us) CODEC(DoubleDelta, ZSTD(1)),
    `as_of` DateTime64(6, 'UTC') COMMENT 'the sums run from window_start to here' CODEC(DoubleDelta, ZSTD(1)),
    `semantics_version` Int32,
    `version` UInt64 CODEC(ZSTD(1)),
    `is_final` Bool,
    `shards_reported` Int32,
    `shards` Int32,
    `ranks` Int32 COMMENT 'ranks that every shard has heard of',
    `rank_lag_us` Int64 COMMENT 'how far the shards were behind the newest as_of in what they had heard of each rank, summed over the ranks' CODEC(ZSTD(1)),
    `inside_token_us` Int64 COMMENT 'extra copies inside instances, tokens x microseconds' CODEC(ZSTD(1)),
    `between_token_us` Int64 COMMENT 'extra copies between instances, tokens x microseconds' CODEC(ZSTD(1)),
    `inside_block_us` Int64 CODEC(ZSTD(1)),
    `between_block_us` Int64 CODEC(ZSTD(1)),
    `extra_tokens_max` Int64 COMMENT 'maximum of inside + between at one instant; never sum or average maxima' CODEC(ZSTD(1)),
    `inside_tokens_max` Int64 CODEC(ZSTD(1)),
    `between_tokens_max` Int64 CODEC(ZSTD(1)),
    `extra_blocks_max` Int64 CODEC(ZSTD(1)),
    `inside_blocks_max` Int64 CODEC(ZSTD(1)),
    `between_blocks_max` Int64 CODEC(ZSTD(1)),
    `inside_tokens_end` Int64 COMMENT 'the state at as_of' CODEC(ZSTD(1)),
    `between_tokens_end` Int64 CODEC(ZSTD(1)),
    `inside_blocks_end` Int64 CODEC(ZSTD(1)),
    `between_blocks_end` Int64 CODEC(ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)),
    INDEX window_end_range window_end TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toYYYYMM(window_start)
ORDER BY (scope, tier, toStartOfHour(window_start), scope_key, toUnixTimestamp64Micro(window_start), semantics_version)
COMMENT 'One row per scope, tier and window: KV cache content that another rank holds at the same instant. Unit: extra copies, in blocks and tokens.';

CREATE TABLE IF NOT EXISTS block_events
(
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `life_id` LowCardinality(String),
    `seq` Int64 COMMENT 'the engine''s own number of the batch' CODEC(Delta, ZSTD(1)),
    `event_index` Int32 COMMENT 'position of the event in the batch' CODEC(ZSTD(1)),
    `block_index` Int32 COMMENT 'position of the block in the run' CODEC(ZSTD(1)),
    `at` DateTime64(6, 'UTC') COMMENT 'engine time of the batch' CODEC(DoubleDelta, ZSTD(1)),
    `observed_at` DateTime64(3, 'UTC') COMMENT 'the forwarder''s clock' CODEC(DoubleDelta, ZSTD(1)),
    `kind` LowCardinality(String) COMMENT 'STORE, REMOVE or CLEAR; a CLEAR is one row without a block',
    `group_idx` Nullable(Int32) COMMENT 'NULL on a CLEAR: all groups' CODEC(ZSTD(1)),
    `tier` LowCardinality(Nullable(String)) COMMENT 'NULL on a CLEAR: all tiers',
    `locality` LowCardinality(Nullable(String)) COMMENT 'REMOTE: reachable, not held',
    `block_size` Int32 COMMENT 'tokens; 0: the event gave none' CODEC(ZSTD(1)),
    `block_id` FixedString(16) COMMENT 'pseudonym of the engine''s own block hash; means something within one rank, group and life only',
    `content_id` Nullable(FixedString(16)) COMMENT 'identity of the content across ranks and restarts; NULL: unresolved',
    `parent_state` LowCardinality(String) COMMENT 'ROOT, CONTENT or UNKNOWN',
    `parent_content_id` Nullable(FixedString(16)),
    `spec_kind` LowCardinality(Nullable(String)),
    `lora_name` LowCardinality(Nullable(String)),
    `reused` Bool COMMENT 'announced as reused, not stored anew',
    `inserted_at` DateTime('UTC') DEFAULT now() COMMENT 'retention counts from here, not from engine time: a recorded stream may be years old' CODEC(Delta, ZSTD(1)),
    INDEX content content_id TYPE bloom_filter(0.01) GRANULARITY 4
)
ENGINE = ReplacingMergeTree(inserted_at)
PARTITION BY toDate(at)
ORDER BY (toStartOfHour(at), instance_id, dp_rank, life_id, seq, event_index, block_index)
TTL inserted_at + INTERVAL 14 DAY
COMMENT 'The facts: one row per block of each engine event. Kept 14 days from insertion.';

CREATE TABLE IF NOT EXISTS rank_events
(
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `life_id` LowCardinality(String),
    `seq` Int64 COMMENT 'of the refused batch; otherwise the number the next batch was expected to carry',
    `kind` LowCardinality(String) COMMENT 'holder_reset, loss, refusal or declaration',
    `at` DateTime64(6, 'UTC') COMMENT 'engine time; where the message has none of its own, the engine time last seen (1970: none)',
    `observed_at` DateTime64(3, 'UTC') COMMENT 'the forwarder''s clock',
    `incarnation` LowCardinality(String) COMMENT 'one run of one forwarder',
    `reason` LowCardinality(Nullable(String)),
    `boundary` Nullable(DateTime64(6, 'UTC')) COMMENT 'holder_reset: everything the rank held ended here',
    `first_seq` Nullable(Int64) COMMENT 'loss: first batch lost',
    `last_seq` Nullable(Int64) COMMENT 'loss: last batch lost',
    `payload_bytes` Nullable(Int64) COMMENT 'refusal: size of the payload that could not be read',
    `reuse_reporting` LowCardinality(Nullable(String)) COMMENT 'declaration, as all that follow',
    `removals` LowCardinality(Nullable(String)),
    `workload` LowCardinality(Nullable(String)),
    `model` LowCardinality(Nullable(String)),
    `kv_connector` LowCardinality(Nullable(String)),
    `key_epoch` Nullable(Int64),
    `canary` LowCardinality(Nullable(String)),
    `forwarder_version` LowCardinality(Nullable(String)),
    `labels` Map(LowCardinality(String), String),
    `inserted_at` DateTime('UTC') DEFAULT now()
)
ENGINE = ReplacingMergeTree(inserted_at)
PARTITION BY toYYYYMM(observed_at)
ORDER BY (instance_id, dp_rank, life_id, seq, kind, observed_at, incarnation)
COMMENT 'What interrupts a rank''s stream: engine restarts, lost ranges, refused payloads, declarations. Every gap in coverage is here.';

CREATE TABLE IF NOT EXISTS lifecycle
(
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `incarnation` LowCardinality(String) COMMENT 'one run of one forwarder; counters are cumulative within it',
    `at` DateTime64(3, 'UTC') COMMENT 'the forwarder''s clock' CODEC(DoubleDelta, ZSTD(1)),
    `kind` LowCardinality(String) COMMENT 'start, heartbeat or stop',
    `life_id` LowCardinality(String),
    `batches` Int64 CODEC(ZSTD(1)),
    `blocks_stored` Int64 CODEC(ZSTD(1)),
    `blocks_removed` Int64 CODEC(ZSTD(1)),
    `unresolved_blocks` Int64 CODEC(ZSTD(1)),
    `unknown_events` Int64 CODEC(ZSTD(1)),
    `refused` Int64 CODEC(ZSTD(1)),
    `lost` Int64 CODEC(ZSTD(1)),
    `duplicates` Int64 CODEC(ZSTD(1)),
    `replayed` Int64 CODEC(ZSTD(1)),
    `publisher_restarts` Int64 CODEC(ZSTD(1)),
    `canary` LowCardinality(String),
    `key_epoch` Int64 CODEC(ZSTD(1)),
    `reason` LowCardinality(Nullable(String)),
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(inserted_at)
PARTITION BY toYYYYMM(at)
ORDER BY (instance_id, dp_rank, incarnation, at, kind)
COMMENT 'Each forwarder''s start, heartbeats and stop, with its cumulative counters.';
