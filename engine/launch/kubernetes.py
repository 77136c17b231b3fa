"""The manifest of a JobSet, which starts a run on a Kubernetes cluster. Torch-free.

Source: API jobset.x-k8s.io/v1alpha2, https://jobset.sigs.k8s.io, and batch/v1 of Kubernetes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .cluster import SECONDS_TO_SAVE

MASTER_PORT = 29_400
JOB = "ranks"
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""names of objects; source: https://kubernetes.io/docs/concepts/overview/working-with-objects/names"""
SHARED_MEMORY = "/dev/shm"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


class Pods(NamedTuple):
    """The pods of a run.

    Attributes:
        image: the container image, with this package in it.
        nodes: number of machines, a pod each.
        gpus: GPUs and ranks of each pod.
        cpus: cores of each pod; 0 leaves them to the cluster.
        memory: memory of each pod, such as "512Gi"; empty leaves it to the cluster.
        claims: mount path -> name of a persistent volume claim.
        folder: the working directory.
    """

    image: str
    nodes: int
    gpus: int
    cpus: int
    memory: str
    claims: Mapping[str, str]
    folder: str


def resource_name(text: str) -> str:
    """Return a name that Kubernetes takes: a DNS label, short enough for the pods' own names."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def job_set(
    name: str, namespace: str, pods: Pods, arguments: Sequence[str], max_restarts: int
) -> dict[str, Any]:
    """Return a JobSet that runs torchrun in a pod of each machine.

    A pod that fails, is evicted or is stopped ends the job, and the JobSet starts all pods again:
    the run resumes from its newest checkpoint.

    Args:
        name: see `resource_name`.
        namespace: where it is created; empty leaves it to kubectl.
        pods: the pods.
        arguments: arguments of `trainer`.
        max_restarts: how often all pods are started again.
    """
    command = ["torchrun", f"--nproc-per-node={pods.gpus}"]
    if pods.nodes == 1:
        command += ["--standalone"]
    else:
        # The headless service of a JobSet has its name, and each pod the name of its index.
        command += [f"--nnodes={pods.nodes}", "--node-rank=$(NODE_RANK)"]
        command += [f"--master-addr={name}-{JOB}-0-0.{name}", f"--master-port={MASTER_PORT}"]
    # Kubernetes replaces $(NAME) in a command, and reads $$ as one $.
    words = [each.replace("$", "$$") for each in arguments]
    limits: dict[str, Any] = {"nvidia.com/gpu": pods.gpus}
    limits |= {"cpu": pods.cpus} if pods.cpus else {}
    limits |= {"memory": pods.memory} if pods.memory else {}
    mounts = [{"name": "shm", "mountPath": SHARED_MEMORY}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    for number, (path, claim) in enumerate(pods.claims.items()):
        mounts.append({"name": f"volume-{number}", "mountPath": path})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    container = {
        "name": "trainer",
        "image": pods.image,
        "workingDir": pods.folder,
        "command": [*command, "--no-python", "trainer", *words],
        "env": [{"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}],
        "resources": {"limits": limits},
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
        "containers": [container],
        "volumes": volumes,
    }
    job = {
        "parallelism": pods.nodes,
        "completions": pods.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name} | ({"namespace": namespace} if namespace else {}),
        "spec": {
            "failurePolicy": {"maxRestarts": max_restarts},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def to_yaml(value: Any, indent: int = 0) -> str:
    """Return plain data as YAML, a line for each scalar, texts in double quotes."""
    margin, lines = " " * indent, []
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        head = f"{margin}{key}:" if isinstance(value, dict) else f"{margin}-"
        if not isinstance(each, dict | list) or not each:
            # Escaped, a character beyond U+FFFF would be two halves, which YAML refuses.
            lines.append(f"{head} {json.dumps(each, ensure_ascii=False)}\n")
        elif isinstance(value, dict):
            lines.append(f"{head}\n{to_yaml(each, indent + 2)}")
        else:
            lines.append(f"{head} {to_yaml(each, indent + 2).lstrip()}")
    return "".join(lines)
