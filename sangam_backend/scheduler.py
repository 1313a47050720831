"""The deficit token-budget scheduler.

A request is a row of blocks; at each iteration it needs either a prefill (its whole sequence) or
a decode (its current block); the scheduler only picks who, under a token budget. Bidirectional
attention rules out splitting a prefill by tokens, so a prefill that does not fit beside the
decodes waits, and the budget it leaves unspent is carried over as the deficit until it fits.

Every decode takes part in every iteration. The decodes may use up the whole budget, so prefills
earn at least 1 / PREFILL_SHARE of it: a waiting prefill is never starved.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from sangam_backend.config import Family, QueueOrder
from sangam_backend.pages import PAGE_SIZE, PageAllocator
from sangam_backend.plan import Row, StepPlan
from sangam_backend.request import Output, Request

PREFILL_SHARE = 8

ORDERS: dict[QueueOrder, Callable[[Request], tuple[float, ...]]] = {
    "arrival": lambda request: (request.arrival,),
    "fewest_remaining_blocks": lambda request: (request.remaining_blocks, request.arrival),
}


class Scheduler:
    """Admits requests, plans iterations, and keeps slots and pages."""

    def __init__(
        self,
        family: Family,
        max_tokens_per_iteration: int,
        max_batch_size: int,
        max_sequence_length: int,
        queue_order: QueueOrder,
        pages: PageAllocator,
    ) -> None:
        self.family = family
        self.budget = max_tokens_per_iteration
        self.max_deficit = max_sequence_length
        self.pages = pages
        self.deficit = 0
        self.waiting: list[Request] = []
        self.decoding: list[Request] = []
        self.ending: list[Request] = []
        """Requests whose last forward is planned, its result not yet known."""
        self.vain_rows = 0
        """Rows whose request turned out to have left the block or ended before."""
        self._free_slots = list(range(max_batch_size - 1, -1, -1))
        self._order = ORDERS[queue_order]

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.decoding) + len(self.ending)

    def add(self, request: Request) -> None:
        """Queues a new request, or an old one for its next block."""
        bisect.insort(self.waiting, request, key=self._order)

    def remove(self, request: Request) -> None:
        """Forgets a request, in whatever state, and returns its slot and pages."""
        for queue in (self.waiting, self.decoding, self.ending):
            if request in queue:
                queue.remove(request)
        self._release(request)

    def plan(self) -> StepPlan | None:
        """The next iteration, or None when there is nothing to do."""
        decode_rows = [self._row(request, prefill=False) for request in self.decoding]
        decode_tokens = sum(row.num_tokens for row in decode_rows)
        earned = max(self.budget - decode_tokens, self.budget // PREFILL_SHARE)
        prefills, admitted = self._take_prefills(earned)
        rows = [self._row(request, prefill=True) for request in prefills] + decode_rows
        for row in rows:
            if row.request.plan_forward(row.commit):
                self._leave_block(row.request)
        return StepPlan(rows, admitted) if rows else None

    def apply(self, row: Row, tokens: list[int]) -> Output | None:
        """Takes the result of a planned row, and files its request accordingly."""
        request = row.request
        if request.finish_reason is not None or row.block < request.finished_blocks:
            self.vain_rows += 1
            return None
        output = request.advance(row.block, tokens)
        if request.finish_reason is not None:
            self.remove(request)
        elif request.finished_blocks > request.block:
            self._leave_block(request)
        return output

    def _leave_block(self, request: Request) -> None:
        """Queues a request for the block after the one that it finishes."""
        self.decoding.remove(request)
        if request.remaining_blocks == 1:
            self.ending.append(request)
        else:
            request.plan_next_block()
            self.add(request)

    def _take_prefills(self, earned: int) -> tuple[list[Request], list[Request]]:
        """Takes prefills from the queue and settles the deficit.

        Strict head of line: no request overtakes one that lacks budget. One that lacks memory
        holds up only those that need memory too, else the ones that could free it would wait.
        """
        available = earned + self.deficit
        spent = 0
        prefills: list[Request] = []
        admitted: list[Request] = []
        short_of_memory = short_of_budget = False
        for request in self.waiting:
            cost = request.sequence_length
            alone = not self.decoding and not prefills
            short_of_budget = spent + cost > available and not alone
            if short_of_budget:
                break
            if request.slot < 0:
                short_of_memory = short_of_memory or not self._admit(request)
                if short_of_memory:
                    continue
                admitted.append(request)
            prefills.append(request)
            spent += cost
        for request in prefills:
            self.waiting.remove(request)
            self.decoding.append(request)
        if not self.waiting:
            self.deficit = 0
        elif short_of_memory and not short_of_budget:
            self.deficit = max(0, self.deficit - max(0, spent - earned))
        else:
            self.deficit = min(max(0, available - spent), self.max_deficit)
        return prefills, admitted

    def _admit(self, request: Request) -> bool:
        if not self._free_slots:
            return False
        pages = self.pages.allocate(-(-request.sequence_length // PAGE_SIZE))
        if pages is None:
            return False
        request.slot = self._free_slots.pop()
        request.pages = pages
        return True

    def _release(self, request: Request) -> None:
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            self.pages.free(request.pages)
            request.slot, request.pages = -1, []

    def _row(self, request: Request, prefill: bool) -> Row:
        params = request.params
        return Row(
            request=request,
            slot=request.slot,
            prefill=prefill,
            block=request.block,
            block_start=request.block_start,
            block_length=params.block_length,
            sequence_length=request.sequence_length,
            forward=request.forward,
            commit=params.commit(
                self.family, request.block, request.forward_in_block, full_logits=False
            ),
        )
