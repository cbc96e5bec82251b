import json
from typing import Any

import kubernetes_validate
import pytest
import yaml

from server.app import STOP_SECONDS
from server.http.keys import PROBES
from server.settings import Settings, read_settings
from tests.deploy.helm import CASES, CHART, EVERYTHING, rendered, run_helm
from tests.deploy.shipped import DASHBOARD, MONITORING

OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()
OF_THE_CHART = {"host", "port", "model", "api_keys", "api_keys_file"}
"""Settings that have a place of their own among the values."""

OF_NO_POD = {
    *("ssl_certfile", "ssl_keyfile"),
    *("replicas", "max_replicas", "sequences_per_replica", "prefix_affinity", "upscale_seconds", "downscale_seconds"),
}
"""Probes speak plain HTTP, the image has no Ray, and Kubernetes keeps the replicas."""

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


def check(resource: dict[str, Any], version: str) -> None:
    """Raises for a resource that Kubernetes does not know or not so."""
    if resource["kind"] not in ("ServiceMonitor", "PrometheusRule"):  # its operator's
        kubernetes_validate.validate(resource, version, strict=True)


def pod(values: dict[str, Any]) -> dict[str, Any]:
    return rendered(values)["Deployment"]["spec"]["template"]["spec"]


def container(values: dict[str, Any]) -> dict[str, Any]:
    [only] = pod(values)["containers"]
    return only


def environment(values: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(values)["env"] if "value" in entry}


@each_case
def test_helm_finds_nothing_to_complain_about(values: dict[str, Any]):
    done = run_helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@each_case
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_what_is_rendered_follows_the_schemas(values: dict[str, Any], version: str):
    for resource in rendered(values).values():
        check(resource, version)


def test_every_setting_of_the_server_is_one_of_the_chart():
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert (
        schema["properties"]["settings"]["properties"].keys() == Settings.model_fields.keys() - OF_THE_CHART - OF_NO_POD
    )


def test_the_server_takes_the_settings_as_the_chart_gives_them(monkeypatch: pytest.MonkeyPatch):
    for name, value in environment(EVERYTHING).items():
        monkeypatch.setenv(name, value)
    settings = read_settings({})
    assert (settings.host, settings.port, settings.model) == ("0.0.0.0", 8000, "/models/tales")
    assert (settings.max_sequences, settings.max_body_bytes, settings.drain_seconds) == (64, 4_000_000, 90.5)
    assert settings.cors_origins == ("https://one.example", "https://two.example")
    assert settings.metrics_open
    assert str(settings.api_keys_file) == "/etc/nvium/keys.txt"


@each_case
def test_a_pod_has_no_rights(values: dict[str, Any]):
    spec, only = pod(values), container(values)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()


@each_case
def test_probes_ask_for_what_the_server_answers_to_anyone(values: dict[str, Any]):
    probes = {
        name: container(values)[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")
    }
    assert probes == {"startup": "/readyz", "liveness": "/livez", "readiness": "/readyz"}
    assert set(probes.values()) <= set(PROBES)


@each_case
def test_a_pod_is_given_longer_than_it_takes_to_drain(values: dict[str, Any]):
    goodbye = float(container(values)["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(environment(values).get("NVIUM_DRAIN_SECONDS", Settings.model_fields["drain_seconds"].default))
    assert pod(values)["terminationGracePeriodSeconds"] > goodbye + drain + 2 * STOP_SECONDS


def test_prometheus_finds_the_service_under_the_name_that_the_rules_know():
    resources = rendered(EVERYTHING)
    monitor, service = resources["ServiceMonitor"]["spec"], resources["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == [
        port["name"] for port in service["spec"]["ports"]
    ]
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "nvium"


def test_rules_and_dashboard_are_those_of_the_compose_file():
    resources = rendered(EVERYTHING)
    assert resources["PrometheusRule"]["spec"] == yaml.safe_load((MONITORING / "rules.yml").read_text())
    assert json.loads(resources["ConfigMap"]["data"]["nvium.json"]) == DASHBOARD
