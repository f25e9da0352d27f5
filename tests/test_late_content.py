"""Late events of one content: what is said adds up to what all events say in order, and the work does not grow with the past."""

from __future__ import annotations

import random

import pytest

from streams import holding
from streams.holding import Content, Event, Holder, Steps

SKEW_US = 50
HOLDERS: list[Holder] = [((name, rank), workload) for name, workload in (("a", "chat"), ("b", "chat"), ("c", "")) for rank in (0, 1)]


def _said(steps: Steps) -> tuple[dict[tuple[int, holding.Rank], tuple[int, ...]], dict[tuple[int, holding.Pair], int]]:
    ranks = {key: tuple(change) for key, change in steps.ranks.items() if any(change)}
    return ranks, {key: change for key, change in steps.pairs.items() if change}


def _difference(one: Steps, other: Steps) -> Steps:
    steps = Steps()
    steps.take(one, 1)
    steps.take(other, -1)
    return steps


def _give(content: Content, event: Event, steps: Steps) -> None:
    """As a slice does."""
    at, holder, opened = event
    if at > content.last_at:
        content.append(at, holder, opened, SKEW_US, steps)
    else:
        content.insert([event], SKEW_US, steps)


@pytest.mark.parametrize("seed", range(12))
def test_late_events_say_the_difference_also_behind_kept_and_settled_states(seed: int) -> None:
    chance = random.Random(seed)
    content, said, settled = Content(16), Steps(), Steps()
    now = 0
    for number in range(600):
        now += chance.choice((0, 1, 20, 80))
        behind = 0 if chance.random() < 0.5 else chance.choice((1, 5, 200, 4_000))
        _give(content, (max(0, now - behind), chance.choice(HOLDERS), chance.random() < 0.6), said)
        if content.tail is not None and chance.random() < 0.02:
            content.settle(now - 3_000, SKEW_US)
            settled = _difference(said, content.replay(SKEW_US)[1])
        if number % 7 == 0:
            state, steps = content.replay(SKEW_US)
            assert _said(_difference(said, settled)) == _said(steps)
            assert content.tail is None or content.tail.dump() == state.dump()


def test_an_event_that_is_a_little_late_costs_the_same_after_thousands_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = 0
    apply = holding.State.apply

    def counted(*arguments: object) -> None:
        nonlocal applied
        applied += 1
        apply(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(holding.State, "apply", counted)
    content = Content(16)
    for number in range(3_000):
        _give(content, (number * 10 - 25 * (number % 2), HOLDERS[number % 4], number % 8 < 4), Steps())
    assert applied < 3_000 * 2 * holding.MARK_EVENTS
