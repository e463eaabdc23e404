"""The status page in a real browser: what it shows, how it follows the node, and that nothing on it is markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from playwright.sync_api import Browser

from agent.model.allocation import PodRef
from agent.model.device import MigDevice
from agent.model.health import unhealthy
from agent.report.endpoints import EndpointServer, Pages
from agent.report.facts import DriverState
from agent.report.status import served
from tests.browser.chromium import Tab, opened
from tests.browser.shown import ShownNode, offered
from tests.node import claimed_vf, granted, prepare

AWAY = "Failed to load resource: net::ERR_"
"""Said of what nobody answers; an answer that is an error is told otherwise."""
READY = "document.querySelector('#freshness')?.textContent.includes('live')"
VF = "0000:18:00.1"
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>&quot;\'"`${window.broken=1}'


@contextmanager
def looking(browser: Browser, node: ShownNode, width: int = 1280, *, dark: bool = False) -> Iterator[Tab]:
    """Open the page and wait until it shows the node. At the end nothing may have gone wrong in it."""
    with opened(browser, node.url, width, dark=dark) as page:
        page.until(READY)
        yield page
        assert page.complaints == []
        assert all(url.startswith(node.url) for url in page.requests)


def state(page: Tab, key: str) -> str:
    return str(page.evaluate(f"document.querySelector('[data-key={json.dumps(key)}]').dataset.state"))


def focused(page: Tab) -> str | None:
    key: str | None = page.evaluate("document.activeElement.dataset.key")
    return key


def rows(page: Tab, table: str) -> list[list[str]]:
    cells = f"[...document.querySelectorAll('#{table} tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    found: list[list[str]] = page.evaluate(cells)
    return found


def test_the_tree_shows_each_gpu_nic_and_vf_below_its_switch_and_all_that_can_be_reached_has_a_name(
    browser: Browser, node: ShownNode
) -> None:
    with looking(browser, node) as page:
        found = page.evaluate(
            "[...document.querySelectorAll('[role=treeitem]')].map(i => [i.className, i.dataset.key])"
        )
        assert [kind for kind, _ in found].count("gpu") == 8
        assert [kind for kind, _ in found].count("nic") == 10
        assert [key for kind, key in found if kind == "cell"] == [d.address for d in node.snapshot.devices if d.is_vf]
        together = f"document.querySelector('[data-key=\"{VF}\"]').closest('.bridge').querySelector('.gpu').dataset.key"
        assert page.evaluate(together) == "0000:1b:00.0"
        assert page.text("#node") == "node-1"
        assert rows(page, "rails")[0][:3] == ["GPU0", "PIX", "NIC2"]
        assert [row[1] for row in rows(page, "rails")] == ["PIX"] * 8

        tools = page.page.context.new_cdp_session(page.page)
        tree = [n for n in tools.send("Accessibility.getFullAXTree")["nodes"] if not n.get("ignored")]
        roles = [n["role"]["value"] for n in tree]
        assert {"banner", "main", "complementary", "search", "tree", "treeitem"} <= set(roles)
        wanted = {"treeitem", "searchbox", "region", "button", "link", "meter", "tree"}
        assert [n for n in tree if n["role"]["value"] in wanted and not n.get("name", {}).get("value")] == []
        assert roles.count("treeitem") == 2 + 9 + 8 + 10 + 64


def test_a_pod_that_comes_is_shown_and_one_that_goes_is_not(browser: Browser, node: ShownNode) -> None:
    with looking(browser, node) as page:
        assert state(page, VF) == "free"
        node.attach(VF, PodRef("default", "trainer-0"))
        page.until(f"document.querySelector('[data-key=\"{VF}\"]').dataset.state === 'attached'")
        assert [row[:6] for row in rows(page, "held")] == [
            [VF, "rdma/vf", "granted to default/trainer-0", "net1", "192.168.100.1/24", "attached"]
        ]
        assert ["attach", VF, "is net1 of default/trainer-0"] in [row[2:] for row in rows(page, "events")]
        assert "default/trainer-0" in page.evaluate(f"document.querySelector('[data-key=\"{VF}\"]').ariaLabel")
        (row,) = node.ledger.attachments()
        node.ledger.finish_detach(row)
        node.ledger.release([VF])
        page.until(f"document.querySelector('[data-key=\"{VF}\"]').dataset.state === 'free'")
        assert rows(page, "held") == []


def test_each_state_has_a_shape_of_its_own(browser: Browser, node: ShownNode) -> None:
    vfs = [d.address for d in node.snapshot.devices if d.is_vf]
    node.attach(vfs[0], PodRef("default", "a"))
    node.ledger.grant(granted("rdma/vf", {vfs[1]: vfs[1]}))
    node.spoil(vfs[2], unhealthy("LinkDown"))
    node.ledger.quarantine(vfs[3], "its MAC cannot be set")
    node.attach(vfs[4], PodRef("default", "b"), 2)
    node.ledger.begin_detach([node.ledger.attachments()[-1].attachment_id])
    with looking(browser, node) as page:
        states = [state(page, vf) for vf in vfs[:6]]
        assert states == ["attached", "granted", "unhealthy", "quarantined", "moving", "free"]
        assert state(page, "0000:0b:00.0") == "idle"
        shape = (
            "[...document.querySelectorAll('#legend .glyph')].map(g => {const s = getComputedStyle(g, '::before');"
            " return [s.clipPath, s.backgroundImage, s.borderTopWidth].join()})"
        )
        shapes = page.evaluate(shape)
        assert len(shapes) == len(set(shapes)) == 7
        wrong = [row[:2] for row in rows(page, "wrong")]
        assert ["NIC2 VF 3 (0000:18:00.4)", "quarantine: its MAC cannot be set"] in wrong
        assert wrong[1][0] == "NIC2 VF 2 of rdma/vf"
        assert wrong[1][1].startswith("LinkDown: ")


def test_the_keyboard_walks_the_tree_and_opens_details(browser: Browser, node: ShownNode) -> None:
    node.attach(VF, PodRef("default", "trainer-0"))
    with looking(browser, node) as page:
        page.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.press("Tab", "Tab")
        assert focused(page) == "numa-0"
        page.press("ArrowRight", "ArrowRight")
        assert focused(page) == "0000:1b:00.0"
        page.press("ArrowDown")
        assert focused(page) == "0000:18:00.0"
        page.press("ArrowRight")
        assert focused(page) == VF
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert "default/trainer-0 as net1" in page.text("#details-body")
        page.press("ArrowRight", "ArrowRight", "ArrowLeft")
        assert focused(page) == "0000:18:00.2"
        page.press("Enter", "End")
        assert focused(page) != "0000:18:00.2"
        assert "0000:18:00.2" in page.text("#details-body")
        page.press("Escape", "Home")
        assert focused(page) == "numa-0"
        assert "0000:18:00.2" not in page.text("#details-body")
        # One tab stop for all of it, and the one it was left at.
        assert page.evaluate("document.querySelectorAll('#hardware [tabindex=\"0\"]').length") == 1
        page.press("ArrowDown", "Tab")
        assert page.evaluate("document.activeElement.closest('#hardware') === null")


def test_the_arrows_go_where_they_point_in_rows_of_vfs(browser: Browser, big_node: ShownNode) -> None:
    with looking(browser, big_node) as page:
        page.evaluate(f"document.querySelector('[data-key=\"{VF[:-4]}01.0\"]').focus()")
        place = "(() => {const r = document.activeElement.getBoundingClientRect(); return [r.x, Math.round(r.y)]})()"
        x, y = page.evaluate(place)
        page.press("ArrowDown")
        assert page.evaluate(place)[0] == x
        assert page.evaluate(place)[1] > y
        page.press("ArrowUp")
        assert page.evaluate(place) == [x, y]
        page.press("ArrowUp")
        assert focused(page) == "0000:18:00.0"
        page.press("ArrowLeft", "ArrowDown")  # folded: the VFs are passed over
        assert page.evaluate("document.activeElement.className") in ("bridge", "numa")
        page.press("ArrowUp", "ArrowRight", "ArrowDown")
        assert focused(page) == f"{VF[:-4]}01.0"


def test_what_has_the_focus_is_never_behind_the_details(browser: Browser, node: ShownNode) -> None:
    visible = (
        "(() => {const r = document.activeElement.getBoundingClientRect();"
        " return document.elementFromPoint(r.x + 5, r.y + 5) !== null &&"
        " r.y + 5 < document.querySelector('#details').getBoundingClientRect().y})()"
    )
    with looking(browser, node, 390) as page:
        page.press("Tab", "Tab", "Tab")
        for _ in range(20):
            page.press("ArrowDown")
            page.until(visible, 5)


def test_the_filter_finds_pods_and_devices(browser: Browser, node: ShownNode) -> None:
    node.attach(VF, PodRef("default", "trainer-0"), 1)
    node.attach("0000:3a:00.1", PodRef("default", "other"), 2)
    bright = "[...document.querySelectorAll('.cell:not([data-dim])')].map(c => c.dataset.key)"
    with looking(browser, node) as page:
        assert len(page.evaluate(bright)) == 64
        page.evaluate("document.querySelector('#filter').focus()")
        page.page.keyboard.insert_text("Trainer-0")
        page.until("document.querySelectorAll('.cell[data-dim]').length === 63")
        assert page.evaluate(bright) == [VF]
        assert [row[2] for row in rows(page, "held")] == ["granted to default/trainer-0"]
        assert page.text("#matches") == "1 device, 3 rows"
        page.evaluate("document.querySelector('#filter').value = ''")
        page.page.keyboard.insert_text("mlx5_1 nic3")
        page.until("document.querySelectorAll('.nic:not([data-dim])').length === 1")
        page.evaluate("document.querySelector('#filter').value = ''")
        page.page.keyboard.insert_text("nothing-of-this-name")
        page.until("document.querySelector('#matches').textContent === '0 devices, 0 rows'")
        assert "Nothing here fits the filter" in page.text("#held")


def test_names_from_pods_are_text_and_nothing_else(browser: Browser, node: ShownNode) -> None:
    node.attach(VF, PodRef(HOSTILE, HOSTILE))
    node.ledger.quarantine(HOSTILE, HOSTILE)
    node.overview.events.note("agent", HOSTILE, HOSTILE)
    node.overview.conditions.set("ledger", HOSTILE)
    with looking(browser, node) as page:
        page.page.click(f'[data-key="{VF}"]')
        assert HOSTILE in page.text("#details-body")
        assert HOSTILE in page.text("#held")
        assert HOSTILE in page.text("#events")
        assert HOSTILE in page.text("#obstacles")
        assert page.evaluate("window.broken") is None
        assert page.evaluate("document.querySelectorAll('main img, main script, aside img').length") == 0


def test_no_text_can_become_markup_even_by_mistake(browser: Browser, node: ShownNode) -> None:
    mistake = "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')"
    with opened(browser, node.url) as page:
        page.until(READY)
        refused = page.evaluate(f"(() => {{try {{{mistake}}} catch (error) {{return error.name}}}})()")
        assert refused == "TypeError"
        assert len(page.complaints) == 1
        assert "TrustedHTML" in page.complaints[0]


def test_an_agent_that_is_away_or_begins_anew_with_a_wrong_configuration_is_told_and_the_page_recovers(
    browser: Browser, node: ShownNode
) -> None:
    waiting = Pages(
        lambda _: ("", b""), lambda: served({"ready": False, "obstacles": {"config": "resources: no list"}})
    )
    with opened(browser, node.url) as page:
        page.until(READY)
        port = node.server.port if node.server is not None else 0
        node.close()
        page.until("document.querySelector('#freshness').textContent.includes('stale since')")
        assert page.text("#freshness").endswith("the agent does not answer")
        assert page.evaluate("document.querySelectorAll('.gpu').length") == 8  # what was known stays
        node.attach(VF, PodRef("default", "trainer-0"))
        with closing(EndpointServer.open("127.0.0.1", port, waiting)):
            page.until("document.querySelector('#freshness').textContent.endsWith('repaired: resources: no list')")
            assert page.evaluate("document.title") == "node-1 – nodefabric"
        node.open(port)
        page.until(READY)
        page.until(f"document.querySelector('[data-key=\"{VF}\"]').dataset.state === 'attached'")
        assert [line for line in page.complaints if not line.startswith(AWAY)] == []


def test_what_keeps_the_agent_from_its_work_is_said_on_top(browser: Browser, node: ShownNode) -> None:
    node.overview.conditions.set("kubelet", "has no open stream for rdma/vf")
    with looking(browser, node) as page:
        assert page.text("#readiness") == "▲ not ready"
        assert "kubelet: has no open stream for rdma/vf" in page.text("#obstacles")
        node.overview.conditions.set("kubelet", None)
        page.until("document.querySelector('#readiness').textContent === '● ready'")


def test_nothing_is_asked_twice_while_nothing_happens(browser: Browser, node: ShownNode) -> None:
    with looking(browser, node) as page:
        page.until("performance.getEntriesByName(location.origin + '/status').length > 2")
        answers = [status for url, status in page.answers if url.endswith("/status")]
    assert answers[0] == 200
    assert set(answers[1:]) == {304}


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_full_node_fits_the_width_and_nothing_jumps(
    browser: Browser, big_node: ShownNode, width: int, dark: bool
) -> None:
    vfs = [d.address for d in big_node.snapshot.devices if d.is_vf]
    with looking(browser, big_node, width, dark=dark) as page:
        assert page.evaluate("document.querySelectorAll('.cell').length") == 1024
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cell = "[...document.querySelectorAll('.cell')].every(c => c.offsetWidth >= 12 && c.offsetHeight >= 12)"
        assert page.evaluate(cell)
        drawn = "[...document.querySelectorAll('#hardware .row, .cell')]"
        places = f"JSON.stringify({drawn}.map(e => [e.offsetLeft, e.offsetTop]))"
        before = page.evaluate(places)
        page.evaluate("window.kept = document.querySelector('.cell')")
        big_node.attach(vfs[0], PodRef("default", "trainer-with-a-rather-long-name-0"))
        big_node.spoil(vfs[200], unhealthy("LinkDown"))
        page.until("document.querySelectorAll('.cell[data-state=unhealthy]').length === 1")
        page.until("document.querySelector('.cell[data-state=attached]')")
        assert page.evaluate(places) == before
        assert page.evaluate("window.kept === document.querySelector('.cell')")


def test_other_hardware_is_drawn_anew_and_the_focus_stays(browser: Browser, node: ShownNode) -> None:
    with looking(browser, node) as page:
        page.evaluate(f"document.querySelector('[data-key=\"{VF}\"]').focus()")
        gone = "0000:18:01.0"
        kept = tuple(
            replace(d, vfs=tuple(v for v in d.vfs if v != gone)) for d in node.snapshot.devices if d.address != gone
        )
        node.snapshot = replace(node.snapshot, devices=kept, generation=2)
        page.until("document.querySelectorAll('.cell').length === 63")
        assert focused(page) == VF


def test_claims_are_shown_with_their_driver_where_there_is_one(browser: Browser, node: ShownNode) -> None:
    with looking(browser, node) as page:
        assert page.text("#dra") == ""
        prepare(node.ledger, "nics", claimed_vf(VF), claimed_vf("0000:18:00.2", request="other"))
        node.report.driver.set(
            DriverState("nodefabric.io", "", 2, frozenset({"taints"}), (("rdma/vf", "LinkDown", 1),))
        )
        page.until("document.querySelector('#dra').textContent && document.querySelector('#held tbody')")
        line = "registered with kubelet; 2 slices published; 1 device (▲ 1 LinkDown); ▲ the cluster leaves out taints"
        assert page.text("#dra") == f"DRA driver nodefabric.io: {line}"
        assert state(page, VF) == "granted"
        assert [row[1:6] for row in rows(page, "held")] == [
            ["rdma/vf", f"claimed by default/nics ({request}) for default/trainer", "", "", "prepared"]
            for request in ("nic", "other")
        ]
        node.report.driver.set(DriverState("nodefabric.io", "kubelet is away"))
        page.until(
            "document.querySelector('#dra').textContent.includes('▲ not registered with kubelet: kubelet is away')"
        )


def test_slots_slices_rails_and_kinds_of_tomorrow_are_shown(browser: Browser, node: ShownNode) -> None:
    gpu = replace(node.snapshot.gpus[0], mig_mode=True, mig_devices=(MigDevice("MIG-1", "1g.10gb", 7, 0, 10 << 30),))
    node.snapshot = replace(node.snapshot, gpus=(gpu, *node.snapshot.gpus[1:]), generation=2)
    rail = offered("rail-1", "rdma/rail", VF, gpu=node.snapshot.gpus[3].uuid)
    node.units = {
        "rdma/vf": tuple(offered(f"slot-vf-0-{n}", "rdma/vf", "") for n in range(4)),
        "gpu/mig": (offered("MIG-1", "gpu/mig", "MIG-1"),),
        "rdma/rail": (rail,),
        "new/kind": (offered("x", "new/kind", "of-no-known-device", unhealthy("LinkDown")),),
    }
    node.ledger.grant(granted("rdma/vf", {"slot-vf-0-0": ""}))
    node.ledger.grant(granted("gpu/mig", {"MIG-1": "MIG-1"}))
    node.ledger.grant(granted("rdma/rail", {"rail-1": VF}))
    node.ledger.bind(["rail-1"], PodRef("default", "on-rails"))
    with looking(browser, node) as page:
        assert rows(page, "slots") == [["rdma/vf", "0", "4", "4", "1", "0"]]
        assert state(page, "MIG-1") == "granted"
        assert page.evaluate("document.querySelector('[data-key=MIG-1]').ariaLabel").startswith("GPU0 1g.10gb")
        assert state(page, VF) == state(page, node.snapshot.gpus[3].pci_address) == "granted"
        page.page.click(f'[data-key="{node.snapshot.gpus[3].pci_address}"]')
        assert "rdma/rail: granted to default/on-rails" in page.text("#details-body")
        held = [row[:3] for row in rows(page, "held")]
        assert ["slot-vf-0-0", "rdma/vf", "granted to a pod not known yet"] in held
        assert rows(page, "wrong")[0][0] == "of-no-known-device of new/kind"


def luminance(colour: str) -> float:
    """Compute the relative luminance of `rgb(r, g, b)` (WCAG 2.2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_shapes_stand_out_from_their_ground(browser: Browser, node: ShownNode, dark: bool) -> None:
    names = ["ground", "card", "ink", "soft", "red", "green", "blue", "orange", "purple", "gray", "focus", "mark"]
    resolve = (
        "(names => names.map(name => {const e = document.createElement('i'); e.style.color = `var(--${name})`;"
        " document.body.append(e); const c = getComputedStyle(e).color; e.remove(); return [name, c]}))"
    )
    with looking(browser, node, dark=dark) as page:
        colours = dict(page.evaluate(f"{resolve}({json.dumps(names)})"))
    for ground in (colours["ground"], colours["card"], colours["mark"]):
        assert contrast(colours["ink"], ground) >= 7
    for ground in (colours["ground"], colours["card"]):
        assert min(contrast(colours[name], ground) for name in ("soft", "red", "green")) >= 4.5
        assert min(contrast(colours[name], ground) for name in ("blue", "orange", "purple", "gray", "focus")) >= 3
