"""docker/helm: a chart that Helm lints, that the API accepts, and whose file the router reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, lint
from helm_python.errors import HelmError

from router import config
from router.config import Config
from tests.compose.manifests import CHART, OLDEST, Manifest, check, one, rendered
from tests.compose.queries import dashboard
from tests.compose.stacks import DOCKER, dotenv
from tests.docs_blocks import blocks

EVERYTHING: dict[str, Any] = {
    "image": {
        "repository": "registry:5000/warmroute",
        "tag": "1.2.3",
        "digest": f"sha256:{'ab' * 32}",
        "pullPolicy": "Always",
    },
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
    "envFrom": [{"configMapRef": {"name": "proxies"}}],
    "initContainers": [{"name": "wait", "image": "busybox", "command": ["true"]}],
    "extraContainers": [
        {
            "name": "shipper",
            "image": "busybox",
            "volumeMounts": [{"name": "scratch", "mountPath": "/logs", "subPath": "lib"}],
        }
    ],
    "labels": {"team": "inference", "app.kubernetes.io/name": "not-ours"},
    "podLabels": {"sidecar.istio.io/inject": "false"},
    "podAnnotations": {"note": "ours"},
    "priorityClassName": "routers",
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn"}},
    "autoscaling": {
        "enabled": True,
        "metrics": [
            {
                "type": "External",
                "external": {
                    "metric": {"name": "waiting"},
                    "target": {"type": "AverageValue", "averageValue": "4"},
                },
            }
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
    },
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
        "hosts": ["a.example", "b.example"],
        "tls": [{"hosts": ["a.example"], "secretName": "a-tls"}],
    },
    "httpRoute": {
        "enabled": True,
        "parentRefs": [{"name": "gateway", "namespace": "infra"}],
        "hostnames": ["a.example"],
    },
    "networkPolicy": {
        "enabled": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"name": "agents"}}}],
        "engineClients": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "cpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "engines": {
        "service": {"labels": {"warmroute.io/pool": "west"}},
        "example": {
            "enabled": True,
            "hfTokenSecret": "hub",
            "models": {"persistentVolumeClaim": {"claimName": "models"}},
            "podSecurityContext": {"fsGroup": 2000},
            "priorityClassName": "engines",
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
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
OPENSHIFT: dict[str, Any] = {
    "podSecurityContext": dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup")),
    "redis": {"podSecurityContext": dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))},
}
PLAIN_ACCESS: dict[str, Any] = {
    "ingress": {"enabled": True},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "timeouts": None},
    "networkPolicy": {"enabled": True},
    "serviceAccount": {"create": False},
    "rbac": {"create": False},
    "autoscaling": {"enabled": True, "minReplicas": 1},
    "engines": {"example": {"enabled": True}},
}
CASES = {
    "defaults": {},
    "everything": EVERYTHING,
    "other-engines": OTHER_ENGINES,
    "listed": LISTED,
    "own-redis": OWN_REDIS,
    "openshift": OPENSHIFT,
    "plain-access": PLAIN_ACCESS,
}

POD = "{{ if $labels.pod }}{{ $labels.pod }}{{ else }}deployment/warmroute{{ end }}"

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
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(set(volumes)) == len(volumes)
        mounts = [mount for each in spec["containers"] for mount in each["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == set(volumes)


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
    container = pod(manifests)["containers"][0]

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
        ({"image": {"digest": "abc"}}, "digest"),
        ({"image": {"pullPolicy": "always"}}, "pullPolicy"),
        ({"httpRoute": {"enabled": True}}, "set httpRoute.parentRefs"),
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


EXPERIMENT = {"name": "e", "variants": [{"name": name, "policy": "random"} for name in "ab"]}


@pytest.mark.parametrize(
    ("changed", "restarts"),
    [
        ({"policy": {"name": "round_robin"}}, False),
        ({"replicas": ["http://10.0.0.5:8000"]}, False),
        ({"log": {"level": "debug"}}, False),
        ({"experiment": EXPERIMENT}, False),
        ({"queue": {"mode": "off"}}, True),
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
    """Its image is the compose files', its model and flags README's; the Service selects it."""
    manifests = rendered(**EVERYTHING)
    deployment = one(manifests, "Deployment", "vllm")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    page = (DOCKER.parent / "README.md").read_text()
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


def test_the_alerts_are_those_of_prometheus() -> None:
    """Every rule of docker/prometheus, for a job of the name that they ask for."""
    manifests = rendered(**EVERYTHING)
    monitor = one(manifests, "ServiceMonitor")["spec"]
    service = one(manifests, "Service")

    alerts = json.dumps(yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text()))
    rules = json.dumps(one(manifests, "PrometheusRule")["spec"])
    in_a_pod = f"`kubectl -n default exec {POD} -- warmroute "
    assert rules.count(in_a_pod) == len(re.findall("`warmroute ", alerts)) > 5
    assert rules.replace(in_a_pod, "`warmroute ") == alerts
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "warmroute"
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] in {p["name"] for p in service["spec"]["ports"]}


def test_links_of_the_alerts_can_lead_to_a_copy_of_the_documentation() -> None:
    values = {"prometheusRule": {"enabled": True, "docs": "https://docs.example/warmroute/"}}
    rule = one(rendered(**values), "PrometheusRule")

    links = [r["annotations"]["runbook_url"] for g in rule["spec"]["groups"] for r in g["rules"]]
    assert links[0] == "https://docs.example/warmroute/operate/alerts/#norouterready"
    assert all(link.startswith("https://docs.example/warmroute/operate/alerts/#") for link in links)


def test_grafanas_sidecar_finds_the_dashboard() -> None:
    """The ConfigMap has its label, and the file as it is."""
    found = one(rendered(**EVERYTHING), "ConfigMap", "warmroute-dashboard")

    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "LLM"}
    assert json.loads(found["data"]["warmroute.json"]) == dashboard()


@pytest.mark.parametrize(
    ("values", "scraped"),
    [
        ({}, {"scrape": "true", "port": "8080"}),
        ({"config": {"listen": {"port": 9000}}}, {"scrape": "true", "port": "9000"}),
        ({"serviceMonitor": {"enabled": True}}, {}),
        ({"scrapeAnnotations": False}, {}),
    ],
)
def test_prometheus_scrapes_a_router_once(values: dict[str, Any], scraped: dict[str, str]) -> None:
    """By annotations or by a ServiceMonitor, never by both."""
    template = one(rendered(**values), "Deployment")["spec"]["template"]

    found = template["metadata"]["annotations"]
    prefix = "prometheus.io/"
    named = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
    assert named == scraped


def test_openshift_chooses_the_ids() -> None:
    """`null` drops a key of the defaults; what forbids root stays."""
    manifests = rendered(**OPENSHIFT)

    for name in ("warmroute", "warmroute-redis"):
        kept = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert pod(manifests, name)["securityContext"] == kept


def test_the_password_of_redis_is_made() -> None:
    """A new one for each release; none if a Secret is named or there is no Redis."""
    manifests = [rendered(), rendered()]

    made = [one(each, "Secret", "warmroute-redis")["data"]["password"] for each in manifests]
    assert made[0] != made[1]
    assert len(b64decode(made[0])) == 48
    for values in ({"redis": {"secret": "mine"}}, LISTED, OWN_REDIS):
        assert all(each["kind"] != "Secret" for each in rendered(**values))


def test_only_routers_and_engines_reach_the_ports_of_events() -> None:
    """Redis is for routers; who calls them and who scrapes engines can be named."""
    manifests = rendered(**EVERYTHING)
    policies = {
        name: one(manifests, "NetworkPolicy", name)["spec"]
        for name in ("warmroute", "warmroute-redis", "warmroute-engines")
    }
    labels = {
        name: one(manifests, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        for name in ("warmroute", "warmroute-redis", "vllm")
    }
    router = {"podSelector": {"matchLabels": policies["warmroute"]["podSelector"]["matchLabels"]}}
    engine = {"podSelector": one(manifests, "Deployment", "vllm")["spec"]["selector"]}
    network = EVERYTHING["networkPolicy"]

    for policy, name in zip(policies.values(), labels, strict=True):
        assert policy["policyTypes"] == ["Ingress"]
        assert policy["podSelector"]["matchLabels"].items() <= labels[name].items()
    assert policies["warmroute"]["ingress"] == [
        {"ports": [{"port": "http"}], "from": network["clients"]}
    ]
    assert policies["warmroute-redis"]["ingress"] == [
        {"ports": [{"port": "redis"}], "from": [router]}
    ]
    assert policies["warmroute-engines"]["ingress"] == [
        {"from": [router, engine, *network["engineClients"]]}
    ]
    (open_to_all,) = one(rendered(**PLAIN_ACCESS), "NetworkPolicy")["spec"]["ingress"]
    assert "from" not in open_to_all


@pytest.mark.parametrize(("values", "hosts"), [(EVERYTHING, 2), (PLAIN_ACCESS, 0)])
def test_a_way_in_leads_to_the_service(values: dict[str, Any], hosts: int) -> None:
    """Every path, and without a time limit, whether or not hosts are named."""
    manifests = rendered(**values)
    service = one(manifests, "Service")
    (port,) = service["spec"]["ports"]
    ingress = one(manifests, "Ingress")["spec"]
    (rule,) = one(manifests, "HTTPRoute")["spec"]["rules"]

    assert len([each for each in ingress["rules"] if "host" in each]) == hosts
    for each in ingress["rules"]:
        (path,) = each["http"]["paths"]
        assert (path["path"], path["pathType"]) == ("/", "Prefix")
        assert path["backend"]["service"] == {"name": "warmroute", "port": {"name": port["name"]}}
    assert rule["backendRefs"] == [{"name": "warmroute", "port": port["port"]}]
    assert rule.get("timeouts") == ({"request": "0s"} if hosts else None)


def test_an_autoscaler_owns_the_number_of_routers() -> None:
    """The Deployment says none, and the budget follows the least number."""
    manifests = rendered(**EVERYTHING)
    spec = one(manifests, "HorizontalPodAutoscaler")["spec"]

    assert "replicas" not in one(manifests, "Deployment")["spec"]
    assert spec["scaleTargetRef"]["name"] == one(manifests, "Deployment")["metadata"]["name"]
    assert [metric["type"] for metric in spec["metrics"]] == ["Resource", "External"]
    assert "cpu" in pod(manifests)["containers"][0]["resources"]["requests"]
    assert one(manifests, "PodDisruptionBudget")
    kinds = {each["kind"] for each in rendered(**PLAIN_ACCESS)}
    assert "PodDisruptionBudget" not in kinds


def test_labels_are_on_everything_and_select_nothing() -> None:
    """They never replace the chart's own."""
    for manifest in rendered(**EVERYTHING):
        assert manifest["metadata"]["labels"]["team"] == "inference"
        assert manifest["metadata"]["labels"]["app.kubernetes.io/name"] != "not-ours"
        if manifest["kind"] == "Deployment":
            template = manifest["spec"]["template"]["metadata"]["labels"]
            selector = manifest["spec"]["selector"]["matchLabels"]
            assert "team" not in selector
            assert selector.items() <= template.items()
            assert template["team"] == "inference"
    template = one(rendered(**EVERYTHING), "Deployment")["spec"]["template"]["metadata"]
    assert template["labels"]["sidecar.istio.io/inject"] == "false"
    assert template["annotations"]["note"] == "ours"


def test_pods_take_what_an_operator_adds() -> None:
    manifests = rendered(**EVERYTHING)
    spec, redis, engine = (pod(manifests, n) for n in ("warmroute", "warmroute-redis", "vllm"))
    router = spec["containers"][0]

    assert router["image"] == f"registry:5000/warmroute@sha256:{'ab' * 32}"
    assert router["imagePullPolicy"] == "Always"
    assert router["envFrom"] == EVERYTHING["envFrom"]
    assert spec["initContainers"] == EVERYTHING["initContainers"]
    assert spec["containers"][1:] == EVERYTHING["extraContainers"]
    assert [each["priorityClassName"] for each in (spec, redis, engine)] == [
        "routers",
        "routers",
        "engines",
    ]
    assert engine["volumes"][0] == {
        "name": "hub",
        "persistentVolumeClaim": {"claimName": "models"},
    }
    assert pod(rendered(**PLAIN_ACCESS), "vllm")["volumes"][0] == {"name": "hub", "emptyDir": {}}


def test_an_account_of_ones_own_is_bound_to_the_role() -> None:
    own = {"serviceAccount": {"create": False, "name": "mine"}}
    manifests = rendered(**own)

    assert "ServiceAccount" not in {each["kind"] for each in manifests}
    assert pod(manifests)["serviceAccountName"] == "mine"
    assert one(manifests, "RoleBinding")["subjects"][0]["name"] == "mine"
    assert pod(rendered(**PLAIN_ACCESS))["serviceAccountName"] == "default"
    assert not {"Role", "RoleBinding"} & {each["kind"] for each in rendered(**PLAIN_ACCESS)}


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


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"secrets": {"engine": "vllm-key"}}, "There is no Secret vllm-key in namespace default"),
        (OWN_REDIS, "There is no Secret my-redis in namespace default"),
        ({"redis": {"deploy": False}}, "The routers share nothing"),
    ],
)
def test_notes_say_what_is_missing(values: dict[str, Any], said: str) -> None:
    """Secrets that nobody has made, and a Redis."""
    with Chart.load(CHART) as chart:
        notes = chart.render(values, name="warmroute")["warmroute/templates/NOTES.txt"]
        plain = chart.render(name="warmroute")["warmroute/templates/NOTES.txt"]

    assert said in notes
    assert plain.startswith("Wait until the routers are ready")


def test_the_schema_of_the_values_is_up_to_date() -> None:
    """`make docs` would change nothing."""
    script = DOCKER / "helm" / "generate.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, check=False)

    assert done.returncode == 0, done.stdout.decode()


def test_the_chart_names_its_own_version_and_the_oldest_kubernetes() -> None:
    """The chart is released with the package. tests/test_version.py checks its appVersion."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["version"] == chart["appVersion"]
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
