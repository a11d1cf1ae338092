"""docker/helm: a chart that Helm lints, that the API accepts, and whose file the router reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, lint
from helm_python.errors import HelmError

from router import config
from router.config import Config
from tests.compose.manifests import CHART, OLDEST, Manifest, check, one, rendered
from tests.compose.stacks import DOCKER, dotenv
from tests.docs_blocks import blocks

EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry:5000/warmroute", "tag": "1.2.3"},
    "imagePullSecrets": [{"name": "registry"}],
    "replicas": 3,
    "config": {
        "policy": {"name": "round_robin"},
        "limits": {"body_bytes": 104_857_600},
        "engine": {"api_key_file": "/run/secrets/engine/key"},
        "listen": {"tls_cert": "/run/secrets/tls/tls.crt", "tls_key": "/run/secrets/tls/tls.key"},
    },
    "secrets": {"engine": "vllm-key", "tls": "warmroute-tls"},
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    "volumes": [{"name": "templates", "configMap": {"name": "templates"}}],
    "volumeMounts": [{"name": "templates", "mountPath": "/etc/templates"}],
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "cpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "engines": {
        "service": {"labels": {"warmroute.io/pool": "west"}},
        "example": {
            "enabled": True,
            "hfTokenSecret": "hub",
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
}
OTHER_ENGINES: dict[str, Any] = {
    "engines": {"service": {"create": False}},
    "config": {"discovery": {"kubernetes": ["engines/vllm:http", "engines/other:http"]}},
}
LISTED: dict[str, Any] = {
    "replicas": 1,
    "engines": {"service": {"create": False}},
    "redis": {"deploy": False},
    "config": {"replicas": ["http://10.0.0.5:8000", {"url": "http://10.0.0.6:8000", "name": "b"}]},
}
OWN_REDIS: dict[str, Any] = {
    "redis": {"deploy": False, "url": "rediss://redis.example:6379/0", "secret": "my-redis"}
}
CASES = {
    "defaults": {},
    "everything": EVERYTHING,
    "other-engines": OTHER_ENGINES,
    "listed": LISTED,
    "own-redis": OWN_REDIS,
}

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


def read_config(manifests: list[Manifest], folder: Path, name: str = "warmroute") -> Config:
    """Read the rendered configuration file as a router does."""
    file = folder / "warmroute.yaml"
    file.write_text(one(manifests, "ConfigMap", name)["data"]["warmroute.yaml"])
    return config.load(file)


def pod(manifests: list[Manifest], name: str = "warmroute") -> Manifest:
    spec: Manifest = one(manifests, "Deployment", name)["spec"]["template"]["spec"]
    return spec


@each_case
def test_helm_lints_it(values: dict[str, Any]) -> None:
    """Nothing but the missing icon is mentioned."""
    report = lint(CHART, values, strict=True, kube_version=f"v{OLDEST}.0")

    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@each_case
def test_the_api_accepts_each_manifest(values: dict[str, Any]) -> None:
    """Of the oldest and the newest release, and the Prometheus Operator's; strictly."""
    manifests = rendered(**values)

    assert len(manifests) >= 4
    for manifest in manifests:
        check(manifest)


@each_case
def test_the_router_reads_the_configuration_file(values: dict[str, Any], tmp_path: Path) -> None:
    """By its own strict loader; the grace period is longer than a drain."""
    manifests = rendered(**values)
    loaded = read_config(manifests, tmp_path)

    drains_s = loaded.listen.drain_grace_s + loaded.listen.drain_s
    assert pod(manifests)["terminationGracePeriodSeconds"] == drains_s + 10
    (port,) = pod(manifests)["containers"][0]["ports"]
    assert port["containerPort"] == loaded.listen.port


@each_case
def test_what_is_mounted_is_a_volume(values: dict[str, Any]) -> None:
    """In every container, and once."""
    for manifest in rendered(**values):
        if manifest["kind"] != "Deployment":
            continue
        spec = manifest["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(set(volumes)) == len(volumes)
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)


def test_given_keys_win_and_numbers_stay_numbers(tmp_path: Path) -> None:
    """Large integers are not written as floats."""
    loaded = read_config(rendered(**EVERYTHING), tmp_path)

    assert loaded.policy.name == "round_robin"
    assert loaded.limits.body_bytes == 104_857_600
    assert loaded.discovery.kubernetes == ("vllm:http",)
    assert loaded.redis.url == "redis://warmroute-redis:6379/0"
    assert loaded.log.json


def test_secrets_are_files_where_the_configuration_expects_them(tmp_path: Path) -> None:
    manifests = rendered(**EVERYTHING)
    loaded = read_config(manifests, tmp_path)
    spec = pod(manifests)
    paths = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    secrets = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}

    assert str(loaded.engine.api_key_file) == f"{paths['secret-engine']}/key"
    assert str(loaded.redis.password_file) == f"{paths['redis']}/password"
    assert secrets["secret-engine"] == "vllm-key"
    assert secrets["redis"] == pod(manifests, "warmroute-redis")["volumes"][0]["secret"][
        "secretName"
    ]  # fmt: skip


def test_a_router_with_tls_is_asked_over_tls() -> None:
    """By the probes and by Prometheus."""
    manifests = rendered(**EVERYTHING)
    (container,) = pod(manifests)["containers"]

    probes = [container[key] for key in container if key.endswith("Probe")]
    assert [probe["httpGet"]["scheme"] for probe in probes] == ["HTTPS"] * 3
    assert one(manifests, "ServiceMonitor")["spec"]["endpoints"][0]["scheme"] == "https"


def test_engines_in_another_namespace_get_a_role_there() -> None:
    """Once, for the account of the routers' namespace."""
    manifests = rendered(namespace="routers", **OTHER_ENGINES)
    binding = one(manifests, "RoleBinding")

    assert one(manifests, "Role")["metadata"]["namespace"] == "engines"
    assert binding["metadata"]["namespace"] == "engines"
    assert binding["subjects"][0]["namespace"] == "routers"
    assert "vllm" not in {manifest["metadata"]["name"] for manifest in manifests}


def test_listed_engines_need_no_rights_and_one_router_no_budget(tmp_path: Path) -> None:
    """And without Redis there is no Secret to create."""
    manifests = rendered(**LISTED)
    loaded = read_config(manifests, tmp_path)

    assert len(loaded.replicas) == 2
    assert not loaded.redis.is_configured
    assert one(manifests, "ServiceAccount")["automountServiceAccountToken"] is False
    kinds = {manifest["kind"] for manifest in manifests}
    assert kinds == {"ConfigMap", "Deployment", "Service", "ServiceAccount"}
    assert all("secret" not in volume for volume in pod(manifests)["volumes"])


def test_a_redis_of_ones_own_replaces_the_charts(tmp_path: Path) -> None:
    manifests = rendered(**OWN_REDIS)
    loaded = read_config(manifests, tmp_path)

    assert loaded.redis.url == "rediss://redis.example:6379/0"
    assert {"name": "redis", "secret": {"secretName": "my-redis", "defaultMode": 0o440}} in pod(
        manifests
    )["volumes"]
    assert "warmroute-redis" not in {manifest["metadata"]["name"] for manifest in manifests}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"replica": 2}, "replica"),
        ({"config": {"listen": {"prot": 8080}}}, "prot"),
        ({"config": {"policy": {"name": 3}}}, "name"),
        ({"engines": {"example": {"enable": True}}}, "enable"),
        ({"redis": {"url": "redis://redis.example"}}, "set redis.deploy to false"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], why: str) -> None:
    """Before anything is installed, with the key."""
    with pytest.raises(HelmError, match=why):
        rendered(**values)


def test_two_releases_share_a_namespace() -> None:
    """Neither names nor selectors meet, but for the Service of the engines, which has a value."""
    engines = {"service": {"name": "b-vllm"}}
    one_, other = rendered("warmroute"), rendered("b", engines=engines)
    names = [{(m["kind"], m["metadata"]["name"]) for m in each} for each in (one_, other)]
    selectors = [
        one(manifests, "Service", name)["spec"]["selector"]
        for manifests, name in ((one_, "warmroute"), (other, "b-warmroute"))
    ]

    assert not names[0] & names[1]
    assert selectors[0] != selectors[1]


@pytest.mark.parametrize(
    ("changed", "restarts"),
    [
        ({"policy": {"name": "round_robin"}}, False),
        ({"replicas": ["http://10.0.0.5:8000"]}, False),
        ({"log": {"level": "debug"}}, False),
        ({"queue": {"mode": "off"}}, True),
        ({"policy": {"first_blocks_tokens": 512}}, True),
    ],
)
def test_only_keys_that_need_it_restart_the_routers(
    changed: dict[str, Any], *, restarts: bool
) -> None:
    """docs/guides/discovery.md lists the keys that a running router follows."""

    def annotations(**values: Any) -> Any:
        template = one(rendered(**values), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]

    assert (annotations() != annotations(config=changed)) is restarts


def test_the_example_is_the_quick_start() -> None:
    """Its image is the compose files', its model and flags the page's; the Service selects it."""
    manifests = rendered(**EVERYTHING)
    deployment = one(manifests, "Deployment", "vllm")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    page = (DOCKER.parent / "docs/get-started/two-gpus.md").read_text()
    code = next(block.code for block in blocks(page) if "vllm serve" in block.code)
    flags = set(re.findall(r"--[a-z-]+", code)) - {"--port"}

    given = {word.partition("=")[0] for word in container["args"] if word.startswith("--")}
    assert given - {"--port"} == flags
    assert container["image"] == dotenv()["VLLM_IMAGE"]
    assert container["args"][0] in code
    events = next(w.partition("=")[2] for w in container["args"] if w.startswith("--kv-events"))
    assert json.loads(events) == json.loads(re.findall(r"'({.*})'", code)[0])
    service = one(manifests, "Service", "vllm")["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert service["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}


def test_the_values_of_the_documentation_are_the_charts() -> None:
    """The install command of the Kubernetes page renders, with the example that it asks for."""
    page = (DOCKER.parent / "docs/get-started/kubernetes.md").read_text()
    (code,) = (block.code for block in blocks(page) if "helm install" in block.code)
    values: dict[str, Any] = {}
    for path, value in re.findall(r"--set (\S+?)=(\S+)", code):
        *sections, key = path.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = yaml.safe_load(value)
    manifests = rendered(**values)

    (container,) = pod(manifests)["containers"]
    assert container["image"].startswith("REGISTRY/warmroute:")
    assert f"-t {container['image']} " in page
    assert pod(manifests, "vllm")
    assert f"{CHART.relative_to(DOCKER.parent)} " in code
    (secret,) = re.findall(r"create secret generic (\S+) --from-literal=password=", code)
    assert secret in {v["secret"]["secretName"] for v in pod(manifests)["volumes"] if "secret" in v}


def test_the_alerts_are_those_of_prometheus() -> None:
    """Every rule of docker/prometheus, for a job of the name that they ask for."""
    manifests = rendered(**EVERYTHING)
    monitor = one(manifests, "ServiceMonitor")["spec"]
    service = one(manifests, "Service")

    alerts = yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text())
    assert one(manifests, "PrometheusRule")["spec"] == alerts
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "warmroute"
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] in {p["name"] for p in service["spec"]["ports"]}


def test_a_package_has_the_alerts(tmp_path: Path) -> None:
    """`helm package` puts the linked file itself in."""
    with Chart.load(CHART) as chart:
        archive = chart.save(tmp_path)
    with Chart.load(archive) as packed:
        files = packed.render({"prometheusRule": {"enabled": True}}, name="warmroute")

    assert "NoRouterReady" in files["warmroute/templates/monitoring.yaml"]


def test_notes_name_the_next_two_commands() -> None:
    """For the names and the namespace of the release."""
    with Chart.load(CHART) as chart:
        notes = chart.render(name="a", namespace="routers")["warmroute/templates/NOTES.txt"]

    commands = [line.strip() for line in notes.splitlines() if line.startswith("  ")]
    assert commands == [
        "kubectl -n routers rollout status deployment/a-warmroute",
        "kubectl -n routers exec deployment/a-warmroute -- warmroute replicas list",
    ]


def test_what_is_made_from_the_chart_is_up_to_date() -> None:
    """`make docs` would change nothing."""
    script = DOCKER / "helm" / "generate.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, check=False)

    assert done.returncode == 0, done.stdout.decode()


def test_the_chart_names_its_own_version_and_the_oldest_kubernetes() -> None:
    """The chart is released with the package. tests/test_version.py checks its appVersion."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["version"] == chart["appVersion"]
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
