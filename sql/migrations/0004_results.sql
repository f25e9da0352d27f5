-- Results that say how they may be read: register and reasons, bytes, GPU time, histograms, pairs of workloads, shared prefixes.
--
-- Rows of earlier versions stay: what they did not tell reads as zero, NULL or empty, and their register as indeterminate.

ALTER TABLE rank_windows
    ADD COLUMN IF NOT EXISTS `register` LowCardinality(String) DEFAULT 'indeterminate'
        COMMENT 'how repeat compute of this row may be read: exact, lower_bound or indeterminate' AFTER `reasons`,
    ADD COLUMN IF NOT EXISTS `prefill_rate` Nullable(Float64)
        COMMENT 'prompt tokens per second by which GPU time was estimated, the one in force last; NULL: not known' CODEC(ZSTD(1)) AFTER `register`,
    ADD COLUMN IF NOT EXISTS `prefill_rate_source` LowCardinality(Nullable(String)) COMMENT 'declared or measured' AFTER `prefill_rate`,
    ADD COLUMN IF NOT EXISTS `gpus_per_rank` Nullable(Float64) CODEC(ZSTD(1)) AFTER `prefill_rate_source`,
    ADD COLUMN IF NOT EXISTS `pool_blocks` Nullable(Int64) COMMENT 'blocks of the engine''s own pool, as its metrics say; NULL: no metrics' CODEC(ZSTD(1)) AFTER `gpus_per_rank`,
    ADD COLUMN IF NOT EXISTS `scrapes` Int64 COMMENT 'pages of the engine''s metrics that the counting was held against' CODEC(ZSTD(1)) AFTER `pool_blocks`,
    ADD COLUMN IF NOT EXISTS `breaches_found` Int64 COMMENT 'contradictions with the engine''s metrics; the first ten are listed' CODEC(ZSTD(1)) AFTER `scrapes`,
    ADD COLUMN IF NOT EXISTS `departed` Bool COMMENT 'the forwarder stopped on purpose: nobody expects to hear of the rank' AFTER `breaches_found`,
    -- One element per contradiction.
    ADD COLUMN IF NOT EXISTS `breaches.kind` Array(LowCardinality(String)) COMMENT 'cached_over_pool or in_use_over_cached' CODEC(ZSTD(1)) AFTER `departed`,
    ADD COLUMN IF NOT EXISTS `breaches.at` Array(DateTime64(6, 'UTC')) CODEC(ZSTD(1)) AFTER `breaches.kind`,
    ADD COLUMN IF NOT EXISTS `breaches.scraped_at` Array(DateTime64(3, 'UTC')) COMMENT 'the forwarder''s clock' CODEC(ZSTD(1)) AFTER `breaches.at`,
    ADD COLUMN IF NOT EXISTS `breaches.found` Array(Int64) COMMENT 'blocks counted as cached (cached_over_pool), or in use by the metrics' CODEC(ZSTD(1)) AFTER `breaches.scraped_at`,
    ADD COLUMN IF NOT EXISTS `breaches.bound` Array(Int64) COMMENT 'the most that could be: the pool, or cached blocks, running requests and a slack' CODEC(ZSTD(1)) AFTER `breaches.found`,
    ADD COLUMN IF NOT EXISTS `groups.resident_copies` Array(Int64) COMMENT 'physical copies in GPU memory at the end of the row' CODEC(ZSTD(1)) AFTER `groups.resident_tokens`,
    ADD COLUMN IF NOT EXISTS `groups.kv_bytes_per_token` Array(Nullable(Int64)) COMMENT 'over all tensor-parallel shards; NULL: not known' CODEC(ZSTD(1)) AFTER `groups.resident_copies`,
    ADD COLUMN IF NOT EXISTS `groups.unreused_blocks` Array(Int64) COMMENT 'evicted without a use that the stream showed; an upper bound, as plain cache hits leave no trace' CODEC(ZSTD(1)) AFTER `groups.kv_bytes_per_token`,
    ADD COLUMN IF NOT EXISTS `groups.unreused_tokens` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.unreused_blocks`,
    ADD COLUMN IF NOT EXISTS `groups.forgotten_blocks` Array(Int64) COMMENT 'lost blocks whose history was let go of: their return is not recognised' CODEC(ZSTD(1)) AFTER `groups.unreused_tokens`,
    ADD COLUMN IF NOT EXISTS `groups.unrated_tokens` Array(Int64) COMMENT 'recomputed tokens for which no prefill rate was known: in no gpu_us' CODEC(ZSTD(1)) AFTER `groups.forgotten_blocks`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_evicted_gpu_us` Array(Int64) COMMENT 'GPU microseconds, an estimate' CODEC(ZSTD(1)) AFTER `groups.unrated_tokens`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_cleared_gpu_us` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.recompute_evicted_gpu_us`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_restarted_gpu_us` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.recompute_cleared_gpu_us`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_concurrent_gpu_us` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.recompute_restarted_gpu_us`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_ambiguous_gpu_us` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.recompute_concurrent_gpu_us`,
    -- Histograms, mergeable by adding counts bucket by bucket (sumMap). View return_times says where a bucket lies.
    ADD COLUMN IF NOT EXISTS `groups.lifetime_buckets` Array(Array(Int64)) COMMENT 'how long evicted residencies had lasted: buckets that hold any' CODEC(ZSTD(1)) AFTER `groups.recompute_ambiguous_gpu_us`,
    ADD COLUMN IF NOT EXISTS `groups.lifetime_counts` Array(Array(Int64)) COMMENT 'residencies in each of those buckets' CODEC(ZSTD(1)) AFTER `groups.lifetime_buckets`,
    ADD COLUMN IF NOT EXISTS `groups.back_evicted_buckets` Array(Array(Int64)) COMMENT 'how long evicted content was away before it was stored again' CODEC(ZSTD(1)) AFTER `groups.lifetime_counts`,
    ADD COLUMN IF NOT EXISTS `groups.back_evicted_counts` Array(Array(Int64)) COMMENT 'blocks in each of those buckets' CODEC(ZSTD(1)) AFTER `groups.back_evicted_buckets`,
    ADD COLUMN IF NOT EXISTS `groups.back_cleared_buckets` Array(Array(Int64)) CODEC(ZSTD(1)) AFTER `groups.back_evicted_counts`,
    ADD COLUMN IF NOT EXISTS `groups.back_cleared_counts` Array(Array(Int64)) CODEC(ZSTD(1)) AFTER `groups.back_cleared_buckets`,
    ADD COLUMN IF NOT EXISTS `groups.back_restarted_buckets` Array(Array(Int64)) CODEC(ZSTD(1)) AFTER `groups.back_cleared_counts`,
    ADD COLUMN IF NOT EXISTS `groups.back_restarted_counts` Array(Array(Int64)) CODEC(ZSTD(1)) AFTER `groups.back_restarted_buckets`,
    COMMENT COLUMN `kv_connector` 'declared, or "seen in metrics"; not NULL: repeat compute of this rank is not measurable',
    COMMENT COLUMN `reasons` 'why the row is less than exact, beside coverage';

ALTER TABLE recomputes
    ADD COLUMN IF NOT EXISTS `parent_content_id` Nullable(FixedString(16)) COMMENT 'content of the block before; NULL: a root, or not known' AFTER `content_id`,
    ADD COLUMN IF NOT EXISTS `parent_block_id` Nullable(FixedString(16)) COMMENT 'block_id of the block before; NULL: a root, or not known' AFTER `parent_content_id`,
    ADD COLUMN IF NOT EXISTS `gpu_us` Nullable(Int64) COMMENT 'GPU microseconds, an estimate; NULL: no prefill rate was known' CODEC(ZSTD(1)) AFTER `elapsed_us`;

ALTER TABLE duplicate_windows
    ADD COLUMN IF NOT EXISTS `expected_ranks` Int32 COMMENT 'ranks heard of that had not departed: coverage = observed_us / (expected_ranks x (as_of - window_start))' CODEC(ZSTD(1)) AFTER `between_blocks_end`,
    ADD COLUMN IF NOT EXISTS `observed_us` Int64 COMMENT 'demonstrably observed, summed over the expected ranks, microseconds' CODEC(ZSTD(1)) AFTER `expected_ranks`,
    ADD COLUMN IF NOT EXISTS `register` LowCardinality(String) DEFAULT 'indeterminate'
        COMMENT 'how the row may be read: exact, lower_bound or indeterminate; the weaker of the next two' AFTER `observed_us`,
    ADD COLUMN IF NOT EXISTS `inside_register` LowCardinality(String) DEFAULT 'indeterminate' AFTER `register`,
    ADD COLUMN IF NOT EXISTS `between_register` LowCardinality(String) DEFAULT 'indeterminate' AFTER `inside_register`,
    ADD COLUMN IF NOT EXISTS `reasons` Array(LowCardinality(String)) COMMENT 'why the row is less than exact' AFTER `between_register`,
    ADD COLUMN IF NOT EXISTS `late_changes` Int64 COMMENT 'changes so late that they count at a later time than their own, up to now; never sum' CODEC(ZSTD(1)) AFTER `reasons`,
    ADD COLUMN IF NOT EXISTS `inside_byte_ms` Nullable(Int64) COMMENT 'extra copies inside instances, bytes x milliseconds; NULL, here and below: not known of every rank' CODEC(ZSTD(1)) AFTER `late_changes`,
    ADD COLUMN IF NOT EXISTS `between_byte_ms` Nullable(Int64) CODEC(ZSTD(1)) AFTER `inside_byte_ms`,
    ADD COLUMN IF NOT EXISTS `extra_bytes_max` Nullable(Int64) CODEC(ZSTD(1)) AFTER `between_byte_ms`,
    ADD COLUMN IF NOT EXISTS `inside_bytes_end` Nullable(Int64) CODEC(ZSTD(1)) AFTER `extra_bytes_max`,
    ADD COLUMN IF NOT EXISTS `between_bytes_end` Nullable(Int64) CODEC(ZSTD(1)) AFTER `inside_bytes_end`,
    COMMENT COLUMN `scope` 'fleet, rank, workload, model or workload_pair; never sum two scopes',
    COMMENT COLUMN `scope_key` 'which rank (INSTANCE/R), workload or model; empty for the fleet and for undeclared; of a workload_pair, a JSON list of two workloads, whose between_* is content that ranks of both hold, once';

ALTER TABLE rank_events
    ADD COLUMN IF NOT EXISTS `kv_bytes_by_group` Map(LowCardinality(String), Int64) COMMENT 'bytes per token of each cache group, where they differ' AFTER `max_payload_bytes`,
    COMMENT COLUMN `kind` 'holder_reset, loss, refusal, declaration, identity_refused or departure';

CREATE TABLE IF NOT EXISTS shared_prefixes
(
    `as_of` DateTime64(6, 'UTC') COMMENT 'the instant whose holders these are' CODEC(DoubleDelta, ZSTD(1)),
    `semantics_version` Int32 COMMENT 'version of the counting rules',
    `version` UInt64 COMMENT 'a row replaces those of the same key with a lower version' CODEC(ZSTD(1)),
    `place` Int32 COMMENT '1 has the most extra tokens',
    `content_id` FixedString(16) COMMENT 'its last block',
    `head_content_id` FixedString(16) COMMENT 'its first block',
    `parent_content_id` Nullable(FixedString(16)) COMMENT 'what lies before it; NULL: it begins at a root',
    `blocks` Int64 CODEC(ZSTD(1)),
    `tokens` Int64 COMMENT 'length of the trunk' CODEC(ZSTD(1)),
    `depth_tokens` Nullable(Int64) COMMENT 'from the root to its end; NULL: not known all the way' CODEC(ZSTD(1)),
    `copies` Int64 COMMENT 'ranks that hold it' CODEC(ZSTD(1)),
    `instances` Int64 CODEC(ZSTD(1)),
    `extra_blocks` Int64 COMMENT 'blocks x (copies - 1)' CODEC(ZSTD(1)),
    `extra_tokens` Int64 COMMENT 'tokens x (copies - 1)' CODEC(ZSTD(1)),
    `extra_bytes` Nullable(Int64) COMMENT 'NULL: not known of every rank' CODEC(ZSTD(1)),
    `ranks` Array(LowCardinality(String)) COMMENT 'those that hold it, as INSTANCE/R',
    `workloads` Array(LowCardinality(String)) COMMENT 'of those ranks; empty text: undeclared',
    `models` Array(LowCardinality(String)) COMMENT 'of those ranks; empty text: undeclared',
    `first_seen` DateTime64(6, 'UTC') COMMENT 'when any rank was first seen to hold its last block' CODEC(ZSTD(1)),
    `coverage` Float64 COMMENT 'of the fleet, in the window that ends at as_of' CODEC(ZSTD(1)),
    `register` LowCardinality(String) COMMENT 'exact, lower_bound or indeterminate',
    `reasons` Array(LowCardinality(String)) COMMENT 'why it is less than exact',
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toYYYYMM(as_of)
ORDER BY (toStartOfHour(as_of), toUnixTimestamp64Micro(as_of), place, semantics_version)
COMMENT 'Which prefixes lie on several ranks at once? The longest chains of content with the same holders, by extra tokens, per instant. Never sum over instants.';

CREATE TABLE IF NOT EXISTS dead_letters
(
    `topic` LowCardinality(String) COMMENT 'where the message stood: topic, partition and offset',
    `partition` Int32,
    `offset` Int64 CODEC(ZSTD(1)),
    `reader` LowCardinality(String) COMMENT 'what could not use it: an agent, or sink',
    `reason` String CODEC(ZSTD(1)),
    `key` Nullable(String) CODEC(ZSTD(1)),
    `payload` String COMMENT 'its bytes, cut to 256 KiB' CODEC(ZSTD(1)),
    `payload_bytes` Int64 COMMENT 'its whole length' CODEC(ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(inserted_at)
ORDER BY (topic, partition, offset)
TTL inserted_at + INTERVAL 90 DAY
COMMENT 'Messages that could not be read or counted and were set aside, with their place and bytes. Kept 90 days from insertion.';
