"""The check list of a release; stops at the first step that fails. Publishes nothing.

    python deploy/release.py            every step, in order
    python deploy/release.py --list     the steps
    python deploy/release.py install serve

The wheel is installed into an empty environment outside the repository and used from there. PyTorch comes from pip's
index; `--pip` adds options, such as `--pip '--extra-index-url URL'`.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STARTS_WITHIN_SECONDS = 180
PLATFORMS = {"manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28", "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28"}
"""Tag of a wheel with compiled kernels → ziglang's name of the platform."""
BY_HAND = """By hand:
  git tag --annotate v{version} --message 'nvium {version}' && git push --follow-tags
  upload dist/nvium-{version}* to the package index
  sign dist/ and publish nvium-{version}.cdx.json with it
  build, scan and push the image; docker compose up; look at the playground and at Grafana
  on a GPU: python -m pytest -m cuda, and the measurements that benchmarks/README.md lists
  install the chart in a cluster"""

ASK_BY_OPENAI = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
whole = client.completions.create(model="default", prompt="Once upon a time", max_tokens=8, seed=1)
chunks = client.completions.create(model="default", prompt="Once upon a time", max_tokens=8, seed=1, stream=True)
text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
assert text == whole.choices[0].text, (text, whole)
print(repr(text), whole.choices[0].nvium["exits"])
"""


class NotReady(Exception):
    """A failed step, and why."""


@dataclass(frozen=True)
class Release:
    """What is released; `folder` is outside the repository, for trials."""

    root: Path
    folder: Path
    pip_options: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return str(tomllib.loads((self.root / "pyproject.toml").read_text())["project"]["version"])

    @property
    def wheel(self) -> Path:
        """The wheel that compiles its kernels where it runs."""
        wheel = self.root / "dist" / f"nvium-{self.version}-py3-none-any.whl"
        require(wheel.exists(), f"{wheel} is not there; the step `build` makes it")
        return wheel

    def program(self, environment: str, name: str) -> Path:
        path = self.folder / environment / "bin" / name
        require(path.exists(), f"{path} is not there; the step `install` makes it")
        return path


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotReady(otherwise)


def run(*command: str | Path, cwd: Path, **options: Any) -> None:
    done = subprocess.run(command, cwd=cwd, check=False, **options)
    require(done.returncode == 0, f"{shlex.join(map(str, command))} ended with {done.returncode}")


def version(release: Release) -> None:
    """pyproject.toml's version is that of the chart, the images and the pages"""
    wrong = [place for place, found in stated_versions(release.root) if found != release.version]
    require(not wrong, f"not {release.version}: {', '.join(wrong)}")


def stated_versions(root: Path) -> Iterator[tuple[str, str]]:
    """Other places of the version, and what they say."""
    pages = [root / "docker-compose.yml", root / "README.md", *sorted((root / "docs").glob("*.md"))]
    patterns = dict.fromkeys(pages, r"\bnvium[:-](\d+\.\d+\.\d+)")
    patterns[root / "deploy" / "helm" / "nvium" / "Chart.yaml"] = r"^(?:appV|v)ersion: (\S+)"
    for path, pattern in patterns.items():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield from ((f"{path.relative_to(root)}:{number}", found) for found in re.findall(pattern, line))


def changelog(release: Release) -> None:
    """CHANGELOG.md has this version, with the day"""
    text = (release.root / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(release.version)}\] - (\d{{4}}-\d\d-\d\d)$", text, re.MULTILINE)
    if not found:
        raise NotReady(f"CHANGELOG.md has no line '## [{release.version}] - YYYY-MM-DD'")
    require(date.fromisoformat(found[1]) <= datetime.now(UTC).date(), f"{found[1]} is yet to come")


def clean(release: Release) -> None:
    """Everything is committed"""
    command = ["git", "status", "--porcelain"]
    changed = subprocess.run(command, cwd=release.root, check=True, capture_output=True, text=True).stdout
    require(not changed, f"not committed:\n{changed.rstrip()}")


def check(release: Release) -> None:
    """make check, with the audit of dependencies"""
    run("make", "check", "AUDIT_ARGS=--required", cwd=release.root)


def test(release: Release) -> None:
    """make test"""
    run("make", "test", cwd=release.root)


def build(release: Release) -> None:
    """A source distribution, and a wheel made of it"""
    shutil.rmtree(release.root / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build", cwd=release.root)
    for made in sorted((release.root / "dist").iterdir()):
        print(f"  {made.name}: {made.stat().st_size / 1e6:.1f} MB")


def kernels(release: Release) -> None:
    """Wheels with compiled kernels, for x86-64 and ARM"""
    for tag, target in PLATFORMS.items():
        made = with_kernels(release, tag, partial(compile_kernels, target))
        print(f"  {made.name}: {made.stat().st_size / 1e6:.1f} MB")


def compile_kernels(target: str, code: Path) -> None:
    run(sys.executable, "-m", "nvium_core.engine.device.native", target, cwd=code)


def with_kernels(release: Release, tag: str, compile_into: Callable[[Path], None]) -> Path:
    """Write a copy of the wheel for one platform. `compile_into` adds the kernels to the wheel's unpacked files."""
    wheel, dist, folder = (sys.executable, "-m", "wheel"), release.root / "dist", release.folder / tag
    shutil.rmtree(folder, ignore_errors=True)
    run(*wheel, "unpack", release.wheel, "--dest", folder, cwd=release.root, stdout=subprocess.DEVNULL)
    [code] = folder.iterdir()
    compile_into(code)
    for needless in (*code.rglob("__pycache__"), *code.rglob("*.lock")):
        shutil.rmtree(needless) if needless.is_dir() else needless.unlink()
    [about] = code.glob("*.dist-info/WHEEL")
    text = about.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    about.write_text(text.replace("Tag: py3-none-any", f"Tag: py3-none-{tag}"))
    epoch = {"SOURCE_DATE_EPOCH": "315532800"}  # the time of every file, so that the wheel is reproducible
    packing = (*wheel, "pack", code, "--dest-dir", dist)
    run(*packing, cwd=release.root, env=os.environ | epoch, stdout=subprocess.DEVNULL)
    return dist / f"nvium-{release.version}-py3-none-{tag}.whl"


def install(release: Release) -> None:
    """The wheel into an empty environment, OpenAI's client into another"""
    constraints = ("--constraint", str(release.root / "constraints.txt"))
    for environment, wanted in (("server", str(release.wheel)), ("client", "openai")):
        shutil.rmtree(release.folder / environment, ignore_errors=True)
        run(sys.executable, "-m", "venv", release.folder / environment, cwd=release.folder)
        pip = (release.program(environment, "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        run(*pip, *constraints, *release.pip_options, wanted, cwd=release.folder)
    where = "import nvium_core, server, loadtest; print(nvium_core.__file__, server.__file__, loadtest.__file__)"
    python = release.program("server", "python")
    files = subprocess.run([python, "-c", where], cwd=release.folder, check=True, capture_output=True, text=True).stdout
    inside = str(release.folder / "server")
    require(all(file.startswith(inside) for file in files.split()), f"imported from elsewhere: {files}")
    run(release.program("server", "nvium"), "--version", cwd=release.folder)


def serve(release: Release) -> None:
    """From there: a completion, the playground, metrics, and native layers where there is a compiler"""
    cache = release.folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with server(release, XDG_CACHE_HOME=str(cache)) as url:
        answer = json.loads(fetch(url + "/version"))
        require(answer.get("version") == release.version, f"/version says {answer}")
        asked = {"model": "default", "prompt": "Once upon a time", "max_tokens": 32, "seed": 1}
        choice = json.loads(fetch(url + "/v1/completions", asked))["choices"][0]
        require(len(choice["nvium"]["exits"]) == 32, f"not 32 tokens with exits: {choice}")
        print(f"  {choice['text']!r}")
        require('id="prompt"' in fetch(url + "/"), "/ is not the playground")
        require("nvium_generated_tokens_total" in fetch(url + "/metrics"), "/metrics does not count tokens")
    compiled = list(cache.rglob("nvium-*.so"))
    require(bool(compiled) or not shutil.which("c++"), "there is a compiler, and no native layers were compiled")
    print(f"  native layers: {compiled[0].name if compiled else 'none, as there is no C++ compiler'}")


def client(release: Release) -> None:
    """OpenAI's client gets the same text whole and as a stream"""
    with server(release) as url:
        run(release.program("client", "python"), "-c", ASK_BY_OPENAI, url, cwd=release.folder)


def bare(release: Release) -> None:
    """Without a compiler, the kernels in this platform's wheel serve"""
    [tag] = (tag for tag in PLATFORMS if tag.endswith(platform.machine()))
    made = release.wheel.with_name(f"nvium-{release.version}-py3-none-{tag}.whl")
    pip = (release.program("server", "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--no-deps", "--force-reinstall", made, cwd=release.folder)
    cache = release.folder / "bare-cache"
    shutil.rmtree(cache, ignore_errors=True)
    with server(release, XDG_CACHE_HOME=str(cache), PATH=str(release.folder / "server" / "bin")) as url:
        fetch(url + "/v1/completions", {"model": "default", "prompt": "Once", "max_tokens": 4})
    require("no native layers" not in (release.folder / "server.log").read_text(), "PyTorch's layers served")


def bill(release: Release) -> None:
    """What the wheel's environment holds, as CycloneDX"""
    listed, python = release.root / "dist" / f"nvium-{release.version}.cdx.json", release.program("server", "python")
    command = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
    options = ("--pyproject", release.root / "pyproject.toml", "--output-file", listed, python)
    run(*command, *options, cwd=release.root)
    print(f"  {listed.name}: {listed.stat().st_size / 1e3:.0f} kB")


@contextmanager
def server(release: Release, **environment: str) -> Iterator[str]:
    """The address of a server of the bundled model; must exit cleanly on a signal."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NVIUM_"))}
    command = [str(release.program("server", "nvium")), "serve", "--port", url.rpartition(":")[2]]
    with (release.folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=release.folder, env=variables | environment, stderr=log)
    try:
        started = time.monotonic()
        wait_until_ready(process, url)
        print(f"  ready after {time.monotonic() - started:.0f} s")
        yield url
        process.send_signal(signal.SIGTERM)
        require(process.wait(timeout=60) == 0, f"nvium serve ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    ends = time.monotonic() + STARTS_WITHIN_SECONDS
    while time.monotonic() < ends:
        require(process.poll() is None, f"nvium serve ended with {process.returncode}")
        try:
            fetch(url + "/readyz")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return
    raise NotReady(f"not ready within {STARTS_WITHIN_SECONDS} s")


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})  # noqa: S310  our own server
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        return str(response.read().decode())


STEPS: dict[str, Callable[[Release], None]] = {
    step.__name__: step
    for step in (version, changelog, clean, check, test, build, kernels, install, bill, serve, client, bare)
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("steps", nargs="*", metavar="STEP", help="all if left out")
    options.add_argument("--list", action="store_true", help="name the steps, and do nothing")
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "nvium-release")
    options.add_argument("--pip", default="", metavar="OPTIONS", help="for pip, such as '--find-links FOLDER'")
    asked = options.parse_args(arguments)
    if unknown := set(asked.steps) - STEPS.keys():
        options.error(f"no such step: {', '.join(sorted(unknown))}")
    if asked.list:
        print("\n".join(f"{name:10} {step.__doc__}" for name, step in STEPS.items()))
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    release = Release(ROOT, asked.folder.resolve(), tuple(shlex.split(asked.pip)))
    return walk(release, asked.steps or list(STEPS))


def walk(release: Release, steps: Sequence[str]) -> int:
    """0 if all these steps pass; ends at the first that fails."""
    for name in steps:
        print(f"{name}: {STEPS[name].__doc__}", flush=True)
        try:
            STEPS[name](release)
        except (NotReady, OSError, subprocess.SubprocessError) as error:
            print(f"  not yet: {error}")
            return 1
        print("  passed", flush=True)
    if list(steps) == list(STEPS):
        print(BY_HAND.format(version=release.version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
