"""`otel-forge report`: what the page says, that it needs nothing but itself, and that a real browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from otel_forge.cli import curves
from otel_forge.cli.run_files import find, read_run
from otel_forge.config import load_config
from tests.cli.png import colors
from tests.cli.rows import row, run, two_ranks, write

pytest.importorskip("plotly")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def _figures(page: str) -> dict[str, Any]:
    """Title → figure, of every chart."""
    found = re.findall(r'<h3>(.*?)</h3><script type="application/json">(.*?)</script>', page)
    return {title: json.loads(text) for title, text in found}


def _trace(figure: Any, name: str) -> Any:
    (found,) = [trace for trace in figure["data"] if trace["name"] == name]
    return found


@pytest.fixture
def page(tmp_path: Path) -> str:
    two_ranks(tmp_path / "metrics.jsonl")
    done = run("report", tmp_path, "-o", tmp_path / "report.html")
    assert done.exit_code == 0, done.output
    return (tmp_path / "report.html").read_text()


def test_a_curve_has_the_reduced_values_the_band_over_ranks_and_every_rank(page: str) -> None:
    figure = _figures(page)["loss"]
    want = [2.0 / (step + 1) for step in range(30)]
    assert _trace(figure, "reduced over ranks")["y"] == pytest.approx([value + 0.05 for value in want])
    assert _trace(figure, "lowest rank")["y"] == _trace(figure, "rank 0")["y"] == pytest.approx(want)
    assert _trace(figure, "lowest to highest rank")["y"] == _trace(figure, "rank 1")["y"] == pytest.approx([value + 0.1 for value in want])
    assert _trace(figure, "rank 1")["x"] == list(range(30))


def test_phases_are_bars_of_every_rank_at_the_chosen_steps(tmp_path: Path) -> None:
    two_ranks(tmp_path / "metrics.jsonl")
    done = run("report", tmp_path, "-o", tmp_path / "report.html", "--steps", "3,7-8", "--json")
    assert json.loads(done.output)["steps"] == [3, 7, 8]
    figure = _figures((tmp_path / "report.html").read_text())["trainer · train"]
    forward, backward = figure["data"]
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    assert forward["y"] == [f"step {step} · rank {rank}" for step in (3, 7, 8) for rank in (0, 1)]
    assert forward["x"] == pytest.approx([0.04, 0.08] * 3)
    assert backward["x"] == pytest.approx([0.06, 0.12] * 3)


def test_slow_ranks_memory_and_telemetry_have_places_of_their_own(page: str) -> None:
    figures = _figures(page)
    slow = figures["trainer: how often each rank was the slowest"]["data"][0]
    assert (slow["x"], slow["y"], slow["text"]) == (["rank 1"], [30], ["0.2 s on the mean"])
    memory = page.index('id="memory"')
    assert page.index("<h3>train/memory_peak_max_gb</h3>") > memory > page.index("<h3>loss</h3>")
    assert page.index("<h3>forge/telemetry/records</h3>") > page.index('id="telemetry"') > memory


def test_only_the_newest_revision_is_drawn_and_attempts_are_told_apart(tmp_path: Path) -> None:
    first = [row(step, {"loss": float(step)}) for step in range(4)]
    second = [row(step, {"loss": 10.0 + step}, attempt=1) for step in range(2, 5)]
    path = write(tmp_path / "rows.jsonl", [*first, row(1, {"loss": 7.0}, revision=2), *second])
    run("report", path, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    figure = _figures(page)["loss"]
    assert _trace(figure, "reduced over ranks, attempt 0")["y"] == [0.0, 7.0, 2.0, 3.0]
    assert _trace(figure, "reduced over ranks, attempt 0")["line"]["dash"] == "dot"
    assert _trace(figure, "reduced over ranks, attempt 1")["x"] == [2, 3, 4]
    assert "<td>1</td><td>2 to 4</td><td class=n>3</td><td class=n>2</td>" in page, "attempt 1 did two steps again"
    cells = re.findall(r"<tr><td>trainer</td><td>loss</td>(.*?)</tr>", page)[0]
    assert re.findall(r">([\d.]+)<", cells)[:4] == ["0", "14", "0", "14"], "first, last, min, max of the newest attempt of each step"


def test_a_value_that_is_not_finite_is_a_gap_with_a_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [row(0, {"loss": 2.0}), row(1, {"loss": None}, nonfinite={"loss": 3}), row(2, {"loss": 1.0})])
    run("report", path, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    figure = _figures(page)["loss"]
    assert _trace(figure, "reduced over ranks")["y"] == [2.0, None, 1.0]
    assert (_trace(figure, "not finite")["x"], _trace(figure, "not finite")["y"]) == ([1], [2.0])
    assert '<span class="bad">loss: 3</span>' in page


def test_a_mean_over_ranks_is_not_finite_where_one_rank_is_not() -> None:
    assert curves._mean([1.0, None]) is None


def test_names_of_a_run_are_text_and_never_markup(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [row(0, {"</script><b>x": 1.0, "<!--<script>": 2.0}, run_id="<i>r</i>")])
    assert run("report", path, "-o", tmp_path / "report.html").exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "<b>x" not in page
    assert "<i>r</i>" not in page
    assert "<!--" not in page.split("<script>")[0], "before the plotting library"
    assert _figures(page)["&lt;/script&gt;&lt;b&gt;x"]["data"][0]["y"] == [1.0]


def test_the_page_loads_nothing_from_anywhere(page: str) -> None:
    assert "default-src 'none'" in page
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", markup) == []
    assert "@import" not in markup


def test_long_lines_are_thinned_and_keep_extremes_and_gaps() -> None:
    values: list[float | None] = [0.0] * 100_000
    values[12_345], values[54_321], values[77_777] = 9.0, -9.0, None
    kept = curves.chosen([values], 2000)
    assert len(kept) < 4100
    assert {0, 12_345, 54_321, 77_777, 99_999} <= set(kept)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--steps", "99"], 2, "run r has no step 99; it has 0 to 29"),
        (["--steps", "3-1"], 2, "'3-1' is no list of steps"),
        (["-o", "no/such/folder/r.html"], 2, "no/such/folder/r.html: cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = run("report", two_ranks(tmp_path / "rows.jsonl"), *arguments)
    assert (done.exit_code, words in done.output) == (code, True), done.output


def test_rows_of_one_record_are_one_value_a_step(tmp_path: Path) -> None:
    records = [
        row(step, {"loss": value}, mode="per_rank_no_reduce", rank=0, sequence=i) for i, (step, value) in enumerate([(0, 1.0), (0, 3.0), (1, 5.0)])
    ]
    path = write(tmp_path / "rows.jsonl", records)
    (curve,) = curves.curves(read_run(find(str(path), load_config({}), tmp_path)).rows)
    assert (curve.middle.steps, curve.middle.values) == ([0, 1], [2.0, 5.0])


# --- a real browser ------------------------------------------------------------------------------------------------------

browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")


def _browse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The page in headless Chromium, for which no host name exists."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1280,3000", "--virtual-time-budget=15000", *options,
        (folder / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done


@browser
def test_a_browser_draws_every_chart_without_a_word_on_its_console(page: str, tmp_path: Path) -> None:
    document = _browse(tmp_path, "--dump-dom").stdout
    drawn = re.findall(r'<h3>(.*?)</h3><script type="application/json">.*?</script><div class="plot[^>]*>(.*?)</section>', document, flags=re.S)
    assert len(drawn) == len(_figures(page)) == 13
    assert [title for title, content in drawn if "main-svg" not in content] == []
    assert "lowest to highest rank" in drawn[0][1]


@browser
def test_a_screenshot_shows_the_curve_the_band_and_the_bars(page: str, tmp_path: Path) -> None:
    _browse(tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    found = colors((tmp_path / "page.png").read_bytes())
    assert found[0x24, 0x58, 0xB3] > 1000, "the curves, and the bars of the first phase"
    assert found[0xD1, 0x60, 0x2D] > 5000, "the bars of the second phase and of the slow rank"
    band = [0xFF + (part - 0xFF) * 0.18 for part in (0x24, 0x58, 0xB3)]
    assert sum(count for color, count in found.items() if all(abs(a - b) < 4 for a, b in zip(color, band, strict=True))) > 5000, "the band"
