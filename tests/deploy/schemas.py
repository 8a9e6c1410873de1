"""What manifests are checked against.

- core Kubernetes kinds, and every pod inside the others: the API server's own JSON schemas (package `kubernetes-validate`)
- PyTorchJob: the training operator's generated models (package `kubeflow-training`), every field's name and type
- RayService, RayJob: KubeRay's definitions are on no package index. RAY below lists fields of its API reference (v1.6) that we
  use, so a misspelt or misplaced key is found, but not what only the original definition knows
- serveConfigV2: Ray Serve's own ServeDeploySchema; its arguments: the service's own configuration
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
POD, SERVICE, RESOURCES, SOURCE = object(), object(), object(), object()
MAP = {str: str}

CLUSTER: dict[Any, Any] = {
    "rayVersion": str,
    "enableInTreeAutoscaling": bool,
    "suspend": bool,
    "authOptions": {"mode": {"disabled", "token"}, "secretName": str},
    "gcsFaultToleranceOptions": {
        "redisAddress": str,
        "redisPassword": {"value": str, "valueFrom": SOURCE},
        "redisUsername": {"value": str, "valueFrom": SOURCE},
        "externalStorageNamespace": str,
    },
    "autoscalerOptions": {
        "upscalingMode": {"Default", "Aggressive", "Conservative"},
        "idleTimeoutSeconds": int,
        "version": {"v1", "v2"},
        "resources": RESOURCES,
    },
    "headGroupSpec": {"serviceType": str, "enableIngress": bool, "rayStartParams": MAP, "template": POD},
    "workerGroupSpecs": [
        {
            "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "numOfHosts": int,
            "rayStartParams": MAP, "template": POD,
        }
    ],
}  # fmt: skip
RAY: dict[str, dict[Any, Any]] = {
    "RayService": {
        "serveConfigV2": str,
        "rayClusterConfig": CLUSTER,
        "excludeHeadPodFromServeSvc": bool,
        "rayClusterDeletionDelaySeconds": int,
        "upgradeStrategy": {"type": {"NewCluster", "NewClusterWithIncrementalUpgrade", "None"}},
        "serveService": SERVICE,
    },
    "RayJob": {
        "entrypoint": str,
        "entrypointNumCpus": (int, float),
        "entrypointNumGpus": (int, float),
        "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"},
        "runtimeEnvYAML": str,
        "backoffLimit": int,
        "activeDeadlineSeconds": int,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "suspend": bool,
        "rayClusterSpec": CLUSTER,
        "submitterPodTemplate": POD,
    },
}


def documents(name: str) -> list[dict[str, Any]]:
    """The objects in a manifest."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with an object."""
    kind = document["kind"]
    if kind in RAY:
        head = [] if document["apiVersion"] == "ray.io/v1" else [f"apiVersion {document['apiVersion']}"]
        return [*head, *_core({**_service("x"), "metadata": document["metadata"]}), *_walk(document["spec"], RAY[kind], "spec")]
    if kind == "PyTorchJob":
        from kubeflow.training import models

        return list(_generated(document, models.KubeflowOrgV1PyTorchJob, models, "PyTorchJob"))
    return _core(document)


def pods(document: Any) -> Iterator[dict[str, Any]]:
    """Every pod template in an object."""
    if isinstance(document, dict):
        if isinstance(document.get("spec"), dict) and "containers" in document["spec"]:
            yield document
        for value in document.values():
            yield from pods(value)
    elif isinstance(document, list):
        for value in document:
            yield from pods(value)


def _core(document: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, "1.31", strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{document['kind']} {'.'.join(map(str, error.path))}: {error.message}"]
    return []


def _service(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {}}


def _pod(spec: dict[str, Any], metadata: dict[str, Any]) -> list[str]:
    return _core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **metadata}, "spec": spec})


def _container(**more: Any) -> list[str]:
    return _pod({"containers": [{"name": "x", **more}]}, {})


def _walk(value: Any, schema: Any, where: str) -> list[str]:
    if schema is POD:
        return [f"{where}: {problem}" for problem in _pod(value.get("spec", {}), value.get("metadata", {}))]
    if schema is SERVICE:
        return _core({**_service("x"), **value})
    if schema is RESOURCES:
        return _container(resources=value)
    if schema is SOURCE:
        return _container(env=[{"name": "X", "valueFrom": value}])
    if isinstance(schema, set):
        return [] if value in schema else [f"{where}: {value!r} is none of {sorted(schema)}"]
    if schema is MAP:
        return [f"{where}.{k}: {v!r} is not a string" for k, v in value.items() if not isinstance(v, str)]
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where}: is not a mapping"]
        unknown = [f"{where}.{key}: unknown" for key in value if key not in schema]
        return unknown + [p for key in value if key in schema for p in _walk(value[key], schema[key], f"{where}.{key}")]
    if isinstance(schema, list):
        return [p for number, item in enumerate(value) for p in _walk(item, schema[0], f"{where}[{number}]")]
    kinds = schema if isinstance(schema, tuple) else (schema,)
    return [] if type(value) in kinds else [f"{where}: {value!r} is not {schema}"]


def _generated(value: Any, model: Any, models: Any, where: str) -> Iterator[str]:
    """Names and types by a client's generated model; pods by the core schema."""
    names = {wire: own for own, wire in model.attribute_map.items()}
    for key, item in value.items():
        if key not in names:
            yield f"{where}.{key}: unknown"
            continue
        yield from _typed(item, model.openapi_types[names[key]], models, f"{where}.{key}")


def _typed(item: Any, kind: str, models: Any, where: str) -> Iterator[str]:
    inner = re.fullmatch(r"dict\(str, (\w+)\)", kind)
    if inner:
        for key, one in item.items():
            yield from _typed(one, inner[1], models, f"{where}.{key}")
    elif kind == "V1PodTemplateSpec":
        yield from (f"{where}: {problem}" for problem in _pod(item["spec"], item.get("metadata", {})))
    elif kind == "V1ObjectMeta":
        yield from _core({**_service("x"), "metadata": item})
    elif hasattr(models, kind):
        yield from _generated(item, getattr(models, kind), models, where)
    elif not isinstance(item, {"str": str, "int": int, "bool": bool}.get(kind, object)):
        yield f"{where}: {item!r} is not {kind}"
