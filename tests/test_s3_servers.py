"""The same bytes there and back, on two S3 servers; one of them verifies signatures."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import InputError, ServiceError
from launcher.files import storage

KEY, SECRET = "AKIAEXAMPLE", "secret-of-the-test"
SIZE = 3 * storage.PART_BYTES + 12345  # more than one part, and not a whole number of them


@pytest.fixture(scope="module")
def rclone(tmp_path_factory):
    root = tmp_path_factory.mktemp("rclone")
    (root / "bucket").mkdir()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
    process = subprocess.Popen(
        [
            program,
            "serve",
            "s3",
            str(root),
            f"--addr=127.0.0.1:{port}",
            f"--auth-key={KEY},{SECRET}",
            f"--config={os.devnull}",
            "--vfs-cache-mode=off",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture(params=["moto", "rclone"])
def store(request, home, monkeypatch):
    """A bucket's URI on each of the servers in turn."""
    from s3fs import S3FileSystem

    url = (
        request.getfixturevalue("emulator").url
        if request.param == "moto"
        else request.getfixturevalue("rclone")
    )
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
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket")
    yield "s3://bucket/some/prefix"
    S3FileSystem.clear_instance_cache()


def test_a_multipart_file_comes_back_with_the_same_bytes(store, tmp_path):
    source = tmp_path / "large.bin"
    source.write_bytes(os.urandom(1 << 20) * (SIZE >> 20) + os.urandom(SIZE % (1 << 20)))
    told: list[int] = []
    storage.write_file(source, storage.join(store, "large.bin"), told.append)
    assert sum(told) == source.stat().st_size
    told.clear()
    (there,) = storage.fetch(storage.join(store, "large.bin"), tmp_path / "back", told.append)
    assert there.read_bytes() == source.read_bytes()
    assert sum(told) == source.stat().st_size


def test_an_uploaded_text_is_not_sent_again(store, text_file, cli):
    first = cli("--store", store, "upload-data", str(text_file))
    again = cli("--store", store, "upload-data", str(text_file))
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert first.out == again.out
    assert "already in the store" in again.err
    assert "already in the store" not in first.err


def test_an_upload_that_breaks_off_leaves_nothing(store, tmp_path):
    source = tmp_path / "large.bin"
    source.write_bytes(bytes(SIZE))

    def breaks(n: int) -> None:
        raise OSError("the line is cut")

    uri = storage.join(store, "broken.bin")
    with pytest.raises(ServiceError, match="the line is cut"):
        storage.write_file(source, uri, breaks)
    assert storage.list_files(uri) == {}


def test_a_wrong_key_is_one_line(rclone, home, text_file, cli, monkeypatch):
    from s3fs import S3FileSystem

    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    S3FileSystem.clear_instance_cache()
    ran = cli("--store", "s3://bucket/some/prefix", "upload-data", str(text_file))
    assert ran.code == 1
    assert "s3://bucket/some/prefix" in ran.error


def test_an_invalid_store_is_a_user_error():
    with pytest.raises(InputError, match="s3://bucket/prefix or a local directory"):
        storage.list_files("nope://bucket")
