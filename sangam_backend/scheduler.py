"""The deficit token-budget scheduler.

A request is a row of blocks; at each iteration it needs either a prefill (its whole sequence) or
a decode (its current block); the scheduler only picks who, under a token budget. Bidirectional
attention rules out splitting a prefill by tokens, so a prefill that does not fit beside the
decodes waits, and the budget it leaves unspent is carried over as the deficit until it fits.

Every decode takes part in every iteration. The decodes may use up the whole budget, so prefills
earn at least 1 / PREFILL_SHARE of it: a waiting prefill is never starved.

In the role `prefill` a prefilled request is handed over instead of decoding here, and comes back
for its next block. In the role `decode` requests come for one block each: most bring K/V to pull,
which costs no budget, some are prefilled here.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from sangam_backend.config import Cache, Family, QueueOrder, Role
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
        cache: Cache = "dual",
        role: Role = "colocated",
        prefill_overflow_tokens: int = 0,
    ) -> None:
        self.family = family
        self.cache = cache
        self.budget = max_tokens_per_iteration
        self.max_deficit = max_sequence_length
        self.pages = pages
        self.deficit = 0
        self.waiting: list[Request] = []
        self.waiting_tokens = 0
        """Prefill tokens in that queue."""
        self.decoding: list[Request] = []
        self.ending: list[Request] = []
        """Requests whose last forward is planned, its result not yet known."""
        self.arriving: list[Request] = []
        """Requests that wait for pages to pull their K/V into."""
        self.pulling: list[Request] = []
        self.handed_over: list[Request] = []
        """Requests that another instance decodes, or is about to."""
        self.vain_rows = 0
        """Rows whose request turned out to have left the block or ended before."""
        self._starved: Request | None = None
        """The first prefill that lacks memory."""
        self._free_slots = list(range(max_batch_size - 1, -1, -1))
        self._order = ORDERS[queue_order]
        self._hands_over = role == "prefill"
        self._overflow = prefill_overflow_tokens if self._hands_over else 0
        self._queues = (
            self.waiting,
            self.decoding,
            self.ending,
            self.arriving,
            self.pulling,
            self.handed_over,
        )

    @property
    def num_requests(self) -> int:
        return sum(map(len, self._queues))

    def add(self, request: Request) -> None:
        """Queues a new request, or an old one for its next block."""
        if request.prefilled is not None:
            bisect.insort(self.arriving, request, key=lambda request: request.arrival)
        else:
            bisect.insort(self.waiting, request, key=self._order)
            self.waiting_tokens += request.sequence_length

    def overflows(self) -> bool:
        """Whether so many prefills wait that another instance should run the next one."""
        return 0 < self._overflow < self.waiting_tokens

    def hand_over(self, request: Request) -> None:
        """Leaves a block to another instance altogether."""
        self.handed_over.append(request)

    def take_back(self, request: Request, tokens: list[int]) -> Output | None:
        """Takes a handed over block's tokens; the request's next block is for the caller to add."""
        self.handed_over.remove(request)
        self.release(request)
        output = request.advance(request.block, tokens)
        if request.finish_reason is None:
            request.plan_next_block()
            return None
        assert output is not None
        return output._replace(done=True)

    def pulled(self, request: Request) -> Output | None:
        """Lets a request decode whose K/V has come, or which needs none."""
        if request in self.pulling:
            self.pulling.remove(request)
        output = request.take_prefilled()
        if request.finish_reason is None and request.masks:
            self.decoding.append(request)
            return output
        return self._file(request, output)

    def pull_failed(self, request: Request) -> None:
        """Queues a request for a prefill here, which repeats the lost one exactly."""
        self.pulling.remove(request)
        self.release(request)
        request.prefilled = None
        self.add(request)

    def remove(self, request: Request) -> None:
        """Forgets a request, in whatever state, and returns its slot and pages."""
        if request in self.waiting:
            self.waiting_tokens -= request.sequence_length
        for queue in self._queues:
            if request in queue:
                queue.remove(request)
        self.release(request)

    def plan(self) -> StepPlan | None:
        """The next iteration, or None when there is nothing to do."""
        decode_rows = [self._row(request, prefill=False) for request in self.decoding]
        decode_tokens = sum(row.num_tokens for row in decode_rows)
        earned = max(self.budget - decode_tokens, self.budget // PREFILL_SHARE)
        prefills, admitted = self._take_prefills(earned)
        pulls = self._take_pulls()
        rows = [self._row(request, prefill=True) for request in prefills] + decode_rows
        for row in rows:
            if row.request.plan_forward(row.commit) and not self._hands_over:
                self._leave_block(row.request)
        return StepPlan(rows, admitted, pulls) if rows or pulls else None

    def apply(self, row: Row, tokens: list[int]) -> Output | None:
        """Takes the result of a planned row, and files its request accordingly."""
        request = row.request
        if request.finish_reason is not None or row.block < request.finished_blocks:
            self.vain_rows += 1
            return None
        return self._file(request, request.advance(row.block, tokens))

    def _file(self, request: Request, output: Output | None) -> Output | None:
        """Moves a request on after a result."""
        ended = request.finish_reason is not None
        if self._hands_over:
            if ended or request.finished_blocks > request.block:
                self.release(request)
        elif ended or request.finished_blocks > request.last_block:
            self.remove(request)
            return (output or Output("", [], None))._replace(done=True)
        elif request.finished_blocks > request.block:
            self._leave_block(request)
        return output

    def _leave_block(self, request: Request) -> None:
        """Queues a request for the block after the one that it finishes."""
        self.decoding.remove(request)
        if request.block == request.last_block:
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
        short_of_budget = False
        self._starved = None
        for request in self.waiting:
            cost = request.sequence_length
            alone = not self.decoding and not prefills
            short_of_budget = spent + cost > available and not alone
            if short_of_budget:
                break
            if request.slot < 0:
                if self._starved is not None or not self._admit(request):
                    self._starved = self._starved or request
                    continue
                admitted.append(request)
            prefills.append(request)
            spent += cost
        self.waiting_tokens -= spent
        for request in prefills:
            self.waiting.remove(request)
            (self.handed_over if self._hands_over else self.decoding).append(request)
        if not self.waiting:
            self.deficit = 0
        elif self._starved is not None and not short_of_budget:
            self.deficit = max(0, self.deficit - max(0, spent - earned))
        else:
            self.deficit = min(max(0, available - spent), self.max_deficit)
        return prefills, admitted

    def _take_pulls(self) -> list[Request]:
        """Gives pages to requests that pull, unless an older prefill waits for memory."""
        pulls: list[Request] = []
        for request in self.arriving:
            overtakes = self._starved is not None and self._starved.arrival < request.arrival
            if overtakes or not self._admit(request):
                break
            pulls.append(request)
        del self.arriving[: len(pulls)]
        self.pulling += pulls
        return pulls

    def _admit(self, request: Request) -> bool:
        if not self._free_slots:
            return False
        pages = self.pages.allocate(-(-request.sequence_length // PAGE_SIZE))
        if pages is None:
            return False
        request.slot = self._free_slots.pop()
        request.pages = pages
        return True

    def release(self, request: Request) -> None:
        """Returns slot and pages, if the request has any."""
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
                self.family,
                request.block,
                request.forward_in_block,
                full_logits=self.cache == "none",
            ),
            cache=self.cache,
        )
