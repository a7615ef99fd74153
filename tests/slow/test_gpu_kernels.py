"""What torch's compiler makes of the training folder for a GPU: few reads of large tensors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is for Linux")


@pytest.fixture(scope="module")
def compiled() -> Any:
    script = Path(__file__).with_name("gpu_kernels.py")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def kilobytes_per_token(passes: Any, tokens: int) -> float:
    n_bytes = passes["forward"]["n_bytes"] + passes["backward"]["n_bytes"]
    return sum(n_bytes) / tokens / 1024


def test_the_loss_reads_a_row_of_logits_twice(compiled):
    sources = compiled["loss"]["forward"]["sources"]
    n_loops = [len(re.findall(r"^ +for ", source, re.M)) for source in sources]
    assert max(n_loops) == 2


def test_no_kernel_keeps_the_logits_of_another_chunk(compiled):
    reads = Counter(buffer for kernel in compiled["loss"]["forward"]["reads"] for buffer in kernel)
    of_two_kernels = [buffer for buffer, n in reads.items() if n > 1]
    assert [buffer for buffer in of_two_kernels if not buffer.startswith("primals")] == []


def test_queries_and_keys_are_read_and_written_once(compiled):
    """7.6 KB forward (6 of qkv, and rotary angles) and 12.1 backward, for 12 heads of 64."""
    assert kilobytes_per_token(compiled["heads"], compiled["tokens"]) < 21


def test_each_half_of_the_gradient_of_swiglu_is_computed_alone(compiled):
    assert not any("tl.where" in source for source in compiled["mlp"]["backward"]["sources"])
