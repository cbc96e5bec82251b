"""Renders the chart with Helm."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.shipped import ROOT

CHART = ROOT / "deploy" / "helm" / "nvium"

EVERYTHING = {
    "fullnameOverride": "tales",
    "image": {"repository": "registry.example/nvium", "tag": "0.1.0-cuda"},
    "imagePullSecrets": [{"name": "registry"}],
    "model": "/models/tales",
    "settings": {"max_sequences": 64, "max_body_bytes": 4_000_000, "drain_seconds": 90.5, "cache_memory": "20%"}
    | {"metrics_open": True, "cors_origins": "https://one.example, https://two.example"},
    "apiKeys": {"secret": "keys"},
    "hubCache": {"claim": "models"},
    "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "40Gi", "nvidia.com/gpu": 1}},
    "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"},
    "autoscaling": {"enabled": True, "cpuPercent": 80},
    "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
    "serviceAccount": {"annotations": {"role": "none"}},
    "monitoring": {"serviceMonitor": True, "rules": True, "dashboard": True}
    | {"labels": {"release": "prometheus"}, "key": {"secret": "metrics-key"}},
    "podAnnotations": {"team": "stories"},
    "podLabels": {"team": "stories"},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "extraVolumes": [{"name": "tales", "persistentVolumeClaim": {"claimName": "tales", "readOnly": True}}],
    "extraVolumeMounts": [{"name": "tales", "mountPath": "/models/tales", "readOnly": True}],
}

BY_PROCESSOR = {"enabled": True, "requestsWaiting": None, "requestsRunning": None, "cpuPercent": 70}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "autoscaling by the processor": {"autoscaling": BY_PROCESSOR},
    "next to nothing": {
        "replicas": 0,
        "settings": {"drain_seconds": None, "goodbye_seconds": 0},
        "resources": {"requests": None, "limits": None},
        "disruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False},
    },
}


@cache
def helm() -> str:
    """Return the path of Helm, from the test environment or from PATH. Skip the test if there is none."""
    places = os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()])
    return shutil.which("helm", path=places) or pytest.skip("helm is not installed (`make check` fetches it)")


def run_helm(*command: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    arguments = [helm(), *command, "--values", "-"]
    return subprocess.run(arguments, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Render the chart and return its resources by kind. There is one of each kind."""
    resources = [resource for resource in yaml.safe_load_all(rendered_text(json.dumps(values))) if resource]
    by_kind = {resource["kind"]: resource for resource in resources}
    assert len(by_kind) == len(resources)
    return by_kind


@cache
def rendered_text(values: str) -> str:
    done = run_helm("template", "release", str(CHART), "--namespace", "stories", values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return done.stdout


def pod_metrics(values: dict[str, Any]) -> list[str]:
    metrics = rendered(values)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    return [metric["pods"]["metric"]["name"] for metric in metrics if metric["type"] == "Pods"]
