"""A schema is asked for once; what passes is asked again, what does not ends; credentials go nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tenacity import wait_none

from examples.servers.kafka import certificate
from state_runtime.base.errors import InvalidConfiguration, StoreRefused, StoreUnavailable
from state_runtime.sources.registry_client import (
    ATTEMPTS_MAX,
    SCHEMA_BYTES_MAX,
    Access,
    NoSuchSchema,
    Registry,
)
from tests.schema_registry import SchemaRegistry

SCHEMA = '{"type": "string"}'
PATH = "/schemas/ids/7"


@pytest.fixture
def server() -> Iterator[SchemaRegistry]:
    with SchemaRegistry() as made:
        made.add(7, SCHEMA, "orders-value")
        yield made


def client(url: str, **how: Any) -> Registry:
    return Registry(Access(url, **how).checked(), wait=wait_none())


def test_a_schema_is_asked_for_once(server: SchemaRegistry) -> None:
    registry = client(server.url + "/")
    assert [registry.by_id(7) for _ in range(3)] == [SCHEMA] * 3
    assert server.asked == {PATH: 1}


def test_the_newest_of_a_subject_is_asked_for_by_its_name(server: SchemaRegistry) -> None:
    server.add(8, SCHEMA, "a%2Fb%20c")
    assert client(server.url).latest("orders-value") == client(server.url).latest("a/b c") == SCHEMA
    with pytest.raises(NoSuchSchema, match="the subject other is not known"):
        client(server.url).latest("other")


def test_an_unknown_id_is_asked_for_again_another_time(server: SchemaRegistry) -> None:
    """A registry with replicas may know it a little later."""
    registry = client(server.url)
    with pytest.raises(NoSuchSchema, match="the schema id 9 is not known"):
        registry.by_id(9)
    server.add(9, SCHEMA)
    assert registry.by_id(9) == SCHEMA


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_asked_again(server: SchemaRegistry, status: int) -> None:
    server.failures = [status] * (ATTEMPTS_MAX - 1)
    assert client(server.url).by_id(7) == SCHEMA
    server.failures = [status] * ATTEMPTS_MAX
    with pytest.raises(StoreUnavailable, match=f"HTTP {status}") as raised:
        client(server.url).by_id(7)
    assert not isinstance(raised.value, StoreRefused)
    assert server.asked == {PATH: 2 * ATTEMPTS_MAX}


def test_a_registry_that_is_away_may_come_back() -> None:
    with SchemaRegistry() as gone:
        pass
    with pytest.raises(StoreUnavailable, match="no answer"):
        client(gone.url).by_id(7)


@pytest.mark.parametrize("status", [401, 403])
def test_who_is_refused_does_not_ask_again(server: SchemaRegistry, status: int) -> None:
    server.answers[PATH] = (status, {"error_code": status})
    with pytest.raises(StoreRefused, match=f"HTTP {status}"):
        client(server.url).by_id(7)
    assert server.asked == {PATH: 1}


def test_credentials_come_from_the_environment_and_are_shown_nowhere(
    server: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.login = ("ann", "SENTINEL")
    monkeypatch.setenv("WHO", "ann\n")
    monkeypatch.setenv("WORD", "SENTINEL\n")
    monkeypatch.setenv("TENANT", "TOKEN-SENTINEL")
    access = Access(server.url, "WHO", "WORD", (("X-Tenant", "TENANT"),))
    assert "SENTINEL" not in repr(access) + repr(Registry(access))
    assert Registry(access).by_id(7) == SCHEMA
    assert server.headers[-1]["X-Tenant"] == "TOKEN-SENTINEL"
    for value in ("SENTINEL2", "a\nSENTINEL"):
        monkeypatch.setenv("WORD" if value == "SENTINEL2" else "TENANT", value)
        with pytest.raises((StoreRefused, InvalidConfiguration)) as raised:
            Registry(access).by_id(7)
        assert "SENTINEL" not in str(raised.value)
    monkeypatch.delenv("WORD")
    with pytest.raises(InvalidConfiguration, match="WORD is not set"):
        Registry(access).by_id(7)


def test_a_redirect_is_not_followed(server: SchemaRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the headers to another host."""
    monkeypatch.setenv("TOKEN", "SENTINEL")
    with SchemaRegistry() as other:
        other.add(7, SCHEMA)
        server.answers[PATH] = (307, {"to": f"{other.url}{PATH}"})
        with pytest.raises(InvalidConfiguration, match="correct the URL"):
            client(server.url, headers_env=(("Authorization", "TOKEN"),)).by_id(7)
        assert not other.asked


def test_a_certificate_counts_if_an_authority_signed_it_that_the_machine_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who does not know the registry sends it nothing."""
    authority = certificate("registry", tmp_path)
    both = tmp_path / "both"
    both.write_text((tmp_path / "registry.key").read_text() + authority.read_text())
    with SchemaRegistry(both) as server:
        server.add(7, SCHEMA)
        with pytest.raises(StoreRefused, match="SSL_CERT_FILE"):
            client(server.url).by_id(7)
        assert not server.asked
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        assert client(server.url).by_id(7) == SCHEMA


@pytest.mark.parametrize(
    "answer", [(404, {}), (404, {"error_code": 404}), (200, []), (200, {"id": 3}), (400, {"error_code": 42202})]
)
def test_what_is_no_registry_is_never_an_unknown_schema(server: SchemaRegistry, answer: tuple[int, Any]) -> None:
    """With on_error="null" a wrong URL would make null of every record."""
    server.answers[PATH] = answer
    with pytest.raises(InvalidConfiguration, match="does not answer as a schema registry"):
        client(server.url).by_id(7)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"schemaType": "PROTOBUF"}, "one of PROTOBUF"),
        ({"references": [{"name": "a", "subject": "b", "version": 1}]}, "refers to schemas of other subjects"),
        ({"metadata": "x" * SCHEMA_BYTES_MAX}, "larger than"),
    ],
)
def test_a_schema_that_is_not_read_says_why(server: SchemaRegistry, more: dict[str, Any], words: str) -> None:
    server.add(7, SCHEMA, **more)
    with pytest.raises(NoSuchSchema, match=words):
        client(server.url).by_id(7)


@pytest.mark.parametrize(
    ("url", "how", "words"),
    [
        ("registry:8081", {}, "url must be"),
        ("http://", {}, "url must be"),
        ("http://a:b", {}, "url must be"),
        ("file:///etc", {}, "url must be"),
        ("http://ann:SENTINEL@host", {}, "more than an address"),
        ("http://host?token=SENTINEL", {}, "more than an address"),
        ("http://host", {"user_env": "A"}, "go together"),
        ("http://host", {"password_env": "A"}, "go together"),
    ],
)
def test_an_address_holds_no_secret(url: str, how: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words) as raised:
        Access(url, **how).checked()
    assert "SENTINEL" not in str(raised.value)
