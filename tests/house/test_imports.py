"""What commands import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import launching
from commands import COMMANDS

ADVICE = (
    "it takes long to import, and these commands do without it; import it in the function that "
    "needs it, or move what they share into a module that does not import it"
)


def modules_after(home: Path, *calls: list[str]) -> set[str]:
    """The top-level modules that some commands leave loaded."""
    code = f"""
import sys
from sm_nanogpt.launcher.cli import run
for words in {calls}:
    assert run(words) == 0, words
print(*{{name.partition(".")[0] for name in sys.modules}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=launching.environment(home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_nothing_heavy(tmp_path):
    calls = [["--help"]]
    for command in COMMANDS:
        calls.append([*command.split(), "-h"])
    loaded = modules_after(tmp_path, *calls)
    assert "click" in loaded
    heavy = {"torch", "numpy", "sagemaker", "boto3", "botocore", "s3fs", "fsspec", "pydantic"}
    assert not loaded & heavy, f"{loaded & heavy}: {ADVICE}"


def test_light_commands_import_no_torch_aws_or_extra(job, short_text_file):
    calls = [["hyperparameters"], ["jobs"], ["upload-data", str(short_text_file)]]
    calls += [[name, job.job_id] for name in ("status", "metrics", "logs", "wait")]
    extras = {"altair", "vl_convert"}
    heavy = {"torch", "boto3", "botocore", "s3fs", "sagemaker", *extras}
    loaded = modules_after(job.home, *calls)
    assert not loaded & heavy, f"{loaded & heavy}: {ADVICE}"


def test_making_a_plan_imports_no_reader_of_texts():
    module = "sm_nanogpt.launcher.text.formats"
    code = f"import sys, sm_nanogpt.launcher.launching.launch; print({module!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n", f"{module}: {ADVICE}"
