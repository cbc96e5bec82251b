"""What we use of the Prometheus operator's resources, which kubernetes-validate does not know.

Written after its CustomResourceDefinitions, monitoring.coreos.com/v1 of version 0.84; anything else is refused.
"""

from typing import Any


def only(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
DURATION = {"type": "string", "pattern": r"^\d+(ms|s|m|h|d)$"}
METADATA = only("name", "labels", name=TEXT, labels=TEXTS)

CREDENTIALS = only("name", "key", name=TEXT, key=TEXT)
ENDPOINT = only(
    "port",
    port=TEXT,
    path=TEXT,
    interval=DURATION,
    authorization=only("credentials", type={"const": "Bearer"}, credentials=CREDENTIALS),
)
SERVICE_MONITOR = only(
    "selector",
    "endpoints",
    jobLabel=TEXT,
    selector=only("matchLabels", matchLabels=TEXTS),
    endpoints=many(ENDPOINT),
)

RULE = only("alert", "expr", alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": DURATION})
PROMETHEUS_RULE = only("groups", groups=many(only("name", "rules", name=TEXT, rules=many(RULE))))


def resource(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    version = {"const": "monitoring.coreos.com/v1"}
    return only("metadata", "spec", apiVersion=version, kind={"const": kind}, metadata=METADATA, spec=spec)


SCHEMAS = {
    "ServiceMonitor": resource("ServiceMonitor", SERVICE_MONITOR),
    "PrometheusRule": resource("PrometheusRule", PROMETHEUS_RULE),
}
