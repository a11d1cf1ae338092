"""Render the chart, and check manifests against the API's schemas: offline, without a cluster."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import yaml
from helm_python import Chart
from jsonschema import Draft202012Validator

from tests.compose.stacks import ROOT

CHART = ROOT / "docker" / "helm" / "warmroute"
OLDEST, NEWEST = "1.25", "1.37"  # releases of Kubernetes; the oldest is in Chart.yaml

# The custom resources of the Prometheus Operator 0.93.0: strict, without descriptions. Apache-2.0,
# its licence is beside it.
OPERATOR = json.loads((ROOT / "tests/data/prometheus-operator/schema.json").read_text())

# The fields that the chart writes. Source: Gateway API 1.4, HTTPRouteSpec.
_NAMES = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _strict(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


def _several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "maxItems": 16, "items": item}


HTTP_ROUTE = _strict(
    "spec",
    apiVersion={"const": "gateway.networking.k8s.io/v1"},
    kind={"const": "HTTPRoute"},
    metadata=_strict("name", name={"type": "string"}, labels=_NAMES, annotations=_NAMES),
    spec=_strict(
        "rules",
        parentRefs=_several(
            _strict(
                "name",
                name={"type": "string"},
                namespace={"type": "string"},
                sectionName={"type": "string"},
                port={"type": "integer"},
            )
        ),
        hostnames=_several({"type": "string", "minLength": 1}),
        rules=_several(
            _strict(
                matches=_several(
                    _strict(
                        path=_strict(
                            type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                            value={"type": "string"},
                        )
                    )
                ),
                timeouts=_strict(request=_DURATION, backendRequest=_DURATION),
                backendRefs=_several(
                    _strict("name", name={"type": "string"}, port={"type": "integer"})
                ),
            )
        ),
    ),
)

Manifest = dict[str, Any]


def parse(text: str) -> list[Manifest]:
    """Read the documents of a file; empty ones are left out."""
    return [each for each in yaml.safe_load_all(text) if each]


def rendered(name: str = "warmroute", namespace: str = "default", **values: Any) -> list[Manifest]:
    """Render the chart as `helm install NAME --namespace NAMESPACE` would, with these values."""
    with Chart.load(CHART) as chart:
        files = chart.render(values, name=name, namespace=namespace)
    return [each for file, text in files.items() if file.endswith(".yaml") for each in parse(text)]


def one(manifests: list[Manifest], kind: str, name: str = "warmroute") -> Manifest:
    """Return the manifest of this kind and name."""
    (found,) = (m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return found


def check(manifest: Manifest) -> None:
    """Check a manifest against its schema; unknown fields are refused.

    Raises:
        ValidationError: of jsonschema; what is wrong, and where.
    """
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        Draft202012Validator(OPERATOR[manifest["kind"]]).validate(manifest)
        return
    if manifest["apiVersion"].startswith("gateway.networking.k8s.io/"):
        Draft202012Validator(HTTP_ROUTE).validate(manifest)
        return
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(manifest, version, strict=True)
