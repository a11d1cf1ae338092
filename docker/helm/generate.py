"""Write what the code determines of the chart: the schema of its values.

    python docker/helm/generate.py            write the file
    python docker/helm/generate.py --check    status 1 if it is old

The schema of `config` is the one that `warmroute schema` prints.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from router.config.loader import json_schema

CHART = Path(__file__).parent / "warmroute"

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
SWITCH: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXT_LIST: Schema = {"type": "array", "items": TEXT}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
API: Schema = {"type": "object"}  # in the API's own form, which the API server checks
API_LIST: Schema = {"type": "array", "items": API}


def strict(**properties: Schema) -> Schema:
    """Describe an object that has no other keys."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


VALUES = strict(
    image=strict(
        repository=TEXT,
        tag=TEXT,
        digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
        pullPolicy={"enum": ["", "Always", "IfNotPresent", "Never"]},
    ),
    imagePullSecrets=API_LIST,
    replicas=COUNT,
    autoscaling=strict(
        enabled=SWITCH,
        minReplicas=COUNT,
        maxReplicas=COUNT,
        targetCPU=COUNT,
        metrics=API_LIST,
        behavior=API,
    ),
    config={"$ref": "#/$defs/Config"},
    secrets=TEXTS,
    env=API_LIST,
    envFrom=API_LIST,
    volumes=API_LIST,
    volumeMounts=API_LIST,
    initContainers=API_LIST,
    extraContainers=API_LIST,
    resources=API,
    probes=strict(readiness=API, liveness=API, startup=API),
    service=strict(type=TEXT, port=COUNT, annotations=TEXTS),
    podDisruptionBudget=strict(enabled=SWITCH, minAvailable={"type": ["integer", "string"]}),
    ingress=strict(
        enabled=SWITCH, className=TEXT, annotations=TEXTS, hosts=TEXT_LIST, tls=API_LIST
    ),
    httpRoute=strict(
        enabled=SWITCH, parentRefs=API_LIST, hostnames=TEXT_LIST, annotations=TEXTS, timeouts=API
    ),
    networkPolicy=strict(enabled=SWITCH, clients=API_LIST, engineClients=API_LIST),
    serviceAccount=strict(create=SWITCH, name=TEXT, annotations=TEXTS),
    rbac=strict(create=SWITCH),
    podSecurityContext=API,
    securityContext=API,
    labels=TEXTS,
    podLabels=TEXTS,
    podAnnotations=TEXTS,
    scrapeAnnotations=SWITCH,
    priorityClassName=TEXT,
    nodeSelector=TEXTS,
    tolerations=API_LIST,
    affinity=API,
    redis=strict(
        deploy=SWITCH,
        image=TEXT,
        maxmemory=TEXT,
        resources=API,
        url=TEXT,
        secret=TEXT,
        podSecurityContext=API,
        securityContext=API,
    ),
    engines=strict(
        service=strict(create=SWITCH, name=TEXT, selector=TEXTS, labels=TEXTS),
        example=strict(
            enabled=SWITCH,
            image=TEXT,
            model=TEXT,
            replicas=COUNT,
            gpus=COUNT,
            args=TEXT_LIST,
            hfTokenSecret=TEXT,
            models=API,
            podSecurityContext=API,
            securityContext=API,
            priorityClassName=TEXT,
            nodeSelector=TEXTS,
            tolerations=API_LIST,
        ),
    ),
    serviceMonitor=strict(enabled=SWITCH, interval=TEXT, labels=TEXTS),
    prometheusRule=strict(enabled=SWITCH, labels=TEXTS, docs=TEXT),
    dashboard=strict(enabled=SWITCH, labels=TEXTS, annotations=TEXTS),
    **{"global": API},
)


def values_schema() -> str:
    """Return the schema of the chart's values; of `config` only types and names."""
    config = json_schema()
    schema = {"$schema": config["$schema"], **VALUES, "$defs": config["$defs"]}
    return json.dumps(_bare(schema), separators=(",", ":")) + "\n"


def _bare(node: Any) -> Any:
    """Leave out descriptions, titles and defaults; keep properties of these names."""
    if isinstance(node, list):
        return [_bare(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _bare(each) for name, each in value.items()}
        if key in ("properties", "$defs")
        else _bare(value)
        for key, value in node.items()
        if key not in ("description", "title", "default")
    }


def main() -> int:
    """Write what is old; return 1 if there was something and --check forbade it."""
    parser = argparse.ArgumentParser(description="Write what is made from the chart.")
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if old")
    args = parser.parse_args()
    file, text = CHART / "values.schema.json", values_schema()
    if file.exists() and file.read_text() == text:
        return 0
    print(f"{file.name}: {'old; run `make docs`' if args.check else 'rewritten'}")
    if args.check:
        return 1
    file.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
