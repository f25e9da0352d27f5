-- How long rows are kept, unless `kvcensus migrate --keep-...` says otherwise; `kvcensus migrate --status` shows what is in force.
--
-- A table that has a TTL when this file is applied keeps it. Time counts from insertion, not from engine time: a recorded stream may be years
-- old. Facts are kept 14 days, windows 90 days, rollups 2 years; deploys, known_ranks and life_groups for good.

-- A changed TTL would have every part of a table rewritten on the spot. Only when its rows are due is noted, and merges do the rest.
ALTER TABLE recomputes MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE rank_windows MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE duplicate_windows MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE shared_prefixes MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE lifecycle MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE rank_rollups MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE duplicate_rollups MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE rank_events MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE block_events MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE batches MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE rank_messages MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE engine_metrics MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE dead_letters MODIFY SETTING materialize_ttl_recalculate_only = 1;

ALTER TABLE recomputes MODIFY TTL inserted_at + INTERVAL 14 DAY;

ALTER TABLE rank_windows MODIFY TTL inserted_at + INTERVAL 90 DAY;

ALTER TABLE duplicate_windows MODIFY TTL inserted_at + INTERVAL 90 DAY;

ALTER TABLE shared_prefixes MODIFY TTL inserted_at + INTERVAL 90 DAY;

ALTER TABLE lifecycle MODIFY TTL inserted_at + INTERVAL 90 DAY;

ALTER TABLE rank_rollups MODIFY TTL inserted_at + INTERVAL 2 YEAR;

ALTER TABLE duplicate_rollups MODIFY TTL inserted_at + INTERVAL 2 YEAR;

-- A declaration holds until the next one, and so does a departure: without it a rank would be expected again.
ALTER TABLE rank_events MODIFY TTL inserted_at + INTERVAL 90 DAY DELETE WHERE kind NOT IN ('declaration', 'departure');

-- Block events and batches, the most rows by far, lie in partitions of a day: whole parts are dropped once their last row is due, about a
-- day late at most, and none is rewritten only to lose some rows.
ALTER TABLE block_events MODIFY SETTING ttl_only_drop_parts = 1;

ALTER TABLE batches MODIFY SETTING ttl_only_drop_parts = 1;

-- Where a partition is a month, dropping whole parts would be a month late. A part is rewritten without what is due, once a day and not, as
-- left to itself, every four hours: the part of a month whose rows are due one after the other may be large.
ALTER TABLE recomputes MODIFY SETTING merge_with_ttl_timeout = 86400;

ALTER TABLE rank_windows MODIFY SETTING merge_with_ttl_timeout = 86400;

ALTER TABLE duplicate_windows MODIFY SETTING merge_with_ttl_timeout = 86400;

ALTER TABLE shared_prefixes MODIFY SETTING merge_with_ttl_timeout = 86400;

ALTER TABLE lifecycle MODIFY SETTING merge_with_ttl_timeout = 86400;

ALTER TABLE engine_metrics MODIFY SETTING merge_with_ttl_timeout = 86400;

ALTER TABLE rank_rollups MODIFY SETTING merge_with_ttl_timeout = 86400;

ALTER TABLE duplicate_rollups MODIFY SETTING merge_with_ttl_timeout = 86400;

-- Comments that named the time would be wrong under another.
ALTER TABLE block_events MODIFY COMMENT 'The facts: one row per block of each engine event. A fact: kept 14 days from insertion by default.';

ALTER TABLE batches MODIFY COMMENT 'One row per engine batch, also those without a block event, by the place in which it was counted. With block_events and rank_messages: what kvcensus reclassify counts from. A fact: kept 14 days from insertion by default.';

ALTER TABLE rank_messages MODIFY COMMENT 'Every message of a rank that is no batch, whole, by the place in which it was counted; rank_events has most of them column by column. A fact: kept 14 days from insertion by default, declarations for good, since they hold until the next one.';

ALTER TABLE engine_metrics MODIFY COMMENT 'What each engine says of itself, one row per page of its metrics: the check on what its events say. Counters are cumulative per process. Kept as long as windows, 90 days from insertion by default.';

ALTER TABLE dead_letters MODIFY COMMENT 'Messages that could not be read or counted and were set aside, with their place and bytes. Kept as long as windows, 90 days from insertion by default.';
