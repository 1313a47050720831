"""The demo of `make demo`: a real server, real questions, answers shown as they are committed."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from sangam_client import Client

from sangam_backend.background import background_server

LOG = Path("demo-server.log")
QUESTIONS = (
    "Add 4363 and 75.",
    "Subtract 582 from 867.",
    "Sort these numbers: 26, 12, 62, 7, 99, 31.",
    "Reverse the letters h o u s e.",
    "Ray has 59 cards and gives away 57. How many cards now?",
    "Give the running totals of 3, 9, 4, 7, 5.",
    "Name 9 months from March.",
    "Ann likes red. Bob eats rice. Cal keeps bees. What does Cal keep? Which color does Ann like?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory or hub id")
    parser.add_argument("--startup-timeout", type=float, default=300, metavar="SECONDS")
    args = parser.parse_args()
    print(f"Starting a Triton server on {args.model}, its log is in {LOG}")
    with (
        background_server(["--model", args.model], LOG, args.startup_timeout) as server,
        Client(server.url) as client,
    ):
        for question in QUESTIONS:
            ask(client, question)
    if status := server.process.returncode:
        sys.exit(f"the server ended with status {status}, see {LOG}")
    print("\nThe server has stopped.")


def ask(client: Client, question: str) -> None:
    """Streams one answer: each piece of text in brackets, as it was committed."""
    print(f"\n> {question}\n  ", end="")
    started = time.perf_counter()
    prompt_tokens = tokens = forwards = 0
    reason = None
    for chunk in client.stream([{"role": "user", "content": question}], max_tokens=96):
        print(f"[{chunk.text}]" if chunk.text else "", end="", flush=True)
        prompt_tokens = chunk.num_input_tokens or prompt_tokens
        tokens += chunk.num_output_tokens or 0
        forwards = chunk.num_forwards or forwards
        reason = chunk.finish_reason or reason
    seconds = time.perf_counter() - started
    generated = f"{tokens} generated in {forwards} forward{'s' * (forwards != 1)}"
    speed = f"{tokens / seconds:.0f} tokens/s"
    print(f"\n  {prompt_tokens} prompt tokens, {generated}, {reason}, {speed}")


if __name__ == "__main__":
    main()
