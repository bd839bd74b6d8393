"""The section `notify` of `stillstate.yaml`: the receiver outside of Dagster that is notified of troubles."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from state_runtime.base.settings import SettingsGroup
from stillstate.orchestration.config.secrets import SecretMapping, Secrets

__all__ = ["NotifySpec"]


def _webhook(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if value and (not is_url or any(c.isspace() or ord(c) < 33 for c in value)):
        raise PydanticCustomError("webhook", "must be a URL: http://HOST/… or https://HOST/…")
    if value and (parts.username or parts.password):
        raise PydanticCustomError("webhook", "holds credentials; put them into `headers`")
    return value


class NotifySpec(SettingsGroup, arbitrary_types_allowed=True):
    """Where notifications go, a webhook or a command: one of each trouble, and one when the trouble has passed."""

    webhook: Annotated[str, AfterValidator(_webhook)] = Field(default="", max_length=4000, repr=False)
    """URL that gets the message as JSON by POST; an answer of 2xx means that it arrived. `${NAME}` is replaced."""
    headers: SecretMapping = Field(default_factory=Secrets, repr=False)
    """Headers of that request, for example `Authorization`."""
    command: list[Annotated[str, Field(min_length=1, max_length=4000)]] = Field(default=[], max_length=50, repr=False)
    """A command and its arguments; it gets the message as JSON on its standard input, and exit code 0 means that it
    arrived. It starts in the file's folder."""
    timeout_s: float = Field(default=5.0, ge=0.1, le=15)
    """Limit for one call."""
    per_tick_max: int = Field(default=10, ge=1, le=100)
    """Calls in one tick of the sensor; the others follow in the next, 30 s later."""

    @model_validator(mode="after")
    def _one_receiver(self) -> NotifySpec:
        if bool(self.webhook) == bool(self.command):
            raise PydanticCustomError("receiver", "needs either `webhook` or `command`, one of them")
        if self.command and self.headers:
            raise PydanticCustomError("receiver", "has `headers`, which only a `webhook` gets")
        for name, value in self.headers.items():
            if not isinstance(value, str) or not f"{name}{value}".isprintable() or not name.isascii():
                raise PydanticCustomError("header", "has a header that is not printable text on one line")
        return self

    @property
    def secrets(self) -> Secrets:
        """Return the secrets that no message may hold: a webhook's path is often its password, and words of a command
        may be too."""
        path = urlsplit(self.webhook)
        words = {f"word {n}": word for n, word in enumerate(self.command[1:])}
        return Secrets({"webhook": self.webhook, "path": path.path, "query": path.query, **words, **self.headers})
