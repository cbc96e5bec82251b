import json
import sys

import pytest
import torch

from nvium_core.bench import figures
from nvium_core.bench.figures import machine, provenance, write_json


def test_a_command_is_recorded_without_the_folders_of_its_files(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python3.11", "/x/nvium", "--data=/secret/text.txt", "/tmp/out.json"])
    assert provenance()["command"] == "nvium --data=text.txt out.json"


def test_a_package_outside_a_checkout_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert provenance()["commit"] == ""


def test_rows_keep_the_provenance_that_they_have(tmp_path):
    file = tmp_path / "rows.json"
    write_json([{"command": "old", "commit": "12345678", "value": 1}, {"value": 2}], file)
    old, new = json.loads(file.read_text())
    assert (old["command"], old["commit"], old["value"]) == ("old", "12345678", 1)
    assert (new["command"], new["value"]) == (provenance()["command"], 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bandwidth_and_flops_are_measured_in_every_precision_of_the_engine(dtype):
    measured = {"float64"} if dtype == torch.float64 else {"bfloat16", "float32"}
    found = machine(torch.zeros(1, dtype=dtype), buffer_bytes=2**18, enough_seconds=0.0)
    assert found["flops_per_second"].keys() == measured
    assert min(found["bytes_per_second"], *found["flops_per_second"].values()) > 1e6
