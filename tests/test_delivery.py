"""Packets are delivered by the rules: once by the window, then direct; bounded; nothing lost without being counted."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from otel_forge.delivery import DeliveryReport, Packet, Sender
from tests.fresh_process import in_fresh_process
from tests.http_server import OK, serving


def packet(number: int, *, window: bool = True, size: int = 10) -> Packet:
    payload = b"x" * size + b"window" + f" {number}".encode()
    return Packet(payload=payload, signal="metrics", route_offset=size if window else None, window=window, packet_id=str(number))


def sender(url: str | None, folder: Path | None, **more: object) -> Sender:
    return Sender(metrics_url=url, traces_url=None, spool_dir=folder, run_id="r", **more)  # type: ignore[arg-type]


def routes(bodies: list[bytes]) -> list[tuple[str, bytes]]:
    """(route, number) of each packet; several packets may share a request."""
    packets = (part for body in bodies for part in body.split(b"x" * 10) if part)
    return [(route.decode(), number) for route, _, number in (part.lstrip(b"x").partition(b" ") for part in packets)]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def test_packets_arrive_once_and_in_order(tmp_path: Path) -> None:
    with serving() as server:
        sending = sender(server.url, tmp_path)
        for number in range(200):
            sending.put(packet(number))
        assert sending.flush(10)
        assert routes(server.bodies) == [("window", str(number).encode()) for number in range(200)]
        assert sending.shutdown(1) == DeliveryReport(delivered=200)


@pytest.mark.parametrize("answer", [(503, b"busy", {}), (429, b"", {"retry-after": "0"}), (500, b"", {}), "reset", "close"])
def test_a_window_packet_whose_fate_is_unknown_goes_direct(answer: object, tmp_path: Path) -> None:
    with serving(lambda n, body: answer if n == 1 else OK) as server:  # type: ignore[arg-type, return-value]
        sending = sender(server.url, tmp_path)
        sending.put(packet(1))
        assert sending.flush(10)
        assert routes(server.bodies) == [("window", b"1"), ("direct", b"1")]
        sending.shutdown(1)


def test_a_refusal_by_the_memory_limiter_is_no_doubt(tmp_path: Path) -> None:
    answer = (503, b"rpc error: data refused due to high memory usage", {})
    with serving(lambda n, body: answer if n < 3 else OK) as server:
        sending = sender(server.url, tmp_path)
        sending.put(packet(1))
        assert sending.flush(10)
        assert [route for route, _ in routes(server.bodies)] == ["window"] * 3
        sending.shutdown(1)


def test_a_receiver_that_is_not_there_yet_gets_the_window_packet_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    sending = sender(f"http://127.0.0.1:{port}/v1/metrics", tmp_path)
    sending.put(packet(1))
    assert not sending.flush(0.3)
    with serving(port=port) as server:
        assert sending.flush(10)
        assert routes(server.bodies) == [("window", b"1")]
        sending.shutdown(1)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "cannot connect" in caplog.text
    assert "works again" in caplog.text


def test_a_packet_refused_for_good_is_counted_and_said_and_the_next_one_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(lambda n, body: (400, b"no such thing", {}) if b" 1" in body else OK) as server:
        sending = sender(server.url, tmp_path)
        sending.put(packet(1))
        sending.put(packet(2))
        assert not sending.flush(10)
        assert sending.shutdown(1) == DeliveryReport(delivered=1, dropped=1)
        assert ("window", b"2") in routes(server.bodies)
    assert "HTTP 400 no such thing" in caplog.text


def test_what_a_broken_connection_may_have_taken_along_goes_once_more_direct(tmp_path: Path) -> None:
    """Acknowledged in the last three windows, then the receiver dies: a Collector may have lost it."""
    with serving(lambda n, body: "reset" if n == 4 else OK) as server:
        sending = sender(server.url, tmp_path)
        for number in range(4):
            sending.put(packet(number))
            sending.flush(10)
        found = routes(server.bodies)
        assert found[:4] == [("window", b"0"), ("window", b"1"), ("window", b"2"), ("window", b"3")]
        assert sorted(found[4:]) == [("direct", b"0"), ("direct", b"1"), ("direct", b"2"), ("direct", b"3")]
        assert sending.stats()["resent"] == 3
        sending.shutdown(1)


def test_fast_packets_share_a_request_and_a_bad_one_among_them_is_the_only_one_lost(tmp_path: Path) -> None:
    with serving(lambda n, body: (400, b"bad", {}) if b" 7" in body else OK) as server:
        sending = sender(server.url, tmp_path)
        for number in range(20):
            sending.put(packet(number))
        assert not sending.flush(10)
        assert sending.shutdown(1) == DeliveryReport(delivered=19, dropped=1)
        assert {int(number) for _, number in routes(server.bodies)} == set(range(20))
        assert len(server.bodies) < 2 + 20 + 2


def test_past_the_queue_s_bound_packets_go_to_disk_and_are_replayed(tmp_path: Path) -> None:
    with serving(lambda n, body: "stall") as server:
        sending = sender(server.url, tmp_path, queue_bytes=3000)
        for number in range(10):
            sending.put(packet(number, size=1000))
        assert sending.stats()["queued_bytes"] <= 3000
        started = time.monotonic()
        report = sending.shutdown(0.2)
        assert time.monotonic() - started < 2.5
        assert (report.delivered, report.spilled, report.dropped) == (0, 10, 0)
    with serving() as server:
        again = sender(server.url, tmp_path)
        assert again.flush(10)
        assert sorted(int(number) for _, number in routes(server.bodies)) == list(range(10))
        again.shutdown(1)
    assert not list((tmp_path / "r").iterdir())


def test_without_a_receiver_everything_is_kept_for_replay(tmp_path: Path) -> None:
    sending = sender(None, tmp_path)
    sending.put(packet(1))
    assert sending.shutdown(1) == DeliveryReport(spilled=1)
    assert len(list((tmp_path / "r").glob("*.spill"))) == 1


def test_a_disk_that_takes_nothing_is_said_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    sending = sender(None, tmp_path / "file")
    sending.put(packet(1))
    sending.put(packet(2))
    assert sending.shutdown(1) == DeliveryReport(dropped=2)
    assert len(caplog.records) == 1


def test_a_torn_spill_file_gives_what_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sending = sender(None, tmp_path)
    for number in range(3):
        sending.put(packet(number))
    sending.shutdown(1)
    path = next((tmp_path / "r").glob("*.spill"))
    path.write_bytes(path.read_bytes()[:-5])
    with serving() as server:
        again = sender(server.url, tmp_path)
        assert again.flush(10)
        assert routes(server.bodies) == [("window", b"0"), ("window", b"1")]
        again.shutdown(1)
    assert "is damaged" in caplog.text


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.test_delivery import packet, sender
sending = sender(None, Path(sys.argv[2]))
number = 0
while True:
    sending.put(packet(number))
    print(number, flush=True)
    number += 1
"""


def test_what_a_killed_process_had_on_disk_is_replayed_exactly_once(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[1])
    process = subprocess.Popen([sys.executable, "-c", KILLED, root, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    last = [int(process.stdout.readline()) for _ in range(50)][-1]
    process.kill()
    process.wait()
    rest = [int(line) for line in process.stdout.read().splitlines()]
    process.stdout.close()
    last = rest[-1] if rest else last
    with serving() as server:
        again = sender(server.url, tmp_path)
        assert again.flush(20)
        numbers = [int(number) for _, number in routes(server.bodies)]
        again.shutdown(1)
    assert numbers in (list(range(last + 1)), list(range(last + 2)))


def test_a_file_that_a_living_process_writes_is_not_claimed(tmp_path: Path) -> None:
    writing = sender(None, tmp_path)
    writing.put(packet(1))
    with serving() as server:
        other = sender(server.url, tmp_path)
        assert other.flush(0.2)
        assert server.bodies == []
        other.shutdown(1)
    writing.shutdown(1)


def test_forked_children_neither_send_nor_hang(tmp_path: Path) -> None:
    """50 forks while the sending thread works: every child ends, every packet arrives once. In a new process: gRPC survives no fork."""
    in_fresh_process("tests.test_delivery", "fork_while_sending", tmp_path)


def fork_while_sending(folder: str) -> None:
    with serving() as server:
        sending = sender(server.url, Path(folder))
        for number in range(50):
            for part in range(4):
                sending.put(packet(number * 4 + part))
            child = os.fork()
            if child == 0:
                sending.after_fork_in_child()
                sending.put(packet(10_000))
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert sending.flush(10)
        sending.shutdown(1)
        assert sorted(int(number) for _, number in routes(server.bodies)) == list(range(200))


def test_many_threads_put_at_once(tmp_path: Path) -> None:
    with serving() as server:
        sending = sender(server.url, tmp_path)
        threads = [threading.Thread(target=lambda base=base: [sending.put(packet(base + i)) for i in range(50)]) for base in range(0, 400, 50)]  # type: ignore[misc]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sending.flush(10)
        sending.shutdown(1)
        assert sorted(int(number) for _, number in routes(server.bodies)) == list(range(400))


def test_a_dead_proxy_does_not_matter_for_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with serving() as server:
        sending = sender(server.url, tmp_path, headers={"api-key": "secret"})
        sending.put(packet(1))
        assert sending.flush(5)
        assert {name.lower(): value for name, value in server.headers[0].items()}["api-key"] == "secret"
        sending.shutdown(1)
