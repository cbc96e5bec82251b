import re
from typing import Any

import pytest
import yaml

from tests.deploy.shipped import CACHES, ROOT

SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


@each_service
def test_a_service_may_write_nowhere_and_do_nothing_special(service: dict[str, Any]):
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid"} & service.keys()


@each_service
def test_a_service_is_built_here_or_of_a_stated_version(service: dict[str, Any]):
    assert "build" in service or re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+", service["image"])


@each_service
def test_what_a_service_mounts_from_here_is_there_and_stays_as_it_is(service: dict[str, Any]):
    mounts = [mount.split(":") for mount in service.get("volumes", []) if mount.startswith(".")]
    assert all((ROOT / source).exists() and options == ["ro"] for source, _, *options in mounts)


def test_models_and_weights_as_they_are_served_outlive_the_container():
    assert CACHES.keys() == {"HF_HOME", "XDG_CACHE_HOME"}
    volumes = dict(mount.split(":")[1::-1] for mount in SERVICES["nvium"]["volumes"])
    assert {volumes[place] for place in CACHES.values()} == {"hub-cache"}


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_monitoring_is_asked_for_and_reached_from_this_machine_only(name: str):
    assert SERVICES[name]["profiles"] == ["monitoring"]
    [port] = SERVICES[name]["ports"]
    assert re.fullmatch(r"\$\{\w+:-127\.0\.0\.1:\d+\}:\d+", port)
