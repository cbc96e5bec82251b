import re
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import audit

ROOT = Path(__file__).parent.parent
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PIN_LINES = [line for line in CONSTRAINTS if not line.startswith("#")]
PINS = {canonicalize_name(name): version for name, version in (line.split("==") for line in PIN_LINES)}
OURS = "nvium"
EXTRAS = ("", "test", "bench", "ray")
UNPINNED = re.compile(r"nvidia-.*|cuda-.*|triton|pip|wheel|nvium")
"""Dependencies of PyTorch's CUDA builds, and pip."""

KNOWN: dict[str, Any] = {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
CLEAN: dict[str, Any] = {"name": "b", "version": "1", "vulns": []}
SKIPPED: dict[str, Any] = {"name": "c", "skip_reason": "not found"}


def needed(name: str, extras: tuple[str, ...] = ("",), seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the names of all installed packages that a package requires, itself included."""
    for text in requires(name) or ():
        requirement = Requirement(text)
        other = canonicalize_name(requirement.name)
        applies = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        if applies and other not in seen and is_installed(other):
            seen = needed(other, ("", *requirement.extras), seen | {other})
    return seen


def is_installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def test_every_dependency_is_pinned_to_the_installed_version_and_every_pin_is_exact():
    names = {name for name in needed(OURS, EXTRAS) if not UNPINNED.fullmatch(name)}
    assert {"torch", "uvicorn", "pytest", "h11"} <= names
    installed = {name: distribution(name).version.partition("+")[0] for name in names}
    assert {name: PINS.get(name) for name in installed} == installed
    assert [line for line in PIN_LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []
    assert len(PIN_LINES) == len(PINS)


@pytest.mark.parametrize(
    ("packages", "status", "output"),
    [
        ([CLEAN], 0, "1 packages, no known vulnerability"),
        ([CLEAN, KNOWN], 1, "a 1: CVE-1, fixed in 2"),
        ([CLEAN, SKIPPED], 1, "c: not audited: not found"),
        ([], 1, "no package was audited"),
    ],
)
def test_an_audit_passes_only_if_every_package_was_checked_and_none_is_vulnerable(packages, status, output, capsys):
    answers = iter([[KNOWN], packages])
    assert audit.main(["constraints.txt"], lambda _: next(answers)) == status
    assert capsys.readouterr().out == output + "\n"
