"""The folder of local copies: private to the user, or refused with what to do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.restore.private_local_dir import private_local_dir


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that all users share."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def mode(folder: Path) -> int:
    return folder.stat().st_mode & 0o777


def test_the_default_folder_is_made_private(shared: Path) -> None:
    folder = private_local_dir("")
    assert folder == shared / f"stillstate-{os.getuid()}"
    assert mode(folder) == 0o700


def test_a_default_folder_that_is_open_to_others_is_closed(shared: Path) -> None:
    """An earlier version, or a careless hand, may have left it open; it is ours, so it is closed."""
    (shared / f"stillstate-{os.getuid()}").mkdir()
    (shared / f"stillstate-{os.getuid()}").chmod(0o777)
    assert mode(private_local_dir("")) == 0o700


@pytest.mark.parametrize("configured", [False, True])
def test_a_link_in_its_place_is_not_followed(shared: Path, configured: bool) -> None:
    """Anybody can put a link to a folder of his own into a shared directory before the first run."""
    (shared / "elsewhere").mkdir()
    link = shared / f"stillstate-{os.getuid()}"
    link.symlink_to(shared / "elsewhere")
    with pytest.raises(InvalidConfiguration, match=r"is a symbolic link; it was not followed\. Remove it"):
        private_local_dir(str(link) if configured else "")
    assert list((shared / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("configured", [False, True])
def test_a_folder_of_another_user_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch, configured: bool) -> None:
    """Its owner can read and replace what lies there, whatever its mode."""
    folder = private_local_dir("")
    shared.chmod(0o1777)
    user, real = os.geteuid(), os.fstat

    def of_another(descriptor: int) -> os.stat_result:
        return os.stat_result([*real(descriptor)[:4], user + 1, *real(descriptor)[5:]])

    monkeypatch.setattr(os, "fstat", of_another)
    with pytest.raises(InvalidConfiguration, match=r"belongs to the user with the number .* set `local_dir`"):
        private_local_dir(str(folder) if configured else "")


def test_a_configured_folder_is_closed_to_writing_and_keeps_its_other_rights(tmp_path: Path) -> None:
    """Others may be meant to read it; nobody else may put anything there."""
    folder = tmp_path / "local"
    folder.mkdir()
    folder.chmod(0o775)
    assert private_local_dir(str(folder)) == folder
    assert mode(folder) == 0o755


def test_a_configured_folder_that_is_not_there_is_made_for_its_user_alone(tmp_path: Path) -> None:
    """Nobody has said yet who else is meant to read it."""
    assert mode(private_local_dir(str(tmp_path / "local"))) == 0o700


def test_a_folder_that_others_could_replace_is_refused(shared: Path) -> None:
    """Without the sticky bit whoever can write to the folder above can rename ours away."""
    shared.chmod(0o777)
    with pytest.raises(InvalidConfiguration, match="all users can put another folder in its place"):
        private_local_dir("")


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InvalidConfiguration, match="choose a folder that you can write to"):
        private_local_dir(str(tmp_path / "file"))
