import json
import math

import pytest

from research.speed.capacity import Replica, Request, main


def test_requests_that_run_together_share_the_measured_pace():
    replica = Replica(pace={1: 10, 2: 16}, prefill=100)
    first, second = Request(0.0, 100, 11), Request(0.5, 100, 11)
    replica.serve([first, second])
    assert (first.first, second.first) == (1.0, 2.0)
    # 8 tokens/s each while both run
    assert first.last == pytest.approx(2 + 10 / 8) and second.last == pytest.approx(first.last)


def test_replicas_are_added_until_the_target_is_met(tmp_path, capsys):
    file = tmp_path / "found.json"
    main(["--pace", "1:120,8:400", "--prefill", "4000", "--rate", "20", "--target-ttft-ms", "300", "--json", str(file)])
    found = json.loads(file.read_text())
    *short, enough = found["rows"]
    assert enough["meets_target"] and not any(row["meets_target"] for row in short)
    assert enough["replicas"] >= math.ceil(20 / found["saturated_by"])
    assert f"{enough['replicas']} replicas meet the target" in capsys.readouterr().out
