"""What KubeRay's operator refuses although the API server takes it: rules between fields of RayCluster, RayJob and RayService.

Facts from ray-project/kuberay, ray-operator/controllers/ray/utils/validation.go, between v1.6 and v1.7; those behind feature
gates are left out. An object that breaks one stays without pods, and an event says why.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

LONGEST = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
"""Characters of a name: six more are appended for the cluster of a job or a service."""
TOKENS_SINCE = Version("2.52.0")
RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}
"""Parameters of `ray start` that `resources` of a group stands in for."""


def refusals(document: dict[str, Any]) -> Iterator[str]:
    """Why the operator would not act on an object that has passed its schema."""
    kind, metadata, spec = document["kind"], document["metadata"], document["spec"]
    name = metadata.get("name", "")
    if len(name) > LONGEST[kind] or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name: {name!r} is no DNS label of at most {LONGEST[kind]} characters"
    key = {"RayCluster": None, "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}[kind]
    cluster = spec if key is None else spec.get(key)
    if cluster is not None:
        yield from _cluster(cluster, metadata.get("annotations") or {})
        if kind != "RayCluster" and "upgradeStrategy" in cluster:
            yield f"upgradeStrategy: is for a RayCluster of its own, not for that of a {kind}"
        if kind != "RayCluster" and (cluster.get("authOptions") or {}).get("enableK8sTokenAuth"):
            yield f"authOptions.enableK8sTokenAuth: not with a {kind}"
    if kind == "RayJob":
        yield from _job(spec)
    if kind == "RayService":
        yield from _service(spec)


def _cluster(spec: dict[str, Any], annotations: dict[str, str]) -> Iterator[str]:
    head, workers = spec["headGroupSpec"], spec.get("workerGroupSpecs", [])
    scaled, scaler = spec.get("enableInTreeAutoscaling", False), spec.get("autoscalerOptions") or {}
    if len({group["groupName"] for group in workers}) < len(workers):
        yield "workerGroupSpecs: two groups of one name"
    for name, group in [("head", head), *((group["groupName"], group) for group in workers)]:
        params, pod = group.get("rayStartParams", {}), group["template"].get("spec") or {}
        if not pod.get("containers"):
            yield f"{name}: no container"
        if group.get("resources") and RESOURCES & params.keys():
            yield f"{name}: resources both in rayStartParams and in resources"
        if "labels" in params:
            yield f"{name}: rayStartParams.labels is not supported, labels is"
        if scaled and scaler.get("version") == "v2" and pod.get("restartPolicy", "Never") != "Never":
            yield f"{name}: restartPolicy {pod['restartPolicy']} with autoscaler v2"
    for group in workers:
        name, least, most = group["groupName"], group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        if not 0 <= least <= most:
            yield f"{name}: minReplicas {least}, maxReplicas {most}"
        if group.get("suspend") and scaled:
            yield f"{name}: suspended, and autoscaled"
        if "idleTimeoutSeconds" in group and (group["idleTimeoutSeconds"] < 0 or scaler.get("version") != "v2"):
            yield f"{name}: idleTimeoutSeconds needs autoscalerOptions.version v2, and 0 or more"
    if scaler.get("idleTimeoutSeconds", 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds: below 0"
    second = _variables(head).get("RAY_enable_autoscaler_v2")
    if (second in ("1", "true") and not scaled) or (second is not None and scaled and "version" in scaler):
        yield "head: variable RAY_enable_autoscaler_v2: autoscalerOptions.version and enableInTreeAutoscaling are asked instead"
    yield from _redis(spec, annotations)
    if "authOptions" in spec and spec["authOptions"].get("mode", "token") == "token":
        try:
            old = Version(spec.get("rayVersion", "")) < TOKENS_SINCE
        except InvalidVersion:
            old = True
        if old:
            yield f"authOptions.mode token: needs rayVersion {TOKENS_SINCE} or later"


def _variables(group: dict[str, Any]) -> dict[str, str]:
    """Of a group's first container, which is Ray's."""
    containers = (group["template"].get("spec") or {}).get("containers") or [{}]
    return {one["name"]: one.get("value", "") for one in containers[0].get("env", [])}


def _redis(spec: dict[str, Any], annotations: dict[str, str]) -> Iterator[str]:
    """What the operator sets itself in the head, or looks for in one place only."""
    head, tolerant = spec["headGroupSpec"], "gcsFaultToleranceOptions" in spec
    set_, params = _variables(head), head.get("rayStartParams", {})
    for name in ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS"):
        if tolerant and name in set_:
            yield f"head: variable {name} beside gcsFaultToleranceOptions, which sets it"
    if not tolerant and "RAY_REDIS_ADDRESS" in set_ and annotations.get("ray.io/ft-enabled") != "true":
        yield "head: variable RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
    if tolerant and "redis-password" in params:
        yield "head: rayStartParams.redis-password beside gcsFaultToleranceOptions"
    if "redis-username" in params or "REDIS_USERNAME" in set_:
        yield "head: Redis' user name belongs into gcsFaultToleranceOptions.redisUsername"
    for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if tolerant and annotations.get(name):
            yield f"annotation {name} beside gcsFaultToleranceOptions"


def _job(spec: dict[str, Any]) -> Iterator[str]:
    mode, selected = spec.get("submissionMode", "K8sJobMode"), spec.get("clusterSelector")
    retried, ends = spec.get("backoffLimit", 0), spec.get("shutdownAfterJobFinishes", False)
    if spec.get("suspend") and (not ends or selected):
        yield "suspend: needs shutdownAfterJobFinishes, and a cluster of its own"
    if spec.get("ttlSecondsAfterFinished", 0) < 0 or (spec.get("ttlSecondsAfterFinished", 0) > 0 and not ends):
        yield "ttlSecondsAfterFinished: needs shutdownAfterJobFinishes, and 0 or more"
    if ends and "deletionRules" in spec.get("deletionStrategy", {}):
        yield "deletionStrategy.deletionRules: not with shutdownAfterJobFinishes"
    if "rayClusterSpec" not in spec and not selected:
        yield "one of rayClusterSpec and clusterSelector must be set"
    if selected and (not selected.get("ray.io/cluster") or mode == "SidecarMode" or retried > 0):
        yield "clusterSelector: needs ray.io/cluster, another mode than SidecarMode, and no backoffLimit"
    if mode == "InteractiveMode" and retried > 0:
        yield "backoffLimit: not in InteractiveMode"
    if mode == "SidecarMode":
        yield from (f"{key}: not in SidecarMode" for key in ("submitterPodTemplate", "submitterConfig") if key in spec)
    if retried < 0:
        yield "backoffLimit: below 0"
    if spec.get("activeDeadlineSeconds", 1) <= 0:
        yield "activeDeadlineSeconds: not above 0"
    try:
        yaml.safe_load(spec.get("runtimeEnvYAML", ""))
    except yaml.YAMLError as error:
        yield f"runtimeEnvYAML: {error}"


def _service(spec: dict[str, Any]) -> Iterator[str]:
    cluster, strategy = spec["rayClusterConfig"], spec.get("upgradeStrategy") or {}
    if ((cluster["headGroupSpec"].get("headService") or {}).get("metadata") or {}).get("name"):
        yield "headGroupSpec.headService.metadata.name: must not be set"
    if strategy.get("type") == "NewClusterWithIncrementalUpgrade":
        options = strategy.get("clusterUpgradeOptions")
        if not cluster.get("enableInTreeAutoscaling"):
            yield "upgradeStrategy: incremental upgrades need enableInTreeAutoscaling"
        if options is None or not options["gatewayClassName"] or options["intervalSeconds"] <= 0:
            yield "clusterUpgradeOptions: needs a gatewayClassName and intervalSeconds above 0"
        elif not all(0 <= options.get(key, 100) <= 100 for key in ("maxSurgePercent", "stepSizePercent")):
            yield "clusterUpgradeOptions: percentages are from 0 to 100"
