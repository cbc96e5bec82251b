"""The files in deploy/ray."""

import re
from copy import deepcopy

import kubernetes_validate
import pytest
import yaml

from server.settings import read_settings
from tests.deploy.shipped import ROOT

FOLDER = ROOT / "deploy" / "ray"
SERVE_CONFIG = yaml.safe_load((FOLDER / "serve.yaml").read_text())
MANIFEST = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
CLUSTER = MANIFEST["spec"]["rayClusterConfig"]
PODS = [group["template"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]
VARIABLES = {
    entry["name"]: entry["value"]
    for entry in PODS[0]["spec"]["containers"][0]["env"]
    if entry["name"].startswith("RAY_SERVE_")
}


def test_the_manifest_has_the_config_for_other_clusters():
    assert yaml.safe_load(MANIFEST["spec"]["serveConfigV2"]) == SERVE_CONFIG


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_matches_kubernetes_schemas(pod):
    resource = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "nvium"}, **deepcopy(pod)}
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    del resource["spec"]["containers"]
    with pytest.raises(kubernetes_validate.ValidationError, match="containers"):
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_arguments_are_options_and_streams_outlast_updates():
    [application] = SERVE_CONFIG["applications"]
    [deployment] = application["deployments"]
    settings = read_settings(application["args"])
    assert deployment["max_ongoing_requests"] > settings.max_sequences
    streams = deployment["graceful_shutdown_timeout_s"]
    assert (
        min(MANIFEST["spec"]["rayClusterDeletionDelaySeconds"], PODS[1]["spec"]["terminationGracePeriodSeconds"])
        >= streams
    )


def test_the_page_and_the_manifest_set_the_same_variables():
    page = (ROOT / "docs" / "deploying.md").read_text()
    [command] = re.findall(r"^    export (RAY_AUTH_MODE=.*)$", page, re.MULTILINE)
    assert dict(word.split("=") for word in command.split()) == {
        "RAY_AUTH_MODE": CLUSTER["authOptions"]["mode"],
        **VARIABLES,
    }
