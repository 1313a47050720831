"""Both clients and the command against a real tritonserver that runs echo_model as `sangam`."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sangam_client import AsyncClient, Client, SangamError
from server.harness import wait_for

from sangam_backend.background import free_ports
from sangam_backend.installation import find_triton
from sangam_backend.leftovers import claimed_name
from sangam_backend.supervisor import Endpoints
from sangam_backend.supervisor import Server as TritonServer

WORDS = "the quick  brown fox\njumps über"
SLOW = " ".join(str(number) for number in range(200))
# tritonserver 24.10 may crash when a cancel meets a response that is being written.
GAP = 0.05
FAIL = "max_tokens: 0 is not in 1..256\nsecond line"
CHAT = [{"role": "system", "content": "be  brief"}, {"role": "user", "content": "hällo"}]


@dataclass(frozen=True)
class Server:
    url: str
    repository: Path

    def cancelled(self, request_id: str) -> bool:
        return (self.repository / "sangam" / "cancelled" / request_id).exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("triton")
    shutil.copytree(Path(__file__).parent / "echo_model", root / "models" / "sangam")
    http_port, grpc_port, metrics_port = free_ports(3)
    endpoints = Endpoints("127.0.0.1", http_port, grpc_port, metrics_port)
    with (
        claimed_name() as name,
        TritonServer(find_triton(root), root / "models", endpoints, 60, 5, name) as triton,
    ):
        server = Server(f"localhost:{grpc_port}", root / "models")
        with Client(server.url) as client:
            wait_for(client.is_ready)
        yield server
        assert triton.process.poll() is None, "the server died"


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def test_text_streams_in_pieces(client: Client) -> None:
    chunks = list(client.stream(WORDS))
    assert [chunk.text for chunk in chunks] == [
        "the ",
        "quick  ",
        "brown ",
        "fox\n",
        "jumps ",
        "über",
    ]
    assert [chunk.final for chunk in chunks] == [False] * 5 + [True]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + ["stop"]
    assert [chunk.num_output_tokens for chunk in chunks] == [1] * 6
    assert [chunk.num_input_tokens for chunk in chunks] == [None] * 5 + [6]


def test_final_may_come_on_an_empty_response(client: Client) -> None:
    chunks = list(client.stream([5, -7, 2**31 - 1]))
    assert [chunk.output_ids for chunk in chunks] == [[5], [-7], [2**31 - 1], []]
    assert [chunk.final for chunk in chunks] == [False, False, False, True]
    assert chunks[-1].num_output_tokens is None


def test_generate_is_the_stream_joined(client: Client) -> None:
    done = client.generate(WORDS, max_tokens=4)
    assert (done.text, done.finish_reason) == ("the quick  brown fox\n", "length")
    assert done.output_ids == [4, 7, 6, 4]
    assert (done.num_input_tokens, done.num_output_tokens, done.num_forwards) == (6, 4, 7)


def test_generate_without_any_output(client: Client) -> None:
    done = client.generate("silent")
    assert (done.text, done.output_ids, done.finish_reason) == ("", [], None)
    counts = (done.num_input_tokens, done.num_output_tokens, done.num_forwards)
    assert counts == (None, None, None)


def test_inputs_arrive_as_sent(client: Client) -> None:
    always = {
        "exclude_input_in_output": [True],
        "return_finish_reason": [True],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
        "return_num_forwards": [True],
        "stream": [False],
    }
    sampling: dict[str, Any] = {"show": True, "stop": ["a", 'b"'], "temperature": 0.5}
    for prompt, name in ((WORDS, "text_input"), ([1, 2], "input_ids"), (CHAT, "messages")):
        seen = json.loads(client.generate(prompt, **sampling).text)
        (value,) = (seen.pop(name),) if name == "input_ids" else seen.pop(name)
        assert (json.loads(value) if name == "messages" else value) == prompt
        assert json.loads(seen.pop("sampling_parameters")[0]) == sampling
        assert seen == always


def test_chat_messages_stream(client: Client) -> None:
    assert json.loads("".join(chunk.text for chunk in client.stream(CHAT))) == CHAT


@pytest.mark.parametrize(("prompt", "message"), [("fail", FAIL), ("fail late", "broke half-way")])
def test_server_errors(server: Server, client: Client, prompt: str, message: str) -> None:
    async def read(client: AsyncClient, into: list[str]) -> None:
        async for chunk in client.stream(prompt):
            into.append(chunk.text)

    async def use() -> list[str]:
        texts: list[str] = []
        async with AsyncClient(server.url) as client:
            with pytest.raises(SangamError) as caught:
                await read(client, texts)
            assert caught.value.message == message
        return texts

    texts: list[str] = []
    with pytest.raises(SangamError) as caught:
        texts.extend(chunk.text for chunk in client.stream(prompt))
    assert caught.value.message == message
    assert texts == asyncio.run(use()) == (["fail "] if prompt == "fail late" else [])


def test_unknown_model(server: Server) -> None:
    with Client(server.url, model="absent") as client:
        assert not client.is_ready()
        with pytest.raises(SangamError, match="absent"):
            client.generate("x")


def test_no_server() -> None:
    async def use(url: str) -> None:
        async with AsyncClient(url) as client:
            assert not await client.is_ready()
            with pytest.raises(SangamError, match=r"^UNAVAILABLE: .*refused"):
                await client.generate("x")

    url = f"localhost:{free_ports(1)[0]}"
    with Client(url) as client:
        assert not client.is_ready()
        with pytest.raises(SangamError, match=r"^UNAVAILABLE: .*refused"):
            client.generate("x")
    asyncio.run(use(url))


def test_closing_the_iterator_cancels(server: Server, client: Client) -> None:
    with closing(client.stream(SLOW, request_id="closed", delay=GAP)) as chunks:
        assert next(chunks).text == "0 "
    wait_for(lambda: server.cancelled("closed"))


def test_break_cancels(server: Server, client: Client) -> None:
    for _ in client.stream(SLOW, request_id="broken", delay=GAP):
        break
    wait_for(lambda: server.cancelled("broken"))


def test_exception_cancels(server: Server, client: Client) -> None:
    def use() -> None:
        with closing(client.stream(SLOW, request_id="raised", delay=GAP)) as chunks:
            for _ in chunks:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    wait_for(lambda: server.cancelled("raised"))


def test_closing_the_client_ends_a_request(server: Server) -> None:
    client = Client(server.url)
    chunks = client.stream(SLOW, request_id="client-closed", delay=GAP)
    next(chunks)
    threading.Timer(0.1, client.close).start()
    with pytest.raises(SangamError, match="CANCELLED"):
        list(chunks)
    with pytest.raises(SangamError, match="closed"):
        client.generate("x")
    wait_for(lambda: server.cancelled("client-closed"))


def test_timeout_cancels(server: Server, client: Client) -> None:
    async def use() -> None:
        async with AsyncClient(server.url) as client:
            with pytest.raises(SangamError, match=r"^timed out after 0\.2 s$"):
                await client.generate(SLOW, request_id="late-async", delay=GAP, timeout=0.2)

    for call in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
        with pytest.raises(SangamError, match=r"^timed out after 0\.2 s$"):
            call(SLOW, request_id="late", delay=GAP, timeout=0.2)
    asyncio.run(use())
    wait_for(lambda: server.cancelled("late") and server.cancelled("late-async"))


def test_eight_threads_share_a_client(client: Client) -> None:
    def use(thread: int) -> None:
        for number in range(20):
            prompt = f"thread {thread} request {number}"
            assert "".join(chunk.text for chunk in client.stream(prompt)) == prompt

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))


def test_async_requests_at_once(server: Server) -> None:
    async def use() -> None:
        async with AsyncClient(server.url) as client:
            assert await client.is_ready()
            start = time.monotonic()
            prompts = [f"request {number} of many" for number in range(50)]
            done = await asyncio.gather(*(client.generate(p, delay=0.1) for p in prompts))
            assert [completion.text for completion in done] == prompts
            assert time.monotonic() - start < 10  # 20 s one after the other
            assert [chunk.output_ids async for chunk in client.stream([4, 2])] == [[4], [2], []]

    asyncio.run(use())


def test_async_cancel(server: Server) -> None:
    async def use() -> None:
        async with AsyncClient(server.url) as client:
            task = asyncio.create_task(client.generate(SLOW, request_id="task", delay=GAP))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            chunks = client.stream(SLOW, request_id="aclose", delay=GAP)
            assert (await anext(chunks)).text == "0 "
            await chunks.aclose()
            async for _ in client.stream(SLOW, request_id="async-break", delay=GAP):
                break
            names = ("task", "aclose", "async-break")
            await asyncio.to_thread(wait_for, lambda: all(map(server.cancelled, names)))

    asyncio.run(use())


def test_closing_the_async_client_ends_a_request(server: Server) -> None:
    async def use() -> None:
        client = AsyncClient(server.url)
        task = asyncio.create_task(
            client.generate(SLOW, request_id="async-client-closed", delay=GAP)
        )
        await asyncio.sleep(0.2)
        await client.close()
        with pytest.raises(SangamError, match="closed"):
            await task
        with pytest.raises(SangamError, match="closed"):
            await client.generate("x")

    asyncio.run(use())
    wait_for(lambda: server.cancelled("async-client-closed"))


def command(server: Server, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "sangam_client.cli", "--url", server.url, *arguments]


def run(server: Server, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(server, *arguments), input=stdin, capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize("how", [[], ["--stream"]])
def test_command(server: Server, how: list[str]) -> None:
    done = run(server, WORDS, "--max-tokens", "4", *how)
    assert (done.returncode, done.stdout.rstrip("\n")) == (0, "the quick  brown fox")
    usage = done.stderr.strip()
    assert usage.startswith("6 prompt tokens, 4 generated tokens, ")
    assert usage.endswith(" tokens/s, length")
    assert "\n" not in usage


def test_command_options(server: Server) -> None:
    options = "--temperature 0.5 --top-p 0.9 --top-k 3 --seed 7 --stop a --stop b --unmasking quota"
    more = ["--set", "show=true", "--set", "tokens_per_step=2", "--set", "confidence=margin"]
    done = run(server, "-", "--chat", "--system", "be brief", *options.split(), *more, stdin="hi")
    seen = json.loads(done.stdout)
    assert json.loads(seen["messages"][0]) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert json.loads(seen["sampling_parameters"][0]) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 7,
        "stop": ["a", "b"],
        "unmasking": "quota",
        "show": True,
        "tokens_per_step": 2,
        "confidence": "margin",
    }


def test_command_errors(server: Server) -> None:
    done = run(server, "fail")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"sangam-client: {FAIL}\n".replace("\nsecond", " second")
    assert run(server, "x", "--system", "y").returncode == 2
    assert run(server, "x", "--set", "y").returncode == 2


def test_command_interrupted(server: Server) -> None:
    # A test run in the background of a shell would hand down an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command(server, SLOW, "--stream", "--set", f"delay={GAP}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(2) == b"0 ", process.communicate()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, b"")
    wait_for(lambda: server.cancelled("unnamed"))
