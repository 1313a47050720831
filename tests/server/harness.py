"""Starts `sangam serve` and talks to it as a Triton client does."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient import grpc as tritongrpc

from sangam_backend.background import free_ports
from sangam_backend.leftovers import memory_of
from sangam_backend.processes import children
from sangam_backend.scrape import HELD_REQUESTS, read_metrics

ROOT = Path(__file__).parents[2]
TINY = ROOT / "checkpoints" / "tiny-llada"
SANGAM = [sys.executable, "-m", "sangam_backend.cli"]
START_SECONDS = 120
ANSWER_SECONDS = 60

DATATYPES = {
    "input_ids": ("INT32", np.int32),
    "max_tokens": ("INT32", np.int32),
    "min_length": ("INT32", np.int32),
    "stream": ("BOOL", np.bool_),
    "exclude_input_in_output": ("BOOL", np.bool_),
    "return_finish_reason": ("BOOL", np.bool_),
    "return_num_input_tokens": ("BOOL", np.bool_),
    "return_num_output_tokens": ("BOOL", np.bool_),
    "return_num_forwards": ("BOOL", np.bool_),
}
EVERYTHING = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_num_forwards": True,
}

CHAT = [{"role": "user", "content": "Reverse the letters h o u s e."}]
GOOD = {"unmasking": "quota", "ignore_eos": True, "max_tokens": 24}


@dataclass
class Answer:
    """All responses to one request, in order."""

    pieces: list[dict[str, Any]] = field(default_factory=list)
    finals: int = 0
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(piece["text_output"] for piece in self.pieces)

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece["output_ids"]]

    @property
    def finish_reason(self) -> str:
        return str(self.pieces[-1]["finish_reason"])


class Stream:
    """A tritonclient with one gRPC stream, on which requests follow one another."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self._client = tritongrpc.InferenceServerClient(url)
        self._responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(
            lambda result, error: self._responses.put((result, error)), headers=headers
        )

    def send(
        self,
        inputs: Mapping[str, Any],
        parameters: Mapping[str, Any] | None = None,
        timeout: int | None = None,
    ) -> None:
        """The timeout is in microseconds."""
        self._client.async_stream_infer(
            "sangam",
            [tensor(name, value) for name, value in inputs.items()],
            parameters=dict(parameters or {}),
            timeout=timeout,
            enable_empty_final_response=True,
        )

    def receive(self) -> Answer:
        """The whole answer to a request sent."""
        answer = Answer()
        while not (answer.finals or answer.error):
            self.receive_into(answer)
        return answer

    def receive_into(self, answer: Answer) -> None:
        result, error = self._responses.get(timeout=ANSWER_SECONDS)
        if error is not None:
            answer.error = error.message()
            return
        if piece := read_outputs(result):
            answer.pieces.append(piece)
        response = result.get_response()
        answer.finals += response.parameters["triton_final_response"].bool_param

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def tensor(name: str, value: Any) -> Any:
    """An input under the type it has in config.pbtxt; an InferInput goes as it is."""
    if isinstance(value, tritongrpc.InferInput):
        return value
    datatype, dtype = DATATYPES.get(name, ("BYTES", np.object_))
    if datatype == "BYTES" and not isinstance(value, str | bytes):
        value = json.dumps(value)
    data = value.encode() if isinstance(value, str) else value
    return raw_tensor(name, datatype, np.array(data, dtype=dtype).reshape(-1))


def raw_tensor(name: str, datatype: str, array: Any) -> Any:
    made = tritongrpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def read_outputs(result: Any) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for output in result.get_response().outputs:
        values = result.as_numpy(output.name).reshape(-1).tolist()
        if output.datatype == "BYTES":
            outputs[output.name] = b"".join(values).decode()
        elif output.name == "output_ids":
            outputs[output.name] = values
        else:
            (outputs[output.name],) = values
    return outputs


@dataclass
class Serving:
    """A running `sangam serve`."""

    process: subprocess.Popen[bytes]
    ports: Sequence[int]
    log: Path

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.ports[1]}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.ports[2]}/metrics"

    def ask(self, inputs: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> Answer:
        """Sends one request on a stream of its own."""
        stream = Stream(self.grpc_url)
        try:
            stream.send(inputs, parameters)
            return stream.receive()
        finally:
            stream.close()

    def http(self, path: str, body: Any = None, port: int = 0) -> tuple[int, str]:
        """GET, or POST of a JSON body (or of bytes as they are)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[port], ANSWER_SECONDS)
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data)
        with contextlib.closing(connection), connection.getresponse() as response:
            return response.status, response.read().decode()

    def generate(self, body: Any) -> tuple[int, str]:
        return self.http("/v2/models/sangam/generate", body)

    def gauges(self) -> dict[str, float]:
        """The gauges of the project, summed over the instances."""
        return read_metrics(self.metrics_url)

    def totals(self) -> dict[str, float]:
        """As `gauges`, with the labels but model and instance in the names."""
        _, text = self.http("/metrics", port=2)
        sums: dict[str, float] = {}
        for name, labels, value in re.findall(r"^(sangam_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            own = re.sub(r'(model|instance)="[^"]*",?', "", labels).rstrip(",")
            key = f"{name}{{{own}}}" if own else name
            sums[key] = sums.get(key, 0) + float(value)
        return sums

    def outcomes(self, outcome: str) -> float:
        """Requests that have ended so."""
        return self.totals().get(f'sangam_requests_total{{outcome="{outcome}"}}', 0)

    def is_idle(self) -> bool:
        gauges = self.gauges()
        return not any(gauges[name] for name in (*HELD_REQUESTS, "sangam_kv_pages_used"))

    def tree(self) -> tuple[int, list[int]]:
        """The processes under the command: tritonserver, and its stubs."""
        (triton,) = children(self.process.pid)
        return triton, children(triton)

    def engines(self, model: str = "sangam", number: str = "") -> list[int]:
        """The engine processes of a model's instances, or of the one with this number."""
        named = f"{model}_0_{number}".encode()
        stubs = [p for p in self.tree()[1] if named in Path(f"/proc/{p}/cmdline").read_bytes()]
        return [engine for stub in stubs for engine in children(stub)]

    def regions(self) -> list[Path]:
        return memory_of(self.process.pid)


@contextlib.contextmanager
def serving(
    log: Path, *options: str, model: Path = TINY, ports: Sequence[int] = ()
) -> Iterator[Serving]:
    """Starts the command, waits until it is ready, and ends it, if need be by SIGKILL."""
    with launched(log, *options, model=model, ports=ports) as server:
        wait_for(lambda: "Sangam is ready" in log.read_text(), START_SECONDS, server.process)
        yield server


@contextlib.contextmanager
def launched(
    log: Path, *options: str, model: Path = TINY, ports: Sequence[int] = ()
) -> Iterator[Serving]:
    ports = ports or free_ports(3)
    named = zip(("--http-port", "--grpc-port", "--metrics-port"), map(str, ports))
    command = [*SANGAM, "serve", "--model", str(model)]
    command += [*(word for pair in named for word in pair), *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    server = Serving(process, ports, log)
    try:
        yield server
    finally:
        process.terminate()
        try:
            process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in [*children(process.pid), process.pid]:
                os.kill(pid, signal.SIGKILL)
            raise


def run_sangam(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SANGAM, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=ANSWER_SECONDS,
    )


def wait_for(
    condition: Callable[[], bool],
    seconds: float = ANSWER_SECONDS,
    process: subprocess.Popen[bytes] | None = None,
) -> float:
    """Seconds it took until the condition held; fails when a process needed for it ends.

    The time is for a slow machine: what must be quick has a test of its own.
    """
    start = time.monotonic()
    while not condition():
        assert process is None or process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() - start < seconds, f"not so within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - start
