"""Where the time of an ADD goes, from the agent's own metrics before and after a number of them."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from cni.call import STEPS
from measure.figures import Figures

STEP = "nodefabric_cni_step_duration_milliseconds_sum"
WHOLE = "nodefabric_cni_duration_milliseconds_sum"


def breakdown(name: str, before: str, after: str, adds: Sequence[float]) -> Figures:
    """Return the mean milliseconds of each step, of the agent's rest, and of the relay.

    The relay's share is what the agent does not see: starting the program, the socket, and its end.
    """
    steps = {step: (_sum(after, STEP, step) - _sum(before, STEP, step)) / len(adds) for step in STEPS}
    agent = (_sum(after, WHOLE, "ADD") - _sum(before, WHOLE, "ADD")) / len(adds)
    figures = {f"{name}_{step}_mean_ms": taken for step, taken in steps.items()}
    figures[f"{name}_rest_of_agent_mean_ms"] = agent - sum(steps.values())
    figures[f"{name}_relay_mean_ms"] = sum(adds) / len(adds) - agent
    return figures


def _sum(text: str, name: str, label: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and label in sample.labels.values()
    )
