"""The page's files, without a browser. Everybody can distinguish and read the tones of exits."""

import re
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from nvium_core import LoadedModel
from server.routes.playground import FOLDER
from tests.server.live_server import LiveServer, live_server
from tests.server.raw_client import error_of

REFERENCE = re.compile(r"""(?:src|href)="([^"#]+)"|from "\./([^"]+)";""")
ELSEWHERE = re.compile(r"""(?:https?:)?//[\w.-]+\.\w+|@import|url\(""")
NAMESPACE = "http://www.w3.org/2000/svg"
ASSETS = {file.name for file in FOLDER.iterdir()}
PATHS = ["/", *(f"/assets/{name}" for name in ASSETS)]


def test_the_policy_of_every_file_allows_only_its_own_origin(server: LiveServer) -> None:
    for path in PATHS:
        headers = server.http.get(path).raise_for_status().headers
        policy = dict(part.split(maxsplit=1) for part in headers["content-security-policy"].split("; "))
        nothing = {policy[name] for name in ("default-src", "frame-ancestors", "form-action", "base-uri")}
        assert nothing == {"'none'"}, path
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}, path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_cached_file_is_not_sent_again(server: LiveServer) -> None:
    for path in PATHS[1:]:
        first = server.http.get(path)
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = server.http.get(path, headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert server.http.get(path, headers={"if-none-match": '"other"'}).content == first.content
        head = server.http.head(path)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)
        assert first.headers["cache-control"] == "no-cache"


def test_every_file_of_the_folder_is_served_and_used() -> None:
    needed, found = set(), {"index.html"}
    while found - needed:
        name = (found - needed).pop()
        needed.add(name)
        for parts in REFERENCE.findall((FOLDER / name).read_text()):
            found.add(next(filter(None, parts)).removeprefix("assets/"))
    assert needed == ASSETS


def test_no_file_loads_anything_from_other_origins() -> None:
    for file in FOLDER.iterdir():
        assert ELSEWHERE.findall(file.read_text().replace(NAMESPACE, "")) == [], file
    for text in ('src="https://a.example/x.js"', "//cdn.example/x", "@import 'x'", "url(x.png)"):
        assert ELSEWHERE.search(text), text


def test_other_files_are_not_served(server: LiveServer) -> None:
    for name in ("nothing.js", "..%2froutes%2fplayground.py", "__init__.py", "", "page.js/"):
        response = server.http.get(f"/assets/{name}")
        assert response.status_code == 404
        error_of(response)


def test_without_the_playground_there_is_no_page(byte_model: LoadedModel) -> None:
    with live_server(byte_model, playground=False) as server:
        for path in PATHS:
            response = server.http.get(path)
            assert response.status_code == 404
            error_of(response)


Colour = NDArray[np.float64]

SIGHTS = {
    "all colours": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
LUMINANCE = [0.2126, 0.7152, 0.0722]

MIN_DISTANCE = 0.1
"""In OKLab, where a just noticeable difference is 0.02."""

PROPERTY = re.compile(r"--([a-z0-9-]+): (#[0-9a-f]{6});")


def schemes() -> dict[str, dict[str, Colour]]:
    """Return the page's colours by name, for the light and the dark scheme."""
    light, dark = (FOLDER / "page.css").read_text().split("@media (prefers-color-scheme: dark)")[:2]
    named = {"light": dict(PROPERTY.findall(light)), "dark": dict(PROPERTY.findall(dark))}
    return {scheme: {name: linear(value) for name, value in found.items()} for scheme, found in named.items()}


def linear(value: str) -> Colour:
    """Convert #rrggbb to linear light."""
    encoded = np.array([int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def oklab(colour: Colour) -> Colour:
    return TO_OKLAB @ np.cbrt(TO_CONES @ np.clip(colour, 0, 1))


def distance(one: Colour, other: Colour, sight: str) -> float:
    """Return the distance between two colours for a kind of sight."""
    return float(np.linalg.norm(oklab(SIGHTS[sight] @ one) - oklab(SIGHTS[sight] @ other)))


def contrast(one: Colour, other: Colour) -> float:
    """Return WCAG's contrast ratio."""
    darker, brighter = sorted(float(np.dot(LUMINANCE, colour)) for colour in (one, other))
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tones_of_exits_differ_for_every_kind_of_sight(scheme: str, sight: str) -> None:
    tones = [colour for name, colour in schemes()[scheme].items() if name.startswith("tone-")]
    assert len(tones) == 6
    assert min(distance(one, other, sight) for one, other in combinations(tones, 2)) > MIN_DISTANCE


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_have_enough_contrast(scheme: str) -> None:
    colours = schemes()[scheme]
    for paper in ("paper", "sheet"):
        for name, ratio in {"ink": 7, "quiet": 4.5, "trouble": 4.5, "field": 3}.items():
            assert contrast(colours[name], colours[paper]) >= ratio, (name, paper)
    for number in range(1, 7):
        assert contrast(colours[f"tone-{number}"], colours["paper"]) >= 3
