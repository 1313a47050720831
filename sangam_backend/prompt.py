"""The forms in which a client may give a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sangam_backend.parameters import invalid, read_json


@dataclass(frozen=True, slots=True)
class Prompt:
    """The three forms a prompt may have; exactly one is given."""

    input_ids: list[int] | None = None
    text_input: str | None = None
    messages: list[Any] | None = None

    def __post_init__(self) -> None:
        forms = ("text_input", "messages", "input_ids")
        given = [name for name in forms if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise invalid(f"exactly one of {', '.join(forms)} must be given, found {found}")


def parse_messages(text: str) -> list[Any]:
    """The messages input, a JSON list."""
    return read_json("messages", text, list)
