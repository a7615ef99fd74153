"""What tests of several rooms of the launcher share."""

from __future__ import annotations

import copy
import io
import json

import launching
import pytest
from sagemaker_jobs import LAUNCH
from token_texts import stories

from launcher.text.files import FileOptions, find_files
from launcher.text.sources import Source
from launcher.text.tokenizer import learn_tokenizer


@pytest.fixture
def chat(tuned, directory, cli, monkeypatch):
    def say(*lines: str, model: str = str(directory), heat: str = "0") -> launching.Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        return cli("chat", model, "--max-new-tokens", "6", "--temperature", heat, "--seed", "5")

    return say


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """A collection of 300 documents, a line each."""
    path = tmp_path_factory.mktemp("documents") / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in stories(300)))
    return path


@pytest.fixture(scope="session")
def tokenizer(documents):
    return learn_tokenizer(find_files([Source(documents)], FileOptions(records=True)), 400)


@pytest.fixture
def document(tokenizer):
    """A tokenizer.json, to be changed."""
    return copy.deepcopy(tokenizer.document)


@pytest.fixture
def rehearse(home, cli, text_file):
    """A dry run, in an environment without credentials or network."""
    location = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
    return lambda *arguments: cli(location, LAUNCH, "--data", text_file, "--dry-run", arguments)


@pytest.fixture
def dry(rehearse):
    """The request that a dry run shows."""
    return lambda *arguments: json.loads(rehearse(arguments).good.out)
