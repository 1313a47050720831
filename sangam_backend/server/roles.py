"""The halves of disaggregated serving, which together do what a colocated instance does.

The ensemble is a pipeline of blocks. The prefill instance owns a request; for each block it sends
one response, the handover, for which Triton starts a step on a decode instance. The handover goes
out when the prefill is launched, and the prefill's result follows it past Triton. The decode
instance then pulls the K/V, decodes the block, answers the client, and reports straight back; then
comes the next block.

Triton 24.10 never ends a request of a process that has died, and keeps one for ever that fails
before the last of its steps has ended. Hence the guard: the first handover of a request only asks
a decode instance to hold its step open, and to answer for the prefill instance should that die. And
hence the order at the end: blocks, then the guard, then the prefill instance, which alone reports
failures to the client.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import Any

from sangam_backend.config import EngineConfig
from sangam_backend.engine import Peers
from sangam_backend.handover import Handover, meeting_place, shared_key
from sangam_backend.processes import Process
from sangam_backend.request import ErrorCode, Output, Prefilled, Request, RequestError
from sangam_backend.server.channel import Channel, Start
from sangam_backend.server.instance import Client, Instance, error_of
from sangam_backend.server.options import Options
from sangam_backend.server.reply import Reply
from sangam_backend.server.reports import Report, ReportReceiver, ReportSender

BEAT_SECONDS = 1.0
LEASE_SECONDS = 5.0
"""Without a beat for so long, a decode instance is lost."""
PICKUP_SECONDS = 60.0
"""So long a block waits for a decode instance to take it, unless one says that it has no room. An
engine process may be started again meanwhile."""
MAX_LENT = 4096
"""Requests of a prefill instance beyond its backlog: those whose block others have or wait for."""


@dataclass(slots=True)
class Lent:
    """A handover in another instance's hands."""

    request: Request
    guard: bool
    """Whether it is the request's guard, else it is its current block."""
    heard: float
    """When the decode instance last gave a sign, or the handover was sent."""
    address: str | None = None
    """Of the decode instance that has taken it."""
    prefilled: Prefilled | None = None
    """Kept until then."""

    @property
    def place(self) -> tuple[Request, str | None]:
        return self.request, self.address

    def is_lost(self, now: float, pool_is_full: bool) -> bool:
        silence = now - self.heard
        if self.address is not None:
            return silence > LEASE_SECONDS
        return silence > PICKUP_SECONDS and not pool_is_full

    def loss(self) -> RequestError:
        if self.address is not None:
            message = "the decode instance that held a block was lost"
        else:
            message = f"no decode instance took a block over within {PICKUP_SECONDS:g} s"
        return RequestError(ErrorCode.UNAVAILABLE, message)


class Link:
    """An instance's own address, and the way to those of others."""

    def __init__(self, server: int, receive: Callable[[Report], None]) -> None:
        directory = meeting_place(server)
        self.key = shared_key(directory)
        self.sender = ReportSender()
        self.receiver = ReportReceiver(directory, str(os.getpid()), receive)

    def send(self, address: str, kind: str, ids: list[str], **values: Any) -> None:
        report = {"kind": kind, "ids": ids, "from": self.receiver.address} | values
        self.sender.send(address, report)

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


class PrefillInstance(Instance):
    """Owns requests, runs their prefills, and hands their blocks over."""

    def __init__(self, start: Start, channel: Channel, config: EngineConfig) -> None:
        super().__init__(start, channel, config, Peers(self._hand_over, self._prefilled))
        self._owner = Process.current()
        self._lent: dict[str, Lent] = {}
        self._blocks: dict[Request, str] = {}
        """The handovers in `_lent` that are no guards."""
        self._ended: dict[Request, RequestError | None] = {}
        """Outcome of requests whose guard or block has still to come back."""
        self._holders: dict[str, Process] = {}
        """The decode instances, by their addresses."""
        self._next_watch = 0.0
        self._pool_full = 0.0
        """When a decode instance last said that it takes no more."""
        self._link = Link(start.server.pid, self._receive)

    def _hand_over(self, request: Request, prefill_follows: bool) -> None:
        """See `Peers.hand_over`."""
        id, num_forwards = self._lend(request, guard=False), request.num_forwards
        self._outbox.put(lambda: self._send_handover(id, prefill_follows, num_forwards))

    def _prefilled(self, request: Request, prefilled: Prefilled) -> None:
        """See `Peers.prefilled`."""
        with self.room:
            id = self._blocks.get(request)
            if id is None:
                return
            lent = self._lent[id]
            if lent.address is None:
                lent.prefilled = prefilled
                return
        self._send_prefilled(id, lent.address, prefilled)

    def close(self) -> None:
        super().close()
        self._link.close()

    def _streams(self, options: Options) -> bool:
        return False

    def _num_held(self) -> int:
        return len(self._clients) - min(len(self._blocks), MAX_LENT)

    def _begin(self, request: Request) -> None:
        self._send_handover(self._lend(request, guard=True), prefill_follows=False)
        super()._begin(request)

    def _lend(self, request: Request, guard: bool) -> str:
        id = secrets.token_hex(8)
        with self.room:
            self._lent[id] = Lent(request, guard, time.monotonic())
            if not guard:
                self._blocks[request] = id
            self.room.notify_all()
        return id

    def _take(self, id: str) -> Lent:
        """Ends a loan; the caller holds the lock."""
        lent = self._lent.pop(id)
        if not lent.guard:
            del self._blocks[lent.request]
        return lent

    def _send_handover(self, id: str, prefill_follows: bool, num_forwards: int = 0) -> None:
        """`num_forwards` as it was before the prefill, which may have run meanwhile."""
        with self.room:
            lent = self._lent.get(id)
            client = self._clients.get(lent.request) if lent is not None else None
        if lent is None or client is None:
            return
        request = lent.request
        handover = Handover(
            id=id,
            guard=lent.guard,
            owner=self._owner,
            reply_to=self._link.receiver.address,
            request_id=request.request_id,
            trace_id=request.trace_id,
            arrival=request.arrival,
            prompt=[] if lent.guard else request.prompt,
            params=request.params,
            canvas=request.canvas[: request.block * request.params.block_length],
            num_forwards=num_forwards,
            prefill_follows=prefill_follows,
            deadline=client.deadline,
            options=asdict(client.options),
        )
        client.reply.send({"handover": handover.to_bytes(self._link.key)}, final=False)

    def _send_prefilled(self, id: str, address: str, prefilled: Prefilled) -> None:
        self._link.send(address, "prefilled", [id], **prefilled._asdict())

    def _receive(self, report: Report) -> None:
        kind, now = report["kind"], time.monotonic()
        if kind == "beat":
            self._holders[report["from"]] = Process(*report["process"])
            if report["full"]:
                self._pool_full = now
        for id in report["ids"]:
            with self.room:
                lent = self._lent.get(id)
                if lent is None:
                    continue
                lent.heard, lent.address = now, report["from"]
                prefilled, lent.prefilled = lent.prefilled, None
                if kind in ("done", "failed", "left"):
                    self._take(id)
            if prefilled is not None:
                self._send_prefilled(id, lent.address, prefilled)
            self._follow(kind, lent, report)

    def _follow(self, kind: str, lent: Lent, report: Report) -> None:
        request = lent.request
        if kind in ("taken", "done", "failed") and request in self._ended:
            self._wind_up(request)
        elif kind == "pulled":
            self.engine.release(request)
        elif kind == "done":
            self.engine.take_back(request, report["tokens"], report["num_forwards"])
        elif kind == "failed":
            error = RequestError(ErrorCode(report["code"]), report["message"])
            self.engine.cancel(request, error)
        elif kind == "left":
            self._answer(request)

    def _send(self, request: Request, output: Output) -> None:
        if request in self._clients:
            self._ended[request] = error_of(output)
            self._wind_up(request)

    def _wind_up(self, request: Request) -> None:
        """Lets the guard of an ended request go, unless its block has still to come back."""
        with self.room:
            if request in self._blocks:
                return
            guards = {
                id: lent.address
                for id, lent in self._lent.items()
                if lent.guard and lent.request is request
            }
        if not guards:
            self._answer(request)
        for id, address in guards.items():
            if address is not None:
                self._link.send(address, "dismiss", [id])

    def _answer(self, request: Request) -> None:
        """Ends a request; its text the decode instances have sent."""
        client = self._take_client(request, done=True)
        error = self._ended.pop(request, None)
        if client is None:
            return
        self._count_end(request, error)
        if error is not None:
            client.reply.refuse(error)
        else:
            client.reply.finish()

    def _out_of_hand(self) -> set[Request]:
        """Those whose block a decode instance works on, which then ends the step first."""
        with self.room:
            return set(self._blocks)

    def _watch(self, now: float) -> None:
        if now < self._next_watch:
            return
        self._next_watch = now + BEAT_SECONDS / 2
        dead = {address for address, process in self._holders.items() if not process.is_running()}
        with self.room:
            pool_is_full = now - self._pool_full < LEASE_SECONDS
            lost = {
                lent.place
                for lent in self._lent.values()
                if lent.address in dead or lent.is_lost(now, pool_is_full)
            }
            # Of a guard and a block in the same hands, each is lost with the other.
            ids = [id for id, lent in self._lent.items() if lent.place in lost]
            losses = [self._take(id) for id in ids]
        for address in dead:
            del self._holders[address]
        # A lost block ends its request, a lost guard alone is replaced.
        blocks = {lent.request: lent.loss() for lent in losses if not lent.guard}
        for request, loss in blocks.items():
            self.engine.cancel(request, loss)
        for request in {lent.request for lent in losses}:
            if request in self._ended:
                self._wind_up(request)
            elif request not in blocks:
                self._send_handover(self._lend(request, guard=True), prefill_follows=False)


class DecodeInstance(Instance):
    """Decodes blocks that prefill instances hand over, and answers their clients."""

    def __init__(self, start: Start, channel: Channel, config: EngineConfig) -> None:
        super().__init__(start, channel, config, Peers(pulled=self._pulled))
        self._held: dict[str, Handover] = {}
        """From the moment of arrival, in the backlog's queue too."""
        self._guarded: dict[str, Reply] = {}
        self._handovers: dict[Request, Handover] = {}
        self._half_met: dict[str, Request | Prefilled] = {}
        """Of handovers whose prefill follows: what came first."""
        self._owners: set[str] = set()
        """Addresses of the prefill instances."""
        self._process = astuple(Process.current())
        self._next_beat = 0.0
        self._link = Link(start.server.pid, self._receive)

    def _pulled(self, request: Request) -> None:
        """See `Peers.pulled`."""
        if (handover := self._handovers.get(request)) is not None:
            self._report(handover, "pulled")

    def close(self) -> None:
        super().close()
        for reply in self._guarded.values():
            reply.finish()
        self._link.close()

    def _is_drained(self) -> bool:
        return super()._is_drained() and not self._held

    def _is_alone(self, start: Start) -> bool:
        """A block that has been handed over is never refused for want of room."""
        return False

    def _accept(self, content: Any, reply: Reply) -> None:
        handover = Handover.from_bytes(content, self._link.key)
        with self.room:
            self._held[handover.id] = handover
            self._owners.add(handover.reply_to)
            if handover.guard:
                self._guarded[handover.id] = reply
        self._report(handover, "taken")
        if handover.guard:
            return
        try:
            if reply.is_cancelled():
                raise RequestError(ErrorCode.CANCELLED, "the client cancelled")
            self._take_over(handover, reply)
        except Exception as error:
            self._give_back(handover, reply, error)

    def _take_over(self, handover: Handover, reply: Reply) -> None:
        options = Options(**handover.options)
        request = self.engine.frontend.restore_request(handover, options.stream)
        self._handovers[request] = handover
        try:
            self._admit(request, Client(reply, options, handover.deadline))
        except RequestError:
            del self._handovers[request]
            raise

    def _begin(self, request: Request) -> None:
        handover = self._handovers[request]
        if handover.prefill_follows:
            self._meet(handover.id, request)
        else:
            super()._begin(request)

    def _meet(self, id: str, half: Request | Prefilled) -> None:
        """Begins with a request when both it and its prefill are here."""
        with self.room:
            if id not in self._held:
                return
            other = self._half_met.pop(id, None)
            if other is None:
                self._half_met[id] = half
                return
        request, prefilled = (half, other) if isinstance(half, Request) else (other, half)
        assert isinstance(request, Request)
        assert isinstance(prefilled, Prefilled)
        request.prefilled = prefilled
        super()._begin(request)

    def _give_back(self, handover: Handover, reply: Reply, error: Exception) -> None:
        """Leaves it to the prefill instance to refuse the client."""
        if not isinstance(error, RequestError):
            error = RequestError(ErrorCode.INTERNAL, repr(error))
        self._end_step(handover, reply)
        self._report(handover, "failed", code=error.code.value, message=str(error))

    def _send(self, request: Request, output: Output) -> None:
        client = self._take_client(request, output.done)
        if client is None:
            return
        handover = self._handovers.pop(request) if output.done else self._handovers[request]
        if (error := error_of(output)) is not None:
            self._last_commit.pop(request, None)
            self._request_log.add_end(request, error.code.value.lower(), request.block)
            self._give_back(handover, client.reply, error)
            return
        self._count_output(request, output, first=not handover.canvas)
        if output.ids or output.text or output.finish_reason is not None:
            client.reply.send(client.options.outputs(request, output), output.done)
        if output.done:
            reason = request.finish_reason
            self._request_log.add_end(request, reason.value if reason else "block", request.block)
            # The next block's text comes after this report, so it cannot overtake this one's.
            self._end_step(handover, client.reply)
            self._report_done(request, handover)

    def _end_step(self, handover: Handover, reply: Reply) -> None:
        reply.finish()
        with self.room:
            self._held.pop(handover.id, None)
            self._half_met.pop(handover.id, None)
            self.room.notify_all()

    def _report_done(self, request: Request, handover: Handover) -> None:
        start = len(handover.canvas)
        tokens = request.canvas[start : start + request.params.block_length]
        self._report(handover, "done", tokens=tokens, num_forwards=request.num_forwards)

    def _report(self, handover: Handover, kind: str, **values: Any) -> None:
        self._link.send(handover.reply_to, kind, [handover.id], **values)

    def _receive(self, report: Report) -> None:
        for id in report["ids"]:
            if report["kind"] == "prefilled":
                self._meet(id, Prefilled(report["tokens"], report["location"]))
            else:
                self._dismiss(id)

    def _dismiss(self, id: str) -> None:
        """Lets a guard go, which its prefill instance needs no longer."""
        with self.room:
            reply, handover = self._guarded.pop(id, None), self._held.get(id)
        if reply is not None and handover is not None:
            self._end_step(handover, reply)
            self._report(handover, "left")

    def _watch(self, now: float) -> None:
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_SECONDS
        self._beat()
        self._look_after_orphans()

    def _beat(self) -> None:
        with self.room:
            ids: dict[str, list[str]] = {address: [] for address in self._owners}
            for handover in self._held.values():
                ids.setdefault(handover.reply_to, []).append(handover.id)
            full = self._num_held() >= self._backlog
        for address, held in ids.items():
            self._link.send(address, "beat", held, full=full, process=self._process)

    def _look_after_orphans(self) -> None:
        """Answers for prefill instances that have died."""
        error = RequestError(ErrorCode.UNAVAILABLE, "the prefill instance was lost")
        with self.room:
            orphans = [h for h in self._held.values() if not h.owner.is_running()]
            guarded = [self._guarded.pop(h.id) for h in orphans if h.guard]
            for handover in orphans:
                self._owners.discard(handover.reply_to)
                if handover.guard:
                    del self._held[handover.id]
        ids = {handover.id for handover in orphans}
        for request, handover in list(self._handovers.items()):
            if handover.id in ids:
                self.engine.cancel(request, error)
        for reply in guarded:
            reply.refuse(error)
