"""Documents that others may have written: whatever they hold, it is used or refused in one line.

Hypothesis puts hostile values in place of each part of a good document.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import TINY, settings_of
from models import SMALL, some_model

from sm_nanogpt import InputError, Request, ServiceError
from sm_nanogpt.entry_point.checkpoint import Checkpoints, sha256_of
from sm_nanogpt.entry_point.errors import TrainingError
from sm_nanogpt.entry_point.files import check_size, open_file
from sm_nanogpt.entry_point.huggingface import write_sums
from sm_nanogpt.entry_point.safetensors_file import write_safetensors
from sm_nanogpt.launcher.cli.jobs import print_jobs
from sm_nanogpt.launcher.cli.show import shown
from sm_nanogpt.launcher.files.documents import MAX_BYTES, parse, read_toml
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.launching.texts import check_texts
from sm_nanogpt.launcher.local.backend import LocalBackend
from sm_nanogpt.launcher.models.load import export_checkpoint, own_model, read_checkpoint
from sm_nanogpt.launcher.sagemaker import cost
from sm_nanogpt.launcher.sagemaker.cost import Prices
from sm_nanogpt.launcher.sagemaker.stack import last_seen_stack
from sm_nanogpt.launcher.settings import Settings, load_settings
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.text import corpus
from sm_nanogpt.launcher.text.channels import find_channel
from sm_nanogpt.launcher.text.store import last_upload

quickly = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

DEEP = 100_000
ODD = (
    *("null", "true", "NaN", "1e999", "-1", "0", "1.5", "1e308", "[]", "{}", '[{"a": [null]}]'),
    *("9" * 5000, "9" * 4000, "-" + "9" * 400, "[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP),
    *('"\\u0000"', '"\\ud800"', '"\\u001b[2J\\u202e"', '""', '"~nobody/x"', '"s3://"', '"x"'),
    *('"' + "x" * 70_000 + '"', '"2020-99-99"', '"99999-01-01"', '"NaN"', '"../../etc"'),
)
MARK = '"\\u0001"'  # in place of which a value is put

values = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
).map(json.dumps)


def items_within(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each part of a document, as what holds it and its key there."""
    keys = range(len(value)) if isinstance(value, list) else value
    for key in keys if isinstance(value, list | dict) else ():
        yield value, key
        yield from items_within(value[key])


@st.composite
def hostile(draw: st.DrawFn, document: Any) -> bytes:
    """JSON that is like `good`, with a part that is odd or missing."""
    whole = [copy.deepcopy(document)]
    holder, key = draw(st.sampled_from(list(items_within(whole))))
    value = draw(values | st.none())
    if value is None:
        del holder[key]
    else:
        holder[key] = "\x01"
    content = json.dumps(whole[0]) if whole else ""
    return content.replace(MARK, str(value)).encode()


def try_variants(test: Callable[[bytes], None], document: Any) -> None:
    """Runs a test with the document, and with many hostile ones."""
    test(json.dumps(document).encode())
    quickly(given(hostile(document) | st.binary(max_size=20))(test))()


@contextmanager
def our_errors() -> Iterator[None]:
    """Lets no other error pass."""
    try:
        yield
    except (InputError, ServiceError, TrainingError) as error:
        assert len(shown(str(error))) < 1100


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


# -- jobs on this machine -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["job.json", "state.json", "hosts/algo-1/checkpoints/metrics-00000001.jsonl"]
)
def test_a_job_with_a_hostile_document_is_handled(job, name, capsys):
    backend = LocalBackend(settings_of(job.home))
    path = job.directory / name
    lines = path.read_bytes()
    is_lines = name.endswith(".jsonl")
    document = json.loads(lines.splitlines()[0] if is_lines else lines)

    def show(content: bytes) -> None:
        path.write_bytes(lines + content if is_lines else content)
        with our_errors():
            described = backend.describe(job.job_id)
            assert described is not None
            print_jobs([described], everyone=False)
            json.dumps(vars(described), allow_nan=False)
            backend.job(job.job_id).config()

    try_variants(show, document)


def test_an_invalid_line_of_a_curve_hides_no_job(job, cli):
    path = job.directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl"
    listed = cli("jobs").out
    with path.open("a") as file:
        file.write("\n".join(["null", "[]", '{"step": null}', '{"val_loss": "x"}', "[" * DEEP, ""]))
    ran = cli("jobs")
    assert ran.code == 0
    assert ran.out == listed
    assert ran.err == ""


# -- texts ----------------------------------------------------------------------------------------


@pytest.fixture
def upload(home, short_text_file):
    return corpus.upload_data(short_text_file)


@pytest.mark.parametrize("name", ["store/data/input-*.json", "last-uploads.json"])
def test_a_hostile_record_of_an_upload_is_handled(home, upload, name):
    settings = settings_of(home)
    (path,) = home.glob(name)
    document = read(path)

    def look(content: bytes) -> None:
        path.write_bytes(content)
        with our_errors():
            last_upload(settings)
        with our_errors():
            check_texts({"data": find_channel(upload.uri, settings)}, SMALL)

    try_variants(look, document)


# -- what was learnt from AWS ---------------------------------------------------------------------


STACK = {"name": "n", "status": "s", "store": "s3://abc", "role": "r", "kms_key": None}


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("stacks.json", {"us-east-1//sm-nanogpt": {**STACK, "policy": "p", "vpc": False}}),
        ("prices.json", {"us-east-1": {"ml.g5.xlarge": {"per_hour": 1.5, "day": "2026-11-01"}}}),
    ],
)
def test_a_hostile_cache_is_ignored(home, name, document):
    home.mkdir()
    settings = Settings(home=home, region="us-east-1").with_offline(True)

    def look(content: bytes) -> None:
        (home / name).write_bytes(content)  # no error is raised
        last_seen_stack(settings, "us-east-1")
        price = Prices(settings).of("ml.g5.xlarge")
        assert price is not None
        cost.usd(cost.worst_case(price.per_hour, 3600, keep_alive=0))

    try_variants(look, document)


# -- what was submitted, and how ------------------------------------------------------------------


def test_a_hostile_record_in_a_store_is_handled(home):
    job = TrainingJob(instance="ml.g5.xlarge", data="s3://abc/d", max_cost=5, hyperparameters=TINY)

    def look(content: bytes) -> None:
        with our_errors():
            parse(content, TrainingJob, "job.json").config()

    try_variants(look, job.model_dump(mode="json", exclude_defaults=True))


TOML = (
    *("inf", "nan", "-1", "9" * 4000, "1e999", "2020-01-01", '"\\u0000"'),
    *("[" * 300 + "]" * 300, "{a = 1}", "[1, {b = [2020-01-01]}]", "", "]", "true"),
    *('"\\u001b[2J"', "''", "'~nobody'", "'s3://'", "'https://x'", "'" + "x" * 70_000 + "'"),
)
NAMES = ("home", "store", "region", "role", "stack", "max_cost", "tags", "n_layer")


def test_a_hostile_value_in_toml_is_refused(home):
    home.mkdir()

    def look(name: str, value: str) -> None:
        (home / "config.toml").write_text(f"{name} = {value}\n")
        with our_errors():
            load_settings()
        with our_errors():
            Request(instance="local", hyperparameters=read_toml(home / "config.toml")).config(
                world_size=1
            )

    for name, value in itertools.product(NAMES, TOML):
        look(name, value)
    quickly(given(st.sampled_from(NAMES), st.text(max_size=9))(look))()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "training.json"])
def test_a_model_with_a_hostile_document_is_refused(tmp_path, name):
    path = some_model(tmp_path) / name

    def load(content: bytes) -> None:
        path.write_bytes(content)
        write_sums(tmp_path)
        with our_errors():
            own_model(tmp_path)

    try_variants(load, read(path))


def test_a_checkpoint_with_a_hostile_state_is_refused(job, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    loaded = Checkpoints(job.directory / "hosts/algo-1/checkpoints").load_latest()
    assert loaded is not None
    tensors, state = loaded
    state = {**state, "best_step": None, "metrics": []}
    path = tmp_path / "checkpoints" / f"checkpoint-{state['step']:08d}.safetensors"

    def load(content: bytes) -> None:
        with suppress(UnicodeDecodeError):
            text = content.decode()
            metadata = {"format": "pt", "state": text, "state_sha256": sha256_of(text)}
            write_safetensors(path, tensors, metadata)
        with our_errors():
            export_checkpoint(
                read_checkpoint(tmp_path / "checkpoints"),
                tmp_path / "model",
                Settings(home=tmp_path),
            )

    try_variants(load, state)


# -- size, and what is no file --------------------------------------------------------------------


def test_a_document_may_have_just_the_largest_size(home):
    assert check_size(bytes(8), 8, "") == bytes(8)
    with pytest.raises(OSError, match="larger than"):
        check_size(bytes(9), 8, "")
    home.mkdir()
    with (home / "config.toml").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(InputError, match=r"config\.toml: larger than 2 MiB"):
        read_toml(home / "config.toml")


@pytest.mark.parametrize("content", ["[model]\nsize = 1\n", "model = {size = 1}\n"])
def test_a_file_of_hyperparameters_has_no_tables(tmp_path, content):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(InputError, match=r"has a section \[model\], or a table"):
        read_toml(path)


def test_a_damaged_document_names_the_place_of_its_fault():
    with pytest.raises(ServiceError, match=r"job\.json is damaged.*\b2\.steps: "):
        parse(b'[{}, {}, {"steps": "x"}]', list[dict[str, int]], "job.json")
    with pytest.raises(ServiceError, match=r"\((?!None)[^:]+\)$"):
        parse(b"1", list[int], "job.json")


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (os.mkdir, "is a directory|not a regular file"),
    ],
)
def test_only_a_regular_file_is_opened(put, reason, tmp_path):
    put(tmp_path / "file")
    with pytest.raises(OSError, match=reason):
        open_file(tmp_path / "file")


# Whoever does not read by open_file would wait for a named pipe.


@pytest.mark.parametrize("name", ["mine.py", "mine.toml"])
def test_a_launch_refuses_a_named_pipe(home, cli, name):
    os.mkfifo(home.parent / name)
    option = {"mine.py": "--entry-point", "mine.toml": "--config"}[name]
    assert cli("launch", "--instance", "local", option, name).failed(2, name)


def test_a_model_with_a_named_pipe_is_refused(tmp_path, cli):
    model = some_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer.json")
    launched = cli("launch", "--instance", "local", "--init-from", model)
    sampled = cli("fetch-and-sample", model)
    assert launched.failed(2, "tokenizer.json")
    assert sampled.failed(2, "tokenizer.json")


def test_a_published_model_with_a_named_pipe_is_refused(tmp_path, cli):
    model = some_model(tmp_path / "model")
    for name in ("SHA256SUMS", "training.json"):  # which other tools do not write
        (model / name).unlink()
    os.mkfifo(model / "chat_template.jinja")
    assert cli("fetch-and-sample", model).failed(2, "chat_template.jinja")


@pytest.mark.parametrize(
    ("name", "logs", "sample"),
    [
        ("job.json", 1, 1),
        ("runner.log", 1, 1),
        ("lock", 1, 1),
        ("hosts/algo-1/checkpoints/metrics-00000001.jsonl", 1, 1),
        ("logs/job.log", 1, 0),
        ("output/model.tar.gz", 0, 1),
    ],
)
def test_a_job_with_a_special_file_hides_no_other(job, cli, name, logs, sample):
    other = f"{job.job_id[:-6]}abcdef"
    shutil.copytree(job.directory, job.home / "jobs" / other)
    if name == "runner.log":  # which is read for the reason of a job that could not start
        (job.directory / "state.json").unlink()
    if name == "lock":  # which is looked at while a job may run
        state = job.directory / "state.json"
        state.write_text(state.read_text().replace("Completed", "InProgress"))
    (job.directory / name).unlink(missing_ok=True)
    os.mkfifo(job.directory / name)
    listed = cli("jobs")
    assert listed.code == 0
    assert other in listed.out
    assert job.job_id in listed.out + listed.err
    for command, code in (("logs", logs), ("fetch-and-sample", sample)):
        ran = cli(command, job.job_id)
        assert ran.code == code
        assert code == 0 or job.job_id in ran.error


# -- scripts --------------------------------------------------------------------------------------


def test_an_entry_point_that_exits_is_refused(tmp_path):
    (tmp_path / "config.py").write_text("raise SystemExit(0)")
    (tmp_path / "train.py").touch()
    with pytest.raises(InputError, match=r"config\.py:1: SystemExit: "):
        Source.read(tmp_path).module("config")


# -- what is said ---------------------------------------------------------------------------------


def test_a_message_is_short_and_printable():
    assert shown("\x1b[31m\u202e\x9b\x00\tb\né 漢 🙂") == r"\x1b[31m\u202e\x9b\x00" "\tb\né 漢 🙂"
    long = shown("x" * 9000 + "; do this")
    assert len(long) < 1100
    assert long.endswith("x; do this")
