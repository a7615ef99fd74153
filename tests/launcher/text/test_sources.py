"""Copies of texts that are no files of this machine: of standard input, the Hub, S3."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import boto3
import hub as hubs
import pytest
from runs import free_port
from s3fs import S3FileSystem

from sm_nanogpt import InputError, ServiceError, Settings
from sm_nanogpt.launcher.files.progress import Progress
from sm_nanogpt.launcher.text.documents import survey_documents
from sm_nanogpt.launcher.text.files import FileOptions, find_files
from sm_nanogpt.launcher.text.formats import PLAIN
from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.sources import TextSource, open_sources

PAGE = "https://huggingface.co/datasets"
BPE = ("--tokenizer", "bpe", "--vocab-size", "300")
FILES = {
    "README.md": b"the card",
    "train.csv": b"text\nhello\n",
    "data/a.txt": b"a" * 1000,
    "data/deep/b.jsonl": b'{"text": "b"}\n',
    "data/empty.txt": b"",
}


@pytest.fixture
def hub(home, monkeypatch):
    with hubs.serving() as hub:
        hub.datasets = {name: dict(FILES) for name in ("me/notes", "me/private", "me/gated")}
        hub.private, hub.gated = {"me/private"}, {"me/gated"}
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        urls = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", urls)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "none"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


@pytest.fixture
def copied(home):
    """Copies sources; returns the content of each file, by its path below them."""
    settings = Settings(home=home)

    def copy(*sources: str, progress: Progress = lambda n: None) -> dict[str, bytes]:
        copied_files = {}
        try:
            with open_sources(sources, settings) as opened:
                for source in opened:
                    path = source.path
                    files = [path]
                    if path.is_dir():
                        files = [below for below in path.rglob("*") if below.is_file()]
                    source.fetch(files, progress)
                    for file in files:
                        copied_files[file.relative_to(path.parent).as_posix()] = file.read_bytes()
        finally:
            assert not list(home.glob("cache/*")), "a copy is left"
        return copied_files

    return copy


@pytest.fixture
def type_in(monkeypatch):
    """Puts a text into the standard input."""

    def type_in(content: bytes) -> None:
        stream = SimpleNamespace(buffer=io.BytesIO(content), isatty=bool)
        monkeypatch.setattr("sys.stdin", stream)

    return type_in


def below(prefix: str, top: str) -> dict[str, bytes]:
    """The files below a folder, as they are named in one that is called `top`."""
    return {
        f"{top}/{name.removeprefix(prefix)}": content
        for name, content in FILES.items()
        if name.startswith(prefix) and name != "README.md"  # it describes the data set
    }


HUB_SOURCES = {
    "me/notes": below("", "notes"),
    f"me/notes@{hubs.COMMIT}/data": below("data/", "data"),
    "me/notes@refs/convert/parquet": below("", "parquet"),
    "me/notes/train.csv": {"train.csv": FILES["train.csv"]},
    "me/notes@main/data/*.txt": {
        "data/a.txt": FILES["data/a.txt"],
        "data/empty.txt": FILES["data/empty.txt"],
    },
}


@pytest.mark.parametrize("source", HUB_SOURCES)
def test_files_of_the_hub_are_copied(hub, copied, source):
    sizes: list[int] = []
    files = copied(f"hf://datasets/{source}", progress=sizes.append)
    assert files == HUB_SOURCES[source]
    assert sum(sizes) == sum(map(len, files.values()))


REFUSED = {
    "me/private": "no such data set, or it is private: run `hf auth login`",
    "me/notes@v2": "no such revision",
    "me/notes/none.txt": "nothing is there",
    "me/..notes": "cannot start or end with",
}


@pytest.mark.parametrize("source", REFUSED)
def test_what_the_hub_does_not_give_is_one_line(hub, copied, source):
    with pytest.raises(InputError) as refused:
        copied(f"hf://datasets/{source}")
    assert REFUSED[source] in str(refused.value)
    assert str(refused.value).startswith(f"hf://datasets/{source}: ")
    assert "\n" not in str(refused.value)


def test_a_token_opens_what_is_private_or_gated(hub, copied, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hubs.TOKEN)
    assert copied("hf://datasets/me/private") == below("", "private")
    with pytest.raises(ServiceError, match=f"ask for access on {PAGE}/me/gated"):
        copied("hf://datasets/me/gated")
    hub.granted.add("me/gated")
    assert copied("hf://datasets/me/gated") == below("", "gated")
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(ServiceError, match=r"Invalid credentials.*, or run `hf auth login`"):
        copied("hf://datasets/me/notes")


def test_a_download_that_breaks_off_is_an_error(hub, copied):
    hub.broken = True
    with pytest.raises(ServiceError, match="check the network"):
        copied("hf://datasets/me/notes/data/a.txt")


def test_a_hub_that_cannot_be_reached_is_an_error(hub, copied, monkeypatch):
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nowhere)
    with pytest.raises(ServiceError, match=r"^hf://.*refused; check the network"):
        copied("hf://datasets/me/notes")


def test_the_size_of_a_source_comes_first(hub, copied, caplog):
    with caplog.at_level("INFO", "sm_nanogpt"):
        copied("hf://datasets/me/notes/data")
    assert caplog.messages == ["hf://datasets/me/notes/data: copying 1.01kB in 3 files"]
    hub.claimed["data/a.txt"] = 45 * 10**15
    with pytest.raises(ServiceError, match=r"45.*PB in 3 files do not fit"):
        copied("hf://datasets/me/notes/data/")


def test_the_hubs_client_is_named_when_missing(copied, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"huggingface_hub is missing.*'\.\[data\]'"):
        copied("hf://datasets/me/notes")


@pytest.fixture
def bucket(s3):
    for name, content in FILES.items():
        s3.put_object(Bucket=s3.bucket, Key=f"texts/{name}", Body=content)
    s3.put_object(Bucket=s3.bucket, Key="texts/data/", Body=b"")  # as the console makes a folder
    return f"s3://{s3.bucket}"


S3_SOURCES = {
    "texts": {**below("", "texts"), "texts/README.md": FILES["README.md"]},
    "texts/data/": below("data/", "data"),
    "texts/data/a.txt": {"a.txt": FILES["data/a.txt"]},
}


@pytest.mark.parametrize("source", S3_SOURCES)
def test_files_of_s3_are_copied(bucket, copied, source):
    assert copied(f"{bucket}/{source}") == S3_SOURCES[source]


def test_what_s3_does_not_give_is_one_line(bucket, emulator, copied, monkeypatch):
    with pytest.raises(InputError, match=f"^{bucket}/none: nothing is there"):
        copied(f"{bucket}/none")
    iam = boto3.client("iam")
    iam.create_user(UserName="reader")
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    S3FileSystem.clear_instance_cache()
    with pytest.raises(ServiceError, match=f"^{bucket}/texts: .*AccessDenied"):
        copied(f"{bucket}/texts")


def test_standard_input_is_a_file(copied, type_in, tmp_path):
    type_in(b"hi")
    (tmp_path / "notes.txt").write_text("more")
    uri = (tmp_path / "notes.txt").as_uri()
    assert copied("-", uri) == {"stdin": b"hi", "notes.txt": b"more"}


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ("gs://bucket/b.txt", "hf://datasets/OWNER/NAME/PATH, or s3://bucket/prefix"),
        ("- -", "given once"),
        ("", "the path is empty"),
    ],
)
def test_other_urls_are_refused_with_the_way(copied, source, fact, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # it is not asked for
    with pytest.raises(InputError) as refused:
        copied(*source.split(" "))
    assert fact in str(refused.value)


def test_only_what_will_be_read_is_copied(hub, cli):
    text = b"A tale of a sea, and of the people by it.\n" * 40
    lines = b"".join(b'{"text": "%d %s"}\n' % (n, text[:41]) for n in range(30))
    tale = {"a.txt": text, "b.py": text, "docs.jsonl": lines, "photo.png": b"", "test/c.txt": text}
    hub.datasets["me/tales"] = {"README.md": b"", ".gitattributes": b"", **tale}
    source = "hf://datasets/me/tales"
    ran = cli("upload-data", source, "--include", "*.py", "--exclude", "test")
    assert ran.code == 0, ran.err
    assert hub.sent == ["a.txt", "b.py"]
    assert "/data/tales-" in ran.out
    assert f"{source}: README.md left out" in ran.err
    assert f"`sm-nanogpt upload-data {source} --tokenizer bpe`" in ran.err
    assert f"warning: {source}: 1 file left out: 1 .jsonl; " in ran.err
    hub.sent.clear()
    assert cli("upload-data", f"{source}/docs.jsonl", BPE).code == 0
    assert hub.sent == ["docs.jsonl"]


LINES = b'{"text": "a sea"}\n' * 90
TABLE = b"id,Review\n" + b"1,a sea\n" * 90


@pytest.mark.parametrize(
    ("content", "column", "format"),
    [
        (gzip.compress(LINES), "text", "JSON"),
        (b"[%s]" % LINES.strip().replace(b"\n", b","), "text", "JSON"),
        (TABLE, "Review", "a table"),
        (TABLE.replace(b"Review", b"text"), "text", "a table"),
        (TABLE, "text", "plain text"),
    ],
)
def test_a_text_without_a_name_is_known_by_its_content(content, column, format, tmp_path):
    (tmp_path / "stdin").write_bytes(content)
    assert detect_file(tmp_path / "stdin", column=column).format.name == format


def test_standard_input_is_uploaded(cli, type_in):
    type_in(b"".join(b'{"text": "%d %s"}\n' % (n, b"a sea " * 20) for n in range(30)))
    ran = cli("upload-data", "-", BPE).good
    assert "30 documents" in ran.err
    assert "/data/stdin-" in ran.out


@pytest.mark.parametrize(
    ("content", "options", "fact"),
    [
        (LINES, [], "`sm-nanogpt upload-data - --tokenizer bpe`"),
        (b"%PDF-1", [], "`pdftotext FILE NEW-FILE.txt`"),
    ],
)
def test_a_refusal_names_standard_input(cli, type_in, content, options, fact):
    type_in(content)
    assert cli("upload-data", "-", options).failed(2, fact)


def test_a_table_of_standard_input_is_never_silent(tmp_path, caplog):
    (tmp_path / "stdin").write_text("id,body\n" + "1,a sea\n" * 90)
    assert detect_file(tmp_path / "stdin", source="-").format is PLAIN
    (record,) = caplog.records
    assert record.getMessage() == "-: looks like a table, but is read as text"
    assert vars(record)["code"] == "name-column"


def test_an_error_names_the_source_not_its_copy(hub, home):
    source = "hf://datasets/me/notes/data"
    hub.datasets["me/notes"]["data/deep/b.jsonl"] = b'{"text": "b"}\nno\n'
    with open_sources([source], Settings(home=home)) as sources:
        files = find_files(sources, FileOptions(records=True))
        with pytest.raises(InputError, match=f"^{source}/deep/b.jsonl:2: not JSON"):
            survey_documents(files)


def test_what_is_copied_has_a_name():
    copy = Path("cache/copy")
    assert TextSource(copy, "hf://datasets/me/notes@main/data/a.txt").name == "notes"
    assert TextSource(copy, "-").name == "stdin"
    assert TextSource(copy, "s3://bucket/texts").name == "texts"
    assert TextSource(Path("a/b.txt")).name == "b.txt"
