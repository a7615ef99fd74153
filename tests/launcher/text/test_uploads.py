"""Listing what was uploaded, and deleting one of it."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import launching
import pytest
from texts import LONG, stored

from sm_nanogpt import InputError, Request, ServiceError, upload_data, uploads
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.launching.launch import prepare
from sm_nanogpt.launcher.settings import Settings, load_settings
from sm_nanogpt.launcher.text.channels import find_channel
from sm_nanogpt.launcher.text.store import (
    find_text,
    find_upload,
    last_upload,
    named_by,
    no_upload_error,
)


@pytest.fixture
def upload(cli, short_text_file):
    """The URI of an upload on this machine."""
    return cli("upload-data", short_text_file).good.out.strip()


@pytest.fixture
def reader(job, upload):
    """The finished job, as one that has read this upload by a link."""
    record = job.directory / "job.json"
    facts = json.loads(record.read_text())
    facts["job"]["data"] = upload
    record.write_text(json.dumps(facts))
    linked = job.directory / "hosts/algo-1/input/data/training/input.txt"
    linked.unlink()
    linked.symlink_to(files_of(upload)[0])
    return job


def files_of(uri: str) -> list[Path]:
    return sorted(stored(uri).glob("*"))


def name_of(uri: str) -> str:
    return uri.rpartition("/")[2]


def test_data_lists_uploads_and_the_jobs_that_read_them(cli, reader, upload, tmp_path):
    (tmp_path / "tale.txt").write_text("Once upon a time. " * 500)
    tokens = cli("upload-data", "tale.txt", "--tokenizer", "bpe", "--vocab-size", "300").out.strip()
    tale, text = json.loads(cli("data", "--json").good.out)  # the newest first
    assert text["uri"] == upload
    assert tale["uri"] == tokens
    size = files_of(upload)[0].stat().st_size
    assert text["kind"] == "text"
    assert text["size"] == size
    assert text["jobs"] == [reader.job_id]
    assert text["running"] == []
    assert tale["kind"] == "tokens"
    assert tale["jobs"] == []
    assert tale["manifest"]["documents"] == 1
    assert tale["size"] > 0 and tale["written"] >= text["written"] > 1e9
    shown = cli("data").good
    assert reader.job_id[-6:] in shown.out and name_of(upload) in shown.out
    assert shown.err == f"`sm-nanogpt launch` without --data takes {tokens}\n"
    assert [entry.uri for entry in uploads()] == [tokens, upload]


def test_without_an_upload_data_says_how_to_begin(cli):
    ran = cli("data").good
    assert ran.out == "" and "sm-nanogpt upload-data" in ran.err
    assert cli("data", "--json").out == "[]\n"


def test_delete_of_an_upload_keeps_the_jobs_that_read_it(cli, reader, upload):
    name = name_of(upload)
    ran = cli("delete", name, "--yes").good
    assert f"{upload}\n" in ran.err and "by 1 job:" in ran.err and "--resume" in ran.err
    assert not files_of(upload) and json.loads(cli("data", "--json").out) == []
    assert upload not in cli("data").err
    assert cli("fetch-and-sample", reader.job_id, "--max-new-tokens", "1").good
    assert cli("launch", "--instance", "local").failed(
        2, upload, "upload-data", "`sm-nanogpt data`"
    )
    assert cli("launch", "--resume", reader.job_id, "--set", "max_steps=20").failed(2, name)
    assert cli("delete", reader.job_id, "--yes").good


def test_delete_of_an_upload_asks_first(cli, upload, monkeypatch):
    assert cli("delete", name_of(upload)).failed(2, "--yes")
    questions = list[str]()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", lambda question, **_: questions.append(question))
    assert cli("delete", name_of(upload)).code == 1
    assert "MB" in questions[0] or "kB" in questions[0]
    assert find_upload(upload, Settings()) is not None


def test_an_upload_that_a_running_job_reads_stays(cli, reader, upload, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.description.JobDescription.is_running", True)
    stop = f"`sm-nanogpt stop {reader.job_id}`"
    assert cli("delete", name_of(upload), "--yes").failed(1, stop)
    assert find_upload(upload, Settings()) is not None


def test_an_upload_goes_by_its_uri_and_only_there(cli, upload, short_text_file, tmp_path):
    other = cli("--store", tmp_path / "other", "upload-data", short_text_file).out.strip()
    ran = cli("--store", tmp_path / "other", "delete", f"{other}/", "--yes").good
    assert not files_of(other) and files_of(upload) and "--resume" not in ran.err


def test_an_interrupted_delete_leaves_no_upload(cli, upload):
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        assert cli("delete", name_of(upload), "--yes").code == 1
    assert files_of(upload) and find_upload(upload, Settings()) is None
    (rest,) = json.loads(cli("data", "--json").out)
    assert rest["kind"] == "incomplete"
    assert rest["manifest"] is None
    assert ": interrupted, or still under way" in cli("delete", rest["name"], "--yes").good.err
    assert json.loads(cli("data", "--json").out) == []


def test_delete_of_an_unknown_word_names_both_lists(cli):
    assert cli("delete", "nothing", "--yes").failed(1, "`sm-nanogpt jobs`", "`sm-nanogpt data`")


def test_delete_of_a_part_with_a_slip_names_the_upload(cli, upload):
    slip = f"{name_of(upload).rpartition('-')[0]}t"
    assert cli("delete", slip, "--yes").failed(2, f"{slip}; did you mean input?")


def test_delete_takes_a_part_of_an_uploads_name(cli, upload, tmp_path):
    name, stem = name_of(upload), name_of(upload).rpartition("-")[0]
    (tmp_path / f"{stem}-b.txt").write_text("Another text. " * 99)
    other = cli("upload-data", tmp_path / f"{stem}-b.txt").good.out.strip()
    assert cli("delete", f"{stem}-", "--yes").failed(2, name, name_of(other))
    assert f"{stem} is upload {name}\n" in cli("delete", stem, "--yes").good.err
    (remaining,) = uploads()
    assert remaining.uri == other


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        ("input-000000000000", "no upload input-000000000000"),
        ("--keep-model", "--keep-model is for jobs"),
    ],
)
def test_delete_of_wrong_names_deletes_nothing(cli, upload, other, fact):
    assert cli("delete", name_of(upload), other, "--yes").failed(2, fact)
    assert find_upload(upload, Settings()) is not None


def test_jobs_and_uploads_are_deleted_by_two_commands(cli, job, upload):
    ran = cli("delete", name_of(upload), job.job_id, "--yes")
    assert ran.failed(2, f"{job.job_id} is not", "two commands")
    assert find_upload(upload, Settings()) is not None


def test_uploads_on_s3_are_listed_and_deleted_too(cloud, s3, cli, home, launch, short_text_file):
    """Here and there, with a model for --init-from, whoever's job has read it."""
    job_id = launch()
    cli("wait", job_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SM_NANOGPT_STORE")
        patch.setattr("sm_nanogpt.launcher.settings.Settings.reaches_aws", False)
        local = cli("upload-data", short_text_file).good.out.strip()
    shutil.rmtree(home / "last-launched.json", ignore_errors=True)
    rows = json.loads(cli("data", "--json").good.out)
    on_s3 = f"s3://{s3.bucket}/some/prefix/data/{name_of(local)}"
    assert {row["uri"]: row["jobs"] for row in rows} == {on_s3: [job_id], local: []}
    ran = cli("delete", name_of(local), "--yes").good
    assert on_s3 in ran.err and local in ran.err
    assert json.loads(cli("data", "--json").out) == []
    assert not [n for n in storage.list_files(f"s3://{s3.bucket}/some/prefix") if "data/" in n]


def test_no_upload_on_s3_goes_while_its_jobs_are_unknown(cloud, s3, cli, short_text_file):
    uri = cli("upload-data", short_text_file).good.out.strip()
    cloud.refuse["Search"] = ("ThrottlingException", "later")
    listed = cli("data", "--json")
    assert listed.code == 1 and json.loads(listed.out)[0]["uri"] == uri
    assert cli("delete", name_of(uri), "--yes").code == 1
    cloud.refuse.clear()
    arguments = ["--instance", "ml.m5.xlarge", "--preset", "quick", "--max-cost", "1"]
    assert f"data: {uri}\n" in cli("launch", arguments, "--data", name_of(uri)).good.err


def test_a_launch_takes_the_last_upload_and_names_it(home, source, short_text_file, caplog):
    caplog.set_level(logging.INFO)
    upload_data(source)
    upload_data(short_text_file)
    last = upload_data(source).uri
    prepare(Request(instance="local", hyperparameters=launching.TINY), Settings(home=home))
    assert f"data: {last} (the last upload)" in caplog.text


def test_a_shared_store_gives_this_machines_upload(tmp_path, s3, source, short_text_file):
    store = f"s3://{s3.bucket}/shared"
    mine, other = (Settings(home=tmp_path / name, store=store) for name in ("mine", "other"))
    theirs = upload_data(source, other).uri
    with pytest.raises(InputError, match=r"nothing was uploaded to .* from here"):
        last_upload(mine)
    stayed = upload_data(short_text_file, mine.model_copy(update={"store": ""})).uri
    assert last_upload(mine) == last_upload(mine.with_offline(True)) == stayed
    ours = upload_data(short_text_file, mine).uri
    upload_data(source, other)
    assert last_upload(mine) == last_upload(mine.with_offline(True)) == ours
    assert last_upload(other) == theirs


def test_an_upload_to_another_directory_is_not_taken(tmp_path, home, short_text_file):
    """Text stays in this machine's own store only where S3 cannot be asked."""
    upload_data(short_text_file, Settings(home=home))
    (tmp_path / "other").mkdir()
    other = Settings(home=home, store=str(tmp_path / "other"))
    for settings in (other, other.with_offline(True)):
        with pytest.raises(InputError, match=r"nothing was uploaded to .*other from here"):
            last_upload(settings)


def test_a_new_store_is_named_and_a_missing_one_has_nothing(home, cli, source, tmp_path):
    typed = ("--store", "sotre")
    missing = f"--store {tmp_path / 'sotre'}: there is no such directory"
    launch = ("launch", "--instance", "local")
    for command in ("data", "jobs", launch, (*launch, "--data", "input"), ("delete", "input")):
        assert cli(typed, command).failed(2, missing), command
    assert not (tmp_path / "sotre").exists()
    assert f"new store: {tmp_path / 'sotre'}\n" in cli(typed, "upload-data", source).good.err
    assert "new store" not in cli(typed, "upload-data", source).good.err
    assert cli(typed, "data").good.out
    assert "new store" not in cli("upload-data", source).good.err  # that of the home


def test_a_closed_store_is_refused_and_an_empty_one_named(cli, upload, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    typed = ("--store", tmp_path / "empty")
    listed = cli(typed, "data").good
    assert upload in listed.out
    assert f"nothing was uploaded to {tmp_path / 'empty'} yet: " in listed.err
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "empty")
    problem = f"--store {tmp_path / 'empty'}: permission denied"
    for command in ("data", "jobs", ("delete", "input"), ("launch", "--instance", "local")):
        assert cli(typed, command).failed(2, problem), command


def test_an_upload_of_another_store_is_named_by_its_uri(home, cli, upload, tmp_path):
    settings = Settings(home=home)
    assert named_by(upload, settings) == name_of(upload)
    elsewhere = settings.model_copy(update={"home": tmp_path / "other"})
    assert named_by(upload, elsewhere) == upload
    assert named_by("s3://bucket/text.txt", settings) == "s3://bucket/text.txt"
    assert named_by("/tmp/text.txt", settings) == "/tmp/text.txt"


def test_all_spellings_of_a_store_mean_the_same_store(home, cli, source, tmp_path):
    store = str(tmp_path / "the store")
    uri = cli("--store", store, "upload-data", source).out.strip()
    for spelling in (f"{store}/", "the store", Path(store).as_uri()):
        assert last_upload(load_settings(store=spelling)) == uri


def test_a_launch_without_an_upload_asks_for_one(home, cli, source):
    def refused() -> bool:
        ran = cli("launch", "--instance", "local")
        return ran.code == 2 and "`sm-nanogpt upload-data FILE`" in ran.error

    assert refused()
    assert launching.tree(home) == set()
    shutil.rmtree(stored(cli("upload-data", source).out.strip()))
    assert refused()


def test_an_earlier_upload_is_named_by_uri_or_path(home, cli, source, short_text_file):
    earlier = cli("upload-data", source).out.strip()
    last = cli("upload-data", short_text_file).out.strip()
    settings = launching.settings_of(home)
    for location in (earlier, str(stored(earlier))):
        assert find_channel(location, settings).uri == earlier
    assert cli("launch", "--instance", "local", "--data", "fox-123456789012").failed(2, "data`")
    name = earlier.rpartition("/")[2]
    ran = cli(launching.launching("--detach", "--validation", str(source), data=name))
    assert f"data: {earlier}\n" in ran.err
    assert "warning: validation is the text to train on" in ran.err
    assert len(list((home / "store/data").glob("*/"))) == 2
    assert last_upload(settings) == last  # which a launch's own text is not


@pytest.fixture
def two_uploads(home, tmp_path):
    """The names of an upload `fox` and one `fox-notes`, of this machine."""
    names: list[str] = []
    for stem in ("fox", "fox-notes"):
        path = tmp_path / f"{stem}.txt"
        path.write_text(LONG + stem)
        names.append(name_of(upload_data(path).uri))
    return names


def test_a_part_of_a_name_means_its_upload(home, two_uploads, caplog):
    fox, notes = two_uploads
    caplog.set_level(logging.INFO)
    for part, name in (("fox", fox), (fox[:8], fox), (fox[-6:], fox), ("fox-notes", notes)):
        assert find_text(part, load_settings()) == f"{(home / 'store/data').as_uri()}/{name}"
        assert f"{part} is upload {name}" in caplog.text


def test_a_file_of_the_name_is_meant_before_an_upload(two_uploads, tmp_path):
    (tmp_path / "fox").write_text(LONG)
    assert find_text("fox", load_settings()) == "fox"


def test_a_part_of_several_names_is_refused_with_them(two_uploads):
    with pytest.raises(InputError, match=f"2 uploads: {', '.join(sorted(two_uploads))}"):
        find_text("fox-", load_settings())


@pytest.mark.parametrize("word", ["Fox", "fix-123456789012"])
def test_a_word_of_nothing_is_no_upload(home, two_uploads, word):
    (home / "store/data/Fox-notes.json").write_text("{}")  # no manifest
    with pytest.raises(InputError, match=f"neither a file nor an upload {word}"):
        find_text(word, load_settings())


def test_a_typo_in_an_upload_is_answered_by_what_is_like_it():
    names = ["notes-0123456789ab", "shakespeare-3270fd896e2e"]
    assert str(no_upload_error("shakspeare", names)).endswith(
        " shakspeare; did you mean shakespeare?"
    )
    assert str(no_upload_error("notes-0123456789aa", names)).endswith("mean notes-0123456789ab?")
    assert str(no_upload_error("fix", names)) == "there is neither a file nor an upload fix"
    twice = ["fox-0123456789ab", "fox-0123456789ab"]  # of two stores
    assert str(no_upload_error("fox-0123456789aa", twice)).endswith(
        "; did you mean fox-0123456789ab?"
    )


def test_a_word_of_nothing_is_no_path_that_the_user_meant(two_uploads, cli):
    ran = cli("launch", "--instance", "local", "--data", two_uploads[0], "--validation", "fix")
    assert ran.failed(2, "neither a file nor an upload fix;", "`sm-nanogpt data`")
    assert str(Path.cwd()) not in ran.error


def test_a_part_is_looked_for_in_each_store(tmp_path, s3):
    settings = Settings(home=tmp_path / "mine", store=f"s3://{s3.bucket}/shared")
    (tmp_path / "fox.txt").write_text(LONG)
    uri = upload_data(tmp_path / "fox.txt", settings).uri
    assert find_text("fox", settings) == uri
    with pytest.raises(ServiceError, match="cannot find the upload 'fox'"):
        find_text("fox", settings.with_offline(True))


def test_an_upload_that_was_deleted_has_to_be_made_again(home):
    """A job that is resumed still names it."""
    location = (home / "store/data/notes-0123456789ab").as_uri()
    with pytest.raises(InputError, match="this upload is not there; was it deleted"):
        find_channel(location, launching.settings_of(home))
