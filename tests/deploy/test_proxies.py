"""The samples for proxies in docs/deploying.md are valid for the real programs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import blocks

NGINX = "pid {folder}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{ access_log off; {sample} }}"


@pytest.mark.parametrize(
    ("program", "start", "whole", "options"),
    [
        ("nginx", "upstream nvium", NGINX, ["-t", "-c"]),
        ("haproxy", "global", "{sample}", ["-c", "-f"]),
        ("systemd-analyze", "[Service]", "{sample}", ["verify"]),
    ],
)
def test_the_sample_is_valid(program: str, start: str, whole: str, options: list[str], tmp_path: Path) -> None:
    [sample] = [block.text for block in blocks("docs/deploying.md") if block.text.startswith(start)]
    path = shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin:/usr/local/sbin")
    if path is None:
        pytest.skip(f"{program} is not installed")
    sample = sample.replace("/opt/nvium/bin/nvium", "/bin/true")
    (tmp_path / "nvium.service").write_text(whole.format(folder=tmp_path, sample=sample))
    checked = subprocess.run([path, *options, tmp_path / "nvium.service"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
