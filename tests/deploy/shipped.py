"""What lies in deploy/, read for tests."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
MONITORING = ROOT / "deploy" / "monitoring"

DASHBOARD = json.loads((MONITORING / "nvium.json").read_text())
RULES = [rule for group in yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"] for rule in group["rules"]]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CACHES = dict(re.findall(r"\b(HF_HOME|XDG_CACHE_HOME)=(\S+)", DOCKERFILE))
"""Where the image keeps models from the Hub, and what nvium itself keeps, by variable."""


def panels() -> list[dict[str, Any]]:
    """Those that show something, not the rows that hold them."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def panel_queries(window: str = "1m") -> Iterator[tuple[str, dict[str, Any]]]:
    """Titles and targets, with what Grafana would put in for its variables."""
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", window).replace("$instance", ".*")
            yield panel["title"], target | {"expr": query}
