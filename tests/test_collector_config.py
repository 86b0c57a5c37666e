"""The committed files are what the code renders; what would be open to everybody, or could not work, is refused by the name of its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from otel_forge import wire
from otel_forge.cli import main
from otel_forge.cli.binaries import COLLECTOR, LOADBALANCING, files_dir, program_for
from otel_forge.cli.collector_config import FILES, RENDERERS, Options, Tier, agent, gateway, needs_loadbalancing, single_node
from otel_forge.errors import ConfigError

TIERS: tuple[Tier, ...] = ("single", "agent", "gateway")


def parsed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_committed_file_is_the_rendered_one(name: str) -> None:
    assert (files_dir() / name).read_text() == FILES[name](), f"run: otel-forge collector config --out collector-config {name}"


@pytest.mark.parametrize("render", [single_node, agent, lambda: gateway(Options(gateway="reduce"))])
def test_the_collector_keeps_apart_what_the_wire_keeps_apart(render: Any) -> None:
    statement = parsed(render())["processors"]["transform/reduce"]["metric_statements"][0]["statements"][0]
    assert json.loads(statement.partition(", ")[2].removesuffix(")")) == list(wire.SERIES_ATTRIBUTES)


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_has_health_own_metrics_one_memory_limiter_and_only_persistent_queues(tier: Tier) -> None:
    config = parsed(RENDERERS[tier](Options(gateway="reduce", gateways=("a:1", "b:1"))))
    assert {"health_check", "file_storage/queue"} <= set(config["service"]["extensions"])
    assert config["service"]["telemetry"]["metrics"]["readers"]
    for name, pipeline in config["service"]["pipelines"].items():
        assert ("memory_limiter" in pipeline.get("processors", [])) == ("otlp" in pipeline["receivers"]), f"{name}: before anything is fanned out"
    for name, exporter in config["exporters"].items():
        assert exporter["sending_queue"]["storage"] == "file_storage/queue", name
        assert exporter["retry_on_failure"]["max_elapsed_time"] == "0s", name


def test_without_jaeger_no_queue_waits_for_it() -> None:
    for render in (single_node, gateway):
        assert "jaeger" not in render(Options(jaeger=False))


@pytest.mark.parametrize("tier", TIERS)
def test_everything_is_on_loopback_by_default(tier: Tier) -> None:
    text = RENDERERS[tier](Options(gateway="reduce"))
    assert "0.0.0.0" not in text
    assert "[::]" not in text


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.7", "::", "gateway.example"])
@pytest.mark.parametrize("tier", TIERS)
def test_another_bind_needs_tls_or_a_token(tier: Tier, address: str) -> None:
    with pytest.raises(ConfigError, match=r"listen: .* tls-cert and tls-key, or token"):
        RENDERERS[tier](Options(listen=address))
    for options in (Options(listen=address, token=True), Options(listen=address, tls_cert="c.pem", tls_key="k.pem")):
        assert f"{address}:" in RENDERERS[tier](options)


@pytest.mark.parametrize("tier", TIERS)
def test_a_token_is_asked_for_by_every_way_in_and_is_in_no_file(tier: Tier) -> None:
    config = parsed(RENDERERS[tier](Options(token=True)))
    for protocol in config["receivers"]["otlp"]["protocols"].values():
        assert protocol["auth"] == {"authenticator": "bearertokenauth"}
    assert config["extensions"]["bearertokenauth"] == {"token": "${env:FORGE_TOKEN}"}
    assert "bearertokenauth" in config["service"]["extensions"]
    assert config["exporters"]["otlp_grpc/rows"]["headers"] == {"authorization": "Bearer ${env:FORGE_TOKEN}"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(window_s=10.0), "window: 1 × 10 s and 1 s"),
        (Options(window_s=5.0, gateway="reduce"), "window: 2 × 5 s"),
        (Options(window_s=0.0), "window: must be between"),
        (Options(queue_size=0), "queue-size: must be at least 1"),
        (Options(memory_mib=1), "memory-mib: must be at least 128"),
        (Options(gateways=("http://x:1",)), "gateway: 'http://x:1' is not host:port"),
        (Options(gateways=("a:1", "a:1")), "gateway: one is named twice"),
        (Options(gateways=("a:1",), gateway_dns="b:1"), "gateway, gateway-dns"),
        (Options(exporter="host"), "exporter: 'host' is not host:port"),
        (Options(tls_cert="c.pem"), "tls-cert, tls-key: both"),
    ],
)
def test_what_cannot_work_is_named(options: Options, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        agent(options)
    assert words in str(raised.value)


def test_one_gateway_needs_the_small_program_and_several_the_loadbalancing_one(tmp_path: Path) -> None:
    for number, options in enumerate((Options(), Options(gateways=("a:1",)), Options(gateways=("a:1", "b:1")), Options(gateway_dns="g:1"))):
        path = tmp_path / f"agent{number}.yaml"
        path.write_text(agent(options))
        assert needs_loadbalancing(options) == (number > 1)
        assert program_for(path) is (LOADBALANCING if number > 1 else COLLECTOR)


def test_several_gateways_share_the_runs_and_the_queue_is_at_the_top() -> None:
    exporters = parsed(agent(Options(gateways=("a:1", "b:1"))))["exporters"]
    for name in ("loadbalancing/rows", "loadbalancing/ranks"):
        assert (exporters[name]["routing_key"], exporters[name]["routing_attributes"]) == ("attributes", [wire.RUN_ID])
        assert exporters[name]["sending_queue"]["storage"] == "file_storage/queue"
        assert exporters[name]["protocol"]["otlp"]["sending_queue"] == {"enabled": False}
        assert exporters[name]["resolver"] == {"static": {"hostnames": ["a:1", "b:1"]}}


def test_forwarding_gateways_change_nothing_and_reducing_ones_only_what_agents_reduced() -> None:
    forwarding, reducing = (parsed(gateway(Options(gateway=mode))) for mode in ("forward", "reduce"))
    assert set(forwarding["processors"]) == {"memory_limiter"}
    assert set(forwarding["service"]["pipelines"]) == {"traces", "metrics"}
    assert reducing["processors"]["filter/window"]["metric_conditions"] == [f'resource.attributes["{wire.BATCH_ID}"] == nil']
    assert reducing["processors"]["filter/ranks"]["metric_conditions"] == [f'resource.attributes["{wire.BATCH_ID}"] != nil']


def test_the_command_writes_a_tier_and_takes_what_no_option_says_from_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "forge.yaml").write_text("collector: {window_s: 2.5, gateway: reduce, token: secret}\n")
    command = ["collector", "config", "--tier", "gateway", "--config", str(tmp_path / "forge.yaml"), "--out", str(tmp_path), "--queue-size", "7"]
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path}/gateway.yaml\n")
    text = (tmp_path / "gateway.yaml").read_text()
    assert "secret" not in text
    config = parsed(text)
    assert config["exporters"]["otlp_grpc/window"]["sending_queue"]["batch"]["flush_timeout"] == "2500ms"
    assert config["exporters"]["otlp_grpc/rows"]["sending_queue"]["queue_size"] == 7


def test_the_command_says_in_one_message_what_is_wrong() -> None:
    done = CliRunner().invoke(main, ["collector", "config", "--tier", "single", "--listen", "0.0.0.0", "--exporter", "x"])
    assert done.exit_code == 2
    assert "listen:" in done.stderr
    assert "exporter:" in done.stderr
