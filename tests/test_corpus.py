"""Text on its way into a store: what counts as text, and what is sent."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import http.server
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launching
import pytest

from launcher import InputError, ServiceError, upload_data
from launcher.files import storage
from launcher.files.storage import local_path
from launcher.settings import Settings, load_settings
from launcher.text import corpus
from launcher.text.corpus import find_upload, last_upload

LONG = "The quick brown fox jumps over the lazy dog.\n" * 100


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text(LONG)
    return path


def stored(uri: str) -> Path:
    path = local_path(uri)
    assert path is not None
    return path


# -- what is no text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.txt", b"", "is empty"),
        ("binary.bin", b"\x7fELF\x00\x01" * 500, "binary"),
        ("late.bin", LONG.encode() * 10 + b"\x00", "zero at byte 45000"),
        ("short.txt", b"To be", "5 characters"),
        (
            "latin.txt",
            LONG.encode() + b"caf\xe9 " * 5,
            "not UTF-8 text (byte 4503); if it is Latin-1, convert it with `iconv",
        ),
        ("cut.txt", LONG.encode() + "é".encode()[:1], "ends inside a character"),
        ("utf16.txt", LONG.encode("utf-16"), "UTF-16"),
        ("spaces and ü.txt", b"", "is empty"),
    ],
)
@pytest.mark.parametrize("words", [("upload-data",), ("launch", "--instance", "local", "--data")])
def test_a_file_that_is_not_text_is_refused_by_name(
    home, cli, tmp_path, words, name, content, reason
):
    (tmp_path / name).write_bytes(content)
    ran = cli(*words, name)
    assert ran.code == 2
    assert name in ran.error
    assert reason in ran.error
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert launching.tree(home) == set()


def test_a_missing_path_is_refused_by_name(home, cli):
    ran = cli("upload-data", "missing.txt")
    assert ran.code == 2
    assert ran.error.startswith("missing.txt: no such file or directory; ")
    assert "`sm-nanogpt upload-data` downloads tiny Shakespeare" in ran.error
    assert launching.tree(home) == set()


def test_a_directory_without_text_is_refused_by_name(home, cli, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_bytes(b"\xff\xd8")
    ran = cli("upload-data", "photos")
    assert ran.code == 2
    assert "photos: there is no *.txt file" in ran.error
    assert launching.tree(home) == set()


@pytest.mark.skipif(sys.platform == "darwin", reason="which has no such names")
@pytest.mark.parametrize("words", [["upload-data"], ["launch", "--instance", "local", "--data"]])
def test_a_file_whose_name_is_not_utf8_is_refused_and_named(home, cli, tmp_path, words):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / os.fsdecode(b"caf\xe9.txt")).write_text(LONG)
    ran = cli(*words, "texts")
    assert ran.code == 2
    assert ran.error.endswith(r"texts/caf\xe9.txt: its name is not UTF-8; rename it")
    assert launching.tree(home) == set()


@pytest.mark.parametrize("url", ["https://example.com/text.txt", "s3://bucket/text.txt"])
def test_a_url_is_refused_as_a_text(cli, url):
    ran = cli("upload-data", url)
    assert (ran.code, ran.error.startswith(f"{url}: download it first")) == (2, True)


@pytest.mark.parametrize("words", [["upload-data"], ["launch", "--instance", "local", "--data"]])
def test_a_text_given_as_a_path_is_refused_in_few_words(home, cli, words):
    ran = cli(*words, LONG)
    assert ran.code == 2
    assert ran.error.startswith("The quick brown fox")
    assert "too long for a path" in ran.error
    assert len(ran.error) < 120
    assert launching.tree(home) == set()


def test_a_broken_link_to_a_text_is_named(tmp_path, cli):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/open.txt").write_text("To be, or not to be. " * 100)
    (tmp_path / "texts/gone.txt").symlink_to("nowhere")
    ran = cli("upload-data", "texts")
    assert ran.code == 2
    assert "gone.txt: not a file, or a broken link" in ran.error


@pytest.mark.parametrize("words", [["upload-data"], ["launch", "--instance", "local", "--data"]])
def test_a_subdirectory_that_cannot_be_read_is_named(words, home, cli, tmp_path, monkeypatch):
    (tmp_path / "texts/closed").mkdir(parents=True)
    (tmp_path / "texts/open.txt").write_text("To be, or not to be. " * 100)
    scandir = os.scandir

    def refuse(place: str) -> Any:
        if Path(place).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    ran = cli(*words, str(tmp_path / "texts"))
    assert (ran.code, ran.error) == (2, f"{tmp_path / 'texts/closed'}: Permission denied")
    assert not (home / "store").exists()


def test_a_text_that_changes_during_the_upload_is_refused(home, cli, source, monkeypatch):
    write = storage.write_file

    def write_late(path: Path, *rest: Any) -> None:
        path.write_bytes(path.read_bytes() + b"more")
        write(path, *rest)

    monkeypatch.setattr(storage, "write_file", write_late)
    ran = cli("upload-data", str(source))
    assert (ran.code, ran.error) == (2, "the text changed during the upload; upload it again")
    assert list((home / "store/data").glob("*.json")) == []


def test_one_bad_file_refuses_the_whole_directory(home, cli, tmp_path):
    (tmp_path / "texts/deep").mkdir(parents=True)
    (tmp_path / "texts/a.txt").write_text(LONG)
    (tmp_path / "texts/deep/bad.txt").write_bytes(b"\xff" * 100)
    ran = cli("upload-data", "texts")
    assert ran.code == 2
    assert "texts/deep/bad.txt" in ran.error
    assert launching.tree(home) == set()


def test_a_character_may_lie_across_two_chunks(home, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.storage, "CHUNK_BYTES", 5)
    (tmp_path / "wide.txt").write_text("🙂漢é" * 300)
    upload = upload_data(tmp_path / "wide.txt")
    assert (upload.characters, upload.vocabulary_size) == (900, 3)


def test_a_text_too_short_for_the_context_is_not_sent(home, cli, source):
    ran = cli("launch", "--instance", "local", "--data", str(source), "--set", "block_size=450")
    assert ran.code == 2
    assert f"{source}: the validation text has 450 characters" in ran.error
    assert launching.tree(home) == set()


def test_a_short_validation_text_is_not_sent(home, cli, text_file, source):
    words = ["--data", str(text_file), "--validation", str(source), "--set", "block_size=5000"]
    ran = cli("launch", "--instance", "local", *words)
    assert ran.code == 2
    assert f"{source}: the validation text has 4500 characters" in ran.error
    assert launching.tree(home) == set()


# -- what is sent ---------------------------------------------------------------------------------


def test_an_upload_prints_its_uri_and_says_what_it_read(cli, source):
    ran = cli("upload-data", str(source))
    assert ran.code == 0
    assert (stored(ran.out.strip()) / "fox.txt").read_text() == LONG
    assert "1 file, 4,500 bytes, 4,500 characters, 30 distinct" in ran.err


def test_an_upload_as_json_tells_its_numbers(cli, source):
    told = json.loads(cli("upload-data", str(source), "--json").out)
    assert told["uri"].startswith("file://")
    assert (told["size"], told["characters"], told["uploaded"]) == (4500, 4500, True)


def test_an_unchanged_text_is_not_sent_again(home, source):
    first = upload_data(source)
    file = stored(first.uri) / "fox.txt"
    before = file.stat().st_mtime_ns
    sent: list[int] = []
    second = upload_data(source, progress=sent.append)
    assert (second.uri, second.uploaded, sent) == (first.uri, False, [])
    assert file.stat().st_mtime_ns == before


def test_a_changed_text_gets_a_new_location(home, source):
    first = upload_data(source)
    source.write_text(LONG + "more")
    second = upload_data(source)
    assert second.uri != first.uri
    assert second.uploaded
    assert (stored(first.uri) / "fox.txt").read_text() == LONG


def test_a_damaged_copy_in_the_store_is_sent_again(home, source):
    first = upload_data(source)
    (stored(first.uri) / "fox.txt").write_text("cut")
    second = upload_data(source)
    assert second.uploaded
    assert (stored(first.uri) / "fox.txt").read_text() == LONG


def test_the_text_files_of_a_directory_keep_their_places(home, tmp_path):
    for name in ("a.txt", "deep/b.txt", "deep/er/c d.txt"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(LONG)
    (tmp_path / "texts/deep/notes.md").write_text(LONG)
    upload = upload_data(tmp_path / "texts")
    assert launching.tree(stored(upload.uri)) == {
        "a.txt",
        "deep",
        "deep/b.txt",
        "deep/er",
        "deep/er/c d.txt",
    }


def test_a_single_file_of_any_extension_is_stored_as_txt(home, tmp_path):
    (tmp_path / "README.md").write_text(LONG)
    assert upload_data(tmp_path / "README.md").files == ("README.txt",)


def test_the_next_upload_completes_an_interrupted_one(home, source):
    class Interrupted(Exception):
        pass

    def interrupt(_: int) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        upload_data(source, progress=interrupt)
    (data,) = home.glob("store/data")
    assert not list(data.glob("*.json"))
    assert upload_data(source).uploaded
    assert (stored(last_upload(launching.settings_of(home))) / "fox.txt").read_text() == LONG


def test_a_leftover_file_is_in_no_other_data_set(home, tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"texts/{name}.txt").write_text(LONG + name)

    def interrupt(_: int) -> None:
        if list(home.glob("store/data/*/a.txt")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload_data(tmp_path / "texts", progress=interrupt)
    (tmp_path / "texts/a.txt").rename(tmp_path / "texts/a1.txt")
    uri = upload_data(tmp_path / "texts").uri
    assert launching.tree(stored(uri)) == {"a1.txt", "b.txt"}
    assert find_upload(uri, launching.settings_of(home)) is not None


def test_a_prefix_without_a_manifest_is_not_an_upload(home, source):
    uri = upload_data(source).uri
    Path(f"{stored(uri)}.json").unlink()
    assert find_upload(uri, launching.settings_of(home)) is None


def test_two_simultaneous_uploads_both_work(home, source):
    words = ["upload-data", str(source)]
    both = launching.all_ended([words, words], home)
    assert [ran.code for ran in both] == [0, 0], both
    assert both[0].out == both[1].out
    uri = both[0].out.strip()
    assert find_upload(uri, launching.settings_of(home)) is not None
    assert launching.tree(stored(uri)) == {"fox.txt"}


# -- the last upload ------------------------------------------------------------------------------


def test_launch_takes_the_last_upload_and_names_it(cli, source, text_file):
    cli("upload-data", str(source))
    cli("upload-data", str(text_file))
    last = cli("upload-data", str(source)).out.strip()
    ran = cli(*launching.launching("--detach"))
    assert f"data: {last} (the last upload)" in ran.err


def test_a_shared_stores_last_upload_is_this_machines_own_first(tmp_path, s3, source, text_file):
    store = f"s3://{s3.bucket}/shared"
    mine, other = (Settings(home=tmp_path / name, store=store) for name in ("mine", "other"))
    stayed = upload_data(text_file, mine.model_copy(update={"store": ""})).uri
    assert last_upload(mine) == last_upload(mine.for_a_dry_run()) == stayed
    theirs = upload_data(source, other).uri
    with pytest.raises(InputError, match=f"{stayed} .* {theirs} .*choose one with --data"):
        last_upload(mine)
    assert last_upload(mine, local=True) == stayed
    ours = upload_data(text_file, mine).uri
    upload_data(source, other)
    assert last_upload(mine) == last_upload(mine.for_a_dry_run()) == ours
    assert last_upload(other) == theirs


def test_a_local_job_without_s3_takes_the_last_local_upload(
    caplog, home, source, text_file, monkeypatch
):
    here = upload_data(source).uri
    noted = {
        **json.loads((home / "last-uploads.json").read_text()),
        "s3://bucket/p": "s3://bucket/p/data/x-1",
    }
    (home / "last-uploads.json").write_text(json.dumps(noted))
    find = corpus.find_upload

    def refuse(uri: str, settings: Settings) -> Any:
        if uri.startswith("s3:"):
            raise ServiceError("no AWS credentials")
        return find(uri, settings)

    monkeypatch.setattr(corpus, "find_upload", refuse)
    caplog.set_level("INFO", "launcher")
    settings = launching.settings_of(home)
    assert last_upload(settings, local=True) == here
    assert caplog.messages == ["no AWS credentials; using the last upload on this machine"]
    with pytest.raises(ServiceError):
        last_upload(settings)


def test_a_shared_directorys_last_upload_may_be_anybodys(tmp_path, text_file):
    mine, other = (Settings(home=tmp_path / n, store=str(tmp_path / "s")) for n in ("a", "b"))
    theirs = upload_data(text_file, mine).uri
    assert last_upload(other) == theirs


def test_an_upload_to_another_directory_is_not_taken(tmp_path, home, text_file):
    """Text stays in this machine's own store only where S3 cannot be asked."""
    upload_data(text_file, Settings(home=home))
    other = Settings(home=home, store=str(tmp_path / "other"))
    for settings in (other, other.for_a_dry_run()):
        with pytest.raises(InputError, match=r"nothing was uploaded to .*other yet"):
            last_upload(settings, local=True)


def test_all_spellings_of_a_store_mean_the_same_store(home, cli, source, tmp_path):
    store = str(tmp_path / "the store")
    uri = cli("--store", store, "upload-data", str(source)).out.strip()
    for spelling in (f"{store}/", "the store", Path(store).as_uri()):
        assert last_upload(load_settings(store=spelling)) == uri


def test_launch_without_any_upload_says_how_to_get_one(home, cli):
    ran = cli("launch", "--instance", "local")
    assert ran.code == 2
    assert "sm-nanogpt upload-data" in ran.error
    assert launching.tree(home) == set()


def test_a_launchs_own_text_is_not_the_last_upload(home, cli, source, text_file):
    uri = cli("upload-data", str(text_file)).out.strip()
    cli(*launching.launching("--detach", "--validation", str(source), data=source))
    assert last_upload(launching.settings_of(home)) == uri


def test_an_earlier_upload_is_named_by_uri_or_path(home, cli, source):
    uri = cli("upload-data", str(source)).out.strip()
    for location in (uri, str(stored(uri))):
        ran = cli(*launching.launching("--detach", data=location))
        assert f"data: {uri}\n" in ran.err
    assert len(list((home / "store/data").glob("*/"))) == 1


# -- built-in texts -------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """A directory on loopback: its address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(directory))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def shakespeare(tmp_path, monkeypatch):
    """A public home of Shakespeare on loopback; yields what was asked of it."""
    (tmp_path / "public").mkdir()
    (tmp_path / "public/input.txt").write_text(LONG)
    with serving(tmp_path / "public") as (address, asked):
        monkeypatch.setattr("launcher.text.shakespeare.SHAKESPEARE_URL", f"{address}/input.txt")
        monkeypatch.setattr(
            "launcher.text.shakespeare.SHAKESPEARE_SHA256",
            hashlib.sha256(LONG.encode()).hexdigest(),
        )
        yield asked


def test_upload_data_without_a_path_takes_shakespeare(cli, shakespeare):
    ran = cli("upload-data")
    assert ran.code == 0, ran.err
    assert (stored(ran.out.strip()) / "shakespeare.txt").read_text() == LONG


def test_a_cached_text_is_not_downloaded_again(cli, shakespeare):
    cli("upload-data")
    cli("upload-data")
    assert shakespeare == ["/input.txt"]


def test_a_damaged_cache_is_downloaded_again(home, cli, shakespeare):
    cli("upload-data")
    (home / "cache/shakespeare.txt").write_text("damaged")
    assert cli("upload-data").code == 0
    assert (home / "cache/shakespeare.txt").read_text() == LONG


def test_a_download_with_a_wrong_hash_is_refused_and_deleted(home, cli, shakespeare, monkeypatch):
    monkeypatch.setattr("launcher.text.shakespeare.SHAKESPEARE_SHA256", "0" * 64)
    ran = cli("upload-data")
    assert ran.code == 1
    assert "SHA-256" in ran.error
    assert not list(home.glob("cache/*"))


def test_an_interrupted_download_is_refused_in_one_line(cli, monkeypatch):
    def urlopen(*_: object, **__: object) -> None:
        raise http.client.IncompleteRead(b"some")

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    ran = cli("upload-data")
    assert ran.code == 1
    assert "IncompleteRead" in ran.error


def test_a_failed_download_is_refused_in_one_line(cli, monkeypatch):
    monkeypatch.setattr("launcher.text.shakespeare.SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    ran = cli("upload-data")
    assert ran.code == 1
    assert "http://127.0.0.1:9/input.txt" in ran.error
    assert ran.out == ""


def test_a_deleted_last_upload_asks_for_another(home, cli, source):
    uri = cli("upload-data", str(source)).out.strip()
    shutil.rmtree(stored(uri))
    ran = cli("launch", "--instance", "local")
    assert ran.code == 2
    assert "sm-nanogpt upload-data" in ran.error


def test_an_unreadable_pointer_is_not_a_last_upload(home, cli, source):
    cli("upload-data", str(source))
    (home / "last-uploads.json").unlink()
    (home / "store/data/latest.json").write_text("{")
    ran = cli("launch", "--instance", "local")
    assert ran.code == 2
    assert "sm-nanogpt upload-data" in ran.error


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt.gz", "a.zst"])
def test_documents_without_a_tokenizer_are_refused(name, tmp_path, cli):
    (tmp_path / name).write_text('{"text": "a"}\n' * 1000)
    ran = cli("upload-data", name)
    assert (ran.code, ran.error) == (2, f"{name}: needs --tokenizer; without it, give plain text")
