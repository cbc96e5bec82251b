"""The release's check list: what it calls not ready, and what a wheel has in it."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from deploy import bill
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


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("pyproject.toml", "CHANGELOG.md")])
def test_another_version_anywhere_is_named_with_its_place(release: Release, name: str) -> None:
    steps.version(release)
    rewrite(release, name, "1.2.3", "1.2.2")
    with pytest.raises(NotReady, match=f"{name}:1"):
        steps.version(release)


def test_a_changelog_must_have_the_version_and_the_day(release: Release) -> None:
    steps.changelog(release)
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    for wrong in (f"## [1.2.3] - {tomorrow}", "## [1.2.3]", "## [1.2.4] - 2024-02-29"):
        (release.root / "CHANGELOG.md").write_text(wrong + "\n")
        with pytest.raises(NotReady):
            steps.changelog(release)


def test_what_is_not_committed_is_named(release: Release) -> None:
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "All of it"]):
        subprocess.run([*git, *command], cwd=release.root, check=True)
    steps.clean(release)
    (release.root / "new.txt").touch()
    with pytest.raises(NotReady, match=r"new\.txt"):
        steps.clean(release)


@pytest.mark.parametrize("advisories", [None, Path("/a folder/all.zip")])
def test_the_audit_is_required_and_takes_a_file_of_advisories(release: Release, advisories: Path | None) -> None:
    told = "check:\n\t@printf '%s\\n' $(AUDIT_ARGS) > asked\n"
    (release.root / "Makefile").write_text(told)
    steps.check(replace(release, advisories=advisories))
    expected = ["--required", *(["--advisories", str(advisories)] if advisories else [])]
    assert (release.root / "asked").read_text().splitlines() == expected


def test_the_walk_ends_at_the_first_step_that_is_not_passed(
    release: Release, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def passes(_: Release) -> None:
        done.append("passes")

    def fails(_: Release) -> None:
        done.append("fails")
        raise NotReady("no wheel")

    monkeypatch.setattr(steps, "STEPS", {"one": passes, "two": fails, "three": passes})
    assert steps.walk(release, ["one", "two", "three"]) == 1
    assert done == ["passes", "fails"]
    assert "not yet: no wheel" in capsys.readouterr().out
    assert steps.walk(release, ["one", "three"]) == 0
    assert "By hand" not in capsys.readouterr().out
    monkeypatch.setattr(steps, "STEPS", {"one": passes})
    assert steps.walk(release, ["one"]) == 0
    assert "git tag --annotate v1.2.3" in capsys.readouterr().out


@pytest.mark.parametrize("step", ["serve", "client", "bare", "install", "bill"])
def test_a_step_that_needs_another_one_names_it(
    release: Release, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    release.folder.mkdir()
    assert steps.walk(release, [step]) == 1
    assert "the step `" in capsys.readouterr().out


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(SystemExit) as ending:
        steps.main(["sing"])
    assert ending.value.code == 2


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the backend that this environment has; skipped where it has none."""
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


def test_a_wheel_has_the_model_the_page_and_the_native_sources_and_no_tests(unpacked: Path) -> None:
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
def test_what_a_wheel_holds_serves_the_embedded_model_without_the_repository(unpacked: Path, served_from: str) -> None:
    where = "import nvium_core, server; print(nvium_core.__file__, server.__file__)"
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    found = subprocess.check_output([sys.executable, "-P", "-c", where], env=environment, text=True)
    assert all(file.startswith(str(unpacked)) for file in found.split())
    asked = {"model": "stories-9m", "prompt": "Once upon a time", "max_tokens": 4, "seed": 1}
    [choice] = httpx.post(f"{served_from}/v1/completions", json=asked, timeout=60).json()["choices"]
    assert len(choice["nvium"]["exits"]) == 4
    assert 'id="prompt"' in httpx.get(served_from).text


def test_materials_tell_files_apart_but_not_where_and_by_whom_they_were_installed(tmp_path: Path) -> None:
    folder = tmp_path / "nvium-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: nvium\nVersion: 1\n")

    def materials(*lines: str) -> str:
        (folder / "RECORD").write_text("".join(f"{line}\n" for line in lines))
        return bill.materials(tmp_path, datetime(2024, 2, 29, tzinfo=UTC))

    module = "nvium_core/cli.py,sha256=aa,3"
    elsewhere = (
        "../../../bin/nvium,sha256=bb,9",
        "nvium-1.dist-info/direct_url.json,sha256=cc,9",
        "nvium-1.dist-info/INSTALLER,sha256=dd,2",
        "nvium-1.dist-info/REQUESTED,,",
        "nvium_core/__pycache__/cli.cpython-311.pyc,,",
    )
    assert materials(module) == materials(*elsewhere, module)
    assert materials(module) != materials("nvium_core/cli.py,sha256=ab,3")


def test_materials_and_provenance_name_what_there_is_and_come_out_the_same_again(tmp_path: Path) -> None:
    for folder, said in (("nvium-1.dist-info", "Requires-Dist: B_b>=2; python_version>'3'"), ("b_b-2.dist-info", "")):
        (tmp_path / folder).mkdir()
        name, version = folder.removesuffix(".dist-info").split("-")
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{said}\n"
        (tmp_path / folder / "METADATA").write_text(text)
    moment = datetime(2024, 2, 29, tzinfo=UTC)
    listed = json.loads(bill.materials(tmp_path, moment))
    assert bill.materials(tmp_path, moment) == json.dumps(listed, indent=1) + "\n"
    assert (listed["bomFormat"], listed["metadata"]["component"]["name"]) == ("CycloneDX", "nvium")
    assert [component["purl"] for component in listed["components"]] == ["pkg:pypi/b-b@2"]
    assert {"ref": "pkg:pypi/nvium@1", "dependsOn": ["pkg:pypi/b-b@2"]} in listed["dependencies"]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "a.whl").write_bytes(b"a")
    told = json.loads(bill.provenance(tmp_path / "dist", "c0ffee", "git+file:nvium"))
    digest = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert told["subject"] == [{"name": "a.whl", "digest": {"sha256": digest}}]
    assert told["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"] == {"gitCommit": "c0ffee"}
