"""Python's cyclic garbage collector, kept out of stretches that allocate much and drop little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collection inside: each would walk all objects of a simulation and find nothing to free.

    Also as a decorator. What is dropped without cycles is freed at once all the same.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
