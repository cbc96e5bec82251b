"""Every SVG figure is well-formed XML, and small enough for a page."""

from xml.etree import ElementTree as ET

from tests.docs.pages import ROOT

MAX_BYTES = 200_000


def test_every_svg_parses_and_is_small() -> None:
    files = sorted((ROOT / "docs").rglob("*.svg"))
    assert files
    for file in files:
        assert ET.parse(file).getroot().tag.endswith("svg"), file
    assert [file.name for file in files if file.stat().st_size > MAX_BYTES] == []
