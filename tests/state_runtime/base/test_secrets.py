"""Secrets by environment variables: read where they are needed, refused where they are shown, and in no message."""

from __future__ import annotations

import re

import pytest

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.secrets import SECRET_CHARS_MIN, redacted, refuse_secrets, with_secrets


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_or_empty_is_named_with_what_needs_it(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setenv("THERE", "hunter2")
    variables = {"user": "THERE", "password": "NOT_THERE"}
    if value is not None:
        monkeypatch.setenv("NOT_THERE", value)
    with pytest.raises(InvalidConfiguration, match="sink 'a': the environment variable NOT_THERE is not set") as caught:
        with_secrets({}, variables, "sink 'a'")
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("NOT_THERE", "x")
    assert with_secrets({"a": 1, "user": "other"}, variables, "") == {"a": 1, "user": "hunter2", "password": "x"}


def test_an_option_whose_name_says_that_it_is_a_secret_is_refused_without_its_value() -> None:
    refuse_secrets({"user": "me"}, re.compile("password"), "options_env")
    with pytest.raises(InvalidConfiguration, match=r'options_env=\{"a.password": "NAME"\}') as caught:
        refuse_secrets({"user": "me", "a.password": "hunter2"}, re.compile("password"), "options_env")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("values", [["hunter2", "hunter2/more"], ["hunter2/more", "hunter2"]])
def test_a_secret_that_begins_with_another_one_is_left_out_whole(values: list[str]) -> None:
    assert redacted("x hunter2/more y hunter2 z", values) == "x *** y *** z"


def test_what_is_no_text_or_empty_and_what_is_short_where_that_is_asked_for_stays() -> None:
    assert redacted("port 1 of x", [1, None, "", "x"]) == "port 1 of ***"
    assert redacted("port 1 of x, long", ["x", "1", "long"], SECRET_CHARS_MIN) == "port 1 of x, ***"
