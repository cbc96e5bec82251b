import json
from typing import Any

import kubernetes_validate
import pytest
import yaml

from server.http.middleware import PROBES
from server.settings import Settings, read_settings
from tests.deploy.helm import CASES, CHART, EVERYTHING, rendered, run_helm
from tests.deploy.shipped import DASHBOARD, MONITORING, leaving_seconds

OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()
OF_THE_CHART = {"host", "port", "model", "api_keys", "api_keys_file"}
"""Settings that the chart sets outside `settings`."""

OF_NO_POD = {"ssl_certfile", "ssl_keyfile", "replicas"}
"""Settings that the chart does not support: probes use plain HTTP, and Kubernetes runs the replicas."""

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


def check(resource: dict[str, Any], version: str) -> None:
    if resource["kind"] not in ("ServiceMonitor", "PrometheusRule"):  # defined by the Prometheus operator
        kubernetes_validate.validate(resource, version, strict=True)


def pod(values: dict[str, Any]) -> dict[str, Any]:
    return rendered(values)["Deployment"]["spec"]["template"]["spec"]


def container(values: dict[str, Any]) -> dict[str, Any]:
    [only] = pod(values)["containers"]
    return only


def environment(values: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(values)["env"] if "value" in entry}


@each_case
def test_helms_lint_passes(values):
    done = run_helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@each_case
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_rendered_resources_match_kubernetes_schemas(values, version):
    for resource in rendered(values).values():
        check(resource, version)


def test_the_chart_has_every_setting_of_the_server():
    settings = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    assert settings.keys() == Settings.model_fields.keys() - OF_THE_CHART - OF_NO_POD


def test_the_server_reads_the_settings_that_the_chart_writes(monkeypatch):
    for name, value in environment(EVERYTHING).items():
        monkeypatch.setenv(name, value)
    settings = read_settings({})
    assert (settings.host, settings.port, settings.model) == ("0.0.0.0", 8000, "/models/tales")
    assert (settings.max_sequences, settings.max_body_bytes, settings.drain_seconds) == (64, 4_000_000, 90.5)
    assert settings.cors_origins == ("https://one.example", "https://two.example")
    assert settings.metrics_open
    assert str(settings.api_keys_file) == "/etc/nvium/keys.txt"


@each_case
def test_a_pod_has_no_privileges(values):
    spec, only = pod(values), container(values)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    limits = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert only["securityContext"] == limits
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()


@each_case
def test_probes_use_public_routes(values):
    expected = {"startup": "/readyz", "liveness": "/livez", "readiness": "/readyz"}
    assert {name: container(values)[f"{name}Probe"]["httpGet"]["path"] for name in expected} == expected
    assert set(expected.values()) <= set(PROBES)


@each_case
def test_the_grace_period_of_a_pod_is_longer_than_draining(values):
    assert pod(values)["terminationGracePeriodSeconds"] > leaving_seconds(environment(values))


def test_the_monitor_selects_the_service_and_rules_and_dashboard_equal_those_of_the_compose_file():
    resources = rendered(EVERYTHING)
    monitor, service = resources["ServiceMonitor"]["spec"], resources["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = [port["name"] for port in service["spec"]["ports"]]
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == ports
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "nvium"
    assert resources["PrometheusRule"]["spec"] == yaml.safe_load((MONITORING / "rules.yml").read_text())
    assert json.loads(resources["ConfigMap"]["data"]["nvium.json"]) == DASHBOARD
