"""How a failed training is reported, in a container and outside."""

from __future__ import annotations

import json
import re
from unittest.mock import Mock

import pytest
import torch
from runs import SMALL, command_line

from sm_nanogpt.entry_point import train
from sm_nanogpt.entry_point.errors import (
    DataError,
    TrainingError,
    failure_report,
    os_reason,
    report_failure,
)


def test_the_first_failure_is_the_reason_for_sagemaker(tmp_path, monkeypatch):
    failure = tmp_path / "output/failure"
    failure.parent.mkdir()
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    report_failure("  at trainer.py:9 in run\nOSError: cause")
    assert failure.read_text() == "OSError: cause"
    report_failure("  at trainer.py:9 in run\nOSError: later")
    assert failure.read_text() == "OSError: cause"


def test_an_unexpected_error_hides_code_in_containers(monkeypatch):
    with pytest.raises(OSError) as caught:
        raise OSError("none")
    report = failure_report(caught.value)
    assert re.search(r'^  File ".*\.py", line \d+, in test_an_unexpected_\w+\n', report)
    assert report.endswith('    raise OSError("none")\nOSError: none')
    monkeypatch.setenv("SM_FRAMEWORK_MODULE", "training:main")
    report = failure_report(caught.value)
    assert re.fullmatch(r"  at \w+\.py:\d+ in test_an_unexpected_\w+\nOSError: none", report)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "no such file or directory"),
        (OSError(73, "RFS specific error"), "RFS specific error"),
        (OSError("None"), "none"),
    ],
)
def test_a_reason_of_the_system_goes_on_a_sentence(error, reason):
    assert os_reason(error) == reason


def test_a_failure_is_one_line_for_the_toolkit(monkeypatch):
    assert failure_report(DataError("two\nlines")) == "DataError: two lines"
    monkeypatch.setenv("SM_FRAMEWORK_MODULE", "sagemaker_pytorch_container.training:main")
    assert failure_report(DataError("none")) == "DataError: none [Exception]"
    assert failure_report(OSError("none")) == "OSError: none"
    assert failure_report(json.JSONDecodeError("none", "", 0)).endswith(" [ValueError]")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        MemoryError(),
    ],
)
def test_out_of_memory_has_one_name_on_every_device(monkeypatch, text_file, error):
    monkeypatch.setattr("sm_nanogpt.entry_point.train.train", Mock(side_effect=error))
    with pytest.raises(TrainingError, match="gradient_accumulation_steps"):
        train.main(command_line(**SMALL, data=text_file, processes=1))
