"""Security headers for browsers. A route's own headers take precedence."""

from starlette.datastructures import MutableHeaders

PROTECTIVE = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def protect(headers: MutableHeaders) -> None:
    for name, value in PROTECTIVE.items():
        headers.setdefault(name, value)
