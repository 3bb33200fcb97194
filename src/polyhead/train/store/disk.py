"""A disk error pauses a run: it prints one line and retries until the disk works or a signal stops the run."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from polyhead.train.messages import print_notice
from polyhead.train.stop import StopSignals

SECONDS = 30
"""Seconds between two attempts."""
sleep = time.sleep

PASSING = {
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG"),  # full, or a quota that can be raised
        *("EIO", "EREMOTEIO", "EROFS", "ENODEV", "ENXIO"),  # the device fails; Linux then mounts it read-only
        *("ENOENT", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "ENETUNREACH"),  # a share is gone
    )
    if hasattr(errno, name)
}
"""Errors that may be temporary; all others are raised at once."""

T = TypeVar("T")
Retry = Callable[[Callable[[], None]], object]
"""Calls a function that writes, perhaps several times: `once`, or a `DiskRetry`."""


def once(write: Callable[[], None]) -> None:
    write()


class DiskRetry:
    """`retry(write)` calls `write` until it succeeds.

    Raises OSError for an error that is not temporary, and Interrupted if a signal arrives between two attempts.
    `speaks`: whether this process prints; only one of several does.
    """

    def __init__(self, stop: StopSignals, *, speaks: bool = True) -> None:
        self.stop, self.speaks = stop, speaks

    def __call__(self, write: Callable[[], T]) -> T:
        paused = False
        while True:
            try:
                done = write()
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                if not paused and self.speaks:
                    print_notice(f"paused: {error.strerror}; tried again every {SECONDS} s until the disk works")
                paused = True
                self._rest(error)
            else:
                if paused and self.speaks:
                    print_notice("the disk works again: continuing")
                return done

    def _rest(self, error: OSError) -> None:
        for _ in range(SECONDS):
            if self.stop.asked:
                text = f"stopped, not saved: {error.strerror}; what was saved before is kept"
                raise self.stop.interrupted(text, saved=False)
            sleep(1.0)
