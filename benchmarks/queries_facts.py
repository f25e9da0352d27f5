"""What forwarders and engines say, and the facts of one day: life signs, metrics, declarations, block events. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.queries_rows import BATCHES_PER_SECOND, BLOCK_LAG, WINDOW_S, Fleet, Insert, life_id, rank_columns

METRICS_EVERY = 25
"""Every how manieth rank has its engine's metrics stored."""

_RECURS = 60_000
"""After so many batches a rank stores the same content again."""


def lifecycle(fleet: Fleet, day: int) -> Iterator[Insert]:
    """A heartbeat every ten seconds of every rank; a start before the first."""
    rows, each = fleet.ranks * fleet.day_windows, fleet.day_windows
    yield Insert("lifecycle", rows, _lifecycle(fleet, day, rows, f"intDiv(n, {each})", f"(n % {each}) * {WINDOW_S} + 3", "heartbeat"))
    if day == 0:
        yield Insert("lifecycle", fleet.ranks, _lifecycle(fleet, day, fleet.ranks, "n", "1", "start"))


def _lifecycle(fleet: Fleet, day: int, rows: int, rank: str, second: str, kind: str) -> str:
    return f"""
    INSERT INTO lifecycle (
        instance_id, dp_rank, incarnation, at, kind, life_id, batches, blocks_stored, blocks_removed, unresolved_blocks, unknown_events,
        refused, lost, duplicates, replayed, publisher_restarts, canary, key_epoch, reason, forwarder_version, endpoint, msgs_seen,
        oversized, malformed, too_large, events_ingested, identity_conflicts, shared_contents, content_bridge_entries,
        content_bridge_evicted, rank_mismatches, connections, spool_bytes, spool_messages, spool_dropped, scrapes, scrapes_failed,
        rss_bytes, last_message_at, heartbeat_ms, staleness_ms, declared_more
    )
    WITH
        {rank_columns(rank)},
        toInt64({fleet.day_s(day)} + {second}) AS t,
        cityHash64(r, t) AS h,
        t - {fleet.start_s} AS up,
        toInt64(up * busy * 30) + toInt64(h % 50) AS sent
    SELECT
        instance_name, rank_number, lower(hex(cityHash64(r, 'forwarder'))), fromUnixTimestamp64Milli(t * 1000 + toInt64(h % 700), 'UTC'),
        '{kind}', {life_id(fleet, "t")}, sent, sent * 24, sent * 23, intDiv(sent, 900), 0, 0, intDiv(up, 60000) * 3, intDiv(up, 50000),
        intDiv(up, 40000) * 7, 0, '5f1d0c77a1b2c3d4', 1, NULL, '0.2.0', concat('tcp://127.0.0.1:', toString(5557 + rank_number)),
        sent + intDiv(up, 50000), 0, 0, 0, sent * 4, 0, intDiv(sent, 77), least(sent * 24, 400000), greatest(0, sent * 24 - 400000), 0, 1,
        if(h % 40 = 0, toInt64(h % 900000), 0), if(h % 40 = 0, toInt64(h % 90), 0), 0, intDiv(up, 5), 0,
        180000000 + toInt64(h % 4000000), fromUnixTimestamp64Milli(t * 1000 - toInt64(h % 300), 'UTC'), 10000, 60000, 0
    FROM (SELECT number AS n FROM numbers_mt({rows}))
    """


def engine_metrics(fleet: Fleet, day: int) -> Iterator[Insert]:
    """A page every ten seconds of every :data:`METRICS_EVERY` th rank."""
    ranks = -(-fleet.ranks // METRICS_EVERY)
    bounds = "[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1., 2.5, 5., 7.5, 10., 20., 40., 80., inf]"
    yield Insert(
        "engine_metrics",
        ranks * fleet.day_windows,
        f"""
    INSERT INTO engine_metrics (
        instance_id, dp_rank, life_id, incarnation, at, process_started, model_name, kv_cache_usage, num_gpu_blocks, block_size,
        requests_running, requests_waiting, preemptions, prefix_cache_queries, prefix_cache_hits, external_prefix_cache_queries,
        external_prefix_cache_hits, prompt_tokens, prompt_tokens_cached, generation_tokens, `histograms.name`, `histograms.bounds`,
        `histograms.counts`, `histograms.sum`
    )
    WITH
        {rank_columns(f"intDiv(n % {ranks * 360}, 360) * {METRICS_EVERY}")},
        toInt64({fleet.day_s(day)} + intDiv(n, {ranks * 360}) * 3600 + (n % 360) * {WINDOW_S} + 5) AS t,
        cityHash64(r, t) AS h,
        t - {fleet.start_s} AS up,
        toInt64(up * busy * 9000) + toInt64(h % 20000) AS prompted,
        toInt64(up * busy * 3) + toInt64(h % 5) AS answered,
        arrayMap(i -> intDiv(answered * least(i * i, 361), 361), range(20)) AS counts
    SELECT
        instance_name, rank_number, {life_id(fleet, "t")}, lower(hex(cityHash64(r, 'forwarder'))),
        fromUnixTimestamp64Milli(t * 1000 + toInt64(h % 700), 'UTC'),
        fromUnixTimestamp64Micro({(fleet.start_s - 4_000) * 1_000_000}, 'UTC'),
        model_name, 0.3 + busy / 2 + (h % 1000) / 10000, 30000 + (r % 7) * 2500, 16, 4 + toInt64(h % 28), toInt64(h2 % 5), intDiv(up, 9000),
        prompted * 2, toInt64(prompted * 0.6), NULL, NULL, prompted * 2, toInt64(prompted * 0.6), answered * 220,
        ['request_prefill_time', 'time_to_first_token'], [{bounds}, {bounds}], [counts, counts], [answered * 0.21, answered * 0.26]
    FROM (SELECT number AS n, cityHash64(number) AS h2 FROM numbers_mt({ranks * fleet.day_windows}))
    """,
    )


def rank_events(fleet: Fleet) -> Iterator[Insert]:
    """A declaration of each life, the restarts, and the losses that the windows tell of, which must be there before."""
    columns = """
        instance_id, dp_rank, life_id, seq, kind, at, observed_at, incarnation, reason, boundary, cause, first_seq, last_seq,
        reuse_reporting, removals, workload, model, kv_connector, key_epoch, canary, forwarder_version, engine_profile, gpus_per_rank,
        kv_bytes_per_token, prefill_rate, heartbeat_ms, staleness_ms, max_payload_bytes"""
    restart = f"({fleet.start_s + fleet.days * 51_840} + (r % 1000) * 37)"
    nothing = ", ".join(["NULL"] * 14)
    twice = -(-fleet.ranks // 10)
    lives = f"(SELECT number AS n, 0 AS again FROM numbers({fleet.ranks}) UNION ALL SELECT number * 10, 1 FROM numbers({twice}))"
    rows = fleet.ranks + twice
    when = f"toInt64(if(again = 1, {restart}, {fleet.start_s}))"
    yield Insert(
        "rank_events",
        rows,
        f"""
    INSERT INTO rank_events ({columns})
    WITH {rank_columns("n")}, {when} AS t
    SELECT instance_name, rank_number, {life_id(fleet, "t")}, again, 'declaration',
        if(again = 1, fromUnixTimestamp64Micro(t * 1000000, 'UTC'), fromUnixTimestamp64Micro(0, 'UTC')),
        fromUnixTimestamp64Milli(t * 1000 + 40, 'UTC'), lower(hex(cityHash64(r, 'forwarder'))), NULL, NULL, NULL, NULL, NULL,
        reuse, 'per_copy', workload_name, model_name, connector, 1, '5f1d0c77a1b2c3d4', '0.2.0', 'vllm', gpus,
        if(inst % 9 = 8, NULL, kv_bytes), rate, 10000, 60000, 67108864
    FROM {lives}
    """,
    )
    yield Insert(
        "rank_events",
        twice,
        f"""
    INSERT INTO rank_events ({columns})
    WITH {rank_columns("n")}, toInt64({restart}) AS t
    SELECT instance_name, rank_number, {life_id(fleet, "t")}, 0, 'holder_reset', fromUnixTimestamp64Micro(t * 1000000, 'UTC'),
        fromUnixTimestamp64Milli(t * 1000 + 30, 'UTC'), lower(hex(cityHash64(r, 'forwarder'))), 'sequence stepped back',
        fromUnixTimestamp64Micro(t * 1000000, 'UTC'), 'restarted', NULL, NULL, {nothing}, NULL
    FROM (SELECT number * 10 AS n FROM numbers({twice}))
    """,
    )
    yield Insert(
        "rank_events",
        0,
        f"""
    INSERT INTO rank_events ({columns})
    SELECT instance_id, dp_rank, life_id, version % 1000000007, 'loss', window_start + toIntervalMillisecond(4000),
        window_start + toIntervalMillisecond(4040), 'forwarder', 'replay had less', NULL, NULL, version % 1000000007,
        version % 1000000007 + lost_batches - 1, {nothing}, NULL
    FROM rank_windows WHERE lost_batches > 0
    """,
    )


def a_deploy(fleet: Fleet) -> str:
    """The id of a deploy in the middle of the data."""
    return f"{fleet.days // 2 * 2:08d}"


def deploys(fleet: Fleet) -> Iterator[Insert]:
    """Two a day."""
    yield Insert(
        "deploys",
        fleet.days * 2,
        f"""
    INSERT INTO deploys (deploy_id, version, label, at, workload, model, removed)
    SELECT leftPad(toString(number), 8, '0'), 1, concat('build ', toString(4100 + number)),
        fromUnixTimestamp64Micro(toInt64({fleet.start_s} + number * 43200 + 1800) * 1000000, 'UTC'),
        if(number % 3 = 0, 'chat', NULL), NULL, number % 10 = 9
    FROM numbers({fleet.days * 2})
    """,
    )


def facts(fleet: Fleet) -> Iterator[Insert]:
    """The last day, block by block, of every :attr:`Fleet.fact_stride` th rank."""
    ranks = min(fleet.fact_ranks, fleet.ranks)
    day_s = fleet.day_s(fleet.days - 1)
    per_batch = max(2, fleet.fact_rate // BATCHES_PER_SECOND)
    runs = per_batch // 2
    again = max(1, runs // 5)
    per_hour = 3600 * BATCHES_PER_SECOND
    batches_of_rank = (
        f"toInt64(({day_s} - {fleet.start_s}) * {BATCHES_PER_SECOND} + intDiv(n, {ranks * per_hour}) * {per_hour} + n % {per_hour})"
    )
    with_batch = f"""
        {rank_columns(f"intDiv(n % {ranks * per_hour}, {per_hour}) * {fleet.fact_stride}")},
        {batches_of_rank} AS batch,
        toInt64({fleet.start_s}) * 1000000 + batch * {1_000_000 // BATCHES_PER_SECOND} AS us,
        cityHash64(r, batch) AS h,
        us + toInt64(h % 150000) AS at_us,
        {life_id(fleet, "intDiv(us, 1000000)")} AS life"""
    batches = ranks * fleet.day_hours * per_hour
    yield Insert(
        "block_events",
        batches * runs * 2,
        f"""
    INSERT INTO block_events (
        instance_id, dp_rank, life_id, seq, event_index, block_index, at, observed_at, kind, group_idx, tier, locality, n_tokens, block_id,
        content_id, parent_id, parent_unknown, parent_content_id, spec_kind, lora_name, reused
    )
    WITH {with_batch},
        j < {runs} AS stores,
        batch * {runs} + j % {runs} - if(stores, 0, {BLOCK_LAG}) AS block_number,
        block_number - 1 AS before,
        s -> sipHash128(r, 'block', s) AS block,
        s -> if(s % {runs} < {again}, sipHash128(r % 3, 'content', s % {_RECURS * runs}), sipHash128(r, 'content', s)) AS content
    SELECT
        instance_name, rank_number, life, batch, if(stores, 0, j - {runs} + 1), if(stores, j, 0), fromUnixTimestamp64Micro(at_us, 'UTC'),
        fromUnixTimestamp64Milli(intDiv(at_us, 1000) + 2 + toInt64(h % 9), 'UTC'), if(stores, 'store', 'evict'), 0, 'GPU', NULL, 16,
        block(block_number), if(stores, content(block_number), NULL), if(stores AND batch % 3 != 0, block(before), NULL), false,
        if(stores AND batch % 3 != 0, content(before), NULL), if(stores, 'full_attention', NULL), NULL, false
    FROM (SELECT intDiv(number, {runs * 2}) AS n, toInt64(number % {runs * 2}) AS j FROM numbers_mt({batches * runs * 2}))
    """,
    )
    yield Insert(
        "recomputes",
        batches * again,
        f"""
    INSERT INTO recomputes (
        instance_id, dp_rank, group_idx, life_id, seq, block_index, semantics_version, version, cause, block_id, content_id,
        parent_content_id, parent_block_id, tokens, stored_at, lost_at, back_at, elapsed_us, gpu_us
    )
    WITH {with_batch},
        batch * {runs} + j AS block_number,
        s -> sipHash128(r, 'block', s) AS block,
        s -> if(s % {runs} < {again}, sipHash128(r % 3, 'content', s % {_RECURS * runs}), sipHash128(r, 'content', s)) AS content,
        toInt64(exp2(21 + h % 11)) + toInt64(h % 2000000) AS away
    SELECT
        instance_name, rank_number, 0, life, batch, j, 1, {1 << 62} + batch, if(h % 40 = 0, 'cleared', 'evicted'), block(block_number),
        content(block_number), content(block_number - 1), block(block_number - 1), 16,
        fromUnixTimestamp64Micro(at_us - away - 800000000, 'UTC'), fromUnixTimestamp64Micro(at_us - away, 'UTC'),
        fromUnixTimestamp64Micro(at_us, 'UTC'), away, toInt64(16 / rate * gpus * 1e6)
    FROM (SELECT intDiv(number, {again}) AS n, toInt64(number % {again}) AS j FROM numbers_mt({batches * again}))
    """,
    )
    yield Insert(
        "batches",
        batches,
        f"""
    INSERT INTO batches (
        instance_id, dp_rank, life_id, seq, at, observed_at, incarnation, partition, offset, skipped, unknown_events, unresolved_blocks,
        events, blocks, empty_events
    )
    WITH {with_batch}
    SELECT
        instance_name, rank_number, life, batch, fromUnixTimestamp64Micro(at_us, 'UTC'),
        fromUnixTimestamp64Milli(intDiv(at_us, 1000) + 2 + toInt64(h % 9), 'UTC'), lower(hex(cityHash64(r, 'forwarder'))),
        toInt32(r % 4), batch * 7 + toInt64(h % 5), 0, 0, 0, {runs + 1}, {runs * 2}, ''
    FROM (SELECT number AS n FROM numbers_mt({batches}))
    """,
    )
    pages = ranks * fleet.day_windows
    yield Insert(
        "rank_messages",
        pages,
        f"""
    INSERT INTO rank_messages (
        instance_id, dp_rank, life_id, seq, kind, at, observed_at, incarnation, partition, offset, skipped, body
    )
    WITH {rank_columns(f"intDiv(n, {fleet.day_windows}) * {fleet.fact_stride}")},
        toInt64({day_s} + (n % {fleet.day_windows}) * {WINDOW_S} + 5) AS t,
        (t - {fleet.start_s}) * {BATCHES_PER_SECOND} AS batch,
        cityHash64(r, t) AS h
    SELECT
        instance_name, rank_number, {life_id(fleet, "t")}, batch, 'scrape', fromUnixTimestamp64Micro(t * 1000000, 'UTC'),
        fromUnixTimestamp64Milli(t * 1000 + toInt64(h % 700), 'UTC'), lower(hex(cityHash64(r, 'forwarder'))), toInt32(r % 4),
        batch * 7 + 6, 0, concat('{{"at_ms":', toString(t * 1000 + h % 700), ',"kv_cache_usage":0.', toString(h % 1000),
        ',"num_gpu_blocks":30000,"block_size":16,"requests_running":', toString(h % 28),
        ',"prompt_tokens":', toString(batch * 900 + h % 500),
        '}}')
    FROM (SELECT number AS n FROM numbers_mt({pages}))
    """,
    )
