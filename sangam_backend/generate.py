"""`sangam generate`: a file of requests through the engine, or the reference, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from sangam_backend.config import EngineConfig
from sangam_backend.device import pick_device, pick_dtype
from sangam_backend.engine import Engine
from sangam_backend.frontend import Frontend, open_frontend
from sangam_backend.models import load_model
from sangam_backend.parameters import invalid
from sangam_backend.prompt import Prompt
from sangam_backend.reference import Predictor, ServingSampler, generate
from sangam_backend.request import Output, Request, RequestError

LINE_KEYS = ("id", "input_ids", "text_input", "messages", "sampling_parameters")


def run_engine(config: EngineConfig, input_file: Path, output_file: Path) -> None:
    """Generates every line, as many at once as the engine batches, in the order of the input."""
    engine = Engine(config)
    lines = _read_lines(input_file)
    results: dict[int, dict[str, Any]] = {}
    index_of: dict[Request, int] = {}
    with output_file.open("w") as file, tqdm(total=len(lines), unit="request") as bar:
        written = 0
        for index, line in enumerate(lines):
            try:
                request = _parse_line(line, engine.frontend)
            except RequestError as error:
                results[index] = _result(line, error=str(error))
                bar.update()
            else:
                index_of[request] = index
                engine.submit(request)
        while True:
            while written in results:
                _write(file, results.pop(written))
                written += 1
            if written == len(lines):
                break
            for request, output in engine.step():
                index = index_of.pop(request)
                results[index] = _finished(lines[index], request, output)
                bar.update()


def run_reference(config: EngineConfig, input_file: Path, output_file: Path) -> None:
    """Generates one line after the other with the plain loop."""
    device = pick_device(config.device)
    model = load_model(config, pick_dtype(config.dtype, device), device)
    frontend = open_frontend(model, config, pool_tokens=model.config.max_sequence_length)
    with output_file.open("w") as file:
        for line in tqdm(_read_lines(input_file), unit="request"):
            try:
                request = _parse_line(line, frontend)
            except RequestError as error:
                _write(file, _result(line, error=str(error)))
                continue
            predictor = Predictor(model, request.sequence_length)
            sampler = ServingSampler(request, model.config, cached=config.cache != "none")
            (output,) = generate(request, predictor, sampler, config.cache)
            _write(file, _finished(line, request, output))


def _read_lines(path: Path) -> list[Any]:
    """Each line's JSON value; one that is not JSON stays a string, and fails alone later."""

    def parse(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    with path.open() as file:
        return [parse(text) for text in file if text.strip()]


def _parse_line(line: Any, frontend: Frontend) -> Request:
    if not isinstance(line, dict):
        raise invalid("the line is not a JSON object")
    for key in line:
        if key not in LINE_KEYS:
            raise invalid(f"unknown key {key!r}, known are {', '.join(LINE_KEYS)}")
    for key, kind in (("input_ids", list), ("text_input", str), ("messages", list)):
        if not isinstance(line.get(key), (kind, type(None))):
            raise invalid(f"{key} must be a {kind.__name__}, not {type(line[key]).__name__}")
    sampling = line.get("sampling_parameters") or {}
    if not isinstance(sampling, dict):
        raise invalid("sampling_parameters must be a JSON object")
    prompt = Prompt(line.get("input_ids"), line.get("text_input"), line.get("messages"))
    return frontend.new_request(str(line.get("id", "")), prompt, sampling, stream=False)


def _finished(line: Any, request: Request, output: Output) -> dict[str, Any]:
    return _result(
        line,
        output_ids=output.ids,
        text_output=output.text,
        finish_reason=output.finish_reason.value if output.finish_reason else None,
        num_forwards=request.num_forwards,
    )


def _result(line: Any, **values: Any) -> dict[str, Any]:
    return {"id": line.get("id") if isinstance(line, dict) else None} | values


def _write(file: TextIO, result: dict[str, Any]) -> None:
    file.write(json.dumps(result, ensure_ascii=False) + "\n")
    file.flush()
