"""The bridge between engine hashes and content ids: written down, read back, bounded, and what it forgets declared."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from producers.identity import Identity, IdentityKey
from producers.resolver import Learned, RankResolver
from producers.wire import Event, Removed, Stored, WireBatch
from schemas.records import NO_ID, Batch, EngineProfile, IdentityRefused

KEY = IdentityKey(bytes(range(32)), bytes(32))
LARGE = 10_000


def resolver(max_blocks: int = LARGE, profile: EngineProfile = "vllm") -> RankResolver:
    return RankResolver(Identity(KEY, "m"), KEY, max_blocks, profile=profile, collect_learned=True)


def stored(*hashes: int, parent: int | None = None, size: int = 4, group: int = 0, **more: Any) -> Stored:
    """A store whose tokens are its hashes."""
    tokens = [block_hash for block_hash in hashes for _ in range(size)]
    return Stored(block_hashes=list(hashes), block_size=size, parent_block_hash=parent, token_ids=tokens, group_idx=group, **more)


def bare(*hashes: int, size: int = 4, group: int = 0) -> Stored:
    """A store that names no tokens."""
    return Stored(block_hashes=list(hashes), block_size=size, group_idx=group)


def resolve(target: RankResolver, *events: Event, at_us: int = 1) -> Batch:
    return target.resolve(WireBatch(at_us, list(events)))


def test_what_is_learned_is_given_out_once() -> None:
    target = resolver()
    resolve(target, stored(1, 2), bare(3, group=1), Removed(block_hashes=[9]))
    first = target.take_learned()
    assert [(block_hash, size, group) for block_hash, size, _, group in first] == [(1, 4, 0), (2, 4, 0), (3, 4, 1)]
    assert [content is None for _, _, content, _ in first] == [False, False, True]
    assert target.take_learned() == []
    resolve(target, stored(1, 2), stored(3, parent=2))  # two are known, the third is now known for what it is
    (changed,) = target.take_learned()
    assert changed[:2] == (3, 4)
    assert changed[2] is not None
    assert changed[3] == 1
    resolve(target, stored(7))
    target.new_life()
    assert target.take_learned() == []


def test_nothing_is_collected_unasked() -> None:
    target = RankResolver(Identity(KEY, "m"), KEY)
    resolve(target, stored(1, 2))
    assert target.take_learned() == []
    target.collect_learned = True
    resolve(target, stored(3, parent=2))
    assert len(target.take_learned()) == 1


def test_what_is_forgotten_is_declared_by_group() -> None:
    target = resolver(max_blocks=3)
    resolve(target, stored(1, 2), bare(3, group=1), at_us=10)
    assert target.take_forgotten() == []
    resolve(target, stored(4), at_us=20)
    resolve(target, stored(5, 6), at_us=30)
    resolve(target, stored(6), at_us=40)
    assert target.take_forgotten() == [IdentityRefused(0, 2, 20, 30), IdentityRefused(1, 1, 30, 30)]
    assert target.take_forgotten() == []
    assert target.counters.bridge_evictions == 3
    assert len(target) == 3


def test_a_hash_at_two_sizes_is_declared_for_the_group_of_each() -> None:
    target = resolver(max_blocks=2)
    resolve(target, stored(1), stored(1, size=8, group=3), at_us=10)
    resolve(target, stored(2, 3), at_us=20)
    assert target.take_forgotten() == [IdentityRefused(0, 1, 20, 20), IdentityRefused(3, 1, 20, 20)]


def test_a_restore_within_a_smaller_bound_declares_what_it_left_out() -> None:
    source, target = resolver(), resolver(max_blocks=2)
    resolve(source, stored(1, 2, 3))
    target.restore(source.entries())
    assert (len(target), target.take_forgotten()) == (2, [])
    resolve(target, at_us=50)
    assert target.take_forgotten() == [IdentityRefused(0, 1, 50, 50)]
    assert [entry[0] for entry in target.entries()] == [2, 3]


# -- restored is as good as never gone

EVENTS = st.one_of(
    st.builds(
        lambda start, count, parent, group, size: stored(
            *range(start, start + count), parent=start - 1 if parent and start > 1 else None, group=group, size=size
        ),
        st.integers(1, 9),
        st.integers(1, 3),
        st.booleans(),
        st.integers(0, 1),
        st.sampled_from([4, 4, 8]),
    ),
    st.builds(lambda hashes, size, group: bare(*hashes, size=size, group=group), st.lists(st.integers(1, 12), min_size=1, max_size=3),
              st.sampled_from([0, 4, 8]), st.integers(0, 1)),
    st.builds(lambda hashes: Removed(block_hashes=list(hashes)), st.lists(st.integers(1, 12), min_size=1, max_size=3)),
)  # fmt: skip
BATCHES = st.lists(st.lists(EVENTS, max_size=4), max_size=6)
PROFILES = st.sampled_from(["vllm", "sglang"])


def salted(batches: list[list[Event]], salts: list[str | None]) -> list[list[Event]]:
    """Every store under the salt whose turn it is."""
    turn = 0
    for events in batches:
        for event in events:
            if isinstance(event, Stored):
                event.cache_salt = salts[turn % len(salts)]
                turn += 1
    return batches


SALTS = st.lists(st.sampled_from([None, "a", "b"]), min_size=1, max_size=5)


@given(BATCHES, BATCHES, PROFILES, SALTS)
def test_a_restored_bridge_goes_on_as_the_other_would(
    before: list[list[Event]], after: list[list[Event]], profile: EngineProfile, salts: list[str | None]
) -> None:
    whole = resolver(profile=profile)
    learned: list[Learned] = []
    for events in salted(before, salts):
        resolve(whole, *events)
        learned += whole.take_learned()
    from_entries, from_learned = resolver(profile=profile), resolver(profile=profile)
    from_entries.restore(whole.entries())
    from_learned.restore(learned)
    assert list(from_entries.entries()) == list(whole.entries())
    assert sorted(map(repr, from_learned.entries())) == sorted(map(repr, whole.entries()))
    counted = whole.counters.shared_contents, whole.counters.identity_conflicts
    for events in salted(after, salts):
        expected = resolve(whole, *events)
        for restored in (from_entries, from_learned):
            assert resolve(restored, *events) == expected
            assert len(restored) == len(whole)
    for restored in (from_entries, from_learned):
        gained = restored.counters.shared_contents, restored.counters.identity_conflicts
        assert gained == (whole.counters.shared_contents - counted[0], whole.counters.identity_conflicts - counted[1])


@given(BATCHES, BATCHES, st.integers(1, 6))
def test_a_bounded_bridge_restored_from_its_entries_forgets_alike(before: list[list[Event]], after: list[list[Event]], bound: int) -> None:
    whole, restored = resolver(bound), resolver(bound)
    for events in before:
        resolve(whole, *events)
    restored.restore(whole.entries())
    whole.take_forgotten()
    for at_us, events in enumerate(after):
        assert resolve(restored, *events, at_us=at_us) == resolve(whole, *events, at_us=at_us)
        assert restored.take_forgotten() == whole.take_forgotten()
        assert len(restored) <= bound


@given(BATCHES, st.integers(1, 6))
def test_whatever_is_forgotten_is_counted_and_declared(batches: list[list[Event]], bound: int) -> None:
    target = resolver(bound)
    declared = 0
    for at_us, events in enumerate(batches):
        resolve(target, *events, at_us=at_us)
        for record in target.take_forgotten():
            assert (record.window_start_us, record.window_end_us) == (at_us, at_us)
            declared += record.refused
    assert declared == target.counters.bridge_evictions


@given(BATCHES, st.integers(1, 6))
def test_a_bounded_bridge_restored_from_what_it_learned_says_nothing_else(batches: list[list[Event]], bound: int) -> None:
    """It may have forgotten other entries than the one it comes from; what it knows of a hash, that one knew at some time."""
    whole, restored = resolver(bound), resolver(bound)
    truth: set[tuple[Any, int, bytes | None]] = set()
    for events in batches:
        resolve(whole, *events)
        learned = whole.take_learned()
        truth.update((block_hash, size, content) for block_hash, size, content, _ in learned)
        restored.restore(learned)
        assert len(restored) <= bound
    for block_hash, size, content, _ in restored.entries():
        assert (block_hash, size, content) in truth
        assert content != NO_ID
