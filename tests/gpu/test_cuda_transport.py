"""Pages pulled from the GPU memory of another process."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from test_transport import Other, Setup, another_process, pull_within_a_process, same_bits

from sangam_backend.transport import Location, Transport, TransportError

SHAPE = (3, 32, 2, 16, 2, 64)
OWN_SHAPE = (3, 12, 2, 16, 2, 64)
# LLaDA-8B, of which 48 pages hold 768 tokens.
LLADA = (32, 64, 2, 16, 32, 128)
LLADA_PAGES = 48
GPU_CYCLES = 200_000_000
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def setup(shape: Sequence[int], seed: int, device: str = "cuda:0") -> Setup:
    return Setup(shape, torch.bfloat16, device, seed)


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    with another_process(setup(SHAPE, 1)) as other:
        yield other


@pytest.fixture
def transport() -> Iterator[Transport]:
    transport, _ = setup(OWN_SHAPE, 2).open()
    yield transport
    transport.close()


def test_pulls_the_pages_and_nothing_else(other: Other) -> None:
    transport, pool = setup(OWN_SHAPE, 2).open()
    expected, source = setup(OWN_SHAPE, 2).new_pool(), setup(SHAPE, 1).new_pool()
    expected[:, [2, 11, 4]] = source[:, [5, 0, 7]]
    pull = transport.pull(other.export([5, 0, 7]), [2, 11, 4])
    pull.finish()
    assert pull.is_done()
    assert pull.num_bytes == 3 * source[:, 0].nbytes
    assert same_bits(pool, expected)
    transport.close()


def test_each_pulls_from_the_other(other: Other) -> None:
    transport, pool = setup(OWN_SHAPE, 2).open()
    there = torch.from_numpy(other("pull", transport.export([9, 3]), [1, 2]))
    assert same_bits(there, pool[:, [9, 3]].cpu())
    # Through the mapping of the test before, which must show what has been written since.
    transport.pull(other.export([1, 2]), [0, 5]).finish()
    assert same_bits(pool[:, [0, 5]].cpu(), there)
    transport.close()


def test_within_a_process() -> None:
    first, second, _ = pull_within_a_process(setup(SHAPE, 1), setup(OWN_SHAPE, 2))
    first.close()
    second.close()


def test_waits_for_readers_of_the_target_pages(other: Other) -> None:
    """And for nobody on the host; what is launched after `finish` reads the new K/V."""
    transport, pool = setup(OWN_SHAPE, 2).open()
    location = other.export([5])
    transport.pull(location, [0]).finish()
    before = pool[:, 3].clone()
    torch.cuda._sleep(GPU_CYCLES)
    read_late = pool[:, 3].clone()
    started = time.perf_counter()
    pull = transport.pull(location, [3])
    assert not pull.is_done()
    assert time.perf_counter() - started < 0.02
    pull.finish()
    read_after = pool[:, 3].clone()
    assert same_bits(read_late, before)
    assert same_bits(read_after, setup(SHAPE, 1).new_pool()[:, 5])
    transport.close()


def test_what_was_taken_back_is_refused(other: Other, transport: Transport) -> None:
    location = other.export([1])
    torch.cuda._sleep(GPU_CYCLES)
    pull = transport.pull(location, [0])
    other("release", location)
    assert not pull.is_done()
    with pytest.raises(TransportError, match="taken back"):
        pull.finish()
    with pytest.raises(TransportError, match="taken back"):
        transport.pull(location, [0])


def test_a_killed_owner(other: Other, transport: Transport) -> None:
    with another_process(setup(SHAPE, 3)) as mortal:
        location, unseen = mortal.export([1]), mortal.export([2])
        transport.pull(location, [0]).finish()
        mortal.die()
        for lost in (location, unseen, location):
            with pytest.raises(TransportError, match="has ended"):
                transport.pull(lost, [0])
    transport.pull(other.export([1]), [0]).finish()
    torch.cuda.synchronize()


def test_another_layout(other: Other) -> None:
    transport, _ = setup((4, *SHAPE[1:]), 2).open()
    with pytest.raises(TransportError, match="layout"):
        transport.pull(other.export([1]), [0])
    transport.close()


def test_what_cannot_be_opened(other: Other, transport: Transport) -> None:
    good = other.export([1])

    def forged(**memory: object) -> Location:
        location = copy.deepcopy(good)
        location["pool"]["memory"] |= memory
        return location

    for location in (forged(gpu="elsewhere"), forged(handle="AAAA"), forged(offset=1 << 40)):
        with pytest.raises(TransportError):
            transport.pull(location, [0])
    transport.pull(good, [0]).finish()


def test_a_gpu_that_is_not_visible(
    other: Other, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sangam_backend.transport.cuda_ipc._uuid", lambda index: "another")
    with pytest.raises(TransportError, match="is not visible here"):
        transport.pull(other.export([1]), [0])


@TWO_GPUS
def test_between_gpus(other: Other) -> None:
    transport, pool = setup(OWN_SHAPE, 2, "cuda:1").open()
    transport.pull(other.export([5, 0]), [2, 11]).finish()
    assert same_bits(pool[:, [2, 11]].cpu(), setup(SHAPE, 1).new_pool()[:, [5, 0]].cpu())
    transport.close()


@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=TWO_GPUS)])
def test_bandwidth(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefill of LLaDA-8B; with two processes on one GPU, each byte is read and written there."""
    transport, pool = setup(LLADA, 2, device).open()
    source, target = list(range(LLADA_PAGES)), list(range(LLADA_PAGES + 15, 15, -1))
    with another_process(setup(LLADA, 1)) as other:
        location = other.export(source)
        seconds = [timed_pull(transport, location, target) for _ in range(10)]
    expected = setup(LLADA, 1).new_pool()[:, source]
    assert same_bits(pool[:, target].cpu(), expected.cpu())
    num_bytes = LLADA_PAGES * pool[:, 0].nbytes
    with capsys.disabled():
        print(
            f"\n{num_bytes / 1e6:.0f} MB from cuda:0 to {device}: first {seconds[0] * 1e3:.2f} ms, "
            f"then {min(seconds) * 1e3:.2f} ms, {num_bytes / min(seconds) / 1e9:.0f} GB/s"
        )
    transport.close()


def timed_pull(transport: Transport, location: Location, pages: list[int]) -> float:
    started = time.perf_counter()
    pull = transport.pull(location, pages)
    pull.finish()
    return time.perf_counter() - started
