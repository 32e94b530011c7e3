"""The page in a real browser: every tab, hostile responses, files beside it, several runs, phones, 100,000 rollouts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import answer, episode, make_run

pytest.importorskip("websockets", reason="websockets is not installed, which talks to the browser")
from chromium import Tab, browser_path, chromium

from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.telemetry.page import rollout_chunks
from grpo_rl.telemetry.page.page_file import write_page
from grpo_rl.telemetry.rollout_log import write_rollouts

pytestmark = pytest.mark.skipif(browser_path() is None, reason="there is no Chromium on this machine (Debian: chromium)")

HOSTILE = (
    "</script><script>window.__owned = 1</script>",
    "<img src=x onerror=window.__owned=1><svg onload=window.__owned=1>",
    "\u2028\u2029window.__owned=1//",
    "\"]}');window.__owned=1;//",
    "<!--<script>",
    "]]>--><iframe srcdoc='<script>parent.__owned=1</script>'></iframe>",
    "javascript:window.__owned=1 <a href='javascript:window.__owned=1'>x</a>",
    "\u202egnp.exe\u200b \x1b[2J \x00 \ud800 lone",
    "{{constructor.constructor('window.__owned=1')()}} ${window.__owned=1}",
    "<style>body{display:none}</style><meta http-equiv=refresh content='0;url=http://192.0.2.1/'>",
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as tab:
        yield tab


@pytest.fixture(autouse=True)
def fresh(tab: Tab) -> None:
    # The page of the test before looks for newer versions of itself until it is left.
    tab.call("Page.navigate", url="about:blank")
    tab.wait("location.href === 'about:blank'")
    tab.problems.clear()
    tab.requests.clear()
    tab.size(1400, 900)


def address(page: Path, **chosen: object) -> str:
    return f"{page.as_uri()}#" + "&".join(f"{key}={value}" for key, value in chosen.items())


def text(tab: Tab, selector: str = "main") -> str:
    return str(tab.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


def outside(tab: Tab) -> list[str]:
    return [one for one in tab.requests if not one.startswith(("file:", "about:", "data:", "blob:"))]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page([make_run(tmp_path_factory.mktemp("runs"), num_steps=12)])


@pytest.mark.parametrize("dark", [False, True])
def test_every_tab_is_drawn_without_an_error_and_without_the_network(tab: Tab, page: Path, dark: bool) -> None:
    tab.size(1400, 900, dark=dark)
    for name in ("overview", "curves", "rollouts", "time", "configuration"):
        tab.open(address(page, tab=name))
        assert len(text(tab)) > 100
    assert tab.problems == [] and outside(tab) == []
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == dark


def test_the_overview_says_what_was_trained_and_whether_it_worked(tab: Tab, page: Path) -> None:
    tab.open(address(page, tab="overview"))
    head, shown = text(tab, ".top"), text(tab)
    assert "a_run" in head and "done" in head and "12 of 12" in head and "step 4" in head
    assert shown.count("max(-A r, -A clip(r, 0.8, 1.2))") == 1 and "validation arithmetic/mean@1" in shown
    assert re.search(r"\n[\d.]+\n\[[\d.]+, [\d.]+\] step 12", shown), shown
    tab.wait("document.querySelectorAll('canvas').length > 0")


CHART = "document.querySelector('.card.small canvas')"
"""The first curve: it is drawn when the browser has said that its place is on the screen."""


def test_curves_are_searched_smoothed_and_saved(tab: Tab, page: Path) -> None:
    tab.open(address(page, tab="curves", find="kl_loss"), wait_for=CHART)
    assert tab.evaluate("[...document.querySelectorAll('.card.small h3')].map((one) => one.textContent)") == ["actor/kl_loss"]
    # What is saved is caught if it becomes a file.
    tab.evaluate(
        "window.__saved = []; HTMLAnchorElement.prototype.click = () => 0; URL.createObjectURL = (blob) => { window.__saved.push(blob); return ''; }; 0"
    )
    tab.click("CSV")
    lines = tab.evaluate("window.__saved[0].text()").splitlines()
    assert lines[0] == "step,actor/kl_loss" and lines[1] == "1,0.01" and len(lines) == 13
    tab.evaluate(
        "const one = document.querySelector('input[type=range]'); one.value = 0.9; one.dispatchEvent(new Event('input')); 0"
    )
    tab.wait("document.querySelectorAll('.u-legend, .plot canvas').length > 0 && location.hash.includes('smooth=0.9')")
    tab.open(address(page, tab="curves", find="kl_loss", axis="tokens"))
    assert "tokens 1,200" in text(tab) or tab.evaluate("location.hash").count("axis=tokens") == 1
    assert tab.problems == []


def test_files_are_links_that_lead_to_them(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path, "javascript:run", num_steps=2)
    for page in (write_page([run]), write_page([run], tmp_path / "elsewhere.html")):
        tab.open(address(page, tab="overview"))
        links = tab.evaluate("[...document.querySelectorAll('.files a')].map((link) => decodeURIComponent(link.href))")
        assert f"file://{run}/metrics.jsonl" in links


def test_one_curve_under_several_names_is_drawn_once(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=3)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    renamed = [
        record | {"reward/exact_match": record["reward/mean"]} if "reward/mean" in record else record for record in records
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in renamed))
    page = write_page([run])
    tab.open(address(page, tab="curves"), wait_for=CHART)
    assert "the same curve: reward/exact_match = reward/mean" in text(tab).replace("\n", " ")
    tab.open(address(page, tab="curves", find="exact_match"), wait_for=CHART)
    assert tab.evaluate("document.querySelector('.card.small h3').textContent") == "reward/exact_match"


def test_runs_that_differ_in_seeds_alone_are_drawn_as_a_mean_with_their_spread(tab: Tab, tmp_path: Path) -> None:
    def constant(reward: int) -> Path:
        return make_run(
            tmp_path, f"seed_{reward}", f"seed={reward}", num_steps=2, text=lambda step, row, sample: str(2 * row + 1 - reward)
        )

    other = make_run(tmp_path, "other", "actor_rollout_ref.actor.optim.lr=1e-3", num_steps=2)
    page = write_page([constant(0), constant(1), other], tmp_path / "sweep.html")
    tab.open(address(page, tab="overview"))
    # Rewards of 0 and of 1: the mean is 1/2, the standard deviation 1/sqrt(2).
    assert re.search(r"mean of seed_0, seed_1.*0\.5 ± 0\.71", text(tab).replace("\n", " "))
    tab.open(address(page, tab="curves", find="reward/mean"), wait_for=CHART)
    legend = text(tab, ".card.small .legend")
    assert "mean of seed_0, seed_1 0.5 [-0.207, 1.21]" in legend and "other" in legend
    tab.evaluate("document.querySelector('input[type=checkbox]').click()")
    tab.wait("document.querySelector('.card.small .legend')?.innerText.includes('seed_1')")
    assert "mean of" not in text(tab, ".card.small .legend") and tab.problems == []


def test_on_a_narrow_screen_every_tab_is_seen_and_health_stands_before_the_plan(tab: Tab, page: Path) -> None:
    tab.size(390, 844)
    tab.open(address(page, tab="overview"))
    edges = "[...document.querySelectorAll('.tabs button')].map((one) => one.getBoundingClientRect().right)"
    assert max(tab.evaluate(edges)) <= 390
    top = "[...document.querySelectorAll('.card')].find((one) => one.textContent.startsWith('{}')).getBoundingClientRect().top"
    assert tab.evaluate(top.format("Health")) < tab.evaluate(top.format("What was trained"))
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_rollouts_are_filtered_while_somebody_types(tab: Tab, page: Path) -> None:
    tab.open(address(page, tab="rollouts", step=3), wait_for="document.querySelectorAll('.row').length == 6")
    tab.evaluate(
        "const box = document.querySelector('input[type=search]'); box.focus(); box.value = 'no such text'; "
        "box.dispatchEvent(new Event('input')); 0"
    )
    tab.wait("document.querySelectorAll('.row').length == 0")
    assert tab.evaluate("document.activeElement.type") == "search", "the next letter goes there too"
    assert "No group meets all of these conditions" in text(tab) and tab.problems == []


def test_a_whole_group_is_shown_side_by_side_with_the_history_of_its_prompt(tab: Tab, page: Path) -> None:
    tab.open(address(page, tab="rollouts", step=3), wait_for="document.querySelectorAll('.rollout').length")
    assert tab.evaluate("document.querySelectorAll('.rollout').length") == 4
    assert tab.evaluate("document.querySelectorAll('.row').length") == 6
    responses = tab.evaluate("[...document.querySelectorAll('.rollout > pre')].map((one) => one.textContent)")
    assert responses == [answer(3, 0, sample) for sample in range(4)]
    assert "+0.5" in text(tab, ".rollout")
    assert "This prompt at 12 steps" in text(tab, ".history")
    tab.click("7", ".steps button")
    tab.wait("document.querySelector('.detail b').textContent.includes('step 7')")
    responses = tab.evaluate("[...document.querySelectorAll('.rollout > pre')].map((one) => one.textContent)")
    assert responses == [answer(7, 0, sample) for sample in range(4)]


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "7*7"}}\n</tool_call>'


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run whose last step has episodes: the first group with its tokens, the second without."""
    run = make_run(tmp_path_factory.mktemp("runs"), num_steps=2)
    build_tokenizer(128).save_pretrained(run / "model")
    rollouts = [
        one
        for row in (7, 8)
        for one in (
            episode(row, 0, [f"I ask. {CALL}", "49"], ["49"]),
            episode(row, 1, ["40", "45", "50"], ["more", "more"], ended="turns"),
        )
    ]
    write_rollouts(run / "rollouts" / "step_2.jsonl", rollouts, [0.7, -0.7] * 2, token_groups=1)
    return write_page([run])


def test_an_episode_is_a_conversation_whose_sampled_turns_are_marked(tab: Tab, games: Path) -> None:
    def turns(kind: str, what: str = "one.querySelector('pre').textContent") -> list[list[str]]:
        return tab.evaluate(
            "[...document.querySelectorAll('.rollout')].map((card) => "
            f"[...card.querySelectorAll('.turn{kind}')].map((one) => {what}))"
        )

    opened = {"wait_for": "document.querySelectorAll('.rollout').length"}
    tab.open(address(games, tab="rollouts", step=2, group="2.1"), **opened)
    assert turns(".trained") == [[f"I ask. {CALL}", "49"], ["40", "45", "50"]]
    assert turns(":not(.trained)") == [["49"], ["more", "more"]]
    first, second = tab.evaluate("[...document.querySelectorAll('.rollout')].map((one) => one.innerText)")
    assert "2 turns" in first and "tool calculator" in first and "solved 1" in first and "waited 0.5 s" in first
    assert "failed calls" not in first, "a count of 0 is not worth a word"
    assert "3 turns" in second and "out of turns" in second and "reward 2" in second

    tab.open(address(games, tab="rollouts", step=2, group="2.1", colour="advantage"), **opened)
    grounds = "getComputedStyle(one.querySelector('pre')).backgroundColor"
    (good, *_), (bad, *_) = turns(".trained", grounds)
    assert len({good, bad, *turns(":not(.trained)", grounds)[0]}) == 3, "an advantage is of sampled tokens alone"

    # With tokens each is coloured by its log-prob, the end of the turn among them; context has none.
    tab.open(address(games, tab="rollouts", step=2, group="2.0"), **opened)
    assert turns(".trained")[1] == [f"{said}<|end|>" for said in ("40", "45", "50")]
    assert turns(":not(.trained)", "one.querySelectorAll('pre span').length") == [[0], [0, 0]]
    assert turns(".trained", "one.querySelectorAll('pre span').length")[1] == [3, 3, 3]
    assert "log-prob -0.1" in tab.evaluate("document.querySelector('.trained span[title]').title")
    assert tab.problems == []
    tab.size(360, 740)
    tab.open(address(games, tab="rollouts", step=2, group="2.0"), **opened)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


def hostile(step: int, row: int, sample: int) -> str:
    return HOSTILE[(row * 4 + sample) % len(HOSTILE)]


@pytest.mark.parametrize("inline_bytes", [0, 2**22])
def test_hostile_responses_are_shown_and_do_nothing(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(rollout_chunks, "INLINE_BYTES", inline_bytes)
    run = make_run(tmp_path, num_steps=2, text=hostile)
    page = write_page([run])
    assert (run / "page_files").exists() == (inline_bytes == 0)
    seen = ""
    for step in (1, 2):
        for place in range(6):
            tab.open(
                address(page, tab="rollouts", step=step, group=f"{step}.{place}"),
                wait_for="document.querySelectorAll('.rollout').length",
            )
            seen += text(tab)
            assert (
                tab.evaluate("window.__owned === undefined")
                and tab.evaluate("document.querySelectorAll('iframe, svg, img').length") == 0
            )
    assert HOSTILE[0] in seen and HOSTILE[1] in seen and "\\u202egnp.exe\\u200b" in seen and "\\ud800 lone" in seen
    assert tab.problems == [] and outside(tab) == []


def test_the_name_of_a_run_and_of_a_metric_are_hostile_too(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path, "<b onclick=x>'&quot;", num_steps=2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "time": 0, "<img src=x onerror=window.__owned=1>": 1.0, "__proto__": 2.0}) + "\n")
    tab.open(address(write_page([run]), tab="curves"))
    assert text(tab, "h1") == "<b onclick=x>'&quot;" and tab.evaluate("document.querySelectorAll('img').length") == 0
    assert tab.evaluate("window.__owned === undefined") and tab.problems == []


def test_the_policy_of_the_page_stops_scripts_and_the_network(tab: Tab, page: Path) -> None:
    tab.open(address(page, tab="overview"))
    tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.__owned=1>'); 0")
    tab.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.__owned=1'})); 0")
    assert tab.evaluate("fetch('http://192.0.2.1/').then(() => 'sent', () => 'refused')") == "refused"
    source = "new Promise((done) => { const one = document.createElement('script'); one.onerror = () => done('refused');"
    assert (
        tab.evaluate(
            source + "one.onload = () => done('ran'); one.src = 'https://192.0.2.1/x.js'; document.head.append(one); })"
        )
        == "refused"
    )
    assert tab.evaluate("window.__owned === undefined") and len(tab.problems) >= 3


def test_an_open_page_of_a_running_run_follows_it(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=2, state="running")
    page = write_page([run])
    tab.open(address(page, tab="overview"))
    assert "running" in text(tab, ".top") and "2 of 2" in text(tab, ".top")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "done", "step": 7, "total": 7}))
    write_page([run])
    tab.wait("document.querySelector('.top')?.innerText.includes('7 of 7')", 20)
    assert "done" in text(tab, ".top") and tab.problems == []
