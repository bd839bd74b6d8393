"""The archive of classes: what Java is told, and which archives are not believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from state_runtime.spark import class_archive
from state_runtime.spark.class_archive import JAVA_OPTIONS, archive_folder, archive_key, archive_name, with_archive


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Java, a Spark and a cache folder of this test."""
    (tmp_path / "java" / "bin").mkdir(parents=True)
    command = tmp_path / "java" / "bin" / "java"
    command.write_text("")
    (tmp_path / "java" / "release").write_text('JAVA_VERSION="17.0.1"\n')
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    (tmp_path / "spark" / "jars" / "spark-core.jar").write_text("1")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    return command


def made(java: Path) -> Path:
    folder = archive_folder()
    folder.mkdir(parents=True, mode=0o700)
    (folder / "new").write_bytes(b"classes")
    (folder / "new").chmod(0o444)
    return (folder / "new").rename(folder / archive_name(archive_key(java), folder / "new"))


def test_without_an_archive_java_starts_as_ever(java: Path) -> None:
    assert with_archive({"a": "b"}, java) == {"a": "b"}


def test_an_archive_is_used_beside_the_callers_own_options(java: Path) -> None:
    archive = made(java)
    options = with_archive({JAVA_OPTIONS: "-Dmine=1"}, java)[JAVA_OPTIONS]
    assert options == f"-Dmine=1 -Xshare:auto '-XX:SharedArchiveFile={archive}' -Xlog:cds*=off"
    chosen = {JAVA_OPTIONS: "-XX:SharedArchiveFile=/mine.jsa"}
    assert with_archive(chosen, java) == chosen


def test_an_archive_belongs_to_one_java_one_spark_and_one_class_path(
    java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {archive_key(java)}
    (tmp_path / "java" / "release").write_text('JAVA_VERSION="17.0.2"\n')
    names.add(archive_key(java))
    (tmp_path / "spark" / "jars" / "more.jar").write_text("1")
    names.add(archive_key(java))
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    names.add(archive_key(java))
    assert len(names) == 4
    assert archive_key(java) in names


@pytest.mark.parametrize("harm", ["writable by others", "link", "folder of others"])
def test_an_archive_that_somebody_else_can_have_written_is_not_used(java: Path, tmp_path: Path, harm: str) -> None:
    """Java runs what is in it."""
    archive = made(java)
    assert JAVA_OPTIONS in with_archive({}, java)
    if harm == "writable by others":
        archive.chmod(0o664)
    elif harm == "link":
        os.replace(archive, tmp_path / "elsewhere.jsa")
        archive.symlink_to(tmp_path / "elsewhere.jsa")
    else:
        archive.parent.chmod(0o755)
    assert with_archive({}, java) == {}


@pytest.mark.parametrize("body", [b"", b"class", b"clatses", b"classes and more"])
def test_an_archive_that_is_not_what_was_written_is_not_used(java: Path, body: bytes) -> None:
    """Java maps it: of one that is cut short it dies, at every start."""
    archive = made(java)
    archive.chmod(0o644)
    archive.write_bytes(body)
    assert with_archive({}, java) == {}


def test_no_home_and_no_spark_are_no_fault(java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("SPARK_HOME", str(java))
    assert with_archive({}, java) == {}
    monkeypatch.setattr(class_archive, "archive_folder", nowhere)
    assert with_archive({}, java) == {}
