"""The manifests of docs/kubernetes.md: complete objects whose variables make one job of their pods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from horovod import environments

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md").read_text()
MANIFESTS: dict[str, dict[str, Any]] = {
    manifest["kind"]: manifest
    for block in re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    for manifest in yaml.safe_load_all(block)
}


def containers(manifest: object) -> list[dict[str, Any]]:
    """Everything with a command in it."""
    if isinstance(manifest, list):
        return [found for each in manifest for found in containers(each)]
    if not isinstance(manifest, dict):
        return []
    own = [manifest] if "command" in manifest else []
    return own + [found for each in manifest.values() for found in containers(each)]


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob", "MPIJob", "Service", "Job"])
def test_every_manifest_is_a_complete_object(kind: str) -> None:
    manifest = MANIFESTS[kind]
    assert {"apiVersion", "kind", "metadata", "spec"} == manifest.keys()
    for container in containers(manifest):
        assert container["image"] == "registry.example.com/train:1"
        assert all(isinstance(word, str) for word in container["command"])
        assert all(isinstance(value, str) for value in variables(container).values())


def test_the_pods_of_the_plain_job_are_one_job() -> None:
    job, service = MANIFESTS["Job"], MANIFESTS["Service"]
    (container,) = containers(job)
    env = {**variables(container), "HOROVOD_RANK": "1"}
    who = environments.identity(env)
    assert (who.rank, who.size) == (1, job["spec"]["completions"]) == (1, job["spec"]["parallelism"])
    host, _, domain = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition(".")
    assert host == f"{job['metadata']['name']}-0"
    assert domain == service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]


def test_the_commands_are_flags_that_horovodrun_knows() -> None:
    from horovod.runner.arguments import parse

    launcher = MANIFESTS["MPIJob"]["spec"]["mpiReplicaSpecs"]["Launcher"]
    (container,) = containers(launcher)
    assert parse(container["command"][1:]).command == ("python", "train.py")
