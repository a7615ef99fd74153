"""What tests of several rooms of the launcher share."""

from __future__ import annotations

import copy
import io
import json

import launching
import pytest
import token_texts
from sagemaker_jobs import LAUNCH

documents, tokenizer = token_texts.documents, token_texts.tokenizer  # fixtures


@pytest.fixture
def chat(tuned, directory, cli, monkeypatch):
    def say(*lines: str, model: str = str(directory), heat: str = "0") -> launching.Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        return cli("chat", model, "--max-new-tokens", "6", "--temperature", heat, "--seed", "5")

    return say


@pytest.fixture
def document(tokenizer):
    """A tokenizer.json, to be changed."""
    return copy.deepcopy(tokenizer.document)


@pytest.fixture
def rehearse(home, cli, short_text_file):
    """A dry run, in an environment without credentials or network."""
    location = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
    launch = (*location, *LAUNCH, "--data", str(short_text_file), "--dry-run")
    return lambda *arguments: cli(launch, arguments)


@pytest.fixture
def dry(rehearse):
    """The request that a dry run shows."""
    return lambda *arguments: json.loads(rehearse(arguments).good.out)
