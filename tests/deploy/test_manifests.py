"""Kubernetes manifests: valid, hardened, and calling commands and keys that exist. schemas.py says what against."""

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lm.config import load_run_config
from serving.cli import app
from serving.config import load_serve_config
from serving.local_ray import BASE

from .schemas import DEPLOY, ROOT, documents, pods, problems

MANIFESTS = [
    "train/pytorchjob.yaml", "train/rayjob-eval.yaml", "serve/rayservice.yaml", "serve/redis.yaml", "serve/network-policy.yaml",
]  # fmt: skip


def of_kind(name: str, kind: str) -> dict[str, Any]:
    return next(document for document in documents(name) if document["kind"] == kind)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_pass_their_schemas(name: str) -> None:
    assert [problem for document in documents(name) for problem in problems(document)] == []


@pytest.mark.parametrize(
    ("name", "kind", "path", "value"),
    [
        ("train/pytorchjob.yaml", "PyTorchJob", ["spec", "runPolicy", "backofLimit"], 3),
        ("train/pytorchjob.yaml", "PyTorchJob", ["spec", "pytorchReplicaSpecs", "Worker", "replicas"], "three"),
        ("train/pytorchjob.yaml", "PyTorchJob", ["spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "container"], []),
        ("serve/rayservice.yaml", "RayService", ["spec", "rayClusterConfig", "authOption"], {}),
        ("serve/rayservice.yaml", "RayService", ["spec", "rayClusterConfig", "authOptions", "mode"], "tokens"),
        ("serve/rayservice.yaml", "RayService", ["spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"], 0),
        ("serve/redis.yaml", "StatefulSet", ["spec", "replica"], 1),
        ("serve/network-policy.yaml", "NetworkPolicy", ["spec", "ingres"], []),
    ],
)  # fmt: skip
def test_a_mistake_in_a_manifest_is_found(name: str, kind: str, path: list[str], value: Any) -> None:
    document = copy.deepcopy(of_kind(name, kind))
    place = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert problems(document)


@pytest.mark.parametrize("name", MANIFESTS)
def test_no_pod_runs_as_root_or_without_limits(name: str) -> None:
    for document in documents(name):
        for pod in pods(document):
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
            for container in pod["spec"]["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert "memory" in container["resources"]["limits"], container["name"]


def test_every_pod_is_behind_a_network_policy() -> None:
    everything = [document for name in MANIFESTS for document in documents(name)]
    isolated = [x["spec"]["podSelector"]["matchLabels"] for x in everything if x["kind"] == "NetworkPolicy"]
    for document in everything:
        for pod in pods(document):
            assert any(wanted.items() <= pod["metadata"]["labels"].items() for wanted in isolated), pod["metadata"]


def test_the_serve_application_is_what_ray_and_the_service_accept() -> None:
    from ray.serve.schema import ServeDeploySchema

    spec = of_kind("serve/rayservice.yaml", "RayService")["spec"]
    schema = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert name in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    config = load_serve_config(None, application.args)
    assert config.keys is not None
    assert config.http.port == schema.http_options.port
    engines = spec["rayClusterConfig"]["workerGroupSpecs"][0]
    assert engines["maxReplicas"] >= (config.scaling.max_replicas or 0), "autoscaling must find room"
    template = engines["template"]["spec"]
    assert template["terminationGracePeriodSeconds"] > config.scaling.drain
    assert spec["rayClusterDeletionDelaySeconds"] > config.scaling.drain
    assert float(template["containers"][0]["resources"]["requests"]["cpu"]) >= config.scaling.engine_cpus


@pytest.mark.parametrize(
    ("name", "kind", "key", "room"),
    [
        ("serve/rayservice.yaml", "RayService", "rayClusterConfig", {"headgroup": (0, 0), "engines": (2, 8)}),
        ("train/rayjob-eval.yaml", "RayJob", "rayClusterSpec", {"headgroup": (0, 0), "readers": (1, 4)}),
    ],
)
def test_rays_own_autoscaler_reads_the_clusters(name: str, kind: str, key: str, room: dict[str, tuple[int, int]]) -> None:
    """The code that reads a RayCluster in its head pod: it wants to know what each group's pods have."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    spec = of_kind(name, kind)["spec"]
    read = _derive_autoscaling_config_from_ray_cr({"metadata": {"name": "x", "namespace": "pmi"}, "spec": spec[key]})
    groups = read["available_node_types"]
    assert {group: (one["min_workers"], one["max_workers"]) for group, one in groups.items()} == room
    assert all(one["resources"]["memory"] >= 4 * 2**30 for one in groups.values())
    if kind == "RayService":
        assert groups["headgroup"]["resources"]["CPU"] == 0, "no replica on the head"
        config = load_serve_config(None, yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"])
        assert groups["engines"]["resources"]["CPU"] > config.scaling.engine_cpus, "an engine and an ingress fit into a pod"


def test_the_autoscaler_that_runs_is_the_one_that_the_operator_knows_of() -> None:
    """Where nothing is said Ray starts v2 in KubeRay's pods, and KubeRay leaves them a restartPolicy that v2 cannot have."""
    spec = of_kind("serve/rayservice.yaml", "RayService")["spec"]["rayClusterConfig"]
    assert spec["enableInTreeAutoscaling"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert spec["autoscalerOptions"]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_application_for_running_clusters_is_accepted_too() -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "serve/cluster.yaml").read_text()))
    (application,) = schema.applications
    own = {key: value for key, value in application.args.items() if key not in ("checkpoint", "config")}
    assert load_serve_config(None, own).keys is not None


def test_ray_is_never_started_without_a_token() -> None:
    assert of_kind("serve/rayservice.yaml", "RayService")["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert of_kind("train/rayjob-eval.yaml", "RayJob")["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    compose = yaml.safe_load((DEPLOY / "serve/compose.yaml").read_text())
    assert compose["services"]["pmi"]["environment"]["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE=token" in (DEPLOY / "serve/pmi.service").read_text()


def test_pods_have_the_settings_that_every_cluster_should_have() -> None:
    groups = of_kind("serve/rayservice.yaml", "RayService")["spec"]["rayClusterConfig"]
    for group in (groups["headGroupSpec"], *groups["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        given = {one["name"]: one.get("value") for one in container["env"]}
        assert {name: given.get(name) for name in BASE} == BASE


def test_manifests_name_the_ray_version_that_the_image_has() -> None:
    pinned = next(x for x in (ROOT / "constraints.txt").read_text().splitlines() if x.startswith("ray==")).partition("==")[2]
    assert of_kind("serve/rayservice.yaml", "RayService")["spec"]["rayClusterConfig"]["rayVersion"] == pinned
    assert of_kind("train/rayjob-eval.yaml", "RayJob")["spec"]["rayClusterSpec"]["rayVersion"] == pinned


def flags(command: str) -> set[str]:
    """The flags of a command, by its help."""
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).stdout
    return {word.strip("│ ") for word in shown.split() if word.startswith("--")}


def test_training_and_serving_are_called_with_flags_that_exist() -> None:
    (pod, _) = list(pods(of_kind("train/pytorchjob.yaml", "PyTorchJob")))
    command, *arguments = pod["spec"]["containers"][0]["args"]
    assert command == "train"
    given = [tuple(argument.split("=", 1)) for argument in arguments]
    assert {flag for flag, _ in given} <= flags("train")
    workers = of_kind("train/pytorchjob.yaml", "PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    run = load_run_config(ROOT / dict(given)["--config"], [value for flag, value in given if flag == "--set"])
    assert run.training.micro_batch
    assert run.training.lanes % (run.training.micro_batch * (1 + workers)) == 0
    compose = yaml.safe_load((DEPLOY / "serve/compose.yaml").read_text())
    serve, *given_flags = compose["services"]["pmi"]["command"]
    assert {x for x in given_flags if x.startswith("--")} <= flags(serve)
    unit = (DEPLOY / "serve/pmi.service").read_text()
    started = shlex.split(next(x for x in unit.splitlines() if x.startswith("ExecStart=")).partition("=")[2])
    assert {x for x in started if x.startswith("--")} <= flags(started[1])
    assert {x for x in shlex.split("keys create --tenant ada --keys keys.json") if x.startswith("--")} <= flags("keys create")


def test_evaluation_is_called_with_flags_that_exist() -> None:
    entry = shlex.split(of_kind("train/rayjob-eval.yaml", "RayJob")["spec"]["entrypoint"])
    assert entry[:2] == ["pmi", "eval"]
    assert {x for x in entry if x.startswith("--")} <= flags("eval")


def test_the_driver_of_an_evaluation_runs_where_its_folders_are() -> None:
    """Ray puts it on the head unless resources are asked for it, then anywhere."""
    spec = of_kind("train/rayjob-eval.yaml", "RayJob")["spec"]
    assert not {"entrypointNumCpus", "entrypointNumGpus", "entrypointResources"} & spec.keys()
    (head,) = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    mounted = tuple(mount["mountPath"] + "/" for mount in head["volumeMounts"])
    paths = [word for word in shlex.split(spec["entrypoint"]) if word.startswith("/")]
    assert len(paths) == 3
    assert all(path.startswith(mounted) for path in paths)


def test_redis_in_kubernetes_has_the_settings_of_redis_conf() -> None:
    def settings(text: str) -> list[str]:
        return [line for line in text.splitlines() if line and not line.startswith("#")]

    inside = of_kind("serve/redis.yaml", "ConfigMap")["data"]["redis.conf"]
    assert settings(inside) == settings((DEPLOY / "serve/redis.conf").read_text())


def test_compose_is_valid_and_publishes_nothing_beyond_this_machine(tmp_path: Path) -> None:
    import importlib.util

    import jsonschema

    found = importlib.util.find_spec("check_jsonschema")
    assert found is not None
    assert found.origin is not None
    schema = Path(found.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    compose = yaml.safe_load((DEPLOY / "serve/compose.yaml").read_text())
    jsonschema.validate(compose, json.loads(schema.read_text()))
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "ports" not in compose["services"]["redis"]
    assert "--maxmemory" in compose["services"]["redis"]["command"], "PmiRedisMemory is a share of it"
    for service in compose["services"].values():  # what is mounted from here is here
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / "serve" / source).exists(), source


def test_the_service_file_is_a_configuration_of_the_service() -> None:
    config = load_serve_config(str(DEPLOY / "serve/serve.yaml"), {})
    assert config.keys is not None
    grace = int(yaml.safe_load((DEPLOY / "serve/compose.yaml").read_text())["services"]["pmi"]["stop_grace_period"].rstrip("s"))
    assert grace > config.scaling.drain
