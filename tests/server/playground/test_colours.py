"""Everybody can distinguish and read the tones of exits. Uses Machado's matrices and distances in OKLab."""

import re
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from server.routes.playground import FOLDER

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


def test_red_and_green_are_too_similar_with_deuteranopia() -> None:
    red, green = linear("#b04a2a"), linear("#7a6a1a")
    assert distance(red, green, "all colours") > MIN_DISTANCE > distance(red, green, "deuteranopia")
