"""Why two sides may not be compared. Pure.

Each reason has a word and a sentence. A figure that is refused is still shown for both sides; its difference is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from schemas.reasons import SPOILS_FIGURE
from schemas.records import rank_key
from sql.figure_parts import Document, keys
from sql.total_types import LifeTotals

SIDES = ("before", "after")
"""The two sides, in order."""

_SAYS_NOTHING = SPOILS_FIGURE | {"key_change", "kv_connector", "model_undeclared", "no_duplicate_windows", "single_holder"}
"""Reasons that can make a figure say nothing."""

_NAMED = 3
"""So many ranks are named in a sentence."""


def refusal(reason: str, text: str) -> Document:
    """One reason, as it stands in documents."""
    return {"reason": reason, "text": text}


def percent(share: float) -> str:
    """A share, never rounded up."""
    return "100%" if share >= 1 else f"{int(share * 10_000) / 100:g}%"


def rules(versions: Sequence[int | None]) -> list[Document]:
    """Both sides must be counted by one version of the rules."""
    if versions[0] == versions[1] or None in versions:
        return []
    return [
        refusal(
            "rules",
            f"counted by different versions of the rules: {versions[0]} before, {versions[1]} after (`kvcensus reclassify` counts stored"
            f" facts again; --semantics-version N takes rows of one version)",
        )
    ]


def low_coverage(shares: Sequence[float], least: float) -> list[Document]:
    """Each side must be observed for ``least`` of its span."""
    return [
        refusal("coverage", f"{side} was observed for {percent(share)} of its span, less than {percent(least)}")
        for side, share in zip(SIDES, shares, strict=True)
        if share < least
    ]


def says_nothing(cores: Sequence[Document], register: str = "register") -> list[Document]:
    """Neither side may be indeterminate. ``cores`` have ``reasons`` and the register under the name given."""
    found = []
    for side, core in zip(SIDES, cores, strict=True):
        if core[register] == "indeterminate":
            why = ", ".join(sorted(set(core["reasons"]) & _SAYS_NOTHING))
            found.append(refusal("indeterminate", f"the figure {side} says nothing{f' ({why})' if why else ''}"))
    return found


def keyed_differently(sides: Sequence[Sequence[LifeTotals]]) -> list[Document]:
    """Both sides must have their ids made with the same keys, and no rank may have changed its own."""
    used = [keys(lives) for lives in sides]
    if used[0] != used[1]:
        before, after = map(_epochs, used)
        how = f"epoch {before} before, {after} after" if before != after else f"epoch {before} on both sides, not the same key"
        return [refusal("key_change", f"content ids were made with different keys: {how}")]
    return _moved(sides, "key_change", "the identity key of", lambda life: (life.key_epoch, life.canary))


def several_keys(sides: Sequence[Sequence[LifeTotals]]) -> list[Document]:
    """Copies are told by their ids: on each side all ranks must have made them with one key."""
    return [
        refusal("key_change", f"content ids {side} were made with {len(used)} keys (epochs {_epochs(used)}): copies are not all seen")
        for side, lives in zip(SIDES, sides, strict=True)
        if len(used := keys(lives)) > 1
    ]


def redeclared(sides: Sequence[Sequence[LifeTotals]], *, connectors: bool) -> list[Document]:
    """What decides how a rank's stream is read must be declared alike on both sides; ``connectors`` among it."""
    found = []
    for field, name in (("reuse_reporting", "reuse reporting"), ("removals", "removals"), ("kv_connector", "KV connector")):
        if connectors or field != "kv_connector":
            found += _moved(sides, "redeclared", f"{name} of", attrgetter(field))
    return found


def _moved(sides: Sequence[Sequence[LifeTotals]], reason: str, what: str, value: Callable[[LifeTotals], Any]) -> list[Document]:
    """A refusal if any rank that is on both sides has other values of ``value`` there."""
    before, after = (_values(lives, value) for lives in sides)
    moved = [rank for rank in sorted(before) if rank in after and before[rank] != after[rank]]
    if not moved:
        return []
    named = [rank_key(*rank) for rank in moved]
    if reason == "key_change":
        return [refusal(reason, f"{what} {listed(named)} changed")]
    first = moved[0]
    return [refusal(reason, f"{what} {listed(named)} changed: {_shown(before[first])} before, {_shown(after[first])} after")]


def _values(lives: Iterable[LifeTotals], value: Callable[[LifeTotals], Any]) -> Mapping[tuple[str, int], set[Any]]:
    found: dict[tuple[str, int], set[Any]] = {}
    for life in lives:
        found.setdefault((life.instance_id, life.dp_rank), set()).add(value(life))
    return found


def _shown(values: set[Any]) -> str:
    return " and ".join(sorted("none" if value is None else str(value) for value in values))


def _epochs(used: set[tuple[int, str]]) -> str:
    return " and ".join(str(epoch) for epoch in sorted({epoch for epoch, _ in used})) or "none"


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
