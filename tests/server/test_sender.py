"""The rules that keep Triton 24.10 alive, against a sender that knows them."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sangam_backend.request import ErrorCode, RequestError

FINAL = 1


class FakeTensor:
    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array = name, array


class FakeError(Exception):
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = range(4)


class FakeSender:
    """As Triton's, which crashes the server where this one fails."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []
        self.over = False

    def send(self, response: Any, flags: int) -> None:
        assert not self.over
        self.over = flags == FINAL
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        assert not self.over
        return True


@pytest.fixture
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("triton_python_backend_utils")
    module.__dict__.update(
        Tensor=FakeTensor,
        TritonError=lambda message, code: (message, code),
        TritonModelException=FakeError,
        InferenceResponse=lambda tensors=None, error=None: SimpleNamespace(error=error),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )
    module.TritonError.__dict__.update(vars(FakeError))
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    for name in ("sender", "wire", "model"):
        monkeypatch.delitem(sys.modules, f"sangam_backend.server.{name}", raising=False)
    return module


def new_sender(sender: FakeSender) -> Any:
    return importlib.import_module("sangam_backend.server.sender").Sender(sender)


@pytest.mark.usefixtures("pb_utils")
def test_nothing_touches_the_sender_after_the_final_flag() -> None:
    sender = FakeSender()
    guarded = new_sender(sender)
    assert guarded.is_cancelled()
    guarded.send("a", final=False)
    guarded.send("b", final=True)
    guarded.send("c", final=False)
    guarded.refuse(RequestError(ErrorCode.INTERNAL, "late"))
    assert not guarded.is_cancelled()
    assert sender.sent == [("a", 0), ("b", FINAL)]


@pytest.mark.usefixtures("pb_utils")
def test_a_refusal_is_final_and_names_its_code() -> None:
    sender = FakeSender()
    new_sender(sender).refuse(RequestError(ErrorCode.UNAVAILABLE, "full"))
    ((response, flags),) = sender.sent
    assert (response.error, flags) == (("[UNAVAILABLE] full", FakeError.UNAVAILABLE), FINAL)


@pytest.mark.usefixtures("pb_utils")
def test_many_threads_end_a_guarded_once() -> None:
    for _ in range(50):
        sender = FakeSender()
        guarded = new_sender(sender)
        failures: list[BaseException] = []

        def use(guarded: Any = guarded, failures: list[BaseException] = failures) -> None:
            try:
                guarded.is_cancelled()
                guarded.send("end", final=True)
                guarded.is_cancelled()
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (failures, sender.sent) == ([], [("end", FINAL)])


@pytest.mark.usefixtures("pb_utils")
def test_the_model_refuses_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    model = importlib.import_module("sangam_backend.server.model").TritonPythonModel()
    monkeypatch.setattr(np, "__version__", "2.0.0")
    with pytest.raises(FakeError, match=r"NumPy is 2\.0\.0.*pip install 'numpy<2'"):
        model.initialize({})
