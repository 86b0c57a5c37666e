"""A configuration is right, or every mistake in it is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_forge.config import LoggingMode, load_config, otlp_settings, user_resource
from otel_forge.errors import ConfigError


def test_nothing_configured_means_jsonl_and_console() -> None:
    config = load_config()
    assert set(config.metric_logging) == {"jsonl", "console"}
    assert config.modes() == {LoggingMode.GLOBAL_REDUCE}


def test_a_file_with_every_section_is_read(tmp_path: Path) -> None:
    path = tmp_path / "forge.yaml"
    path.write_text(
        """
metric_logging:
  wandb: {logging_mode: per_rank_reduce, project: p, include: "loss*"}
  mine: {class: "my.pkg:Backend", logging_mode: per_rank_no_reduce, anything: 3}
  merge_roles: true
tracing: {every: 2}
collector: {endpoint: "http://127.0.0.1:4318", window_s: 0.5}
resource: {service.namespace: team}
"""
    )
    config = load_config(path)
    assert config.modes() == {LoggingMode.PER_RANK_REDUCE, LoggingMode.PER_RANK_NO_REDUCE}
    assert config.merge_roles
    assert config.metric_logging["wandb"].include == ("loss*",)
    assert config.metric_logging["mine"].model_extra == {"anything": 3}


def test_all_mistakes_are_named_at_once_with_the_nearest_right_key() -> None:
    raw = {
        "metric_loging": {}, "metric_logging": {"wandb": {"proyect": 1, "logging_mode": "mean"}, "wanb": {}},
        "tracing": {"enabld": 1}, "collector": {"endpoint": "foo"},
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    problems = caught.value.problems
    assert len(problems) == 6
    for expected in (
        "metric_loging: unknown key; did you mean 'metric_logging'?", "metric_logging.wandb.proyect: unknown key; did you mean 'project'?",
        "metric_logging.wandb.logging_mode:", "metric_logging.wanb: unknown backend; did you mean 'wandb'?", "tracing.enabld: unknown key",
        "collector.endpoint: must be a URL",
    ):  # fmt: skip
        assert any(problem.startswith(expected) for problem in problems), expected


@pytest.mark.parametrize("text", ["- a\n- b\n", "metric_logging: {wandb: 3}\n", "a: [\n"])
def test_a_file_of_another_form_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "forge.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"forge\.yaml"):
        load_config(path)


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_FORGE_CONFIG", "/nowhere/forge.yaml")
    with pytest.raises(ConfigError, match=r"/nowhere/forge\.yaml"):
        load_config()


def test_otlp_variables_follow_the_specification() -> None:
    settings = otlp_settings(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/spans",
            "OTEL_EXPORTER_OTLP_HEADERS": "API-Key=a%20b, x=1", "OTEL_EXPORTER_OTLP_TIMEOUT": "3", "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "none",
        }
    )  # fmt: skip
    assert (settings.metrics_url, settings.traces_url) == ("http://c:4318/v1/metrics", "http://t/spans")
    assert (settings.headers, settings.timeout_s, settings.compression) == ({"api-key": "a b", "x": "1"}, 3.0, "none")
    assert otlp_settings({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}).timeout_s == 10.0


def test_resource_attributes_of_the_environment_beat_the_file() -> None:
    config = load_config({"resource": {"a": "file", "b": "file"}})
    environ = {"OTEL_RESOURCE_ATTRIBUTES": "a=env%2C1,broken", "OTEL_SERVICE_NAME": "svc"}
    assert user_resource(config, environ) == {"a": "env,1", "b": "file", "service.name": "svc"}


def test_on_is_a_key_in_a_file_and_only_true_and_false_are_truth_values(tmp_path: Path) -> None:
    path = tmp_path / "forge.yaml"
    path.write_text("step: {on: optimizer}\ntracing: {enabled: false, track_memory: yes}\n")
    config = load_config(path)
    assert (config.step.on, config.tracing.enabled, config.tracing.track_memory) == ("optimizer", False, True)
