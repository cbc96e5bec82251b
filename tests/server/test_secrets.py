"""No log line, metric, error, `repr` or response contains a secret."""

from pathlib import Path
from typing import Any

import pytest

from nvium_core import LoadedModel
from server.app import create_app
from server.http.keys import parsed, read_keys
from server.settings import Settings, SettingsError, read_settings
from tests.server.http.test_keys import bearer
from tests.server.live_server import live_server, wait_until
from tests.server.log_lines import log_lines
from tests.server.server_process import server_process

SECRET = "sk-never-told"
OPTIONS: dict[str, Any] = {
    "api_keys": f"alice:{SECRET}",
    "otlp_endpoint": f"http://user:{SECRET}@127.0.0.1:9",
}


def test_settings_keys_and_the_app_show_no_secret(byte_model: LoadedModel) -> None:
    settings = Settings(**OPTIONS)
    app = create_app(byte_model, Settings(api_keys=SECRET))
    shown = [repr(settings), str(settings), repr(settings.model_dump(mode="json"))]
    shown += [repr(read_keys(settings)), repr(parsed("here", SECRET)), repr(app.user_middleware)]
    assert SECRET not in "".join(shown)
    assert settings.otlp_endpoint is not None


@pytest.mark.parametrize("name", ["api_keys", "otlp_endpoint", "api_key", "otlp_endpoints"])
def test_an_error_about_a_setting_shows_no_secret(name: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings({name: object() if name == "api_keys" else f"://{SECRET}"})
    assert SECRET not in str(refused.value) + repr(refused.value)


def test_responses_metrics_and_log_lines_show_no_key(byte_model: LoadedModel) -> None:
    with live_server(byte_model, api_keys=f"alice:{SECRET}") as server, log_lines() as log:
        answers = [
            server.http.request(method, path, headers=bearer(key), json={"model": SECRET + "x"})
            for key in (SECRET, f"{SECRET}-almost")
            for method, path in (
                ("POST", "/v1/completions"),
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("GET", "/no"),
            )
        ]
        wait_until(lambda: len(log.lines) >= 2)
    shown = [answer.text.replace(SECRET + "x", "") + str(answer.headers) for answer in answers]
    assert all(SECRET not in text for text in shown)
    assert SECRET not in log.text


def test_a_failing_export_of_traces_shows_no_password(model_folder: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"api_keys": SECRET, "drain_seconds": 1}
    with server_process(model_folder, tmp_path, **options) as server:
        body = {"model": "default", "prompt": "a", "max_tokens": 1}
        assert server.http.post("/v1/completions", json=body, headers=bearer(SECRET)).status_code == 200
        server.terminate()
        server.exit_code(60)
        assert "otlp" in server.log().lower() or "export" in server.log().lower()
        assert SECRET not in server.log()
