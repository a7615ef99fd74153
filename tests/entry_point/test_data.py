"""Batches of a text, in characters and in shards of tokens."""

from __future__ import annotations

import itertools
import threading
from queue import Queue
from typing import Any

import pytest
import torch

from sm_nanogpt.entry_point.config import Config, derive_seed
from sm_nanogpt.entry_point.data import Batches
from sm_nanogpt.entry_point.text import Shards

# -- batches ---------------------------------------------------------------------------------------


@pytest.fixture(params=["one pool", "many pools"])
def pools(request, monkeypatch):
    """A text of a pool of windows, and a longer one."""
    if request.param == "many pools":
        monkeypatch.setattr("sm_nanogpt.entry_point.data.NEIGHBORS", 4)
        monkeypatch.setattr("sm_nanogpt.entry_point.data.SHUFFLED", 16)


def batches(n: int, **hyperparameters: Any) -> Batches:
    """Over a text whose ids are their positions, so that a window shows where it is from."""
    config = Config(**{"block_size": 8, "batch_size": 4, **hyperparameters})
    return Batches(torch.arange(n, dtype=torch.int32), config, torch.device("cpu"))


def test_a_batch_is_a_function_of_seed_and_step_alone(pools):
    one = batches(10_000)
    inputs = [one.rows(step, 0, 1)[0] for step in range(100)]
    torch.manual_seed(2)
    other = batches(10_000)
    for step in reversed(range(100)):
        assert torch.equal(other.rows(step, 0, 1)[0], inputs[step])
    for step in range(1, 100):
        assert not torch.equal(inputs[0], inputs[step])
    of_another_seed, _ = batches(10_000, seed=1).rows(0, 0, 1)
    assert not torch.equal(inputs[0], of_another_seed)


def test_the_slices_of_the_ranks_are_the_global_batch(pools):
    b = batches(1000)
    for step in (0, 1, 50):
        x, y = b.rows(step, 0, 1)
        first_x, first_y = b.rows(step, 0, 2)
        second_x, second_y = b.rows(step, 1, 2)
        assert torch.equal(x, torch.cat((first_x, second_x)))
        assert torch.equal(y, torch.cat((first_y, second_y)))


def epoch_of(b: Batches, epoch: int) -> list[int]:
    """The positions at which its windows begin, in their order, by a batch size of 1."""
    steps = range(epoch * b.windows_per_epoch, (epoch + 1) * b.windows_per_epoch)
    return [int(b.rows(step, 0, 1)[0][0, 0]) for step in steps]


def test_an_epoch_has_each_window_once(pools):
    for n in (9, 16, 17, 18, 100, 1033):
        b = batches(n, batch_size=1)
        for epoch in range(3):
            starts = epoch_of(b, epoch)
            first = min(starts)
            assert sorted(starts) == list(range(first, first + 8 * len(starts), 8)), n
            assert 8 * len(starts) >= n - 16


def test_a_text_of_one_pool_is_shuffled_as_a_whole():
    """By the same numbers as in earlier versions."""
    b = batches(10_001, batch_size=1, seed=7)
    for epoch in (0, 3):
        generator = torch.Generator().manual_seed(derive_seed(7, "epoch", epoch))
        offset = int(torch.randint(b.offsets, (), generator=generator))
        order = torch.randperm(b.windows_per_epoch, generator=generator)
        assert epoch_of(b, epoch) == (order * 8 + offset).tolist()


def test_a_longer_text_is_read_in_few_places_at_a_time(monkeypatch):
    monkeypatch.setattr("sm_nanogpt.entry_point.data.NEIGHBORS", 10)
    monkeypatch.setattr("sm_nanogpt.entry_point.data.SHUFFLED", 40)
    b = batches(8001, batch_size=1)  # 999 windows: 24 pools, and another of 3 pieces and 9 windows
    orders = [epoch_of(b, epoch) for epoch in range(2)]
    for order in orders:
        for at in range(0, 999, 40):
            pool = [start // 8 for start in order[at : at + 40]]
            breaks = sum(b - a > 1 for a, b in itertools.pairwise(sorted(pool)))
            assert breaks <= 4  # a piece may cross the end of the text
            assert sorted(pool) != pool
    assert sorted(orders[0][:40]) != sorted(orders[1][:40])


def test_epochs_cut_the_text_at_other_places(pools):
    b = batches(1000, batch_size=1)
    phases = {int(b.window_starts(e * b.windows_per_epoch)[0]) % 8 for e in range(100)}
    assert phases == set(range(8))


def test_targets_are_the_inputs_shifted_by_one(pools):
    n = 100
    b = batches(n)
    ids_trained_on: set[int] = set()
    for step in range(100):
        x, y = b.rows(step, 0, 1)
        assert x.shape == y.shape == (4, 8)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert torch.equal(y, x + 1)
        assert int(y.max()) < n
        ids_trained_on.update(x.flatten().tolist())
    # All but the last few characters are trained on.
    assert ids_trained_on == set(range(len(ids_trained_on)))
    assert n - len(ids_trained_on) <= b.block_size


# -- shards ----------------------------------------------------------------------------------------


def shards_of(n: int, **hyperparameters: Any) -> Batches:
    """The same batches of mapped files, some of them shorter than a window."""
    b = batches(n, **hyperparameters)
    assert isinstance(b.tokens, torch.Tensor)
    b.tokens = Shards(b.tokens.split([300, 2, 5, n - 307]))
    return b


def test_the_next_step_is_read_while_one_computes(monkeypatch):
    in_memory = batches(1000)
    b = shards_of(1000)
    read = b.read
    steps_read: Queue[int] = Queue()

    def spy(step: int, *where: int) -> Any:
        steps_read.put(step)
        return read(step, *where)

    monkeypatch.setattr(b, "read", spy)
    # As in a warm-up, which reads steps twice and far ahead, and in a run that is resumed.
    for step, reads in ((0, [0, 1]), (0, [0, 1]), (40, [40, 41]), (7, [7, 8]), (8, [9]), (9, [10])):
        x, y = b.rows(step, 0, 1)
        assert all(map(torch.equal, (x, y), in_memory.rows(step, 0, 1)))
        # The step has its batch, and does not ask for another.
        assert [steps_read.get(timeout=60) for _ in reads] == reads
    assert steps_read.empty()


def test_an_error_of_the_disk_is_raised_in_the_step_it_hits(monkeypatch):
    b = shards_of(1000)
    read = b.read

    def read_or_fail(step: int, *where: int) -> Any:
        if step == 2:
            raise OSError("disk")
        return read(step, *where)

    monkeypatch.setattr(b, "read", read_or_fail)
    b.rows(0, 0, 1)
    b.rows(1, 0, 1)
    with pytest.raises(OSError, match="disk"):
        b.rows(2, 0, 1)


def test_only_a_step_on_shards_starts_a_thread():
    """Ranks are forked before."""
    threads = set(threading.enumerate())
    batches(1000).rows(0, 0, 1)
    b = shards_of(1000)
    assert not set(threading.enumerate()) - threads
    b.rows(0, 0, 1)
    assert len(set(threading.enumerate()) - threads) == 1
