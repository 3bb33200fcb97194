"""Signals that ask a run to save itself and stop."""

import signal
import threading
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run has saved itself.  The text says how to go on."""


class Stop:
    """SIGINT and SIGTERM ask the loop to save and stop; a second one stops at once."""

    signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._ask) for number in self.signals}
        return self

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
