"""What a run was, in the words of `jobs`, `status` and reports."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import launching
import pytest
import runs

from sm_nanogpt.entry_point.config import make_config
from sm_nanogpt.entry_point.huggingface import FINE_TUNING
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.launching.start import model_name
from sm_nanogpt.launcher.launching.summary import summary_of, summary_of_resumed

FIELD = "    dropout: float = hyperparameter("
SCALED = (FIELD, f'    mlp_scale: float = hyperparameter(1.0, "scale", 0)\n{FIELD}')
EARLIER = "sm-nanogpt-20260101-000000-abcdef"


@pytest.mark.parametrize(
    ("fields", "summary"),
    [
        ({}, "cpu"),
        (
            {"preset": "quick", "hyperparameters": {"max_steps": 40, "device": "auto"}},
            "quick max_steps=40",
        ),
        ({"hyperparameters": {"dropout": 0.25, "seed": 1}}, "cpu dropout=0.25 seed=1"),
        # A resumed job has all values of the earlier one, and no preset.
        (
            {"hyperparameters": asdict(make_config({}, "laptop")), "resume": EARLIER},
            f"laptop resumes {EARLIER}",
        ),
        # What a model prescribes, and what suits fine-tuning, is said by the model's name.
        (
            {
                "hyperparameters": {"n_layer": 28, "n_embd": 64, "seed": 7, **FINE_TUNING},
                "init_from": "s3://bucket/models/qwen3-0123456789ab",
                "base": "Qwen3-0.6B",
            },
            "seed=7 from Qwen3-0.6B",
        ),
    ],
)
def test_a_summary_names_preset_changes_and_origin(fields, summary):
    assert summary_of(TrainingJob(data="file:///text", **fields)) == summary


def test_a_resumed_job_keeps_size_and_changes_in_its_summary():
    values = {**asdict(make_config({}, "laptop")), "dropout": 0.25}
    earlier_summary = "size 2.5 dropout=0.25 resumes sm-nanogpt-20250101-000000-abcdef"
    earlier = TrainingJob(data="file:///text", hyperparameters=values, summary=earlier_summary)
    cases = {
        "size 2.5 dropout=0.25": values,
        "size 2.5 dropout=0.25 max_steps=7": {**values, "max_steps": 7},
    }
    for summary, resumed_values in cases.items():
        job = TrainingJob(data="file:///text", hyperparameters=resumed_values, resume=EARLIER)
        assert summary_of_resumed(job, earlier) == f"{summary} resumes {EARLIER}"


def test_a_model_is_called_by_its_job_or_directory():
    cases = [
        (EARLIER, EARLIER),
        (f"file:///home/me/.sm-nanogpt/models/{EARLIER}/9ce7267a3271", EARLIER),  # of a sweep
        (f"s3://bucket/models/{EARLIER}-526ff4dd31bf", EARLIER),  # uploaded, with its hash
        ("./Qwen3-0.6B/", "Qwen3-0.6B"),
        ("s3://bucket/models/qwen3-0-6b-0123456789ab/", "qwen3-0-6b-0123456789ab"),
    ]
    for model, base in cases:
        assert model_name(model) == base


def test_an_edited_folder_and_its_own_values_are_named(tmp_path):
    runs.edited_folder(tmp_path / "mine", SCALED)
    cases: list[tuple[dict[str, Any], str]] = [({}, "quick edited")]
    cases += [({"mlp_scale": 0.5}, "quick mlp_scale=0.5 edited")]
    for changed, summary in cases:
        job = TrainingJob(
            data="file:///text",
            preset="quick",
            hyperparameters=changed,
            entry_point=tmp_path / "mine",
        )
        assert summary_of(job) == summary


def test_jobs_status_and_report_say_what_a_run_was(cli, short_text_file, tmp_path):
    runs.edited_folder(tmp_path / "mine", SCALED)
    options = ("--entry-point", "mine", "--preset", "quick", "--name", "scaled")
    values = {"mlp_scale": 0.5, "max_steps": 2, "eval_tokens": 512, "sample_length": 0}
    arguments = ("--instance", "local", "--data", str(short_text_file), *launching.sets(**values))
    job_id = cli("launch", arguments, options).good.out.strip()
    summary = "quick mlp_scale=0.5 max_steps=2 eval_tokens=512 sample_length=0 edited"
    row = cli("jobs").out.splitlines()[1]
    assert row.startswith(f"{job_id}  scaled ")
    assert sorted(row.split()[-6:]) == sorted(summary.split())
    status = cli("status", "scaled").out
    match = re.search(r"\nsettings: +(.*)\n", status)
    assert match
    assert sorted(match[1].split()) == sorted(summary.split())
    page = Path(cli("report", "scaled").good.out.strip()).read_text()
    assert f"<dt>Settings</dt><dd>{match[1]}</dd>" in page
    assert "<dt>Name</dt><dd>scaled</dd>" in page
