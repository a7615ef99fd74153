"""What comes back from a job: a model whole or not at all, whatever the archive holds."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import launching
import pytest
from launching import Finished, Ran
from test_documents import cut_sparse_header

from entry_point.checkpoint import Checkpoints, read_safetensors, write_safetensors
from entry_point.config import make_config
from entry_point.huggingface import hugging_face_config
from launcher import ServiceError, describe, fetch_model
from launcher.models import fetch

NAMES = {
    "SHA256SUMS",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}


def archive_of(job: Finished) -> Path:
    return job.directory / "output" / "model.tar.gz"


def members_of(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def regular(name: str, content: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def pack(archive: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))


def add(archive: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    """The archive with more in it than the model."""
    model = [regular(name, content) for name, content in members_of(archive).items()]
    pack(archive, *model, *members)


def change(archive: Path, changed: Mapping[str, bytes | None], sums: bool = True) -> None:
    """The archive with files changed, or left out, and with the checksums that fit."""
    members = {**members_of(archive), **changed}
    whole = {name: content for name, content in members.items() if content is not None}
    if sums:
        lines = [f"{hashlib.sha256(c).hexdigest()}  {n}\n" for n, c in whole.items()]
        whole["SHA256SUMS"] = "".join(lines).encode()
    pack(archive, *(regular(name, content) for name, content in whole.items()))


def refused(job: Finished, cli: Callable[..., Ran]) -> str:
    """Why the archive is refused, in one line; nothing is left of it, anywhere."""
    before = launching.tree(job.home.parent)
    ran = cli("fetch-and-sample", job.job_id)
    assert ran.code == 1, ran
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert launching.tree(job.home.parent) - before <= {"home/models"}
    return ran.error


# -- what is good ---------------------------------------------------------------------------------


def test_the_next_fetch_deletes_what_a_killed_fetch_left(tmp_path):
    fetching = (
        "import os, sys; from pathlib import Path; from launcher.models.fetch import scratch\n"
        "with scratch(Path(sys.argv[1])) as directory:\n"
        f"    (directory / 'half').touch(); os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    subprocess.run([sys.executable, "-c", fetching, str(tmp_path)], timeout=60)
    assert list(tmp_path.glob(".fetch-*/half"))
    with fetch.scratch(tmp_path) as first, fetch.scratch(tmp_path) as second:
        assert set(tmp_path.iterdir()) == {first, second}


def test_a_whole_model_is_fetched_below_the_jobs_id(job):
    directory = fetch_model(job.job_id)
    assert directory.parent == job.home / "models" / job.job_id
    assert {path.name for path in directory.iterdir()} == NAMES


def test_a_fetched_model_is_not_unpacked_again(job):
    directory = fetch_model(job.job_id)
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert fetch_model(job.job_id) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_a_changed_archive_is_fetched_again(job):
    first = fetch_model(job.job_id)
    members = members_of(archive_of(job))
    training = {**json.loads(members["training.json"]), "note": "trained again"}
    change(archive_of(job), {"training.json": json.dumps(training).encode()})
    second = fetch_model(job.job_id)
    assert second != first
    assert "trained again" in (second / "training.json").read_text()


def test_two_simultaneous_fetches_of_one_job_both_work(job):
    words = ["fetch-and-sample", job.job_id, "--max-new-tokens", "20"]
    both = launching.all_ended([words, words], job.home)
    assert [ran.code for ran in both] == [0, 0], both
    assert both[0].out == both[1].out != ""
    assert len(list((job.home / "models" / job.job_id).iterdir())) == 1


def test_progress_adds_up_to_the_size_of_the_archive(job):
    steps: list[int] = []
    fetch_model(job.job_id, progress=steps.append)
    assert sum(steps) == archive_of(job).stat().st_size


def test_an_archive_of_plain_tar_is_accepted(job):
    members = members_of(archive_of(job))
    directory = tarfile.TarInfo("./")
    directory.type = tarfile.DIRTYPE
    files = [regular(f"./{name}", content) for name, content in members.items()]
    pack(archive_of(job), (directory, b""), *files)
    assert {path.name for path in fetch_model(job.job_id).iterdir()} == NAMES


# -- what is hostile ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../escaped", "a/../../escaped", "..", "sub/../../../escaped", "..\\escaped", "C:\\escaped"],
)
def test_a_path_that_leads_out_is_refused(job, cli, name):
    add(archive_of(job), regular(name, b"hostile"))
    assert "outside of the model" in refused(job, cli)


def test_an_absolute_path_is_refused(job, cli):
    target = job.home.parent / "escaped"
    add(archive_of(job), regular(str(target), b"hostile"))
    assert "outside of the model" in refused(job, cli)
    assert not target.exists()


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (tarfile.SYMTYPE, "/etc/passwd"),
        (tarfile.SYMTYPE, "model.safetensors"),
        (tarfile.LNKTYPE, "/etc/passwd"),
        (tarfile.LNKTYPE, "model.safetensors"),
    ],
)
def test_a_link_is_refused(job, cli, kind, target):
    add(archive_of(job), special("link", kind, target))
    assert "is a link" in refused(job, cli)


def test_a_file_through_a_linked_directory_is_refused(job, cli):
    outside = job.home.parent / "outside"
    outside.mkdir()
    link = special("link", tarfile.SYMTYPE, str(outside))
    add(archive_of(job), link, regular("link/escaped", b"hostile"))
    assert "'link' is a link" in refused(job, cli)
    assert not list(outside.iterdir())


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_a_device_or_a_pipe_is_refused(job, cli, kind):
    add(archive_of(job), special("device", kind))
    assert "not a regular file" in refused(job, cli)


def test_a_sparse_file_is_refused(job, cli):
    """Its holes unpack to bytes that the archive does not hold, and that no bound counts."""
    model = [regular(name, content) for name, content in members_of(archive_of(job)).items()]
    sparse = tarfile.TarInfo("sparse")
    sparse.pax_headers = {"GNU.sparse.size": str(1 << 20), "GNU.sparse.map": "0,0"}
    with tarfile.open(archive_of(job), "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for member, content in model:
            tar.addfile(member, io.BytesIO(content))
        tar.addfile(sparse)
    assert "not a regular file" in refused(job, cli)


def test_a_sparse_header_that_is_cut_off_is_refused(job, cli):
    archive_of(job).write_bytes(gzip.compress(cut_sparse_header()))
    assert "is damaged" in refused(job, cli)


def test_the_same_name_twice_is_refused(job, cli):
    add(archive_of(job), regular("config.json", b"{}"))
    assert "config.json" in refused(job, cli)


@pytest.mark.parametrize("name", ["config.json/inside", "config.json/far/inside"])
def test_a_file_below_a_file_is_refused(job, cli, name):
    add(archive_of(job), regular(name, b"{}"))
    assert f"{name!r} twice, or below a file" in refused(job, cli)


# -- bombs ----------------------------------------------------------------------------------------


@pytest.fixture
def small_limit(monkeypatch):
    """So that a bomb need not be a big one."""
    monkeypatch.setattr(fetch, "RATIO_FREE_BYTES", 1 << 20)


@pytest.mark.usefixtures("small_limit")
def test_a_huge_member_is_refused_before_it_is_written(job, cli, monkeypatch):
    written: list[int] = []
    copy = shutil.copyfileobj

    def noted(source: Any, out: Any) -> None:
        copy(source, out)
        written.append(out.tell())

    monkeypatch.setattr(shutil, "copyfileobj", noted)
    pack(archive_of(job), regular("big", bytes(1 << 25)))
    assert "20 times its size" in refused(job, cli)
    assert written == []


@pytest.mark.usefixtures("small_limit")
def test_members_that_add_up_to_a_huge_size_are_refused(job, cli):
    pack(archive_of(job), *(regular(f"part-{i}", bytes(1 << 18)) for i in range(64)))
    assert "20 times its size" in refused(job, cli)


@pytest.mark.usefixtures("small_limit")
def test_very_many_empty_members_are_refused(job, cli):
    pack(archive_of(job), *(regular(f"{i}") for i in range(1001)))
    assert "too many files" in refused(job, cli)


def test_deep_directories_are_refused(job, cli):
    add(archive_of(job), regular("d/" * 9 + "file"))
    assert "too deep directories" in refused(job, cli)


def test_very_many_headers_of_one_file_are_refused(job, cli):
    header = special("long", tarfile.XHDTYPE)
    add(archive_of(job), *[header] * 1000, regular("file"))
    assert "is damaged: maximum recursion depth" in refused(job, cli)


@pytest.mark.usefixtures("small_limit")
def test_a_huge_header_is_refused(job, cli):
    header = tarfile.TarInfo("long")
    header.type = tarfile.XHDTYPE
    header.size = 1 << 25
    add(archive_of(job), (header, bytes(1 << 25)))
    assert "20 times its size" in refused(job, cli)


def test_a_member_of_an_impossible_size_is_refused(job, cli):
    member = tarfile.TarInfo("claim")
    member.size = 1 << 60
    archive_of(job).write_bytes(gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))
    assert "20 times its size" in refused(job, cli)


def test_a_member_of_negative_size_is_refused(job, cli):
    member = tarfile.TarInfo("claim")
    member.size = -1
    model = gzip.decompress(archive_of(job).read_bytes())
    archive_of(job).write_bytes(gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + model))
    # New versions of Python refuse it too.
    assert re.search("20 times its size|is damaged: invalid offset", refused(job, cli))


def test_weights_that_compress_well_are_accepted(job):
    archive = archive_of(job)
    members = members_of(archive)
    pack(archive, *(regular(n, c) for n, c in members.items()), regular("zeros", bytes(1 << 25)))
    assert (fetch_model(job.job_id) / "zeros").stat().st_size == 1 << 25


# -- what is damaged ------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.7, 0.99, 1.0])
def test_a_truncated_archive_is_refused(job, cli, part):
    content = archive_of(job).read_bytes()
    archive_of(job).write_bytes(content[: min(int(len(content) * part), len(content) - 1)])
    assert "model.tar.gz is damaged: " in refused(job, cli)


def test_a_damaged_archive_error_names_the_place_and_a_remedy(job, cli):
    archive_of(job).write_bytes(archive_of(job).read_bytes()[:1000])
    error = refused(job, cli)
    assert error.startswith(f"{archive_of(job).as_uri()} is damaged: ")
    resume = f"sm-nanogpt launch --resume {job.job_id} --set max_steps=N"
    assert error.endswith(f"; `{resume}`, N above 10, trains another from its checkpoint")
    assert cli(*resume.replace("=N", "=12").split()[1:]).code == 0

    shutil.rmtree(job.directory / "hosts/algo-1/checkpoints")
    assert refused(job, cli).endswith("; train again")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_failed_local_write_is_not_blamed_on_the_store(job, cli, monkeypatch, checkpoint, code):
    def fails(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    if checkpoint:
        end_as(job, status="Stopped")
    monkeypatch.setattr(shutil, "copyfileobj", fails)
    monkeypatch.setattr("entry_point.huggingface.write_safetensors", fails)
    start = f"{job.home / 'models'}: {os.strerror(code)}; set SM_NANOGPT_HOME to another"
    assert cli("fetch-and-sample", job.job_id).error.startswith(start)
    assert list((job.home / "models").iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"<html>Access denied</html>", bytes(5000)], ids=["empty", "html", "zeros"]
)
def test_a_file_that_is_not_an_archive_is_refused(job, cli, content):
    archive_of(job).write_bytes(content)
    assert "model.tar.gz is damaged: " in refused(job, cli)


def test_an_empty_archive_is_refused(job, cli):
    pack(archive_of(job))
    assert "SHA256SUMS" in refused(job, cli)


def test_a_flipped_bit_is_refused_at_any_position(job, tmp_path):
    content = archive_of(job).read_bytes()
    chance = random.Random(0)
    places = [*range(10), *chance.sample(range(10, len(content)), 60)]
    places += range(len(content) - 40, len(content))  # the archive's end and its checksum
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << chance.randrange(8)
        archive = tmp_path / "damaged.tar.gz"
        archive.write_bytes(damaged)
        target = tmp_path / f"out-{place}"
        try:
            fetch.extract(archive, target, archive.as_uri())
        except ServiceError:
            continue
        # What it may change unseen is what is no content: gzip's time stamp and the like.
        whole = members_of(archive_of(job))
        assert {p.name: p.read_bytes() for p in target.iterdir()} == whole, place


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_model_without_one_of_its_files_is_refused(job, cli, name):
    change(archive_of(job), {name: None}, sums=False)
    assert name in refused(job, cli)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "training.json"])
def test_a_document_that_was_changed_is_refused(job, cli, name):
    content = members_of(archive_of(job))[name] + b"\n"
    change(archive_of(job), {name: content}, sums=False)
    assert f"{name} is damaged: its SHA-256 is not that of SHA256SUMS" in refused(job, cli)


def test_sha256sum_checks_a_model(job):
    words = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    subprocess.run(words, cwd=fetch_model(job.job_id), check=True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "training.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff", b'"', b"[" * 100_000],
    ids=["empty", "list", "object", "binary", "open", "deep"],
)
def test_a_model_with_a_broken_document_is_refused(job, cli, name, content):
    change(archive_of(job), {name: content})
    assert re.search(rf"{name} (is damaged|cannot be read|and training)", refused(job, cli))


def reshaped(job: Finished, tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(members_of(archive_of(job))["model.safetensors"])
    tensors, metadata = read_safetensors(weights)
    edit(tensors)
    write_safetensors(weights, tensors, metadata)
    change(archive_of(job), {"model.safetensors": weights.read_bytes()})


def test_weights_of_a_wrong_shape_are_refused_by_name(job, cli, tmp_path):
    def edit(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :7]

    reshaped(job, tmp_path, edit)
    assert "head.weight should be" in refused(job, cli)


def test_missing_weights_are_refused_by_name(job, cli, tmp_path):
    reshaped(job, tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refused(job, cli)


def claim(job: Finished, **values: int) -> None:
    """Changes what the model says of itself, in both documents."""
    members = members_of(archive_of(job))
    training, config = (json.loads(members[n]) for n in ("training.json", "config.json"))
    training["config"].update(values)
    made = make_config(training["config"])
    config = hugging_face_config(made, config["vocab_size"])
    documents = {"training.json": training, "config.json": config}
    change(archive_of(job), {n: json.dumps(d).encode() for n, d in documents.items()})


def test_a_vast_context_takes_no_memory(job, cli):
    claim(job, block_size=1 << 17)
    ran = cli("fetch-and-sample", job.job_id, "--max-new-tokens", "5")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("name", ["n_hidden", "block_size", "n_embd", "n_layer"])
def test_a_model_of_a_vast_size_is_refused(job, cli, name):
    training = json.loads(members_of(archive_of(job))["training.json"])
    training["config"][name] = 10**30
    change(archive_of(job), {"training.json": json.dumps(training).encode()})
    assert re.search(rf"{name}=1e\+30: must be a whole number from", refused(job, cli))


def test_nonfinite_weights_are_refused(job, cli, tmp_path):
    reshaped(job, tmp_path, lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))
    assert "lm_head.weight holds numbers that are not finite" in refused(job, cli)


def test_a_vast_header_of_weights_is_refused(job, cli):
    header = b"[" + b"{}," * 500_000 + b"{}]"
    content = len(header).to_bytes(8, "little") + header
    change(archive_of(job), {"model.safetensors": content})
    assert "its header has 1,500,004 bytes" in refused(job, cli)


def test_a_repaired_archive_is_fetched_after_a_refusal(job, cli):
    whole = archive_of(job).read_bytes()
    archive_of(job).write_bytes(whole[: len(whole) // 2])
    refused(job, cli)
    archive_of(job).write_bytes(whole)
    assert cli("fetch-and-sample", job.job_id, "--max-new-tokens", "5").code == 0


# -- jobs without a model -------------------------------------------------------------------------


def test_an_unknown_job_error_names_the_jobs_command(cli):
    for command in ("fetch-and-sample", "status", "logs", "stop"):
        ran = cli(command, "sm-nanogpt-nope")
        assert ran.code == 1
        assert "'sm-nanogpt-nope'" in ran.error
        assert "`sm-nanogpt jobs`" in ran.error


@pytest.mark.parametrize("job_id", ["..", ".", "a/b", "x" * 300, "ü", "a b"])
def test_an_invalid_job_id_is_an_unknown_job(cli, job_id):
    for words in ((), ("--region", "us-east-1")):  # where SageMaker would be asked too
        ran = cli(*words, "status", job_id)
        assert ran.code == 1
        assert "there is no job" in ran.error


def test_the_library_refuses_an_empty_job_id(home):
    with pytest.raises(ServiceError, match="there is no job"):
        describe("")


def end_as(job: Finished, **state: Any) -> None:
    """Makes of the job one that ended otherwise, and left no model."""
    archive_of(job).unlink()
    started = json.loads((job.directory / "state.json").read_text())["started"]
    (job.directory / "state.json").write_text(json.dumps({**state, "started": started}))


def test_a_failed_job_is_sampled_from_its_last_checkpoint(job, cli):
    end_as(job, status="Failed", reason="RankError: rank 0 was killed")
    ran = cli("fetch-and-sample", job.job_id, "--max-new-tokens", "20")
    assert ran.code == 0
    assert "is Failed; this is its last checkpoint, step-00000010" in ran.err
    assert len(ran.out) == 21


def test_a_fetched_checkpoint_is_not_fetched_again(job):
    end_as(job, status="Stopped")
    directory = fetch_model(job.job_id)
    fetched: list[int] = []
    assert fetch_model(job.job_id, progress=fetched.append) == directory
    assert fetched == []


def test_a_failed_job_without_a_checkpoint_gives_its_reason(job, cli):
    end_as(job, status="Failed", reason="ValueError: of no use")
    shutil.rmtree(job.directory / "hosts/algo-1/checkpoints")
    error = refused(job, cli)
    assert "is Failed: ValueError: of no use" in error
    assert f"`sm-nanogpt logs {job.job_id}`" in error


def test_a_stopped_job_without_a_checkpoint_gives_its_state(job, cli):
    end_as(job, status="Stopped")
    shutil.rmtree(job.directory / "hosts/algo-1/checkpoints")
    error = refused(job, cli)
    assert "is Stopped; it left neither a model nor a checkpoint" in error
    assert f"`sm-nanogpt logs {job.job_id}`" in error


def test_a_skipped_checkpoint_is_reported_on_stderr_only(job, cli):
    end_as(job, status="Stopped")
    newest = job.directory / "hosts/algo-1/checkpoints/checkpoint-00000010.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    ran = cli("fetch-and-sample", job.job_id, "--max-new-tokens", "20")
    assert ran.code == 0, ran
    assert "checkpoint of step 10 is skipped" in ran.err
    assert len(ran.out) == 21


def test_a_checkpoint_with_unfitting_weights_is_refused(job, cli):
    end_as(job, status="Stopped")
    checkpoints = Checkpoints(job.directory / "hosts/algo-1/checkpoints")
    loaded = checkpoints.load_latest()
    assert loaded is not None
    tensors, newest = loaded
    name = "model.blocks.0.attention.out.weight"
    checkpoints.save({**tensors, name: tensors[name][:, :7].contiguous()}, newest)
    before = launching.tree(job.home)
    ran = cli("fetch-and-sample", job.job_id)
    assert ran.code == 1
    assert "blocks.0.attention.out.weight is [32, 7]" in ran.error
    assert launching.tree(job.home) - before <= {"models"}


def test_damaged_checkpoints_are_refused_and_leave_nothing(job, cli):
    end_as(job, status="Stopped")
    for path in (job.directory / "hosts/algo-1/checkpoints").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100])
    before = launching.tree(job.home)
    ran = cli("fetch-and-sample", job.job_id)
    assert ran.code == 1
    assert "damaged" in ran.error
    assert launching.tree(job.home) - before <= {"models"}
