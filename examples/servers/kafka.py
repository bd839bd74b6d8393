"""A real Kafka broker on loopback, of one process: started, killed and started again on the same files."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

__all__ = ["BrokerMissing", "KafkaBroker", "certificate", "settled"]

JARS: Final = Path(__file__).resolve().parents[2] / ".kafka" / "lib"
_START_S: Final = 90.0
_STOP_S: Final = 30.0
_HEAP: Final = ("-Xms128m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class BrokerMissing(FileNotFoundError):
    """The broker's jars are not on this machine."""


class KafkaBroker:
    """A broker with its controller in one process. It ends with `close`, or when the block of `with` is left.

    Args:
        folder: for its files; made anew.
        settings: more of `server.properties`.
        users: with their passwords: clients must speak TLS, with the CA `ca` of the folder, and name one of them
            (SASL, PLAIN). Needs openssl.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, str] | None = None, *, users: Mapping[str, str] | None = None
    ) -> None:
        if not any(JARS.glob("kafka_2.13-*.jar")):
            raise BrokerMissing(f"there is no Kafka broker in {JARS}: make kafka")
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        port, controller_port = _free_ports(2)
        self.bootstrap = f"127.0.0.1:{port}"
        self.client: Mapping[str, str] = {"bootstrap.servers": self.bootstrap}
        """Settings that a client needs, as its administrator."""
        given = {**_properties(folder, port, controller_port), **(settings or {})}
        if users:
            given |= _secured(folder, port, controller_port, users)
            name, password = next(iter(users.items()))
            login = {"sasl.mechanism": "PLAIN", "sasl.username": name, "sasl.password": password}
            tls = {"security.protocol": "SASL_SSL", "ssl.ca.location": str(self.ca)}
            self.client = {**self.client, **tls, **login}
        self._file = folder / "server.properties"
        self._file.write_text("".join(f"{key}={value}\n" for key, value in given.items()))
        # An id must not begin with a dash, which the tool takes for an option: a first byte of 0 is written as A.
        cluster_id = base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        tool = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._file)]
        subprocess.run([*_java(), *tool], check=True, capture_output=True, stdin=subprocess.DEVNULL)

    def __enter__(self) -> KafkaBroker:
        self.start()
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def start(self) -> None:
        """Start it, again if it was killed, and wait until it answers."""
        with (self.folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*_java(), "kafka.Kafka", str(self._file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        waiting = Retrying(
            retry=retry_if_exception_type(KafkaException),
            stop=stop_after_delay(_START_S),
            wait=wait_fixed(0.2),
            reraise=True,
        )
        waiting(lambda: self.admin.list_topics(timeout=5))

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it by SIGKILL, as a machine that fails does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_S)

    def close(self) -> None:
        """End it; its files stay."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()

    @cached_property
    def admin(self) -> AdminClient:
        """A client for its administration. It is quiet while the broker is away."""
        return AdminClient({**self.client, "log_level": 0, "reconnect.backoff.max.ms": 500})

    @property
    def ca(self) -> Path:
        """The certificate of whoever has signed the broker's, if it speaks TLS."""
        return self.folder / "ca.pem"

    def create_topic(self, name: str, partitions: int = 1, **settings: str) -> None:
        """Make a topic; dots in names of settings are written as underscores."""
        config = {key.replace("_", "."): value for key, value in settings.items()}
        settled(self.admin.create_topics([NewTopic(name, partitions, 1, config=config)]))

    def delete_topic(self, name: str) -> None:
        """Delete a topic, and wait until the broker does not list it any more."""
        settled(self.admin.delete_topics([name]))
        waiting = Retrying(
            retry=retry_if_exception_type(_StillThere), stop=stop_after_delay(_START_S), wait=wait_fixed(0.1)
        )
        waiting(self._look_for, name)

    def _look_for(self, name: str) -> None:
        if name in self.admin.list_topics(timeout=5).topics:
            raise _StillThere(name)


class _StillThere(Exception):
    pass


def settled(answers: Mapping[Any, Any]) -> None:
    """Wait for what an administrative call has begun; raises KafkaException if it was refused."""
    for answer in answers.values():
        answer.result(_START_S)


def _java() -> Sequence[str]:
    home = os.environ.get("JAVA_HOME", "")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if not program:
        raise BrokerMissing("java is not on the path")
    return (program, *_HEAP, "-cp", f"{JARS}/*")


def _free_ports(number: int) -> list[int]:
    # All are held until all are known, so that they differ.
    held = [socket.socket() for _ in range(number)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def certificate(name: str, folder: Path, ca: str = "") -> Path:
    """Make a key and a certificate for 127.0.0.1, `name`.key and `name`.pem; signed by itself, or by another one of
    the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.pem"
    signed = ("-CA", str(folder / f"{ca}.pem"), "-CAkey", str(folder / f"{ca}.key")) if ca else ()
    kind = "critical,CA:FALSE" if ca else "critical,CA:TRUE"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "3",
            ),
            *("-subj", f"/CN={name}", "-addext", f"basicConstraints={kind}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(folder / f"{name}.key"), "-out", str(file), *signed),
        ],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    return file


def _secured(folder: Path, port: int, controller_port: int, users: Mapping[str, str]) -> dict[str, str]:
    """Settings of a broker whose clients speak TLS and say who they are; between itself and its controller nobody
    does."""
    certificate("ca", folder)
    chain = certificate("broker", folder, ca="ca")
    both = folder / "broker-with-key.pem"
    both.write_text((folder / "broker.key").read_text() + chain.read_text())
    known = " ".join(f'user_{name}="{password}"' for name, password in users.items())
    return {
        "listeners": f"SASL_SSL://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"SASL_SSL://127.0.0.1:{port}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL",
        "inter.broker.listener.name": "SASL_SSL",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(both),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(folder / "ca.pem"),
        "listener.name.sasl_ssl.plain.sasl.jaas.config": (
            "org.apache.kafka.common.security.plain.PlainLoginModule required "
            f'username="{next(iter(users))}" password="{next(iter(users.values()))}" {known};'
        ),
    }


def _properties(folder: Path, port: int, controller_port: int) -> dict[str, str]:
    """Settings of a broker without a second one: each internal topic has one copy and one partition."""
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "log.dirs": str(folder / "data"),
        "offsets.topic.num.partitions": "1",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        # After a kill it may come back at once, and not only when it was missed for nine seconds.
        "broker.session.timeout.ms": "1000",
        "broker.heartbeat.interval.ms": "300",
        "auto.create.topics.enable": "false",
        "num.partitions": "1",
    }
