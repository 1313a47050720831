"""The container's files, as far as they can be checked without Docker and a cluster."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from sangam_backend import cli

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
MANIFESTS = list(yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text()))
DASHBOARD = DOCKER / "grafana/dashboards/sangam.json"
PROVISIONING = DOCKER / "grafana/provisioning"
READY = "/v2/health/ready"
CLEAN = "SANGAM_TEST_CLEAN_INSTALL"


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [each for each in MANIFESTS if each["kind"] == kind]
    return dict(found)


def pod() -> dict[str, Any]:
    return dict(manifest("Deployment")["spec"]["template"]["spec"])


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return dict(only)


def serve_arguments(*arguments: str) -> argparse.Namespace:
    return cli._parser().parse_args(["serve", "--model", "any", *arguments])


DEFAULTS = serve_arguments()
PORTS = [DEFAULTS.http_port, DEFAULTS.grpc_port, DEFAULTS.metrics_port]


def seconds(text: str) -> int:
    """Of a Compose duration in one unit."""
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def copies() -> list[tuple[list[str], str]]:
    """Of each COPY its sources and its target."""
    lines = [line.split()[1:] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    return [(words[:-1], words[-1]) for words in lines]


def test_what_is_copied_exists_and_nothing_else_is_sent_to_docker() -> None:
    sources = [source for named, _ in copies() for source in named]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(sources)


def test_one_base_image_everywhere() -> None:
    (base,) = re.findall(r"^FROM (\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"nvcr\.io/nvidia/tritonserver:\d\d\.\d\d-py3", base)
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *DOCKER.glob("*.yaml")]
    named = {
        match
        for path in documents
        for match in re.findall(r"nvcr\.io/nvidia/tritonserver:[\w.-]+", path.read_text())
    }
    assert named == {base}


def test_the_entry_point_is_sangam_serve() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    (command,) = re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)
    _, program, *arguments = json.loads(entry)
    assert program == "sangam"
    for given in (
        json.loads(command),
        COMPOSE["services"]["sangam"]["command"],
        container()["args"],
    ):
        assert cli._parser().parse_args([*arguments, *given]).host == "0.0.0.0"
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    assert [int(port) for port in exposed.split()] == PORTS


def test_health_checks_ask_where_the_server_listens() -> None:
    (probe,) = re.findall(r"^ +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    liveness = container()["livenessProbe"]
    healthcheck = COMPOSE["services"]["sangam"]["healthcheck"]
    program, *arguments = json.loads(probe)
    assert program == "sangam"
    assert healthcheck["test"] == ["CMD", program, *arguments]
    assert liveness["exec"]["command"] == [program, *arguments]
    asked = cli._parser().parse_args(arguments)
    assert asked.url.endswith(f":{DEFAULTS.grpc_port}")
    assert f":{DEFAULTS.metrics_port}/" in asked.metrics_url
    # It asks for metrics before and after.
    for patience in (seconds(healthcheck["timeout"]), liveness["timeoutSeconds"]):
        assert patience > 2 * asked.deadline


def test_compose() -> None:
    services = COMPOSE["services"]
    sangam = services["sangam"]
    assert (DOCKER / sangam["build"]["context"] / sangam["build"]["dockerfile"]).is_file()
    assert [port.split(":")[-1] for port in sangam["ports"]] == [str(port) for port in PORTS]
    assert all(
        port.startswith("127.0.0.1:") for each in services.values() for port in each["ports"]
    )
    assert seconds(sangam["stop_grace_period"]) > DEFAULTS.grace
    start = seconds(sangam["healthcheck"]["start_period"])
    assert start > DEFAULTS.startup_timeout
    (gpu,) = sangam["deploy"]["resources"]["reservations"]["devices"]
    assert gpu["capabilities"] == ["gpu"]
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            known = (DOCKER / source).exists() if "/" in source else source in COMPOSE["volumes"]
            assert known, (name, volume)


def test_prometheus_scrapes_sangam_and_grafana_asks_prometheus() -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"sangam:{DEFAULTS.metrics_port}"]}]
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/sangam.yaml").read_text())["providers"]
    mounts = dict(v.split(":")[:2] for v in COMPOSE["services"]["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == source["uid"]


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    source = "".join(path.read_text() for path in (ROOT / "sangam_backend/server").glob("*.py"))
    known = set(re.findall(r'"(sangam_\w+)"', source))
    asked = set(re.findall(r"\bsangam_\w+", DASHBOARD.read_text()))
    # A histogram's series have names of their own.
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert plain
    assert plain - known == set()


def test_kubernetes_probes() -> None:
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert list(ports.values()) == PORTS
    for name in ("startupProbe", "readinessProbe"):
        get = container()[name]["httpGet"]
        assert (get["path"], ports[get["port"]]) == (READY, DEFAULTS.http_port), name
    startup = container()["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > DEFAULTS.startup_timeout
    service = {
        port["port"]: ports[port["targetPort"]] for port in manifest("Service")["spec"]["ports"]
    }
    assert service == {port: port for port in PORTS}


def test_kubernetes_waits_for_running_requests() -> None:
    grace = cli._parser().parse_args(["serve", *container()["args"]]).grace
    _, sleep = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert pod()["terminationGracePeriodSeconds"] > int(sleep) + grace


def test_kubernetes_gives_a_gpu_shared_memory_and_no_rights() -> None:
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == 1
    mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    (home,) = re.findall(r"^ENV HOME=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert home in mounts
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    context = pod()["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"]) == (True, int(user))
    assert context["fsGroup"] == int(user)
    assert container()["securityContext"]["allowPrivilegeEscalation"] is False


def test_kubernetes_selects_its_pods() -> None:
    deployment = manifest("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    budget = manifest("PodDisruptionBudget")["spec"]
    selectors = [
        deployment["selector"]["matchLabels"],
        budget["selector"]["matchLabels"],
        manifest("Service")["spec"]["selector"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert 0 < budget["maxUnavailable"] < deployment["replicas"]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """What the Dockerfile copies, in a folder."""
    folder = tmp_path / "image"
    for sources, target in copies():
        for source in map(Path, sources):
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(ROOT / source, folder / target, ignore=ignored)
            else:
                (folder / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder / target)
    return folder


def run_install(image: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | settings
    return subprocess.run(
        [image / "docker/install.sh"], env=environment, capture_output=True, text=True, timeout=900
    )


def check_installed(image: Path, place: Path) -> None:
    """The commands run from anywhere, on the files of the image."""

    def output(program: str, *arguments: str) -> str:
        command = [str(image / ".venv/bin" / program), *arguments]
        return subprocess.run(
            command, cwd=place, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    assert output("sangam", "--help").startswith("usage: sangam")
    assert output("sangam", "serve", "--help").startswith("usage: sangam serve")
    repository = "import sangam_backend.deployment as d; print(*d.REPOSITORY.glob('*/sangam'))"
    found = [Path(path) for path in output("python", "-c", repository).split()]
    assert sorted(path.parent.name for path in found) == list(cli.POOLS)
    assert all(path.is_relative_to(image) for path in found)


def test_the_installation(image: Path, tmp_path: Path) -> None:
    """In an environment that has this one's packages already, so that nothing is downloaded."""
    venv.create(image / ".venv", symlinks=True)
    (packages,) = (image / ".venv").glob("lib/python*/site-packages")
    (packages / "these.pth").write_text(sysconfig.get_path("purelib"))
    settings = {"SANGAM_FLASHINFER": "0", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    done = run_install(image, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successfully installed sangam" in done.stdout
    check_installed(image, tmp_path)


@pytest.mark.timeout(1000)
@pytest.mark.skipif(CLEAN not in os.environ, reason=f"downloads all packages; set {CLEAN}")
def test_the_installation_from_nothing(image: Path, tmp_path: Path) -> None:
    done = run_install(image, SANGAM_FLASHINFER="0")
    assert done.returncode == 0, done.stdout + done.stderr
    check_installed(image, tmp_path)


def test_the_installation_asks_for_nvcc(image: Path, tmp_path: Path) -> None:
    done = run_install(image, CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert f"no {tmp_path}/bin/nvcc" in done.stderr
    assert not (image / ".venv").exists()
