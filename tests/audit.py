"""Whether any pinned package has a known vulnerability: `python -m tests.audit constraints.txt`.

Where the database of advisories is not reached, as in a build without network, that is said and nothing is decided;
`--required` makes it a failure. Reached means that a package long known to be vulnerable is reported.

Exit codes: 0 nothing known, or not asked; 1 something is known, or could not be looked up.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KNOWN_VULNERABLE = "jinja2==2.4.1\n"

Audit = Callable[[Path], list[dict[str, Any]]]


def pip_audit(requirements: Path) -> list[dict[str, Any]]:
    """What is known of each package. Empty where nothing could be learnt."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json", f"--requirement={requirements}"]
    ran = subprocess.run([sys.executable, "-m", "pip_audit", *options], capture_output=True, text=True, check=False)
    try:
        return list(json.loads(ran.stdout)["dependencies"])
    except ValueError:
        return []


def is_reached(audit: Audit) -> bool:
    """One look-up, of a package that is known to be vulnerable."""
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "known.txt"
        known.write_text(KNOWN_VULNERABLE, encoding="utf-8")
        return any(package.get("vulns") for package in audit(known))


def findings(packages: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each vulnerability, and for each package that was not looked up."""
    told = [
        f"{package['name']}: not looked up: {package['skip_reason']}" for package in packages if "vulns" not in package
    ]
    return told + [
        f"{package['name']} {package['version']}: {known['id']}, fixed in {', '.join(known['fix_versions']) or 'none'}"
        for package in packages
        for known in package.get("vulns", ())
    ]


def main(argv: Sequence[str] | None = None, audit: Audit = pip_audit) -> int:
    parser = argparse.ArgumentParser(prog="audit", description="Look for known vulnerabilities of pinned packages.")
    parser.add_argument("requirements", type=Path)
    parser.add_argument("--required", action="store_true", help="fail where the advisories are not reached")
    arguments = parser.parse_args(argv)
    if not is_reached(audit):
        sys.stdout.write("NOT AUDITED: the database of advisories is not reached from here; nothing was looked up\n")
        return int(arguments.required)
    packages = audit(arguments.requirements)
    found = findings(packages) if packages else ["nothing was looked up"]
    sys.stdout.write("\n".join(found or [f"{len(packages)} packages, no known vulnerability"]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
