import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm import EVERYTHING, pod_metrics
from tests.deploy.shipped import MONITORING, ROOT, RULES

ALERTS = [rule["alert"] for rule in RULES]
UNIT_TESTS = MONITORING / "rules_test.yml"


def promtool(*arguments: str | Path, given: str = "") -> str:
    """Run promtool, check that it succeeds and return its output. Skip the test if it is not installed."""
    program = shutil.which("promtool") or pytest.skip("promtool is not installed (Debian's package prometheus)")
    done = subprocess.run([program, *arguments], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_rules_use_only_metrics_that_a_server_exports(page):
    assert {rule["alert"]: page.complaints(rule["expr"]) for rule in RULES if page.complaints(rule["expr"])} == {}


def test_promtool_accepts_the_rules_and_the_configuration_and_alerts_fire_when_they_should():
    assert f"{len(RULES)} rules found" in promtool("check", "rules", MONITORING / "rules.yml")
    promtool("check", "config", MONITORING / "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", UNIT_TESTS)


def test_every_alert_is_tested_to_fire_and_not_to_fire():
    cases = [case for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    for fires in (True, False):
        assert {case["alertname"] for case in cases if bool(case.get("exp_alerts")) == fires} == set(ALERTS)


def test_promtool_accepts_the_names_units_and_help_of_the_metrics(server):
    assert promtool("check", "metrics", given=server.http.get("/metrics").text) == ""


def test_the_autoscalers_metrics_exist_and_the_adapter_serves_them(page):
    [rule] = yaml.safe_load((ROOT / "deploy" / "helm" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    [pattern] = re.findall(r'__name__=~"(.*?)"', rule["seriesQuery"])
    assert {name for name in page.series if re.fullmatch(pattern, name)} == set(pod_metrics(EVERYTHING))
