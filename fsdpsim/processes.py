"""Work spread over processes that leave Ctrl-C to the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def map_in_processes(jobs: int, work: Callable[..., T], *inputs: Iterable[Any]) -> Iterator[T]:
    """As :func:`map`, in ``jobs`` processes: this one if it is one."""
    if jobs == 1:
        yield from map(work, *inputs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=begin_worker) as pool:
        with _interrupts_held():
            results = pool.map(work, *inputs)  # starts the processes
        yield from results


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C comes afterwards, and never to a process that is started inside.

    Else it would find a worker that still imports its modules, before its initializer.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """In a new process: leave Ctrl-C to the parent, and do not outlive one that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
