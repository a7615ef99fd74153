"""Notebooks of examples/, in kernels that start at once."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import warm
from nbclient import NotebookClient

# What the notebook starts with `subprocess` starts at once too.
KERNEL = """
import subprocess, warm
subprocess.Popen = warm.replacing(warm.Process).Popen
from ipykernel import kernelapp
kernelapp.launch_new_instance()
"""


def execute(notebook: Path, directory: Path, code: str = "") -> list[Any]:
    """The cells of a notebook after it ran in a directory. The kernel begins with some code."""

    def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        arguments = command[list(command).index("ipykernel_launcher") + 1 :]
        kernel = [command[0], "-c", code + KERNEL, *arguments]
        process: subprocess.Popen[bytes] = warm.replacing(warm.Process).Popen(kernel, **options)
        return process

    document = nbformat.read(notebook, as_version=4)
    resources = {"metadata": {"path": str(directory)}}
    with patch("jupyter_client.launcher.Popen", popen):
        NotebookClient(document, timeout=480, resources=resources).execute()
    return list(document.cells)
