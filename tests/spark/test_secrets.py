"""Sentinel credentials go through everything that a job on S3 does, and everything that it leaves is searched for them.

Real drivers in processes of their own (their logs hold what executors say too), three ways of giving credentials, failures of the
store and of user code, Spark's event log (what its UI shows: configuration, plans, environment), and Dagster's own storage.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import dagster as dg
import pytest

from state_runtime.base.errors import StillstateError
from state_runtime.store import open_store
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.resources import StillstateResource

from ..conftest import ROOT
from ..s3_server import CountingServer, Fault

pytestmark = [pytest.mark.spark, pytest.mark.long]

KEY, SECRET, TOKEN = "AKIASENTINEL7F1E", "s3cr3t/sentinel+7f1eb9", "t0ken/sentinel+7f1eb9=="
SENTINELS = (KEY, SECRET, TOKEN)
TIMEOUT_S = 600

JOB = """
import pandas as pd
from state_runtime import ParquetSink, StreamingJob
from state_runtime import aggregates

def show(frame):
    frame.explain(True)
    print(frame.sparkSession.sparkContext.getConf().getAll(), flush=True)
    return frame

def build(context):
    print(context, repr(context), context.settings, flush=True)
    job = context.job()
    print(job, repr(vars(job)["_store"]), flush=True)
    sink = ParquetSink("s3://lake/out", storage_options=context.storage_options)
    print(sink, flush=True)
    (job.read(lambda spark: spark.readStream.schema("k string, v long").json(context.options["inbox"]))
        .key_by("k").aggregate(uid="by-k", n=aggregates.count())
        .transform(show)
        .key_by("n").aggregate(uid="by-n", last=aggregates.max("k"))
        .write(sink, name="out"))
    return job

def breaks(row):
    raise ValueError("row is wrong")

def broken(context):
    job = context.job()
    def bad(frame):
        from pyspark.sql.functions import udf
        return frame.withColumn("x", udf(breaks)("n"))
    (job.read(lambda spark: spark.readStream.schema("k string, v long").json(context.options["inbox"]))
        .key_by("k").aggregate(uid="by-k", n=aggregates.count())
        .transform(bad)
        .write(ParquetSink("s3://lake/out-broken", storage_options=context.storage_options), name="out"))
    return job
"""

CONFIG = """
version: 1
defaults:
  entry_point: secret_job:build
  store: s3://lake/state-{way}
  {credentials}
  local_dir: local
  parallelism: 2
  options: {{inbox: in}}
  path_options: [inbox]
  launcher: {{log_dir: logs, start_timeout_s: 120}}
  trigger: {{processing_time_s: 0.2}}
  checkpoint: {{heartbeat_interval_s: 0.2}}
  spark:
    master: "local[2]"
    conf:
      spark.ui.enabled: false
      spark.log.level: INFO
      spark.driver.memory: 1g
      spark.local.dir: {folder}/spark
      spark.sql.warehouse.dir: {folder}/warehouse
      spark.eventLog.enabled: true
      spark.eventLog.compress: false
      spark.eventLog.dir: file://{folder}/events
jobs:
  tiny: {{}}
  broken: {{entry_point: "secret_job:broken"}}
"""

OPTIONS = "storage_options: {{key: '${{SENTINEL_KEY}}', secret: '${{SENTINEL_SECRET}}', token: '${{SENTINEL_TOKEN}}', endpoint_url: {endpoint}, region: us-east-1}}"  # fmt: skip
WAYS = {
    "options": OPTIONS,
    "environment": "storage_options: {{endpoint_url: {endpoint}, region: us-east-1}}",
    "profile": "storage_profile: lake",
}


class Place:
    """A folder with a configuration, and the server that it names."""

    def __init__(self, folder: Path, server: CountingServer, way: str) -> None:
        self.folder, self.server, self.way = folder, server, way
        for name in ("in", "events", "spark", "logs", "home"):
            (folder / name).mkdir()
        self.add_input(1)
        (folder / "secret_job.py").write_text(JOB)
        self.config = folder / "stillstate.yaml"
        credentials = WAYS[way].format(endpoint=server.endpoint)
        self.config.write_text(CONFIG.format(way=way, credentials=credentials, folder=folder))
        # Outside of what is searched: whoever wrote it knows it.
        self.profile = folder.parent / f"aws-{way}"
        self.profile.write_text(
            f"[profile lake]\nregion = us-east-1\nendpoint_url = {server.endpoint}\n"
            f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\naws_session_token = {TOKEN}\n"
        )
        self.output: list[str] = []

    def add_input(self, number: int) -> None:
        (self.folder / "in" / f"{number}.json").write_text('{"k": "a", "v": 1}\n{"k": "b", "v": 2}\n')

    @property
    def environment(self) -> dict[str, str]:
        aws = {
            "options": {"SENTINEL_KEY": KEY, "SENTINEL_SECRET": SECRET, "SENTINEL_TOKEN": TOKEN},
            "environment": {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN},
            "profile": {"AWS_CONFIG_FILE": str(self.profile)},
        }[self.way]
        plain = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        return {**plain, **aws, "PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true"}

    def command(self, *arguments: str) -> int:
        """Run the command line; what Spark spills to disk meanwhile is searched as it goes."""
        process = subprocess.Popen(
            [sys.executable, "-m", "stillstate.orchestration.cli", *arguments, "--config", str(self.config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )
        try:
            text, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
        self.output.append(text)
        return process.returncode

    def left(self) -> Iterator[tuple[str, bytes]]:
        """Everything that can be looked at afterwards."""
        for number, text in enumerate(self.output):
            yield f"output {number}", text.encode()
        for file in sorted(self.folder.rglob("*")):
            if file.is_file() and not file.is_symlink():
                yield str(file.relative_to(self.folder)), file.read_bytes()
        client = boto3.client(
            "s3", endpoint_url=self.server.endpoint, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
        )  # fmt: skip
        for page in client.get_paginator("list_objects_v2").paginate(Bucket="lake"):
            for entry in page.get("Contents", []):
                answer = client.get_object(Bucket="lake", Key=entry["Key"])
                yield f"s3://{entry['Key']}", answer["Body"].read() + json.dumps(answer["Metadata"]).encode()


def spelled() -> set[bytes]:
    """The sentinels, and how they look in URLs, in Base64 and in JSON."""
    found: set[bytes] = set()
    for text in SENTINELS:
        found |= {text.encode(), quote(text, safe="").encode(), json.dumps(text)[1:-1].replace("/", "\\/").encode()}
        found |= {base64.b64encode(b" " * shift + text.encode())[4:-4] for shift in range(3)}
    return found


def assert_no_sentinel(left: Iterable[tuple[str, bytes]]) -> None:
    wanted = spelled()
    searched = 0
    for where, body in left:
        searched += 1
        assert not [w for w in wanted if w in body], f"a credential is in {where}"
    assert searched > 10


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    with CountingServer() as server:
        (tmp_path / "searched").mkdir()
        yield lambda way: Place(tmp_path / "searched", server, way)


def fails_from(method: str, word: str, how: str) -> Callable[[str, str], Fault | None]:
    """A store that quotes what it was sent in its refusals, as some do."""
    message = f"denied for {KEY} with {SECRET} and {TOKEN}"
    return lambda called, path: Fault(how, message=message) if called == method and word in path else None


@pytest.mark.parametrize("way", sorted(WAYS))
def test_no_credential_is_in_anything_that_a_job_leaves(place: Callable[[str], Place], way: str) -> None:
    """A run, a refused write in the middle of a second one, and the commands that look at both."""
    here = place(way)
    assert here.command("run", "tiny", "--until-idle") == 0, here.output[-1][-3000:]
    here.add_input(2)
    if way == "options":  # where the values are known, they are taken out of what others say
        here.server.fault = fails_from("PUT", "changelog/", "403 AccessDenied")
        assert here.command("run", "tiny", "--until-idle") == 4
        assert "denied for *** with *** and ***" in here.output[-1]
        here.server.fault = lambda method, path: None
        assert here.command("run", "broken", "--until-idle") == 7, here.output[-1][-3000:]
        assert "row is wrong" in here.output[-1]
    for arguments in (("jobs",), ("jobs", "--json")):
        assert here.command(*arguments) == 0
    assert any("events" in where for where, _ in here.left()), "the event log should have been written"
    assert_no_sentinel(here.left())


def test_no_credential_is_in_dagster(
    place: Callable[[str], Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs, events, metadata, sensor ticks and cursors, checks: all of its storage, after failures too."""
    here = place("options")
    for name, value in here.environment.items():
        if name.startswith("SENTINEL"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (here.folder / "dagster").mkdir()
        with dg.DagsterInstance.local_temp(str(here.folder / "dagster")) as instance:
            resource = StillstateResource(config_file=str(here.config))
            defs = build_definitions(load_spec(here.config), resource)
            seen: list[Any] = [_in_process(defs, instance, "start_tiny", {"until_idle": True})]
            here.add_input(2)
            here.server.fault = fails_from("PUT", "", "403 AccessDenied")
            seen.append(_in_process(defs, instance, "start_tiny", {"until_idle": True}))
            seen += _ticks(defs, instance, resource)
            here.server.fault = fails_from("LIST", "", "403 AccessDenied")
            seen += _ticks(defs, instance, resource)
            for record in instance.get_run_records():
                seen.append(instance.all_logs(record.dagster_run.run_id))
        here.output += [repr(seen), repr(defs), str(vars(defs))]
    here.server.fault = lambda method, path: None
    assert_no_sentinel(here.left())
    assert "denied for ***" in here.output[0] + "".join(
        p.read_text(errors="replace") for p in (here.folder / "logs").iterdir()
    )


def _in_process(defs: dg.Definitions, instance: dg.DagsterInstance, job: str, config: dict[str, Any]) -> Any:
    definition = defs.resolve_job_def(job)
    (op,) = [node.name for node in definition.nodes]
    run_config = {"ops": {op: {"config": config}}}
    result = definition.execute_in_process(run_config=run_config, instance=instance, raise_on_error=False)
    return [repr(event) for event in result.all_events]


def _ticks(defs: dg.Definitions, instance: dg.DagsterInstance, resource: StillstateResource) -> list[str]:
    seen = []
    sensors = ("progress", "recovery", "desired_state", "materialization")
    for name in (f"stillstate_{sensor}" for sensor in sensors):
        with dg.build_sensor_context(instance=instance, resources={"stillstate": resource}) as context:
            result: Any = defs.resolve_sensor_def(name)(context)
        for event in getattr(result, "asset_events", None) or []:
            instance.report_runless_asset_event(event)
        seen.append(repr(result))
    return seen


def test_no_credential_is_in_errors_of_the_store(place: Callable[[str], Place]) -> None:
    """Text and repr of every error, with its causes, of every operation, whatever the server repeats of the request."""
    here = place("options")
    options = {"key": KEY, "secret": SECRET, "token": TOKEN, "endpoint_url": here.server.endpoint, "attempts_max": 1}
    store = open_store("s3://lake/errors", options)
    store._retry_wait_max_s = 0.0  # type: ignore[attr-defined]
    store.put("a", b"1")
    shown = [repr(store), repr(vars(store)), store.url]
    for how in ("403 SignatureDoesNotMatch", "400 InvalidRequest", "503 SlowDown"):
        message = f"key {KEY}, string to sign {SECRET}, token {TOKEN}"
        here.server.fault = lambda method, path, how=how, message=message: Fault(how, message=message)
        for call in (
            lambda: store.create("b", b"1"),
            lambda: store.put("b", b"1"),
            lambda: store.read("a", 10),
            lambda: store.read_range("a", 0, 1),
            lambda: store.list_names(""),
            lambda: list(store.list_objects("")),
            lambda: store.copy("a", "b"),
            lambda: store.delete("a"),
            lambda: store.probe(),
        ):
            with pytest.raises(StillstateError) as caught:
                call()
            shown += [str(caught.value), repr(caught.value)]
            shown.append("".join(_chain(caught.value)))
    assert_no_sentinel((text[:60], text.encode()) for text in shown)


def _chain(error: BaseException | None) -> Iterator[str]:
    """What a traceback prints."""
    while error is not None:
        yield f"{error!r} {error}\n"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
