import pytest
import yaml

from tests.deploy.shipped import CACHES, ROOT, leaving_seconds

SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_a_service_is_read_only_with_its_mounts_and_has_no_capabilities(service):
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid"} & service.keys()
    mounts = [mount.split(":") for mount in service.get("volumes", []) if mount.startswith(".")]
    assert all((ROOT / source).exists() and options == ["ro"] for source, _, *options in mounts)


def test_the_grace_period_is_longer_than_saying_goodbye_and_draining():
    environment = SERVICES["nvium"]["environment"]
    assert environment["NVIUM_GOODBYE_SECONDS"] == "${NVIUM_GOODBYE_SECONDS:-5}"
    assert float(SERVICES["nvium"]["stop_grace_period"].rstrip("s")) > leaving_seconds({"NVIUM_GOODBYE_SECONDS": "5"})


def test_the_caches_outlive_the_container():
    assert CACHES.keys() == {"HF_HOME", "XDG_CACHE_HOME"}
    volumes = dict(mount.split(":")[1::-1] for mount in SERVICES["nvium"]["volumes"])
    assert {volumes[place] for place in CACHES.values()} == {"hub-cache"}
