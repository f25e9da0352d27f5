-- Views for people. Each comment says the question, the unit and how the figure may be read.
--
-- Those without a suffix read the windows themselves: for an hour of one rank, or minutes of the fleet. Those with _5m, _1h and _1d read
-- the rollups, with the same columns under the same names (return_times: per workload, no longer per rank), and are cut by the same column,
-- window_start, which leads the sorting key. The ones named rollup_* hold all three grains at once and are what the others are made of.
--
-- Expected time ends where engine time has come to: what lies ahead of it in an open window is not missing yet. A rank that has departed
-- leaves no window open. What was observed in part is a lower bound; a single window of which nothing was seen does not spoil an hour.

CREATE OR REPLACE VIEW repeat_compute AS
WITH
    indexOf(w.`groups.group_idx`, p.primary_group) AS i,
    w.kv_connector IS NULL AS can_measure,
    can_measure AND w.reuse_reporting != 'unlabelled' AS can_tell,
    -- GPU time is known where a rate was: zero where nothing was computed again, NULL where it was and there was none.
    (known, us, tokens) -> if(known AND (us > 0 OR tokens = 0), us / 1e6, NULL) AS seconds
SELECT
    w.instance_id AS instance_id,
    w.dp_rank AS dp_rank,
    w.life_id AS life_id,
    w.window_start AS window_start,
    w.window_us AS window_us,
    w.workload AS workload,
    w.model AS model,
    w.semantics_version AS semantics_version,
    w.key_epoch AS key_epoch,
    w.is_final AS is_final,
    w.observed_us AS observed_us,
    w.window_us AS expected_us,
    w.observed_us / w.window_us AS coverage,
    w.register AS register,
    w.reasons AS reasons,
    can_measure AS measurable,
    if(can_measure, w.`groups.recompute_evicted_tokens`[i], NULL) AS evicted_tokens,
    if(can_measure, w.`groups.recompute_evicted_blocks`[i], NULL) AS evicted_blocks,
    if(can_measure, w.`groups.recompute_cleared_tokens`[i], NULL) AS cleared_tokens,
    if(can_measure, w.`groups.recompute_cleared_blocks`[i], NULL) AS cleared_blocks,
    if(can_measure, w.`groups.recompute_restarted_tokens`[i], NULL) AS restarted_tokens,
    if(can_measure, w.`groups.recompute_restarted_blocks`[i], NULL) AS restarted_blocks,
    if(can_tell, w.`groups.recompute_concurrent_tokens`[i], NULL) AS concurrent_tokens,
    if(can_tell, w.`groups.recompute_concurrent_blocks`[i], NULL) AS concurrent_blocks,
    if(can_measure, w.`groups.recompute_ambiguous_tokens`[i], NULL) AS ambiguous_reload_tokens,
    if(can_measure, w.`groups.recompute_ambiguous_blocks`[i], NULL) AS ambiguous_reload_blocks,
    seconds(can_measure, w.`groups.recompute_evicted_gpu_us`[i], w.`groups.recompute_evicted_tokens`[i]) AS evicted_gpu_seconds,
    seconds(can_measure, w.`groups.recompute_cleared_gpu_us`[i], w.`groups.recompute_cleared_tokens`[i]) AS cleared_gpu_seconds,
    seconds(can_measure, w.`groups.recompute_restarted_gpu_us`[i], w.`groups.recompute_restarted_tokens`[i]) AS restarted_gpu_seconds,
    seconds(can_tell, w.`groups.recompute_concurrent_gpu_us`[i], w.`groups.recompute_concurrent_tokens`[i]) AS concurrent_gpu_seconds,
    seconds(can_measure, w.`groups.recompute_ambiguous_gpu_us`[i], w.`groups.recompute_ambiguous_tokens`[i])
        AS ambiguous_reload_gpu_seconds,
    if(can_measure, w.`groups.unrated_tokens`[i], NULL) AS unrated_tokens,
    w.prefill_rate AS prefill_rate,
    w.prefill_rate_source AS prefill_rate_source,
    w.gpus_per_rank AS gpus_per_rank,
    if(w.reuse_reporting != 'unlabelled', w.`groups.stored_tokens`[i], NULL) AS stored_tokens,
    w.`groups.resolved_tokens`[i] AS resolved_tokens,
    w.`groups.evicted_tokens`[i] AS removed_tokens,
    w.`groups.unreused_tokens`[i] AS unreused_tokens,
    w.`groups.resident_tokens`[i] AS resident_tokens,
    w.`groups.resident_blocks`[i] AS resident_blocks
FROM (SELECT * FROM rank_windows FINAL) AS w
LEFT JOIN life_primary_groups AS p USING (instance_id, dp_rank, life_id, semantics_version)
COMMENT 'What was computed again, by cause? One row per rank, life and window, from the primary group; unit: tokens, blocks and seconds of GPU time (an estimate), as coverage and register say. The causes are never added together. NULL: cannot be told for this rank.';

CREATE OR REPLACE VIEW rollup_repeat_compute AS
WITH
    (SELECT max(newest) FROM fleet_clock) AS clock,
    greatest(
        toInt64(0), w.expected_us - greatest(toInt64(0), toUnixTimestamp64Micro(w.expected_until) - toUnixTimestamp64Micro(clock))
    ) AS expected,
    indexOf(w.`groups.group_idx`, p.primary_group) AS i,
    w.kv_connector IS NULL AS can_measure,
    can_measure AND w.reuse_reporting != 'unlabelled' AS can_tell,
    -- GPU time is known where a rate was: zero where nothing was computed again, NULL where it was and there was none.
    (known, us, tokens) -> if(known AND (us > 0 OR tokens = 0), us / 1e6, NULL) AS seconds
SELECT
    w.grain AS grain,
    w.instance_id AS instance_id,
    w.dp_rank AS dp_rank,
    w.life_id AS life_id,
    w.window_start AS window_start,
    w.window_us AS window_us,
    w.workload AS workload,
    w.model AS model,
    w.semantics_version AS semantics_version,
    w.key_epoch AS key_epoch,
    (w.is_final OR w.departed) AND toDateTime64(w.window_start, 6, 'UTC') + toIntervalMicrosecond(w.window_us) <= clock AS is_final,
    w.observed_us AS observed_us,
    expected AS expected_us,
    if(expected > 0, least(1, w.observed_us / expected), 0) AS coverage,
    multiIf(
        NOT can_measure OR w.observed_us = 0, 'indeterminate',
        w.register = 'exact' AND w.observed_us >= expected, 'exact',
        'lower_bound'
    ) AS register,
    w.reasons AS reasons,
    can_measure AS measurable,
    if(can_measure, w.`groups.recompute_evicted_tokens`[i], NULL) AS evicted_tokens,
    if(can_measure, w.`groups.recompute_evicted_blocks`[i], NULL) AS evicted_blocks,
    if(can_measure, w.`groups.recompute_cleared_tokens`[i], NULL) AS cleared_tokens,
    if(can_measure, w.`groups.recompute_cleared_blocks`[i], NULL) AS cleared_blocks,
    if(can_measure, w.`groups.recompute_restarted_tokens`[i], NULL) AS restarted_tokens,
    if(can_measure, w.`groups.recompute_restarted_blocks`[i], NULL) AS restarted_blocks,
    if(can_tell, w.`groups.recompute_concurrent_tokens`[i], NULL) AS concurrent_tokens,
    if(can_tell, w.`groups.recompute_concurrent_blocks`[i], NULL) AS concurrent_blocks,
    if(can_measure, w.`groups.recompute_ambiguous_tokens`[i], NULL) AS ambiguous_reload_tokens,
    if(can_measure, w.`groups.recompute_ambiguous_blocks`[i], NULL) AS ambiguous_reload_blocks,
    seconds(can_measure, w.`groups.recompute_evicted_gpu_us`[i], w.`groups.recompute_evicted_tokens`[i]) AS evicted_gpu_seconds,
    seconds(can_measure, w.`groups.recompute_cleared_gpu_us`[i], w.`groups.recompute_cleared_tokens`[i]) AS cleared_gpu_seconds,
    seconds(can_measure, w.`groups.recompute_restarted_gpu_us`[i], w.`groups.recompute_restarted_tokens`[i]) AS restarted_gpu_seconds,
    seconds(can_tell, w.`groups.recompute_concurrent_gpu_us`[i], w.`groups.recompute_concurrent_tokens`[i]) AS concurrent_gpu_seconds,
    seconds(can_measure, w.`groups.recompute_ambiguous_gpu_us`[i], w.`groups.recompute_ambiguous_tokens`[i])
        AS ambiguous_reload_gpu_seconds,
    if(can_measure, w.`groups.unrated_tokens`[i], NULL) AS unrated_tokens,
    w.prefill_rate AS prefill_rate,
    w.prefill_rate_source AS prefill_rate_source,
    w.gpus_per_rank AS gpus_per_rank,
    if(w.reuse_reporting != 'unlabelled', w.`groups.stored_tokens`[i], NULL) AS stored_tokens,
    w.`groups.resolved_tokens`[i] AS resolved_tokens,
    w.`groups.evicted_tokens`[i] AS removed_tokens,
    w.`groups.unreused_tokens`[i] AS unreused_tokens,
    w.`groups.resident_tokens`[i] AS resident_tokens,
    w.`groups.resident_blocks`[i] AS resident_blocks
FROM (SELECT * FROM rank_rollups FINAL) AS w
LEFT JOIN life_primary_groups AS p USING (instance_id, dp_rank, life_id, semantics_version)
COMMENT 'What was computed again, by cause? repeat_compute_5m, _1h and _1d in one: filter on one grain. Unit, coverage and register: as there.';

CREATE OR REPLACE VIEW repeat_compute_5m AS SELECT * EXCEPT grain FROM rollup_repeat_compute WHERE grain = '5m'
COMMENT 'What was computed again, by cause? One row per rank, life and 5 minutes, from the primary group; unit: tokens, blocks and seconds of GPU time (an estimate), as coverage and register say. A rank that was expected and silent has a row of its own (reason absent). The causes are never added together. NULL: cannot be told for this rank.';

CREATE OR REPLACE VIEW repeat_compute_1h AS SELECT * EXCEPT grain FROM rollup_repeat_compute WHERE grain = '1h'
COMMENT 'What was computed again, by cause? One row per rank, life and hour, from the primary group; unit: tokens, blocks and seconds of GPU time (an estimate), as coverage and register say. A rank that was expected and silent has a row of its own (reason absent). The causes are never added together. NULL: cannot be told for this rank.';

CREATE OR REPLACE VIEW repeat_compute_1d AS SELECT * EXCEPT grain FROM rollup_repeat_compute WHERE grain = '1d'
COMMENT 'What was computed again, by cause? One row per rank, life and day, from the primary group; unit: tokens, blocks and seconds of GPU time (an estimate), as coverage and register say. A rank that was expected and silent has a row of its own (reason absent). The causes are never added together. NULL: cannot be told for this rank.';

CREATE OR REPLACE VIEW rollup_repeat_compute_fleet AS
WITH
    cityHash64(r.instance_id, r.dp_rank) AS rank,
    -- Of some it may not be known: then the sum is of the others, and unrated_tokens says of how many tokens not. Of none: NULL.
    (seconds, tokens) -> if(seconds = 0 AND tokens > 0, NULL, seconds) AS gpu_seconds
SELECT
    grain,
    window_start,
    any(r.window_us) AS window_us,
    semantics_version,
    key_epoch,
    min(r.is_final) AS is_final,
    uniqExactIf(rank, r.life_id != '') AS ranks,
    uniqExact(rank) AS expected_ranks,
    uniqExactIf(rank, r.measurable) AS ranks_measured,
    uniqExactIf(rank, r.concurrent_tokens IS NOT NULL) AS ranks_telling_concurrent,
    sum(r.observed_us) AS observed_us,
    sum(r.expected_us) AS expected_us,
    if(expected_us > 0, least(1, observed_us / expected_us), 0) AS coverage,
    multiIf(
        countIf(r.measurable) = 0 OR sum(r.observed_us) = 0, 'indeterminate', max(r.register != 'exact'), 'lower_bound', 'exact'
    ) AS register,
    arraySort(arrayDistinct(arrayFlatten(groupUniqArrayIf(r.reasons, notEmpty(r.reasons))))) AS reasons,
    sum(r.evicted_tokens) AS evicted_tokens,
    sum(r.evicted_blocks) AS evicted_blocks,
    sum(r.cleared_tokens) AS cleared_tokens,
    sum(r.cleared_blocks) AS cleared_blocks,
    sum(r.restarted_tokens) AS restarted_tokens,
    sum(r.restarted_blocks) AS restarted_blocks,
    sum(r.concurrent_tokens) AS concurrent_tokens,
    sum(r.concurrent_blocks) AS concurrent_blocks,
    sum(r.ambiguous_reload_tokens) AS ambiguous_reload_tokens,
    sum(r.ambiguous_reload_blocks) AS ambiguous_reload_blocks,
    gpu_seconds(sum(r.evicted_gpu_seconds), sum(r.evicted_tokens)) AS evicted_gpu_seconds,
    gpu_seconds(sum(r.cleared_gpu_seconds), sum(r.cleared_tokens)) AS cleared_gpu_seconds,
    gpu_seconds(sum(r.restarted_gpu_seconds), sum(r.restarted_tokens)) AS restarted_gpu_seconds,
    gpu_seconds(sum(r.concurrent_gpu_seconds), sum(r.concurrent_tokens)) AS concurrent_gpu_seconds,
    gpu_seconds(sum(r.ambiguous_reload_gpu_seconds), sum(r.ambiguous_reload_tokens)) AS ambiguous_reload_gpu_seconds,
    sum(r.unrated_tokens) AS unrated_tokens,
    sum(r.stored_tokens) AS stored_tokens,
    sum(r.removed_tokens) AS removed_tokens,
    sum(r.unreused_tokens) AS unreused_tokens
FROM rollup_repeat_compute AS r
GROUP BY grain, window_start, semantics_version, key_epoch
COMMENT 'What did the whole fleet compute again, by cause? repeat_compute_fleet_5m, _1h and _1d in one: filter on one grain. Unit, coverage and register: as there.';

CREATE OR REPLACE VIEW repeat_compute_fleet_5m AS SELECT * EXCEPT grain FROM rollup_repeat_compute_fleet WHERE grain = '5m'
COMMENT 'What did the whole fleet compute again, by cause? One row per 5 minutes, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. How many ranks could tell: ranks_measured and ranks_telling_concurrent, of expected_ranks.';

CREATE OR REPLACE VIEW repeat_compute_fleet_1h AS SELECT * EXCEPT grain FROM rollup_repeat_compute_fleet WHERE grain = '1h'
COMMENT 'What did the whole fleet compute again, by cause? One row per hour, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. How many ranks could tell: ranks_measured and ranks_telling_concurrent, of expected_ranks.';

CREATE OR REPLACE VIEW repeat_compute_fleet_1d AS SELECT * EXCEPT grain FROM rollup_repeat_compute_fleet WHERE grain = '1d'
COMMENT 'What did the whole fleet compute again, by cause? One row per day, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. How many ranks could tell: ranks_measured and ranks_telling_concurrent, of expected_ranks.';

CREATE OR REPLACE VIEW rollup_repeat_compute_by_workload AS
WITH
    cityHash64(r.instance_id, r.dp_rank) AS rank,
    -- Of some it may not be known: then the sum is of the others, and unrated_tokens says of how many tokens not. Of none: NULL.
    (seconds, tokens) -> if(seconds = 0 AND tokens > 0, NULL, seconds) AS gpu_seconds
SELECT
    grain,
    window_start,
    any(r.window_us) AS window_us,
    workload,
    semantics_version,
    key_epoch,
    min(r.is_final) AS is_final,
    uniqExactIf(rank, r.life_id != '') AS ranks,
    uniqExact(rank) AS expected_ranks,
    uniqExactIf(rank, r.measurable) AS ranks_measured,
    uniqExactIf(rank, r.concurrent_tokens IS NOT NULL) AS ranks_telling_concurrent,
    sum(r.observed_us) AS observed_us,
    sum(r.expected_us) AS expected_us,
    if(expected_us > 0, least(1, observed_us / expected_us), 0) AS coverage,
    multiIf(
        countIf(r.measurable) = 0 OR sum(r.observed_us) = 0, 'indeterminate', max(r.register != 'exact'), 'lower_bound', 'exact'
    ) AS register,
    arraySort(arrayDistinct(arrayFlatten(groupUniqArrayIf(r.reasons, notEmpty(r.reasons))))) AS reasons,
    sum(r.evicted_tokens) AS evicted_tokens,
    sum(r.evicted_blocks) AS evicted_blocks,
    sum(r.cleared_tokens) AS cleared_tokens,
    sum(r.cleared_blocks) AS cleared_blocks,
    sum(r.restarted_tokens) AS restarted_tokens,
    sum(r.restarted_blocks) AS restarted_blocks,
    sum(r.concurrent_tokens) AS concurrent_tokens,
    sum(r.concurrent_blocks) AS concurrent_blocks,
    sum(r.ambiguous_reload_tokens) AS ambiguous_reload_tokens,
    sum(r.ambiguous_reload_blocks) AS ambiguous_reload_blocks,
    gpu_seconds(sum(r.evicted_gpu_seconds), sum(r.evicted_tokens)) AS evicted_gpu_seconds,
    gpu_seconds(sum(r.cleared_gpu_seconds), sum(r.cleared_tokens)) AS cleared_gpu_seconds,
    gpu_seconds(sum(r.restarted_gpu_seconds), sum(r.restarted_tokens)) AS restarted_gpu_seconds,
    gpu_seconds(sum(r.concurrent_gpu_seconds), sum(r.concurrent_tokens)) AS concurrent_gpu_seconds,
    gpu_seconds(sum(r.ambiguous_reload_gpu_seconds), sum(r.ambiguous_reload_tokens)) AS ambiguous_reload_gpu_seconds,
    sum(r.unrated_tokens) AS unrated_tokens,
    sum(r.stored_tokens) AS stored_tokens,
    sum(r.removed_tokens) AS removed_tokens,
    sum(r.unreused_tokens) AS unreused_tokens
FROM rollup_repeat_compute AS r
GROUP BY grain, window_start, workload, semantics_version, key_epoch
COMMENT 'What did each workload (NULL: undeclared) compute again, by cause? repeat_compute_by_workload_5m, _1h and _1d in one: filter on one grain. Unit, coverage and register: as there.';

CREATE OR REPLACE VIEW repeat_compute_by_workload_5m AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_workload WHERE grain = '5m'
COMMENT 'What did each workload (NULL: undeclared) compute again, by cause? One row per workload and 5 minutes, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. How many ranks could tell: ranks_measured and ranks_telling_concurrent, of expected_ranks.';

CREATE OR REPLACE VIEW repeat_compute_by_workload_1h AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_workload WHERE grain = '1h'
COMMENT 'What did each workload (NULL: undeclared) compute again, by cause? One row per workload and hour, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. How many ranks could tell: ranks_measured and ranks_telling_concurrent, of expected_ranks.';

CREATE OR REPLACE VIEW repeat_compute_by_workload_1d AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_workload WHERE grain = '1d'
COMMENT 'What did each workload (NULL: undeclared) compute again, by cause? One row per workload and day, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. How many ranks could tell: ranks_measured and ranks_telling_concurrent, of expected_ranks.';

CREATE OR REPLACE VIEW rollup_repeat_compute_by_model AS
WITH
    cityHash64(r.instance_id, r.dp_rank) AS rank,
    -- Of some it may not be known: then the sum is of the others, and unrated_tokens says of how many tokens not. Of none: NULL.
    (seconds, tokens) -> if(seconds = 0 AND tokens > 0, NULL, seconds) AS gpu_seconds
SELECT
    grain,
    window_start,
    any(r.window_us) AS window_us,
    model,
    semantics_version,
    key_epoch,
    min(r.is_final) AS is_final,
    uniqExactIf(rank, r.life_id != '') AS ranks,
    uniqExact(rank) AS expected_ranks,
    uniqExactIf(rank, r.measurable) AS ranks_measured,
    uniqExactIf(rank, r.concurrent_tokens IS NOT NULL) AS ranks_telling_concurrent,
    sum(r.observed_us) AS observed_us,
    sum(r.expected_us) AS expected_us,
    if(expected_us > 0, least(1, observed_us / expected_us), 0) AS coverage,
    multiIf(
        countIf(r.measurable) = 0 OR sum(r.observed_us) = 0, 'indeterminate', max(r.register != 'exact'), 'lower_bound', 'exact'
    ) AS register,
    arraySort(arrayDistinct(arrayFlatten(groupUniqArrayIf(r.reasons, notEmpty(r.reasons))))) AS reasons,
    sum(r.evicted_tokens) AS evicted_tokens,
    sum(r.evicted_blocks) AS evicted_blocks,
    sum(r.cleared_tokens) AS cleared_tokens,
    sum(r.cleared_blocks) AS cleared_blocks,
    sum(r.restarted_tokens) AS restarted_tokens,
    sum(r.restarted_blocks) AS restarted_blocks,
    sum(r.concurrent_tokens) AS concurrent_tokens,
    sum(r.concurrent_blocks) AS concurrent_blocks,
    sum(r.ambiguous_reload_tokens) AS ambiguous_reload_tokens,
    sum(r.ambiguous_reload_blocks) AS ambiguous_reload_blocks,
    gpu_seconds(sum(r.evicted_gpu_seconds), sum(r.evicted_tokens)) AS evicted_gpu_seconds,
    gpu_seconds(sum(r.cleared_gpu_seconds), sum(r.cleared_tokens)) AS cleared_gpu_seconds,
    gpu_seconds(sum(r.restarted_gpu_seconds), sum(r.restarted_tokens)) AS restarted_gpu_seconds,
    gpu_seconds(sum(r.concurrent_gpu_seconds), sum(r.concurrent_tokens)) AS concurrent_gpu_seconds,
    gpu_seconds(sum(r.ambiguous_reload_gpu_seconds), sum(r.ambiguous_reload_tokens)) AS ambiguous_reload_gpu_seconds,
    sum(r.unrated_tokens) AS unrated_tokens,
    sum(r.stored_tokens) AS stored_tokens,
    sum(r.removed_tokens) AS removed_tokens,
    sum(r.unreused_tokens) AS unreused_tokens
FROM rollup_repeat_compute AS r
GROUP BY grain, window_start, model, semantics_version, key_epoch
COMMENT 'What did each model (NULL: undeclared) compute again, by cause? repeat_compute_by_model_5m, _1h and _1d in one: filter on one grain. Unit, coverage and register: as there.';

CREATE OR REPLACE VIEW repeat_compute_by_model_5m AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_model WHERE grain = '5m'
COMMENT 'What did each model (NULL: undeclared) compute again, by cause? One row per model and 5 minutes, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. How many ranks could tell: ranks_measured and ranks_telling_concurrent, of expected_ranks.';

CREATE OR REPLACE VIEW repeat_compute_by_model_1h AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_model WHERE grain = '1h'
COMMENT 'What did each model (NULL: undeclared) compute again, by cause? One row per model and hour, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. How many ranks could tell: ranks_measured and ranks_telling_concurrent, of expected_ranks.';

CREATE OR REPLACE VIEW repeat_compute_by_model_1d AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_model WHERE grain = '1d'
COMMENT 'What did each model (NULL: undeclared) compute again, by cause? One row per model and day, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. How many ranks could tell: ranks_measured and ranks_telling_concurrent, of expected_ranks.';

CREATE OR REPLACE VIEW rollup_gpu_time AS
SELECT
    grain, window_start, window_us, workload, semantics_version, key_epoch, is_final, coverage, register, reasons,
    c.1 AS cause, c.2 AS gpu_seconds, c.3 AS tokens
FROM rollup_repeat_compute_by_workload
ARRAY JOIN [
    ('evicted', evicted_gpu_seconds, evicted_tokens),
    ('cleared', cleared_gpu_seconds, cleared_tokens),
    ('restarted', restarted_gpu_seconds, restarted_tokens),
    ('concurrent', concurrent_gpu_seconds, concurrent_tokens),
    ('ambiguous_reload', ambiguous_reload_gpu_seconds, ambiguous_reload_tokens)
] AS c
COMMENT 'How much GPU time went into computing again? gpu_time_5m, _1h and _1d in one: filter on one grain. Unit, coverage and register: as there.';

CREATE OR REPLACE VIEW gpu_time_5m AS SELECT * EXCEPT grain FROM rollup_gpu_time WHERE grain = '5m'
COMMENT 'How much GPU time went into computing again? One row per workload, cause and 5 minutes, and per semantics_version and key_epoch; unit: seconds of one GPU, an estimate from the declared or measured prefill rate; NULL: no rate was known, or the cause cannot be told. As coverage and register say. The causes are never added together.';

CREATE OR REPLACE VIEW gpu_time_1h AS SELECT * EXCEPT grain FROM rollup_gpu_time WHERE grain = '1h'
COMMENT 'How much GPU time went into computing again? One row per workload, cause and hour, and per semantics_version and key_epoch; unit: seconds of one GPU, an estimate from the declared or measured prefill rate; NULL: no rate was known, or the cause cannot be told. As coverage and register say. The causes are never added together.';

CREATE OR REPLACE VIEW gpu_time_1d AS SELECT * EXCEPT grain FROM rollup_gpu_time WHERE grain = '1d'
COMMENT 'How much GPU time went into computing again? One row per workload, cause and day, and per semantics_version and key_epoch; unit: seconds of one GPU, an estimate from the declared or measured prefill rate; NULL: no rate was known, or the cause cannot be told. As coverage and register say. The causes are never added together.';

CREATE OR REPLACE VIEW duplicate_footprint AS
SELECT
    d.scope AS scope,
    nullIf(d.scope_key, '') AS scope_key,
    d.tier AS tier,
    d.window_start AS window_start,
    d.window_us AS window_us,
    d.as_of AS as_of,
    d.semantics_version AS semantics_version,
    d.key_epoch AS key_epoch,
    d.is_final AS is_final,
    d.shards_reported >= d.shards AS complete,
    toUnixTimestamp64Micro(d.as_of) - toUnixTimestamp64Micro(d.window_start) AS covered_us,
    d.observed_us AS observed_us,
    d.expected_ranks * covered_us AS expected_us,
    if(expected_us > 0, d.observed_us / expected_us, 0) AS coverage,
    d.expected_ranks AS expected_ranks,
    d.register AS register,
    d.inside_register AS inside_register,
    d.between_register AS between_register,
    d.reasons AS reasons,
    if(covered_us > 0, (toInt128(d.inside_token_us) + d.between_token_us) / covered_us, 0) AS extra_tokens_mean,
    if(covered_us > 0, d.inside_token_us / covered_us, 0) AS inside_tokens_mean,
    if(covered_us > 0, d.between_token_us / covered_us, 0) AS between_tokens_mean,
    d.extra_tokens_max AS extra_tokens_max,
    d.inside_tokens_max AS inside_tokens_max,
    d.between_tokens_max AS between_tokens_max,
    d.inside_tokens_end + d.between_tokens_end AS extra_tokens_end,
    d.inside_tokens_end AS inside_tokens_end,
    d.between_tokens_end AS between_tokens_end,
    if(covered_us > 0, (toInt128(d.inside_block_us) + d.between_block_us) / covered_us, 0) AS extra_blocks_mean,
    if(covered_us > 0, d.inside_block_us / covered_us, 0) AS inside_blocks_mean,
    if(covered_us > 0, d.between_block_us / covered_us, 0) AS between_blocks_mean,
    d.extra_blocks_max AS extra_blocks_max,
    d.inside_blocks_end + d.between_blocks_end AS extra_blocks_end,
    if(covered_us > 0, (toInt128(d.inside_byte_ms) + d.between_byte_ms) * 1000 / covered_us, 0) AS extra_bytes_mean,
    if(covered_us > 0, toInt128(d.inside_byte_ms) * 1000 / covered_us, 0) AS inside_bytes_mean,
    if(covered_us > 0, toInt128(d.between_byte_ms) * 1000 / covered_us, 0) AS between_bytes_mean,
    d.extra_bytes_max AS extra_bytes_max,
    d.inside_bytes_end + d.between_bytes_end AS extra_bytes_end,
    d.late_changes AS late_changes
FROM (SELECT * FROM duplicate_windows FINAL) AS d
WHERE d.scope != 'workload_pair'
COMMENT 'How much KV cache holds content that another rank holds too, inside an instance and between instances? One row per scope, tier and window; unit: extra copies in tokens, blocks and bytes (NULL: size not known of every rank), means weighted by time, as coverage (of the whole fleet) and register say. Filter on one scope and one tier.';

CREATE OR REPLACE VIEW rollup_duplicate_footprint AS
WITH
    (SELECT max(newest) FROM fleet_clock) AS clock,
    -- A window of which nothing can be said (nobody was seen, one rank had come) spoils an hour only if the hour found nothing, or if ids
    -- or models cannot be compared: what was found was there.
    hasAny(d.reasons, ['key_change', 'model_undeclared']) AS uncomparable,
    (told, most) -> multiIf(told = 'indeterminate' AND most > 0 AND NOT uncomparable, 'lower_bound', told) AS over_windows
SELECT
    d.grain AS grain,
    d.scope AS scope,
    nullIf(d.scope_key, '') AS scope_key,
    d.tier AS tier,
    d.window_start AS window_start,
    d.window_us AS window_us,
    d.as_of AS as_of,
    d.semantics_version AS semantics_version,
    d.key_epoch AS key_epoch,
    d.is_final AND toDateTime64(d.window_start, 6, 'UTC') + toIntervalMicrosecond(d.window_us) <= clock AS is_final,
    d.complete AS complete,
    d.covered_us AS covered_us,
    d.observed_us AS observed_us,
    d.expected_us AS expected_us,
    if(expected_us > 0, d.observed_us / expected_us, 0) AS coverage,
    d.expected_ranks AS expected_ranks,
    over_windows(d.register, d.extra_tokens_max) AS register,
    over_windows(d.inside_register, d.inside_tokens_max) AS inside_register,
    over_windows(d.between_register, d.between_tokens_max) AS between_register,
    d.reasons AS reasons,
    if(covered_us > 0, (toInt128(d.inside_token_us) + d.between_token_us) / covered_us, 0) AS extra_tokens_mean,
    if(covered_us > 0, d.inside_token_us / covered_us, 0) AS inside_tokens_mean,
    if(covered_us > 0, d.between_token_us / covered_us, 0) AS between_tokens_mean,
    d.extra_tokens_max AS extra_tokens_max,
    d.inside_tokens_max AS inside_tokens_max,
    d.between_tokens_max AS between_tokens_max,
    d.inside_tokens_end + d.between_tokens_end AS extra_tokens_end,
    d.inside_tokens_end AS inside_tokens_end,
    d.between_tokens_end AS between_tokens_end,
    if(covered_us > 0, (toInt128(d.inside_block_us) + d.between_block_us) / covered_us, 0) AS extra_blocks_mean,
    if(covered_us > 0, d.inside_block_us / covered_us, 0) AS inside_blocks_mean,
    if(covered_us > 0, d.between_block_us / covered_us, 0) AS between_blocks_mean,
    d.extra_blocks_max AS extra_blocks_max,
    d.inside_blocks_end + d.between_blocks_end AS extra_blocks_end,
    if(covered_us > 0, (toInt128(d.inside_byte_ms) + d.between_byte_ms) * 1000 / covered_us, 0) AS extra_bytes_mean,
    if(covered_us > 0, toInt128(d.inside_byte_ms) * 1000 / covered_us, 0) AS inside_bytes_mean,
    if(covered_us > 0, toInt128(d.between_byte_ms) * 1000 / covered_us, 0) AS between_bytes_mean,
    d.extra_bytes_max AS extra_bytes_max,
    d.inside_bytes_end + d.between_bytes_end AS extra_bytes_end,
    d.late_changes AS late_changes
FROM (SELECT * FROM duplicate_rollups FINAL) AS d
WHERE d.scope != 'workload_pair'
COMMENT 'How much KV cache holds content that another rank holds too? duplicate_footprint_5m, _1h and _1d in one: filter on one grain, one scope and one tier. Unit, coverage and register: as there.';

CREATE OR REPLACE VIEW duplicate_footprint_5m AS SELECT * EXCEPT grain FROM rollup_duplicate_footprint WHERE grain = '5m'
COMMENT 'How much KV cache holds content that another rank holds too, inside an instance and between instances? One row per scope, tier and 5 minutes, and per semantics_version and key_epoch; unit: extra copies in tokens, blocks and bytes (NULL: size not known of every rank), means weighted by time over covered_us, as coverage (of the whole fleet) and register say. Filter on one scope (fleet, rank, workload, model) and one tier.';

CREATE OR REPLACE VIEW duplicate_footprint_1h AS SELECT * EXCEPT grain FROM rollup_duplicate_footprint WHERE grain = '1h'
COMMENT 'How much KV cache holds content that another rank holds too, inside an instance and between instances? One row per scope, tier and hour, and per semantics_version and key_epoch; unit: extra copies in tokens, blocks and bytes (NULL: size not known of every rank), means weighted by time over covered_us, as coverage (of the whole fleet) and register say. Filter on one scope (fleet, rank, workload, model) and one tier.';

CREATE OR REPLACE VIEW duplicate_footprint_1d AS SELECT * EXCEPT grain FROM rollup_duplicate_footprint WHERE grain = '1d'
COMMENT 'How much KV cache holds content that another rank holds too, inside an instance and between instances? One row per scope, tier and day, and per semantics_version and key_epoch; unit: extra copies in tokens, blocks and bytes (NULL: size not known of every rank), means weighted by time over covered_us, as coverage (of the whole fleet) and register say. Filter on one scope (fleet, rank, workload, model) and one tier.';

CREATE OR REPLACE VIEW workload_pairs AS
SELECT
    nullIf(JSONExtractString(d.scope_key, 1), '') AS workload_a,
    nullIf(JSONExtractString(d.scope_key, 2), '') AS workload_b,
    d.tier AS tier,
    d.window_start AS window_start,
    d.window_us AS window_us,
    d.as_of AS as_of,
    d.semantics_version AS semantics_version,
    d.key_epoch AS key_epoch,
    d.is_final AS is_final,
    toUnixTimestamp64Micro(d.as_of) - toUnixTimestamp64Micro(d.window_start) AS covered_us,
    d.observed_us AS observed_us,
    d.expected_ranks * covered_us AS expected_us,
    if(expected_us > 0, d.observed_us / expected_us, 0) AS coverage,
    d.expected_ranks AS expected_ranks,
    d.register AS register,
    d.reasons AS reasons,
    if(covered_us > 0, d.between_token_us / covered_us, 0) AS shared_tokens_mean,
    d.between_tokens_max AS shared_tokens_max,
    d.between_tokens_end AS shared_tokens_end,
    if(covered_us > 0, d.between_block_us / covered_us, 0) AS shared_blocks_mean,
    d.between_blocks_max AS shared_blocks_max,
    d.between_blocks_end AS shared_blocks_end
FROM (SELECT * FROM duplicate_windows FINAL) AS d
WHERE d.scope = 'workload_pair'
COMMENT 'Which workloads hold the same content? One row per pair of workloads (NULL: undeclared), tier and window; unit: tokens and blocks that ranks of both hold, counted once, as coverage and register say. Never sum pairs: content of three workloads is in three of them.';

CREATE OR REPLACE VIEW rollup_workload_pairs AS
WITH
    (SELECT max(newest) FROM fleet_clock) AS clock,
    -- A window of which nothing can be said (nobody was seen, one rank had come) spoils an hour only if the hour found nothing, or if ids
    -- or models cannot be compared: what was found was there.
    hasAny(d.reasons, ['key_change', 'model_undeclared']) AS uncomparable,
    (told, most) -> multiIf(told = 'indeterminate' AND most > 0 AND NOT uncomparable, 'lower_bound', told) AS over_windows
SELECT
    d.grain AS grain,
    nullIf(JSONExtractString(d.scope_key, 1), '') AS workload_a,
    nullIf(JSONExtractString(d.scope_key, 2), '') AS workload_b,
    d.tier AS tier,
    d.window_start AS window_start,
    d.window_us AS window_us,
    d.as_of AS as_of,
    d.semantics_version AS semantics_version,
    d.key_epoch AS key_epoch,
    d.is_final AND toDateTime64(d.window_start, 6, 'UTC') + toIntervalMicrosecond(d.window_us) <= clock AS is_final,
    d.covered_us AS covered_us,
    d.observed_us AS observed_us,
    d.expected_us AS expected_us,
    if(expected_us > 0, d.observed_us / expected_us, 0) AS coverage,
    d.expected_ranks AS expected_ranks,
    over_windows(d.register, d.between_tokens_max) AS register,
    d.reasons AS reasons,
    if(covered_us > 0, d.between_token_us / covered_us, 0) AS shared_tokens_mean,
    d.between_tokens_max AS shared_tokens_max,
    d.between_tokens_end AS shared_tokens_end,
    if(covered_us > 0, d.between_block_us / covered_us, 0) AS shared_blocks_mean,
    d.between_blocks_max AS shared_blocks_max,
    d.between_blocks_end AS shared_blocks_end
FROM (SELECT * FROM duplicate_rollups FINAL) AS d
WHERE d.scope = 'workload_pair'
COMMENT 'Which workloads hold the same content? workload_pairs_5m, _1h and _1d in one: filter on one grain and one tier. Unit, coverage and register: as there.';

CREATE OR REPLACE VIEW workload_pairs_5m AS SELECT * EXCEPT grain FROM rollup_workload_pairs WHERE grain = '5m'
COMMENT 'Which workloads hold the same content? One row per pair of workloads (NULL: undeclared), tier and 5 minutes, and per semantics_version and key_epoch; unit: tokens and blocks that ranks of both hold, counted once, as coverage and register say. Never sum pairs: content of three workloads is in three of them.';

CREATE OR REPLACE VIEW workload_pairs_1h AS SELECT * EXCEPT grain FROM rollup_workload_pairs WHERE grain = '1h'
COMMENT 'Which workloads hold the same content? One row per pair of workloads (NULL: undeclared), tier and hour, and per semantics_version and key_epoch; unit: tokens and blocks that ranks of both hold, counted once, as coverage and register say. Never sum pairs: content of three workloads is in three of them.';

CREATE OR REPLACE VIEW workload_pairs_1d AS SELECT * EXCEPT grain FROM rollup_workload_pairs WHERE grain = '1d'
COMMENT 'Which workloads hold the same content? One row per pair of workloads (NULL: undeclared), tier and day, and per semantics_version and key_epoch; unit: tokens and blocks that ranks of both hold, counted once, as coverage and register say. Never sum pairs: content of three workloads is in three of them.';

CREATE OR REPLACE VIEW return_times AS
SELECT
    instance_id, dp_rank, life_id, window_start, window_us, workload, model, semantics_version, key_epoch, is_final, coverage, register,
    reasons, what,
    -- Buckets cut each power of two into four.
    if(bucket < 8, bucket, bitShiftLeft(bitAnd(bucket, 3) + 4, greatest(0, bitShiftRight(bucket, 2) - 1))) AS from_us,
    if(bucket < 8, bucket + 1, bitShiftLeft(bitAnd(bucket, 3) + 5, greatest(0, bitShiftRight(bucket, 2) - 1))) AS to_us,
    blocks
FROM
(
    SELECT
        w.instance_id AS instance_id, w.dp_rank AS dp_rank, w.life_id AS life_id, w.window_start AS window_start,
        w.window_us AS window_us, w.workload AS workload, w.model AS model, w.semantics_version AS semantics_version,
        w.key_epoch AS key_epoch, w.is_final AS is_final, w.observed_us / w.window_us AS coverage,
        w.register AS register, w.reasons AS reasons,
        -- With a KV connector, content that is loaded looks as if it came back: group 0 is no group.
        indexOf(w.`groups.group_idx`, p.primary_group) AS i, if(w.kv_connector IS NULL, i, 0) AS back,
        [
            (CAST('evicted', 'String'), w.`groups.back_evicted_buckets`[back], w.`groups.back_evicted_counts`[back]),
            ('cleared', w.`groups.back_cleared_buckets`[back], w.`groups.back_cleared_counts`[back]),
            ('restarted', w.`groups.back_restarted_buckets`[back], w.`groups.back_restarted_counts`[back]),
            ('lifetime', w.`groups.lifetime_buckets`[i], w.`groups.lifetime_counts`[i])
        ] AS histograms
    FROM (SELECT * FROM rank_windows FINAL) AS w
    LEFT JOIN life_primary_groups AS p USING (instance_id, dp_rank, life_id, semantics_version)
)
ARRAY JOIN
    arrayFlatten(arrayMap(h -> arrayMap(b -> h.1, h.2), histograms)) AS what,
    arrayFlatten(arrayMap(h -> h.2, histograms)) AS bucket,
    arrayFlatten(arrayMap(h -> h.3, histograms)) AS blocks
COMMENT 'How soon does lost content come back, and how long does content last? One row per rank, life, window, what (evicted, cleared, restarted: away for so long before it was stored again; lifetime: resident for so long before it was evicted) and bucket [from_us, to_us) of microseconds; unit: blocks of the primary group, as coverage and register say. Add blocks over any rows of one what, semantics_version and key_epoch.';

CREATE OR REPLACE VIEW rollup_return_times AS
SELECT
    grain, window_start, window_us, workload, semantics_version, key_epoch, is_final, coverage, register, reasons, what,
    -- Buckets cut each power of two into four.
    if(bucket < 8, bucket, bitShiftLeft(bitAnd(bucket, 3) + 4, greatest(0, bitShiftRight(bucket, 2) - 1))) AS from_us,
    if(bucket < 8, bucket + 1, bitShiftLeft(bitAnd(bucket, 3) + 5, greatest(0, bitShiftRight(bucket, 2) - 1))) AS to_us,
    blocks
FROM
(
    SELECT
        w.grain AS grain, w.window_start AS window_start, any(w.window_us) AS window_us, w.workload AS workload,
        w.semantics_version AS semantics_version, w.key_epoch AS key_epoch, min(w.final) AS is_final,
        if(sum(w.expected) > 0, least(1, sum(w.observed_us) / sum(w.expected)), 0) AS coverage,
        multiIf(
            countIf(w.measured) = 0 OR sum(w.observed_us) = 0, 'indeterminate',
            max(w.register != 'exact') OR max(w.observed_us < w.expected), 'lower_bound',
            'exact'
        ) AS register,
        arraySort(arrayDistinct(arrayFlatten(groupUniqArray(w.reasons)))) AS reasons,
        [
            (CAST('evicted', 'String'), sumMapIf(w.`groups.back_evicted_buckets`[i], w.`groups.back_evicted_counts`[i], measured)),
            ('cleared', sumMapIf(w.`groups.back_cleared_buckets`[i], w.`groups.back_cleared_counts`[i], measured)),
            ('restarted', sumMapIf(w.`groups.back_restarted_buckets`[i], w.`groups.back_restarted_counts`[i], measured)),
            ('lifetime', sumMap(w.`groups.lifetime_buckets`[i], w.`groups.lifetime_counts`[i]))
        ] AS histograms
    FROM
    (
        SELECT
            (SELECT max(newest) FROM fleet_clock) AS clock, w.*, w.kv_connector IS NULL AS measured,
            indexOf(w.`groups.group_idx`, p.primary_group) AS i,
            (w.is_final OR w.departed) AND toDateTime64(w.window_start, 6, 'UTC') + toIntervalMicrosecond(w.window_us) <= clock AS final,
            greatest(
                toInt64(0), w.expected_us - greatest(toInt64(0), toUnixTimestamp64Micro(w.expected_until) - toUnixTimestamp64Micro(clock))
            ) AS expected
        FROM (SELECT * FROM rank_rollups FINAL) AS w
        LEFT JOIN life_primary_groups AS p USING (instance_id, dp_rank, life_id, semantics_version)
    ) AS w
    GROUP BY w.grain, w.window_start, w.workload, w.semantics_version, w.key_epoch
)
ARRAY JOIN
    arrayFlatten(arrayMap(h -> arrayMap(b -> h.1, (h.2).1), histograms)) AS what,
    arrayFlatten(arrayMap(h -> (h.2).1, histograms)) AS bucket,
    arrayFlatten(arrayMap(h -> (h.2).2, histograms)) AS blocks
COMMENT 'How soon does lost content come back, and how long does content last? return_times_5m, _1h and _1d in one: filter on one grain. Unit, coverage and register: as there.';

CREATE OR REPLACE VIEW return_times_5m AS SELECT * EXCEPT grain FROM rollup_return_times WHERE grain = '5m'
COMMENT 'How soon does lost content come back, and how long does content last? One row per workload, 5 minutes, what (evicted, cleared, restarted: away for so long before it was stored again; lifetime: resident for so long before it was evicted) and bucket [from_us, to_us) of microseconds; unit: blocks of the primary group, as coverage and register say. Add blocks over any rows of one what, semantics_version and key_epoch.';

CREATE OR REPLACE VIEW return_times_1h AS SELECT * EXCEPT grain FROM rollup_return_times WHERE grain = '1h'
COMMENT 'How soon does lost content come back, and how long does content last? One row per workload, hour, what (evicted, cleared, restarted: away for so long before it was stored again; lifetime: resident for so long before it was evicted) and bucket [from_us, to_us) of microseconds; unit: blocks of the primary group, as coverage and register say. Add blocks over any rows of one what, semantics_version and key_epoch.';

CREATE OR REPLACE VIEW return_times_1d AS SELECT * EXCEPT grain FROM rollup_return_times WHERE grain = '1d'
COMMENT 'How soon does lost content come back, and how long does content last? One row per workload, day, what (evicted, cleared, restarted: away for so long before it was stored again; lifetime: resident for so long before it was evicted) and bucket [from_us, to_us) of microseconds; unit: blocks of the primary group, as coverage and register say. Add blocks over any rows of one what, semantics_version and key_epoch.';

CREATE OR REPLACE VIEW rollup_rank_health AS
WITH
    (SELECT max(newest) FROM fleet_clock) AS clock,
    least(toDateTime64(h.window_start, 6, 'UTC') + toIntervalMicrosecond(h.window_us), clock) AS reached
SELECT
    h.grain AS grain,
    h.instance_id AS instance_id,
    h.dp_rank AS dp_rank,
    h.window_start AS window_start,
    h.window_us AS window_us,
    h.last.1 AS workload,
    h.last.2 AS model,
    h.semantics_version AS semantics_version,
    h.observed_us AS observed_us,
    h.expected_us AS expected_us,
    if(h.expected_us > 0, least(1, h.observed_us / h.expected_us), 0) AS coverage,
    if(h.stored > 0, h.resolved / h.stored, NULL) AS identity_coverage,
    multiIf(
        h.observed_us = 0 OR h.connector, 'indeterminate', h.inexact OR h.observed_us < h.expected_us, 'lower_bound', 'exact'
    ) AS register,
    h.reasons AS reasons,
    h.batches AS batches,
    h.lost_batches AS lost_batches,
    h.refused_batches AS refused_batches,
    h.duplicate_batches AS duplicate_batches,
    h.unknown_events AS unknown_events,
    h.lives AS lives,
    ifNull(e.restarts, 0) AS restarts,
    h.scrapes AS scrapes,
    h.breaches_found AS breaches_found,
    h.last_batch AS last_batch,
    if(h.last.5, NULL, greatest(0, (toUnixTimestamp64Micro(reached) - toUnixTimestamp64Micro(h.last_batch)) / 1e6)) AS lag_seconds,
    h.last.3 AS resident_blocks,
    h.last.4 AS pool_blocks,
    h.last.5 AS departed
FROM
(
    SELECT
        w.grain AS grain, w.instance_id AS instance_id, w.dp_rank AS dp_rank, w.window_start AS window_start, any(w.window_us) AS window_us,
        w.semantics_version AS semantics_version, sum(w.observed_us) AS observed_us, sum(w.expected) AS expected_us,
        argMax((w.workload, w.model, w.resident, w.pool_blocks, w.departed), w.place) AS last,
        sum(w.stored) AS stored, sum(w.resolved) AS resolved,
        max(w.kv_connector IS NOT NULL) AS connector, max(w.register != 'exact') AS inexact,
        arraySort(arrayDistinct(arrayFlatten(groupArrayIf(w.reasons, notEmpty(w.reasons))))) AS reasons,
        sum(w.batches) AS batches, sum(w.lost_batches) AS lost_batches, sum(w.refused_batches) AS refused_batches,
        sum(w.duplicate_batches) AS duplicate_batches, sum(w.unknown_events) AS unknown_events,
        uniqExactIf(w.life_id, w.life_id != '') AS lives, sum(w.scrapes) AS scrapes, sum(w.breaches_found) AS breaches_found,
        max(w.last_batch) AS last_batch
    FROM
    (
        SELECT
            w.*, indexOf(w.`groups.group_idx`, p.primary_group) AS i,
            w.`groups.stored_tokens`[i] AS stored, w.`groups.resolved_tokens`[i] AS resolved,
            arraySum(w.`groups.resident_blocks`) AS resident,
            -- Which part came last: that whose newest window is the later, or the one of the two that began later.
            toUnixTimestamp64Milli(w.last_window) * 65536 + w.part AS place,
            greatest(
                toInt64(0), w.expected_us - greatest(toInt64(0), toUnixTimestamp64Micro(w.expected_until) - toUnixTimestamp64Micro(clock))
            ) AS expected
        FROM (SELECT * FROM rank_rollups FINAL) AS w
        LEFT JOIN life_primary_groups AS p USING (instance_id, dp_rank, life_id, semantics_version)
    ) AS w
    GROUP BY w.grain, w.instance_id, w.dp_rank, w.window_start, w.semantics_version
) AS h
LEFT JOIN
(
    SELECT
        g.1 AS grain, instance_id, dp_rank, count() AS restarts,
        toDateTime(intDiv(toUnixTimestamp(ifNull(boundary, at)), g.2) * g.2, 'UTC') AS window_start
    FROM rank_events FINAL
    ARRAY JOIN [('5m', 300), ('1h', 3600), ('1d', 86400)] AS g
    WHERE kind = 'holder_reset' AND cause = 'restarted'
    GROUP BY grain, instance_id, dp_rank, window_start
) AS e USING (grain, instance_id, dp_rank, window_start)
COMMENT 'Is each rank seen, and is what it says believable? rank_health_5m, _1h and _1d in one: filter on one grain. Unit, coverage and register: as there.';

CREATE OR REPLACE VIEW rank_health_5m AS SELECT * EXCEPT grain FROM rollup_rank_health WHERE grain = '5m'
COMMENT 'Is each rank seen, and is what it says believable? One row per rank and 5 minutes; coverage is observed_us / expected_us, with its reasons; lag_seconds: how long it had been silent at the end (NULL: no batch, or it had departed); lives and restarts of the engine; lost, refused and repeated batches; breaches_found: contradictions with the engine''s own metrics in so many scrapes; unit of resident_blocks and pool_blocks, at the end: blocks of all groups. Register: how repeat compute of the row may be read.';

CREATE OR REPLACE VIEW rank_health_1h AS SELECT * EXCEPT grain FROM rollup_rank_health WHERE grain = '1h'
COMMENT 'Is each rank seen, and is what it says believable? One row per rank and hour; coverage is observed_us / expected_us, with its reasons; lag_seconds: how long it had been silent at the end (NULL: no batch, or it had departed); lives and restarts of the engine; lost, refused and repeated batches; breaches_found: contradictions with the engine''s own metrics in so many scrapes; unit of resident_blocks and pool_blocks, at the end: blocks of all groups. Register: how repeat compute of the row may be read.';

CREATE OR REPLACE VIEW rank_health_1d AS SELECT * EXCEPT grain FROM rollup_rank_health WHERE grain = '1d'
COMMENT 'Is each rank seen, and is what it says believable? One row per rank and day; coverage is observed_us / expected_us, with its reasons; lag_seconds: how long it had been silent at the end (NULL: no batch, or it had departed); lives and restarts of the engine; lost, refused and repeated batches; breaches_found: contradictions with the engine''s own metrics in so many scrapes; unit of resident_blocks and pool_blocks, at the end: blocks of all groups. Register: how repeat compute of the row may be read.';

CREATE OR REPLACE VIEW rollup_coverage AS
WITH (SELECT max(newest) FROM fleet_clock) AS clock
SELECT
    grain,
    window_start,
    any(r.window_us) AS window_us,
    semantics_version,
    countIf(r.batches > 0) AS ranks_heard,
    count() AS ranks_expected,
    sum(r.observed_us) AS observed_us,
    sum(r.expected_us) AS expected_us,
    if(expected_us > 0, least(1, observed_us / expected_us), 0) AS coverage,
    min(if(r.expected_us > 0, least(1, r.observed_us / r.expected_us), 0)) AS lowest,
    countIf(r.observed_us < r.expected_us) AS ranks_with_gaps,
    countIf(r.absent) AS ranks_absent,
    sum(r.lost_batches) AS lost_batches,
    sum(r.refused_batches) AS refused_batches,
    sum(r.breaches_found) AS breaches_found,
    arraySort(arrayDistinct(arrayFlatten(groupArrayArray(r.reasons)))) AS reasons,
    multiIf(
        sum(r.observed_us) = 0, 'indeterminate',
        max(r.connector OR r.inexact OR r.observed_us < r.expected_us OR r.observed_us = 0), 'lower_bound',
        'exact'
    ) AS register
FROM
(
    SELECT
        w.grain AS grain, w.window_start AS window_start, any(w.window_us) AS window_us, w.semantics_version AS semantics_version,
        sum(w.observed_us) AS observed_us, sum(w.expected) AS expected_us, sum(w.batches) AS batches, sum(w.lost_batches) AS lost_batches,
        sum(w.refused_batches) AS refused_batches, sum(w.breaches_found) AS breaches_found, max(has(w.reasons, 'absent')) AS absent,
        groupArrayIf(w.reasons, notEmpty(w.reasons)) AS reasons, max(w.kv_connector IS NOT NULL) AS connector,
        max(w.register != 'exact') AS inexact
    FROM
    (
        SELECT
            w.*, cityHash64(w.instance_id, w.dp_rank) AS rank,
            greatest(
                toInt64(0), w.expected_us - greatest(toInt64(0), toUnixTimestamp64Micro(w.expected_until) - toUnixTimestamp64Micro(clock))
            ) AS expected
        FROM (SELECT * FROM rank_rollups FINAL) AS w
    ) AS w
    GROUP BY w.grain, w.window_start, w.rank, w.semantics_version
) AS r
GROUP BY grain, window_start, semantics_version
COMMENT 'How much of the fleet was demonstrably observed, and why not all? coverage_5m, _1h and _1d in one: filter on one grain. Unit and register: as there.';

CREATE OR REPLACE VIEW coverage_5m AS SELECT * EXCEPT grain FROM rollup_coverage WHERE grain = '5m'
COMMENT 'How much of the fleet was demonstrably observed, and why not all? One row per 5 minutes, and per semantics_version; coverage is observed_us / expected_us over the ranks expected (a silent rank counts as unobserved), unit: a share of 1; reasons are those of any rank; ranks_absent: silent in some of it. Register: the best that a figure of the whole fleet can have then.';

CREATE OR REPLACE VIEW coverage_1h AS SELECT * EXCEPT grain FROM rollup_coverage WHERE grain = '1h'
COMMENT 'How much of the fleet was demonstrably observed, and why not all? One row per hour, and per semantics_version; coverage is observed_us / expected_us over the ranks expected (a silent rank counts as unobserved), unit: a share of 1; reasons are those of any rank; ranks_absent: silent in some of it. Register: the best that a figure of the whole fleet can have then.';

CREATE OR REPLACE VIEW coverage_1d AS SELECT * EXCEPT grain FROM rollup_coverage WHERE grain = '1d'
COMMENT 'How much of the fleet was demonstrably observed, and why not all? One row per day, and per semantics_version; coverage is observed_us / expected_us over the ranks expected (a silent rank counts as unobserved), unit: a share of 1; reasons are those of any rank; ranks_absent: silent in some of it. Register: the best that a figure of the whole fleet can have then.';

CREATE OR REPLACE VIEW coverage_gaps AS
SELECT
    instance_id, dp_rank, window_start, window_us, semantics_version, (expected_us - observed_us) / 1e6 AS missing_seconds,
    observed_us, expected_us, coverage, register, lost_batches, refused_batches, reasons
FROM rank_health_5m
WHERE observed_us < expected_us
COMMENT 'Where exactly was a rank not observed, and why? One row per rank and window of 5 minutes that was not wholly observed; unit: seconds not observed, batches. No reason: nothing has come since its last batch, which only the next one can prove. Register: how repeat compute of the row may be read. What interrupted a rank: view interruptions; single windows: repeat_compute.';

CREATE OR REPLACE VIEW interruptions AS
SELECT
    instance_id, dp_rank, life_id, ifNull(boundary, at) AS at, observed_at, kind, ifNull(cause, reason) AS reason, first_seq, last_seq,
    if(kind = 'loss', last_seq - first_seq + 1, NULL) AS batches_lost, payload_bytes, refused AS blocks_forgotten
FROM rank_events FINAL
WHERE kind != 'declaration'
COMMENT 'What interrupted each rank''s stream? One row per engine restart (holder_reset), lost range of batches, refused payload, identity given up (identity_refused) and departure; unit: batches, bytes, blocks. Register: exact, these are what forwarders declared. at: engine time last seen before it, of a restart that of the first batch after it (1970: none known yet); observed_at: the forwarder''s clock.';

CREATE OR REPLACE VIEW top_shared_prefixes AS
SELECT
    as_of, place, semantics_version, lower(hex(content_id)) AS content, lower(hex(head_content_id)) AS head_content, depth_tokens, tokens,
    blocks, copies, instances, extra_tokens, extra_blocks, extra_bytes, ranks, workloads, models, first_seen, coverage, register, reasons
FROM shared_prefixes FINAL
WHERE as_of = (SELECT max(as_of) FROM shared_prefixes)
COMMENT 'Which prefixes have the most extra mass now? One row per prefix, the longest chains of content with the same holders, at the newest instant told; unit: tokens, blocks and bytes beyond the first copy, as coverage and register say. At other instants: table shared_prefixes.';

CREATE OR REPLACE VIEW deploys_declared AS
SELECT deploy_id, label, at, workload, model
FROM deploys FINAL
WHERE NOT removed
COMMENT 'Which deploys were declared, and for when? One row per deploy that was not taken back; unit of at: engine time; workload and model: what it concerned (NULL: all). Register: exact, what people declared.';

CREATE OR REPLACE VIEW deploy_windows AS
WITH
    (SELECT max(newest) FROM fleet_clock) AS clock,
    300000000 AS five_minutes,
    intDiv(toUnixTimestamp64Micro(at), five_minutes) AS until,
    intDiv(toUnixTimestamp64Micro(at) + five_minutes - 1, five_minutes) AS since,
    least(12, intDiv(toUnixTimestamp64Micro(clock), five_minutes) - since) AS passed,
    toUInt8(if(passed > 0, passed, 12)) AS due
SELECT deploy_id, at, workload, model, s.1 AS side, due AS windows, toDateTime(arrayJoin(s.2) * 300, 'UTC') AS window_start
FROM deploys_declared
ARRAY JOIN [('before', range(until - due, until)), ('after', range(since, since + due))] AS s
COMMENT 'Which time is held against which for each deploy? One row per deploy, side and window; unit: windows of 5 minutes. An hour before and an hour after, without the window in which it happened; where less than that has passed since, both sides are cut to as many whole windows. Register: exact, these are times.';

CREATE OR REPLACE VIEW deploy_effect AS
SELECT
    deploy_id, label, at, workload, model, figure, unit, before, after, if(empty(why), after - before, NULL) AS change,
    empty(why) AS comparable, why, before_coverage, after_coverage, before_register, after_register, before_windows, after_windows, windows
FROM
(
    SELECT
        *,
        if(before IS NULL, 'indeterminate', before_registers[n]) AS before_register,
        if(after IS NULL, 'indeterminate', after_registers[n]) AS after_register,
        least(before_windows, after_windows) AS fewer,
        arrayConcat(
            if(fewer = 0, ['a side holds no windows'], []),
            if(fewer > 0 AND fewer < windows, ['windows are missing on a side'], []),
            if(other_rules, ['the rules version differs'], []),
            if(length(epochs) > 1 OR has(epochs, -1), ['the key epoch differs'], []),
            if(fewer > 0 AND least(before_coverage, after_coverage) < 0.8, ['coverage is below 80 %'], []),
            if(fewer > 0 AND has([before_register, after_register], 'indeterminate'), ['it cannot be measured'], [])
        ) AS why
    FROM
    (
        SELECT
            d.deploy_id AS deploy_id, d.label AS label, d.at AS at, d.workload AS workload, d.model AS model,
            d.figures[n].1 AS figure, d.figures[n].2 AS unit, c.before_values[n] AS before, c.after_values[n] AS after,
            n, c.* EXCEPT deploy_id
        FROM
        (
            SELECT *, p.1 AS part, p.2 AS figures
            FROM deploys_declared
            ARRAY JOIN [
                (
                    'repeat',
                    [
                        ('repeat compute, evicted', 'tokens per hour'), ('repeat compute, cleared', 'tokens per hour'),
                        ('repeat compute, restarted', 'tokens per hour'), ('repeat compute, concurrent', 'tokens per hour')
                    ]
                ),
                (
                    'footprint',
                    [('duplicate footprint, inside', 'extra tokens, mean'), ('duplicate footprint, between', 'extra tokens, mean')]
                )
            ] AS p
            WHERE NOT (p.1 = 'footprint' AND workload IS NOT NULL AND model IS NOT NULL)
        ) AS d
        LEFT JOIN
        (
            -- The newest rules of either side count; a side of which some was counted by others only is not compared.
            SELECT
                deploy_id, part, any(due) AS windows,
                anyIf(counted, side = 'before' AND newest) AS before_windows, anyIf(counted, side = 'after' AND newest) AS after_windows,
                maxIf(counted, side = 'before') > before_windows OR maxIf(counted, side = 'after') > after_windows AS other_rules,
                groupUniqArrayArrayIf(key_epochs, newest) AS epochs,
                anyIf(shown, side = 'before' AND newest) AS before_values, anyIf(shown, side = 'after' AND newest) AS after_values,
                anyIf(registers, side = 'before' AND newest) AS before_registers,
                anyIf(registers, side = 'after' AND newest) AS after_registers,
                anyIf(covered, side = 'before' AND newest) AS before_coverage, anyIf(covered, side = 'after' AND newest) AS after_coverage
            FROM
            (
                SELECT
                    *, semantics_version = max(semantics_version) OVER (PARTITION BY deploy_id, part) AS newest,
                    if(expected_us > 0, least(1, observed_us / expected_us), 0) AS covered,
                    -- Nothing is added up over two keys.
                    if(length(key_epochs) > 1, arrayMap(v -> NULL, summed), summed) AS shown
                FROM
                (
                    SELECT
                        'repeat' AS part, s.deploy_id AS deploy_id, s.side AS side, any(s.windows) AS due,
                        r.semantics_version AS semantics_version, uniqExact(r.at_window) AS counted,
                        groupUniqArray(r.key_epoch) AS key_epochs,
                        sum(r.observed_us) AS observed_us, sum(r.expected_us) AS expected_us,
                        arrayMap(
                            tokens -> tokens * 12 / counted,
                            [sum(r.evicted_tokens), sum(r.cleared_tokens), sum(r.restarted_tokens), sum(r.concurrent_tokens)]
                        ) AS summed,
                        arrayResize(
                            [multiIf(
                                countIf(r.measurable) = 0 OR sum(r.observed_us) = 0, 'indeterminate',
                                max(r.register != 'exact'), 'lower_bound',
                                'exact'
                            ) AS of_all], 4, of_all
                        ) AS registers
                    FROM
                    (
                        SELECT
                            window_start AS at_window, workload, model, semantics_version, key_epoch, observed_us, expected_us, measurable,
                            register, evicted_tokens, cleared_tokens, restarted_tokens, concurrent_tokens
                        FROM repeat_compute_5m
                        WHERE window_start IN
                            (
                                SELECT window_start FROM deploy_windows
                            )
                    ) AS r
                    INNER JOIN deploy_windows AS s ON s.window_start = r.at_window
                    WHERE (s.workload IS NULL OR s.workload = r.workload) AND (s.model IS NULL OR s.model = r.model)
                    GROUP BY s.deploy_id, s.side, r.semantics_version
                    UNION ALL
                    SELECT
                        'footprint' AS part, s.deploy_id AS deploy_id, s.side AS side, any(s.windows) AS due,
                        r.semantics_version AS semantics_version, uniqExact(r.at_window) AS counted,
                        -- Where no rank was expected there is no key.
                        groupUniqArrayIf(ifNull(r.key_epoch, -1), r.expected_us > 0) AS key_epochs,
                        sum(r.observed_us) AS observed_us, sum(r.expected_us) AS expected_us,
                        arrayMap(
                            token_us -> if(sum(r.covered_us) > 0, token_us / sum(r.covered_us), NULL),
                            [sum(r.inside_tokens_mean * r.covered_us), sum(r.between_tokens_mean * r.covered_us)]
                        ) AS summed,
                        -- As over an hour: a window of which nothing can be said spoils a side that found nothing, or cannot compare.
                        arrayMap(
                            (told, spoils) -> multiIf(
                                has(told, 'indeterminate') AND spoils, 'indeterminate', told != ['exact'], 'lower_bound', 'exact'
                            ),
                            [groupUniqArray(toString(r.inside_register)), groupUniqArray(toString(r.between_register))],
                            [
                                max(hasAny(r.reasons, ['key_change', 'model_undeclared'])) AS uncomparable
                                    OR max(r.inside_tokens_max) = 0,
                                uncomparable OR max(r.between_tokens_max) = 0
                            ]
                        ) AS registers
                    FROM
                    (
                        SELECT
                            window_start AS at_window, scope, scope_key, semantics_version, key_epoch, observed_us, expected_us, covered_us,
                            inside_tokens_mean, between_tokens_mean, inside_tokens_max, between_tokens_max, inside_register,
                            between_register, reasons
                        FROM duplicate_footprint_5m
                        WHERE scope IN ('fleet', 'workload', 'model') AND tier = 'GPU' AND window_start IN
                            (
                                SELECT window_start FROM deploy_windows
                            )
                    ) AS r
                    INNER JOIN deploy_windows AS s ON s.window_start = r.at_window
                    WHERE
                        r.scope = multiIf(
                            s.workload IS NULL AND s.model IS NULL, 'fleet',
                            s.model IS NULL, 'workload',
                            s.workload IS NULL, 'model',
                            'none'
                        )
                        AND ifNull(r.scope_key, '') = coalesce(s.workload, s.model, '')
                    GROUP BY s.deploy_id, s.side, r.semantics_version
                )
            )
            GROUP BY deploy_id, part
        ) AS c ON c.deploy_id = d.deploy_id AND c.part = d.part
        ARRAY JOIN arrayEnumerate(d.figures) AS n
    )
)
COMMENT 'What changed with each declared deploy? One row per deploy and figure: the hour before against the hour after, in whole windows of 5 minutes, without the one in which it happened (view deploy_windows); unit as named, with the coverage and register of either side. change is NULL, and why says the reasons, where the sides cannot be compared. Of a deploy of one workload and one model, repeat compute alone. One deploy at once: deploy_effect_of. Other spans: kvcensus show deploy.';

CREATE OR REPLACE VIEW deploy_effect_of AS
WITH
    -- As in deploy_windows, for one deploy: borders as plain times, by which the key leaves out all others.
    (
        SELECT
            (
                toDateTime((until - due) * 300, 'UTC'), toDateTime(until * 300, 'UTC'),
                toDateTime(since * 300, 'UTC'), toDateTime((since + due) * 300, 'UTC'), due
            )
        FROM
        (
            SELECT
                intDiv(us, 300000000) AS until, intDiv(us + 299999999, 300000000) AS since, intDiv(clock, 300000000) - since AS passed,
                toUInt8(if(passed > 0, least(passed, 12), 12)) AS due
            FROM
            (
                SELECT
                    (SELECT max(toUnixTimestamp64Micro(newest)) FROM fleet_clock) AS clock,
                    (SELECT max(toUnixTimestamp64Micro(at)) FROM deploys_declared WHERE deploy_id = {deploy:String}) AS us
            )
        )
    ) AS around
SELECT
    deploy_id, label, at, workload, model, figure, unit, before, after, if(empty(why), after - before, NULL) AS change,
    empty(why) AS comparable, why, before_coverage, after_coverage, before_register, after_register, before_windows, after_windows, windows
FROM
(
    SELECT
        *,
        if(before IS NULL, 'indeterminate', before_registers[n]) AS before_register,
        if(after IS NULL, 'indeterminate', after_registers[n]) AS after_register,
        least(before_windows, after_windows) AS fewer,
        arrayConcat(
            if(fewer = 0, ['a side holds no windows'], []),
            if(fewer > 0 AND fewer < windows, ['windows are missing on a side'], []),
            if(other_rules, ['the rules version differs'], []),
            if(length(epochs) > 1 OR has(epochs, -1), ['the key epoch differs'], []),
            if(fewer > 0 AND least(before_coverage, after_coverage) < 0.8, ['coverage is below 80 %'], []),
            if(fewer > 0 AND has([before_register, after_register], 'indeterminate'), ['it cannot be measured'], [])
        ) AS why
    FROM
    (
        SELECT
            d.deploy_id AS deploy_id, d.label AS label, d.at AS at, d.workload AS workload, d.model AS model,
            d.figures[n].1 AS figure, d.figures[n].2 AS unit, c.before_values[n] AS before, c.after_values[n] AS after,
            n, c.* EXCEPT deploy_id
        FROM
        (
            SELECT *, p.1 AS part, p.2 AS figures
            FROM (SELECT * FROM deploys_declared WHERE deploy_id = {deploy:String})
            ARRAY JOIN [
                (
                    'repeat',
                    [
                        ('repeat compute, evicted', 'tokens per hour'), ('repeat compute, cleared', 'tokens per hour'),
                        ('repeat compute, restarted', 'tokens per hour'), ('repeat compute, concurrent', 'tokens per hour')
                    ]
                ),
                (
                    'footprint',
                    [('duplicate footprint, inside', 'extra tokens, mean'), ('duplicate footprint, between', 'extra tokens, mean')]
                )
            ] AS p
            WHERE NOT (p.1 = 'footprint' AND workload IS NOT NULL AND model IS NOT NULL)
        ) AS d
        LEFT JOIN
        (
            -- The newest rules of either side count; a side of which some was counted by others only is not compared.
            SELECT
                deploy_id, part, any(due) AS windows,
                anyIf(counted, side = 'before' AND newest) AS before_windows, anyIf(counted, side = 'after' AND newest) AS after_windows,
                maxIf(counted, side = 'before') > before_windows OR maxIf(counted, side = 'after') > after_windows AS other_rules,
                groupUniqArrayArrayIf(key_epochs, newest) AS epochs,
                anyIf(shown, side = 'before' AND newest) AS before_values, anyIf(shown, side = 'after' AND newest) AS after_values,
                anyIf(registers, side = 'before' AND newest) AS before_registers,
                anyIf(registers, side = 'after' AND newest) AS after_registers,
                anyIf(covered, side = 'before' AND newest) AS before_coverage, anyIf(covered, side = 'after' AND newest) AS after_coverage
            FROM
            (
                SELECT
                    *, semantics_version = max(semantics_version) OVER (PARTITION BY deploy_id, part) AS newest,
                    if(expected_us > 0, least(1, observed_us / expected_us), 0) AS covered,
                    -- Nothing is added up over two keys.
                    if(length(key_epochs) > 1, arrayMap(v -> NULL, summed), summed) AS shown
                FROM
                (
                    SELECT
                        'repeat' AS part, {deploy:String} AS deploy_id,
                        if(r.at_window < around.2, 'before', 'after') AS side, any(around.5) AS due,
                        r.semantics_version AS semantics_version, uniqExact(r.at_window) AS counted,
                        groupUniqArray(r.key_epoch) AS key_epochs,
                        sum(r.observed_us) AS observed_us, sum(r.expected_us) AS expected_us,
                        arrayMap(
                            tokens -> tokens * 12 / counted,
                            [sum(r.evicted_tokens), sum(r.cleared_tokens), sum(r.restarted_tokens), sum(r.concurrent_tokens)]
                        ) AS summed,
                        arrayResize(
                            [multiIf(
                                countIf(r.measurable) = 0 OR sum(r.observed_us) = 0, 'indeterminate',
                                max(r.register != 'exact'), 'lower_bound',
                                'exact'
                            ) AS of_all], 4, of_all
                        ) AS registers
                    FROM
                    (
                        SELECT
                            window_start AS at_window, workload, model, semantics_version, key_epoch, observed_us, expected_us, measurable,
                            register, evicted_tokens, cleared_tokens, restarted_tokens, concurrent_tokens
                        FROM repeat_compute_5m
                        WHERE window_start >= around.1
                            AND window_start < around.4 AND NOT (window_start >= around.2 AND window_start < around.3)
                    ) AS r
                    CROSS JOIN (SELECT * FROM deploys_declared WHERE deploy_id = {deploy:String}) AS s
                    WHERE (s.workload IS NULL OR s.workload = r.workload) AND (s.model IS NULL OR s.model = r.model)
                    GROUP BY side, r.semantics_version
                    UNION ALL
                    SELECT
                        'footprint' AS part, {deploy:String} AS deploy_id,
                        if(r.at_window < around.2, 'before', 'after') AS side, any(around.5) AS due,
                        r.semantics_version AS semantics_version, uniqExact(r.at_window) AS counted,
                        -- Where no rank was expected there is no key.
                        groupUniqArrayIf(ifNull(r.key_epoch, -1), r.expected_us > 0) AS key_epochs,
                        sum(r.observed_us) AS observed_us, sum(r.expected_us) AS expected_us,
                        arrayMap(
                            token_us -> if(sum(r.covered_us) > 0, token_us / sum(r.covered_us), NULL),
                            [sum(r.inside_tokens_mean * r.covered_us), sum(r.between_tokens_mean * r.covered_us)]
                        ) AS summed,
                        -- As over an hour: a window of which nothing can be said spoils a side that found nothing, or cannot compare.
                        arrayMap(
                            (told, spoils) -> multiIf(
                                has(told, 'indeterminate') AND spoils, 'indeterminate', told != ['exact'], 'lower_bound', 'exact'
                            ),
                            [groupUniqArray(toString(r.inside_register)), groupUniqArray(toString(r.between_register))],
                            [
                                max(hasAny(r.reasons, ['key_change', 'model_undeclared'])) AS uncomparable
                                    OR max(r.inside_tokens_max) = 0,
                                uncomparable OR max(r.between_tokens_max) = 0
                            ]
                        ) AS registers
                    FROM
                    (
                        SELECT
                            window_start AS at_window, scope, scope_key, semantics_version, key_epoch, observed_us, expected_us, covered_us,
                            inside_tokens_mean, between_tokens_mean, inside_tokens_max, between_tokens_max, inside_register,
                            between_register, reasons
                        FROM duplicate_footprint_5m
                        WHERE scope IN ('fleet', 'workload', 'model') AND tier = 'GPU' AND window_start >= around.1
                            AND window_start < around.4 AND NOT (window_start >= around.2 AND window_start < around.3)
                    ) AS r
                    CROSS JOIN (SELECT * FROM deploys_declared WHERE deploy_id = {deploy:String}) AS s
                    WHERE
                        r.scope = multiIf(
                            s.workload IS NULL AND s.model IS NULL, 'fleet',
                            s.model IS NULL, 'workload',
                            s.workload IS NULL, 'model',
                            'none'
                        )
                        AND ifNull(r.scope_key, '') = coalesce(s.workload, s.model, '')
                    GROUP BY side, r.semantics_version
                )
            )
            GROUP BY deploy_id, part
        ) AS c ON c.deploy_id = d.deploy_id AND c.part = d.part
        ARRAY JOIN arrayEnumerate(d.figures) AS n
    )
)
COMMENT 'What changed with one deploy? deploy_effect_of(deploy = ''ID''): the rows of deploy_effect for it, reading no other time. Unit, coverage, register and why: as there.';

CREATE OR REPLACE VIEW recomputed_blocks_between AS
SELECT
    r.instance_id AS instance_id,
    r.dp_rank AS dp_rank,
    r.group_idx AS group_idx,
    r.life_id AS life_id,
    r.seq AS seq,
    r.block_index AS block_index,
    r.semantics_version AS semantics_version,
    w.workload AS workload,
    w.model AS model,
    w.is_final AS is_final,
    if(w.window_us > 0, w.observed_us / w.window_us, 0) AS coverage,
    if(w.window_us > 0, toString(w.register), 'indeterminate') AS register,
    w.reasons AS reasons,
    toString(r.cause) AS cause,
    r.tokens AS tokens,
    r.stored_at AS stored_at,
    r.lost_at AS lost_at,
    r.back_at AS back_at,
    r.elapsed_us AS elapsed_us,
    r.gpu_us AS gpu_us,
    r.content_id AS content_id,
    r.parent_content_id AS parent_content_id,
    r.block_id AS block_id,
    r.parent_block_id AS parent_block_id
FROM
(
    SELECT * FROM recomputes FINAL
    WHERE back_at >= {since:DateTime64(6, 'UTC')} AND back_at < {until:DateTime64(6, 'UTC')}
) AS r
ASOF LEFT JOIN
(
    SELECT
        instance_id, dp_rank, life_id, semantics_version, window_start, window_us, observed_us, register, reasons, workload, model, is_final
    FROM rank_windows FINAL
    WHERE window_start >= {since:DateTime64(6, 'UTC')} - INTERVAL 1 HOUR AND window_start < {until:DateTime64(6, 'UTC')}
) AS w
ON r.instance_id = w.instance_id AND r.dp_rank = w.dp_rank AND r.life_id = w.life_id
    AND r.semantics_version = w.semantics_version AND r.back_at >= w.window_start
COMMENT 'Which blocks were computed again in a span of time? recomputed_blocks_between(since = ..., until = ...): the rows of recomputed_blocks that came back in it, reading no other time; where windows are longer than an hour, use that view. Unit, coverage, register and reasons: as there.';
