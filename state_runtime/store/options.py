"""How a store is reached: storage options in the user's form, checked once, and never shown.

Options come as a mapping (`storage_options` of a job, a sink, a command), with the names that the store's library has.
For S3 a few names are added that every installation needs and s3fs hides in nested dictionaries:

    profile                      a profile of the AWS configuration (credentials, region, endpoint); `storage_profile`
                                 in stillstate.yaml
    endpoint_url                 another server than AWS
    region                       its region
    path_style                   true: http://server/bucket/key; false: http://bucket.server/key; default: the first
                                 with an endpoint_url
    connect_timeout_s, read_timeout_s, attempts_max, connections_max

and for every store

    single_writer                true: this job has one writer at a time, and something else ensures that
                                 (docs/design/0021-s3-and-fencing.md)

Missing options come from the environment, as botocore documents it: AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_REGION,
AWS_ENDPOINT_URL_S3, roles of the machine. A name that the library does not know is refused: s3fs would ignore a
misspelt `endpoint` and use AWS.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.secrets import REDACTED, SECRET_CHARS_MIN, redacted

__all__ = ["Patience", "StoreOptions"]

S3_SCHEMES: Final = ("s3", "s3a")

# Values that may be shown: they describe the place and the access, not the identity.
_SHOWN: Final = frozenset(
    {"region", "path_style", "profile", "connect_timeout_s", "read_timeout_s", "attempts_max", "connections_max"}
    | {"endpoint_url"}  # refused if it has credentials inside
    | {"single_writer", "anon", "use_ssl", "requester_pays"}
    | {"max_concurrency", "fixed_upload_size", "local_expiry_check"}
)  # fmt: skip
_OURS: Final[Mapping[str, type]] = {
    "region": str,
    "path_style": bool,
    "connect_timeout_s": float,
    "read_timeout_s": float,
    "attempts_max": int,
    "connections_max": int,
    "profile": str,
}

# One request: a connection within 5 s, and no pause of more than 20 s in an answer. botocore tries throttled and 5xx
# requests three times, per request (so one part of a large upload is repeated, not all of it). s3fs's own five attempts
# on top are switched off, and the store tries a whole operation five times (`FsspecStore`).
CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 20.0
ATTEMPTS_MAX: Final = 3
# Uploads of an executor and reads of a restore run in parallel; botocore's 10 would make them wait for each other.
CONNECTIONS_MAX: Final = 50


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a store may keep a caller waiting that needs an answer soon or not at all, such as a watcher.

    Attributes:
        connect_s, read_s: limits for a connection, and for a pause in an answer; shorter options of the user stay in
            effect.
        call_s: for a whole call on a small object.
        attempts_max: of an operation, in the library and in the store together.
    """

    connect_s: float
    read_s: float
    call_s: float
    attempts_max: int = 1


@dataclass(frozen=True, repr=False)
class StoreOptions:
    """Checked storage options of one store.

    Attributes:
        scheme: of the store's URL; empty for a path.
        given: the options as passed in.
        library: for the file system's constructor.
        single_writer: the store is not asked for conditional writes.
    """

    scheme: str
    given: Mapping[str, Any] = field(default_factory=dict)
    library: Mapping[str, Any] = field(default_factory=dict)
    single_writer: bool = False

    @staticmethod
    def of(scheme: str, options: Mapping[str, Any] | None, patience: Patience | None = None) -> StoreOptions:
        """Check options. No I/O except reading the AWS configuration file if a profile is named.

        Args:
            patience: None for callers that need an answer: the options' own limits, or the defaults.

        Raises:
            InvalidConfiguration: an unknown name, a value of another type, half a pair of credentials, an unknown
                profile. No message repeats a value that may be secret.
        """
        given = dict(options or {})
        rest = dict(given)
        single_writer = _typed("single_writer", rest.pop("single_writer", False), bool)
        if scheme in S3_SCHEMES:
            rest = _s3(rest)
            if patience is not None:
                rest = {**rest, "config_kwargs": _impatient(rest["config_kwargs"], patience)}
        elif "profile" in rest and scheme not in ("", "file", "memory"):
            raise InvalidConfiguration(
                "storage_profile (option `profile`) names a profile of the AWS configuration, and the store is "
                f"{scheme}://. Leave it off, and give the options of the store's own library"
            )
        return StoreOptions(scheme, given, rest, single_writer)

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" if k in _SHOWN else f"{k}={REDACTED}" for k, v in sorted(self.given.items()))
        return f"StoreOptions({self.scheme or 'path'}{': ' if shown else ''}{shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("storage options are not pickled; open the store again where it is needed")

    @property
    def is_s3(self) -> bool:
        return self.scheme in S3_SCHEMES

    @property
    def digest(self) -> str:
        """A digest that identifies the options without holding them."""
        return hashlib.sha256(repr(sorted(self.given.items())).encode()).hexdigest()

    def redact(self, text: str) -> str:
        """Return `text` without any value that may be secret: for error messages of libraries."""
        values = {v for k, value in self.given.items() if k not in _SHOWN for v in _texts(value)}
        return redacted(text, values, SECRET_CHARS_MIN)


def _s3(options: dict[str, Any]) -> dict[str, Any]:
    """Return options for `S3FileSystem`: Stillstate's names moved to where botocore expects them, and time limits."""
    known = _s3fs_names()
    for name in options:
        if name not in known and name not in _OURS:
            near = difflib.get_close_matches(str(name), [*known, *_OURS], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted({*known, *_OURS}))}"
            raise InvalidConfiguration(f"unknown storage option {str(name)[:40]!r} of an S3 store; {hint}")
    ours = {name: _typed(name, options.pop(name), kind) for name, kind in _OURS.items() if name in options}
    _check_credentials(options, ours)
    client = dict(_typed("client_kwargs", options.pop("client_kwargs", {}), dict))
    config = dict(_typed("config_kwargs", options.pop("config_kwargs", {}), dict))
    if "region" in ours:
        client["region_name"] = ours["region"]
    if "path_style" in ours:
        config["s3"] = {**config.get("s3", {}), "addressing_style": "path" if ours["path_style"] else "virtual"}
    config.setdefault("connect_timeout", _above_zero("connect_timeout_s", ours, CONNECT_TIMEOUT_S))
    config.setdefault("read_timeout", _above_zero("read_timeout_s", ours, READ_TIMEOUT_S))
    config.setdefault("max_pool_connections", _above_zero("connections_max", ours, CONNECTIONS_MAX))
    attempts = _above_zero("attempts_max", ours, ATTEMPTS_MAX)
    config.setdefault("retries", {"mode": "standard", "total_max_attempts": attempts})
    profile = {"profile": ours["profile"]} if "profile" in ours else {}
    return {**options, **profile, "client_kwargs": client, "config_kwargs": config}


def _impatient(config: Mapping[str, Any], patience: Patience) -> dict[str, Any]:
    return {
        **config,
        "connect_timeout": min(config["connect_timeout"], patience.connect_s),
        "read_timeout": min(config["read_timeout"], patience.read_s),
        "retries": {"mode": "standard", "total_max_attempts": 1},
    }


def _s3fs_names() -> frozenset[str]:
    try:
        from s3fs import S3FileSystem
    except ImportError as error:
        raise InvalidConfiguration("an S3 store needs the package s3fs; install stillstate[s3] or s3fs") from error
    parameters = set(inspect.signature(S3FileSystem.__init__).parameters)
    # `asynchronous`, `loop` and `session` are for programs that use s3fs themselves.
    return frozenset(parameters - {"self", "kwargs", "asynchronous", "loop", "session"})


def _check_credentials(options: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    key, secret = (options.get(a) or options.get(b) for a, b in (("key", "username"), ("secret", "password")))
    if bool(key) != bool(secret):
        missing, there = ("secret", "key") if key else ("key", "secret")
        raise InvalidConfiguration(
            f"storage option {missing!r} is missing: {there!r} alone is no credential. Give both, or neither and let "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or the machine's role say it"
        )
    if options.get("token") and not key:
        raise InvalidConfiguration("storage option 'token' needs 'key' and 'secret' beside it; give all three, or none")
    if key and "profile" in ours:
        raise InvalidConfiguration(
            "storage options 'key' and 'profile' name two sets of credentials; leave one of them off"
        )
    endpoint = options.get("endpoint_url")
    if endpoint is not None:
        parts = urlsplit(_typed("endpoint_url", endpoint, str))
        if "@" in endpoint or parts.query:  # a secret may contain a slash, which would end the host there
            raise InvalidConfiguration(
                "storage option 'endpoint_url' holds credentials or parameters; give them as 'key' and 'secret'"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidConfiguration("storage option 'endpoint_url' must be like https://host or http://host:port")
    if "profile" in ours:
        _check_profile(ours["profile"])


def _check_profile(name: str) -> None:
    from botocore.session import Session

    known = Session().available_profiles
    if name not in known:
        there = f"it has: {', '.join(sorted(known)[:20])}" if known else "it has none"
        raise InvalidConfiguration(
            f"there is no profile {name[:80]!r} in the AWS configuration (AWS_CONFIG_FILE, "
            f"AWS_SHARED_CREDENTIALS_FILE); {there}"
        )


def _typed(name: str, value: Any, kind: type) -> Any:
    fits = isinstance(value, int | float) if kind is float else isinstance(value, Mapping if kind is dict else kind)
    if not fits or (kind is not bool and isinstance(value, bool)):
        words = {str: "text", bool: "true or false", float: "a number", int: "a whole number", dict: "a mapping"}
        raise InvalidConfiguration(f"storage option {name!r} must be {words[kind]}")
    return value


def _above_zero(name: str, given: Mapping[str, Any], default: float) -> Any:
    value = given.get(name, default)
    if not 0 < value <= 3600:
        raise InvalidConfiguration(f"storage option {name!r} = {value} is outside 0 … 3600; choose a value inside")
    return value


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for child in value.values():
            yield from _texts(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _texts(child)
    elif isinstance(value, str):
        yield value
