"""Two processes behind one Triton queue."""

from __future__ import annotations

import re
from pathlib import Path

from server.conftest import Oracle
from server.harness import Serving, Stream, serving, wait_for

from sangam_backend.prompt import Prompt

LONG = {"unmasking": "quota", "ignore_eos": True, "max_tokens": 96}
PROMPTS = [[72, 105], [66, 121, 101], [1, 2, 3, 4], [9], [8]]


def decoding(server: Serving) -> list[int]:
    """Requests that decode, by instance."""
    _, text = server.http("/metrics", port=2)
    return [int(n) for n in re.findall(r"^sangam_requests_decoding\{.*\} (\d+)$", text, re.M)]


def test_the_free_instance_takes_the_next_request(tmp_path: Path, oracle: Oracle) -> None:
    options = ("--instances", "2", "--backlog", "1", "--kv-cache-tokens", "4096")
    with serving(tmp_path / "log", *options) as server:
        assert len(server.tree()[1]) == 2
        streams = [Stream(server.grpc_url) for _ in PROMPTS]
        for stream, prompt in zip(streams, PROMPTS):
            stream.send({"input_ids": prompt, "sampling_parameters": LONG})
            if prompt is PROMPTS[1]:
                wait_for(lambda: decoding(server) == [1, 1])
        streams.pop().close(cancel=True)
        assert decoding(server) == [1, 1]
        for stream, prompt in zip(streams, PROMPTS):
            expected = oracle.answer(Prompt(input_ids=prompt), LONG)
            assert stream.receive().ids == expected.ids
            stream.close()
        wait_for(server.is_idle)
