"""The live page in a headless Chromium, with real traffic through a whole router."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loadtest.engine_model.time_model import TimeModel
from tests.faults.pooled import pooled
from tests.faults.stage import SECRET, Engines, Stage, chat, on_stage, streamed, words
from tests.faults.tenants import A as TENANT_A
from tests.faults.tenants import tenants_file
from tests.observers.live.browser import Page, browsing

TOKEN = f"{SECRET}-admin-token"
STATUS = "document.getElementById('status').textContent"
TAB, ENTER = 9, 13


@asynccontextmanager
async def shown(stage: Stage, fragment: str = "") -> AsyncIterator[Page]:
    """Open the page; at the end its console has shown no error."""
    async with browsing() as page:
        await page.look()
        await page.open(f"{stage.admin_url}/{fragment}")
        yield page
        assert page.errors == []


async def two_sessions(stage: Stage, *engines: object, turns: int = 3) -> None:
    """One session that goes on; one with the clock in its system prompt."""
    history: list[str] = []
    for turn in range(turns):
        history += [words(turn)]
        await stage.ask(streamed(chat(*history)))
        clocked = streamed(chat(*history))
        system = {"role": "system", "content": f"It is 12:0{turn}. {words(70)}"}
        clocked["messages"] = [system, *clocked["messages"]]
        await stage.ask(clocked, headers={"X-Session-ID": f"clock-{SECRET}"})
        await stage.settled(*engines)  # type: ignore[arg-type]
        history += ["yes"]


async def test_it_answers_the_five_questions() -> None:
    """Are the caches known, who is full, who waits, what was recomputed, which sessions cost."""
    async with Engines(2) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await page.until("document.querySelectorAll('#decisions li').length === 0")
        await two_sessions(stage, *engines, turns=5)
        await page.until("document.querySelectorAll('#decisions li').length === 10")
        await page.until("document.querySelectorAll('#sessions tbody tr').length === 2")
        await page.until("!document.getElementById('findings').hidden")
        await page.until("document.querySelector('#tiles').innerText.includes('changed')")
        tiles = await page.text("#tiles")
        everything = await page.evaluate("document.documentElement.outerHTML")
        findings, replicas = await page.text("#findings"), await page.text("#replicas")
        status, tokens = await page.text("#status"), await page.text("#tokens-text")

    assert "Are the caches known?\n✓ 2 of 2\n100 % of" in tiles
    assert "Who is full?" in tiles
    assert "Who waits?\n✓ nobody" in tiles
    assert "What was recomputed?" in tiles
    assert "of GPU" in tiles
    assert "contains a time of day" in findings
    assert "✓ exact" in replicas
    assert "had been computed before" in tokens
    assert status == "Live."
    assert SECRET not in everything


async def test_what_is_degraded_is_said() -> None:
    """In the words of `warmroute status`; nothing is said while all is well."""
    async with Engines(2) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await page.until("document.querySelectorAll('#replicas tbody tr').length === 2")
        is_hidden = await page.evaluate("document.getElementById('degraded').hidden")
        for name in ("r1", "r2"):
            await stage.admin(f"/admin/replicas/{name}/drain", {"draining": True})
        await page.until("!document.getElementById('degraded').hidden")
        await page.until("document.querySelectorAll('#degraded li').length === 1")
        said = await page.text("#degraded")

    assert is_hidden
    assert "✗ no replica takes requests for tiny: r1: draining, r2: draining" in said


async def test_a_session_opens_with_its_turns_and_what_to_do() -> None:
    """By keyboard; Escape closes it. The session that costs most is the first."""
    slow = TimeModel(base_ms=5.0, ms_per_prefill_token=0.3)
    async with (
        Engines(1, time_model=slow) as engines,
        on_stage(*engines) as stage,
        shown(stage) as page,
    ):
        await two_sessions(stage, *engines)
        await page.until("document.querySelectorAll('#sessions tbody tr').length === 2")
        label = "[...document.querySelectorAll('#sessions svg')].map(each => each.ariaLabel)"
        await page.until(f"{label}.every(each => each.startsWith('the last 3 turns: '))")
        rivers = await page.evaluate(label)
        await page.evaluate("document.querySelector('#sessions button').focus()")
        await page.press("Enter", ENTER, "\r")
        await page.until("document.querySelectorAll('#session tbody tr').length === 3")
        dialog = await page.text("#session")
        axes = "[...document.querySelectorAll('%s svg text')].map(each => each.textContent)"
        chart = await page.evaluate(axes % "#tokens-chart")
        river_axes = await page.evaluate(axes % "#session")
        await page.press("Escape", 27)
        await page.until("!document.getElementById('session').open")

    assert chart[0].endswith(" tokens in 10 s")
    assert chart[1:] == ["10 minutes ago", "5 minutes ago", "now"]
    assert river_axes[0] == "r1"
    assert re.search("oldest first; the highest is [0-9,]+ prompt tokens", river_axes[1])
    assert [river.rpartition(", ")[2] for river in rivers] == ["at r1", "at r1"]
    assert "the system prompt changed at token" in dialog
    assert "What to do\nMove what changes (a time, an id)" in dialog
    assert SECRET not in dialog


async def test_a_finished_request_opens_with_the_cost_of_each_replica() -> None:
    async with Engines(2) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await page.until(f"{STATUS} === 'Live.'")
        reply = await stage.ask(streamed(chat(words(1))))
        await page.until("document.querySelectorAll('#decisions li').length === 1")
        await page.evaluate("document.querySelector('#decisions summary').focus()")
        await page.press("Enter", ENTER, "\r")
        await page.until("document.querySelectorAll('#decisions tbody tr').length === 2")
        costs = await page.text("#decisions")

    assert f"✓ {reply.replica}, chosen" in costs
    assert "policy kv_aware" in costs
    assert "predicted 0 cached, engine says 0" in costs


async def test_pool_experiment_and_tenants_have_tables(tmp_path: Path) -> None:
    """And a replica that never answered is named, with the reason."""
    variants = [{"name": name, "policy": "kv_aware"} for name in ("one", "two")]
    settings = {
        "tenants__file": tenants_file(tmp_path),
        "experiment": {"name": "e", "variants": variants},
    }
    async with pooled(**settings) as setup, shown(setup.stage) as page:
        stage = setup.stage
        await stage.ask(streamed(chat(words(1))), headers=TENANT_A)
        await stage.saved(*setup.engines)
        await stage.admin("/admin/replicas", {"url": "http://127.0.0.1:9", "name": "late"})
        await page.until("document.querySelectorAll('#tenants tbody tr').length === 1")
        await page.until("document.getElementById('replicas').innerText.includes('missing')")
        await page.until("document.querySelectorAll('#pools meter').length === 1")
        pools, tenants = await page.text("#pools"), await page.text("#tenants")
        experiments, replicas = await page.text("#experiments"), await page.text("#replicas")

    assert "the pool\t✓ up" in pools
    assert experiments.count("kv_aware\t50 %") == 2
    assert "e: split, running since" in experiments
    assert "one (control)" in experiments
    assert tenants.splitlines()[-1].startswith("a\t1\t")
    assert "late\t✗ missing" in replicas


async def test_cards_without_content_are_hidden() -> None:
    """There is no queue, pool, experiment, tenant or price."""
    hidden = "[...document.querySelectorAll('main section')].filter(e => !e.checkVisibility())"
    async with Engines(1) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await stage.ask(streamed(chat(words(1))))
        await page.until("document.querySelectorAll('#sessions tbody tr').length === 1")
        names = await page.evaluate(f"{hidden}.map(each => each.getAttribute('aria-labelledby'))")
        everything = await page.text("main")

    assert sorted(names) == [
        *("h-costs-model", "h-costs-tenant", "h-degraded", "h-experiments", "h-findings"),
        *("h-pools", "h-queue", "h-tenants"),
    ]
    assert "Cost" not in everything


async def test_a_page_that_is_opened_later_shows_the_last_twenty_requests() -> None:
    """Each once, although the feed is opened again."""
    rows = "document.querySelectorAll('#decisions li').length"
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for number in range(22):
            await stage.ask(streamed(chat(words(number, 40))))
        async with shown(stage) as page:
            await page.until(f"{rows} === 20")
            await page.evaluate("document.getElementById('pause').click()")
            await stage.until(lambda: stage.num_following == 0)
            await page.evaluate("document.getElementById('pause').click()")
            await stage.ask(streamed(chat(words(30, 40))))
            await page.until(f"{rows} === 21")


async def test_on_a_phone_a_turn_begins_with_its_reason() -> None:
    """Cells stack, each with its heading."""
    async with Engines(1) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await page.look(width=390, height=844)
        await two_sessions(stage, *engines)
        await page.until("document.querySelectorAll('#sessions tbody tr').length === 2")
        await page.evaluate("document.querySelector('#sessions button').click()")
        await page.until("document.querySelectorAll('#session tbody tr').length === 3")
        tops = await page.evaluate("""(() => {
          const row = document.querySelector('#session tbody tr');
          const cells = [...row.children].sort(
            (a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top);
          return cells.map(cell => cell.dataset.title);
        })()""")
        width = await page.evaluate("document.getElementById('session').scrollWidth")
        heading = await page.evaluate(
            "document.querySelector('#session thead').getClientRects().length"
        )
        await page.look(width=800, height=844)
        wide = await page.evaluate(
            "document.querySelector('#session thead').getClientRects().length"
        )

    assert tops[0] == "Why it was computed"
    assert set(tops) == {
        *("Time", "Replica", "Prompt", "Cached", "Waited", "First token", "Why it was computed")
    }
    assert width <= 390
    assert (heading, wide > 0) == (0, True)


@pytest.mark.parametrize("is_dark", [False, True])
async def test_one_colour_means_one_thing(is_dark: bool) -> None:
    """In river and chart; a first turn, which is all new, has no colour of waste."""
    async with Engines(1) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await page.look(is_dark=is_dark)
        await stage.ask(streamed(chat(words(1))))
        await page.until("document.querySelectorAll('#sessions svg rect').length > 0")
        river = "[...document.querySelectorAll('#sessions svg rect')]"
        first = await page.evaluate(f"{river}.map(each => each.getAttribute('fill'))")
        colours = await page.evaluate("""(() => {
          const style = getComputedStyle(document.documentElement);
          return [...Object.keys(SOURCES), ...Object.keys(SHORT)].map(
            name => style.getPropertyValue(`--${name}`).trim());
        })()""")

    assert set(first) <= {"var(--new)", "var(--last_block)"}
    assert all(colours)
    assert len(set(colours)) == len(colours)


async def test_prices_and_ids_are_shown_if_the_operator_sets_them() -> None:
    """Cost by session and model; sessions as their clients name them."""
    settings = {"engine__cost_per_hour": 36_000.0, "session__show_ids": True}
    headers = {"X-Session-ID": "the-agent-of-monday"}
    async with Engines(1) as engines, on_stage(*engines, **settings) as stage:
        await stage.ask(streamed(chat(words(1))), headers=headers)
        async with shown(stage) as page:
            await page.until("document.querySelectorAll('#costs-model tbody tr').length === 1")
            tiles, sessions = await page.text("#tiles"), await page.text("#sessions")
            models, decisions = await page.text("#costs-model"), await page.text("#decisions")
            await page.evaluate("document.querySelector('#sessions button').click()")
            await page.until("document.querySelectorAll('#session tbody tr').length === 1")
            dialog = await page.text("#session")

    assert re.search(r"Which session costs most\?\ncost [0-9.]+\n", tiles)
    assert "the-agent-of-monday, 1 turn" in tiles
    assert "the-agent-of-monday" in sessions
    assert "saved 0" in sessions
    assert "tiny\t1\t" in models
    assert "the-agent-of-monday" in decisions
    assert dialog.startswith("Session the-agent-of-monday")
    assert re.search(r"; cost [0-9.]+, saved 0\.", dialog)


async def test_the_token_is_asked_for_and_stays_out_of_the_page(tmp_path: Path) -> None:
    """A wrong one is said; the right one opens the page and survives a reload."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=file) as stage:
        async with browsing() as page:
            await page.look()
            await page.open(stage.admin_url)
            await page.until("!document.getElementById('login').hidden")
            assert not await page.evaluate("document.getElementById('main').checkVisibility()")
            await page.write("wrong")
            await page.press("Enter", ENTER, "\r")
            await page.until("document.getElementById('refused').textContent.includes('wrong')")
            await page.write(TOKEN)
            await page.press("Enter", ENTER, "\r")
            await page.until("document.querySelectorAll('#replicas tbody tr').length === 1")
            everything = await page.evaluate("document.documentElement.outerHTML")
            await page.open(stage.admin_url)
            await page.until(f"{STATUS} === 'Live.'")
            await page.evaluate("document.getElementById('forget').click()")
            await page.until("!document.getElementById('login').hidden")
            kept = await page.evaluate("JSON.stringify(sessionStorage)")
            left = await page.evaluate("document.getElementById('replicas').textContent")

    assert TOKEN not in everything
    assert (kept, left) == ("{}", "Loading …")
    assert [error for error in page.errors if "401" not in error] == []


async def test_a_link_brings_the_token_and_loses_it_at_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=file) as stage:
        async with shown(stage, f"#token={TOKEN}") as page:
            await page.until(f"{STATUS} === 'Live.'")
            address = await page.evaluate("location.href")
            history = await page.evaluate("history.length")

    assert address == f"{stage.admin_url}/"
    assert history <= 2  # the empty tab, and this page


async def test_pause_holds_the_page_and_closes_the_feed() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await page.until(f"{STATUS} === 'Live.'")
        await page.evaluate("document.getElementById('pause').focus()")
        await page.press("Enter", ENTER, "\r")
        await page.until(f"{STATUS}.startsWith('Paused. Numbers are of')")
        await stage.until(lambda: stage.num_following == 0)
        label = await page.text("#pause")
        await page.press("Enter", ENTER, "\r")
        await page.until(f"{STATUS} === 'Live.'")

    assert label == "Resume"


async def test_a_hidden_tab_follows_nothing() -> None:
    """Browsers allow six connections to a port; the feed comes back with the tab."""
    hide = (
        "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    async with Engines(1) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await page.until(f"{STATUS} === 'Live.'")
        await page.evaluate(hide % "true")
        await stage.until(lambda: stage.num_following == 0)
        await page.evaluate(hide % "false")
        await stage.until(lambda: stage.num_following == 1)


async def test_without_the_feed_it_asks_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.observers.live.recent.MAX_LISTENERS", 0)
    async with Engines(1) as engines, on_stage(*engines) as stage, browsing() as page:
        await page.hurry(10)
        await page.open(stage.admin_url)
        await page.until(f"{STATUS}.startsWith('Asking every 5 s')")
        await page.until("document.querySelectorAll('#replicas tbody tr').length === 1")


async def test_old_numbers_stay_when_the_router_is_gone() -> None:
    """And it is said of when they are."""
    async with browsing() as page:
        async with Engines(1) as engines, on_stage(*engines) as stage:
            await page.hurry(10)
            await page.open(stage.admin_url)
            await page.until(f"{STATUS} === 'Live.'")
        await page.until(f"{STATUS}.startsWith('No answer since')")
        rows = await page.evaluate("document.querySelectorAll('#replicas tbody tr').length")

    assert rows == 1


@pytest.mark.parametrize("is_dark", [False, True])
async def test_it_fits_a_phone_and_can_be_read(is_dark: bool) -> None:
    """No table scrolls or loses a column; text has a contrast of 4.5 at least (WCAG 1.4.3)."""
    contrast = """(() => {
      const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
      const light = colour => {
        canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(
          v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const style = getComputedStyle(document.documentElement);
      const names = ['--text', '--soft', '--accent', '--good', '--warn', '--bad'];
      const pairs = names.flatMap(name => ['--card', '--bg'].map(back => {
        const both = [name, back].map(each => light(style.getPropertyValue(each).trim()));
        const [dark, bright] = both.sort((a, b) => a - b);
        return (bright + 0.05) / (dark + 0.05);
      }));
      return Math.min(...pairs);
    })()"""
    async with Engines(2) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await page.look(width=390, height=844, is_dark=is_dark)
        await two_sessions(stage, *engines)
        await page.until("document.querySelectorAll('#sessions tbody tr').length === 2")
        await page.evaluate("document.querySelector('#decisions summary')?.click()")
        width = await page.evaluate("document.scrollingElement.scrollWidth")
        scrolling = await page.evaluate("""[...document.querySelectorAll('main .scroll')].filter(
          each => each.scrollWidth > each.clientWidth).map(each => each.id)""")
        cells = await page.evaluate("""[...document.querySelectorAll('main td')].filter(
          each => each.checkVisibility()).map(each => each.dataset.title)""")
        lowest = await page.evaluate(contrast)

    assert (width <= 390, scrolling) == (True, [])
    assert {"Predictions right", "Work ahead", "Cache used", "Turns", "Home"} <= set(cells)
    assert lowest >= 4.5


async def test_a_screen_reader_finds_names_for_all_it_can_use() -> None:
    """Buttons, fields, tables, pictures and regions have names; sections have headings."""
    async with Engines(2) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await two_sessions(stage, *engines)
        await page.until("document.querySelectorAll('#sessions tbody tr').length === 2")
        await page.call("Accessibility.enable")
        nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]

    roles = {"button", "textbox", "table", "image", "region", "meter", "list", "link", "heading"}
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in roles
    ]
    unnamed = {role for role, name in named if not name} - {"list"}
    assert unnamed == set()
    assert {"button", "table", "image", "region", "heading"} <= {role for role, _ in named}
    assert any(node["role"]["value"] == "status" for node in nodes)


async def test_a_thousand_replicas_and_a_day_of_requests_stay_bounded() -> None:
    """Rows are bounded, what is left out is said, and a state is drawn within 100 ms."""
    async with Engines(1) as engines, on_stage(*engines) as stage, shown(stage) as page:
        await two_sessions(stage, *engines)
        await page.until("document.querySelectorAll('#sessions tbody tr').length === 2")
        await page.evaluate("ask = () => new Promise(() => {}); view.stop.abort()")
        grown = """(() => {
          const state = structuredClone(view.state), row = state.replicas.shown[0];
          state.replicas.total = 1000;
          state.replicas.shown = [...Array(50).keys()].map(n => ({...row, id: `r${n}`}));
          const session = state.sessions.shown[0];
          const causes = {new: 30, evicted: 20};
          session.recent = [...Array(24).keys()].map(n => [`r${n % 9}`, 900 * n, 0, 100, causes]);
          state.sessions.total = 10000;
          state.sessions.shown = [...Array(12).keys()].map(n => ({...session, session: `s${n}`}));
          const times = [];
          for (let round = 0; round < 30; round++) {
            state.replicas.shown.forEach(each => each.num_requests = round);
            take(structuredClone(state));
            const begun = performance.now();
            draw();
            times.push(performance.now() - begun);
          }
          return times.sort((a, b) => a - b)[15];
        })()"""
        took_ms = await page.evaluate(grown)
        line = {
            "kind": "decision", "request": "q", "at": 0, "replica": "r1", "tokens": 10,
            "cached": 5, "reported": 5, "session": "a", "outcome": "ok", "status": 200,
            "causes": {"new": 5}, "text": [], "advice": [], "costs": [], "tries": [],
        }  # fmt: skip
        each = f"{{...{json.dumps(line)}, request: `q${{n}}`}}"
        often = f"take({each}); if (n % 50 === 0) draw();"
        await page.evaluate(f"for (let n = 0; n < 5000; n++) {{ {often} }}")
        rows = await page.evaluate("document.querySelectorAll('#decisions li').length")
        nodes = await page.evaluate("document.querySelectorAll('*').length")
        said = await page.text("#replicas-more") + await page.text("#sessions-more")

    assert rows == 60
    assert nodes < 8_000
    assert took_ms < 100
    assert "950 more are not shown" in said
    assert "9,988 more sessions are not shown" in said
