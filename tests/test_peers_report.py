"""What the peers' benchmark says: tables with ratios, the README's block, the chart's data, environments. No peer runs.

One test: .venv/bin/pytest tests/test_peers_report.py -k ratio
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import compose, envs, report
from benchmarks.peers.__main__ import README, chosen
from benchmarks.peers.groups import BOX, BOX_ROLLOUT, GROUPS, HTTP, Case, Group

MACHINE = {"cores": 2, "cpu": "a cpu", "memory_gb": 4.0, "kernel": "6", "python": "3.11.7", "load": [0.1, 0.1, 0.1]}
TOY = Group("toy", "Toy work", "toy", "all", (Case("ours", "m"), Case("peer", "m", environment="inspect")))


def run(group: Group, case: str, cpu_ms: float, **more: Any) -> dict[str, Any]:
    fixed = {"rate": 10.0, "n": 8, "in_flight": 4, "load": 0.5, "versions": {"package": "1.2"}}
    return {"group": group.key, "case": case, report.COST: cpu_ms, **fixed, **more}


def failed(group: Group, case: str, why: str) -> dict[str, Any]:
    return {"group": group.key, "case": case, "failed": why}


def test_a_ratio_is_of_the_medians() -> None:
    records = [run(TOY, "ours", cpu) for cpu in (2.0, 1.0, 90.0)] + [run(TOY, "peer", cpu) for cpu in (9.0, 8.0, 7.0)]
    assert report.ratio(TOY.cases[1], TOY, records) == pytest.approx(4.0)
    ours, peer = report.rows(TOY, records)
    assert (ours["x ours"], peer["x ours"], peer["low-high"]) == ("1.00", "4.00", "7.00-9.00")


def test_a_docker_peer_is_compared_with_our_docker_rollouts_and_says_so() -> None:
    records = [
        run(BOX_ROLLOUT, "rollout_engine, namespace", 10.0),
        run(BOX_ROLLOUT, "rollout_engine, docker", 100.0),
        run(BOX_ROLLOUT, "Harbor, oracle", 500.0),
    ]
    harbor = next(row for row in report.rows(BOX_ROLLOUT, records) if row["what"] == "Harbor, oracle")
    assert harbor["x ours"] == "5.00 (rollout_engine, docker)"


def test_a_peer_that_did_not_run_keeps_its_row_with_the_reason() -> None:
    records = [run(TOY, "ours", 1.0), failed(TOY, "peer", "needs Python 3.12 |\n or newer")]
    text = report.section(TOY, records)
    (line,) = [line for line in text.splitlines() if line.startswith("| peer ")]
    assert "not run: needs Python 3.12 / or newer" in line
    assert line.count("|") == text.splitlines()[4].count("|"), "the reason must not break the table"


def test_a_peer_that_failed_later_has_figures_and_says_that_it_failed() -> None:
    records = [run(TOY, "ours", 1.0), run(TOY, "peer", 3.0), failed(TOY, "peer", "gone")]
    row = report.rows(TOY, records)[1]
    assert row["CPU ms / toy"] == 3.0
    assert "failed after 1 good runs: gone" in row["settings; what is kept"]


def test_ratios_are_left_out_where_ours_did_not_run() -> None:
    records = [failed(TOY, "ours", "no root"), run(TOY, "peer", 3.0)]
    assert [row["x ours"] for row in report.rows(TOY, records)] == ["", ""]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.key)
def test_every_case_has_a_row_settings_and_somebody_to_be_compared_with(group: Group) -> None:
    names = [case.name for case in group.cases]
    assert len(set(names)) == len(names)
    assert report.ours(group.cases[0])
    for case in group.cases:
        assert case.settings
        assert case.against is None or case.against in names
        assert case.environment is None or envs.constraints(case.environment).exists()
    assert [row["what"] for row in report.rows(group, [])] == names


def test_parts_are_medians_and_only_of_cases_with_several() -> None:
    raw = [run(BOX, "raw Docker Engine API", 5.0, parts_ms={"case": c, "daemon": 4.0}) for c in (1.0, 2.0, 9.0)]
    plain = [run(BOX, "plain fork and exec", 1.0, parts_ms={"case": 1.0})]
    assert report.parts(BOX, raw + plain) == ["raw Docker Engine API: case 2.00 + daemon 4.00 ms"]


@given(before=st.text(), after=st.text(), old=st.text(), new=st.text())
def test_only_what_is_between_the_markers_is_replaced(before: str, after: str, old: str, new: str) -> None:
    page = f"{before}{report.BEGIN}{old}{report.END}{after}"
    once = report.replaced(page, new)
    assert once == f"{before}{report.BEGIN}\n{new.strip()}\n{report.END}{after}"
    assert report.replaced(once, new) == once


@pytest.mark.parametrize(
    "page", ["", report.BEGIN, f"{report.END}{report.BEGIN}", f"{report.BEGIN}{report.END}{report.END}"]
)
def test_a_page_without_both_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="the text must hold"):
        report.replaced(page, "text")


def test_the_readme_has_the_block_and_every_picture_that_it_shows() -> None:
    page = README.read_text()
    assert report.replaced(page, "x").count("x\n" + report.END) == 1
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page):
        assert (README.parent / name).exists(), name


def test_the_chart_has_what_ran_and_marks_ours() -> None:
    records = [run(BOX, "namespace sandbox", 8.0), run(BOX, "plain fork and exec", 1.0), failed(TOY, "peer", "no")]
    assert report.chart([BOX, TOY], records) == [
        {
            "title": BOX.title,
            "unit": "sandbox",
            "bars": [
                {"name": "namespace sandbox", "cpu_ms": 8.0, "ours": True},
                {"name": "plain fork and exec", "cpu_ms": 1.0, "ours": False},
            ],
        }
    ]


def test_the_report_names_the_machine_and_what_is_counted() -> None:
    text = report.report([TOY], [run(TOY, "ours", 1.0)], MACHINE, 3)
    assert "2 cores (a cpu" in text
    assert "Counted: all." in text


def test_a_case_is_chosen_together_with_the_one_it_is_compared_with() -> None:
    (group,) = chosen("harbor")
    assert [case.name for case in group.cases] == [
        "rollout_engine, namespace", "rollout_engine, docker", "Harbor, oracle",
    ]  # fmt: skip
    assert chosen("http")[0] == HTTP
    with pytest.raises(SystemExit, match="no group or case is named like 'nobody'"):
        chosen("nobody")


def test_a_python_too_new_to_exist_is_refused_in_a_sentence() -> None:
    with pytest.raises(envs.PeerError, match=r"needs Python 3\.19 or newer"):
        envs.find_python((3, 19))


def test_later_sources_keep_only_the_main_archive_under_the_later_name() -> None:
    known = "Types: deb\nSuites: bookworm bookworm-updates\nComponents: main\n\nTypes: deb\nSuites: bookworm-security\n"
    assert compose.later(known, "bookworm") == "Types: deb\nSuites: trixie\nComponents: main\n"


def test_no_constraints_hold_an_address() -> None:
    for path in Path(envs.__file__).parent.glob("constraints-*.txt"):
        for line in path.read_text().splitlines():
            assert re.fullmatch(r"(#.*|[\w.\-\[\]]+==[\w.!+\-]+)?", line), (path.name, line)
