"""The process group of the ranks, and its collective operations."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Config
from .container import Container, Ranks
from .errors import ConfigError, TrainingError
from .watchdog import JOIN_MINUTES, LONGEST_WAIT, Watchdog, wait_for_all


class Group:
    """The processes that train together, and their collective operations.

    With one process, no method communicates.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        container: Container,
        hang_seconds: float = Config.hang_seconds,
    ) -> None:
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_world_size = ranks.local_world_size
        self.device = device
        self.host = container.current_host if container.inside else socket.gethostname()
        self.n_broadcasts = 0  # of values, each under a key of its own
        self.watchdog: Watchdog | None = None
        if ranks.world_size > 1:
            self.join(container, hang_seconds)

    def join(self, container: Container, hang_seconds: float) -> None:
        """Meets the other ranks at a store, and starts the watchdog.

        Raises TrainingError if a rank does not come, or cannot be reached.
        """
        interface = container.interface
        if self.local_world_size == self.world_size:  # all are on this host
            interface = "lo0" if sys.platform == "darwin" else "lo"
        if interface:
            # By default gloo takes the address of the host's name, which may lead nowhere.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

        address = os.environ.get("MASTER_ADDR") or container.hosts[0]
        port = int(os.environ.get("MASTER_PORT", "7777"))
        # torchrun and start_ranks serve the store; else rank 0 does.
        launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = self.rank == 0 and not launcher_serves
        timeout = LONGEST_WAIT + timedelta(minutes=5)  # the watchdog names a rank before
        # What is on the CPU travels by gloo, so that flags never wait for a GPU.
        on_gpu = self.device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        try:
            self.store = connect(address, port, serves)
            reports = wait_for_all(self.store, self.rank, self.world_size, self.host)
            self.store.set_timeout(timeout)
            dist.init_process_group(
                backend,
                store=self.store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
                device_id=self.device if on_gpu else None,
            )
            # A connection of its own, since the main thread may wait on the other.
            watchdog_store = connect(address, port, serves=False)
        except (RuntimeError, ValueError) as error:
            cause = str(error).partition("Exception raised from")[0]  # C++ frames follow
            raise TrainingError(
                f"rank {self.rank} could not join the group of {self.world_size} at"
                f" {address}:{port}: {cause} (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the"
                " network interface to use)"
            ) from None

        server = "the launcher of rank 0" if launcher_serves else f"rank 0 on {reports[0].host}"
        self.watchdog = Watchdog(
            watchdog_store, self.rank, reports, hang_seconds, server, self.device
        )

    def heartbeat(self) -> None:
        """Every rank calls it at the same points, before it waits for others.

        On a GPU it counts when the kernels before it are done: the host starts them without a wait,
        so a kernel that never ends shows only there.
        """
        if self.watchdog is None:
            return
        if self.device.type == "cuda":
            self.watchdog.events.append(torch.cuda.current_stream().record_event())
        else:
            self.watchdog.heartbeats += 1

    @contextmanager
    def without_heartbeats(self) -> Iterator[None]:
        """For work that may fail on one rank alone, whose count would then stay behind."""
        watchdog, self.watchdog = self.watchdog, None
        yield
        self.watchdog = watchdog

    def allow_seconds(self, seconds: float) -> None:
        """Bounds the time until this rank's next heartbeat; at most, and at first, LONGEST_WAIT."""
        if self.watchdog is not None:
            self.watchdog.timeout = min(seconds, LONGEST_WAIT.total_seconds())

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place; every rank gets the same bits."""
        self.heartbeat()
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def average_(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Averages a tensor over the ranks, in place; it is sent and summed in this type."""
        if self.world_size > 1:
            total = self.sum_(tensor.to(dtype))
            tensor.copy_(total).div_(self.world_size)

    def async_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts to send a tensor of one shape [...] to all ranks, and to get theirs.

        Call the result for those of all ranks: [world_size, ...].
        """
        if self.world_size == 1:
            return lambda: tensor[None]
        self.heartbeat()
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        # As bytes, since gloo cannot send each type.
        outputs = [output.view(-1).view(torch.uint8) for output in gathered]
        work = dist.all_gather(outputs, tensor.view(-1).view(torch.uint8), async_op=True)

        def result() -> Tensor:
            work.wait()
            return gathered

        return result

    def ranks_unlike_first(self, tensors: Iterable[Tensor]) -> list[int]:
        """The ranks on which these tensors have other bits than on rank 0."""
        if self.world_size == 1:
            return []
        integer_types = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
        sums = []
        for tensor in tensors:
            bits = tensor.detach().view(integer_types[tensor.itemsize])
            sums.append(bits.sum())
        own_sum = torch.stack(sums).sum()
        sum_of_first, *other_sums = self.async_all_gather(own_sum)().tolist()
        return [rank for rank, s in enumerate(other_sums, start=1) if s != sum_of_first]

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of the rank `source`, written over this rank's, or over zeros for a meta one.

        A tensor on another device is moved to this rank's.
        """
        self.heartbeat()
        if tensor.is_meta:
            tensor = torch.zeros_like(tensor, device=self.device)
        else:
            tensor = tensor.to(self.device)
        if self.world_size > 1:
            dist.broadcast(tensor, src=source)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Gives rank 0's value to the other ranks, as JSON."""
        if self.world_size == 1:
            return value
        self.heartbeat()
        self.n_broadcasts += 1
        key = f"object/{self.n_broadcasts}"
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.store.get(key))

    def check_same(self, values: Mapping[str, Any], advice: str = "use one for all ranks") -> None:
        """Raises ConfigError, which names the value, unless it is the same on rank 0."""
        for name, first in self.broadcast(values).items():
            if values[name] != first:
                raise ConfigError(
                    f"{name} is {values[name]!r} on rank {self.rank} ({self.host}) and {first!r} on"
                    f" rank 0; {advice}"
                )

    def async_all_reduce_max(self, value: int) -> Callable[[], int]:
        """Starts to find the largest value of any rank; call the result for the answer.

        Computation in between hides the time that this takes.
        """
        values = self.async_all_gather(torch.tensor(value))
        return lambda: int(values().max())

    def synchronize(self) -> None:
        """Waits until the device has finished its work, so that a clock may be read.

        What follows, an evaluation or a checkpoint, may take any time.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()
        self.allow_seconds(math.inf)

    def close(self) -> None:
        if self.watchdog is not None:
            self.heartbeat()
            dist.barrier()
            self.watchdog.end()
            dist.barrier()  # no rank leaves before, as another may still use its store
            dist.destroy_process_group()


def connect(address: str, port: int, serves: bool) -> dist.Store:
    """The store at which the ranks meet, as torch's env:// finds it."""
    timeout = timedelta(minutes=JOIN_MINUTES)
    store = dist.TCPStore(address, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    # torchrun's store outlives the ranks, and still has their entries from before a restart.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"sm-nanogpt/{restart}", store)
