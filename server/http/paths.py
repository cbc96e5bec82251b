"""Requests that are special by their path: probes, public pages, and those that cost nothing."""

from starlette.types import Scope

PROBES = ("/livez", "/readyz", "/health")
METRICS = "/metrics"
MODELS = "/v1/models"
PAGE = "/"
ASSETS = "/assets/"
READING = ("GET", "HEAD")


def is_public(scope: Scope) -> bool:
    is_page = (scope["path"] == PAGE or scope["path"].startswith(ASSETS)) and scope["method"] in READING
    return is_page or is_probe(scope)


def is_probe(scope: Scope) -> bool:
    return scope["path"] in PROBES and scope["method"] in READING


def is_metrics(scope: Scope) -> bool:
    return scope["path"] == METRICS and scope["method"] in READING


def is_free(scope: Scope) -> bool:
    return is_public(scope) or is_metrics(scope) or (scope["path"].startswith(MODELS) and scope["method"] in READING)
