"""What killed commands leave in the home: the next command removes it, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import runs

from sm_nanogpt import Settings
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.scratch import remove_all_leftovers, remove_leftovers, scratch
from sm_nanogpt.launcher.text.corpus import upload_data
from sm_nanogpt.launcher.text.sources import temporary

# A command that writes a file, and then waits to be killed.
WRITES = """
import sys, time
from pathlib import Path
from sm_nanogpt.launcher.files import storage
with storage.replacing(Path(sys.argv[1]) / "store/data/text.txt") as file:
    file.write(b"x" * 100_000)
    print("it waits", flush=True)
    time.sleep(1000)
"""


def files_in(home: Path) -> set[str]:
    return {path.name for path in home.rglob("*") if path.is_file()}


def test_a_directory_that_is_in_use_stays(home):
    with scratch(home / "cache", "text-") as directory:
        remove_all_leftovers(Settings(home=home))
        assert directory.exists()


def test_a_file_that_is_being_written_stays(home):
    (home / "store/data").mkdir(parents=True)
    with storage.replacing(home / "store/data/text.txt") as file:
        file.write(b"x" * 100_000)
        remove_all_leftovers(Settings(home=home))
        assert Path(file.name).exists()


def test_a_file_stays_until_it_has_its_name(tmp_path, monkeypatch):
    """Another command may look at it after the last byte, too."""
    replace = Path.replace

    def looked_at(path: Path, target: Path) -> None:
        remove_leftovers([path])
        replace(path, target)

    monkeypatch.setattr(Path, "replace", looked_at)
    with storage.replacing(tmp_path / "text.txt") as file:
        file.write(b"x")
    assert (tmp_path / "text.txt").read_bytes() == b"x"


def test_what_a_killed_command_left_is_removed(home):
    (home / "store/data").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", WRITES, str(home)],
        env={**os.environ, "PYTHONPATH": str(runs.SCRIPT.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "it waits\n"
        process.kill()
    assert files_in(home)
    remove_all_leftovers(Settings(home=home))
    assert not files_in(home)


@pytest.fixture
def leftovers(home):
    """A directory and a file as killed commands leave them."""
    directory = home / "cache/text-0123"
    file = home / "store/data/.text.txt.0123abcd.tmp"
    for path in (directory / ".lock", file):
        path.parent.mkdir(parents=True)
        path.write_text("held by a command\n")
    return [directory, file]


def test_without_locks_nothing_is_removed(home, leftovers, monkeypatch):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(37, "No locks available")))
    remove_all_leftovers(Settings(home=home))
    assert all(path.exists() for path in leftovers)


def test_the_next_command_of_a_kind_removes_what_is_left(home, leftovers):
    with temporary(Settings(home=home)) as directory:
        assert list((home / "cache").iterdir()) == [directory]


def test_a_repeated_upload_removes_what_a_killed_one_left(home, short_text_file):
    uri = upload_data(short_text_file, Settings(home=home)).uri
    directory = storage.local_path(uri)
    assert directory is not None
    (home / f"store/data/{directory.name}.json").unlink()
    (directory / ".input.txt.0123abcd.tmp").write_text("half")
    upload_data(short_text_file, Settings(home=home))
    assert len(list(directory.iterdir())) == 1


def test_delete_removes_what_killed_commands_left(home, job, cli):
    leftovers = [home / path for path in ("models/.fetch-1", "tries/.new-2", "tries/a/.job-3")]
    for directory in leftovers:
        directory.mkdir(parents=True)
        (directory / ".lock").write_text("held by a command\n")
    cli("delete", job.job_id, "--yes").good  # noqa: B018
    assert not any(directory.exists() for directory in leftovers)


def test_files_beside_ours_in_a_store_stay(home, tmp_path):
    """The store may be a directory that a user also has for other things."""
    others, ours = tmp_path / "disk/.photo.0123abcd.tmp", tmp_path / "disk/data/.x.0123abcd.tmp"
    ours.parent.mkdir(parents=True)
    for path in (others, ours):
        path.write_text("x")
    remove_all_leftovers(Settings(home=home, store=str(tmp_path / "disk")))
    assert others.exists()
    assert not ours.exists()


@pytest.mark.parametrize(("age", "stays"), [(0, True), (120, False)])
def test_what_may_be_about_to_be_locked_stays_for_a_minute(age, stays, tmp_path):
    """A file is created, then locked, and then written."""
    empty = tmp_path / ".file.0123abcd.tmp"
    empty.touch()
    os.utime(empty, (time.time() - age,) * 2)
    remove_leftovers([empty])
    assert empty.exists() == stays


def test_a_directory_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch):
    """On NFS, a file that is mapped keeps its directory."""
    monkeypatch.setattr("os.rmdir", Mock(side_effect=OSError(39, "Directory not empty")))
    with scratch(tmp_path / "cache", "text-") as directory:
        (directory / "shard").write_bytes(b"x")


@pytest.mark.parametrize(("days", "stays"), [(0.5, True), (2, False)])
def test_a_directory_without_a_lock_stays_for_a_day(days, stays, tmp_path):
    """An older version wrote it, or NFS keeps it."""
    directory = tmp_path / "text-0123"
    directory.mkdir()
    written = time.time() - days * 24 * 60 * 60
    os.utime(directory, (written, written))
    remove_leftovers([directory])
    assert directory.exists() == stays
