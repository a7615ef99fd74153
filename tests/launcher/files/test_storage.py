"""Bytes in and out of a store, locally and on S3; test_s3_servers has what holds of any store."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import launching
import pytest
from runs import free_port
from s3fs import S3FileSystem
from stores import ODD_NAMES, Expecting

from sm_nanogpt import InputError, ServiceError, upload_data
from sm_nanogpt.launcher.aws import Unreachable
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.settings import load_settings
from sm_nanogpt.launcher.text.channels import find_channel


def test_a_full_disk_is_reported_as_this_machines():
    full_disk = pytest.raises(ServiceError, match="s3://bucket/key: this machine's disk is full")
    with full_disk, storage.errors_about("s3://bucket/key"):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_a_path_comes_back_from_its_uri(tmp_path):
    for name in ODD_NAMES:
        path = tmp_path / name
        assert storage.local_path(storage.to_uri(path)) == path


def test_what_is_no_path_is_remote_or_refused():
    uri = "s3://bucket/a b%20c"
    assert storage.to_uri(uri) == uri
    assert storage.local_path(uri) is None
    with pytest.raises(InputError, match="empty"):
        storage.to_uri("")


def test_a_store_at_or_below_a_file_is_refused_by_name(cli, short_text_file, monkeypatch):
    for store in (str(short_text_file), short_text_file.as_uri(), f"{short_text_file}/store"):
        problem = f"{short_text_file} is a file"
        ran = cli("--store", store, "upload-data", short_text_file)
        assert ran.failed(2, f"--store {store}: {problem}")
        with monkeypatch.context() as patch:
            patch.setenv("SM_NANOGPT_STORE", store)
            ran = cli("upload-data", short_text_file)
        assert ran.failed(2, store, "(SM_NANOGPT_STORE, or in ", f"): {problem}")


def test_an_upload_first_tells_the_size_of_all_files(home, text, tmp_path):
    for name in ("a.txt", "b.txt"):
        storage.write_bytes(str(tmp_path / "texts" / name), text[:5000].encode())
    hook = Expecting()
    upload = upload_data(tmp_path / "texts", progress=hook)
    assert hook.expected == sum(hook) == upload.size


def test_two_threads_never_mix_their_writes_to_one_file(tmp_path):
    with ExitStack() as stack:
        for letter in (b"a", b"b"):  # both are open at once
            file = stack.enter_context(storage.replacing(tmp_path / "there"))
            file.write(letter * 3)
    assert (tmp_path / "there").read_bytes() == b"aaa"  # whose body ended last
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_file_is_synced_beside_its_place_before_it_is_named(tmp_path, monkeypatch):
    # A temporary directory on another file system would turn the rename into a copy.
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append((tmp_path / "there").exists()))
    storage.write_bytes(storage.to_uri(tmp_path / "there"), b"text")
    assert synced == [False, True]  # its directory last
    assert (tmp_path / "there").read_text() == "text"


def test_half_written_files_and_markers_are_not_listed(tmp_path):
    for suffix in storage.UNFINISHED_SUFFIXES:
        (tmp_path / f"input.txt{suffix}").write_bytes(b"half")
    assert storage.list_files(storage.to_uri(tmp_path)) == {}


def test_a_fetch_never_writes_outside_its_directory(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    (tmp_path / "file").write_bytes(b"content")
    monkeypatch.setattr(storage, "list_files", lambda *_: {"../file": 7})
    with pytest.raises(ServiceError, match="outside"):
        storage.fetch(storage.to_uri(tmp_path / "store"), tmp_path / "deep/to")
    assert not (tmp_path / "deep/file").exists()


def keys(s3: Any) -> list[str]:
    return [o["Key"] for o in s3.list_objects_v2(Bucket=s3.bucket).get("Contents", [])]


def test_an_upload_goes_to_s3_below_the_prefix_once(s3, emulator, cli, short_text_file):
    def uploaded_keys() -> list[str]:
        """Names of what was put into the store since this was last asked."""
        names = []
        for access in emulator.accesses:
            _, is_data, name = access.resource.partition("/some/prefix/data/")
            if is_data and access.action == "s3:PutObject":
                names.append(name)
        emulator.accesses.clear()
        return names

    uri = cli("upload-data", short_text_file).out.strip()
    assert uri.startswith(f"s3://{s3.bucket}/some/prefix/data/input-")
    key, name = uri.removeprefix(f"s3://{s3.bucket}/"), uri.rpartition("/")[2]
    stored = s3.get_object(Bucket=s3.bucket, Key=f"{key}/input.txt")["Body"].read()
    assert stored == short_text_file.read_bytes()
    assert set(uploaded_keys()) == {f"{name}/input.txt", f"{name}.json"}
    again = cli("upload-data", short_text_file)
    assert again.out.strip() == uri
    assert "already in the store" in again.err
    assert uploaded_keys() == []


def test_an_empty_object_of_s3_is_read_as_an_empty_file(s3):
    s3.put_object(Bucket=s3.bucket, Key="empty", Body=b"")
    assert storage.read_bytes(f"s3://{s3.bucket}/empty") == b""


@pytest.mark.parametrize(
    ("arrives", "metadata"),
    [(b"content", {"sha256": "0" * 64}), (b"conten", {})],  # what others put there has no SHA-256
    ids=["sha256", "size"],
)
def test_a_download_altered_on_its_way_is_refused(s3, tmp_path, monkeypatch, arrives, metadata):
    async def get(fs: Any, path: str, target: str, **options: Any) -> None:
        Path(target).write_bytes(arrives)

    s3.put_object(Bucket=s3.bucket, Key="file", Body=b"content", Metadata=metadata)
    monkeypatch.setattr(S3FileSystem, "_get_file", get)
    with pytest.raises(ServiceError, match="the download is damaged"):
        storage.fetch(f"s3://{s3.bucket}/file", tmp_path)


def test_a_missing_bucket_is_named_and_not_created(s3, home, short_text_file):
    # A process of its own, as what is left open complains when the interpreter ends.
    arguments = ("--store", "s3://no-such-bucket-here/x", "upload-data", str(short_text_file))
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    ran = launching.command(arguments, home=home, env=env)
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "no-such-bucket-here" in ran.error
    assert "no-such-bucket-here" not in [b["Name"] for b in s3.list_buckets()["Buckets"]]


def test_a_folder_object_of_the_console_is_not_a_file(s3, tmp_path):
    for key in ("texts/", "texts/deep/"):
        s3.put_object(Bucket=s3.bucket, Key=key, Body=b"")
    uri = f"s3://{s3.bucket}/texts"
    assert storage.list_files(uri) == {}
    s3.put_object(Bucket=s3.bucket, Key="texts/deep/a.txt", Body=b"content")
    assert storage.list_files(uri) == {"deep/a.txt": 7}
    assert storage.fetch(uri, tmp_path) == [tmp_path / "deep/a.txt"]


def test_a_key_on_s3_has_the_name_as_it_is(s3):
    for name in ODD_NAMES:
        storage.write_bytes(storage.join(f"s3://{s3.bucket}/{name}", f"{name}.txt"), b"content")
    assert sorted(keys(s3)) == sorted(f"{name}/{name}.txt" for name in ODD_NAMES)


def test_s3_uses_our_settings_and_not_those_of_fsspec(home, monkeypatch):
    others = {"endpoint_url": "http://elsewhere", "profile": "other", "client_kwargs": {"a": "b"}}
    monkeypatch.setitem(fsspec.config.conf, "s3", others)
    fsspec_had = dict(fsspec.config.conf)
    american, far = load_settings(region="us-east-1"), load_settings(region="eu-west-1")
    for settings in (american, far, american):
        fs, _ = storage.locate("s3://bucket/key", settings).file_system
        assert fs.client_kwargs == {"region_name": settings.region}
        assert fs.endpoint_url is None
        assert fs.storage_options["profile"] is None
    assert dict(fsspec.config.conf) == fsspec_had  # which belongs to others in this process too


def test_missing_credentials_are_named(s3, cli, short_text_file, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert cli("upload-data", short_text_file).failed(1, "no AWS credentials")


def test_a_local_job_trains_on_text_on_s3(s3, cli, home, short_text_file):
    uri = cli("upload-data", short_text_file).out.strip()
    ran = cli(launching.launching()).good
    assert f"data: {uri} (the last upload)" in ran.err
    fetched = home / "jobs" / ran.out.strip() / "hosts/algo-1/input/data/training/input.txt"
    assert fetched.read_bytes() == short_text_file.read_bytes()


def test_a_path_given_to_a_local_job_is_not_sent_to_s3(s3, cli, short_text_file):
    assert cli(launching.launching("--detach", data=short_text_file)).good
    assert keys(s3) == []


def test_a_silent_store_is_distinguished_from_a_refusal(s3, monkeypatch):
    """A job that is watched goes on over the one and not over the other."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ServiceError) as refused:
        storage.write_bytes("s3://there-is-no-such-bucket/file", b"text")
    assert not isinstance(refused.value, Unreachable)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(Unreachable, match=r"^s3://bucket/prefix: "):
        storage.list_files("s3://bucket/prefix")


def test_writes_are_encrypted_with_the_kms_key(s3, emulator, tmp_path, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_KMS_KEY", "alias/mine")
    (tmp_path / "file").write_bytes(b"text")
    storage.write_bytes(f"s3://{s3.bucket}/document", b"text")
    storage.write_file(tmp_path / "file", f"s3://{s3.bucket}/file")
    actions = [each.action for each in emulator.accesses if each.resource.endswith("/document")]
    assert actions == ["s3:PutObject"]
    for key in ("document", "file"):
        stored = s3.get_object(Bucket=s3.bucket, Key=key)
        assert stored["Body"].read() == b"text"
        assert stored["ServerSideEncryption"] == "aws:kms"
        assert stored["SSEKMSKeyId"].endswith("alias/mine")


def test_a_whole_bucket_may_be_the_text(s3, emulator, short_text_file):
    s3.put_object(Bucket=s3.bucket, Key="input.txt", Body=short_text_file.read_bytes())
    for uri in (f"s3://{s3.bucket}", f"s3://{s3.bucket}/"):
        assert find_channel(uri, load_settings()).uri == uri
    assert not [access for access in emulator.accesses if ".json" in access.resource]


def test_data_that_s3_does_not_hold_is_refused(s3, cli):
    ran = cli(launching.launching(data=f"s3://{s3.bucket}/missing"))
    assert ran.failed(2, f"s3://{s3.bucket}/missing: nothing is there")


def test_a_path_below_a_closed_directory_is_wrong_input(monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(InputError, match=r"^closed/text\.txt: permission denied$"):
        storage.path_of("closed/text.txt")
