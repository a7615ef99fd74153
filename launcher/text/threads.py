"""Tasks in threads that end with the process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_thread(task: Callable[[], T]) -> Future[T]:
    """Start a task in a thread for which neither Ctrl-C nor the end of the process waits."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
