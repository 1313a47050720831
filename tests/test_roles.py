"""Prefill and decode engines together give what one engine gives, token for token."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import goldens
import pytest
from test_engine import Answer, Job, new_request, random_job, run_reference

from sangam_backend.config import EngineConfig
from sangam_backend.engine import Engine, Peers
from sangam_backend.handover import Handover
from sangam_backend.processes import Process
from sangam_backend.request import ErrorCode, FinishReason, Output, Prefilled, Request, RequestError
from sangam_backend.transport import TransportError

KEY = b"key"
SMALL = {"max_batch_size": 7, "max_tokens_per_iteration": 200, "kv_cache_tokens": 600}


@dataclass
class Told:
    """What the client of a request was told."""

    pieces: list[Output] = field(default_factory=list)
    end: Output | None = None

    @property
    def answer(self) -> tuple[list[int], FinishReason | None]:
        ids = [token for piece in self.pieces for token in piece.ids]
        return ids, self.pieces[-1].finish_reason


class Cluster:
    """One prefill engine and some decode engines, in one process and thread."""

    def __init__(self, name: str, num_decoders: int, overflow: int = 0, **settings: Any) -> None:
        settings = SMALL | settings

        def config(role: Any) -> EngineConfig:
            return EngineConfig(
                model=str(goldens.GOLDEN / name),
                role=role,
                prefill_overflow_tokens=overflow,
                **settings,
            )

        self.prefill = Engine(config("prefill"), Peers(self.hand_over, self.prefilled))
        self.decoders = [
            Engine(config("decode"), Peers(pulled=self.pulled)) for _ in range(num_decoders)
        ]
        self.told: dict[Request, Told] = {}
        self.streams: set[Request] = set()
        self._owners: dict[Request, Request] = {}
        self._expected: dict[Request, tuple[Engine, Request]] = {}
        self._rng = random.Random(name)

    def submit(self, job: Job, stream: bool = False) -> Request:
        request = new_request(self.prefill, job)
        self.told[request] = Told()
        if stream:
            self.streams.add(request)
        self.prefill.submit(request)
        return request

    def hand_over(self, request: Request, prefill_follows: bool) -> None:
        handover = Handover(
            id="",
            guard=False,
            owner=Process.current(),
            reply_to="",
            request_id="",
            trace_id="",
            arrival=request.arrival,
            prompt=request.prompt,
            params=request.params,
            canvas=request.canvas[: request.block * request.params.block_length],
            num_forwards=request.num_forwards,
            prefill_follows=prefill_follows,
            deadline=None,
            options={},
        )
        handover = Handover.from_bytes(handover.to_bytes(KEY), KEY)
        decoder = self._rng.choice(self.decoders)
        restored = decoder.frontend.restore_request(handover, request in self.streams)
        self._owners[restored] = request
        if prefill_follows:
            self._expected[request] = decoder, restored
        else:
            decoder.submit(restored)

    def prefilled(self, request: Request, prefilled: Prefilled) -> None:
        decoder, restored = self._expected.pop(request)
        restored.prefilled = Prefilled(**json.loads(json.dumps(prefilled._asdict())))
        decoder.submit(restored)

    def pulled(self, request: Request) -> None:
        self.prefill.release(self._owners[request])

    def step(self) -> None:
        for request, output in self.prefill.step():
            assert output.done
            self.told[request].end = output
        for decoder in self.decoders:
            for request, output in decoder.step():
                self._tell(request, output)
        for engine in (self.prefill, *self.decoders):
            engine.pages.check()

    def _tell(self, request: Request, output: Output) -> None:
        owner = self._owners[request]
        if output.error is not None:
            self.prefill.cancel(owner, output.error)
            return
        if output.ids or output.finish_reason is not None:
            self.told[owner].pieces.append(output)
        if output.done:
            length = request.params.block_length
            start = request.block * length
            tokens = request.canvas[start : start + length]
            self.prefill.take_back(owner, tokens, request.num_forwards)

    def run(self) -> None:
        while any(told.end is None for told in self.told.values()):
            self.step()

    def assert_idle(self) -> None:
        for engine in (self.prefill, *self.decoders):
            assert engine.is_idle
            assert engine.pages.num_used == 0
            engine.close()


def expected_answer(cluster: Cluster, job: Job) -> Answer:
    return run_reference(cluster.prefill.runner.model, cluster.prefill, job)


@pytest.mark.parametrize("overflow", [0, 100])
@pytest.mark.parametrize("name", goldens.MODELS)
def test_random_requests(name: str, overflow: int) -> None:
    rng = random.Random(name)
    jobs = [random_job(rng) for _ in range(24)]
    cluster = Cluster(name, num_decoders=2, overflow=overflow)
    requests = []
    for job in jobs:
        requests.append(cluster.submit(job, stream=rng.random() < 0.5))
        for _ in range(rng.choice([0, 0, 1, 4])):
            cluster.step()
    cluster.run()
    for request, job in zip(requests, jobs):
        told = cluster.told[request]
        ids, reason = told.answer
        assert (ids, reason, request.num_forwards) == expected_answer(cluster, job)
        assert told.pieces[-1].num_forwards == request.num_forwards
        assert request in cluster.streams or len(told.pieces) == 1
    counts = cluster.prefill.counts
    assert bool(counts.overflowed) == bool(overflow)
    assert counts.handed_over > 0
    assert sum(decoder.counts.pulled_bytes for decoder in cluster.decoders) > 0
    cluster.assert_idle()


def test_cancels_at_any_moment_give_all_pages_back() -> None:
    rng = random.Random(1)
    cluster = Cluster("llada_tiny", num_decoders=1, overflow=100)
    requests = []
    for _ in range(40):
        requests.append(cluster.submit(random_job(rng)))
        cluster.step()
        if rng.random() < 0.5:
            cluster.prefill.cancel(rng.choice(requests))
    cluster.run()
    while not cluster.decoders[0].is_idle:
        cluster.step()
    ends = {told.end.finish_reason for told in cluster.told.values() if told.end is not None}
    assert FinishReason.CANCELLED in ends
    assert len(ends) > 1
    cluster.assert_idle()


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_lost_export(hybrid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid decode engine repeats the prefill, a disaggregated one gives the request up."""
    job = ([1, 2, 3], {"max_tokens": 40, "block_length": 16, "ignore_eos": True})
    cluster = Cluster("llada_tiny", num_decoders=1, overflow=10**6 if hybrid else 0)
    (decoder,) = cluster.decoders
    assert decoder.transport is not None
    pull = decoder.transport.pull
    calls = 0

    def fail_once(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise TransportError("the export has been taken back")
        return pull(*arguments)

    monkeypatch.setattr(decoder.transport, "pull", fail_once)
    request = cluster.submit(job)
    cluster.run()
    told = cluster.told[request]
    if hybrid:
        assert told.answer == expected_answer(cluster, job)[:2]
        assert decoder.counts.repeated == 1
    else:
        assert told.end is not None
        assert told.end.error is not None
        assert told.end.error.code is ErrorCode.UNAVAILABLE
    cluster.assert_idle()


def test_a_handover_from_elsewhere_is_refused() -> None:
    cluster = Cluster("llada_tiny", num_decoders=0)
    request = new_request(cluster.prefill, ([1, 2], {}))
    values = {
        "id": "",
        "guard": False,
        "owner": Process.current(),
        "reply_to": "",
        "request_id": "",
        "trace_id": "1" * 32,
    }
    handover = Handover(
        **values,  # type: ignore[arg-type]
        arrival=0.0,
        prompt=request.prompt,
        params=request.params,
        canvas=[],
        num_forwards=0,
        prefill_follows=True,
        deadline=None,
        options={},
    )
    data = handover.to_bytes(KEY)
    assert Handover.from_bytes(data, KEY) == handover
    for forged in (b"", data[:-1] + b"]", data[1:], handover.to_bytes(b"other")):
        with pytest.raises(RequestError, match="was not made by"):
            Handover.from_bytes(forged, KEY)


def test_a_request_cancelled_before_its_prefill_has_come() -> None:
    cluster = Cluster("llada_tiny", num_decoders=1)
    (decoder,) = cluster.decoders
    cluster.submit(([1, 2, 3], {"max_tokens": 32}))
    while not cluster._expected:
        cluster.prefill.step()
    ((_, restored),) = cluster._expected.values()
    decoder.cancel(restored, RequestError(ErrorCode.CANCELLED, "the client left"))
    while cluster._expected:
        cluster.prefill.step()
    cluster.run()
    (told,) = cluster.told.values()
    assert told.end is not None
    assert told.end.error is not None
    assert told.end.error.code is ErrorCode.CANCELLED
    cluster.assert_idle()
