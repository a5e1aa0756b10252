"""The manifests of docs/kubernetes.md: complete objects with fields that exist, whose variables make one job of their pods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from horovod import environments
from horovod.runner.arguments import parse

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
MANIFESTS: dict[str, dict[str, Any]] = {
    manifest["kind"]: manifest for path in FILES for manifest in yaml.safe_load_all(path.read_text())
}
KUBERNETES = "1.31"
"""The release whose schemas the built-in kinds are checked against."""

POD_TEMPLATE = "a pod template, which is checked as a Pod"
RESOURCES, ENV = "resources of a container", "variables of a container"

# The fields of the operators' kinds that a user may set, from the descriptions of their interfaces: MPI Operator 0.7's v2beta1,
# Training Operator's v1, Trainer 2.2's v1alpha1. A set has the allowed values, a type is what a value must be.
RUN_POLICY = {
    "cleanPodPolicy": {"None", "Running", "All"}, "ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int,
    "backoffLimit": int, "suspend": bool,
}  # fmt: skip
REPLICAS = {
    "replicas": int, "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"}, "template": POD_TEMPLATE,
}  # fmt: skip
FIELDS: dict[tuple[str, str], dict[str, Any]] = {
    ("kubeflow.org/v2beta1", "MPIJob"): {
        "slotsPerWorker": int,
        "runLauncherAsWorker": bool,
        "runPolicy": RUN_POLICY,
        "mpiReplicaSpecs": {"Launcher": REPLICAS, "Worker": REPLICAS},
        "sshAuthMountPath": str,
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
    },
    ("kubeflow.org/v1", "PyTorchJob"): {
        "runPolicy": RUN_POLICY,
        "nprocPerNode": str,
        "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {"name": str, "apiGroup": str, "kind": {"TrainingRuntime", "ClusterTrainingRuntime"}},
        "trainer": {
            "image": str, "command": list, "args": list, "env": ENV, "numNodes": int, "resourcesPerNode": RESOURCES,
            "numProcPerNode": int,
        },
        "suspend": bool,
        "activeDeadlineSeconds": int,
    },
}  # fmt: skip


def check(value: object, allowed: object, where: str) -> list[dict[str, Any]]:
    """Assert that a part of a manifest has allowed fields and values only; the pods in it, to be checked as such."""
    if allowed == POD_TEMPLATE:
        assert isinstance(value, dict), where
        return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **value}]
    if allowed in (RESOURCES, ENV):
        field = "resources" if allowed == RESOURCES else "env"
        container = {"name": "container", "image": "image", field: value}
        return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": {"containers": [container]}}]
    if isinstance(allowed, dict):
        assert isinstance(value, dict), where
        assert value.keys() <= allowed.keys(), f"{where}: no such field: {sorted(value.keys() - allowed.keys())}"
        return [pod for name, part in value.items() for pod in check(part, allowed[name], f"{where}.{name}")]
    if isinstance(allowed, set):
        assert value in allowed, where
    else:
        assert isinstance(allowed, type) and isinstance(value, allowed), where
        assert allowed is not int or not isinstance(value, bool), where
    return []


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


def test_the_page_shows_the_files() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    assert sorted(re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)) == sorted(
        path.read_text() for path in FILES
    )


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob", "MPIJob", "Service", "Job", "NetworkPolicy"])
def test_every_manifest_is_a_complete_object(kind: str) -> None:
    manifest = MANIFESTS[kind]
    assert {"apiVersion", "kind", "metadata", "spec"} == manifest.keys()
    for container in containers(manifest):
        assert container["image"] == "registry.example.com/train:1"
        assert all(isinstance(word, str) for word in container["command"])
        assert all(isinstance(value, str) for value in variables(container).values())


@pytest.mark.parametrize("kind", sorted(MANIFESTS))
def test_every_field_exists_in_the_schema_of_its_kind(kind: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    manifest = MANIFESTS[kind]
    allowed = FIELDS.get((manifest["apiVersion"], kind))
    if allowed is None:  # a kind of Kubernetes itself
        validate(manifest, KUBERNETES, strict=True)
        return
    pods = check(manifest["spec"], allowed, kind)
    assert pods, "nothing runs"
    for pod in pods:
        validate(pod, KUBERNETES, strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    """The checks above can fail."""
    allowed = FIELDS["trainer.kubeflow.org/v1alpha1", "TrainJob"]
    with pytest.raises(AssertionError, match="numNode"):
        check({"trainer": {"numNode": 2}}, allowed, "TrainJob")
    with pytest.raises(AssertionError, match=r"trainer\.numNodes"):
        check({"trainer": {"numNodes": "2"}}, allowed, "TrainJob")


@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_each_rank_has_a_gpu(kind: str) -> None:
    spec = MANIFESTS[kind]["spec"]
    if kind == "TrainJob":
        ranks, resources = spec["trainer"]["numProcPerNode"], spec["trainer"]["resourcesPerNode"]
    else:
        (worker,) = containers(spec["mpiReplicaSpecs"]["Worker"])
        ranks, resources = spec["slotsPerWorker"], worker["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == ranks


def test_the_pods_of_the_plain_job_are_one_job() -> None:
    job, service, policy = MANIFESTS["Job"], MANIFESTS["Service"], MANIFESTS["NetworkPolicy"]
    (container,) = containers(job)
    env = {**variables(container), "HOROVOD_RANK": "1"}
    who = environments.identity(env)
    assert (who.rank, who.size) == (1, job["spec"]["completions"]) == (1, job["spec"]["parallelism"])
    host, _, domain = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition(".")
    assert host == f"{job['metadata']['name']}-0"
    assert domain == service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    pods = {"job-name": job["metadata"]["name"]}  # the label that Kubernetes gives the pods of a Job
    assert service["spec"]["selector"] == pods
    assert policy["spec"]["podSelector"]["matchLabels"] == pods
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": pods}}]}]


def test_the_commands_are_flags_that_horovodrun_knows() -> None:
    specs = MANIFESTS["MPIJob"]["spec"]["mpiReplicaSpecs"]
    (container,) = containers(specs["Launcher"])
    options = parse(container["command"][1:])
    assert options.command == ("python", "train.py")
    assert options.num_proc == specs["Worker"]["replicas"] * MANIFESTS["MPIJob"]["spec"]["slotsPerWorker"]
