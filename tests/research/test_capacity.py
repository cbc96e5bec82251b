import json

import pytest

from research.capacity import main


def test_a_report_s_requests_are_simulated_next_to_what_was_measured(tmp_path, capsys):
    report, file = tmp_path / "report.json", tmp_path / "found.json"
    sent = {"num_prompt_tokens": 100, "num_tokens": 11, "time_to_first_token": 1.2, "latency": 2.5, "error": None}
    failed = {"due": 9.0, "error": "HTTP 503"}
    report.write_text(json.dumps({"points": [{"rate": 0.1, "requests": [{"due": 0.0, **sent}, failed]}]}))
    main(["--pace", "1:10", "--prefill", "100", "--against", str(report), "--json", str(file)])
    [load] = json.loads(file.read_text())["loads"]
    assert load["simulated"]["total"]["50"] == pytest.approx(2.0)
    assert load["measured"]["first_token"]["50"] == pytest.approx(1.2)
    assert "simulated" in capsys.readouterr().out
