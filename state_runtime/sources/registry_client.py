"""What `from_registry` asks a schema registry: the text of a schema, by its id or the newest of a subject.

HTTP by urllib3, without redirects: credentials go to the host that was named, and to no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote, urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from state_runtime.base.errors import InvalidConfiguration, StoreRefused, StoreUnavailable
from state_runtime.base.secrets import with_secrets

__all__ = ["ATTEMPTS_MAX", "SCHEMAS_MAX", "SCHEMA_BYTES_MAX", "Access", "NoSuchSchema", "Registry", "registry_of"]

ATTEMPTS_MAX: Final = 8
"""With waits of up to ten seconds: about half a minute without an answer, then the run ends and is started again."""
SCHEMAS_MAX: Final = 256
"""Ids that a process remembers; who uses more at once has them asked for again."""
SCHEMA_BYTES_MAX: Final = 1024 * 1024
"""Of an answer; registries take schemas of about this size at most."""
_WAIT_S_MAX: Final = 10.0
_CONNECT_S: Final = 5.0
_READ_S: Final = 10.0
_PASSING: Final = frozenset({408, 425, 429})
_NOT_FOUND: Final = frozenset({40401, 40402, 40403})
"""Error codes of a registry for a subject, a version and a schema that it does not have; a 404 without one of them
comes from something else at this address."""


class NoSuchSchema(Exception):
    """The registry answers, and has no such schema, or none that is read here. The text is for a message."""


class _Away(Exception):
    """No answer, or one that may be another a little later."""


@dataclass(frozen=True)
class Access:
    """Where a registry is, and which environment variables hold what it asks for; no secret is in it.

    Attributes:
        headers_env: names of variables by header, as pairs.
    """

    url: str
    user_env: str | None = None
    password_env: str | None = None
    headers_env: tuple[tuple[str, str], ...] = ()

    def checked(self) -> Access:
        """Return it as it is.

        Raises:
            InvalidConfiguration: the URL is none, or holds what belongs into variables; a name without a password.
        """
        try:
            parts = urlsplit(self.url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise InvalidConfiguration('from_registry: url must be the registry\'s, as "https://registry:8081"')
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise InvalidConfiguration(
                "from_registry: the URL holds more than an address, and Spark shows it; name environment variables for "
                "secrets (user_env and password_env, or headers_env)"
            )
        if (self.user_env is None) != (self.password_env is None):
            raise InvalidConfiguration("from_registry: user_env and password_env go together; name both variables")
        return self

    def headers(self) -> dict[str, str]:
        """Return the headers of a request, with secrets, from this process's environment.

        Raises:
            InvalidConfiguration: a variable is not set, or has a character that no header may have.
        """
        where = f"from_registry({self.url})"
        found = with_secrets({}, dict(self.headers_env), where)
        if self.user_env is not None and self.password_env is not None:
            pair = with_secrets({}, {"user": self.user_env, "password": self.password_env}, where)
            auth = f"{_one_line(pair['user'])}:{_one_line(pair['password'])}"
            found["Authorization"] = _library().make_headers(basic_auth=auth)["authorization"]
        made = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        for name, value in found.items():
            made[name] = _one_line(value)
            if not (made[name].isprintable() and made[name].isascii()):
                # The client's own error would show the value.
                raise InvalidConfiguration(f"{where}: the variable for the header {name} has a character it may not")
        return made


class Registry:
    """A schema registry. Its connection is made with the first question, and kept.

    Args:
        wait: between two attempts, by default random and growing.
    """

    def __init__(self, access: Access, *, wait: Any = None) -> None:
        self._access = access
        self._wait = wait_random_exponential(multiplier=0.2, max=_WAIT_S_MAX) if wait is None else wait
        self._pool: Any = None
        # An error is not kept: a schema that is not there may come.
        self._of_id = lru_cache(maxsize=SCHEMAS_MAX)(self._asked_for_id)

    def by_id(self, schema_id: int) -> str:
        """Return a writer's schema; asked for once.

        Raises:
            NoSuchSchema: there is none with this id, or it is not one of Avro in one piece.
            StoreUnavailable: the registry did not answer.
            StoreRefused: it does not let this job in.
            InvalidConfiguration: at the URL is no registry.
        """
        return self._of_id(schema_id)

    def latest(self, subject: str) -> str:
        """Return the newest schema of a subject; raises as `by_id` does."""
        return self._schema(f"/subjects/{quote(subject, safe='')}/versions/latest", f"the subject {subject}")

    def _asked_for_id(self, schema_id: int) -> str:
        return self._schema(f"/schemas/ids/{schema_id}", f"the schema id {schema_id}")

    def _schema(self, path: str, what: str) -> str:
        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS_MAX),
            wait=self._wait,
            retry=retry_if_exception_type(_Away),
            reraise=True,
        )
        try:
            answer = retrying(lambda: self._tried(path, what))
        except _Away as error:
            raise StoreUnavailable(
                f"{self._name} gave no schema in {ATTEMPTS_MAX} attempts: {error}. Nothing is lost: start again when "
                "it answers"
            ) from error
        kind = answer.get("schemaType", "AVRO")
        if kind != "AVRO":
            raise NoSuchSchema(f"{what} is one of {kind}, and not of Avro")
        if answer.get("references"):
            raise NoSuchSchema(f"{what} refers to schemas of other subjects, which is not read here")
        return str(answer["schema"])

    def _tried(self, path: str, what: str) -> Mapping[str, Any]:
        http = _library()
        if self._pool is None:
            self._pool = http.PoolManager(timeout=http.Timeout(connect=_CONNECT_S, read=_READ_S), retries=False)
        try:
            response = self._pool.request(
                "GET",
                self._access.url.rstrip("/") + path,
                headers=self._access.headers(),
                redirect=False,
                preload_content=False,
            )
            try:
                body = response.read(SCHEMA_BYTES_MAX + 1)
            finally:
                response.close()
        except http.exceptions.SSLError as error:
            raise StoreRefused(
                f"{self._name}: no connection by TLS. Its certificate must be signed by an authority that this machine "
                "knows (the variable SSL_CERT_FILE names another file of them)"
            ) from error
        except http.exceptions.HTTPError as error:
            raise _Away(f"no answer ({type(error).__name__})") from error
        return self._read(int(response.status), body, what)

    def _read(self, status: int, body: bytes, what: str) -> Mapping[str, Any]:
        """Return the answer.

        Raises:
            _Away: ask again.
        """
        if status in (401, 403):
            raise StoreRefused(
                f"{self._name} does not let this job in (HTTP {status}); give it the right, or correct the credentials "
                "in the variables that user_env and password_env, or headers_env, name"
            )
        if status in _PASSING or status >= 500:
            raise _Away(f"HTTP {status}")
        if len(body) > SCHEMA_BYTES_MAX:
            raise NoSuchSchema(f"{what} is larger than {SCHEMA_BYTES_MAX} bytes")
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status == 404 and isinstance(answer, dict) and answer.get("error_code") in _NOT_FOUND:
            raise NoSuchSchema(f"{what} is not known to it")
        if status != 200 or not isinstance(answer, dict) or not isinstance(answer.get("schema"), str):
            raise InvalidConfiguration(
                f"{self._name} does not answer as a schema registry does (HTTP {status}); correct the URL, with the "
                "path that the registry may have, and without a redirect"
            )
        return answer

    @property
    def _name(self) -> str:
        return f"the schema registry {self._access.url}"


@lru_cache(maxsize=16)
def registry_of(access: Access) -> Registry:
    """Return this process's client of a registry, so that each schema is asked for once."""
    return Registry(access)


def _one_line(value: str) -> str:
    """Return a variable without the line end that a file of it brings."""
    return value.rstrip("\r\n")


def _library() -> Any:
    """Return urllib3.

    Raises:
        InvalidConfiguration: it is not installed.
    """
    try:
        import urllib3
    except ImportError as error:
        raise InvalidConfiguration(
            "from_registry needs the package urllib3 for Avro: pip install 'stillstate[avro]'"
        ) from error
    return urllib3
