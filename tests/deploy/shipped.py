"""Reads the files in deploy/ for tests."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from server.app import STOP_SECONDS
from server.settings import Settings

ROOT = Path(__file__).parent.parent.parent
MONITORING = ROOT / "deploy" / "monitoring"

DASHBOARD = json.loads((MONITORING / "nvium.json").read_text())
RULES = [rule for group in yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"] for rule in group["rules"]]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CACHES = dict(re.findall(r"\b(HF_HOME|XDG_CACHE_HOME)=(\S+)", DOCKERFILE))
"""The image's cache folders by variable: for models from the Hub, and for nvium's own files."""


def leaving_seconds(environment: dict[str, str]) -> float:
    """Return the longest time from SIGTERM to the end of a server with these variables."""
    settings = Settings.model_fields
    names = ("goodbye_seconds", "drain_seconds")
    given = [float(environment.get(f"NVIUM_{name.upper()}", settings[name].default)) for name in names]
    return sum(given) + 2 * STOP_SECONDS


def panel_queries(window: str = "1m") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the title of each panel with its targets, with Grafana's variables replaced."""
    for panel in (panel for panel in DASHBOARD["panels"] if panel["type"] != "row"):
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", window).replace("$instance", ".*")
            yield panel["title"], target | {"expr": query}
