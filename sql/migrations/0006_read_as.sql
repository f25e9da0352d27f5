-- How the figures of the last two views that did not say so may be read.

CREATE OR REPLACE VIEW metric_breaches AS
SELECT
    instance_id, dp_rank, life_id, window_start, semantics_version, is_final,
    observed_us / window_us AS coverage, register, reasons,
    kind, at, scraped_at, found, bound, breaches_found, pool_blocks
FROM rank_windows FINAL
ARRAY JOIN
    `breaches.kind` AS kind,
    `breaches.at` AS at,
    `breaches.scraped_at` AS scraped_at,
    `breaches.found` AS found,
    `breaches.bound` AS bound
COMMENT 'Where does what a rank''s events say contradict the engine''s own metrics? One row per contradiction, the first ten of each window (breaches_found: all); unit: blocks. cached_over_pool: found are counted as cached, the pool has bound. in_use_over_cached: found are in use, at most bound are cached or being filled. Coverage, register and reasons are those of the window.';

CREATE OR REPLACE VIEW recomputed_blocks AS
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
FROM (SELECT * FROM recomputes FINAL) AS r
ASOF LEFT JOIN
(
    SELECT instance_id, dp_rank, life_id, semantics_version, window_start, window_us, observed_us, register, reasons, workload, model, is_final
    FROM rank_windows FINAL
) AS w
ON r.instance_id = w.instance_id AND r.dp_rank = w.dp_rank AND r.life_id = w.life_id
    AND r.semantics_version = w.semantics_version AND r.back_at >= w.window_start
COMMENT 'Which blocks were computed again, and how far was the rank seen then? One row per block; unit: tokens, microseconds away and of GPU time (an estimate; NULL: no prefill rate was known). Coverage, register and reasons are those of the window in which it came back. Every cache group has its own rows: figures count the primary group.';
