"""Follower of a log: yields its rows as they come."""

from collections.abc import Callable, Iterator

from grpo_nb.storage.journal import Journal, Row
from grpo_nb.storage.lines import Place


class Follower:
    """Rows of a log as they come: each `read` gives those since the last one, complete lines only."""

    def __init__(self, journal: Journal, restarted: Callable[[], None]) -> None:
        """`restarted` is called before rows are given from the first on: at the first read, and for a changed file."""
        self._journal, self._restarted = journal, restarted
        self._place = Place()

    def read(self) -> Iterator[Row]:
        """The rows that are new, oldest first; to be read to the end."""
        with self._journal.unread(self._place) as part:
            if part is None:
                if self._place != Place():
                    self._restarted()
                self._place = Place()
                return
            if part.anew:
                self._restarted()
            yield from part.forwards(torn=False)
            self._place = part.place
