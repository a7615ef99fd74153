"""Accounts without a stack, and with one."""

from __future__ import annotations

import pytest
from sagemaker_jobs import deploy_stack

from sm_nanogpt.launcher.sagemaker import deploy


@pytest.fixture
def account(s3, monkeypatch):
    """CloudFormation in an account without a stack, and a person who has set neither store nor
    role."""
    monkeypatch.delenv("SM_NANOGPT_STORE")
    monkeypatch.setitem(deploy.WAIT, "Delay", 0.01)
    import cloudformation_service

    with cloudformation_service.repaired() as service:
        yield service


@pytest.fixture
def deployed(account):
    """A stack that is there."""
    stack = deploy_stack()
    account.described = 0
    return stack
