"""Storage options: what they mean, what is refused, and that they are never shown."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from typing import Any

import pytest
from model import SECRET

import state_runtime.store as stores
from state_runtime.base.errors import InvalidConfiguration, StoreRefused
from state_runtime.store import S3Store, Store, open_store, shared_store
from state_runtime.store.options import StoreOptions

CREDENTIALS = {"key": "AKIASENTINEL", "secret": SECRET, "token": "t0ken/sentinel"}


def client_of(store: Store) -> Any:
    assert isinstance(store, S3Store)
    store._fs.connect()
    return store._fs.s3


def test_our_names_reach_the_client() -> None:
    """s3fs has them in nested dictionaries, which nobody finds."""
    client = client_of(
        open_store(
            "s3://bucket/x",
            {
                **CREDENTIALS,
                "endpoint_url": "https://minio.example:9000",
                "region": "eu-central-1",
                "path_style": False,
                "connect_timeout_s": 1.5,
                "read_timeout_s": 7,
                "attempts_max": 2,
                "connections_max": 9,
            },
        )
    )
    config = client.meta.config
    assert (client.meta.region_name, client.meta.endpoint_url) == ("eu-central-1", "https://minio.example:9000")
    assert (config.connect_timeout, config.read_timeout, config.max_pool_connections) == (1.5, 7, 9)
    assert config.retries["total_max_attempts"] == 2
    assert config.s3["addressing_style"] == "virtual"


def test_waiting_and_repeating_have_bounds_without_options() -> None:
    """A default that nobody chose would be 5 × 5 × 5 attempts of a minute each."""
    store = open_store("s3://bucket/x", CREDENTIALS)
    assert isinstance(store, S3Store)
    config = client_of(store).meta.config
    assert (config.connect_timeout, config.read_timeout, config.max_pool_connections) == (5.0, 20.0, 50)
    assert config.retries == {"mode": "standard", "total_max_attempts": 3}
    assert store._fs.retries == 1


def test_what_botocore_is_told_itself_is_kept() -> None:
    config = client_of(open_store("s3://b/x", {**CREDENTIALS, "config_kwargs": {"read_timeout": 3}})).meta.config
    assert (config.read_timeout, config.connect_timeout) == (3, 5.0)


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An AWS configuration with one profile, and no credentials in the environment."""
    file = tmp_path / "config"
    file.write_text(
        "[profile lake]\nregion = eu-north-1\nendpoint_url = http://store.example\n"
        f"aws_access_key_id = AKIASENTINEL\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("profiles")
def test_a_profile_brings_credentials_region_and_endpoint() -> None:
    """So that stillstate.yaml holds no secret at all."""
    client = client_of(open_store("s3://bucket/x", {"profile": "lake"}))
    assert (client.meta.region_name, client.meta.endpoint_url) == ("eu-north-1", "http://store.example")
    assert client._request_signer._credentials is not None


@pytest.mark.usefixtures("profiles")
def test_an_endpoint_beside_a_profile_wins() -> None:
    client = client_of(open_store("s3://bucket/x", {"profile": "lake", "endpoint_url": "http://other.example"}))
    assert client.meta.endpoint_url == "http://other.example"


@pytest.mark.usefixtures("profiles")
def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfiguration, match=r"no profile 'lak' .*it has: .*lake"):
        open_store("s3://bucket/x", {"profile": "lak"})


@pytest.mark.usefixtures("profiles")
def test_the_environment_says_what_options_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://env.example")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert client_of(open_store("s3://bucket/x")).meta.endpoint_url == "http://env.example"


@pytest.mark.usefixtures("profiles")
def test_missing_credentials_are_named_with_every_place_for_them(closed_port: int) -> None:
    """The first thing that goes wrong on a new machine."""
    store = open_store("s3://bucket/x", {"endpoint_url": f"http://127.0.0.1:{closed_port}"})
    with pytest.raises(StoreRefused, match=r"No credentials were found: .*storage_profile.*AWS_ACCESS_KEY_ID.*role"):
        store.size("a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "http://x"}, "unknown storage option 'endpoint'.*did you mean 'endpoint_url'"),
        ({"key": "k"}, "'secret' is missing"),
        ({"secret": SECRET}, "'key' is missing"),
        ({"token": SECRET}, "needs 'key' and 'secret'"),
        ({"key": "k", "secret": SECRET, "profile": "p"}, "two sets of credentials"),
        ({"endpoint_url": f"http://user:{SECRET}@host"}, "holds credentials"),
        ({"endpoint_url": f"http://host/?X-Amz-Signature={SECRET}"}, "holds credentials or parameters"),
        ({"endpoint_url": "minio:9000"}, "must be like https://host"),
        ({"path_style": "yes"}, "'path_style' must be true or false"),
        ({"read_timeout_s": "10"}, "'read_timeout_s' must be a number"),
        ({"read_timeout_s": 0}, "'read_timeout_s' = 0 is outside"),
        ({"attempts_max": True}, "'attempts_max' must be a whole number"),
        ({"client_kwargs": "x"}, "'client_kwargs' must be a mapping"),
        ({"single_writer": "yes"}, "'single_writer' must be true or false"),
    ],
    ids=repr,
)
def test_wrong_options_are_refused_before_any_request(options: dict[str, Any], message: str) -> None:
    """s3fs passes over names that it does not know, and then asks AWS with somebody else's credentials."""
    with pytest.raises(InvalidConfiguration, match=message) as caught:
        open_store("s3://bucket/x", options)
    assert SECRET not in str(caught.value)


def test_a_url_without_a_bucket_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="names no bucket; write s3://bucket/folder"):
        open_store("s3:///folder")


@pytest.mark.parametrize(("url", "library"), [("gs://bucket/x", "gcsfs"), ("az://container/x", "adlfs")])
def test_a_library_that_is_not_installed_is_named(url: str, library: str) -> None:
    """The other object stores go through the same port, with a library that is not installed by default."""
    if importlib.util.find_spec(library) is None:
        with pytest.raises(InvalidConfiguration, match=f"needs the package {library}; install {library}"):
            open_store(url)
    with pytest.raises(InvalidConfiguration, match="profile of the AWS configuration"):
        open_store(url, {"profile": "lake"})


def test_options_are_in_no_repr_and_no_pickle() -> None:
    options = StoreOptions.of("s3", {**CREDENTIALS, "region": "eu-west-1", "client_kwargs": {"verify": "/ca.pem"}})
    shown = repr(options) + str(options)
    assert not [value for value in CREDENTIALS.values() if value in shown]
    assert "region='eu-west-1'" in shown
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(options)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(open_store("s3://bucket/x", CREDENTIALS))


def test_what_a_library_says_is_cleaned_of_every_value() -> None:
    """A wrong header is quoted by the client library, with the value."""
    options = StoreOptions.of("s3", {**CREDENTIALS, "s3_additional_kwargs": {"SSECustomerKey": "c0stumer-key"}})
    said = options.redact(f"invalid header {SECRET}; token t0ken/sentinel of AKIASENTINEL, c0stumer-key")
    assert said == "invalid header ***; token *** of ***, ***"


def test_a_store_is_shared_by_place_and_options_and_its_key_holds_no_secret() -> None:
    """The table of stores lives as long as the process."""
    one, again = (shared_store("s3://bucket/shared", CREDENTIALS) for _ in range(2))
    other = shared_store("s3://bucket/shared", {**CREDENTIALS, "secret": "another"})
    assert one is again
    assert one is not other
    assert SECRET not in repr(list(stores._SHARED))
