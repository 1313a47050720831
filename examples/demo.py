"""The demo of `make demo`: a real server, real questions, answers shown as they are committed."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sangam_client import Client

LOG = Path("demo-server.log")
QUESTIONS = (
    "Add 4363 and 75.",
    "Subtract 582 from 867.",
    "Sort these numbers: 26, 12, 62, 7, 99, 31.",
    "Reverse the word house.",
    "Ray has 59 cards and gives away 57. How many cards now?",
    "Repeat: the cat sat on a mat by night",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory or hub id")
    parser.add_argument("--startup-timeout", type=float, default=300, metavar="SECONDS")
    args = parser.parse_args()
    with ExitStack() as stack:
        url = stack.enter_context(running_server(args.model, args.startup_timeout))
        client = stack.enter_context(Client(url))
        for question in QUESTIONS:
            ask(client, question)


def ask(client: Client, question: str) -> None:
    """Streams one answer: each piece of text in brackets, as it was committed."""
    print(f"\n> {question}\n  ", end="")
    started = time.perf_counter()
    prompt_tokens = tokens = 0
    reason = None
    for chunk in client.stream([{"role": "user", "content": question}], max_tokens=96):
        print(f"[{chunk.text}]" if chunk.text else "", end="", flush=True)
        prompt_tokens = chunk.num_input_tokens or prompt_tokens
        tokens += chunk.num_output_tokens or 0
        reason = chunk.finish_reason or reason
    seconds = time.perf_counter() - started
    speed = f"{tokens / seconds:.0f} tokens/s"
    print(f"\n  {prompt_tokens} prompt tokens, {tokens} generated, {reason}, {speed}")


@contextmanager
def running_server(model: str, startup_timeout: float) -> Iterator[str]:
    """A server on free ports, stopped at the end. Gives its gRPC address."""
    http, grpc, metrics = free_ports(3)
    command = [sys.executable, "-m", "sangam_backend.cli", "serve", "--model", model]
    command += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    url = f"127.0.0.1:{grpc}"
    print(f"Starting a Triton server on {model}, its log is in {LOG}")
    with LOG.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until_ready(process, url, startup_timeout)
            yield url
        finally:
            process.terminate()
            status = process.wait(60)
    if status:
        sys.exit(f"the server ended with status {status}, see {LOG}")
    print("\nThe server has stopped.")


def wait_until_ready(process: subprocess.Popen[bytes], url: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with Client(url) as client:
        while not client.is_ready():
            if process.poll() is not None:
                sys.exit(f"the server did not start:\n{LOG.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                sys.exit(f"the server was not ready after {timeout:g} s")
            time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


if __name__ == "__main__":
    main()
