"""Many clients at once, some of which leave; the others must not notice."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from server.harness import EVERYTHING, TINY, Serving, Stream, run_sangam, wait_for

REQUESTS = 200
SECONDS = 8.0
"""Over which the requests arrive."""
PROCESSES = 4
"""Of clients that are killed, and hold a sixth of the requests."""
WORDS = ("Add 4363 and 75.", "Sort these numbers: 26, 12, 62.", "Reverse the word house.")


def make_line(number: int) -> dict[str, Any]:
    """A request as a line for `sangam generate`."""
    draw = random.Random(number)
    sampling: dict[str, Any] = {
        "max_tokens": draw.randint(1, 70),
        "temperature": draw.choice([0.0, 0.7, 1.0]),
        "seed": draw.randrange(1 << 40),
        "ignore_eos": draw.random() < 0.7,
        "block_length": draw.choice([8, 16, 32]),
        "confidence": draw.choice(["probability", "margin", "entropy", "random"]),
    }
    sampling |= draw.choice(
        [
            {"unmasking": "threshold", "confidence_threshold": draw.uniform(0.3, 0.95)},
            {"unmasking": "factor", "factor": draw.uniform(0.5, 4.0)},
            {"unmasking": "quota", "tokens_per_step": draw.randint(1, 6)},
            {"unmasking": "random"},
            {"unmasking": "steps", "steps": draw.randint(9, 30)},
        ]
    )
    prompt: dict[str, Any] = {"text_input": draw.choice(WORDS)}
    if draw.random() < 0.8:
        prompt = {"input_ids": [draw.randrange(262) for _ in range(draw.randint(1, 120))]}
    return {"id": str(number), **prompt, "sampling_parameters": sampling}


def inputs_of(line: dict[str, Any], stream: bool) -> dict[str, Any]:
    prompt = {name: line[name] for name in ("input_ids", "text_input") if name in line}
    sampling = {"sampling_parameters": line["sampling_parameters"]}
    return {**prompt, **sampling, **EVERYTHING, "stream": stream, "exclude_input_in_output": True}


def ask(server: Serving, line: dict[str, Any]) -> dict[str, Any]:
    draw = random.Random(line["id"])
    time.sleep(draw.uniform(0, SECONDS))
    answer = server.ask(inputs_of(line, stream=draw.random() < 0.5))
    assert (answer.error, answer.finals) == (None, 1)
    return {
        "id": line["id"],
        "output_ids": answer.ids,
        "text_output": answer.text,
        "finish_reason": answer.finish_reason,
    }


def ask_and_cancel(server: Serving, line: dict[str, Any]) -> None:
    draw = random.Random(line["id"])
    time.sleep(draw.uniform(0, SECONDS))
    stream = Stream(server.grpc_url)
    # Triton 24.10 may crash when a cancel meets a response that is being written.
    stream.send(inputs_of(line, stream=False))
    time.sleep(draw.uniform(0, 0.3))
    stream.close(cancel=True)


def be_killed(url: str, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        Stream(url).send(inputs_of(line, stream=False))
        time.sleep(0.5)
    time.sleep(60)


def kill_clients(server: Serving, lines: list[dict[str, Any]]) -> None:
    spawn = multiprocessing.get_context("spawn")
    for number in range(PROCESSES):
        client = spawn.Process(target=be_killed, args=(server.grpc_url, lines[number::PROCESSES]))
        client.start()
        time.sleep(random.Random(number).uniform(3, 5))
        client.kill()
        client.join()


def generated(lines: list[dict[str, Any]], folder: Path, *options: str) -> list[dict[str, Any]]:
    """What `sangam generate` answers."""
    source, target = folder / "input.jsonl", folder / "output.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("--model", str(TINY), "--input", str(source), "--output", str(target))
    done = run_sangam("generate", *files, *options)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    for answer in answers:
        del answer["num_forwards"]
    return answers


def test_storm(server: Serving, tmp_path: Path) -> None:
    lines = [make_line(number) for number in range(REQUESTS)]
    leaving, staying = lines[: REQUESTS // 3], lines[REQUESTS // 3 :]
    cancelled, killed = leaving[::2], leaving[1::2]
    with ThreadPoolExecutor(REQUESTS) as pool:
        cancels = [pool.submit(ask_and_cancel, server, line) for line in cancelled]
        kills = pool.submit(kill_clients, server, killed)
        answers = list(pool.map(lambda line: ask(server, line), staying))
        for cancel in [*cancels, kills]:
            cancel.result()
    wait_for(server.is_idle, 5)
    assert answers == generated(staying, tmp_path, "--max-batch-size", "1")
    assert server.ask({"text_input": WORDS[0], "max_tokens": 4}).error is None


def test_a_cancelled_request_frees_its_pages_at_once(server: Serving) -> None:
    sampling = {"unmasking": "quota", "ignore_eos": True, "max_tokens": 1024}
    wait_for(server.is_idle, 5)
    stream = Stream(server.grpc_url)
    stream.send({"text_input": WORDS[0], "sampling_parameters": sampling})
    wait_for(lambda: server.gauges()["sangam_kv_pages_used"] > 0, 5)
    stream.close(cancel=True)
    wait_for(server.is_idle, 2)
