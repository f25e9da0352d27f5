-- What somebody declared to have happened, to hold the time before against the time after.

CREATE TABLE IF NOT EXISTS deploys
(
    `deploy_id` LowCardinality(String),
    `version` UInt64 COMMENT 'when it was written, microseconds of the writer''s clock; a row replaces those of the same id with a lower version' CODEC(ZSTD(1)),
    `label` String CODEC(ZSTD(1)),
    `at` DateTime64(6, 'UTC') COMMENT 'engine time' CODEC(ZSTD(1)),
    `workload` LowCardinality(Nullable(String)) COMMENT 'that it concerned; NULL: all',
    `model` LowCardinality(Nullable(String)) COMMENT 'that it concerned; NULL: all',
    `removed` Bool COMMENT 'taken back',
    `inserted_at` DateTime('UTC') DEFAULT now()
)
ENGINE = ReplacingMergeTree(version)
ORDER BY deploy_id
COMMENT 'Deploys that somebody declared, also those taken back (removed). Kept for good.';

ALTER TABLE duplicate_windows
    ADD COLUMN IF NOT EXISTS `key_epoch` Nullable(Int64) COMMENT 'the one in which all expected ranks made their ids; NULL: several, or no rank' CODEC(ZSTD(1)) AFTER `between_bytes_end`;
