"""Each fault that examples/tutorials names shows in the numbers of its script."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

TUTORIALS = Path(__file__).parents[2] / "examples" / "tutorials"
SCRIPT = runpy.run_path(str(TUTORIALS / "originals.py"))


def numbers(fault: str) -> dict[str, float]:
    figures: dict[str, float] = SCRIPT[fault]()
    return figures


def test_a_wrong_scale_makes_attention_even_or_sharp():
    figures = numbers("attention_scale")
    even = math.log(256)
    assert even - 0.15 < figures["C**-0.5"] < even
    assert figures["head**-0.5"] < figures["C**-0.5"] - 0.3
    assert figures["C**-0.05"] < figures["head**-0.5"] - 3


def test_training_text_flatters_a_model():
    figures = numbers("validation_on_training_text")
    assert figures["training text"] < figures["other text"] - 0.5


def test_a_residual_that_is_replaced_forgets_its_input():
    figures = numbers("residual_replaced_by_norm")
    assert figures["added: cosine"] > 0.2
    assert figures["replaced: cosine"] < 0.05
    assert figures["added: length"] > 3
    assert figures["replaced: length"] < 2


def test_keys_at_queries_leak_nothing_and_break_a_cache():
    figures = numbers("keys_at_queries")
    assert figures["leak"] == 0
    assert figures["to q @ k"] > 0.5
    assert figures["to cached keys"] > 0.1


def test_the_rank_of_the_host_halves_the_samples():
    assert numbers("rank_of_the_host") == {"rank of the process": 32, "of the host": 16}


def test_own_batches_give_each_rank_another_loss():
    figures = numbers("own_batches")
    assert figures["most"] - figures["least"] > 0.1
    assert figures["two"] - figures["one process"] > 0.03


def test_attention_without_dropout_p_drops_nothing():
    figures = numbers("dropout_lost")
    assert figures["without"] == 0
    assert 0.17 < figures["with dropout_p"] < 0.23


def test_the_script_prints_a_line_for_each_fault(capsys, monkeypatch):
    faults = dict.fromkeys(SCRIPT["FAULTS"], lambda: {"of it": 0.1234, "of another": 2.0})
    monkeypatch.setitem(SCRIPT["main"].__globals__, "FAULTS", faults)
    SCRIPT["main"]()
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "scale of attention: entropy               | of it 0.123, of another 2"
    assert len(others) == 7


def test_the_sdk_ignores_a_misspelled_option():
    assert numbers("misspelled_option") == {"enabled": 2, "enable": 0}
