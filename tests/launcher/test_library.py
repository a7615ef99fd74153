"""The library as a program uses it: jobs to hold, plans, and errors to branch on."""

from __future__ import annotations

import inspect
import math
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from launching import TINY
from sagemaker_jobs import CHECKPOINT

import sm_nanogpt as sm
from sm_nanogpt.launcher.files.storage import write_json
from sm_nanogpt.launcher.local.backend import LocalBackend
from sm_nanogpt.launcher.models.chat import read_messages

TINY_JOB = {"instance": "local", "preset": "cpu", "hyperparameters": TINY}


@pytest.fixture
def held(job):
    """The finished job, held."""
    return sm.Job(job.job_id)


# -- a job on this machine -------------------------------------------------------------------------


def test_a_job_is_held_from_launch_to_its_end(home, short_text_file):
    job = sm.launch(sm.Request(**TINY_JOB, name="first", data=str(short_text_file)))
    assert job.wait() == job
    assert job.status == "Completed"
    assert job.name == "first"
    assert job.cost is None
    assert job.url is None
    assert str(job) == job.id
    assert repr(job) == f"Job(id='{job.id}')"
    assert sm.job() == sm.job("first") == sm.job(job.id[-6:]) == job
    later = job.resume(hyperparameters={"max_steps": 15}).wait()
    assert later.describe().metrics is not None
    assert sm.jobs(limit=1) == [later]
    assert list(later.metrics()["step"])[-1] == 15


def test_a_plan_is_submitted_once(home, short_text_file):
    plan = sm.prepare(sm.Request(**TINY_JOB, data=str(short_text_file)))
    assert plan.worst_cost == 0  # on this machine
    assert plan.ceiling is None
    job = plan.submit().wait()
    with pytest.raises(sm.InputError, match=f"{job.id} was submitted before"):
        plan.submit()
    assert job.describe().status == "Completed"
    assert job.model().is_dir()


def test_a_sweep_gives_its_jobs_best_first(home, short_text_file):
    request = sm.Request(**TINY_JOB, data=str(short_text_file))
    jobs = sm.sweep(request, {"learning_rate": np.array([1e-9, 0.01])}, parallel=2)
    losses = [job.metrics()["val_loss"].min() for job in jobs]
    assert losses == sorted(losses)
    assert jobs[0].describe().hyperparameters["learning_rate"] == 0.01
    assert {*jobs} == {*sm.jobs()}


def test_a_job_gives_its_log_curve_model_and_text(held):
    assert list(held.logs(tail=1)) == list(held.logs(follow=True))[-1:]
    frame = held.metrics()
    assert list(frame.columns[:3]) == ["step", "train_loss", "val_loss"]
    assert frame["val_loss"].min() == held.describe().metrics["best_loss"]
    model, tokenizer = sm.load_model(str(held.model()))
    text = held.sample("The ", 20, seed=3)
    pieces = sm.stream_samples(model, tokenizer, "The ", 20, seed=3)
    assert text == "The " + "".join(piece for (piece,) in pieces)
    assert held.report("my.html").read_text().startswith("<!doctype html>")


def test_metrics_are_dicts_without_pandas(held, monkeypatch):
    frame = held.metrics()
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = held.metrics()
    assert [row["step"] for row in rows] == list(frame["step"])
    assert set().union(*rows) == set(frame.columns)


def test_the_model_is_loaded_once(held, monkeypatch):
    held.sample(max_new_tokens=2)
    monkeypatch.setattr("sm_nanogpt.launcher.models.load.load_model", None)
    assert held.sample("The ", 2, seed=1) != held.sample("The ", 2, seed=2)


def test_a_message_without_role_or_content_is_refused():
    cases: list[Any] = [
        [],
        "Hello",
        [{"role": "user"}],
        [{"content": "Hello"}],
        [{"role": "user", "content": None}],
        [{"role": "human", "content": "Hello"}],
        [{"role": "user", "content": "Hello"}, "Hi"],
    ]
    for messages in cases:
        with pytest.raises(sm.InputError, match="message"):
            read_messages(messages)


def test_only_models_of_conversations_chat(held):
    with pytest.raises(sm.InputError, match="conversations"):
        held.chat([{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize("keep_model", [True, False])
def test_a_deleted_job_is_gone_and_its_model_may_stay(held, home, keep_model):
    held.delete(keep_model=keep_model)
    assert sm.jobs() == []
    assert any((home / "models" / held.id).glob("*")) == keep_model
    with pytest.raises(sm.ServiceError, match="there is no job"):
        _ = held.status


def test_a_job_is_not_deleted_for_a_damaged_model(held):
    weights = held.model() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(sm.ServiceError, match="damaged"):
        held.delete(keep_model=True)
    assert held.status == "Completed"


def test_waiting_for_a_job_that_fails_raises(held, home):
    state = {"status": "Failed", "secondary": "Failed", "reason": "the GPU fell off the bus"}
    write_json(str(home / "jobs" / held.id / "state.json"), state)
    with pytest.raises(sm.ServiceError) as caught:
        held.wait()
    assert caught.value.job_id == held.id
    assert caught.value.reason == state["reason"]


def test_the_page_of_a_job_is_escaped_and_drawn(held, home):
    state = {"status": "Failed", "secondary": "Failed", "reason": "<script>alert(1)</script>"}
    write_json(str(home / "jobs" / held.id / "state.json"), state)
    html = held._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script" not in html
    assert html.count("<polyline") == 2
    assert "#" not in html  # each color is the page's
    held.delete()
    assert held._repr_html_().startswith("<pre>there is no job")


# -- which jobs ------------------------------------------------------------------------------------


def test_jobs_reads_only_as_many_as_asked(held, job, monkeypatch):
    for n in range(5):
        record = (job.directory / "job.json").read_text()
        other = job.directory.with_name(f"sm-nanogpt-2020010{n}-000000-abcdef")
        other.mkdir(parents=True)
        (other / "job.json").write_text(record)
    read: list[str] = []
    describe = LocalBackend.describe

    def counted(self: LocalBackend, job_id: str) -> sm.JobDescription | None:
        read.append(job_id)
        return describe(self, job_id)

    monkeypatch.setattr(LocalBackend, "describe", counted)
    assert sm.jobs(limit=1) == [held]
    assert len(read) <= 2  # one more tells which list is older
    assert [each.status for each in sm.jobs(status="Completed")] == ["Completed"]
    assert sm.jobs(name="nobody") == []


def test_a_sweep_of_a_set_value_is_refused_with_dashes_too(home, short_text_file):
    hyperparameters = {"learning-rate": 0.01}
    request = sm.Request(
        instance="local", data=str(short_text_file), hyperparameters=hyperparameters
    )
    with pytest.raises(sm.InputError, match="given twice"):
        sm.sweep(request, {"learning-rate": [0.02, 0.03]})


def test_a_state_that_no_job_has_is_refused(home):
    with pytest.raises(sm.InputError) as caught:
        sm.jobs(status="completed")
    assert caught.value.field == "status"
    assert caught.value.value == "completed"


def test_a_word_of_no_job_is_refused(held):
    with pytest.raises(sm.Missing) as caught:
        sm.job("nothing")
    assert caught.value.job_id == "nothing"


# -- money -----------------------------------------------------------------------------------------


@pytest.fixture
def request_of(money, cloud, short_text_file, monkeypatch):
    """A request for 4 GPUs, of which two hours may cost more than 10 USD."""
    monkeypatch.setenv("SM_NANOGPT_ASK_ABOVE", "10")
    return lambda **fields: sm.Request(
        **{"instance": "ml.g5.12xlarge", "data": str(short_text_file), "max_run": 7200, **fields}
    )


def test_a_plan_shows_the_request_and_cost_first(cloud, request_of):
    plan = sm.prepare(request_of(max_run=None, max_cost=5))
    assert plan.ceiling == 5
    assert plan.worst_cost == pytest.approx(5, abs=0.01)
    assert plan.request["TrainingJobName"] == plan.job_id
    assert plan.job.time_limit == plan.request["StoppingCondition"]["MaxRuntimeInSeconds"]
    assert not cloud.sagemaker.jobs
    job = plan.submit()
    assert job.id == plan.job_id
    assert job.status == "InProgress"
    assert str(job.url).endswith(job.id)


@pytest.mark.parametrize(
    ("fields", "worst"), [({}, 15.4), ({"instance": "ml.p4d.24xlarge"}, math.inf)]
)
def test_a_costly_launch_needs_consent(cloud, request_of, fields, worst):
    with pytest.raises(sm.Unconfirmed) as caught:
        sm.launch(request_of(**fields))
    assert caught.value.worst_cost == pytest.approx(worst, abs=0.1)
    assert caught.value.limit == 10
    assert not cloud.sagemaker.jobs
    assert sm.launch(request_of(**fields), confirmed=True).id in cloud.sagemaker.jobs


def test_a_costly_sweep_needs_consent(cloud, request_of):
    with pytest.raises(sm.Unconfirmed) as caught:
        sm.sweep(request_of(max_run=None), {"n_layer": [2, 4]})
    assert caught.value.worst_cost == pytest.approx(16.6, abs=0.1)
    assert not cloud.sagemaker.jobs


def test_only_a_ceiling_of_this_launch_is_consent(cloud, s3, request_of):
    first = sm.launch(request_of(max_cost=30))
    s3.put_object(Bucket=s3.bucket, Key=CHECKPOINT.format(first), Body=b"x")
    first.stop()
    first.wait()
    with pytest.raises(sm.Unconfirmed):
        first.resume()
    assert first.resume(max_cost=30).id in cloud.sagemaker.jobs


# -- the package -----------------------------------------------------------------------------------


def test_each_name_is_given_and_documented(home):
    assert dir(sm) == sorted(sm.__all__)
    for name in dir(sm):
        assert inspect.getdoc(getattr(sm, name)), name
    with pytest.raises(AttributeError):
        _ = sm.no_such_name


def test_importing_the_library_loads_no_torch(home):
    code = "import sm_nanogpt, sys; sm_nanogpt.upload_data; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_packages_example_prints_only_its_sample(home, tmp_path, short_text_file, capfd):
    lines = (sm.__doc__ or "").splitlines()
    example = "\n".join(line[4:] for line in lines if line.startswith("    "))
    small = f"preset='cpu', hyperparameters={TINY}"
    example = example.replace('preset="cpu"', small).replace("ROMEO:", "The ")
    shutil.copy(short_text_file, tmp_path / "input.txt")
    exec(example, {})
    printed = capfd.readouterr()
    assert printed.out[:4] == "The "
    assert len(printed.out) == 4 + 500 + 1
    assert printed.err == ""
