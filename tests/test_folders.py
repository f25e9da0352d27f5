"""Folders of instances: names of their own, whatever an instance is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.folders import folder_name, sync_folder

NAMES = st.text(min_size=1, max_size=200).filter(str.isprintable)


@given(one=NAMES, other=NAMES, plain=st.sampled_from(["", " @+=,", "@:+=,"]))
def test_an_instance_has_a_folder_of_its_own(one: str, other: str, plain: str) -> None:
    name = folder_name(one, plain)
    assert "/" not in name
    assert not name.startswith(".")
    assert len(name.encode()) <= 255
    assert (name == folder_name(other, plain)) == (one == other)


def test_names_of_folders_stay_what_they_were() -> None:
    assert folder_name("chat-eu_1.a~b", "") == "chat-eu_1.a~b"
    assert folder_name("h:80 a", " @+=,") == "h%3A80 a"
    assert folder_name("h:80 a", "@:+=,") == "h:80%20a"
    assert folder_name("../x/y", "") == "%2E.%2Fx%2Fy"
    assert folder_name("é" * 40, "") == "%C3%A9" * 30 + "%C3-1dba833145ec8edd"


def test_a_folder_that_is_gone_cannot_be_made_durable(tmp_path: Path) -> None:
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "gone")
