"""The chart with its default values: manifests that fit each other and the router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import ValidationError

from router import config
from router.config import Config
from tests.compose.manifests import check, rendered

OBJECTS = rendered()


def objects(kind: str) -> Iterator[dict[str, Any]]:
    return (each for each in OBJECTS if each["kind"] == kind)


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in objects(kind) if each["metadata"]["name"] == name)
    return found


@pytest.fixture
def configured(tmp_path: Path) -> Config:
    """The configuration of the ConfigMap, as a router reads it."""
    file = tmp_path / "warmroute.yaml"
    file.write_text(named("ConfigMap", "warmroute")["data"]["warmroute.yaml"])
    return config.load(file)


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = named("Deployment", name)["spec"]["template"]["spec"]
    return spec


def test_a_misspelled_field_is_refused() -> None:
    """The schema is strict, down to a probe."""
    wrong = json.loads(json.dumps(named("Deployment", "warmroute")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["periodSecond"] = 1

    with pytest.raises(ValidationError, match="periodSecond"):
        check(wrong)


def test_the_grace_period_is_longer_than_a_drain(configured: Config) -> None:
    """With time to spare for the cut; and the front's probes notice within the grace."""
    listen, spec = configured.listen, pod("warmroute")
    probe = spec["containers"][0]["readinessProbe"]

    drains_s = listen.drain_grace_s + listen.drain_s
    assert spec["terminationGracePeriodSeconds"] >= drains_s + 5
    assert probe["periodSeconds"] * probe.get("failureThreshold", 3) < listen.drain_grace_s


def test_ports_and_probes_are_the_routers(configured: Config) -> None:
    """By name; the Service's target is the container's port."""
    (container,) = pod("warmroute")["containers"]
    (port,) = container["ports"]
    (service_port,) = named("Service", "warmroute")["spec"]["ports"]

    assert configured.listen.host == "0.0.0.0"
    assert port["containerPort"] == configured.listen.port
    assert service_port["targetPort"] == port["name"]
    paths = {k: container[k]["httpGet"]["path"] for k in container if k.endswith("Probe")}
    assert paths == {
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
        "startupProbe": "/healthz",
    }


@pytest.mark.parametrize("name", ["warmroute", "warmroute-redis"])
def test_labels_select_the_pods(name: str) -> None:
    """Deployment, Service and disruption budget mean the same pods."""
    template = named("Deployment", name)["spec"]["template"]["metadata"]["labels"]
    selectors = [
        named("Deployment", name)["spec"]["selector"]["matchLabels"],
        named("Service", name)["spec"]["selector"],
        *(
            each["spec"]["selector"]["matchLabels"]
            for each in objects("PodDisruptionBudget")
            if each["metadata"]["name"] == name
        ),
    ]

    assert all(selector.items() <= template.items() for selector in selectors)


def test_the_role_is_what_discovery_needs(configured: Config) -> None:
    """The Service is in the router's own namespace, and the account is the pod's."""
    (rule,) = named("Role", "warmroute")["rules"]
    binding = named("RoleBinding", "warmroute")
    (service,) = configured.discovery.kubernetes
    name, _, port = service.partition(":")

    assert rule["apiGroups"] == ["discovery.k8s.io"]
    assert rule["resources"] == ["endpointslices"]
    assert {"list", "watch"} <= set(rule["verbs"]) <= {"get", "list", "watch"}
    assert binding["roleRef"]["name"] == "warmroute"
    assert binding["subjects"][0]["name"] == pod("warmroute")["serviceAccountName"]
    assert port in [p["name"] for p in named("Service", name)["spec"]["ports"]]
    assert pod("warmroute").get("automountServiceAccountToken", True)


def test_variables_of_the_services_are_no_settings() -> None:
    """Kubernetes sets them in every pod; a router that took them for settings would not start."""
    environ: dict[str, str] = {}
    for each in objects("Service"):
        name = each["metadata"]["name"].upper().replace("-", "_")
        port = each["spec"]["ports"][0]["port"]
        link = f"tcp://10.96.0.9:{port}"
        environ |= {
            f"{name}_SERVICE_HOST": "10.96.0.9",
            f"{name}_SERVICE_PORT": str(port),
            f"{name}_SERVICE_PORT_HTTP": str(port),
            f"{name}_PORT": link,
            f"{name}_PORT_{port}_TCP": link,
            f"{name}_PORT_{port}_TCP_PROTO": "tcp",
            f"{name}_PORT_{port}_TCP_PORT": str(port),
            f"{name}_PORT_{port}_TCP_ADDR": "10.96.0.9",
        }

    assert "WARMROUTE_PORT" in environ
    assert config.load(environ=environ) == config.load()


@pytest.mark.parametrize("name", ["warmroute", "warmroute-redis"])
def test_nobody_is_root_and_secrets_are_files(name: str) -> None:
    """No capability, nothing to be written but what is mounted, no secret in a variable."""
    spec = pod(name)
    (container,) = spec["containers"]

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all("valueFrom" not in variable for variable in container.get("env", []))
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_the_redis_is_the_one_that_is_deployed(configured: Config) -> None:
    """Its address, and the Secret's key where the password is."""
    (port,) = named("Service", "warmroute-redis")["spec"]["ports"]
    (mount,) = (
        m for m in pod("warmroute")["containers"][0]["volumeMounts"] if m["name"] == "redis"
    )

    assert configured.redis.url == f"redis://warmroute-redis:{port['port']}/0"
    assert str(configured.redis.password_file) == f"{mount['mountPath']}/password"
