-- Views for people. Each comment says the question, the unit and how the figure may be read.

CREATE OR REPLACE VIEW rank_window_groups AS
SELECT
    instance_id, dp_rank, life_id, window_start, window_us, window_end, semantics_version, version, is_final, workload, model,
    group_idx, spec_kind, gpu, stored_blocks, stored_tokens, resolved_tokens, evicted_blocks, evicted_tokens, cleared_blocks,
    cleared_tokens, restarted_blocks, restarted_tokens, unjoined_evicts, reloaded_blocks, reloaded_tokens,
    recompute_evicted_blocks, recompute_evicted_tokens, recompute_cleared_blocks, recompute_cleared_tokens,
    recompute_restarted_blocks, recompute_restarted_tokens, recompute_concurrent_blocks, recompute_concurrent_tokens,
    recompute_ambiguous_blocks, recompute_ambiguous_tokens, resident_blocks, resident_tokens
FROM rank_windows FINAL
ARRAY JOIN
    `groups.group_idx` AS group_idx,
    `groups.spec_kind` AS spec_kind,
    `groups.gpu` AS gpu,
    `groups.stored_blocks` AS stored_blocks,
    `groups.stored_tokens` AS stored_tokens,
    `groups.resolved_tokens` AS resolved_tokens,
    `groups.evicted_blocks` AS evicted_blocks,
    `groups.evicted_tokens` AS evicted_tokens,
    `groups.cleared_blocks` AS cleared_blocks,
    `groups.cleared_tokens` AS cleared_tokens,
    `groups.restarted_blocks` AS restarted_blocks,
    `groups.restarted_tokens` AS restarted_tokens,
    `groups.unjoined_evicts` AS unjoined_evicts,
    `groups.reloaded_blocks` AS reloaded_blocks,
    `groups.reloaded_tokens` AS reloaded_tokens,
    `groups.recompute_evicted_blocks` AS recompute_evicted_blocks,
    `groups.recompute_evicted_tokens` AS recompute_evicted_tokens,
    `groups.recompute_cleared_blocks` AS recompute_cleared_blocks,
    `groups.recompute_cleared_tokens` AS recompute_cleared_tokens,
    `groups.recompute_restarted_blocks` AS recompute_restarted_blocks,
    `groups.recompute_restarted_tokens` AS recompute_restarted_tokens,
    `groups.recompute_concurrent_blocks` AS recompute_concurrent_blocks,
    `groups.recompute_concurrent_tokens` AS recompute_concurrent_tokens,
    `groups.recompute_ambiguous_blocks` AS recompute_ambiguous_blocks,
    `groups.recompute_ambiguous_tokens` AS recompute_ambiguous_tokens,
    `groups.resident_blocks` AS resident_blocks,
    `groups.resident_tokens` AS resident_tokens
COMMENT 'Which cache group did what in which window? One row per rank, life, window and group; unit: blocks and tokens. Tokens count once per position: use the primary group only (view repeat_compute).';

CREATE OR REPLACE VIEW life_primary_groups AS
SELECT
    instance_id,
    dp_rank,
    life_id,
    semantics_version,
    argMin(group_idx, (multiIf(in_gpu AND (kind IS NULL OR kind IN ('full_attention', 'mla_attention', 'sink_full_attention')), 0, in_gpu, 1, 2), group_idx)) AS primary_group
FROM
(
    SELECT instance_id, dp_rank, life_id, semantics_version, group_idx, max(gpu) AS in_gpu, max(spec_kind) AS kind
    FROM life_groups
    GROUP BY instance_id, dp_rank, life_id, semantics_version, group_idx
)
GROUP BY instance_id, dp_rank, life_id, semantics_version
COMMENT 'Which cache group of each process life counts for tokens? The lowest GPU group that holds the whole context; without one, the lowest GPU group; without any, the lowest.';

CREATE OR REPLACE VIEW repeat_compute AS
WITH indexOf(w.`groups.group_idx`, p.primary_group) AS i
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
    w.observed_us / w.window_us AS coverage,
    w.kv_connector IS NULL AS measurable,
    if(measurable, w.`groups.recompute_evicted_tokens`[i], NULL) AS evicted_tokens,
    if(measurable, w.`groups.recompute_evicted_blocks`[i], NULL) AS evicted_blocks,
    if(measurable, w.`groups.recompute_cleared_tokens`[i], NULL) AS cleared_tokens,
    if(measurable, w.`groups.recompute_cleared_blocks`[i], NULL) AS cleared_blocks,
    if(measurable, w.`groups.recompute_restarted_tokens`[i], NULL) AS restarted_tokens,
    if(measurable, w.`groups.recompute_restarted_blocks`[i], NULL) AS restarted_blocks,
    if(measurable AND w.reuse_reporting != 'unlabelled', w.`groups.recompute_concurrent_tokens`[i], NULL) AS concurrent_tokens,
    if(measurable AND w.reuse_reporting != 'unlabelled', w.`groups.recompute_concurrent_blocks`[i], NULL) AS concurrent_blocks,
    if(measurable, w.`groups.recompute_ambiguous_tokens`[i], NULL) AS ambiguous_reload_tokens,
    if(measurable, w.`groups.recompute_ambiguous_blocks`[i], NULL) AS ambiguous_reload_blocks,
    if(w.reuse_reporting != 'unlabelled', w.`groups.stored_tokens`[i], NULL) AS stored_tokens,
    w.`groups.evicted_tokens`[i] AS removed_tokens,
    w.`groups.resident_tokens`[i] AS resident_tokens
FROM (SELECT * FROM rank_windows FINAL) AS w
LEFT JOIN life_primary_groups AS p USING (instance_id, dp_rank, life_id, semantics_version)
COMMENT 'What was computed again, by cause? One row per rank, life and window, from the primary group; unit: tokens and blocks, lower bounds at the given coverage. The causes are never added together. NULL: cannot be told for this rank.';

CREATE OR REPLACE VIEW duplicate_footprint AS
SELECT
    scope,
    nullIf(scope_key, '') AS scope_key,
    tier,
    window_start,
    window_us,
    as_of,
    semantics_version,
    is_final,
    shards_reported >= shards AS complete,
    toUnixTimestamp64Micro(as_of) - toUnixTimestamp64Micro(window_start) AS covered_us,
    if(covered_us > 0, (toInt128(inside_token_us) + between_token_us) / covered_us, 0) AS extra_tokens_mean,
    if(covered_us > 0, inside_token_us / covered_us, 0) AS inside_tokens_mean,
    if(covered_us > 0, between_token_us / covered_us, 0) AS between_tokens_mean,
    extra_tokens_max,
    inside_tokens_end + between_tokens_end AS extra_tokens_end,
    if(covered_us > 0, (toInt128(inside_block_us) + between_block_us) / covered_us, 0) AS extra_blocks_mean,
    extra_blocks_max,
    inside_blocks_end + between_blocks_end AS extra_blocks_end
FROM duplicate_windows FINAL
COMMENT 'How much KV cache holds content that another rank holds too? One row per scope, tier and window; unit: extra copies in tokens and blocks, means weighted by time. A lower bound; filter on one scope and one tier.';
