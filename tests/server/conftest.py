"""One server for all tests that leave it as they find it, and what it must answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from server.harness import CHAT, GOOD, TINY, Serving, serving
from server.jobs import REQUESTS, generated, make_line

from sangam_backend.config import EngineConfig
from sangam_backend.frontend import open_frontend
from sangam_backend.models import load_model
from sangam_backend.prompt import Prompt
from sangam_backend.reference import Predictor, ServingSampler, generate
from sangam_backend.request import Output


class Oracle:
    """The reference on the server's checkpoint, one request at a time."""

    def __init__(self) -> None:
        config = EngineConfig(model=str(TINY))
        self.model = load_model(config, torch.float32, torch.device("cpu"))
        self.frontend = open_frontend(self.model, config, pool_tokens=1 << 20)

    def answer(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Output:
        request = self.frontend.new_request("", prompt, sampling, stream=False)
        sampler = ServingSampler(request, self.model.config, cached=True)
        predictor = Predictor(self.model, request.sequence_length)
        (output,) = generate(request, predictor, sampler, "dual")
        return output


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="session")
def good_ids(oracle: Oracle) -> list[int]:
    return oracle.answer(Prompt(messages=CHAT), GOOD).ids


@pytest.fixture(scope="session")
def lines() -> list[dict[str, Any]]:
    """Mixed requests."""
    return [make_line(number) for number in range(REQUESTS)]


@pytest.fixture(scope="session")
def answers_alone(
    lines: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each of them gets when nothing else runs."""
    return generated(lines, tmp_path_factory.mktemp("alone"), "--max-batch-size", "1")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("server") / "log") as server:
        yield server
        assert server.process.poll() is None, "the server died: " + server.log.read_text()
