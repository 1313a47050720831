"""A short soak with killed engines; perf/soak.py runs longer ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from server.harness import ROOT, TINY


def test_soak(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "perf" / "soak.py"), f"--model={TINY}", "--mode=hybrid"]
    command += ["--seconds=16", "--kill-every=4", f"--log={tmp_path / 'log'}"]
    command += ["--serve=--kv-cache-tokens=8192 --prefill-overflow-tokens=300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    seen = json.loads(done.stdout.splitlines()[0])
    assert seen["kills"] > 0
    assert seen["outcomes"]["right"] > 10
    assert {"bad", "timeout"} <= seen["outcomes"].keys()
