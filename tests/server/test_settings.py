from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner
from typing_extensions import Doc

from nvium_core import ServerOptions, cli
from nvium_core.commands.options import takes
from server.generation.service import Service
from server.settings import Settings, SettingsError, read_settings
from tests.byte_model import load_byte_model, token_ids
from tests.server.live_server import live_server


def test_settings_come_from_arguments_then_the_environment(monkeypatch):
    monkeypatch.setenv("NVIUM_PORT", "9000")
    assert (Settings().port, Settings(port=9001).port) == (9000, 9001)


NEAREST = {"NVIUM_API_KEY": "NVIUM_API_KEYS", "nvium_ports": "NVIUM_PORT", "NVIUM_MAX_SEQUENCE": "NVIUM_MAX_SEQUENCES"}


@pytest.mark.parametrize("variable", [*NEAREST, "NVIUM_XYZ"])
def test_an_unknown_variable_ends_the_start_with_the_nearest_name(monkeypatch, variable):
    hint = rf"did you mean {NEAREST[variable]}\?" if variable in NEAREST else "unset it"
    monkeypatch.setenv(variable, "sk-secret")
    with pytest.raises(SettingsError, match=rf"^{variable.upper()}: is unknown; {hint}") as refused:
        read_settings({})
    assert "secret" not in str(refused.value)


def test_lists_are_comma_separated(monkeypatch):
    monkeypatch.setenv("NVIUM_API_KEYS", "alice:sk-a, sk-b")
    monkeypatch.setenv("NVIUM_CORS_ORIGINS", "https://a.example,http://b.example:3000")
    monkeypatch.setenv("NVIUM_SERVED_MODEL_NAME", " gpt-x ,story")
    monkeypatch.setenv("NVIUM_LATENCY_BUCKETS", "0.1, 1")
    settings = read_settings({})
    assert list(settings.api_keys) == ["alice:sk-a", "sk-b"]
    assert settings.cors_origins == ("https://a.example", "http://b.example:3000")
    assert settings.served_model_name == ("gpt-x", "story")
    assert settings.latency_buckets == (0.1, 1.0)
    settings = read_settings({"api_keys": "sk-a,sk-b", "cors_origins": "*", "served_model_name": "a,b"})
    assert list(settings.api_keys) == ["sk-a", "sk-b"]
    assert (settings.cors_origins, settings.served_model_name) == (("*",), ("a", "b"))


@pytest.mark.parametrize("name", ["SERVED_MODEL_NAME", "CORS_ORIGINS", "LATENCY_BUCKETS"])
@pytest.mark.parametrize("value", ["", ",", "a,,b"])
def test_a_list_with_an_empty_item_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(f"NVIUM_{name}", value)
    with pytest.raises(SettingsError, match=rf"^NVIUM_{name}, entry \d: "):
        read_settings({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *product(("max_sequences", "requests_per_minute"), [0]),
        *(("port", -1), ("schedule", "none"), ("unknown", 1)),
        *product(["latency_buckets"], ("2,1", "1,1", "0,1", "1,inf", "nan,1")),
        *product(("request_seconds", "slow_client_seconds", "drain_seconds"), (0, -1, "nan", "inf", "soon")),
    ],
)
def test_wrong_settings_are_refused_in_one_line(name, value):
    with pytest.raises(SettingsError, match=f"^{name}: .*$") as refused:
        read_settings({name: value})
    assert "\n" not in str(refused.value)


def test_each_setting_is_an_option_of_serve_with_its_help_and_default():
    shown = " ".join(CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "1000"}).stdout.split())
    assert Settings.model_fields.keys() == {field.name for field in fields(ServerOptions)}
    assert Settings().model_dump().items() <= asdict(ServerOptions()).items()
    for name in set(Settings.model_fields) - {"model"}:
        assert f"--{name.replace('_', '-')} " in shown
    for help_text in ("0 picks a free one [8000].", "Maximum size of a request body [2,000,000].", "[on]."):
        assert help_text in shown


def test_a_command_receives_only_the_options_that_were_given():
    @dataclass(frozen=True)
    class Declared:
        names: Annotated[tuple[str, ...], Doc("Names.")] = ()
        depth: Annotated[int, Doc("How deep.")] = 3
        is_fast: Annotated[bool, Doc("Whether it hurries.")] = False

    received: dict[str, object] = {}

    @takes(Declared)
    def command(place: str, **given: Any) -> None:
        received.update(given, place=place)

    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, ["here", "--names", "a,b", "--names", "c", "--no-is-fast"]).exit_code == 0
    assert received == {"place": "here", "names": "a,b,c", "is_fast": False}


def test_a_model_is_served_under_each_of_its_names(byte_model):
    with live_server(byte_model, served_model_name="gpt-x,a/b") as server:
        for name, returned in {"gpt-x": "gpt-x", "a/b": "a/b", "default": "gpt-x"}.items():
            body = server.complete(model=name, max_tokens=1)
            assert (body.status_code, body.json()["model"]) == (200, returned)
            assert server.http.get(f"/v1/models/{name}").json()["id"] == returned
        for name in ("gpt-y", byte_model.name):
            assert server.complete(model=name, max_tokens=1).status_code == 404
        assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["gpt-x", "a/b"]


def test_a_chat_template_may_come_from_a_file(byte_model, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("<{{ messages[0].content }}>")
    with live_server(load_byte_model(), chat_template=file) as server:
        body = server.chat("hi", max_tokens=1, return_token_ids=True).json()
    assert body["prompt_token_ids"] == token_ids("<hi>")
    with pytest.raises(SettingsError, match="chat_template: cannot read"):
        Service(load_byte_model(), read_settings({"chat_template": tmp_path / "none"}))
