"""Makes a trace of a public data set that you have downloaded. README.md has the formats.

    python perf/traces/prepare.py sharegpt ShareGPT_V3_unfiltered_cleaned_split.json \\
        --model GSAI-ML/LLaDA-8B-Instruct --rate 4 --output sharegpt.jsonl
    python perf/traces/prepare.py arxiv test.jsonl --model CHECKPOINT --output arxiv.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from sangam_backend.config import ConfigError
from sangam_backend.models import find_checkpoint, read_config
from sangam_backend.text import Tokenizer

INSTRUCTION = "Summarise this article:\n\n"


class Pair(NamedTuple):
    prompt: str
    answer: str


def read_sharegpt(path: Path) -> list[Pair]:
    """The first turn of each conversation that a person opens and the model answers."""
    pairs = []
    for entry in json.loads(path.read_text()):
        turns = entry["conversations"][:2]
        if [turn["from"] for turn in turns] == ["human", "gpt"]:
            pairs.append(Pair(turns[0]["value"], turns[1]["value"]))
    return pairs


def read_arxiv(path: Path) -> list[Pair]:
    with path.open() as file:
        entries = [json.loads(line) for line in file]
    return [Pair(INSTRUCTION + entry["article"], entry["abstract"]) for entry in entries]


READERS = {"sharegpt": read_sharegpt, "arxiv": read_arxiv}


def load_tokenizer(model: str) -> Tokenizer:
    """Raises ConfigError for a checkpoint that cannot be had or has no tokenizer."""
    directory = find_checkpoint(model, "dummy")
    tokenizer = Tokenizer.load(directory, read_config(directory)[0].family)
    if tokenizer is None:
        raise ConfigError(f"model is {model!r}: no tokenizer in {directory}")
    return tokenizer


class Limits(NamedTuple):
    """In tokens."""

    prompt: int
    answer: int


def make_entry(
    pair: Pair, tokenizer: Tokenizer, limits: Limits, cut: bool
) -> dict[str, Any] | None:
    """A line without its arrival; None when a text is empty or too long.

    `cut` shortens a prompt that is too long instead.
    """

    def chat(prompt: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt}]

    # Public dumps hold halves of surrogate pairs, which no tokenizer takes.
    prompt, answer = (text.encode(errors="replace").decode().strip() for text in pair)
    length = len(tokenizer.encode_chat(chat(prompt)))
    if cut and length > limits.prompt:
        ids = tokenizer.encode(prompt)
        prompt = tokenizer.decode(ids[: max(0, len(ids) - length + limits.prompt)])
        length = len(tokenizer.encode_chat(chat(prompt)))
    answer_length = len(tokenizer.encode(answer))
    if not prompt or length > limits.prompt or not 0 < answer_length <= limits.answer:
        return None
    return {"prompt_tokens": length, "max_tokens": answer_length, "messages": chat(prompt)}


def make_trace(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    tokenizer = load_tokenizer(args.model)
    limits = Limits(args.max_prompt_tokens, args.max_answer_tokens)
    rng = random.Random(args.seed)
    pairs = READERS[args.kind](args.input)
    rng.shuffle(pairs)
    made = (make_entry(pair, tokenizer, limits, args.kind == "arxiv") for pair in pairs)
    arrival = 0.0
    for entry in islice(filter(None, made), args.requests):
        yield entry | {"arrival": round(arrival, 3)}
        if args.rate:
            arrival += rng.expovariate(args.rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=list(READERS))
    parser.add_argument("input", type=Path)
    parser.add_argument("--model", required=True, help="checkpoint whose tokenizer counts")
    parser.add_argument("--requests", type=int, default=1000, help="drawn at random, at most")
    parser.add_argument("--rate", type=float, default=0.0,
                        help="Poisson arrivals, requests/s; 0: all at once")  # fmt: skip
    parser.add_argument("--max-prompt-tokens", type=int, default=1500)
    parser.add_argument("--max-answer-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines")
    args = parser.parse_args()
    try:
        entries = list(tqdm(make_trace(args), total=args.requests, unit="request"))
    except (KeyError, TypeError) as error:
        parser.exit(1, f"prepare: {args.input} is not a {args.kind} file: {error!r}\n")
    except (ConfigError, OSError, ValueError) as error:
        parser.exit(1, f"prepare: {error}\n")
    args.output.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    print(f"{args.output}: {len(entries)} requests")


if __name__ == "__main__":
    main()
