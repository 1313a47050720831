"""What the documents state is what the code has."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig as TritonModelConfig

from sangam_backend import cli
from sangam_backend.config import EngineConfig
from sangam_backend.models import read_config
from sangam_backend.parameters import KNOWN
from sangam_backend.request import ErrorCode
from sangam_backend.server.readings import COUNTERS, GAUGES, HISTOGRAMS, HOST_GAUGES

ROOT = Path(__file__).parents[1]
OPERATING = (ROOT / "docs/operating.md").read_text()
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs/api.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def serve_options() -> list[argparse.Action]:
    (commands,) = (
        action
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    serve: argparse.ArgumentParser = commands.choices["serve"]
    return [a for a in serve._actions if a.option_strings and a.dest != "help"]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def flag_rows() -> dict[str, str]:
    """Of the table of flags: what it says of the default of each."""
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", OPERATING, re.MULTILINE)
    return {flag: default for named, default in rows for flag in flags_of(named)}


def test_every_flag_of_serve_is_in_the_table_and_no_other() -> None:
    rows = set(flag_rows())
    missing = [a.option_strings for a in serve_options() if not rows & set(a.option_strings)]
    assert missing == []
    assert rows - {name for action in serve_options() for name in action.option_strings} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_unknown_flag_is_mentioned(document: Path) -> None:
    known = {name for action in serve_options() for name in action.option_strings}
    for folder in ("sangam_backend", "client", "perf"):
        for source in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'"(--[a-z-]+)"', source.read_text()))
    known |= {f"--{key.replace('_', '-')}" for key in KNOWN}  # of sangam-client
    others = {"--shm-size", "--http-address", "--model-repository"}  # of docker and tritonserver
    others |= {"--grpc-header-forward-pattern"}
    assert flags_of(without_code(document.read_text())) - known - others == set()


def test_the_defaults_in_the_table() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    defaults |= {a.dest: a.default for a in serve_options() if a.default is not argparse.SUPPRESS}
    checked = 0
    for flag, cell in flag_rows().items():
        if stated := re.fullmatch(r"`([^-].*)`", cell):
            assert stated[1] == str(defaults[flag.removeprefix("--").replace("-", "_")]), flag
            checked += 1
    assert checked > 15


@pytest.mark.parametrize(("shape", "label"), [("llada-8b", "LLaDA-8B"), ("dream-7b", "Dream-7B")])
def test_the_bytes_of_a_token(shape: str, label: str) -> None:
    config, _ = read_config(ROOT / "perf/shapes" / shape)
    numbers = (config.num_layers, config.num_kv_heads, config.head_dim)
    row = " | ".join(map(str, (label, *numbers, f"{2 * config.kv_size_per_token:,}")))
    assert f"| {row} |" in OPERATING


def test_every_tensor_with_its_type() -> None:
    path = ROOT / "model_repository/colocated/sangam/config.pbtxt"
    config = text_format.Parse(path.read_text(), TritonModelConfig())
    types = TritonModelConfig.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number
    for tensor in (*config.input, *config.output):
        kind = types[tensor.data_type].name.removeprefix("TYPE_")
        assert re.search(rf"^\| `{tensor.name}` \| {kind} \[", API, re.MULTILINE), tensor.name


def test_every_sampling_parameter_has_its_row_and_no_other() -> None:
    table = API.partition("## Sampling parameters")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(KNOWN)


def test_every_error_code_has_its_row_and_no_other() -> None:
    rows = re.findall(r"^\| `\[(\w+)\]` \|", API, re.MULTILINE)
    assert sorted(rows) == sorted(code.value for code in ErrorCode)


def test_every_metric_is_listed_and_on_the_dashboard_and_no_other() -> None:
    parts = {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    metrics = {*GAUGES, *HOST_GAUGES, *COUNTERS, *HISTOGRAMS} - parts
    listed = README.partition("**Metrics**")[2].partition("\n## ")[0]
    assert set(re.findall(r"sangam_\w+", listed)) == metrics
    dashboard = (ROOT / "docker/grafana/dashboards/sangam.json").read_text()
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in set(re.findall(r"sangam_\w+", dashboard))
    }
    assert asked == metrics


def test_the_modules_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`((?:server/)?[a-z_]+)`", text))
    package = ROOT / "sangam_backend"
    modules = {str(p.relative_to(package).with_suffix("")) for p in package.rglob("*.py")}
    folders = {path.name for path in package.iterdir() if path.is_dir()}
    others = {
        "tritonserver",
        "execute",
        "disaggregated",
        "hybrid",
        "prefill",
        "decode",
        "prefilled",
    }
    assert named - modules - folders - others == set()
    assert len(named & modules) > 20


def test_the_modules_read_from_top_to_bottom() -> None:
    """In the order that README gives them, each imports only those before it."""
    paragraph = README.partition("each file importing only files above it:")[2].split("\n\n")[0]
    sources: dict[str, str] = {}
    for path in (ROOT / "sangam_backend").rglob("*.py"):
        name = path.relative_to(ROOT / "sangam_backend").parts[0].removesuffix(".py")
        sources[name] = sources.get(name, "") + path.read_text()
    del sources["__init__"], sources["model_repository"]
    order = [name for name in re.findall(r"`([a-z_]+)/?`", paragraph) if name in sources]
    assert sorted(order) == sorted(sources)
    for place, name in enumerate(order):
        used = set(re.findall(r"from sangam_backend\.(\w+)", sources[name]))
        assert used & set(order[place + 1 :]) == set(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
