"""The description of KubeRay's kinds finds what is wrong, wherever it is, and takes what is right."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from .schemas import documents, problems

SERVICE, JOB = ("serve/rayservice.yaml", "rayClusterConfig"), ("train/rayjob-eval.yaml", "rayClusterSpec")
FILES = pytest.mark.parametrize(("name", "cluster"), [SERVICE, JOB], ids=["RayService", "RayJob"])
Change = Callable[[dict[str, Any]], Any]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a document."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def test_the_description_is_json_schema() -> None:
    Draft202012Validator.check_schema(yaml.safe_load((Path(__file__).parent / "kuberay.schema.yaml").read_text()))


@FILES
def test_an_unknown_key_is_found_wherever_it_is(name: str, cluster: str) -> None:
    document = documents(name)[0]
    mappings = [path for path in places(document) if isinstance(at(document, path), dict)]
    assert len(mappings) > 40
    for path in mappings:
        changed = copy.deepcopy(document)
        at(changed, path)["nonsense"] = [[]]
        assert problems(changed), path


@FILES
def test_a_value_of_another_type_is_found_wherever_it_is(name: str, cluster: str) -> None:
    document = documents(name)[0]
    for path in places(document):
        if path and path[0] not in ("apiVersion", "kind"):
            changed = copy.deepcopy(document)
            at(changed, path[:-1])[path[-1]] = [[]] if isinstance(at(document, path), dict) else {"a": {}}
            assert problems(changed), path


@FILES
def test_a_required_key_that_is_missing_is_found(name: str, cluster: str) -> None:
    for path in (
        ("metadata",), ("spec",), ("spec", cluster), ("spec", cluster, "headGroupSpec"),
        ("spec", cluster, "headGroupSpec", "template"), ("spec", cluster, "workerGroupSpecs", 0, "groupName"),
        ("spec", cluster, "workerGroupSpecs", 0, "template"),
        ("spec", cluster, "headGroupSpec", "template", "spec", "containers"),
    ):  # fmt: skip
        document = documents(name)[0]
        del at(document, path[:-1])[path[-1]]
        assert problems(document), path


RULES: list[tuple[tuple[str, str], Change]] = [
    # values that exist nowhere, by the description
    (SERVICE, lambda x: x.update(apiVersion="ray.io/v2")),
    (SERVICE, lambda x: x["spec"].update(upgradeStrategy={"type": "Rolling"})),
    (SERVICE, lambda x: x["spec"].update(managedBy="me")),
    (SERVICE, lambda x: x["spec"].update(rayClusterDeletionDelaySeconds=-1)),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["authOptions"].update(mode="tokens")),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["autoscalerOptions"].update(upscalingMode="default")),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["autoscalerOptions"].update(version="2")),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"].pop("redisAddress")),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas=2**31)),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas=True)),
    (JOB, lambda x: x["spec"].update(submissionMode="k8sJobMode")),
    (JOB, lambda x: x["spec"].update(preRunningDeadlineSeconds=0)),
    (JOB, lambda x: x["spec"].update(deletionStrategy={"onSuccess": {"policy": "DeleteSelf"}})),
    (JOB, lambda x: x["spec"].update(deletionStrategy={"deletionRules": []})),
    (JOB, lambda x: x["spec"].update(deletionStrategy={"deletionRules": [{"policy": "DeleteSelf", "condition": {}}]})),
    (JOB, lambda x: x["spec"]["rayClusterSpec"]["headGroupSpec"].update(template=None)),
    (JOB, lambda x: x["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["metadata"].update(generateName="pmi-")),
    (SERVICE, lambda x: x["spec"].update(serveService={"metadata": {"ownerReferences": []}})),
    # lists that are maps: in a pod of its own the API server takes a variable twice
    (SERVICE, lambda x: head(x)["env"].append({"name": "PMI_STORE", "value": "x"})),
    (SERVICE, lambda x: head(x)["ports"].append({"name": "again", "containerPort": 8000, "protocol": "TCP"})),
    (SERVICE, lambda x: head(x)["volumeMounts"].append({"name": "keys", "mountPath": "/models"})),
    (SERVICE, lambda x: x["spec"].update(serveService={"spec": {"ports": [{"port": 80}, {"port": 80, "name": "x"}]}})),
    # what only the operator refuses
    (SERVICE, lambda x: x["metadata"].update(name="p" * 48)),
    (SERVICE, lambda x: x["metadata"].update(annotations={"ray.io/ft-enabled": "true"})),
    (SERVICE, lambda x: head(x)["env"].append({"name": "REDIS_PASSWORD", "value": "x"})),
    (SERVICE, lambda x: head(x)["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "x"})),
    (SERVICE, lambda x: head(x)["env"].append({"name": "REDIS_USERNAME", "value": "x"})),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].update({"redis-password": "x"})),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].update(labels="{}")),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["headGroupSpec"].update(resources={"CPU": "0"})),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["headGroupSpec"].update(headService={"metadata": {"name": "x"}})),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"].pop("rayVersion")),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"].update(rayVersion="2.51.2")),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["authOptions"].update(enableK8sTokenAuth=True)),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"].update(upgradeStrategy={"type": "Recreate"})),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(minReplicas=9)),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(suspend=True)),
    (SERVICE, lambda x: scaler(x).pop("version") and engines(x).update(idleTimeoutSeconds=60)),
    (SERVICE, lambda x: engines(x)["template"]["spec"].update(restartPolicy="Always")),
    (SERVICE, lambda x: head(x)["env"].append({"name": "RAY_enable_autoscaler_v2", "value": "1"})),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["workerGroupSpecs"].append(groups(x)[0])),
    (SERVICE, lambda x: x["spec"].update(upgradeStrategy={"type": "NewClusterWithIncrementalUpgrade"})),
    (SERVICE, lambda x: incremental(x, stepSizePercent=50, maxSurgePercent=20)),
    (SERVICE, lambda x: incremental(x, intervalSeconds=0)),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["headGroupSpec"].update(labels={"a b": "c"})),
    (SERVICE, lambda x: x["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(labels={"ray.io/zone": "-a"})),
    (SERVICE, lambda x: x["metadata"].update(annotations={"ray.io/initializing-timeout": "0s"})),
    (SERVICE, lambda x: x["metadata"].update(annotations={"ray.io/initializing-timeout": "ten minutes"})),
    (SERVICE, lambda x: scaler(x).update(env=[{"name": "KUBERAY_GEN_AUTOSCALER_START_CMD"}])),
    (SERVICE, lambda x: alone(x, mode="token", enableK8sTokenAuth=True, secretName="tokens")),
    (SERVICE, lambda x: alone(x, mode="disabled", enableK8sTokenAuth=True)),
    (SERVICE, lambda x: alone(x, mode="token", enableK8sTokenAuth=True)["spec"].update(rayVersion="2.54.0")),
    (JOB, lambda x: x["spec"].update(shutdownAfterJobFinishes=False)),
    (JOB, lambda x: x["spec"].update(ttlSecondsAfterFinished=-1)),
    (JOB, lambda x: x["spec"].update(activeDeadlineSeconds=0)),
    (JOB, lambda x: x["spec"].update(backoffLimit=-1)),
    (JOB, lambda x: x["spec"].update(submissionMode="InteractiveMode")),
    (JOB, lambda x: x["spec"].update(submissionMode="SidecarMode", submitterConfig={"backoffLimit": 1})),
    (JOB, lambda x: x["spec"].update(submissionMode="SidecarMode") or pod(x).update(restartPolicy="Always")),
    (JOB, lambda x: x["spec"].update(clusterSelector={"ray.io/cluster": "other"}, suspend=True)),
    (JOB, lambda x: x["spec"].pop("rayClusterSpec")),
    (JOB, lambda x: x["spec"].update(runtimeEnvYAML="a: [")),
    (JOB, lambda x: x["spec"].update(runtimeEnvYAML="env_vars")),
    (JOB, lambda x: x["spec"].update(deletionStrategy={"deletionRules": [RULE]})),
    (JOB, lambda x: ruled(x, RULE, RULE)),
    (JOB, lambda x: ruled(x, RULE, {"policy": "DeleteWorkers", "condition": {"jobStatus": "FAILED", "ttlSeconds": 61}})),
    (JOB, lambda x: ruled(x, {**RULE, "policy": "DeleteWorkers"})["rayClusterSpec"].update(enableInTreeAutoscaling=True)),
    (JOB, lambda x: ruled(x, RULE).update(clusterSelector={"ray.io/cluster": "other"}, backoffLimit=0)),
    (JOB, lambda x: x["spec"].update(deletionStrategy={"onSuccess": {"policy": "DeleteNone"}, "onFailure": OLDER})),
    (JOB, lambda x: x["spec"].update(deletionStrategy={"onSuccess": {}, "onFailure": OLDER})),
]  # fmt: skip
RULE = {"policy": "DeleteCluster", "condition": {"jobStatus": "FAILED", "ttlSeconds": 60}}
OLDER = {"policy": "DeleteSelf"}


def incremental(service: dict[str, Any], **options: Any) -> None:
    options = {"stepSizePercent": 5, "intervalSeconds": 10, "gatewayClassName": "gateway", **options}
    service["spec"]["upgradeStrategy"] = {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": options}


def alone(service: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The service's cluster as a RayCluster, with other authOptions."""
    service.update(kind="RayCluster", spec=service["spec"]["rayClusterConfig"])
    service["spec"]["authOptions"] = options
    return service


def ruled(job: dict[str, Any], *rules: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job["spec"]
    spec |= {"shutdownAfterJobFinishes": False, "ttlSecondsAfterFinished": 0, "deletionStrategy": {"deletionRules": list(rules)}}
    return spec


def pod(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    return found


def engines(service: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    return found


def scaler(service: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = service["spec"]["rayClusterConfig"]["autoscalerOptions"]
    return found


def groups(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = copy.deepcopy(document["spec"]["rayClusterConfig"]["workerGroupSpecs"])
    return found


def head(document: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = document["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize(("file", "change"), RULES, ids=range(len(RULES)))
def test_what_the_api_server_or_the_operator_refuses_is_found(file: tuple[str, str], change: Change) -> None:
    document = copy.deepcopy(documents(file[0])[0])  # anchors share parts of it
    change(document)
    assert problems(document)


def test_what_both_take_is_taken() -> None:
    job = documents(JOB[0])[0]
    ruled(job, RULE, {**RULE, "policy": "DeleteSelf"}, {**RULE, "condition": {"jobStatus": "SUCCEEDED"}})
    job["spec"] |= {
        "submitterConfig": {"backoffLimit": 3}, "runtimeEnvYAML": "env_vars: {A: b}", "preRunningDeadlineSeconds": 600,
        "metadata": {"by": "ada"}, "jobId": "one", "entrypointResources": "{}", "entrypointNumGpus": 0.5,
        "managedBy": "ray.io/kuberay-operator",
    }  # fmt: skip
    assert problems(job) == []
    service = documents(SERVICE[0])[0]
    incremental(service)
    ports = [{"port": 53, "name": "one"}, {"port": 53, "name": "two", "protocol": "UDP"}]
    service["spec"]["serveService"] = {"metadata": {"labels": {"a": "b"}}, "spec": {"type": "ClusterIP", "ports": ports}}
    service["metadata"]["annotations"] = {"ray.io/initializing-timeout": "1h30m"}
    scaler(service).update(env=[{"name": "A", "value": "b"}], imagePullPolicy="Always", securityContext={})
    group = engines(service)
    group |= {
        "idleTimeoutSeconds": 60,
        "numOfHosts": 1,
        "scaleStrategy": {"workersToDelete": []},
        "labels": {"ray.io/zone": "a_b"},
    }
    assert problems(service) == []
    for options in ({"secretName": "tokens"}, {"enableK8sTokenAuth": True}):
        assert problems(alone(copy.deepcopy(service), mode="token", **options)) == []
