"""The Kubernetes and SLURM files fit together and are what they say: every file parses, ports and names match, and rendered ones are rendered."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_forge.cli.binaries import COLLECTOR, files_dir
from otel_forge.cli.collector_config import Options, agent, gateway
from otel_forge.config import load_config

KUBERNETES = files_dir() / "kubernetes"
SBATCH = files_dir() / "slurm" / "train.sbatch"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def pod(name: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(document for document in documents(name) if document["kind"] == kind)["spec"]["template"]["spec"]
    return found


def test_the_collectors_files_are_the_rendered_ones() -> None:
    assert (KUBERNETES / "agent.yaml").read_text() == agent(Options(listen="0.0.0.0", token=True, gateways=("otel-forge-gateway:4417",)))
    assert (KUBERNETES / "gateway.yaml").read_text() == gateway(Options(listen="0.0.0.0", token=True, jaeger=False))


def test_kustomization_names_files_that_are_there_and_every_manifest_has_kind_and_name() -> None:
    kustomization = documents("kustomization.yaml")[0]
    names = [*kustomization["resources"], *(name for item in kustomization["configMapGenerator"] for name in item["files"])]
    assert all((KUBERNETES / name).is_file() for name in names)
    for name in [*kustomization["resources"], "training-job.yaml"]:
        for document in documents(name):
            assert {"apiVersion", "kind", "metadata", "spec"} <= set(document), name
            assert document["metadata"]["name"]


@pytest.mark.parametrize(("name", "kind"), [("agent-daemonset.yaml", "DaemonSet"), ("gateway-statefulset.yaml", "StatefulSet")])
def test_a_collectors_container_fits_its_file(name: str, kind: str) -> None:
    """Its ports are those that the file binds, it gets the token, its queue is on a volume, its version is that of the pinned build."""
    spec = pod(name, kind)
    container = next(item for item in spec["containers"] if item["name"] == "collector")
    config = yaml.safe_load((KUBERNETES / Path(container["args"][0]).name).read_text())
    bound = {int(protocol["endpoint"].rpartition(":")[2]) for protocol in config["receivers"]["otlp"]["protocols"].values()}
    health = int(config["extensions"]["health_check"]["endpoint"].rstrip("}").rpartition(":")[2])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["health"] == health
    assert {port for port_name, port in ports.items() if port_name != "health"} <= bound
    environ = {item["name"]: item for item in container["env"]}
    assert "secretKeyRef" in environ["FORGE_TOKEN"]["valueFrom"]
    assert any(environ["FORGE_COLLECTOR_STATE"]["value"].startswith(mount["mountPath"]) for mount in container["volumeMounts"])
    assert container["image"].endswith(f":{COLLECTOR.version}")


def test_the_exporters_configuration_loads() -> None:
    assert set(load_config(KUBERNETES / "forge.yaml").metric_logging) == {"jsonl", "console"}


def test_one_pod_per_rank_has_a_rank_a_world_size_and_the_agent_of_its_node() -> None:
    job = next(document for document in documents("training-job.yaml") if document["kind"] == "Job")["spec"]
    environ = {item["name"]: item for item in job["template"]["spec"]["containers"][0]["env"]}
    assert (job["completionMode"], environ["WORLD_SIZE"]["value"]) == ("Indexed", str(job["completions"]))
    assert "job-completion-index" in environ["RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert environ["NODE_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"
    hosted = {port["hostPort"] for port in pod("agent-daemonset.yaml", "DaemonSet")["containers"][0]["ports"] if "hostPort" in port}
    assert int(environ["OTEL_FORGE_ENDPOINT"]["value"].rpartition(":")[2]) in hosted


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kustomize_builds_it() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(KUBERNETES)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    kinds = [document["kind"] for document in yaml.safe_load_all(done.stdout)]
    assert sorted(kinds) == ["ConfigMap"] * 3 + ["DaemonSet", "NetworkPolicy", "Service", "StatefulSet"]


def test_the_sbatch_script_is_bash_and_says_how_it_is_used() -> None:
    assert subprocess.run(["bash", "-n", str(SBATCH)], capture_output=True, check=False).returncode == 0
    done = subprocess.run(["bash", str(SBATCH)], capture_output=True, text=True, check=False)
    assert (done.returncode, "usage: sbatch" in done.stderr) == (2, True)
