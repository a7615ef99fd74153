"""What comes back from a job: a model whole or not at all, whatever the archive holds."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import re
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launching
import pytest
from launching import Finished, Ran
from models import some_model

from sm_nanogpt import ServiceError
from sm_nanogpt.entry_point import huggingface
from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.config import make_config
from sm_nanogpt.entry_point.errors import FormatError
from sm_nanogpt.entry_point.huggingface import MODEL_FILES, write_sums
from sm_nanogpt.entry_point.qwen3 import qwen3_config
from sm_nanogpt.launcher.local.backend import LocalBackend
from sm_nanogpt.launcher.models import fetch, load
from sm_nanogpt.launcher.models.fetch import fetch_model
from sm_nanogpt.launcher.models.load import check_sums, is_packaged, own_model
from sm_nanogpt.launcher.settings import load_settings
from sm_nanogpt.launcher.tracking import TrackedJob

Member = tuple[tarfile.TarInfo, bytes]


def archive_of(job: Finished) -> Path:
    return job.directory / "output" / "model.tar.gz"


def members_of(archive: Path) -> list[Member]:
    with tarfile.open(archive) as tar:
        files = [member for member in tar if member.isfile()]
        return [regular(file.name, tar.extractfile(file).read()) for file in files]  # type: ignore[union-attr]


def regular(name: str, content: bytes = b"") -> Member:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def special(name: str, kind: bytes, target: str = "", content: bytes = b"") -> Member:
    member, _ = regular(name, content)
    member.type, member.linkname = kind, target
    return member, content


def sparse(name: str) -> Member:
    """Its holes unpack to bytes that the archive does not hold, and that no bound counts."""
    member, _ = regular(name)
    member.pax_headers = {"GNU.sparse.size": str(1 << 20), "GNU.sparse.map": "0,0"}
    return member, b""


def claim(size: int) -> bytes:
    """A header of a file that the archive does not hold."""
    member = tarfile.TarInfo("claim")
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def cut_sparse_header() -> bytes:
    """A tar whose only header says that its list of holes goes on, and ends there."""
    header = bytearray(tarfile.TarInfo("train.py").tobuf(tarfile.GNU_FORMAT))
    header[156], header[482] = ord("S"), 1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def pack(archive: Path, *members: Member) -> None:
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))


def refused(job: Finished, cli: Callable[..., Ran]) -> str:
    """Why a job has no model, in one line; nothing is left of it, anywhere."""
    files_before = launching.tree(job.home.parent)
    ran = cli("fetch-and-sample", job.job_id)
    assert ran.code == 1, ran
    assert ran.out == "", ran
    assert ran.err.count("\n") == 1, ran
    assert launching.tree(job.home.parent) - files_before <= {"home/models"}
    return ran.error


@pytest.fixture
def fetched(monkeypatch):
    """The numbers of bytes that the progress bar of a fetch gets."""
    steps = list[int]()
    hook = nullcontext(steps.append)
    monkeypatch.setattr("sm_nanogpt.launcher.models.fetch.byte_progress", lambda label: hook)
    return steps


def test_an_archive_is_fetched_once_until_it_changes(job, fetched):
    first = fetch_model(job.job_id, load_settings())
    assert first.parent == job.home / "models" / job.job_id
    assert {path.name for path in first.iterdir()} == {*MODEL_FILES, "SHA256SUMS", "moments"}
    assert sum(fetched) == archive_of(job).stat().st_size
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=first, check=True)

    (first / "mark").touch()
    assert fetch_model(job.job_id, load_settings()) == first
    assert (first / "mark").exists()
    assert sum(fetched) == archive_of(job).stat().st_size

    pack(archive_of(job), *members_of(archive_of(job)), regular("note"))
    second = fetch_model(job.job_id, load_settings())
    assert second != first
    assert (second / "note").exists()


def test_a_job_and_its_model_are_read_once(job, cli, monkeypatch):
    counts = Counter[str]()

    def counted(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(LocalBackend, "describe")
    counted(huggingface, "read_safetensors")
    counted(load, "check_sums")
    assert cli("fetch-and-sample", job.job_id, "--max-new-tokens", "3").good
    assert counts == {"describe": 1, "read_safetensors": 1, "check_sums": 1}


def test_of_two_copies_that_of_the_end_is_taken(job, monkeypatch, caplog):
    final = fetch_model(job.job_id, load_settings())
    shutil.copytree(final, final.with_name("step-00000005"))
    os.utime(final / "SHA256SUMS", (0, 0))
    monkeypatch.setattr(fetch, "find", Mock(side_effect=ServiceError("no network")))
    assert fetch_model(job.job_id, load_settings()) == final
    assert "no network" in caplog.text
    shutil.rmtree(final)
    assert fetch_model(job.job_id, load_settings()).name == "step-00000005"
    with pytest.raises(ServiceError, match="no network"):
        fetch_model("*", load_settings())


def test_two_simultaneous_fetches_of_one_job_both_work(job):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(fetch_model, [job.job_id] * 2, [load_settings()] * 2)
    assert first == second
    check_sums(first)
    assert list(first.parent.iterdir()) == [first]


def test_archives_with_dot_names_and_zeros_are_accepted(tmp_path):
    directory, zeros = special("./", tarfile.DIRTYPE), regular("./zeros", bytes(1 << 25))
    pack(tmp_path / "archive", directory, regular("./a", b"a"), zeros)
    fetch.extract(tmp_path / "archive", tmp_path / "model", "uri")
    assert (tmp_path / "model/a").read_bytes() == b"a"
    assert (tmp_path / "model/zeros").stat().st_size == 1 << 25


@pytest.mark.parametrize(
    ("reason", "members"),
    [
        ("outside of the model", [regular("a/../../escaped", b"hostile")]),
        ("outside of the model", [regular("..\\escaped", b"hostile")]),
        ("outside of the model", [regular("C:escaped", b"hostile")]),
        ("outside of the model", [regular("/tmp/escaped", b"hostile")]),
        ("'link' is a link", [special("link", tarfile.SYMTYPE, "/etc/passwd")]),
        ("'link' is a link", [special("link", tarfile.LNKTYPE, "/etc/passwd")]),
        ("not a regular file", [special("device", tarfile.CHRTYPE)]),
        ("not a regular file", [sparse("sparse")]),
        ("File exists: .*config.json", [regular("config.json"), regular("config.json", b"{}")]),
        ("Not a directory: .*far", [regular("config.json"), regular("config.json/far/inside")]),
        ("20 times its size", [regular("big", bytes(1 << 22))]),
        ("20 times its size", [special("long", tarfile.XHDTYPE, content=bytes(1 << 22))]),
        ("too many files", [regular(f"{i}") for i in range(1001)]),
        ("too deep directories", [regular("d/" * 9 + "file")]),
        ("maximum recursion depth", [special("long", tarfile.XHDTYPE)] * 1000 + [regular("a")]),
    ],
)
def test_a_hostile_archive_is_refused(reason, members, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "FREE_UNPACK_BYTES", 1 << 20)  # a bomb need not be a big one
    pack(tmp_path / "archive", *members)
    with pytest.raises(ServiceError, match=f"^uri is damaged, or no model: .*{reason}"):
        fetch.extract(tmp_path / "archive", tmp_path / "model", "uri")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "model"]


@pytest.mark.parametrize(
    "content",
    [
        b"<html>Access denied</html>",
        gzip.compress(cut_sparse_header()),
        gzip.compress(claim(1 << 60) + bytes(1024)),
        gzip.compress(claim(-1) + bytes(1024)),
    ],
    ids=["html", "sparse", "impossible", "negative"],
)
def test_a_file_that_is_no_archive_is_refused(content, tmp_path):
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(ServiceError, match="uri is damaged"):
        fetch.extract(tmp_path / "archive", tmp_path / "model", "uri")


def test_archives_cut_or_flipped_anywhere_are_refused(tmp_path):
    archive, chance = tmp_path / "archive", random.Random(0)
    contents = {"a": chance.randbytes(50), "deep/b": b"bbb"}
    members = [regular(name, content) for name, content in contents.items()]
    pack(archive, *members)
    content = archive.read_bytes()
    for position in range(len(content)):
        archive.write_bytes(content[:position])
        with pytest.raises(ServiceError, match="is damaged, or no model: "):
            fetch.extract(archive, tmp_path / f"cut-{position}", "uri")
        flipped = bytearray(content)
        flipped[position] ^= 1 << chance.randrange(8)
        archive.write_bytes(flipped)
        target = tmp_path / f"flipped-{position}"
        try:
            fetch.extract(archive, target, "uri")
        except ServiceError:
            continue
        # What it may change unseen is what is no content: gzip's time stamp and the like.
        for name, expected in contents.items():
            assert (target / name).read_bytes() == expected, position


def test_a_refused_archive_leaves_nothing_until_repaired(job, cli):
    whole = archive_of(job).read_bytes()
    members = members_of(archive_of(job))
    pack(archive_of(job), *members, regular(str(job.home.parent / "escaped"), b"hostile"))
    error = refused(job, cli)
    assert error.startswith(f"{archive_of(job).as_uri()} is damaged, or no model: ")
    assert "outside of the model" in error
    archive_of(job).write_bytes(whole)
    assert cli("fetch-and-sample", job.job_id, "--max-new-tokens", "5").code == 0
    pack(archive_of(job), *members[1:])
    assert cli("fetch-and-sample", job.job_id).failed(1, "does not load", members[0][0].name)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_failed_local_write_is_not_blamed_on_the_store(job, cli, monkeypatch, checkpoint):
    fails = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    if checkpoint:
        end_as(job, status="Stopped")
    monkeypatch.setattr(shutil, "copyfileobj", fails)
    monkeypatch.setattr("sm_nanogpt.entry_point.huggingface.write_safetensors", fails)
    error = cli("fetch-and-sample", job.job_id).error
    assert error.startswith(f"{job.home / 'models'}: ")
    assert "no space left on device" in error
    assert list((job.home / "models").iterdir()) == []


@pytest.fixture
def model(tmp_path):
    return some_model(tmp_path / "model")


def change_training(model: Path, **values: Any) -> None:
    document = json.loads((model / "training.json").read_text())
    document["config"].update(values)
    (model / "training.json").write_text(json.dumps(document))


def refusal(model: Path) -> str:
    """Why files of a model, whose sums fit them, cannot be used."""
    write_sums(model)
    with pytest.raises(FormatError) as caught:
        own_model(model)
    return str(caught.value)


def test_a_changed_or_missing_file_is_refused_by_name(model):
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"\n")
    with pytest.raises(FormatError, match=r"^model\.safetensors is damaged: its SHA-256 "):
        own_model(model)
    (model / "config.json").unlink()
    with pytest.raises(FormatError, match=r"config\.json"):
        own_model(model)


def test_a_model_says_whether_the_packaged_folder_computes_it(model):
    assert is_packaged(model)
    training = json.loads((model / "training.json").read_text())
    (model / "training.json").write_text(json.dumps({**training, "model_sha256": "0" * 64}))
    assert not is_packaged(model)
    (model / "training.json").write_text("{}")
    assert not is_packaged(model)
    for name in ("SHA256SUMS", "training.json"):  # which other tools do not write
        (model / name).unlink()
    assert is_packaged(model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[]"),
        ("tokenizer.json", b"\xff"),
        ("training.json", b""),
    ],
)
def test_a_broken_document_is_refused_by_name(model, name, content):
    (model / name).write_bytes(content)
    error = refusal(model)
    assert re.search(rf"{name}:? (is damaged|is no|holds no|cannot be read)", error)


def test_a_vast_context_takes_no_memory(model, cli):
    training = json.loads((model / "training.json").read_text())
    config = make_config({**training["config"], "block_size": 1 << 17})
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    (model / "config.json").write_text(json.dumps(qwen3_config(config, size)))
    change_training(model, block_size=1 << 17)
    write_sums(model)
    assert cli("fetch-and-sample", model, "--max-new-tokens", "5").good


def test_a_vast_model_is_compared_before_memory_is_taken(model):
    training = json.loads((model / "training.json").read_text())
    vast = {**training["config"], "n_embd": 1 << 16, "n_hidden": 1 << 18}  # 200 GB
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    document = qwen3_config(make_config(vast), size)
    (model / "config.json").write_text(json.dumps(document))
    change_training(model, n_embd=1 << 16, n_hidden=1 << 18)
    assert "65536] in this script" in refusal(model)


def test_an_unknown_job_error_names_the_jobs_command(cli):
    facts = ("'sm-nanogpt-nope'", "`sm-nanogpt jobs`", "was not asked: AWS_REGION")
    assert cli("fetch-and-sample", "sm-nanogpt-nope").failed(1, *facts)


@pytest.mark.parametrize("job_id", ["..", "x" * 300, ""])
def test_an_invalid_job_id_is_an_unknown_job(home, job_id):
    for region in ("", "us-east-1"):  # where SageMaker would be asked too
        with pytest.raises(ServiceError, match="there is no job"):
            TrackedJob(job_id, load_settings(region=region)).describe()


def end_as(job: Finished, **state: Any) -> Path:
    """Makes of the job one that ended otherwise, and left no model; its checkpoints."""
    archive_of(job).unlink()
    started = json.loads((job.directory / "state.json").read_text())["started"]
    (job.directory / "state.json").write_text(json.dumps({**state, "started": started}))
    return job.directory / "hosts/algo-1/checkpoints"


def test_a_failed_job_is_sampled_from_its_last_checkpoint(job, cli, fetched):
    end_as(job, status="Failed", reason="RankError: rank 0 was killed")
    ran = cli("fetch-and-sample", job.job_id, "--max-new-tokens", "20")
    assert ran.code == 0
    assert len(ran.out) == 21
    assert "is Failed; this is its last checkpoint, step-00000010" in ran.err
    fetched.clear()
    directory = fetch_model(job.job_id, load_settings())
    assert directory.name == "step-00000010"
    assert fetched == []
    steps = [path.name for path in sorted((directory / "moments").iterdir())]
    assert steps[0] == "step-00000000.safetensors"
    assert len(steps) == 7


def test_only_the_newest_intact_checkpoint_is_downloaded(job, fetched):
    checkpoints = sorted(end_as(job, status="Stopped").glob("checkpoint-*"))
    assert len(checkpoints) > 1
    sizes = [path.stat().st_size for path in checkpoints]
    fetch_model(job.job_id, load_settings())
    assert sum(fetched) == sizes[-1]

    fetched.clear()
    shutil.rmtree(job.home / "models")
    checkpoints[-1].write_bytes(bytes(sizes[-1]))  # damaged
    assert fetch_model(job.job_id, load_settings()).name == "step-00000005"
    assert sum(fetched) == sum(sizes[-2:])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"status": "Failed", "reason": "ValueError: of no use"}, "Failed: ValueError: of no use"),
        ({"status": "Stopped"}, "Stopped; it left neither a model nor a checkpoint"),
    ],
)
def test_a_job_without_a_checkpoint_gives_its_state(job, cli, state, message):
    shutil.rmtree(end_as(job, **state))
    error = refused(job, cli)
    assert f"is {message}" in error
    for error_output in (error, cli("status", job.job_id).err):
        assert f"`sm-nanogpt logs {job.job_id}`" in error_output


def test_damaged_checkpoints_are_refused(job, cli):
    for path in end_as(job, status="Stopped").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100])
    assert cli("fetch-and-sample", job.job_id).failed(1, "damaged")
    assert list((job.home / "models").iterdir()) == []


def test_a_checkpoint_with_unfitting_weights_is_refused(job, cli):
    checkpoints = Checkpoints(end_as(job, status="Stopped"))
    loaded = checkpoints.load_latest()
    assert loaded is not None
    tensors, newest = loaded
    name = "model.blocks.0.attention.out.weight"
    checkpoints.save({**tensors, name: tensors[name][:, :7].contiguous()}, newest)
    assert "blocks.0.attention.out.weight is [32, 7]" in refused(job, cli)
