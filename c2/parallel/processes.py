"""Processes that share a run."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def first_before_others(what: str) -> Iterator[None]:
    """Lets process 0 go through a block before the others, which find there what it has written.

    Args:
      what: a name for the block; the same in all processes.
    """
    if jax.process_index() > 0:
        multihost_utils.sync_global_devices(what)
    yield
    if jax.process_index() == 0:
        multihost_utils.sync_global_devices(what)
