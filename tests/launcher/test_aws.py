"""In which regions SageMaker is, as far as is known here."""

from __future__ import annotations

import boto3
import pytest

from sm_nanogpt import InputError
from sm_nanogpt.launcher.aws import check_region


@pytest.mark.parametrize("region", ["us-east-1", "me-west-1"])  # boto3 knows the first
def test_a_region_with_sagemaker_is_accepted(region):
    assert check_region(boto3.Session(region_name=region)) == region


def test_a_misspelled_region_is_refused_with_a_near_one():
    with pytest.raises(InputError, match=r"did you mean .*us-east-1"):
        check_region(boto3.Session(region_name="us-east1"))
