"""What we depend on is pinned, and looked up among known vulnerabilities or said not to have been."""

import json
import re
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import audit

ROOT = Path(__file__).parent.parent
PINS = {
    canonicalize_name(name): version
    for name, version in (
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    )
}
OURS = "nvium"
EXTRAS = ("", "test", "tracing", "training", "bench")
UNPINNED = re.compile(r"nvidia-.*|cuda-.*|triton|pip|wheel|nvium")
"""What PyTorch's builds for a GPU bring along by themselves, and pip."""

KNOWN: dict[str, Any] = {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
CLEAN: dict[str, Any] = {"name": "b", "version": "1", "vulns": []}
SKIPPED: dict[str, Any] = {"name": "c", "skip_reason": "not found"}


def needed(name: str, extras: tuple[str, ...] = ("",), seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """The names of all installed packages that one needs, itself included."""
    for text in requires(name) or ():
        requirement = Requirement(text)
        other = canonicalize_name(requirement.name)
        is_meant = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        if is_meant and other not in seen and is_installed(other):
            seen = needed(other, ("", *requirement.extras), seen | {other})
    return seen


def is_installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def test_every_package_that_is_needed_is_pinned_to_the_version_that_is_here() -> None:
    names = {name for name in needed(OURS, EXTRAS) if not UNPINNED.fullmatch(name)}
    assert {"torch", "uvicorn", "pytest", "h11"} <= names
    here = {name: distribution(name).version.partition("+")[0] for name in names}
    assert {name: PINS.get(name) for name in here} == here


def test_every_pin_is_exact() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []
    assert len(pins) == len(PINS)


@pytest.mark.parametrize(
    ("packages", "status", "said"),
    [
        ([CLEAN], 0, "1 packages, no known vulnerability"),
        ([CLEAN, KNOWN], 1, "a 1: CVE-1, fixed in 2"),
        ([CLEAN, SKIPPED], 1, "c: not looked up: not found"),
        ([], 1, "nothing was looked up"),
    ],
)
def test_an_audit_passes_only_if_every_package_was_looked_up_and_nothing_is_known(
    packages: list[dict[str, Any]], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([[KNOWN], packages])
    assert audit.main(["constraints.txt"], lambda _: next(answers)) == status
    assert capsys.readouterr().out == said + "\n"


@pytest.mark.parametrize("answer", [[], [SKIPPED], [CLEAN]])
def test_an_audit_that_reaches_no_advisories_says_so_and_fails_where_it_is_required(
    answer: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(["constraints.txt"], lambda _: answer) == 0
    assert capsys.readouterr().out.startswith("NOT AUDITED")
    assert audit.main(["constraints.txt", "--required"], lambda _: answer) == 1


def advisory(name: str, **affected: Any) -> dict[str, Any]:
    return {"id": f"PYSEC-{name}", "affected": [{"package": {"ecosystem": "PyPI", "name": name}, **affected}]}


def ranges(*events: dict[str, str]) -> list[dict[str, Any]]:
    return [{"type": "ECOSYSTEM", "events": list(events)}, {"type": "GIT", "events": [{"introduced": "0"}]}]


VULNERABLE = advisory("jinja2", versions=["2.4.1"], ranges=ranges({"introduced": "0"}, {"fixed": "2.11.3"}))
ADVISORIES = [
    VULNERABLE,
    advisory("Some.Package", ranges=ranges({"introduced": "1.0"}, {"fixed": "1.5"}, {"introduced": "2"})),
    advisory("other", ranges=ranges({"introduced": "0"}, {"last_affected": "1.9"})),
    {"withdrawn": "2024-01-01T00:00:00Z", **advisory("taken-back", ranges=ranges({"introduced": "0"}))},
]


@pytest.mark.parametrize(
    ("pinned", "told"),
    [
        ("some-package==1.4.9", "some-package 1.4.9: PYSEC-Some.Package, fixed in 1.5"),
        ("some_package==1.5", ""),
        ("some_package==2.1", "some_package 2.1: PYSEC-Some.Package, fixed in 1.5"),
        ("other==1.9", "other 1.9: PYSEC-other, fixed in none"),
        ("other==1.10", ""),
        ("jinja2==3.1.6\nunheard-of==1 # and why", ""),
        ("taken-back==1", ""),
    ],
)
@pytest.mark.parametrize("is_archive", [False, True])
def test_an_audit_by_a_file_of_advisories_asks_nobody_else(
    pinned: str, told: str, is_archive: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, pins = tmp_path / "advisories", tmp_path / "pins.txt"
    pins.write_text(f"# pins\n{pinned}\n")
    if is_archive:
        with zipfile.ZipFile(file, "w") as archive:
            for each in ADVISORIES:
                archive.writestr(f"{each['id']}.json", json.dumps(each))
    else:
        file.write_text(json.dumps(ADVISORIES))
    assert audit.main([str(pins), "--advisories", str(file)]) == int(bool(told))
    number = pinned.count("\n") + 1
    assert capsys.readouterr().out.strip() == (told or f"{number} packages, no known vulnerability")


def test_a_file_that_knows_nothing_of_what_is_known_decides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.json").write_text("[]")
    assert audit.main(["constraints.txt", "--required", "--advisories", str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().out.startswith("NOT AUDITED")
