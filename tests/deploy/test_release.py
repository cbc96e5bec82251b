"""The release's checks, and the contents of the wheel."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy import release as steps
from deploy.release import NotReady, Release
from tests.deploy.shipped import ROOT
from tests.server.live_server import wait_until
from tests.server.server_process import free_port

FILES = {
    "pyproject.toml": '[project]\nversion = "1.2.3"\n',
    "docker-compose.yml": "image: nvium:1.2.3\n",
    "README.md": "nvium-1.2.3-py3-none-any.whl\n",
    "docs/deploying.md": "registry.example/nvium:1.2.3\n",
    "deploy/helm/nvium/Chart.yaml": "version: 1.2.3\nappVersion: 1.2.3\nkubeVersion: '>=1.27'\n",
    "CHANGELOG.md": "## [Unreleased]\n\n## [1.2.3] - 2024-02-29\n",
}


@pytest.fixture
def release(tmp_path: Path) -> Release:
    for name, text in FILES.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Release(tmp_path / "checkout", tmp_path / "elsewhere")


def rewrite(release: Release, name: str, old: str, new: str) -> None:
    path = release.root / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def test_this_repository_states_one_version() -> None:
    steps.version(Release(ROOT, ROOT))
    assert len(list(steps.stated_versions(ROOT))) >= 5


def test_a_different_version_is_reported_with_its_place(release: Release) -> None:
    for name in FILES.keys() - {"pyproject.toml", "CHANGELOG.md"}:
        steps.version(release)
        rewrite(release, name, "1.2.3", "1.2.2")
        with pytest.raises(NotReady, match=f"{name}:1"):
            steps.version(release)
        rewrite(release, name, "1.2.2", "1.2.3")


def test_uncommitted_files_are_reported(release: Release) -> None:
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "All of it"]):
        subprocess.run([*git, *command], cwd=release.root, check=True)
    steps.clean(release)
    (release.root / "new.txt").touch()
    with pytest.raises(NotReady, match=r"new\.txt"):
        steps.clean(release)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the installed backend. Skip the test if there is none."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_a_wheel_contains_the_model_the_page_and_the_native_sources_but_no_tests(unpacked: Path) -> None:
    for name in (
        "nvium_core/checkpoints/stories-9m/model.safetensors",
        "nvium_core/checkpoints/stories-9m/tokenizer.json",
        "nvium_core/engine/device/native/functions.cpp",
        "nvium_core/engine/device/native/step.h",
        "server/playground/index.html",
        "loadtest/__main__.py",
    ):
        assert (unpacked / name).is_file(), name
    packages = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert packages == {"nvium_core", "server", "loadtest"}


@pytest.fixture
def served_from(unpacked: Path, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-P", "-m", "nvium_core.cli", "serve", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url), seconds=120)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_a_wheel_serves_the_bundled_model_without_the_repository(unpacked: Path, served_from: str) -> None:
    where = "import nvium_core, server; print(nvium_core.__file__, server.__file__)"
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    found = subprocess.check_output([sys.executable, "-P", "-c", where], env=environment, text=True)
    assert all(file.startswith(str(unpacked)) for file in found.split())
    asked = {"model": "stories-9m", "prompt": "Once upon a time", "max_tokens": 4, "seed": 1}
    [choice] = httpx.post(f"{served_from}/v1/completions", json=asked, timeout=60).json()["choices"]
    assert len(choice["nvium"]["exits"]) == 4
    assert 'id="prompt"' in httpx.get(served_from).text


def test_the_bill_of_materials_lists_the_environment(release: Release) -> None:
    pytest.importorskip("cyclonedx_py")
    (release.root / "pyproject.toml").write_text('[project]\nname = "nvium"\nversion = "1.2.3"\n')
    (release.root / "dist").mkdir()
    subprocess.run([sys.executable, "-m", "venv", release.folder / "server"], check=True)
    steps.bill(release)
    listed = json.loads((release.root / "dist" / "nvium-1.2.3.cdx.json").read_text())
    assert (listed["bomFormat"], listed["metadata"]["component"]["name"]) == ("CycloneDX", "nvium")
    assert "pip" in [component["name"] for component in listed["components"]]
