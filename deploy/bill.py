"""What a release is made of, in files that others' tools read.

    python deploy/bill.py materials SITE-PACKAGES FILE     a CycloneDX list of what is installed there
    python deploy/bill.py provenance FOLDER FILE           an in-toto statement: these files, made of this commit

Both are the same whenever they are made of the same: their time is that of the commit. Neither is signed.
"""

import argparse
import hashlib
import json
import platform
import re
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parent.parent

OF_INSTALLING = re.compile(r"^\.\./|\.pyc,|\.dist-info/(?:direct_url\.json|INSTALLER|REQUESTED),")
"""Commands, which name the interpreter's path, where the wheel lay, who installed it, and byte code."""

OURS = canonicalize_name("nvium")
NAMES = uuid.UUID("6f3c2a5e-64e5-4b43-9d0a-0f7a0e5f2f0c")
BUILD_TYPE = "https://in-toto.io/attestation/provenance/build/pyproject@v1"


def materials(site: Path, moment: datetime) -> str:
    """Every distribution of a folder, with what each requires; Raises `LookupError` without ours among them."""
    found = {canonicalize_name(one.name): one for one in distributions(path=[str(site)])}
    components = {name: component(one) for name, one in sorted(found.items())}
    ours = components.pop(OURS)
    bom = Bom(
        serial_number=uuid.uuid5(NAMES, "".join(sorted(f"{one.name}=={one.version};" for one in found.values()))),
        components=components.values(),
        metadata=BomMetaData(component=ours, timestamp=moment),
    )
    for name, one in found.items():
        required = [components[other] for other in sorted(requires(one)) if other in components]
        bom.register_dependency(ours if name == OURS else components[name], required)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def component(one: Distribution) -> Component:
    """The digest is of `RECORD`'s lines, with a digest of each file, without those of files that installing writes."""
    name, record = canonicalize_name(one.name), (one.read_text("RECORD") or "").splitlines(keepends=True)
    lines = "".join(line for line in record if not OF_INSTALLING.search(line))
    digest = HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(lines.encode()).hexdigest())
    kind = ComponentType.APPLICATION if name == OURS else ComponentType.LIBRARY
    url = PackageURL("pypi", name=name, version=one.version)
    return Component(type=kind, name=one.name, version=one.version, purl=url, bom_ref=str(url), hashes=[digest])


def requires(one: Distribution) -> Iterator[NormalizedName]:
    """Names of what it wants on this machine, extras aside."""
    for wanted in map(Requirement, one.requires or ()):
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            yield canonicalize_name(wanted.name)


def provenance(folder: Path, commit: str, source: str) -> str:
    """Of all files of a folder but such statements: SLSA's form, of a build by hand."""
    files = sorted(path for path in folder.iterdir() if not path.name.endswith(".provenance.json"))
    pins = ROOT / "constraints.txt"
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [described(path) for path in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"source": source, "command": "python -m build"},
                "internalParameters": {"python": platform.python_version(), "build": version("build")},
                "resolvedDependencies": [{"uri": source, "digest": {"gitCommit": commit}}, described(pins)],
            },
            "runDetails": {"builder": {"id": f"{source}/blob/{commit}/deploy/release.py"}},
        },
    }
    return json.dumps(statement, indent=1) + "\n"


def described(path: Path) -> dict[str, Any]:
    return {"name": path.name, "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}


def git(*arguments: str) -> str:
    """What git says of this checkout, nothing where it says nothing."""
    ran = subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)  # noqa: S603, S607
    return ran.stdout.strip()


def source() -> str:
    """Where the checkout comes from, without anybody's name or key."""
    return "git+" + re.sub(r"//[^/@]*@", "//", git("remote", "get-url", "origin") or "file:nvium")


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["materials", "provenance"])
    options.add_argument("folder", type=Path)
    options.add_argument("file", type=Path)
    asked = options.parse_args(arguments)
    if asked.what == "materials":
        moment = datetime.fromtimestamp(int(git("log", "-1", "--format=%ct") or 0), UTC)
        asked.file.write_text(materials(asked.folder, moment))
    else:
        asked.file.write_text(provenance(asked.folder, git("rev-parse", "HEAD"), source()))


if __name__ == "__main__":
    main()
