"""Advisories in a file, in OSV's format: what is known of a package's versions, without asking anybody.

The file is one that OSV exports for PyPI (`all.zip`, an advisory in each of its JSON files), or a JSON list of them.
"""

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

Json = dict[str, Any]

PINNED = re.compile(r"^(?=[A-Za-z0-9])[^#;\s]+==[^#;\s]+", re.MULTILINE)


class Advisories:
    """Looks up like `audit.pip_audit`."""

    def __init__(self, file: Path) -> None:
        self._known = defaultdict[str, list[tuple[str, Json]]](list)
        for advisory in read(file):
            for affected in () if "withdrawn" in advisory else advisory.get("affected", ()):
                package = affected.get("package", {})
                if package.get("ecosystem") == "PyPI":
                    self._known[canonicalize_name(package["name"])].append((advisory["id"], affected))

    def __call__(self, requirements: Path) -> list[Json]:
        """What is known of each package that is pinned."""
        pinned = (Requirement(line) for line in PINNED.findall(requirements.read_text(encoding="utf-8")))
        return [self._looked_up(one.name, str(one.specifier).removeprefix("==")) for one in pinned]

    def _looked_up(self, name: str, version: str) -> Json:
        known = self._known[canonicalize_name(name)]
        vulns = [{"id": key, "fix_versions": fixes(about)} for key, about in known if is_affected(about, version)]
        return {"name": name, "version": version, "vulns": vulns}


def read(file: Path) -> Iterator[Json]:
    if not zipfile.is_zipfile(file):
        yield from json.loads(file.read_text(encoding="utf-8"))
        return
    with zipfile.ZipFile(file) as archive:
        yield from (json.loads(archive.read(name)) for name in archive.namelist() if name.endswith(".json"))


def is_affected(affected: Json, version: str) -> bool:
    """Whether the version is listed or within a range. What cannot be compared is affected only if it is listed."""
    if version in affected.get("versions", ()):
        return True
    ranges = (found["events"] for found in affected.get("ranges", ()) if found["type"] == "ECOSYSTEM")
    try:
        return any(is_within(events, Version(version)) for events in ranges)
    except InvalidVersion:
        return False


def is_within(events: list[Json], version: Version) -> bool:
    """As OSV evaluates events: in their order, each changes what is said of the versions behind it."""
    is_in = False
    for event in sorted(events, key=version_of):
        kind, place = next(iter(event.items()))[0], version_of(event)
        if kind == "introduced" and version >= place:
            is_in = True
        elif (kind == "fixed" and version >= place) or (kind == "last_affected" and version > place):
            is_in = False
    return is_in


def version_of(event: Json) -> Version:
    return Version(next(iter(event.values())))


def fixes(affected: Json) -> list[str]:
    ranges = (found for found in affected.get("ranges", ()) if found["type"] == "ECOSYSTEM")
    return [event["fixed"] for found in ranges for event in found["events"] if "fixed" in event]
