"""Records in a schema registry's wire format as columns; see docs/avro.md.

JSON is read by Spark alone. Avro passes through Python, in batches of Arrow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.sources.avro_decode import ADVICE, HEAD_BYTES, Decoder
from state_runtime.sources.avro_types import AvroSchema
from state_runtime.sources.python_source import telling
from state_runtime.sources.registry_client import Access, NoSuchSchema, registry_of
from state_runtime.spark.arrow import spark_schema_of
from state_runtime.spark.errors import marked

__all__ = ["from_registry"]

OnError = Literal["fail", "null"]
_DAMAGED: Final = "stillstate_damaged"


def from_registry(
    column: str | Column,
    url: str | None = None,
    *,
    schema: str | Mapping[str, Any] | T.StructType | None = None,
    subject: str | None = None,
    format: Literal["avro", "json"] = "avro",
    user_env: str | None = None,
    password_env: str | None = None,
    headers_env: Mapping[str, str] | None = None,
    on_error: OnError = "fail",
    name: str = "value",
) -> Column:
    """Return a column of structs, read from records that serializers of a schema registry wrote.

    Each value is a byte 0, four bytes with the id of a schema, and the record. Avro: each writer's schema is asked for
    by its id, once in each process, and the record is read as `schema` says, by the rules of Avro's schema resolution.
    The columns are those of `schema`, and no new version of a writer changes them. JSON: the five bytes are cut off,
    the rest is read by Spark's `from_json`, and no registry is asked.

    null stays null. A registry that does not answer or refuses is an error, whatever `on_error` is. Reading has no
    effect outside of the process, so that a crash leaves nothing.

    Args:
        column: of bytes, by name or as an expression.
        url: of the registry, for Avro.
        schema: Avro: the reader's schema, as JSON in a text or a mapping. JSON: columns as Spark writes them.
        subject: Avro, instead of `schema`: the subject whose newest schema is taken, once, when the job is built. The
            next start of the job may find another.
        user_env, password_env: environment variables that hold the credentials for the registry (HTTP basic). Each
            process reads them for itself; on a cluster the executors need them too.
        headers_env: environment variables that hold further headers, `{"Authorization": "REGISTRY_TOKEN"}`.
        on_error: what happens to a value that cannot be read: another first byte, an unknown id, damage, a schema that
            cannot be resolved. "fail": the run ends, and nothing of the epoch is committed. "null": the column is null.
        name: of the column that comes.

    Raises:
        InvalidConfiguration: a schema that no column can have, an argument of the other format, a URL with secrets.
        StoreUnavailable, StoreRefused: the registry, when the job is built (`subject`) or in the tasks.
        InvalidData: in the tasks, with on_error="fail": says id and row, and not what it has.

    Example:
        def orders(records):
            return records.select(sources.from_registry("value", REGISTRY, schema=ORDER, name="o")).select("o.*")

        job.read(sources.kafka("orders", bootstrap_servers=BROKERS)).transform(orders)
    """
    if format not in ("avro", "json"):
        raise InvalidConfiguration(f'from_registry: format must be "avro" or "json" (got {format!r})')
    if on_error not in ("fail", "null"):
        raise InvalidConfiguration(f'from_registry: on_error must be "fail" or "null" (got {on_error!r})')
    given = F.col(column) if isinstance(column, str) else column
    if format == "json":
        named = {"url": url, "subject": subject, "user_env": user_env, "password_env": password_env}
        unused = [key for key, value in {**named, "headers_env": headers_env}.items() if value is not None]
        if unused:
            raise InvalidConfiguration(f"from_registry: JSON needs no registry; leave {unused[0]} out")
        return _json(given, _columns(schema), on_error).alias(name)
    if url is None:
        raise InvalidConfiguration(
            'from_registry: url is missing, the address of the registry ("https://registry:8081")'
        )
    access = Access(url, user_env, password_env, tuple(sorted((headers_env or {}).items()))).checked()
    recipe = _Recipe(_reader(schema, subject, access), access, on_error)
    reader = AvroSchema(recipe.schema, recipe.where)
    fields = spark_schema_of(pa.schema(list(reader.column)))
    return _decoding(recipe, fields)(given).alias(name)


@dataclass(frozen=True)
class _Recipe:
    """What a process needs to decode; without secrets."""

    schema: str
    access: Access
    on_error: OnError

    @property
    def where(self) -> str:
        return f"from_registry({self.access.url})"


def _reader(schema: Any, subject: str | None, access: Access) -> str:
    """Return the reader's schema as a text."""
    if (schema is None) == (subject is None):
        raise InvalidConfiguration("from_registry: give schema or subject, and not both; the columns are made of it")
    if subject is not None:
        try:
            return registry_of(access).latest(subject)
        except NoSuchSchema as error:
            raise InvalidConfiguration(
                f"from_registry({access.url}): {error}; correct the subject, or give schema"
            ) from error
    if not isinstance(schema, str | Mapping):
        raise InvalidConfiguration("from_registry: schema must be Avro's, as JSON in a text or a mapping")
    return schema if isinstance(schema, str) else json.dumps(dict(schema), sort_keys=True)


def _decoding(recipe: _Recipe, fields: T.StructType) -> Callable[[Column], Column]:
    def decode(column: pa.Array) -> pa.Array:
        with telling():
            return _decoder(recipe)(column)

    # Spark's own types of `functions` leave it out.
    made: Callable[[Column], Column] = F.arrow_udf(decode, fields)  # type: ignore[attr-defined]
    return made


@lru_cache(maxsize=64)
def _decoder(recipe: _Recipe) -> Decoder:
    """Return this process's decoder, which keeps the schemas of writers."""
    return Decoder(recipe.schema, registry_of(recipe.access).by_id, recipe.on_error, recipe.where)


def _columns(schema: Any) -> T.StructType:
    given = T.StructType.fromDDL(schema) if isinstance(schema, str) and schema.strip() else schema
    if not isinstance(given, T.StructType) or not given.fields:
        raise InvalidConfiguration('from_registry: schema names no column; for JSON write "id INT, name STRING"')
    return given


def _json(value: Column, columns: T.StructType, on_error: OnError) -> Column:
    text = F.substring(value, HEAD_BYTES + 1, 2**31 - 1).cast("string")
    wider = T.StructType([*columns.fields, T.StructField(_DAMAGED, T.StringType())])
    parsed = F.from_json(text, wider, {"columnNameOfCorruptRecord": _DAMAGED})
    is_framed = (F.length(value) > HEAD_BYTES) & (F.substring(value, 1, 1) == F.lit(b"\0"))
    problem = F.when(~is_framed, _error("a value does not begin with a byte 0 and the id of a schema")).when(
        parsed.isNull() | parsed[_DAMAGED].isNotNull(),
        _error("a record is not JSON, or has a value of another type than its column was declared with"),
    )
    # All fields are taken from behind the condition, so that no reader of some of them only is without it.
    record = F.struct(*[parsed[field.name].alias(field.name) for field in columns])
    otherwise = F.raise_error(problem) if on_error == "fail" else F.lit(None)
    return F.when(value.isNull(), F.lit(None)).when(problem.isNull(), record).otherwise(otherwise)


def _error(text: str) -> Column:
    return F.lit(str(marked(InvalidData(f"from_registry: {text}. {ADVICE}"))))
