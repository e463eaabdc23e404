from __future__ import annotations

from agent.config import HealthSettings
from agent.health_history import HealthHistory
from agent.model.device import Gpu
from agent.model.device_health import GpuEvent
from agent.model.health import HEALTHY, Reason, unhealthy

PF, GPU = "0000:3b:00.0", "GPU-1"
LINK = unhealthy(Reason.LINK_DOWN)
SETTINGS = HealthSettings(down_seconds=2.0, up_seconds=5.0, xid_quiet_seconds=60.0)
CARD = Gpu(GPU, 0, 0, "0000:18:00.0", "H100", 80 << 30)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Node:
    """A book, and the PF's link as it is looked at."""

    def __init__(self, settings: HealthSettings = SETTINGS) -> None:
        self.clock = Clock()
        self.book = HealthHistory(settings, self.clock)
        self.asked = 0
        self.book.subscribe(self.ask)

    def ask(self) -> None:
        self.asked += 1

    def look(self, *raw: bool, at: float = 0.0) -> str:
        """Look at the link of a PF (up or not, nothing to leave it out) at a time; return the reason that counts."""
        self.clock.now = 100.0 + at
        terms = self.book.policy()
        return "".join(terms.lasting(PF, HEALTHY if up else LINK).reason for up in raw)

    def look_at_gpu(self, at: float = 0.0, card: Gpu = CARD) -> str:
        self.clock.now = 100.0 + at
        return self.book.policy().gpu(card, "").reason


def test_a_flap_that_nobody_asks_about_any_more_is_not_waited_for() -> None:
    node = Node()
    node.look(True)
    node.look(False, at=1.0)
    node.look(at=2.0)  # something graver hides the link
    assert node.book.seconds_to_look() is None
    node.look(at=4.0)
    assert node.look(False, at=5.0) == "LinkDown"  # seen anew: taken as it is


def test_other_settings_count_from_the_next_look_on() -> None:
    node = Node()
    node.look(True)
    node.look(False, at=1.0)
    node.book.settings.set(HealthSettings(down_seconds=0.5))
    assert node.asked == 1
    assert node.look(False, at=1.5) == "LinkDown"


def test_links_may_be_ignored() -> None:
    assert HealthHistory(HealthSettings(link="ignore")).policy().follow_link is False
    assert HealthHistory().policy().follow_link is True


def test_an_error_that_is_ignored_from_now_on_counts_no_more() -> None:
    node = Node()
    node.book.gpu_event(GpuEvent(xid=119, at=100.0, gpu_uuid=GPU))
    assert node.look_at_gpu(at=1.0) == "XidFatal"
    node.book.settings.set(HealthSettings(xid_quiet_seconds=60.0, ignored_xids=frozenset({119})))
    assert (node.look_at_gpu(at=2.0), node.asked) == ("", 2)
    node.book.gpu_event(GpuEvent(xid=79, at=102.5, gpu_uuid=GPU))
    assert (node.look_at_gpu(at=3.0), node.asked) == ("XidFatal", 3)


def test_an_error_that_comes_again_and_again_asks_for_one_look() -> None:
    node = Node()
    for number in range(100):
        node.book.gpu_event(GpuEvent(74, 100.0 + number / 10, GPU))
    assert node.asked == 1
    assert node.look_at_gpu(69.0) == "XidTransient"  # 59 s after the last one
    node.book.gpu_event(GpuEvent(79, 169.0, GPU))
    node.book.gpu_event(GpuEvent(79, 169.1, GPU))
    assert node.asked == 2
    node.book.gpu_event(GpuEvent(79, 169.2, GPU, enumeration=1))
    assert node.asked == 3


def test_an_error_that_comes_again_after_quiet_time_asks_for_a_look() -> None:
    node = Node()
    node.book.gpu_event(GpuEvent(74, 100.0, GPU))
    node.book.gpu_event(GpuEvent(74, 160.0, GPU))
    assert node.asked == 2
    assert node.look_at_gpu(120.0) == ""
    node.book.gpu_event(GpuEvent(74, 219.9, GPU))  # told late: the look came before it
    assert node.asked == 3
