-- Facts under the names of the record contract, what forwarders and engines say of themselves, and the rest of what can be declared.

ALTER TABLE block_events RENAME COLUMN IF EXISTS block_size TO n_tokens;

ALTER TABLE block_events
    ADD COLUMN IF NOT EXISTS `parent_id` Nullable(FixedString(16))
        COMMENT 'block_id of the block before; NULL: a root, if not parent_unknown' AFTER `content_id`,
    ADD COLUMN IF NOT EXISTS `parent_unknown` Bool DEFAULT (kind IN ('STORE', 'store')) AND (parent_state != 'ROOT') AND (parent_id IS NULL)
        COMMENT 'a store, and nobody can say which block is before it' AFTER `parent_id`,
    ADD COLUMN IF NOT EXISTS `spec_sliding_window` Nullable(Int64) COMMENT 'tokens' CODEC(ZSTD(1)) AFTER `spec_kind`,
    ADD COLUMN IF NOT EXISTS `lora_id` Nullable(Int64) COMMENT 'the engine''s own number of the adapter' CODEC(ZSTD(1)) AFTER `spec_sliding_window`,
    ADD COLUMN IF NOT EXISTS `extra_keys` Array(FixedString(16)) COMMENT 'pseudonyms of what beside the tokens makes the content: salt, images' AFTER `lora_name`,
    ADD COLUMN IF NOT EXISTS `session_id` Nullable(FixedString(16)) COMMENT 'pseudonym' AFTER `reused`,
    ADD COLUMN IF NOT EXISTS `ownership` LowCardinality(Nullable(String)) AFTER `session_id`;

ALTER TABLE block_events
    COMMENT COLUMN `kind` 'store, evict or clear; a clear is one row without a block',
    COMMENT COLUMN `n_tokens` 'tokens of the block; 0: the event gave none',
    COMMENT COLUMN `group_idx` 'NULL on a clear: all groups',
    COMMENT COLUMN `tier` 'NULL: the event named none, which is GPU; on a clear: all tiers',
    COMMENT COLUMN `parent_content_id` 'content of the block before; NULL: a root, or unresolved',
    COMMENT COLUMN `parent_state` 'only in rows written before parent_unknown was; empty since';

-- Rows of earlier versions go with their retention; until then they answer to the same words.
ALTER TABLE block_events UPDATE kind = transform(kind, ['STORE', 'REMOVE', 'CLEAR'], ['store', 'evict', 'clear'], kind) WHERE kind IN ('STORE', 'REMOVE', 'CLEAR');

-- One rank may refuse identities in several groups at one moment, so the group is part of the key.
ALTER TABLE rank_events
    ADD COLUMN IF NOT EXISTS `group_idx` Int32 COMMENT 'identity_refused: the cache group; 0 in all others' AFTER `payload_bytes`,
    MODIFY ORDER BY (instance_id, dp_rank, life_id, seq, kind, observed_at, incarnation, group_idx);

ALTER TABLE rank_events
    ADD COLUMN IF NOT EXISTS `cause` LowCardinality(Nullable(String))
        COMMENT 'holder_reset: restarted (the engine came back empty) or rekeyed (ids from before compare with none after)' AFTER `boundary`,
    ADD COLUMN IF NOT EXISTS `refused` Nullable(Int64) COMMENT 'identity_refused: blocks forgotten to stay within the bound' AFTER `group_idx`,
    ADD COLUMN IF NOT EXISTS `window_start` Nullable(DateTime64(6, 'UTC'))
        COMMENT 'identity_refused: what was stored from here to window_end may lack a content id' AFTER `refused`,
    ADD COLUMN IF NOT EXISTS `window_end` Nullable(DateTime64(6, 'UTC')) AFTER `window_start`,
    ADD COLUMN IF NOT EXISTS `engine_profile` LowCardinality(Nullable(String)) COMMENT 'vllm or sglang' AFTER `labels`,
    ADD COLUMN IF NOT EXISTS `gpus_per_rank` Nullable(Float64) AFTER `engine_profile`,
    ADD COLUMN IF NOT EXISTS `kv_bytes_per_token` Nullable(Int64) COMMENT 'over all tensor-parallel shards' AFTER `gpus_per_rank`,
    ADD COLUMN IF NOT EXISTS `prefill_rate` Nullable(Float64) COMMENT 'prompt tokens per second of the whole rank' AFTER `kv_bytes_per_token`,
    ADD COLUMN IF NOT EXISTS `heartbeat_ms` Nullable(Int64) AFTER `prefill_rate`,
    ADD COLUMN IF NOT EXISTS `staleness_ms` Nullable(Int64) COMMENT 'not heard of for so long, the forwarder is not counted on; 0: undeclared' AFTER `heartbeat_ms`,
    ADD COLUMN IF NOT EXISTS `max_payload_bytes` Nullable(Int64) COMMENT 'larger payloads are refused unread' AFTER `staleness_ms`,
    COMMENT COLUMN `kind` 'holder_reset, loss, refusal, declaration or identity_refused';

ALTER TABLE lifecycle
    ADD COLUMN IF NOT EXISTS `forwarder_version` LowCardinality(String) AFTER `reason`,
    ADD COLUMN IF NOT EXISTS `endpoint` LowCardinality(String) COMMENT 'the engine''s event socket' AFTER `forwarder_version`,
    ADD COLUMN IF NOT EXISTS `msgs_seen` Nullable(Int64) COMMENT 'messages that came in; NULL, here and below: not counted by this forwarder' CODEC(ZSTD(1)) AFTER `endpoint`,
    ADD COLUMN IF NOT EXISTS `oversized` Nullable(Int64) COMMENT 'refused unread for their size; part of refused' CODEC(ZSTD(1)) AFTER `msgs_seen`,
    ADD COLUMN IF NOT EXISTS `malformed` Nullable(Int64) COMMENT 'no batch; part of refused' CODEC(ZSTD(1)) AFTER `oversized`,
    ADD COLUMN IF NOT EXISTS `too_large` Nullable(Int64) COMMENT 'batches that Kafka would not take for their size' CODEC(ZSTD(1)) AFTER `malformed`,
    ADD COLUMN IF NOT EXISTS `events_ingested` Nullable(Int64) CODEC(ZSTD(1)) AFTER `too_large`,
    ADD COLUMN IF NOT EXISTS `identity_conflicts` Nullable(Int64) CODEC(ZSTD(1)) AFTER `events_ingested`,
    ADD COLUMN IF NOT EXISTS `shared_contents` Nullable(Int64) CODEC(ZSTD(1)) AFTER `identity_conflicts`,
    ADD COLUMN IF NOT EXISTS `content_bridge_entries` Nullable(Int64) COMMENT 'blocks whose identity is remembered now' CODEC(ZSTD(1)) AFTER `shared_contents`,
    ADD COLUMN IF NOT EXISTS `content_bridge_evicted` Nullable(Int64) COMMENT 'forgotten to stay within the bound' CODEC(ZSTD(1)) AFTER `content_bridge_entries`,
    ADD COLUMN IF NOT EXISTS `rank_mismatches` Nullable(Int64) CODEC(ZSTD(1)) AFTER `content_bridge_evicted`,
    ADD COLUMN IF NOT EXISTS `connections` Nullable(Int64) CODEC(ZSTD(1)) AFTER `rank_mismatches`,
    ADD COLUMN IF NOT EXISTS `spool_bytes` Nullable(Int64) COMMENT 'waiting on disk now' CODEC(ZSTD(1)) AFTER `connections`,
    ADD COLUMN IF NOT EXISTS `spool_messages` Nullable(Int64) COMMENT 'waiting on disk now' CODEC(ZSTD(1)) AFTER `spool_bytes`,
    ADD COLUMN IF NOT EXISTS `spool_dropped` Nullable(Int64) COMMENT 'batches that the spool''s bound forced out, declared lost' CODEC(ZSTD(1)) AFTER `spool_messages`,
    ADD COLUMN IF NOT EXISTS `scrapes` Nullable(Int64) COMMENT 'pages read of the engine''s own metrics' CODEC(ZSTD(1)) AFTER `spool_dropped`,
    ADD COLUMN IF NOT EXISTS `scrapes_failed` Nullable(Int64) CODEC(ZSTD(1)) AFTER `scrapes`,
    ADD COLUMN IF NOT EXISTS `rss_bytes` Nullable(Int64) COMMENT 'memory of the forwarder now' CODEC(ZSTD(1)) AFTER `scrapes_failed`,
    ADD COLUMN IF NOT EXISTS `last_message_at` Nullable(DateTime64(3, 'UTC')) COMMENT 'when the engine last sent something, by the forwarder''s clock' CODEC(ZSTD(1)) AFTER `rss_bytes`,
    ADD COLUMN IF NOT EXISTS `heartbeat_ms` Int64 COMMENT 'the forwarder says so often that it is there; 0: undeclared' CODEC(ZSTD(1)) AFTER `last_message_at`,
    ADD COLUMN IF NOT EXISTS `staleness_ms` Int64 COMMENT 'not heard of for so long, it is not counted on; 0: undeclared' CODEC(ZSTD(1)) AFTER `heartbeat_ms`,
    -- One element per declaration since the record before; in full they are in rank_events.
    ADD COLUMN IF NOT EXISTS `declared.kind` Array(LowCardinality(String)) CODEC(ZSTD(1)) AFTER `staleness_ms`,
    ADD COLUMN IF NOT EXISTS `declared.life_id` Array(LowCardinality(String)) CODEC(ZSTD(1)) AFTER `declared.kind`,
    ADD COLUMN IF NOT EXISTS `declared.first_seq` Array(Int64) CODEC(ZSTD(1)) AFTER `declared.life_id`,
    ADD COLUMN IF NOT EXISTS `declared.last_seq` Array(Int64) CODEC(ZSTD(1)) AFTER `declared.first_seq`,
    ADD COLUMN IF NOT EXISTS `declared.at` Array(DateTime64(6, 'UTC')) CODEC(ZSTD(1)) AFTER `declared.last_seq`,
    ADD COLUMN IF NOT EXISTS `declared.reason` Array(LowCardinality(Nullable(String))) CODEC(ZSTD(1)) AFTER `declared.at`,
    ADD COLUMN IF NOT EXISTS `declared_more` Int64 COMMENT 'declarations beyond the hundred that are listed' CODEC(ZSTD(1)) AFTER `declared.reason`;

CREATE TABLE IF NOT EXISTS engine_metrics
(
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `life_id` LowCardinality(String),
    `incarnation` LowCardinality(String) COMMENT 'the forwarder''s run that asked',
    `at` DateTime64(3, 'UTC') COMMENT 'the forwarder''s clock' CODEC(DoubleDelta, ZSTD(1)),
    `process_started` Nullable(DateTime64(6, 'UTC')) COMMENT 'when the engine''s process started; counters are cumulative from there' CODEC(ZSTD(1)),
    `model_name` LowCardinality(Nullable(String)) COMMENT 'as the engine calls it; NULL, here and below: it does not say',
    `kv_cache_usage` Nullable(Float64) COMMENT 'share (0 to 1) of the blocks that running requests hold' CODEC(ZSTD(1)),
    `num_gpu_blocks` Nullable(Int64) CODEC(ZSTD(1)),
    `block_size` Nullable(Int64) COMMENT 'tokens per block' CODEC(ZSTD(1)),
    `requests_running` Nullable(Int64) CODEC(ZSTD(1)),
    `requests_waiting` Nullable(Int64) CODEC(ZSTD(1)),
    `preemptions` Nullable(Int64) CODEC(ZSTD(1)),
    `prefix_cache_queries` Nullable(Int64) COMMENT 'tokens' CODEC(ZSTD(1)),
    `prefix_cache_hits` Nullable(Int64) COMMENT 'tokens' CODEC(ZSTD(1)),
    `external_prefix_cache_queries` Nullable(Int64) COMMENT 'tokens' CODEC(ZSTD(1)),
    `external_prefix_cache_hits` Nullable(Int64) COMMENT 'tokens' CODEC(ZSTD(1)),
    `prompt_tokens` Nullable(Int64) CODEC(ZSTD(1)),
    `prompt_tokens_cached` Nullable(Int64) COMMENT 'prompt tokens that were not computed again' CODEC(ZSTD(1)),
    `generation_tokens` Nullable(Int64) CODEC(ZSTD(1)),
    -- One element per histogram: its upper bounds in seconds, how many observations were at or below each, and their sum.
    `histograms.name` Array(LowCardinality(String)) COMMENT 'time_to_first_token, request_prefill_time' CODEC(ZSTD(1)),
    `histograms.bounds` Array(Array(Float64)) CODEC(ZSTD(1)),
    `histograms.counts` Array(Array(Int64)) CODEC(ZSTD(1)),
    `histograms.sum` Array(Float64) CODEC(ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(inserted_at)
PARTITION BY toYYYYMM(at)
ORDER BY (toStartOfHour(at), instance_id, dp_rank, toUnixTimestamp64Milli(at), life_id, incarnation)
TTL inserted_at + INTERVAL 90 DAY
COMMENT 'What each engine says of itself, one row per page of its metrics: the check on what its events say. Counters are cumulative per process. Kept 90 days from insertion.';
