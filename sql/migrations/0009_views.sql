-- Views for people. Each comment says the question, the unit and how the figure may be read.
--
-- Those without a suffix read the windows themselves: for an hour of one rank, or minutes of the fleet. Those with _5m, _1h and _1d read the
-- rollups, have the same columns under the same names, and are cut by the same column, window_start, which leads the sorting key. The ones
-- named rollup_* hold all three grains at once and are what the others are made of.
--
-- Expected time ends where engine time has come to: what lies ahead of it in an open window is not missing yet.

CREATE OR REPLACE VIEW repeat_compute AS
WITH
    indexOf(w.`groups.group_idx`, p.primary_group) AS i,
    w.kv_connector IS NULL AS can_measure,
    can_measure AND w.reuse_reporting != 'unlabelled' AS can_tell
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
    -- GPU time is known where a rate was: zero where nothing was computed again, NULL where it was and there was none.
    if(can_measure AND (w.`groups.recompute_evicted_gpu_us`[i] > 0 OR w.`groups.recompute_evicted_tokens`[i] = 0), w.`groups.recompute_evicted_gpu_us`[i] / 1e6, NULL) AS evicted_gpu_seconds,
    if(can_measure AND (w.`groups.recompute_cleared_gpu_us`[i] > 0 OR w.`groups.recompute_cleared_tokens`[i] = 0), w.`groups.recompute_cleared_gpu_us`[i] / 1e6, NULL) AS cleared_gpu_seconds,
    if(can_measure AND (w.`groups.recompute_restarted_gpu_us`[i] > 0 OR w.`groups.recompute_restarted_tokens`[i] = 0), w.`groups.recompute_restarted_gpu_us`[i] / 1e6, NULL) AS restarted_gpu_seconds,
    if(can_tell AND (w.`groups.recompute_concurrent_gpu_us`[i] > 0 OR w.`groups.recompute_concurrent_tokens`[i] = 0), w.`groups.recompute_concurrent_gpu_us`[i] / 1e6, NULL) AS concurrent_gpu_seconds,
    if(can_measure AND (w.`groups.recompute_ambiguous_gpu_us`[i] > 0 OR w.`groups.recompute_ambiguous_tokens`[i] = 0), w.`groups.recompute_ambiguous_gpu_us`[i] / 1e6, NULL) AS ambiguous_reload_gpu_seconds,
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
    indexOf(w.`groups.group_idx`, p.primary_group) AS i,
    w.kv_connector IS NULL AS can_measure,
    can_measure AND w.reuse_reporting != 'unlabelled' AS can_tell,
    greatest(toInt64(0), w.expected_us - greatest(toInt64(0), toUnixTimestamp64Micro(w.expected_until) - toUnixTimestamp64Micro(clock))) AS expected
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
    w.is_final AND toDateTime64(w.window_start, 6, 'UTC') + toIntervalMicrosecond(w.window_us) <= clock AS is_final,
    w.observed_us AS observed_us,
    expected AS expected_us,
    if(expected > 0, least(1, w.observed_us / expected), 0) AS coverage,
    if(w.register = 'exact' AND w.observed_us < expected, 'lower_bound', w.register) AS register,
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
    -- GPU time is known where a rate was: zero where nothing was computed again, NULL where it was and there was none.
    if(can_measure AND (w.`groups.recompute_evicted_gpu_us`[i] > 0 OR w.`groups.recompute_evicted_tokens`[i] = 0), w.`groups.recompute_evicted_gpu_us`[i] / 1e6, NULL) AS evicted_gpu_seconds,
    if(can_measure AND (w.`groups.recompute_cleared_gpu_us`[i] > 0 OR w.`groups.recompute_cleared_tokens`[i] = 0), w.`groups.recompute_cleared_gpu_us`[i] / 1e6, NULL) AS cleared_gpu_seconds,
    if(can_measure AND (w.`groups.recompute_restarted_gpu_us`[i] > 0 OR w.`groups.recompute_restarted_tokens`[i] = 0), w.`groups.recompute_restarted_gpu_us`[i] / 1e6, NULL) AS restarted_gpu_seconds,
    if(can_tell AND (w.`groups.recompute_concurrent_gpu_us`[i] > 0 OR w.`groups.recompute_concurrent_tokens`[i] = 0), w.`groups.recompute_concurrent_gpu_us`[i] / 1e6, NULL) AS concurrent_gpu_seconds,
    if(can_measure AND (w.`groups.recompute_ambiguous_gpu_us`[i] > 0 OR w.`groups.recompute_ambiguous_tokens`[i] = 0), w.`groups.recompute_ambiguous_gpu_us`[i] / 1e6, NULL) AS ambiguous_reload_gpu_seconds,
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
COMMENT 'repeat_compute_5m, _1h and _1d in one: filter on one grain.';

CREATE OR REPLACE VIEW repeat_compute_5m AS SELECT * EXCEPT grain FROM rollup_repeat_compute WHERE grain = '5m'
COMMENT 'What was computed again, by cause? One row per rank, life and 5 minutes, from the primary group; unit: tokens, blocks and seconds of GPU time (an estimate), as coverage and register say. A rank that was expected and silent has a row of its own (reason absent). The causes are never added together. NULL: cannot be told for this rank.';

CREATE OR REPLACE VIEW repeat_compute_1h AS SELECT * EXCEPT grain FROM rollup_repeat_compute WHERE grain = '1h'
COMMENT 'What was computed again, by cause? One row per rank, life and 1 hour, from the primary group; unit: tokens, blocks and seconds of GPU time (an estimate), as coverage and register say. A rank that was expected and silent has a row of its own (reason absent). The causes are never added together. NULL: cannot be told for this rank.';

CREATE OR REPLACE VIEW repeat_compute_1d AS SELECT * EXCEPT grain FROM rollup_repeat_compute WHERE grain = '1d'
COMMENT 'What was computed again, by cause? One row per rank, life and 1 day, from the primary group; unit: tokens, blocks and seconds of GPU time (an estimate), as coverage and register say. A rank that was expected and silent has a row of its own (reason absent). The causes are never added together. NULL: cannot be told for this rank.';

CREATE OR REPLACE VIEW rollup_repeat_compute_fleet AS
SELECT
    grain, window_start, any(r.window_us) AS window_us, semantics_version, key_epoch, min(r.is_final) AS is_final,
    uniqExactIf((r.instance_id, r.dp_rank), r.life_id != '') AS ranks, uniqExact(r.instance_id, r.dp_rank) AS expected_ranks,
    uniqExactIf((r.instance_id, r.dp_rank), r.measurable) AS ranks_measured, uniqExactIf((r.instance_id, r.dp_rank), r.concurrent_tokens IS NOT NULL) AS ranks_telling_concurrent,
    sum(r.observed_us) AS observed_us, sum(r.expected_us) AS expected_us, if(expected_us > 0, least(1, observed_us / expected_us), 0) AS coverage,
    multiIf(countIf(r.measurable) = 0 OR sum(r.observed_us) = 0, 'indeterminate', max(r.register != 'exact'), 'lower_bound', 'exact') AS register, arraySort(groupUniqArrayArray(r.reasons)) AS reasons,
    sum(r.evicted_tokens) AS evicted_tokens, sum(r.evicted_blocks) AS evicted_blocks, sum(r.evicted_gpu_seconds) AS evicted_gpu_seconds,
    sum(r.cleared_tokens) AS cleared_tokens, sum(r.cleared_blocks) AS cleared_blocks, sum(r.cleared_gpu_seconds) AS cleared_gpu_seconds,
    sum(r.restarted_tokens) AS restarted_tokens, sum(r.restarted_blocks) AS restarted_blocks, sum(r.restarted_gpu_seconds) AS restarted_gpu_seconds,
    sum(r.concurrent_tokens) AS concurrent_tokens, sum(r.concurrent_blocks) AS concurrent_blocks, sum(r.concurrent_gpu_seconds) AS concurrent_gpu_seconds,
    sum(r.ambiguous_reload_tokens) AS ambiguous_reload_tokens, sum(r.ambiguous_reload_blocks) AS ambiguous_reload_blocks, sum(r.ambiguous_reload_gpu_seconds) AS ambiguous_reload_gpu_seconds,
    sum(r.unrated_tokens) AS unrated_tokens, sum(r.stored_tokens) AS stored_tokens, sum(r.removed_tokens) AS removed_tokens,
    sum(r.unreused_tokens) AS unreused_tokens, sum(r.resident_tokens) AS resident_tokens
FROM rollup_repeat_compute AS r
GROUP BY grain, window_start, semantics_version, key_epoch
COMMENT 'repeat_compute_fleet_5m, _1h and _1d in one: filter on one grain.';

CREATE OR REPLACE VIEW repeat_compute_fleet_5m AS SELECT * EXCEPT grain FROM rollup_repeat_compute_fleet WHERE grain = '5m'
COMMENT 'What did the whole fleet compute again, by cause? One row per 5 minutes, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. Of ranks that cannot tell: see ranks_measured and ranks_telling_concurrent; resident_tokens are those at the end.';

CREATE OR REPLACE VIEW repeat_compute_fleet_1h AS SELECT * EXCEPT grain FROM rollup_repeat_compute_fleet WHERE grain = '1h'
COMMENT 'What did the whole fleet compute again, by cause? One row per 1 hour, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. Of ranks that cannot tell: see ranks_measured and ranks_telling_concurrent; resident_tokens are those at the end.';

CREATE OR REPLACE VIEW repeat_compute_fleet_1d AS SELECT * EXCEPT grain FROM rollup_repeat_compute_fleet WHERE grain = '1d'
COMMENT 'What did the whole fleet compute again, by cause? One row per 1 day, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. Of ranks that cannot tell: see ranks_measured and ranks_telling_concurrent; resident_tokens are those at the end.';

CREATE OR REPLACE VIEW rollup_repeat_compute_by_workload AS
SELECT
    grain, window_start, any(r.window_us) AS window_us, workload, semantics_version, key_epoch, min(r.is_final) AS is_final,
    uniqExactIf((r.instance_id, r.dp_rank), r.life_id != '') AS ranks, uniqExact(r.instance_id, r.dp_rank) AS expected_ranks,
    uniqExactIf((r.instance_id, r.dp_rank), r.measurable) AS ranks_measured, uniqExactIf((r.instance_id, r.dp_rank), r.concurrent_tokens IS NOT NULL) AS ranks_telling_concurrent,
    sum(r.observed_us) AS observed_us, sum(r.expected_us) AS expected_us, if(expected_us > 0, least(1, observed_us / expected_us), 0) AS coverage,
    multiIf(countIf(r.measurable) = 0 OR sum(r.observed_us) = 0, 'indeterminate', max(r.register != 'exact'), 'lower_bound', 'exact') AS register, arraySort(groupUniqArrayArray(r.reasons)) AS reasons,
    sum(r.evicted_tokens) AS evicted_tokens, sum(r.evicted_blocks) AS evicted_blocks, sum(r.evicted_gpu_seconds) AS evicted_gpu_seconds,
    sum(r.cleared_tokens) AS cleared_tokens, sum(r.cleared_blocks) AS cleared_blocks, sum(r.cleared_gpu_seconds) AS cleared_gpu_seconds,
    sum(r.restarted_tokens) AS restarted_tokens, sum(r.restarted_blocks) AS restarted_blocks, sum(r.restarted_gpu_seconds) AS restarted_gpu_seconds,
    sum(r.concurrent_tokens) AS concurrent_tokens, sum(r.concurrent_blocks) AS concurrent_blocks, sum(r.concurrent_gpu_seconds) AS concurrent_gpu_seconds,
    sum(r.ambiguous_reload_tokens) AS ambiguous_reload_tokens, sum(r.ambiguous_reload_blocks) AS ambiguous_reload_blocks, sum(r.ambiguous_reload_gpu_seconds) AS ambiguous_reload_gpu_seconds,
    sum(r.unrated_tokens) AS unrated_tokens, sum(r.stored_tokens) AS stored_tokens, sum(r.removed_tokens) AS removed_tokens,
    sum(r.unreused_tokens) AS unreused_tokens, sum(r.resident_tokens) AS resident_tokens
FROM rollup_repeat_compute AS r
GROUP BY grain, window_start, workload, semantics_version, key_epoch
COMMENT 'repeat_compute_by_workload_5m, _1h and _1d in one: filter on one grain.';

CREATE OR REPLACE VIEW repeat_compute_by_workload_5m AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_workload WHERE grain = '5m'
COMMENT 'What did each workload (NULL: undeclared) compute again, by cause? One row per workload and 5 minutes, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. Of ranks that cannot tell: see ranks_measured and ranks_telling_concurrent; resident_tokens are those at the end.';

CREATE OR REPLACE VIEW repeat_compute_by_workload_1h AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_workload WHERE grain = '1h'
COMMENT 'What did each workload (NULL: undeclared) compute again, by cause? One row per workload and 1 hour, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. Of ranks that cannot tell: see ranks_measured and ranks_telling_concurrent; resident_tokens are those at the end.';

CREATE OR REPLACE VIEW repeat_compute_by_workload_1d AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_workload WHERE grain = '1d'
COMMENT 'What did each workload (NULL: undeclared) compute again, by cause? One row per workload and 1 day, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. Of ranks that cannot tell: see ranks_measured and ranks_telling_concurrent; resident_tokens are those at the end.';

CREATE OR REPLACE VIEW rollup_repeat_compute_by_model AS
SELECT
    grain, window_start, any(r.window_us) AS window_us, model, semantics_version, key_epoch, min(r.is_final) AS is_final,
    uniqExactIf((r.instance_id, r.dp_rank), r.life_id != '') AS ranks, uniqExact(r.instance_id, r.dp_rank) AS expected_ranks,
    uniqExactIf((r.instance_id, r.dp_rank), r.measurable) AS ranks_measured, uniqExactIf((r.instance_id, r.dp_rank), r.concurrent_tokens IS NOT NULL) AS ranks_telling_concurrent,
    sum(r.observed_us) AS observed_us, sum(r.expected_us) AS expected_us, if(expected_us > 0, least(1, observed_us / expected_us), 0) AS coverage,
    multiIf(countIf(r.measurable) = 0 OR sum(r.observed_us) = 0, 'indeterminate', max(r.register != 'exact'), 'lower_bound', 'exact') AS register, arraySort(groupUniqArrayArray(r.reasons)) AS reasons,
    sum(r.evicted_tokens) AS evicted_tokens, sum(r.evicted_blocks) AS evicted_blocks, sum(r.evicted_gpu_seconds) AS evicted_gpu_seconds,
    sum(r.cleared_tokens) AS cleared_tokens, sum(r.cleared_blocks) AS cleared_blocks, sum(r.cleared_gpu_seconds) AS cleared_gpu_seconds,
    sum(r.restarted_tokens) AS restarted_tokens, sum(r.restarted_blocks) AS restarted_blocks, sum(r.restarted_gpu_seconds) AS restarted_gpu_seconds,
    sum(r.concurrent_tokens) AS concurrent_tokens, sum(r.concurrent_blocks) AS concurrent_blocks, sum(r.concurrent_gpu_seconds) AS concurrent_gpu_seconds,
    sum(r.ambiguous_reload_tokens) AS ambiguous_reload_tokens, sum(r.ambiguous_reload_blocks) AS ambiguous_reload_blocks, sum(r.ambiguous_reload_gpu_seconds) AS ambiguous_reload_gpu_seconds,
    sum(r.unrated_tokens) AS unrated_tokens, sum(r.stored_tokens) AS stored_tokens, sum(r.removed_tokens) AS removed_tokens,
    sum(r.unreused_tokens) AS unreused_tokens, sum(r.resident_tokens) AS resident_tokens
FROM rollup_repeat_compute AS r
GROUP BY grain, window_start, model, semantics_version, key_epoch
COMMENT 'repeat_compute_by_model_5m, _1h and _1d in one: filter on one grain.';

CREATE OR REPLACE VIEW repeat_compute_by_model_5m AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_model WHERE grain = '5m'
COMMENT 'What did each model (NULL: undeclared) compute again, by cause? One row per model and 5 minutes, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. Of ranks that cannot tell: see ranks_measured and ranks_telling_concurrent; resident_tokens are those at the end.';

CREATE OR REPLACE VIEW repeat_compute_by_model_1h AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_model WHERE grain = '1h'
COMMENT 'What did each model (NULL: undeclared) compute again, by cause? One row per model and 1 hour, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. Of ranks that cannot tell: see ranks_measured and ranks_telling_concurrent; resident_tokens are those at the end.';

CREATE OR REPLACE VIEW repeat_compute_by_model_1d AS SELECT * EXCEPT grain FROM rollup_repeat_compute_by_model WHERE grain = '1d'
COMMENT 'What did each model (NULL: undeclared) compute again, by cause? One row per model and 1 day, and per semantics_version and key_epoch, which are never added together; unit: tokens, blocks and seconds of GPU time (an estimate; unrated_tokens had no prefill rate), as coverage (expected and silent ranks count as unobserved) and register say. The causes are never added together. Of ranks that cannot tell: see ranks_measured and ranks_telling_concurrent; resident_tokens are those at the end.';

CREATE OR REPLACE VIEW rollup_gpu_time AS
SELECT grain, window_start, window_us, workload, semantics_version, key_epoch, is_final, coverage, register, reasons, c.1 AS cause, c.2 AS gpu_seconds, c.3 AS tokens
FROM rollup_repeat_compute_by_workload
ARRAY JOIN [
    ('evicted', evicted_gpu_seconds, evicted_tokens),
    ('cleared', cleared_gpu_seconds, cleared_tokens),
    ('restarted', restarted_gpu_seconds, restarted_tokens),
    ('concurrent', concurrent_gpu_seconds, concurrent_tokens),
    ('ambiguous_reload', ambiguous_reload_gpu_seconds, ambiguous_reload_tokens)
] AS c
COMMENT 'gpu_time_5m, _1h and _1d in one: filter on one grain.';

CREATE OR REPLACE VIEW gpu_time_5m AS SELECT * EXCEPT grain FROM rollup_gpu_time WHERE grain = '5m'
COMMENT 'How much GPU time went into computing again? One row per workload, cause and 5 minutes; unit: seconds of one GPU, an estimate from the declared or measured prefill rate; NULL: no rate was known, or the cause cannot be told. A lower bound at the given coverage, as register says. The causes are never added together.';

CREATE OR REPLACE VIEW gpu_time_1h AS SELECT * EXCEPT grain FROM rollup_gpu_time WHERE grain = '1h'
COMMENT 'How much GPU time went into computing again? One row per workload, cause and 1 hour; unit: seconds of one GPU, an estimate from the declared or measured prefill rate; NULL: no rate was known, or the cause cannot be told. A lower bound at the given coverage, as register says. The causes are never added together.';

CREATE OR REPLACE VIEW gpu_time_1d AS SELECT * EXCEPT grain FROM rollup_gpu_time WHERE grain = '1d'
COMMENT 'How much GPU time went into computing again? One row per workload, cause and 1 day; unit: seconds of one GPU, an estimate from the declared or measured prefill rate; NULL: no rate was known, or the cause cannot be told. A lower bound at the given coverage, as register says. The causes are never added together.';

CREATE OR REPLACE VIEW duplicate_footprint AS
SELECT
    scope,
    nullIf(scope_key, '') AS scope_key,
    tier,
    window_start,
    window_us,
    as_of,
    semantics_version,
    key_epoch,
    is_final,
    shards_reported >= shards AS complete,
    toUnixTimestamp64Micro(as_of) - toUnixTimestamp64Micro(window_start) AS covered_us,
    observed_us,
    expected_ranks * covered_us AS expected_us,
    if(expected_us > 0, observed_us / expected_us, 0) AS coverage,
    expected_ranks,
    register,
    inside_register,
    between_register,
    reasons,
    if(covered_us > 0, (toInt128(inside_token_us) + between_token_us) / covered_us, 0) AS extra_tokens_mean,
    if(covered_us > 0, inside_token_us / covered_us, 0) AS inside_tokens_mean,
    if(covered_us > 0, between_token_us / covered_us, 0) AS between_tokens_mean,
    extra_tokens_max, inside_tokens_max, between_tokens_max,
    inside_tokens_end + between_tokens_end AS extra_tokens_end, inside_tokens_end, between_tokens_end,
    if(covered_us > 0, (toInt128(inside_block_us) + between_block_us) / covered_us, 0) AS extra_blocks_mean,
    if(covered_us > 0, inside_block_us / covered_us, 0) AS inside_blocks_mean,
    if(covered_us > 0, between_block_us / covered_us, 0) AS between_blocks_mean,
    extra_blocks_max,
    inside_blocks_end + between_blocks_end AS extra_blocks_end,
    if(covered_us > 0, (toInt128(inside_byte_ms) + between_byte_ms) * 1000 / covered_us, 0) AS extra_bytes_mean,
    if(covered_us > 0, toInt128(inside_byte_ms) * 1000 / covered_us, 0) AS inside_bytes_mean,
    if(covered_us > 0, toInt128(between_byte_ms) * 1000 / covered_us, 0) AS between_bytes_mean,
    extra_bytes_max,
    inside_bytes_end + between_bytes_end AS extra_bytes_end,
    late_changes
FROM duplicate_windows FINAL
WHERE scope != 'workload_pair'
COMMENT 'How much KV cache holds content that another rank holds too, inside an instance and between instances? One row per scope, tier and window; unit: extra copies in tokens, blocks and bytes (NULL: size not known of every rank), means weighted by time, as coverage (of the whole fleet) and register say. Filter on one scope and one tier.';

CREATE OR REPLACE VIEW rollup_duplicate_footprint AS
SELECT
    grain,
    scope,
    nullIf(scope_key, '') AS scope_key,
    tier,
    window_start,
    window_us,
    as_of,
    semantics_version,
    key_epoch,
    is_final AND toDateTime64(window_start, 6, 'UTC') + toIntervalMicrosecond(window_us) <= (SELECT max(newest) FROM fleet_clock) AS is_final,
    complete,
    covered_us,
    observed_us,
    expected_us,
    if(expected_us > 0, observed_us / expected_us, 0) AS coverage,
    expected_ranks,
    register,
    inside_register,
    between_register,
    reasons,
    if(covered_us > 0, (toInt128(inside_token_us) + between_token_us) / covered_us, 0) AS extra_tokens_mean,
    if(covered_us > 0, inside_token_us / covered_us, 0) AS inside_tokens_mean,
    if(covered_us > 0, between_token_us / covered_us, 0) AS between_tokens_mean,
    extra_tokens_max, inside_tokens_max, between_tokens_max,
    inside_tokens_end + between_tokens_end AS extra_tokens_end, inside_tokens_end, between_tokens_end,
    if(covered_us > 0, (toInt128(inside_block_us) + between_block_us) / covered_us, 0) AS extra_blocks_mean,
    if(covered_us > 0, inside_block_us / covered_us, 0) AS inside_blocks_mean,
    if(covered_us > 0, between_block_us / covered_us, 0) AS between_blocks_mean,
    extra_blocks_max,
    inside_blocks_end + between_blocks_end AS extra_blocks_end,
    if(covered_us > 0, (toInt128(inside_byte_ms) + between_byte_ms) * 1000 / covered_us, 0) AS extra_bytes_mean,
    if(covered_us > 0, toInt128(inside_byte_ms) * 1000 / covered_us, 0) AS inside_bytes_mean,
    if(covered_us > 0, toInt128(between_byte_ms) * 1000 / covered_us, 0) AS between_bytes_mean,
    extra_bytes_max,
    inside_bytes_end + between_bytes_end AS extra_bytes_end,
    late_changes
FROM duplicate_rollups FINAL
WHERE scope != 'workload_pair'
COMMENT 'duplicate_footprint_5m, _1h and _1d in one: filter on one grain, one scope and one tier.';

CREATE OR REPLACE VIEW duplicate_footprint_5m AS SELECT * EXCEPT grain FROM rollup_duplicate_footprint WHERE grain = '5m'
COMMENT 'How much KV cache holds content that another rank holds too, inside an instance and between instances? One row per scope, tier and 5 minutes, and per semantics_version and key_epoch; unit: extra copies in tokens, blocks and bytes (NULL: size not known of every rank), means weighted by time over covered_us, as coverage (of the whole fleet) and register say. Filter on one scope (fleet, rank, workload, model) and one tier.';

CREATE OR REPLACE VIEW duplicate_footprint_1h AS SELECT * EXCEPT grain FROM rollup_duplicate_footprint WHERE grain = '1h'
COMMENT 'How much KV cache holds content that another rank holds too, inside an instance and between instances? One row per scope, tier and 1 hour, and per semantics_version and key_epoch; unit: extra copies in tokens, blocks and bytes (NULL: size not known of every rank), means weighted by time over covered_us, as coverage (of the whole fleet) and register say. Filter on one scope (fleet, rank, workload, model) and one tier.';

CREATE OR REPLACE VIEW duplicate_footprint_1d AS SELECT * EXCEPT grain FROM rollup_duplicate_footprint WHERE grain = '1d'
COMMENT 'How much KV cache holds content that another rank holds too, inside an instance and between instances? One row per scope, tier and 1 day, and per semantics_version and key_epoch; unit: extra copies in tokens, blocks and bytes (NULL: size not known of every rank), means weighted by time over covered_us, as coverage (of the whole fleet) and register say. Filter on one scope (fleet, rank, workload, model) and one tier.';

CREATE OR REPLACE VIEW rollup_workload_pairs AS
SELECT
    grain,
    nullIf(JSONExtractString(scope_key, 1), '') AS workload_a,
    nullIf(JSONExtractString(scope_key, 2), '') AS workload_b,
    tier,
    window_start,
    window_us,
    as_of,
    semantics_version,
    key_epoch,
    is_final AND toDateTime64(window_start, 6, 'UTC') + toIntervalMicrosecond(window_us) <= (SELECT max(newest) FROM fleet_clock) AS is_final,
    covered_us,
    observed_us,
    expected_us,
    if(expected_us > 0, observed_us / expected_us, 0) AS coverage,
    register,
    reasons,
    if(covered_us > 0, between_token_us / covered_us, 0) AS shared_tokens_mean,
    between_tokens_max AS shared_tokens_max,
    between_tokens_end AS shared_tokens_end,
    if(covered_us > 0, between_block_us / covered_us, 0) AS shared_blocks_mean,
    between_blocks_max AS shared_blocks_max,
    between_blocks_end AS shared_blocks_end
FROM duplicate_rollups FINAL
WHERE scope = 'workload_pair'
COMMENT 'workload_pairs_5m, _1h and _1d in one: filter on one grain and one tier.';

CREATE OR REPLACE VIEW workload_pairs_5m AS SELECT * EXCEPT grain FROM rollup_workload_pairs WHERE grain = '5m'
COMMENT 'Which workloads hold the same content? One row per pair of workloads (NULL: undeclared), tier and 5 minutes; unit: tokens and blocks that ranks of both hold, counted once, as coverage and register say. Never sum pairs: content of three workloads is in three of them.';

CREATE OR REPLACE VIEW workload_pairs_1h AS SELECT * EXCEPT grain FROM rollup_workload_pairs WHERE grain = '1h'
COMMENT 'Which workloads hold the same content? One row per pair of workloads (NULL: undeclared), tier and 1 hour; unit: tokens and blocks that ranks of both hold, counted once, as coverage and register say. Never sum pairs: content of three workloads is in three of them.';

CREATE OR REPLACE VIEW workload_pairs_1d AS SELECT * EXCEPT grain FROM rollup_workload_pairs WHERE grain = '1d'
COMMENT 'Which workloads hold the same content? One row per pair of workloads (NULL: undeclared), tier and 1 day; unit: tokens and blocks that ranks of both hold, counted once, as coverage and register say. Never sum pairs: content of three workloads is in three of them.';

CREATE OR REPLACE VIEW rollup_return_times AS
SELECT
    grain, window_start, window_us, workload, semantics_version, key_epoch, is_final, coverage, register, reasons,
    what,
    -- Buckets cut each power of two into four.
    if(bucket < 8, bucket, bitShiftLeft(bitAnd(bucket, 3) + 4, greatest(0, bitShiftRight(bucket, 2) - 1))) AS from_us,
    if(bucket < 8, bucket + 1, bitShiftLeft(bitAnd(bucket, 3) + 5, greatest(0, bitShiftRight(bucket, 2) - 1))) AS to_us,
    blocks
FROM
(
    SELECT
        w.grain AS grain, w.window_start AS window_start, any(w.window_us) AS window_us, w.workload AS workload, w.semantics_version AS semantics_version, w.key_epoch AS key_epoch,
        min(w.is_final) AND toDateTime64(window_start, 6, 'UTC') + toIntervalMicrosecond(window_us) <= any(clock) AS is_final,
        if(sum(expected) > 0, least(1, sum(w.observed_us) / sum(expected)), 0) AS coverage,
        multiIf(countIf(w.kv_connector IS NULL) = 0 OR sum(w.observed_us) = 0, 'indeterminate', max(w.register != 'exact') OR coverage < 1, 'lower_bound', 'exact') AS register,
        arraySort(groupUniqArrayArray(w.reasons)) AS reasons,
        [
            (CAST('evicted', 'String'), sumMapIf(w.`groups.back_evicted_buckets`[i], w.`groups.back_evicted_counts`[i], w.kv_connector IS NULL)),
            ('cleared', sumMapIf(w.`groups.back_cleared_buckets`[i], w.`groups.back_cleared_counts`[i], w.kv_connector IS NULL)),
            ('restarted', sumMapIf(w.`groups.back_restarted_buckets`[i], w.`groups.back_restarted_counts`[i], w.kv_connector IS NULL)),
            ('lifetime', sumMap(w.`groups.lifetime_buckets`[i], w.`groups.lifetime_counts`[i]))
        ] AS histograms
    FROM
    (
        SELECT
            (SELECT max(newest) FROM fleet_clock) AS clock, w.*, indexOf(w.`groups.group_idx`, p.primary_group) AS i, greatest(toInt64(0), w.expected_us - greatest(toInt64(0), toUnixTimestamp64Micro(w.expected_until) - toUnixTimestamp64Micro(clock))) AS expected
        FROM (SELECT * FROM rank_rollups FINAL) AS w
        LEFT JOIN life_primary_groups AS p USING (instance_id, dp_rank, life_id, semantics_version)
    ) AS w
    GROUP BY w.grain, w.window_start, w.workload, w.semantics_version, w.key_epoch
)
ARRAY JOIN
    arrayFlatten(arrayMap(h -> arrayMap(b -> h.1, (h.2).1), histograms)) AS what,
    arrayFlatten(arrayMap(h -> (h.2).1, histograms)) AS bucket,
    arrayFlatten(arrayMap(h -> (h.2).2, histograms)) AS blocks
COMMENT 'return_times_5m, _1h and _1d in one: filter on one grain.';

CREATE OR REPLACE VIEW return_times_5m AS SELECT * EXCEPT grain FROM rollup_return_times WHERE grain = '5m'
COMMENT 'How soon does lost content come back, and how long does content last? One row per workload, 5 minutes, what (evicted, cleared, restarted: away for so long before it was stored again; lifetime: resident for so long before it was evicted) and bucket [from_us, to_us) of microseconds; unit: blocks of the primary group, lower bounds at the given coverage, as register says. Add blocks over any rows of one what, semantics_version and key_epoch.';

CREATE OR REPLACE VIEW return_times_1h AS SELECT * EXCEPT grain FROM rollup_return_times WHERE grain = '1h'
COMMENT 'How soon does lost content come back, and how long does content last? One row per workload, 1 hour, what (evicted, cleared, restarted: away for so long before it was stored again; lifetime: resident for so long before it was evicted) and bucket [from_us, to_us) of microseconds; unit: blocks of the primary group, lower bounds at the given coverage, as register says. Add blocks over any rows of one what, semantics_version and key_epoch.';

CREATE OR REPLACE VIEW return_times_1d AS SELECT * EXCEPT grain FROM rollup_return_times WHERE grain = '1d'
COMMENT 'How soon does lost content come back, and how long does content last? One row per workload, 1 day, what (evicted, cleared, restarted: away for so long before it was stored again; lifetime: resident for so long before it was evicted) and bucket [from_us, to_us) of microseconds; unit: blocks of the primary group, lower bounds at the given coverage, as register says. Add blocks over any rows of one what, semantics_version and key_epoch.';

CREATE OR REPLACE VIEW rollup_rank_health AS
WITH (SELECT max(newest) FROM fleet_clock) AS clock
SELECT
    h.grain AS grain, h.instance_id AS instance_id, h.dp_rank AS dp_rank, h.window_start AS window_start, h.window_us AS window_us,
    h.workload AS workload, h.model AS model, h.semantics_version AS semantics_version,
    h.observed_us AS observed_us, h.expected_us AS expected_us, h.coverage AS coverage, h.identity_coverage AS identity_coverage, h.register AS register, h.reasons AS reasons,
    h.batches AS batches, h.lost_batches AS lost_batches, h.refused_batches AS refused_batches, h.duplicate_batches AS duplicate_batches,
    h.unknown_events AS unknown_events, h.lives AS lives, ifNull(e.restarts, 0) AS restarts, h.scrapes AS scrapes, h.breaches_found AS breaches_found,
    h.last_batch AS last_batch,
    if(last_batch IS NULL, NULL, greatest(0, (toUnixTimestamp64Micro(least(toDateTime64(h.window_start, 6, 'UTC') + toIntervalMicrosecond(h.window_us), clock)) - toUnixTimestamp64Micro(assumeNotNull(last_batch))) / 1e6)) AS lag_seconds,
    h.resident_blocks AS resident_blocks, h.pool_blocks AS pool_blocks, h.departed AS departed
FROM
(
    SELECT
        w.grain AS grain, w.instance_id AS instance_id, w.dp_rank AS dp_rank, w.window_start AS window_start, any(w.window_us) AS window_us,
        argMax(tuple(w.workload), w.last_window).1 AS workload, argMax(tuple(w.model), w.last_window).1 AS model, w.semantics_version AS semantics_version,
        sum(w.observed_us) AS observed_us, sum(greatest(toInt64(0), w.expected_us - greatest(toInt64(0), toUnixTimestamp64Micro(w.expected_until) - toUnixTimestamp64Micro(clock)))) AS expected_us,
        if(expected_us > 0, least(1, observed_us / expected_us), 0) AS coverage,
        if(sum(arraySum(w.`groups.stored_tokens`)) > 0, sum(arraySum(w.`groups.resolved_tokens`)) / sum(arraySum(w.`groups.stored_tokens`)), NULL) AS identity_coverage,
        multiIf(sum(w.observed_us) = 0 OR max(w.kv_connector IS NOT NULL), 'indeterminate', max(w.register != 'exact') OR coverage < 1, 'lower_bound', 'exact') AS register,
        arraySort(groupUniqArrayArray(w.reasons)) AS reasons,
        sum(w.batches) AS batches, sum(w.lost_batches) AS lost_batches, sum(w.refused_batches) AS refused_batches,
        sum(w.duplicate_batches) AS duplicate_batches, sum(w.unknown_events) AS unknown_events, uniqExactIf(w.life_id, w.life_id != '') AS lives,
        sum(w.scrapes) AS scrapes, sum(w.breaches_found) AS breaches_found, max(w.last_batch) AS last_batch,
        argMax(arraySum(w.`groups.resident_blocks`), w.last_window) AS resident_blocks, argMax(tuple(w.pool_blocks), w.last_window).1 AS pool_blocks,
        argMax(w.departed, w.last_window) AS departed
    FROM (SELECT * FROM rank_rollups FINAL) AS w
    GROUP BY w.grain, w.instance_id, w.dp_rank, w.window_start, w.semantics_version
) AS h
LEFT JOIN
(
    SELECT g.1 AS grain, instance_id, dp_rank, toDateTime(intDiv(toUnixTimestamp(at), g.2) * g.2, 'UTC') AS window_start, count() AS restarts
    FROM rank_events FINAL
    ARRAY JOIN [('5m', 300), ('1h', 3600), ('1d', 86400)] AS g
    WHERE kind = 'holder_reset' AND cause = 'restarted'
    GROUP BY grain, instance_id, dp_rank, window_start
) AS e USING (grain, instance_id, dp_rank, window_start)
COMMENT 'rank_health_5m, _1h and _1d in one: filter on one grain.';

CREATE OR REPLACE VIEW rank_health_5m AS SELECT * EXCEPT grain FROM rollup_rank_health WHERE grain = '5m'
COMMENT 'Is each rank seen, and is what it says believable? One row per rank and 5 minutes; coverage is observed_us / expected_us, with its reasons; lag_seconds: how long it had been silent at the end (NULL: no batch); lives and restarts of the engine; lost, refused and repeated batches; breaches_found: contradictions with the engine''s own metrics in so many scrapes; resident_blocks and pool_blocks at the end. Register: how repeat compute of the row may be read.';

CREATE OR REPLACE VIEW rank_health_1h AS SELECT * EXCEPT grain FROM rollup_rank_health WHERE grain = '1h'
COMMENT 'Is each rank seen, and is what it says believable? One row per rank and 1 hour; coverage is observed_us / expected_us, with its reasons; lag_seconds: how long it had been silent at the end (NULL: no batch); lives and restarts of the engine; lost, refused and repeated batches; breaches_found: contradictions with the engine''s own metrics in so many scrapes; resident_blocks and pool_blocks at the end. Register: how repeat compute of the row may be read.';

CREATE OR REPLACE VIEW rank_health_1d AS SELECT * EXCEPT grain FROM rollup_rank_health WHERE grain = '1d'
COMMENT 'Is each rank seen, and is what it says believable? One row per rank and 1 day; coverage is observed_us / expected_us, with its reasons; lag_seconds: how long it had been silent at the end (NULL: no batch); lives and restarts of the engine; lost, refused and repeated batches; breaches_found: contradictions with the engine''s own metrics in so many scrapes; resident_blocks and pool_blocks at the end. Register: how repeat compute of the row may be read.';

CREATE OR REPLACE VIEW rollup_coverage AS
SELECT
    grain, window_start, any(r.window_us) AS window_us, semantics_version, countIf(r.batches > 0) AS ranks_heard, count() AS ranks_expected,
    sum(r.observed_us) AS observed_us, sum(r.expected_us) AS expected_us, if(expected_us > 0, least(1, observed_us / expected_us), 0) AS coverage,
    min(r.coverage) AS lowest, countIf(r.coverage < 1) AS ranks_with_gaps, countIf(has(r.reasons, 'absent')) AS ranks_absent,
    sum(r.lost_batches) AS lost_batches, sum(r.refused_batches) AS refused_batches, sum(r.breaches_found) AS breaches_found,
    arraySort(groupUniqArrayArray(r.reasons)) AS reasons,
    multiIf(sum(r.observed_us) = 0, 'indeterminate', max(r.register != 'exact'), 'lower_bound', 'exact') AS register
FROM rollup_rank_health AS r
GROUP BY grain, window_start, semantics_version
COMMENT 'coverage_5m, _1h and _1d in one: filter on one grain.';

CREATE OR REPLACE VIEW coverage_5m AS SELECT * EXCEPT grain FROM rollup_coverage WHERE grain = '5m'
COMMENT 'How much of the fleet was demonstrably observed, and why not all? One row per 5 minutes; coverage is observed_us / expected_us over the ranks expected (a silent rank counts as unobserved), a share of 1; reasons are those of any rank; register: the best that a figure of the whole fleet can have then.';

CREATE OR REPLACE VIEW coverage_1h AS SELECT * EXCEPT grain FROM rollup_coverage WHERE grain = '1h'
COMMENT 'How much of the fleet was demonstrably observed, and why not all? One row per 1 hour; coverage is observed_us / expected_us over the ranks expected (a silent rank counts as unobserved), a share of 1; reasons are those of any rank; register: the best that a figure of the whole fleet can have then.';

CREATE OR REPLACE VIEW coverage_1d AS SELECT * EXCEPT grain FROM rollup_coverage WHERE grain = '1d'
COMMENT 'How much of the fleet was demonstrably observed, and why not all? One row per 1 day; coverage is observed_us / expected_us over the ranks expected (a silent rank counts as unobserved), a share of 1; reasons are those of any rank; register: the best that a figure of the whole fleet can have then.';

CREATE OR REPLACE VIEW coverage_gaps AS
SELECT
    instance_id, dp_rank, window_start, window_us, semantics_version, (expected_us - observed_us) / 1e6 AS missing_seconds, observed_us, expected_us, coverage, register,
    lost_batches, refused_batches, reasons
FROM rank_health_5m
WHERE observed_us < expected_us
COMMENT 'Where exactly was a rank not observed, and why? One row per rank and window of 5 minutes that was not wholly observed; unit: seconds not observed, batches. What interrupted it: view interruptions.';

CREATE OR REPLACE VIEW interruptions AS
SELECT
    instance_id, dp_rank, life_id, at, observed_at, kind, ifNull(cause, reason) AS reason, first_seq, last_seq,
    if(kind = 'loss', last_seq - first_seq + 1, NULL) AS batches_lost, payload_bytes, refused AS blocks_forgotten
FROM rank_events FINAL
WHERE kind != 'declaration'
COMMENT 'What interrupted each rank''s stream? One row per engine restart (holder_reset), lost range of batches, refused payload, identity given up (identity_refused) and departure; exact: these are what forwarders declared. at: engine time (1970: none known yet), observed_at: the forwarder''s clock.';

CREATE OR REPLACE VIEW top_shared_prefixes AS
SELECT
    as_of, place, semantics_version, hex(content_id) AS content, hex(head_content_id) AS head_content, depth_tokens, tokens, blocks, copies, instances,
    extra_tokens, extra_blocks, extra_bytes, ranks, workloads, models, first_seen, coverage, register, reasons
FROM shared_prefixes FINAL
WHERE as_of = (SELECT max(as_of) FROM shared_prefixes)
COMMENT 'Which prefixes have the most extra mass now? One row per prefix, the longest chains of content with the same holders, at the newest instant told; unit: tokens, blocks and bytes beyond the first copy, as coverage and register say. At other instants: table shared_prefixes.';

CREATE OR REPLACE VIEW deploys_declared AS
SELECT deploy_id, label, at, workload, model
FROM deploys FINAL
WHERE NOT removed
COMMENT 'Which deploys were declared, and for when? One row per deploy that was not taken back; at: engine time; workload and model: what it concerned (NULL: all). Exact: what people declared.';

CREATE OR REPLACE VIEW deploy_effect AS
WITH
    (windows, x) -> arrayMap(n -> toDateTime(n * 300, 'UTC'), range(toUInt32(intDiv(x, 300)), toUInt32(intDiv(x, 300) + windows))) AS from_window
SELECT
    deploy_id, label, at, workload, model, figure, unit, before, after,
    if(empty(why), after - before, NULL) AS change,
    empty(why) AS comparable,
    why, before_coverage, after_coverage, before_register, after_register, before_windows, after_windows
FROM
(
    SELECT
        deploy_id, label, at, workload, model, f.1 AS figure, f.2 AS unit, f.3 AS before, f.4 AS after,
        before_coverage, after_coverage, before_register, after_register, before_windows, after_windows,
        arrayConcat(
            if(before_windows = 0 OR after_windows = 0, ['a side holds no windows'], []),
            if(length(rules) > 1, ['the rules version differs'], []),
            if(length(epochs) > 1 OR has(epochs, -1), ['the key epoch differs'], []),
            if(before_windows > 0 AND after_windows > 0 AND least(before_coverage, after_coverage) < 0.8, ['coverage is below 80 %'], []),
            if(before_windows > 0 AND after_windows > 0 AND (before_register = 'indeterminate' OR after_register = 'indeterminate' OR before IS NULL OR after IS NULL), ['it cannot be measured'], [])
        ) AS why
    FROM
    (
        SELECT
            d.deploy_id AS deploy_id, any(d.label) AS label, any(d.at) AS at, any(d.workload) AS workload, any(d.model) AS model,
            sumIf(evicted_tokens, side = 'before') AS b_evicted, sumIf(evicted_tokens, side = 'after') AS a_evicted, sumIf(cleared_tokens, side = 'before') AS b_cleared, sumIf(cleared_tokens, side = 'after') AS a_cleared, sumIf(restarted_tokens, side = 'before') AS b_restarted, sumIf(restarted_tokens, side = 'after') AS a_restarted, sumIf(concurrent_tokens, side = 'before') AS b_concurrent, sumIf(concurrent_tokens, side = 'after') AS a_concurrent,
            uniqExactIf(r.window_start, r.side = 'before') AS before_windows, uniqExactIf(r.window_start, r.side = 'after') AS after_windows,
            before_windows * 300 AS b_seconds, after_windows * 300 AS a_seconds,
            groupUniqArray(r.semantics_version) AS rules, groupUniqArray(r.key_epoch) AS epochs,
            if(sumIf(r.expected_us, r.side = 'before') > 0, least(1, sumIf(r.observed_us, r.side = 'before') / sumIf(r.expected_us, r.side = 'before')), 0) AS before_coverage,
            if(sumIf(r.expected_us, r.side = 'after') > 0, least(1, sumIf(r.observed_us, r.side = 'after') / sumIf(r.expected_us, r.side = 'after')), 0) AS after_coverage,
            multiIf(countIf(r.side = 'before' AND r.measurable) = 0 OR sumIf(r.observed_us, r.side = 'before') = 0, 'indeterminate', countIf(r.side = 'before' AND r.register != 'exact') > 0, 'lower_bound', 'exact') AS before_register,
            multiIf(countIf(r.side = 'after' AND r.measurable) = 0 OR sumIf(r.observed_us, r.side = 'after') = 0, 'indeterminate', countIf(r.side = 'after' AND r.register != 'exact') > 0, 'lower_bound', 'exact') AS after_register,
            [('repeat compute, evicted', 'tokens per hour', if(b_seconds > 0, b_evicted * 3600 / b_seconds, NULL), if(a_seconds > 0, a_evicted * 3600 / a_seconds, NULL)), ('repeat compute, cleared', 'tokens per hour', if(b_seconds > 0, b_cleared * 3600 / b_seconds, NULL), if(a_seconds > 0, a_cleared * 3600 / a_seconds, NULL)), ('repeat compute, restarted', 'tokens per hour', if(b_seconds > 0, b_restarted * 3600 / b_seconds, NULL), if(a_seconds > 0, a_restarted * 3600 / a_seconds, NULL)), ('repeat compute, concurrent', 'tokens per hour', if(b_seconds > 0, b_concurrent * 3600 / b_seconds, NULL), if(a_seconds > 0, a_concurrent * 3600 / a_seconds, NULL))] AS figures
        FROM deploys_declared AS d
        INNER JOIN
        (
            SELECT s.deploy_id AS deploy_id, s.side AS side, r.*
            FROM repeat_compute_5m AS r
            INNER JOIN
            (
                SELECT deploy_id, s.1 AS side, arrayJoin(s.2) AS window_start
                FROM (SELECT deploy_id, toUnixTimestamp(at) AS x FROM deploys_declared)
                ARRAY JOIN [('before', from_window(12, x - 3600)), ('after', from_window(12, x + 299))] AS s
            ) AS s USING (window_start)
            WHERE r.window_start IN
            (
                SELECT arrayJoin(from_window(26, x - 3600)) FROM (SELECT toUnixTimestamp(at) AS x FROM deploys_declared)
            )
        ) AS r ON r.deploy_id = d.deploy_id
        WHERE (d.workload IS NULL OR d.workload = r.workload) AND (d.model IS NULL OR d.model = r.model)
        GROUP BY d.deploy_id
    )
    ARRAY JOIN figures AS f
    UNION ALL
    SELECT
        deploy_id, label, at, workload, model, f.1 AS figure, f.2 AS unit, f.3 AS before, f.4 AS after,
        before_coverage, after_coverage, f.5 AS before_register, f.6 AS after_register, before_windows, after_windows,
        arrayConcat(
            if(before_windows = 0 OR after_windows = 0, ['a side holds no windows'], []),
            if(length(rules) > 1, ['the rules version differs'], []),
            if(length(epochs) > 1 OR has(epochs, -1), ['the key epoch differs'], []),
            if(before_windows > 0 AND after_windows > 0 AND least(before_coverage, after_coverage) < 0.8, ['coverage is below 80 %'], []),
            if(before_windows > 0 AND after_windows > 0 AND (before_register = 'indeterminate' OR after_register = 'indeterminate' OR before IS NULL OR after IS NULL), ['it cannot be measured'], [])
        ) AS why
    FROM
    (
        SELECT
            d.deploy_id AS deploy_id, any(d.label) AS label, any(d.at) AS at, any(d.workload) AS workload, any(d.model) AS model,
            uniqExactIf(r.window_start, r.side = 'before') AS before_windows, uniqExactIf(r.window_start, r.side = 'after') AS after_windows,
            groupUniqArray(r.semantics_version) AS rules, groupUniqArray(ifNull(r.key_epoch, -1)) AS epochs,
            if(sumIf(r.expected_us, r.side = 'before') > 0, sumIf(r.observed_us, r.side = 'before') / sumIf(r.expected_us, r.side = 'before'), 0) AS before_coverage,
            if(sumIf(r.expected_us, r.side = 'after') > 0, sumIf(r.observed_us, r.side = 'after') / sumIf(r.expected_us, r.side = 'after'), 0) AS after_coverage,
            [
                ('duplicate footprint, inside', 'extra tokens, mean', sumIf(r.inside_token_us, r.side = 'before') / nullIf(sumIf(r.covered_us, r.side = 'before'), 0), sumIf(r.inside_token_us, r.side = 'after') / nullIf(sumIf(r.covered_us, r.side = 'after'), 0),
                    multiIf(countIf(r.side = 'before' AND r.inside_register = 'indeterminate') > 0, 'indeterminate', countIf(r.side = 'before' AND r.inside_register != 'exact') > 0, 'lower_bound', 'exact'), multiIf(countIf(r.side = 'after' AND r.inside_register = 'indeterminate') > 0, 'indeterminate', countIf(r.side = 'after' AND r.inside_register != 'exact') > 0, 'lower_bound', 'exact')),
                ('duplicate footprint, between', 'extra tokens, mean', sumIf(r.between_token_us, r.side = 'before') / nullIf(sumIf(r.covered_us, r.side = 'before'), 0), sumIf(r.between_token_us, r.side = 'after') / nullIf(sumIf(r.covered_us, r.side = 'after'), 0),
                    multiIf(countIf(r.side = 'before' AND r.between_register = 'indeterminate') > 0, 'indeterminate', countIf(r.side = 'before' AND r.between_register != 'exact') > 0, 'lower_bound', 'exact'), multiIf(countIf(r.side = 'after' AND r.between_register = 'indeterminate') > 0, 'indeterminate', countIf(r.side = 'after' AND r.between_register != 'exact') > 0, 'lower_bound', 'exact'))
            ] AS figures
        FROM deploys_declared AS d
        INNER JOIN
        (
            SELECT s.deploy_id AS deploy_id, s.side AS side, r.*
            FROM
            (
                SELECT * FROM duplicate_rollups FINAL
                WHERE grain = '5m' AND scope IN ('fleet', 'workload', 'model') AND tier = 'GPU' AND window_start IN
                (
                    SELECT arrayJoin(from_window(26, x - 3600)) FROM (SELECT toUnixTimestamp(at) AS x FROM deploys_declared)
                )
            ) AS r
            INNER JOIN
            (
                SELECT deploy_id, s.1 AS side, arrayJoin(s.2) AS window_start
                FROM (SELECT deploy_id, toUnixTimestamp(at) AS x FROM deploys_declared)
                ARRAY JOIN [('before', from_window(12, x - 3600)), ('after', from_window(12, x + 299))] AS s
            ) AS s USING (window_start)
        ) AS r ON r.deploy_id = d.deploy_id
        WHERE r.scope = multiIf(d.workload IS NOT NULL AND d.model IS NOT NULL, 'none', d.workload IS NOT NULL, 'workload', d.model IS NOT NULL, 'model', 'fleet')
            AND r.scope_key = coalesce(d.workload, d.model, '')
        GROUP BY d.deploy_id
    )
    ARRAY JOIN figures AS f
)
COMMENT 'What changed with each declared deploy? One row per deploy and figure: the hour before against the hour after, in whole windows of 5 minutes, without the one in which it happened; unit as named, lower bounds with the coverage and register of either side. change is NULL, and why says the reasons, where the sides cannot be compared. Other spans: kvcensus show deploy.';
