"""Pages lead somewhere, are found, and name what there is."""

import re

import pytest

from server.settings import Settings
from tests.docs import pages, real
from tests.docs.pages import PAGES, ROOT
from tests.server.live_server import LiveServer

DOCS = [page for page in PAGES if page.startswith("docs/")]


def anchors(text: str) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: str, target: str) -> bool:
    if target.startswith(("http://", "https://")):
        return False
    name, _, anchor = target.partition("#")
    path = (ROOT / page).parent / name if name else ROOT / page
    return not path.exists() or (bool(anchor) and anchor not in anchors(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", [*PAGES, "ARCHITECTURE.md", "CHANGELOG.md"])
def test_links_and_pictures_are_there(page: str) -> None:
    assert [f"{page}:{line}: {target}" for line, target in pages.links(page) if broken(page, target)] == []


def missing(page: str) -> set[str]:
    """Paths in code within lines that are not there; `x/…` and what has no folder are not looked for."""
    named = {span.text.rstrip("/") for span in pages.spans(page) if re.fullmatch(r"[a-z_]+/[\w./-]+", span.text)}
    return {name for name in named if name.split("/")[0] in FOLDERS and not (ROOT / name).exists()}


FOLDERS = ("nvium_core", "server", "loadtest", "docs", "deploy", "tests", "benchmarks")


@pytest.mark.parametrize("page", [*PAGES, "ARCHITECTURE.md"])
def test_a_path_that_a_page_names_is_there(page: str) -> None:
    assert missing(page) == set()


def test_the_architecture_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("target", ["no.md", "figures/no.png", "chat.md#no-such-heading", "#no-such-heading"])
def test_a_link_to_nowhere_is_found(target: str) -> None:
    assert broken("docs/loadtest.md", target)


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_left_to_be_filled_in(page: str) -> None:
    assert re.findall(r"(?<!\w)@+\w+|\bTODO\b|\bTBD\b", (ROOT / page).read_text(encoding="utf-8")) == []


def test_every_page_is_in_the_index() -> None:
    listed = {f"docs/{target}" for _, target in pages.links("docs/README.md")}
    decisions = {page for page in DOCS if page.startswith("docs/decisions/")}
    assert set(DOCS) - decisions - {"docs/README.md"} <= listed
    named = {f"docs/decisions/{target}" for _, target in pages.links("docs/decisions/README.md")}
    assert decisions - {"docs/decisions/README.md"} <= named


def test_every_command_is_in_the_index() -> None:
    spans = [span.text.split() for span in pages.spans("docs/README.md")]
    assert {words[1] for words in spans if words[0] == "nvium" and len(words) > 1} >= real.NVIUM.commands.keys()


FOREIGN_OPTIONS = {
    "--build-arg": "docker",
    "--device": "torch, and ours",
    "--model": "lm_eval, and ours",
    "--parallel": "make",
    "--profile": "docker compose",
    "--hypothesis-profile": "pytest",
}


@pytest.mark.parametrize("page", PAGES)
def test_an_option_that_a_page_names_is_one_of_ours(page: str) -> None:
    named = {word for span in pages.spans(page) for word in re.findall(r"^--[a-z][a-z-]+", span.text)}
    assert named - real.option_names() - FOREIGN_OPTIONS.keys() == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_variable_that_a_page_names_is_a_setting(page: str) -> None:
    named = re.findall(r"\bNVIUM_([A-Z_]+[A-Z])\b", (ROOT / page).read_text(encoding="utf-8"))
    assert {name.lower() for name in named} <= Settings.model_fields.keys()


def test_the_page_on_monitoring_has_every_metric_and_no_other(server: LiveServer) -> None:
    gateways = re.findall(
        r'Gauge\("(nvium_\w+)"', (ROOT / "server" / "replicas" / "gateway.py").read_text(encoding="utf-8")
    )
    told = {*re.findall(r"^# TYPE (nvium_\w+)", server.http.get("/metrics").text, re.MULTILINE), *gateways}
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    table, beside = text[text.index("## The metrics") : text.index("## Alerts")].split("## Coming from vLLM")
    rows = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    listed = {re.sub(r"\{.*", "", name) for row in rows for name in re.findall(r"`([^`]+)`", row)}
    names = {name for name in told if not name.endswith("_created")}
    assert listed == names
    assert set(re.findall(r"`(nvium_\w+)", beside)) <= names
