"""The header `traceparent` of W3C Trace Context."""

from __future__ import annotations

import re

TRACEPARENT = "traceparent"
"""Names the header, and the request parameter that Triton makes of it."""
_FORM = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})"
    r"-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<rest>-.*)?"
)


def trace_id_of(traceparent: object) -> str:
    """The trace id, 32 hexadecimal digits; empty for a malformed header, which counts as none.

    Versions after 00 may have more behind the 55 characters.
    """
    match = _FORM.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if match is None or (match["version"] == "00" and match["rest"] is not None):
        return ""
    return match["trace"]
