"""What manifests are checked against.

- core Kubernetes kinds, and every pod inside the others: the API server's own JSON schemas (package `kubernetes-validate`)
- PyTorchJob: the training operator's generated models (package `kubeflow-training`), every field's name and type
- RayService, RayJob: KubeRay's own definitions are on no package index. kuberay.schema.yaml says what those of v1.6.2 say, and
  kuberay.py what the operator refuses besides
- every list in a custom resource that is a map by some of its items' keys (variables, ports, mounts, volumes, ...): no key twice,
  which the API server lets pass in a pod of its own and refuses there
- serveConfigV2: Ray Serve's own ServeDeploySchema; its arguments: the service's own configuration
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator, ValidationError, validators
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from .kuberay import refusals

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
DEFINITIONS = "https://kubernetes.io/api/_definitions.json#/$defs/"
CORE = "1.31"
"""The oldest version of Kubernetes that manifests are checked for."""


def documents(name: str) -> list[dict[str, Any]]:
    """The objects in a manifest."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with an object."""
    kind = document["kind"]
    if document["apiVersion"].startswith("ray.io/"):
        return _against(f"https://ray.io/v1#/$defs/{kind}", document, kind) or list(refusals(document))
    if kind == "PyTorchJob":
        from kubeflow.training import models

        return list(_generated(document, models.KubeflowOrgV1PyTorchJob, models, "PyTorchJob"))
    try:
        kubernetes_validate.validate(document, CORE, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{kind} {'.'.join(map(str, error.path))}: {error.message}"]
    return []


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


@functools.cache
def _schemas() -> Registry[Any]:
    """KubeRay's kinds, and the API server's definitions that they refer to."""
    core = schema_contents(f"kubernetes-json-schema/v{CORE}.0-local-strict/_definitions.json", CORE)
    kuberay = yaml.safe_load((Path(__file__).parent / "kuberay.schema.yaml").read_text())
    return Registry().with_resources((own["$id"], Resource.from_contents(own)) for own in (core, kuberay))


def _once(_: Any, keys: list[str], value: Any, __: Any) -> Iterator[ValidationError]:
    """A list that is a map by these keys of its items; a port's protocol has a default."""
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    names = [tuple(item.get(key, "TCP" if key == "protocol" else None) for key in keys) for item in items]
    for name in sorted({name for name in names if names.count(name) > 1}, key=str):
        yield ValidationError(f"twice: {', '.join(map(str, name))}")


Validator = validators.extend(Draft202012Validator, {"x-kubernetes-list-map-keys": _once})


def _against(schema: str, value: Any, where: str) -> list[str]:
    found = Validator({"$ref": schema}, registry=_schemas()).iter_errors(value)
    return [f"{'.'.join(map(str, [where, *error.absolute_path]))}: {error.message[:300]}" for error in found]


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
        yield from _against(f"{DEFINITIONS}io.k8s.api.core.v1.PodTemplateSpec", item, where)
    elif kind == "V1ObjectMeta":
        yield from _against(f"{DEFINITIONS}io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta", item, where)
    elif hasattr(models, kind):
        yield from _generated(item, getattr(models, kind), models, where)
    elif not isinstance(item, {"str": str, "int": int, "bool": bool}.get(kind, object)):
        yield f"{where}: {item!r} is not {kind}"
