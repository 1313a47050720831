"""Any tensors at all: each request gets one end, and a good one beside it its right answer."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.harness import CHAT, DATATYPES, GOOD, Serving, Stream, wait_for
from tritonclient import grpc as tritongrpc

from sangam_backend.parameters import KNOWN

EXAMPLES = int(os.environ.get("SANGAM_FUZZ_EXAMPLES", "25"))
TIMEOUT = 500_000
"""Microseconds of a request that happens to be valid and long."""

NAMES = [*DATATYPES, "text_input", "messages", "sampling_parameters"]
SIZES = {"BOOL": 1, "INT8": 1, "UINT8": 1, "INT16": 2, "INT32": 4, "INT64": 8, "FP32": 4}
NUMBERS = st.one_of(
    st.integers(-2, 40),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, 1, 16, 10**9, 1e308, float("nan"), float("inf"), -0.0]),
)
VALUES = st.one_of(
    NUMBERS,
    st.booleans(),
    st.none(),
    st.text(max_size=20),
    st.lists(st.one_of(NUMBERS, st.text(max_size=5)), max_size=20),
    st.sampled_from(["threshold", "factor", "quota", "steps", "random", "margin", "entropy"]),
)
KEYS = st.sampled_from(KNOWN)
SAMPLING = st.dictionaries(st.one_of(KEYS, KEYS, st.text(max_size=8)), VALUES, max_size=4)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text()}),
    st.dictionaries(st.sampled_from(["role", "content", "x"]), VALUES),
    VALUES,
)
GOOD_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "input_ids": st.lists(st.integers(0, 319), min_size=1, max_size=40),
    "text_input": st.text(min_size=1, max_size=60),
    "messages": st.lists(MESSAGE, max_size=3),
    "sampling_parameters": SAMPLING,
    "max_tokens": st.integers(1, 24),
    "min_length": st.integers(0, 4),
}


@st.composite
def wild_tensors(draw: st.DrawFn, name: str) -> Any:
    """Of a random type and shape, its bytes not always as many as those say."""
    datatype = draw(st.sampled_from([*SIZES, "BYTES"]))
    shape = draw(st.sampled_from([[1], [1], [0], [2], [1, 1], [7], []]))
    made = tritongrpc.InferInput(name, shape, datatype)
    count = int(np.prod(shape))
    if datatype == "BYTES":
        texts = [draw(st.binary(max_size=30)) for _ in range(count)]
        data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    else:
        data = draw(st.binary(min_size=count * SIZES[datatype], max_size=count * SIZES[datatype]))
    # tritonclient itself would refuse what does not fit together.
    made._raw_content = data[:-1] if draw(st.integers(0, 9)) == 0 else data
    return made


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and request parameters."""
    prompts = ["text_input", "messages", "input_ids"]
    names = {draw(st.sampled_from(prompts)), *draw(st.lists(st.sampled_from(NAMES), max_size=4))}
    inputs = {}
    for name in sorted(names):
        kind = draw(st.integers(0, 9))
        if kind == 0:
            inputs[name] = draw(wild_tensors(name))
        elif kind == 1 and name not in DATATYPES:
            inputs[name] = draw(st.binary(max_size=40))
        elif kind == 2 and name in ("max_tokens", "min_length", "input_ids"):
            inputs[name] = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=2))
        else:
            inputs[name] = draw(GOOD_VALUES.get(name, st.booleans()))
    if draw(st.integers(0, 19)) == 0:
        inputs["nobody_knows"] = draw(wild_tensors("nobody_knows"))
    simple = st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.text(max_size=9))
    parameters = draw(st.dictionaries(KEYS, simple, max_size=2))
    return inputs, {"max_tokens": 8} | parameters


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="SANGAM_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(requests())
def ask_anything(
    server: Serving, good_ids: list[int], request: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    inputs, parameters = request
    neighbour, stream = Stream(server.grpc_url), Stream(server.grpc_url)
    neighbour.send({"messages": CHAT, "sampling_parameters": GOOD})
    stream.send(inputs, parameters, timeout=TIMEOUT)
    answer = stream.receive()
    assert bool(answer.error) != bool(answer.finals)
    assert "[INTERNAL]" not in (answer.error or ""), answer.error
    assert len(answer.error or "") < 1000
    good = neighbour.receive()
    assert (good.error, good.ids) == (None, good_ids)
    # What would follow an end comes before the answer to the next request.
    stream.send({"text_input": "a", "max_tokens": 1})
    after = stream.receive()
    assert (after.error, after.finals, len(after.pieces)) == (None, 1, 1)
    stream.close()
    neighbour.close()


def test_any_tensors_end_in_an_answer_or_an_error(server: Serving, good_ids: list[int]) -> None:
    ask_anything(server, good_ids)
    wait_for(server.is_idle)
    assert server.http("/v2/health/ready")[0] == 200
