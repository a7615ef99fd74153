"""A home or a store that was moved: what is in it is found by its name."""

from __future__ import annotations

import shutil

import launching
import pytest

from sm_nanogpt import InputError, Request, Settings
from sm_nanogpt.launcher.files.moved import find_moved, text_id
from sm_nanogpt.launcher.launching.launch import prepare
from sm_nanogpt.launcher.text.corpus import upload_data
from sm_nanogpt.launcher.text.store import find_text, last_upload
from sm_nanogpt.launcher.text.uploads import uploads
from sm_nanogpt.launcher.tracking import TrackedJob

NAME = "text-0123456789ab"
JOB = "sm-nanogpt-20261128-191147-173a47"


@pytest.fixture
def moved(home, short_text_file, tmp_path):
    """The settings of a home that was moved after an upload."""
    upload_data(short_text_file, Settings(home=home))
    return Settings(home=home.rename(tmp_path / "a new place, 100 %"))


@pytest.mark.parametrize(
    "path",
    [
        f"store/data/{NAME}",
        f"models/{JOB}/0123456789ab",
        f"models/{JOB}/step-00000010",
        f"sources/{'0123456789abcdef' * 4}",
    ],
)
def test_what_is_named_by_its_content_is_found_in_a_moved_home(path, home, tmp_path):
    (home / path).mkdir(parents=True)
    settings = Settings(home=home)
    assert find_moved(str(tmp_path / "old" / path), settings) == str(home / path)
    assert find_moved((tmp_path / "old" / path).as_uri(), settings) == (home / path).as_uri()


@pytest.mark.parametrize("path", ["store/data/notes", "models/mine"])
def test_what_a_user_named_is_found_nowhere_else(path, home, tmp_path):
    (home / path).mkdir(parents=True)
    old = str(tmp_path / "old" / path)
    assert find_moved(old, Settings(home=home)) == old


def test_what_is_still_there_is_taken_from_there(home, tmp_path):
    for root in (home / "store", tmp_path / "old"):
        (root / "data" / NAME).mkdir(parents=True)
    old = str(tmp_path / "old/data" / NAME)
    assert find_moved(old, Settings(home=home)) == old


def test_what_is_on_s3_stays_there(home):
    (home / "store/data" / NAME).mkdir(parents=True)
    uri = f"s3://bucket/data/{NAME}"
    assert find_moved(uri, Settings(home=home)) == uri


def test_a_text_is_known_by_the_name_of_its_upload():
    assert text_id(f"file:///one/data/{NAME}/") == text_id(f"s3://two/data/{NAME}") == NAME
    assert text_id("s3://two/data/notes") == "s3://two/data/notes"


def test_the_last_upload_moves_with_its_home(moved):
    (upload,) = uploads(moved)
    assert last_upload(moved) == upload.uri
    assert upload.uri.startswith(moved.home.as_uri())


def test_an_upload_is_said_to_be_where_its_home_is(moved, short_text_file):
    upload = upload_data(short_text_file, moved)
    assert not upload.uploaded
    assert upload.uri.startswith(moved.home.as_uri())


def test_the_last_upload_moves_with_its_store(home, short_text_file, tmp_path):
    store = tmp_path / "store"
    uri = upload_data(short_text_file, Settings(home=home, store=str(store))).uri
    store = store.rename(tmp_path / "moved")
    settings = Settings(home=home, store=store.as_uri())
    assert last_upload(settings) == find_text(uri, settings) == uploads(settings)[0].uri
    assert last_upload(settings).startswith(store.as_uri())


def test_the_store_that_is_set_comes_before_that_of_the_home(home, short_text_file, tmp_path):
    upload_data(short_text_file, Settings(home=home))
    upload_data(short_text_file, Settings(home=home, store=str(tmp_path / "store")))
    store = (tmp_path / "store").rename(tmp_path / "moved")
    assert last_upload(Settings(home=home, store=str(store))).startswith(store.as_uri())


def test_an_upload_that_is_deleted_is_not_found(moved):
    shutil.rmtree(moved.home / "store")
    with pytest.raises(InputError, match="is deleted or incomplete"):
        last_upload(moved)


def test_a_copied_home_says_who_reads_its_uploads(home, job, text_file, tmp_path):
    upload_data(text_file, Settings(home=home))
    copy = Settings(home=shutil.copytree(home, tmp_path / "copy"))
    (upload,) = uploads(copy)
    assert upload.jobs == [job.job_id]


def test_a_job_of_a_moved_home_goes_on(finished, home):
    shutil.copytree(finished.home, home)
    record = home / "jobs" / finished.job_id / "job.json"
    record.write_text(record.read_text().replace(str(finished.home), "/an/old/home"))
    settings = Settings(home=home)
    assert TrackedJob(finished.job_id, settings).describe().data.startswith(home.as_uri())
    assert uploads(settings)[0].jobs == [finished.job_id]
    command = launching.launching("--resume", finished.job_id, max_steps=12)
    resumed = launching.command(command, home=home).good.out.strip()
    assert TrackedJob(resumed, settings).describe().status == "Completed"


def test_a_resumed_job_takes_its_text_from_another_store(home, job, text_file, tmp_path):
    uri = upload_data(text_file, Settings(home=home, store=str(tmp_path / "another"))).uri
    request = Request(resume=job.job_id, data=uri, hyperparameters={"max_steps": 20})
    assert prepare(request, Settings(home=home)).job.data == uri
