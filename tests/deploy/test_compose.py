import pytest
import yaml

from tests.deploy.shipped import CACHES, ROOT

SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_a_service_is_read_only_with_its_mounts_and_has_no_capabilities(service):
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid"} & service.keys()
    mounts = [mount.split(":") for mount in service.get("volumes", []) if mount.startswith(".")]
    assert all((ROOT / source).exists() and options == ["ro"] for source, _, *options in mounts)


def test_the_caches_outlive_the_container():
    assert CACHES.keys() == {"HF_HOME", "XDG_CACHE_HOME"}
    volumes = dict(mount.split(":")[1::-1] for mount in SERVICES["nvium"]["volumes"])
    assert {volumes[place] for place in CACHES.values()} == {"hub-cache"}
