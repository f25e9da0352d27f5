-- Facts complete enough to count from again: every message of a rank, with its place in the order in which it was counted.

CREATE TABLE IF NOT EXISTS batches
(
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `life_id` LowCardinality(String),
    `seq` Int64 COMMENT 'the engine''s own number of the batch' CODEC(Delta, ZSTD(1)),
    `at` DateTime64(6, 'UTC') COMMENT 'engine time' CODEC(DoubleDelta, ZSTD(1)),
    `observed_at` DateTime64(3, 'UTC') COMMENT 'the forwarder''s clock' CODEC(DoubleDelta, ZSTD(1)),
    `incarnation` LowCardinality(String) COMMENT 'one run of one forwarder',
    `partition` Int32 COMMENT 'place of the message on kvcensus.batches' CODEC(ZSTD(1)),
    `offset` Int64 CODEC(Delta, ZSTD(1)),
    `skipped` Int64 COMMENT 'numbers right before seq that belong to other ranks' CODEC(ZSTD(1)),
    `unknown_events` Int64 COMMENT 'events of a type that was not known; skipped' CODEC(ZSTD(1)),
    `unresolved_blocks` Int64 COMMENT 'blocks without a content id' CODEC(ZSTD(1)),
    `events` Int32 CODEC(ZSTD(1)),
    `blocks` Int32 COMMENT 'its rows in block_events' CODEC(ZSTD(1)),
    `empty_events` String COMMENT 'events that have no row in block_events, as they name no block: JSON, event index to event; empty: none' CODEC(ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() COMMENT 'retention counts from here' CODEC(Delta, ZSTD(1)),
    INDEX time at TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(inserted_at)
PARTITION BY toDate(at)
ORDER BY (instance_id, dp_rank, partition, offset, life_id, seq)
TTL inserted_at + INTERVAL 14 DAY
COMMENT 'One row per engine batch, also those without a block event, by the place in which it was counted. With block_events and rank_messages: what kvcensus reclassify counts from. Kept 14 days from insertion.';

CREATE TABLE IF NOT EXISTS rank_messages
(
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `life_id` LowCardinality(String),
    `seq` Int64 COMMENT 'of a refused batch; otherwise the number that the next batch was expected to carry' CODEC(Delta, ZSTD(1)),
    `kind` LowCardinality(String) COMMENT 'scrape, declaration, holder_reset, loss, refusal, identity_refused or departure',
    `at` DateTime64(6, 'UTC') COMMENT 'engine time last seen (1970: none)' CODEC(DoubleDelta, ZSTD(1)),
    `observed_at` DateTime64(3, 'UTC') COMMENT 'the forwarder''s clock' CODEC(DoubleDelta, ZSTD(1)),
    `incarnation` LowCardinality(String) COMMENT 'one run of one forwarder',
    `partition` Int32 COMMENT 'place of the message on kvcensus.batches' CODEC(ZSTD(1)),
    `offset` Int64 CODEC(Delta, ZSTD(1)),
    `skipped` Int64 COMMENT 'refusal: numbers right before it that belong to other ranks; loss: so many within its range' CODEC(ZSTD(1)),
    `body` String COMMENT 'what it says, as JSON' CODEC(ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() COMMENT 'retention counts from here' CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(inserted_at)
PARTITION BY toYYYYMM(observed_at)
ORDER BY (instance_id, dp_rank, partition, offset, life_id, seq)
TTL inserted_at + INTERVAL 14 DAY DELETE WHERE kind != 'declaration'
COMMENT 'Every message of a rank that is no batch, whole, by the place in which it was counted; rank_events has most of them column by column. Kept 14 days from insertion, declarations for good, since they hold until the next one.';
