"""zl/tools/top_*.py: figures from pages of metrics, and how they look on terminals of all kinds."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.fake_metrics import FakeMetrics
from zl.measures import GLUE, PARTS
from zl.metrics.catalog import CATALOG
from zl.tools import top_figures, top_view
from zl.tools.top_figures import Figures, Window
from zl.tools.top_scrape import Scrape, gained, gained_buckets, quantile, read_page

ROOT = Path(__file__).parents[2]


def pages(*changes, seconds: float = 1.0, since_start: bool = False) -> Window:
    """A window over one page before and one after each change of a fake server."""
    fake, window = FakeMetrics(), Window("127.0.0.1:9433", since_start=since_start)
    window.add(read_page(fake.page(), 0.0))
    for i, change in enumerate(changes):
        change(fake)
        window.add(read_page(fake.page(), (i + 1) * seconds))
    return window


def test_every_name_it_reads_is_in_the_catalog():
    text = (ROOT / "zl" / "tools" / "top_figures.py").read_text()
    names = set(re.findall(r'"((?:zl|glue|process)_[a-z0-9_]+)"', text))
    assert len(names) > 15
    assert names <= set(CATALOG)
    assert set(PARTS) - set(top_figures.NOT_GLUE) == set(GLUE)


def test_counts_are_those_of_the_newest_page():
    def change(fake):
        fake.set("zl_rows", 100, state="free")
        fake.set("zl_rows", 150, state="live")
        fake.set("zl_rows", 6, state="ending")
        fake.set("zl_pages", 30, state="free")
        fake.set("zl_pages", 60, state="used")
        fake.set("zl_pages", 10, state="constant")
        fake.set("zl_queue_depth", 12)
        fake.set("zl_connections_open", 9)
        fake.set("zl_kv_fragmentation_ratio", 0.25)
        fake.set("zl_heartbeat_age_seconds", 4.5)

    found = pages(change).figures()
    assert (found.rows, found.max_rows, found.queue, found.connections) == (156, 256, 12, 9)
    assert (found.pages_used, found.pages_constant, found.pages) == (60, 10, 100)
    assert (found.fragmentation, found.beat_age_s, found.state) == (0.25, 4.5, "ready")
    assert found.facts == ["zl 9.9.9", "A model", "CHAT", "cpu, 2 cores"]


def test_rates_are_over_the_last_two_pages():
    window = pages(
        lambda fake: fake.add("zl_tokens_total", 1_000, kind="generated"),
        lambda fake: fake.add("zl_tokens_total", 500, kind="generated"),
        lambda fake: (fake.add("zl_tokens_total", 70, kind="prompt"), fake.add("zl_requests_total", 3, outcome="stop"),
                      fake.add("zl_requests_total", 1, outcome="cancelled")),
        seconds=2.0,
    )  # fmt: skip
    found = window.figures()
    assert (found.tokens_per_s, found.prompt_tokens_per_s, found.requests_per_s) == (0, 35, 2)
    assert found.history == [500, 250, 0]


def test_shares_and_latencies_are_over_the_window_or_since_the_start():
    def slow(fake):
        fake.observe("zl_inter_token_seconds", 5.0, 1_000, profile="CHAT")
        fake.add("zl_request_time_seconds_total", 50, part="encode")
        fake.add("zl_request_time_seconds_total", 50, part="graph_replay")
        fake.add("zl_program_hits_total", 9, program="generic")
        fake.add("zl_program_hits_total", 1, program="CHAT")

    def quick(fake):
        fake.observe("zl_inter_token_seconds", 0.05, 98, profile="CHAT")
        fake.observe("zl_inter_token_seconds", 0.45, 2, profile="CREATIVE")
        for part, seconds in (("queue", 10), ("graph_replay", 60), ("heartbeat", 10), ("encode", 15), ("crossing", 5)):
            fake.add("zl_request_time_seconds_total", seconds, part=part)
        fake.add("zl_program_hits_total", 3, program="CHAT")
        fake.add("zl_program_hits_total", 1, program="mixed")
        fake.add("zl_program_hits_total", 90, program="none")

    def nothing(fake):
        pass

    found = pages(slow, nothing, quick, seconds=6.0).figures()
    assert found.gap == (pytest.approx(0.04 + 0.02 * 50 / 98), pytest.approx(0.4))
    assert found.glue == pytest.approx(0.2)
    assert found.hits == pytest.approx(0.75)
    idle = pages(slow, nothing, nothing, nothing, seconds=6.0).figures()
    assert (idle.gap, idle.glue, idle.hits, idle.parts) == ((None, None), None, None, {})
    whole = pages(slow, nothing, nothing, nothing, seconds=6.0, since_start=True).figures()
    assert whole.gap[0] == pytest.approx(6.25)
    assert (whole.glue, whole.hits) == (pytest.approx(0.5), pytest.approx(0.1))


def test_nothing_known_is_told_from_nothing_there():
    fresh = pages(lambda fake: None).figures()
    assert (fresh.glue, fresh.hits, fresh.first, fresh.tokens_per_s) == (None, None, (None, None), 0)
    bare = Window("x")
    bare.add(read_page("# TYPE zl_rows_in_use gauge\nzl_rows_in_use 3\n", 0.0))
    found = bare.figures()
    assert (found.rows, found.pages, found.queue, found.errors) == (None, None, None, {})
    assert [top_view.paint(line, False) for line in top_view.view(found, 80)]
    assert Window("x").figures().state == "no answer"


def test_a_restart_begins_a_new_window():
    fake, window = FakeMetrics(), Window("x")
    fake.add("zl_tokens_total", 9_000, kind="generated")
    fake.set("process_start_time_seconds", 1_000)
    window.add(read_page(fake.page(), 0.0))
    fake = FakeMetrics()
    fake.set("process_start_time_seconds", 2_000)
    fake.add("zl_tokens_total", 5, kind="generated")
    window.add(read_page(fake.page(), 1.0))
    assert window.figures().tokens_per_s is None
    fake.add("zl_tokens_total", 5, kind="generated")
    window.add(read_page(fake.page(), 2.0))
    assert window.figures().tokens_per_s == 5


def test_states_and_a_server_that_stops_answering():
    fake, window = FakeMetrics(), Window("x")
    for ready, live, state in ((1, 1, "ready"), (0, 1, "not ready"), (0, 0, "stuck")):
        fake.set("zl_ready", ready)
        fake.set("zl_live", live)
        window.add(read_page(fake.page(), 0.0))
        assert window.figures().state == state
    window.missed("no metrics at x")
    found = window.figures()
    assert (found.state, found.trouble) == ("no answer", "no metrics at x")
    assert "no metrics at x" in top_view.one_line(found)
    window.add(read_page(fake.page(), 1.0))
    assert window.figures().trouble == ""


def test_errors_of_the_window_are_marked():
    def some(fake):
        fake.add("zl_errors_total", 3, code="overloaded")

    def others(fake):
        fake.add("zl_errors_total", 2, code="internal")

    found = pages(some, lambda fake: None, others, seconds=8.0).figures()
    assert {code: n for code, n in found.errors.items() if n} == {"overloaded": 3, "internal": 2}
    assert {code: n for code, n in found.new_errors.items() if n} == {"internal": 2}
    (line,) = [line for line in shown(found, 80) if line.startswith("errors")]
    assert line.split() == ["errors", "overloaded", "3", "internal", "2", "(+2)"]


# -- arithmetic -----------------------------------------------------------------------------------------------------


def test_quantiles_are_those_of_prometheus():
    buckets = [(0.1, 80.0), (0.2, 100.0), (math.inf, 100.0)]
    assert quantile(buckets, 0.5) == pytest.approx(0.0625)
    assert quantile(buckets, 0.99) == pytest.approx(0.195)
    assert quantile([(0.1, 0.0), (0.2, 0.0), (math.inf, 4.0)], 0.5) == 0.2
    assert quantile([(0.1, 1.0), (0.2, 1.0), (0.4, 3.0), (math.inf, 3.0)], 0.5) == pytest.approx(0.25)
    assert quantile([(0.1, 0.0), (math.inf, 0.0)], 0.5) is None
    assert quantile([], 0.5) is None


def test_counters_that_fell_began_again_at_zero():
    def scrape(value: float) -> Scrape:
        return Scrape(0.0, {"a": [({}, value)], "h_bucket": [({"le": "1"}, value), ({"le": "+Inf"}, value)]})

    assert gained(scrape(7), scrape(4), "a") == 3
    assert gained(scrape(2), scrape(4), "a") == 2
    assert gained(scrape(2), scrape(4), "b") is None
    assert gained_buckets(scrape(2), scrape(4), "h") == [(1.0, 2), (math.inf, 2)]
    assert gained_buckets(scrape(7), scrape(4), "h") == [(1.0, 3), (math.inf, 3)]


# -- looks ----------------------------------------------------------------------------------------------------------


FULL = Figures(
    "127.0.0.1:9433", "ready", ["A model", "bfloat16 on cpu"], 7_000, 156, 256, 12, 160, 6_500.4, [1.0, 5.0, 9.0],
    812.0, 3.25, 0.032, (0.76, 1.48), (0.05, 0.0598), (4e-4, 0.05), (4.0, 4.98), 2_500, 64, 3_264, 0.25, 0.9, 0, 42.0,
    {"graph_replay": 0.05, "encode": 2e-4, "protobuf_parse": 4e-6}, {"overloaded": 9.0}, {"overloaded": 9.0},
)  # fmt: skip


def shown(figures: Figures, width: int, glyphs=top_view.UNICODE) -> list[str]:
    return [top_view.paint(line, False) for line in top_view.view(figures, width, glyphs)]


@pytest.mark.parametrize("width", [10, 20, 40, 60, 76, 80, 120, 250])
@pytest.mark.parametrize("glyphs", [top_view.UNICODE, top_view.ASCII])
def test_no_line_is_wider_than_the_terminal(width, glyphs):
    lines = shown(FULL, width, glyphs)
    assert max(map(len, lines)) <= width
    if glyphs is top_view.ASCII:
        assert all(line.isascii() for line in lines)
        assert top_view.one_line(FULL, glyphs).isascii()


def test_eighty_columns_show_everything_in_24_lines():
    lines = shown(FULL, 80)
    assert len(lines) <= 24
    text = "\n".join(lines)
    for word in ("ready", "A model", "156 of 256", "6,500", "812", "3.2", "queue", "760 ms", "1.48 s", "50.0 ms",
                 "59.8 ms", "400 µs", "4.98 s", "3.2%", "90.0%", "goal 85%", "42.0 s ago", "2,500 used", "64 constant",
                 "25.0%", "protobuf_parse 4.00 µs", "overloaded 9 (+9)", "up 1 h 56 m"):  # fmt: skip
        assert word in text, word


@pytest.mark.parametrize(("rows", "most", "width"), [(0, 256, 80), (156, 256, 80), (256, 256, 80), (3, 10, 80),
                                                    (156, 256, 40), (100, 100, 20)])  # fmt: skip
def test_the_map_has_a_cell_for_each_row(rows, most, width):
    figures = Figures("x", rows=rows, max_rows=most)
    cells = "".join(line for line in shown(figures, width) if set(line.strip()) <= {"■", "·"})
    assert (cells.count("■"), cells.count("·")) == (rows, most - rows)


@pytest.mark.parametrize(("share", "full"), [(None, 0), (0.0, 0), (0.001, 1), (0.5, 15), (0.999, 29), (1.0, 30)])
def test_a_bar_tells_little_from_nothing_and_much_from_all(share, full):
    (line,) = [line for line in shown(Figures("x", glue=share), 120) if line.startswith("glue")]
    assert (line.count("█"), line.count("░")) == (full, 30 - full)


def test_colour_is_only_paint():
    lines = top_view.view(FULL, 80)
    coloured = "\n".join(top_view.paint(line, True) for line in lines)
    assert "\x1b[36m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == "\n".join(top_view.paint(line, False) for line in lines)


def test_names_from_the_server_cannot_move_the_cursor():
    figures = Figures("x", facts=["A\x1b[2Jm\node\u202el"], errors={"a\x1b[1m": 1.0}, parts={"b\r": 1.0})
    assert all(line.isprintable() for line in shown(figures, 120))


def test_one_line_has_the_same_words_each_time():
    words = [re.sub(r"[\d.,]+(?=\b)", "N", top_view.one_line(figures)) for figures in (FULL, FULL)]
    assert words[0] == words[1]
    line = top_view.one_line(FULL)
    assert line == (
        "rows 156/256 queue 12 tokens/s 6,500 glue 3.2% first p50 760 ms p99 1.48 s gap p50 50.0 ms p99 59.8 ms "
        "pages 2,564/3,264 hits 90.0% errors 9 ready"
    )
    assert "glue –" in top_view.one_line(Figures("x"))
