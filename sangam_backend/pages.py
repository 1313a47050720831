"""The free list of the KV pool."""

from __future__ import annotations

from collections.abc import Iterable

PAGE_SIZE = 16
"""Positions of a page."""


class PageAllocator:
    """Hands out pages, all that are asked for or none."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> list[int] | None:
        """Takes so many pages; None when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._used.remove(page)
            self._free.append(page)

    def check(self) -> None:
        """Every page is either free or used, once."""
        assert len(self._free) + len(self._used) == self.num_pages
        assert self._used.isdisjoint(self._free)
