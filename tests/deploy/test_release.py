import json
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy import release as steps
from deploy.release import NotReady, Release
from nvium_core.engine.device.native import library
from nvium_core.engine.device.processor import instructions
from tests.deploy.shipped import ROOT
from tests.server.server_process import CODE, server_process

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


def test_this_repository_states_one_version():
    steps.version(Release(ROOT, ROOT))
    assert len(list(steps.stated_versions(ROOT))) >= 5


def test_a_different_version_is_reported_with_its_place(release):
    for name in FILES.keys() - {"pyproject.toml", "CHANGELOG.md"}:
        steps.version(release)
        rewrite(release, name, "1.2.3", "1.2.2")
        with pytest.raises(NotReady, match=f"{name}:1"):
            steps.version(release)
        rewrite(release, name, "1.2.2", "1.2.3")


def test_uncommitted_files_are_reported(release):
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
    folder = tmp_path_factory.mktemp("checkout") / "dist"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_a_wheel_contains_the_model_the_page_and_the_native_sources_but_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "nvium_core/checkpoints/stories-24m/model.safetensors",
        "nvium_core/checkpoints/stories-24m/tokenizer.json",
        "nvium_core/engine/device/native/functions.cpp",
        "nvium_core/engine/device/native/step.h",
        "server/playground/index.html",
        "loadtest/__main__.py",
    ):
        assert name in names
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"nvium_core", "server", "loadtest"}


SERVE = "import nvium_core, server, sys; print(nvium_core.__file__, server.__file__, file=sys.stderr); " + CODE


@pytest.mark.slow
def test_a_wheel_with_kernels_serves_without_a_compiler_and_without_the_repository(wheel, tmp_path):
    pytest.importorskip("wheel")
    name = instructions()
    if library.native_library(name) is None:
        pytest.skip("no C++ compiler here")
    version = wheel.name.split("-")[1]
    (wheel.parents[1] / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    compiled = library.build(name, library.user_cache_path("nvium"))

    def copy_into(code: Path) -> None:
        shutil.copy(compiled, code / library.FOLDER.relative_to(ROOT))

    release = Release(wheel.parents[1], tmp_path)
    made = steps.with_kernels(release, f"manylinux_2_28_{platform.machine()}", copy_into)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(made)], check=True)
    model = tmp_path / "site" / "nvium_core" / "checkpoints" / "stories-24m"
    variables = {"PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1", "PATH": str(tmp_path)}
    with server_process(model, tmp_path, SERVE, variables | {"XDG_CACHE_HOME": str(tmp_path / "cache")}) as server:
        asked = {"model": "stories-24m", "prompt": "Once upon a time", "max_tokens": 4, "seed": 1}
        [choice] = server.http.post("/v1/completions", json=asked).json()["choices"]
        assert len(choice["nvium"]["exits"]) == 4
        assert 'id="prompt"' in server.http.get("/").text
        imported, log = server.log().split("\n", 1)
        assert all(file.startswith(str(tmp_path / "site")) for file in imported.split())
        assert "no native layers" not in log


def test_the_bill_of_materials_lists_the_environment(release):
    pytest.importorskip("cyclonedx_py")
    (release.root / "pyproject.toml").write_text('[project]\nname = "nvium"\nversion = "1.2.3"\n')
    (release.root / "dist").mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", release.folder / "server"], check=True)
    [packages] = (release.folder / "server").glob("lib/*/site-packages")
    (packages / "fox-1.0.dist-info").mkdir()
    (packages / "fox-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fox\nVersion: 1.0\n")
    steps.bill(release)
    listed = json.loads((release.root / "dist" / "nvium-1.2.3.cdx.json").read_text())
    assert (listed["bomFormat"], listed["metadata"]["component"]["name"]) == ("CycloneDX", "nvium")
    assert [component["name"] for component in listed["components"]] == ["fox"]
