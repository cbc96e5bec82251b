"""Audits pinned packages for known vulnerabilities: `python -m tests.audit constraints.txt`.

Without network the audit is skipped, or fails with `--required`. The database counts as reachable if it reports a
package known to be vulnerable.

Exit codes: 0 no known vulnerability, or skipped; 1 a vulnerability, or a package that could not be audited.
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
    """Return pip-audit's entry for each package; empty if pip-audit failed."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json", f"--requirement={requirements}"]
    ran = subprocess.run([sys.executable, "-m", "pip_audit", *options], capture_output=True, text=True, check=False)
    try:
        return list(json.loads(ran.stdout)["dependencies"])
    except ValueError:
        return []


def is_reachable(audit: Audit) -> bool:
    """Return whether the audit of a vulnerable package reports it."""
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "known.txt"
        known.write_text(KNOWN_VULNERABLE, encoding="utf-8")
        return any(package.get("vulns") for package in audit(known))


def findings(packages: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each vulnerability and for each package that was not audited."""
    skipped = [package for package in packages if "vulns" not in package]
    return [f"{package['name']}: not audited: {package['skip_reason']}" for package in skipped] + [
        f"{package['name']} {package['version']}: {known['id']}, fixed in {', '.join(known['fix_versions']) or 'none'}"
        for package in packages
        for known in package.get("vulns", ())
    ]


def main(argv: Sequence[str] | None = None, audit: Audit = pip_audit) -> int:
    parser = argparse.ArgumentParser(prog="audit", description="Look for known vulnerabilities of pinned packages.")
    parser.add_argument("requirements", type=Path)
    parser.add_argument("--required", action="store_true", help="fail if the advisory database is not reachable")
    arguments = parser.parse_args(argv)
    if not is_reachable(audit):
        sys.stdout.write("NOT AUDITED: the advisory database is not reachable\n")
        return int(arguments.required)
    packages = audit(arguments.requirements)
    found = findings(packages) if packages else ["no package was audited"]
    sys.stdout.write("\n".join(found or [f"{len(packages)} packages, no known vulnerability"]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
