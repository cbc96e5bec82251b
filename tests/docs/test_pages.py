import re

from nvium_core.model.gguf import KINDS
from nvium_core.text.gguf_tokenizer import PIECES
from server.settings import Settings
from tests.docs import pages, real
from tests.docs.pages import PAGES, ROOT

FOLDERS = ("nvium_core", "server", "loadtest", "research", "docs", "deploy", "tests", "benchmarks")


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: str, target: str) -> bool:
    if target.startswith(("http://", "https://")):
        return False
    name, _, anchor = target.partition("#")
    path = (ROOT / page).parent / name if name else ROOT / page
    return not path.exists() or (bool(anchor) and anchor not in anchors(path.read_text(encoding="utf-8")))


def missing(page: str) -> set[str]:
    """Return the paths in inline code that do not exist."""
    named = {span.text.rstrip("/") for span in pages.spans(page) if re.fullmatch(r"[a-z_]+/[\w./-]+", span.text)}
    return {name for name in named if name.split("/")[0] in FOLDERS and not (ROOT / name).exists()}


def test_links_pictures_and_named_paths_exist():
    dead = [f"{page}:{line}: {target}" for page in PAGES for line, target in pages.links(page) if broken(page, target)]
    assert dead == []
    assert {page: names for page in PAGES if (names := missing(page))} == {}


def test_every_page_and_every_command_is_in_the_index():
    listed = {f"docs/{target}" for _, target in pages.links("docs/README.md")}
    top = {page for page in PAGES if re.fullmatch(r"docs/[^/]+\.md", page)}
    assert top - {"docs/README.md"} <= listed
    spans = [span.text.split() for span in pages.spans("docs/README.md")]
    assert {words[1] for words in spans if words[0] == "nvium" and len(words) > 1} >= real.NVIUM.commands.keys()


def test_every_variable_on_a_page_is_a_setting_and_no_page_has_open_ends():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        named = {name.lower() for name in re.findall(r"\bNVIUM_([A-Z_]+[A-Z])\b", text)}
        assert named <= Settings.model_fields.keys(), page
        assert re.findall(r"(?<!\w)@+\w+|\bTODO\b|\bTBD\b", text) == [], page


def test_the_page_on_models_has_every_type_and_tokenizer_of_gguf_files():
    listed = {span.text for span in pages.spans("docs/models.md")}
    assert listed >= PIECES.keys()
    assert set(KINDS) <= set(re.findall(r"\w+", (ROOT / "docs" / "models.md").read_text(encoding="utf-8")))


def test_the_page_on_monitoring_names_only_metrics_of_the_server(server):
    exported = re.findall(r"^# TYPE (nvium_\w+)", server.http.get("/metrics").text, re.MULTILINE)
    named = re.findall(r"`(nvium_\w+)", (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8"))
    assert named and set(named) <= set(exported)
