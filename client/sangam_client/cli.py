"""The command sangam-client: one prompt, its text on stdout, one line of usage on stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from sangam_client import connection, wire
from sangam_client.wire import Chunk, Completion, Prompt, SangamError

SAMPLING: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "seed": int,
    "unmasking": str,
}


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.system is not None and not args.chat:
        parser.error("--system needs --chat")
    try:
        _run(args)
    except SangamError as error:
        print(f"sangam-client: {' '.join(error.message.split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(args: argparse.Namespace) -> None:
    prompt, sampling = _prompt(args), _sampling(args)
    start = time.perf_counter()
    with connection.connect(args, args.model) as client:
        if args.stream:
            completion = wire.join(_printed(client.stream(prompt, **sampling)))
            print()
        else:
            completion = client.generate(prompt, **sampling)
            print(completion.text, flush=True)
    print(_usage(completion, time.perf_counter() - start), file=sys.stderr)


def _printed(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
        yield chunk


def _usage(completion: Completion, seconds: float) -> str:
    generated = completion.num_output_tokens or 0
    return (
        f"{completion.num_input_tokens} prompt tokens, {generated} generated tokens, "
        f"{completion.num_forwards} forwards, "
        f"{seconds:.2f} s, {generated / seconds:.1f} tokens/s, {completion.finish_reason}"
    )


def _prompt(args: argparse.Namespace) -> Prompt:
    text = sys.stdin.read() if args.prompt == "-" else str(args.prompt)
    if not args.chat:
        return text
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    named = {key: getattr(args, key) for key in (*SAMPLING, "stop")}
    return {key: value for key, value in named.items() if value is not None} | dict(args.set)


def _setting(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("sangam-client", description="Ask a Sangam server.")
    parser.add_argument("prompt", help="the prompt, or - to read it from stdin")
    parser.add_argument("--stream", action="store_true", help="print the text as it commits")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    for key, kind in SAMPLING.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=kind, metavar=kind.__name__.upper())
    parser.add_argument("--stop", action="append", metavar="S", help="repeatable")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help="any other sampling parameter, VALUE as JSON or else a string; repeatable",
    )
    connection.add_options(parser)
    parser.add_argument("--model", default="sangam", metavar="NAME")
    return parser


if __name__ == "__main__":
    main()
