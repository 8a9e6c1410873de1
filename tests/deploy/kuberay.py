"""What KubeRay's operator refuses although the API server takes it: rules between fields of RayCluster, RayJob and RayService.

Facts from ray-project/kuberay, ray-operator/controllers/ray/utils/validation.go: its text at the time of v1.6 and that of v1.7
were read side by side. Every rule of either about a field of v1.6 is here, and one of its webhook (groups that share a name).
Rules of features that v1.6 has switched off (incremental upgrades of a RayService) are applied as though they were on.
An object that breaks a rule stays without pods, and an event says why.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

LONGEST = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
"""Characters of a name: six more are appended for the cluster of a job or a service."""
TOKENS_SINCE, KUBERNETES_TOKENS_SINCE = Version("2.52.0"), Version("2.55.0")
RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
"""Parameters of `ray start` that `resources` of a group stands in for."""
LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
DOMAIN = r"(?=.{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
DURATION = r"\+?((\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h))+|\+?\d+"
"""Of Go, or whole seconds."""


def refusals(document: dict[str, Any]) -> Iterator[str]:
    """Why the operator would not act on an object that has passed its schema."""
    kind, metadata, spec = document["kind"], document["metadata"], document["spec"]
    name, annotations = metadata.get("name", ""), metadata.get("annotations") or {}
    if len(name) > LONGEST[kind] or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name: {name!r} is no DNS label of at most {LONGEST[kind]} characters"
    key = {"RayCluster": None, "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}[kind]
    cluster = spec if key is None else spec.get(key)
    if cluster is not None:
        yield from _cluster(cluster, annotations)
        if kind != "RayCluster" and "type" in cluster.get("upgradeStrategy", {}):
            yield f"upgradeStrategy: is for a RayCluster of its own, not for that of a {kind}"
        if kind != "RayCluster" and cluster.get("authOptions", {}).get("enableK8sTokenAuth"):
            yield f"authOptions.enableK8sTokenAuth: not with a {kind}"
    if kind == "RayJob":
        yield from _job(spec)
        yield from _deletion(spec)
    if kind == "RayService":
        yield from _service(spec, annotations)


def _cluster(spec: dict[str, Any], annotations: dict[str, str]) -> Iterator[str]:
    head, workers = spec["headGroupSpec"], spec.get("workerGroupSpecs", [])
    scaled, scaler = spec.get("enableInTreeAutoscaling", False), spec.get("autoscalerOptions", {})
    for name, group in [("head", head), *((group["groupName"], group) for group in workers)]:
        params, pod = group.get("rayStartParams", {}), group["template"].get("spec") or {}
        if not pod.get("containers"):
            yield f"{name}: no container"
        if group.get("resources") and any(params.get(key) for key in RESOURCES):
            yield f"{name}: resources both in rayStartParams and in resources"
        if "labels" in params:
            yield f"{name}: rayStartParams.labels is not supported, labels is"
        for key, value in group.get("labels", {}).items():
            if not re.fullmatch(f"({DOMAIN}/)?{LABEL}", key) or not re.fullmatch(f"({LABEL})?", value):
                yield f"{name}: labels: {key}={value} is no label of Kubernetes"
        if scaled and scaler.get("version") == "v2" and pod.get("restartPolicy", "Never") != "Never":
            yield f"{name}: restartPolicy {pod['restartPolicy']} with autoscaler v2"
    yield from _scaling(spec)
    yield from _redis(spec, annotations)
    yield from _tokens(spec)


def _scaling(spec: dict[str, Any]) -> Iterator[str]:
    workers, scaler = spec.get("workerGroupSpecs", []), spec.get("autoscalerOptions", {})
    scaled, second = spec.get("enableInTreeAutoscaling", False), _variables(spec["headGroupSpec"]).get("RAY_enable_autoscaler_v2")
    if len({group["groupName"] for group in workers}) < len(workers):
        yield "workerGroupSpecs: two groups of one name"
    for group in workers:
        name, least, most = group["groupName"], group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        if not 0 <= least <= most:
            yield f"{name}: minReplicas {least}, maxReplicas {most}"
        if group.get("suspend") and scaled:
            yield f"{name}: suspended, and autoscaled"
        v2 = scaler.get("version") == "v2" or second in ("1", "true")
        if "idleTimeoutSeconds" in group and (group["idleTimeoutSeconds"] < 0 or not v2):
            yield f"{name}: idleTimeoutSeconds needs autoscalerOptions.version v2, and 0 or more"
    if scaler.get("idleTimeoutSeconds", 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds: below 0"
    if any(one["name"] == "KUBERAY_GEN_AUTOSCALER_START_CMD" for one in scaler.get("env", [])):
        yield "autoscalerOptions.env: KUBERAY_GEN_AUTOSCALER_START_CMD is set by the operator"
    if (second in ("1", "true") and not scaled) or (second is not None and scaled and "version" in scaler):
        yield "head: variable RAY_enable_autoscaler_v2: autoscalerOptions.version and enableInTreeAutoscaling are asked instead"


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
    if not tolerant and "RAY_REDIS_ADDRESS" in set_ and annotations.get("ray.io/ft-enabled", "").lower() != "true":
        yield "head: variable RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
    if tolerant and params.get("redis-password"):
        yield "head: rayStartParams.redis-password beside gcsFaultToleranceOptions"
    if params.get("redis-username") or "REDIS_USERNAME" in set_:
        yield "head: Redis' user name belongs into gcsFaultToleranceOptions.redisUsername"
    for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if tolerant and annotations.get(name):
            yield f"annotation {name} beside gcsFaultToleranceOptions"


def _tokens(spec: dict[str, Any]) -> Iterator[str]:
    options = spec.get("authOptions", {})
    by_kubernetes, token = options.get("enableK8sTokenAuth", False), options.get("mode", "token") == "token"
    needed = KUBERNETES_TOKENS_SINCE if by_kubernetes else TOKENS_SINCE
    try:
        old = Version(spec.get("rayVersion", "")) < needed
    except InvalidVersion:
        old = True
    if "authOptions" in spec and token and old:
        yield f"authOptions.mode token: needs rayVersion {needed} or later"
    if by_kubernetes and (not token or options.get("secretName")):
        yield "authOptions.enableK8sTokenAuth: needs mode token, and no secretName"


def _job(spec: dict[str, Any]) -> Iterator[str]:
    mode, selected = spec.get("submissionMode", "K8sJobMode"), spec.get("clusterSelector")
    retried, ends = spec.get("backoffLimit", 0), spec.get("shutdownAfterJobFinishes", False)
    if spec.get("suspend") and (not ends or selected):
        yield "suspend: needs shutdownAfterJobFinishes, and a cluster of its own"
    if spec.get("ttlSecondsAfterFinished", 0) < 0 or (spec.get("ttlSecondsAfterFinished", 0) > 0 and not ends):
        yield "ttlSecondsAfterFinished: needs shutdownAfterJobFinishes, and 0 or more"
    if "rayClusterSpec" not in spec and not selected:
        yield "one of rayClusterSpec and clusterSelector must be set"
    if selected and (not selected.get("ray.io/cluster") or mode == "SidecarMode" or retried > 0):
        yield "clusterSelector: needs ray.io/cluster, another mode than SidecarMode, and no backoffLimit"
    if mode == "InteractiveMode" and retried > 0:
        yield "backoffLimit: not in InteractiveMode"
    if mode == "SidecarMode":
        yield from (f"{key}: not in SidecarMode" for key in ("submitterPodTemplate", "submitterConfig") if key in spec)
        pod = spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {}).get("spec") or {}
        if pod.get("restartPolicy", "Never") != "Never":
            yield f"head: restartPolicy {pod['restartPolicy']} in SidecarMode"
    if retried < 0:
        yield "backoffLimit: below 0"
    if spec.get("activeDeadlineSeconds", 1) <= 0:
        yield "activeDeadlineSeconds: not above 0"
    try:
        environment = yaml.safe_load(spec.get("runtimeEnvYAML", ""))
        if not isinstance(environment, dict | None):
            yield "runtimeEnvYAML: no mapping"
    except yaml.YAMLError as error:
        yield f"runtimeEnvYAML: {error}"


def _deletion(spec: dict[str, Any]) -> Iterator[str]:
    """What happens to cluster and job afterwards: rules, or the older policies of success and failure."""
    strategy, ends = spec.get("deletionStrategy", {}), spec.get("shutdownAfterJobFinishes", False)
    rules = strategy.get("deletionRules", [])
    older = [strategy[key].get("policy") for key in ("onSuccess", "onFailure") if key in strategy]
    policies = {*older, *(rule["policy"] for rule in rules)}
    if None in policies:
        yield "deletionStrategy: onSuccess and onFailure need a policy"
    if ends and (rules or "DeleteNone" in older):
        yield "deletionStrategy: neither deletionRules nor DeleteNone with shutdownAfterJobFinishes"
    if spec.get("clusterSelector") and policies & {"DeleteCluster", "DeleteWorkers"}:
        yield "deletionStrategy: a selected cluster is not deleted"
    if spec.get("rayClusterSpec", {}).get("enableInTreeAutoscaling") and "DeleteWorkers" in policies:
        yield "deletionStrategy: DeleteWorkers with autoscaling"
    for status in ("jobStatus", "jobDeploymentStatus"):
        for value in {rule["condition"][status] for rule in rules if status in rule["condition"]}:
            same = [rule for rule in rules if rule["condition"].get(status) == value]
            after = {rule["policy"]: rule["condition"].get("ttlSeconds", 0) for rule in same}
            if len(after) < len(same):
                yield f"deletionRules: a policy twice for {value}"
            ordered = [after[policy] for policy in ("DeleteWorkers", "DeleteCluster", "DeleteSelf") if policy in after]
            if any(first > second for first, second in pairwise(ordered)):
                yield f"deletionRules: for {value} the job goes before its cluster, or the cluster before its workers"


def _service(spec: dict[str, Any], annotations: dict[str, str]) -> Iterator[str]:
    cluster, strategy = spec["rayClusterConfig"], spec.get("upgradeStrategy", {})
    patience = annotations.get("ray.io/initializing-timeout", "")
    if patience and not (re.fullmatch(DURATION, patience) and re.search("[1-9]", patience)):
        yield f"annotation ray.io/initializing-timeout: {patience!r} is no duration above 0"
    if ((cluster["headGroupSpec"].get("headService") or {}).get("metadata") or {}).get("name"):
        yield "headGroupSpec.headService.metadata.name: must not be set"
    if strategy.get("type") == "NewClusterWithIncrementalUpgrade":
        options = strategy.get("clusterUpgradeOptions")
        if not cluster.get("enableInTreeAutoscaling"):
            yield "upgradeStrategy: incremental upgrades need enableInTreeAutoscaling"
        if options is None or not options["gatewayClassName"] or options["intervalSeconds"] <= 0:
            yield "clusterUpgradeOptions: needs a gatewayClassName and intervalSeconds above 0"
        elif not 0 <= options["stepSizePercent"] <= options.get("maxSurgePercent", 100) <= 100:
            yield "clusterUpgradeOptions: 0 <= stepSizePercent <= maxSurgePercent <= 100 does not hold"
