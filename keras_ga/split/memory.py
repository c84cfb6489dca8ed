"""Finding the micro-batch that fits, and recognising that one did not."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Hashable, Iterator
from typing import NamedTuple

LOGGER = logging.getLogger("keras_ga")

_MARGIN = 0.9
"""The part of the device's memory that is planned for; the rest is for what is not in a plan."""

# The backends' own words; a type alone does not tell (JAX and torch on CPU use `RuntimeError`).
_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|OOM when allocating|can't allocate memory|"
    r"failed to allocate|not enough memory|DefaultCPUAllocator",
    re.IGNORECASE,
)


class Trial(NamedTuple):
    """A micro-batch size that was looked at."""

    micro_batch_size: int
    fits: bool
    bytes: int | None
    """What a micro-batch needs beside weights, optimizer and data; None: it was only run."""


class Plan(NamedTuple):
    """What is known of a micro-batch before it is run, in bytes of a device's memory."""

    needed: int
    """Beside what is there already: weights, optimizer, sums of gradients, the batch."""
    free: int
    """What may be taken: of the limit, less a margin, less what is there."""
    limit: int
    """What the device has, or what was given."""


class MicroBatchSize(NamedTuple):
    """What `find_micro_batch_size` found."""

    micro_batch_size: int
    plan: tuple[Trial, ...]
    limit: int | None
    """Bytes of memory that were planned for; None where sizes were tried, not planned."""

    def __str__(self) -> str:
        lines = [f"{'micro-batch':>11}  {'MiB':>10}  fits"]
        lines += [
            f"{trial.micro_batch_size:>11}  "
            f"{'' if trial.bytes is None else format(trial.bytes / 2**20, '.1f'):>10}  "
            f"{'yes' if trial.fits else 'no'}"
            for trial in self.plan
        ]
        return "\n".join(lines)


class Sizes:
    """The size of a micro-batch for each shape of input: given, or found."""

    def __init__(self, micro_batch_size: int | None):
        self._given = micro_batch_size
        self._found: dict[Hashable, int] = {}

    @property
    def automatic(self) -> bool:
        """Whether sizes are to be found."""
        return self._given is None

    def known(self, shape: Hashable) -> int | None:
        """The size for batches of a shape, if there is one already."""
        return self._given or self._found.get(shape)

    def guess(self, rows: int) -> int:
        """Where to begin for a new shape: what fitted last, else the batch."""
        return min([rows, *list(self._found.values())[-1:]])

    def remember(self, shape: Hashable, size: int) -> None:
        """Keeps a size for batches of a shape."""
        self._found[shape] = size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a backend's error says that memory did not suffice."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(
        names & {"OutOfMemoryError", "ResourceExhaustedError", "MemoryError"}
        or _OUT_OF_MEMORY.search(str(error))
    )


def halved(size: int, rows: int, error: BaseException) -> int:
    """The next size to try; logs it.

    Raises:
        MemoryError: If there is no smaller one.
    """
    if size <= 1:
        raise too_large(str(error)) from error
    LOGGER.warning(
        "micro_batch_size %d -> %d: out of memory; the batch stays %d", size, (size + 1) // 2, rows
    )
    return (size + 1) // 2


def too_large(reason: str) -> MemoryError:
    """The error for a row that does not fit."""
    return MemoryError(
        "A micro-batch of one row must fit, because there is no smaller one. What is left: mixed "
        "precision (`keras.config.set_dtype_policy('mixed_bfloat16')`), rematerialisation "
        "(`keras.RematScope`), shorter sequences or smaller images, LoRA, an optimizer with less "
        "state, more devices. The model is as it was before the step. "
        f"Received: {reason}"
    )


def halvings(rows: int) -> Iterator[int]:
    """The sizes to look at, from the whole batch down to one row."""
    while rows > 1:
        yield rows
        rows = (rows + 1) // 2
    yield 1


def plan(needed: int, limit: int, in_use: int) -> Plan:
    """A plan, with the margin kept."""
    return Plan(needed, int(limit * _MARGIN) - in_use, limit)


def of_this_machine() -> int:
    """Bytes of memory that the machine has: the limit where the device names none."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
