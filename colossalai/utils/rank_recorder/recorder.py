"""Named stretches of time on each rank, to be laid side by side."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ...accelerator import get_accelerator


@dataclass(frozen=True)
class Event:
    """One stretch of time. Start and end are seconds since the epoch, which ranks of one machine share."""

    name: str
    rank: int
    start: float
    end: float


class Recorder:
    """Records events: ``with recorder("forward", rank): ...``"""

    def __init__(self) -> None:
        self.history: list[Event] = []

    @contextmanager
    def __call__(self, record_name: str, current_rank: int) -> Iterator[None]:
        """Record what happens inside under this name; the device's work counts to the end of it."""
        accelerator = get_accelerator()
        accelerator.synchronize()
        start = time.time()
        try:
            yield
        finally:
            accelerator.synchronize()
            self.history.append(Event(record_name, current_rank, start, time.time()))

    def get_history(self) -> list[Event]:
        """What was recorded so far, in the order in which it ended."""
        return list(self.history)

    def clear(self) -> None:
        """Forget it."""
        self.history.clear()

    def dump(self, path: str | Path) -> None:
        """Append what was recorded to a file of JSON lines, one event a line, so that ranks can share it."""
        text = "".join(json.dumps(asdict(event)) + "\n" for event in self.history)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


recorder = Recorder()
