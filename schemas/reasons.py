"""Why a figure is less than exact: the words, what each means, and how far they lower the register. One list for topics, SQL and documents.

A *register* says how a figure may be read: ``exact``; ``lower_bound``, where some of it may have gone unseen; ``indeterminate``, where it
says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas.records import Register

REASONS = {
    "absent": "a rank that was expected sent nothing in the span",
    "ambiguous_reload": "content came back after a clear that may or may not have reached the offload tier",
    "behind": "duplicates are not counted up to the end of the span yet",
    "cached_over_pool": "more blocks are counted as cached than the engine's pool has: removals were missed, or the declaration is wrong",
    "clock_jump": "engine time jumped ahead: what lies between is not taken as observed",
    "clock_stepped_back": "engine time stepped back",
    "coverage": "part of the span was not observed",
    "history_forgotten": "blocks lost long ago were forgotten to bound memory, so their return is not recognised",
    "identity": "some stored blocks have no content id",
    "identity_refused": "the forwarder forgot blocks to stay within its bound, so what followed them may lack a content id",
    "in_use_over_cached": "running requests hold more blocks than are counted as cached: stores were missed",
    "key_change": "content ids were made with more than one key",
    "kv_connector": "a KV connector stores loaded blocks as new ones: repeat compute cannot be told apart",
    "late_attach": "the forwarder attached to a stream that had begun",
    "late_data": "changes came so late that they count at a later time than their own",
    "lost": "batches were lost",
    "model_undeclared": "the model of a rank was not declared",
    "no_duplicate_windows": "duplicates were not counted",
    "no_ranks": "no rank was observed",
    "not_observed": "nothing was demonstrably observed",
    "parent_conflict": "a content id was seen behind two different parents",
    "reattached": "the forwarder attached anew",
    "redeclared": "what was declared about a rank changed",
    "refused": "batches could not be read",
    "rekeyed": "the identity key or the model changed: ids from before do not compare",
    "restarted": "the engine restarted",
    "shards_missing": "not all content shards have reported",
    "single_holder": "fewer than two ranks held comparable content: zero was not measured",
    "too_large": "a sum was too large for its field and was cut to the largest that fits",
    "undeclared_gap": "batches are missing that no forwarder declared lost",
    "unlabelled": "stores cannot be told from announcements of reuse",
    "unreadable": "messages of the rank could not be read or counted, and were set aside",
    "warmup": "the cache already held content when observation began",
}
"""What each reason means. Rows may name others; those explain themselves."""

SPOILS_EXACTNESS = frozenset(
    {
        "absent",
        "ambiguous_reload",
        "behind",
        "cached_over_pool",
        "clock_jump",
        "coverage",
        "history_forgotten",
        "identity",
        "identity_refused",
        "in_use_over_cached",
        "key_change",
        "kv_connector",
        "late_data",
        "lost",
        "parent_conflict",
        "reattached",
        "redeclared",
        "refused",
        "rekeyed",
        "shards_missing",
        "too_large",
        "undeclared_gap",
        "unlabelled",
        "unreadable",
        "warmup",
    }
)
"""Reasons for which a figure is a lower bound at most.

Among them what may have happened outside any stretch of time: a batch lost between two of one instant, or after the last.
"""

SPOILS_FIGURE = frozenset({"no_ranks", "not_observed"})
"""Reasons for which a figure says nothing."""

UNSETTLED = frozenset({"behind", "shards_missing", "no_duplicate_windows"})
"""Reasons of a footprint that pass by themselves once everything that was sent has been counted."""


def reason_text(reason: str) -> str:
    """``reason`` in words."""
    return REASONS.get(reason, reason.replace("_", " "))


def register(reasons: Iterable[str], *, measured: bool = True) -> Register:
    """The register of a figure with these reasons; one that could not be measured at all is ``indeterminate``."""
    named = set(reasons)
    if not measured or named & SPOILS_FIGURE:
        return "indeterminate"
    return "lower_bound" if named & SPOILS_EXACTNESS else "exact"
