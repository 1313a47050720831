"""The scheduler alone: no model, no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sangam_backend.config import QueueOrder
from sangam_backend.pages import PAGE_SIZE, PageAllocator
from sangam_backend.plan import StepPlan
from sangam_backend.request import FinishReason, Request, SamplingParams
from sangam_backend.rules import Confidence, Unmasking
from sangam_backend.scheduler import Scheduler

MASK = 9
TOKEN = 1


def sampling(max_tokens: int, block_length: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=0,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        unmasking=Unmasking.QUOTA,
        confidence_threshold=0.9,
        factor=1.0,
        tokens_per_step=1,
        steps=max_tokens,
        confidence=Confidence.PROBABILITY,
        stop=(),
        ignore_eos=True,
        block_length=block_length,
    )


def make_request(
    length: int, blocks: int = 1, block_length: int = 32, arrival: float = 0
) -> Request:
    """A request whose whole sequence has this length."""
    canvas = blocks * block_length
    return Request(
        request_id="",
        prompt=[TOKEN] * (length - canvas),
        params=sampling(canvas, block_length),
        stop_token_ids=frozenset(),
        mask_token_id=MASK,
        text=None,
        stream=False,
        arrival=arrival,
    )


def make_scheduler(
    budget: int = 1024, batch: int = 64, pages: int = 10000, order: QueueOrder = "arrival"
) -> Scheduler:
    return Scheduler("llada", budget, batch, 4096, order, PageAllocator(pages))


def run(scheduler: Scheduler, plan: StepPlan, commit: int) -> None:
    """Commits so many masks of each row, from the left."""
    for row in plan.rows:
        request = row.request
        start = row.block * row.block_length
        tokens = request.canvas[start : start + row.block_length]
        masks = [i for i, token in enumerate(tokens) if token == MASK]
        for i in masks[:commit]:
            tokens[i] = TOKEN
        scheduler.apply(row, tokens)


def prefilled(plan: StepPlan | None) -> list[Request]:
    return [row.request for row in plan.rows if row.prefill] if plan else []


def decoding(scheduler: Scheduler, count: int) -> None:
    """Brings so many requests into the decode phase."""
    for _ in range(count):
        scheduler.add(make_request(40, arrival=-1.0))
    for _ in range(count):
        if plan := scheduler.plan():
            run(scheduler, plan, commit=1 if plan.rows[0].request.forward_in_block == 0 else 0)
    assert len(scheduler.decoding) == count


def test_deficit_grows_until_the_head_fits() -> None:
    """The worked example: budget 1024, 16 decodes of 32, heads of 2000 and 900 tokens."""
    scheduler = make_scheduler()
    decoding(scheduler, 16)
    assert scheduler.deficit == 0
    big, small = make_request(2000, arrival=1.0), make_request(900, arrival=2.0)
    scheduler.add(big)
    scheduler.add(small)
    seen = []
    for _ in range(6):
        plan = scheduler.plan()
        assert plan is not None
        seen.append((scheduler.deficit, [r.sequence_length for r in prefilled(plan)]))
        for request in prefilled(plan):
            scheduler.decoding.remove(request)
    assert seen == [(512, []), (1024, []), (1536, []), (48, [2000]), (560, []), (0, [900])]


def test_a_small_request_never_overtakes() -> None:
    scheduler = make_scheduler()
    decoding(scheduler, 16)
    scheduler.add(make_request(2000, arrival=1.0))
    scheduler.add(make_request(64, arrival=2.0))
    assert prefilled(scheduler.plan()) == []


def test_oversized_head_runs_alone_when_nothing_decodes() -> None:
    scheduler = make_scheduler(budget=256)
    big, small = make_request(3000, arrival=1.0), make_request(64, arrival=2.0)
    scheduler.add(big)
    scheduler.add(small)
    assert prefilled(scheduler.plan()) == [big]


def test_decodes_beyond_the_budget_do_not_starve_prefills() -> None:
    scheduler = make_scheduler(budget=256)
    decoding(scheduler, 16)
    waiting = make_request(500, arrival=1.0)
    scheduler.add(waiting)
    iterations = next(n for n in range(1, 100) if prefilled(scheduler.plan()) == [waiting])
    assert iterations == -(-500 // (256 // 8))


def test_deficit_is_capped_by_the_longest_sequence() -> None:
    scheduler = make_scheduler(budget=8192)
    decoding(scheduler, 1)
    scheduler.pages.allocate(scheduler.pages.num_pages - scheduler.pages.num_used)
    scheduler.add(make_request(4000, arrival=1.0))
    for _ in range(3):
        scheduler.plan()
    assert scheduler.deficit <= 4096


def test_waiting_for_memory_earns_no_credit() -> None:
    scheduler = make_scheduler(pages=20)
    decoding(scheduler, 5)
    scheduler.add(make_request(17 * PAGE_SIZE, arrival=1.0))
    for _ in range(5):
        scheduler.plan()
    assert scheduler.deficit == 0


def test_a_request_short_of_memory_does_not_hold_up_one_that_has_its_pages() -> None:
    scheduler = make_scheduler(pages=8, order="fewest_remaining_blocks")
    holder = make_request(96, blocks=3)
    scheduler.add(holder)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.add(make_request(64, blocks=1, arrival=1.0))
    run(scheduler, plan, commit=32)
    assert scheduler.waiting[0] is not holder
    assert prefilled(scheduler.plan()) == [holder]


def test_orders() -> None:
    old, new = make_request(128, blocks=4, arrival=1.0), make_request(64, blocks=1, arrival=2.0)
    for order, expected in (("arrival", [old, new]), ("fewest_remaining_blocks", [new, old])):
        scheduler = make_scheduler(order=order)  # type: ignore[arg-type]
        scheduler.add(new)
        scheduler.add(old)
        assert scheduler.waiting == expected


def test_later_blocks_keep_their_pages() -> None:
    scheduler = make_scheduler()
    request = make_request(96, blocks=2)
    scheduler.add(request)
    pages = None
    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        assert prefilled(plan) == [request]
        assert pages is None or request.pages == pages
        pages = list(request.pages)
        run(scheduler, plan, commit=32)
    assert request.finish_reason is FinishReason.LENGTH
    assert scheduler.pages.num_used == 0


def test_remove_in_every_state() -> None:
    scheduler = make_scheduler()
    waiting, active = make_request(64), make_request(64)
    scheduler.add(active)
    plan = scheduler.plan()
    assert plan is not None
    run(scheduler, plan, commit=1)
    scheduler.add(waiting)
    scheduler.remove(active)
    scheduler.remove(waiting)
    assert (scheduler.num_requests, scheduler.pages.num_used, scheduler.plan()) == (0, 0, None)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 4), st.sampled_from([4, 8, 32])),
        min_size=1,
        max_size=24,
    ),
    budget=st.integers(1, 600),
    batch=st.integers(1, 6),
    order=st.sampled_from(["arrival", "fewest_remaining_blocks"]),
    commit=st.integers(1, 9),
)
def test_every_request_ends_and_all_pages_come_back(
    shapes: list[tuple[int, int, int]], budget: int, batch: int, order: QueueOrder, commit: int
) -> None:
    scheduler = make_scheduler(budget, batch, pages=40, order=order)
    requests = [
        make_request(prompt + blocks * length, blocks, length, arrival=float(i))
        for i, (prompt, blocks, length) in enumerate(shapes)
    ]
    for request in requests:
        scheduler.add(request)
    for _ in range(20000):
        plan = scheduler.plan()
        if plan is None:
            break
        scheduler.pages.check()
        assert 0 <= scheduler.deficit <= scheduler.max_deficit
        assert scheduler.waiting_tokens == sum(r.sequence_length for r in scheduler.waiting)
        assert len({row.slot for row in plan.rows}) == len(plan.rows) <= batch
        run(scheduler, plan, commit)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    assert scheduler.pages.num_used == 0


def test_imports_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import sangam_backend.scheduler"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pages_are_all_or_nothing() -> None:
    pages = PageAllocator(4)
    first = pages.allocate(3)
    assert first is not None
    assert pages.allocate(2) is None
    pages.free(first)
    pages.check()
    with pytest.raises(KeyError):
        pages.free(first)
