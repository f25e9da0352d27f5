"""Deploys as records: their ids, and what adding or removing one writes. Pure.

A deploy's id is made of what it says, so that a script that runs twice declares once. Its records replace each other by version.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from schemas.errors import KvcensusError
from schemas.records import Deploy
from sql.times import iso
from streams.believable import MOST_US

LONGEST_LABEL = 200
"""Characters."""

ID_DIGITS = 8
"""Hex digits of an id, unless another deploy has it."""

LEAST_PREFIX = 4
"""Digits of an id that name a deploy, if no other begins so."""

_MOST_DIGITS = 64

Known = Mapping[str, Deploy]
"""The newest record of each deploy, by id; those taken back are among them."""

Added = Literal["declared", "declared_already", "declared_again"]
Removed = Literal["removed", "removed_already"]


class NoSuchDeploy(KvcensusError):
    """No deploy, or more than one, has the id that was given."""


def checked_label(text: str) -> str:
    """``text`` without spaces around it. Raises :class:`KvcensusError` where nothing is left, or what cannot stand on one line."""
    label = text.strip()
    if not label:
        raise KvcensusError("a label is not empty")
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in label):
        raise KvcensusError("a label is one line of text: control characters are not allowed")
    if len(label) > LONGEST_LABEL:
        raise KvcensusError(f"a label of {len(label)} characters is too long: at most {LONGEST_LABEL}")
    return label


def checked_time(at_us: int) -> int:
    """``at_us``. Raises :class:`KvcensusError` for what no engine's clock will show (before 1970, after 2242)."""
    if not 0 <= at_us <= MOST_US:
        raise KvcensusError(f"{iso(at_us)} is no time of a deploy: milliseconds given as seconds?")
    return at_us


def deploy_id(label: str, at_us: int, workload: str | None, model: str | None, digits: int = ID_DIGITS) -> str:
    """The first ``digits`` hex digits of SHA-256 over what the deploy says, as a JSON list in ASCII."""
    said = json.dumps([label, at_us, workload, model], separators=(",", ":"))
    return hashlib.sha256(said.encode("ascii")).hexdigest()[:digits]


def newest(records: Iterable[Deploy]) -> dict[str, Deploy]:
    """Of each id the record with the highest version; of equal versions the later one."""
    found: dict[str, Deploy] = {}
    for record in records:
        held = found.get(record.deploy_id)
        if held is None or record.version >= held.version:
            found[record.deploy_id] = record
    return found


def adding(known: Known, label: str, at_us: int, workload: str | None, model: str | None, now_us: int) -> tuple[Deploy, Added]:
    """The record that declares this deploy, and what that does; with ``declared_already`` nothing needs to be written."""
    for digits in range(ID_DIGITS, _MOST_DIGITS + 1):
        name = deploy_id(label, at_us, workload, model, digits)
        held = known.get(name)
        if held is None:
            return Deploy(name, now_us, label, at_us, workload, model), "declared"
        if (held.label, held.at_us, held.workload, held.model) == (label, at_us, workload, model):
            if not held.removed:
                return held, "declared_already"
            return msgspec.structs.replace(held, version=_after(held, now_us), removed=False), "declared_again"
    raise AssertionError("two texts of one SHA-256")


def removing(known: Known, given: str, now_us: int) -> tuple[Deploy, Removed]:
    """The record that takes back the deploy that ``given`` names; with ``removed_already`` nothing needs to be written."""
    held = named(known, given)
    if held.removed:
        return held, "removed_already"
    return msgspec.structs.replace(held, version=_after(held, now_us), removed=True), "removed"


def named(known: Known, given: str) -> Deploy:
    """The deploy whose id is ``given``, or begins so; one that stands goes before those taken back.

    Raises :class:`NoSuchDeploy` for none, for several, and for a prefix shorter than :data:`LEAST_PREFIX`.
    """
    wanted = given.strip().lower()
    if wanted in known:
        return known[wanted]
    if len(wanted) < LEAST_PREFIX:
        raise NoSuchDeploy(f"{given!r} is no id of a deploy: give at least its first {LEAST_PREFIX} digits (see `kvcensus deploy list`)")
    matching = [deploy for name, deploy in sorted(known.items()) if name.startswith(wanted)]
    matching = [deploy for deploy in matching if not deploy.removed] or matching
    if not matching:
        raise NoSuchDeploy(f"no deploy has the id {given!r} (see `kvcensus deploy list`)")
    if len(matching) > 1:
        raise NoSuchDeploy(f"{given!r} names {len(matching)} deploys: {', '.join(deploy.deploy_id for deploy in matching[:10])}")
    return matching[0]


def _after(held: Deploy, now_us: int) -> int:
    return max(now_us, held.version + 1)


def described(deploy: Deploy) -> dict[str, object]:
    """A deploy as it stands in documents."""
    return {
        "deploy_id": deploy.deploy_id,
        "label": deploy.label,
        "at": iso(deploy.at_us),
        "at_us": deploy.at_us,
        "workload": deploy.workload,
        "model": deploy.model,
        "removed": deploy.removed,
    }
