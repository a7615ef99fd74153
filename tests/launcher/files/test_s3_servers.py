"""What holds of any store: a directory, and two S3 servers; one of them verifies signatures."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import launching
import pytest
from runs import free_port
from s3fs import S3FileSystem
from stores import ODD_NAMES, Expecting

from sm_nanogpt import InputError, ServiceError, Settings, upload_data
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.text.store import last_upload

KEY, SECRET = "AKIAEXAMPLE", "secret-of-the-test"
SMALLEST_PART = 5 << 20  # bytes: that of S3
SIZE = 2 * SMALLEST_PART + 12345  # more than one part, and not a whole number of them


def interrupt(_: int) -> None:
    """A progress hook that ends a write in the middle."""
    raise OSError("the line is cut")


@pytest.fixture(scope="module")
def rclone(tmp_path_factory):
    root = tmp_path_factory.mktemp("rclone")
    port = free_port()
    (root / "bucket").mkdir()
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
    options = (
        f"--addr=127.0.0.1:{port}",
        f"--auth-key={KEY},{SECRET}",
        f"--config={os.devnull}",
        "--vfs-cache-mode=off",
    )
    process = subprocess.Popen(
        [program, "serve", "s3", str(root), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def listens() -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", port)) == 0

    launching.until(listens, 30)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture(params=["directory", "moto", "rclone"])
def store(request, home, monkeypatch, tmp_path):
    """A store of each kind in turn."""
    monkeypatch.setattr("sm_nanogpt.launcher.files.s3.PART_BYTES", SMALLEST_PART)
    if request.param == "directory":
        yield storage.to_uri(tmp_path / "some/prefix")
        return
    if request.param == "moto":
        url = request.getfixturevalue("emulator").url
    else:
        url = request.getfixturevalue("rclone")
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        # rclone answers a range with the checksum of the whole.
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    if request.param == "moto":
        boto3.client("s3").create_bucket(Bucket="bucket")
    yield f"s3://bucket/{tmp_path.name}"
    S3FileSystem.clear_instance_cache()


def test_a_file_of_many_parts_comes_back(store, tmp_path):
    source = tmp_path / "large.bin"
    source.write_bytes(os.urandom(SIZE))
    upload, fetched = Expecting(), Expecting()
    storage.write_file(source, storage.join(store, "large.bin"), upload)
    assert sum(upload) == source.stat().st_size
    assert len(upload) > 2
    (file,) = storage.fetch(storage.join(store, "large.bin"), tmp_path / "back", fetched)
    assert file.read_bytes() == source.read_bytes()
    assert sum(fetched) == fetched.expected == source.stat().st_size


def test_a_file_comes_back_under_its_name(store, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"content")
    for name in ODD_NAMES:
        uri = storage.join(store, name)
        storage.write_file(source, storage.join(uri, f"{name}.txt"))
        (copy,) = storage.fetch(uri, tmp_path / "back")
        assert copy == tmp_path / "back" / f"{name}.txt"
        assert copy.read_bytes() == b"content"


def test_files_below_a_prefix_are_listed_and_fetched(store, tmp_path):
    for name, content in (("b/one.txt", b"1"), ("two.txt", b"22")):
        storage.write_bytes(storage.join(store, "a", *name.split("/")), content)
    assert storage.list_files(storage.join(store, "a")) == {"b/one.txt": 1, "two.txt": 2}
    hook = Expecting()
    storage.fetch(storage.join(store, "a"), tmp_path / "here", hook)
    assert launching.tree(tmp_path / "here") == {"b", "b/one.txt", "two.txt"}
    assert hook.expected == 3
    assert sorted(hook) == [1, 2]


@pytest.mark.parametrize("store", ["directory", "moto"], indirect=True)
def test_a_missing_file_is_an_error_or_none(store, tmp_path):
    gone = storage.join(store, "gone")
    assert storage.read_document(gone, dict) is None
    missing = rf"^{gone}: (nothing is there|no such file)"
    with pytest.raises(ServiceError, match=missing):
        storage.fetch(gone, tmp_path / "to")
    with pytest.raises(ServiceError, match=missing):
        storage.fingerprint(gone)


@pytest.mark.parametrize("store", ["directory"], indirect=True)
def test_the_manifest_of_many_files_is_written_last(store, home, tmp_path, monkeypatch):
    write, file_counts = storage.write_json, list[int]()

    def record(uri: str, *args: Any) -> None:
        if uri.startswith(store) and uri.endswith(".json"):
            file_counts.append(len(storage.list_files(uri.removesuffix(".json"))))
        write(uri, *args)

    (tmp_path / "notes").mkdir()
    for number in range(50):
        (tmp_path / f"notes/{number}.txt").write_text(f"Note {number} of many small ones.")
    monkeypatch.setattr(storage, "write_json", record)
    upload = upload_data(tmp_path / "notes", Settings(home=home, store=store))
    assert file_counts == [50] == [len(upload.files)]


@pytest.mark.parametrize("store", ["directory", "moto"], indirect=True)
def test_an_interrupted_write_keeps_the_old_file(store, tmp_path):
    source, uri = tmp_path / "large.bin", storage.join(store, "broken.bin")
    source.write_bytes(bytes(SIZE))
    with pytest.raises(ServiceError, match="the line is cut"):
        storage.write_file(source, uri, interrupt)
    assert storage.list_files(store) == {}
    storage.write_bytes(uri, b"old")
    with pytest.raises(ServiceError, match="the line is cut"):
        storage.write_file(source, uri, interrupt)
    assert storage.list_files(store) == {"broken.bin": 3}
    assert storage.read_bytes(uri) == b"old"
    directory = storage.local_path(store)
    if directory is not None:  # not even a hidden file is left
        with pytest.raises(KeyboardInterrupt):
            storage.write_file(source, uri, Mock(side_effect=KeyboardInterrupt))
        assert launching.tree(directory) == {"broken.bin"}


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_the_next_upload_completes_an_interrupted_one(store, home, short_text_file):
    settings = Settings(home=home, store=store)
    with pytest.raises(ServiceError, match="the line is cut"):
        upload_data(short_text_file, settings, progress=interrupt)
    assert not [name for name in storage.list_files(store) if name.endswith(".json")]
    with pytest.raises(InputError, match="nothing was uploaded"):
        last_upload(settings)
    assert upload_data(short_text_file, settings).uploaded
    (copy,) = storage.fetch(last_upload(settings), home / "back")
    assert copy.read_bytes() == short_text_file.read_bytes()


def test_a_wrong_key_names_the_store(rclone, home, short_text_file, cli, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    S3FileSystem.clear_instance_cache()
    ran = cli("--store", "s3://bucket/some/prefix", "upload-data", short_text_file)
    assert ran.code == 1
    assert "s3://bucket/some/prefix" in ran.error
