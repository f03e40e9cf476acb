"""The published runs that answers name beside their bands."""

from __future__ import annotations

from collections import Counter

from shardwise import Cluster, Plan, Serving, Training, infer, load_model, train
from shardwise.answers._evidence import evidence_of, nearest_runs, published_runs
from shardwise.cost import spreads
from shardwise.models import model_names


def test_the_table_has_every_run_behind_a_band() -> None:
    """Configurations add up to the runs and sources that the bands of steps and of requests rest on."""
    for headline in ("step_seconds", "request_seconds"):
        own = published_runs(headline)
        band = spreads()[headline]
        assert (sum(one.runs for one in own), len({one.source for one in own})) == (band.rows, band.sources)


def test_a_published_configuration_is_nearest_to_itself() -> None:
    """Of all runs those of the same model, device, number, stack and conditions come first."""
    known = {*model_names()}
    runs = [one for one in published_runs("step_seconds") if one.model in known]
    assert len(runs) > 20
    for one in runs[::5]:
        first = nearest_runs(runs, one.conditions, load_model(one.model), (one.device, one.num_devices))[0]
        assert first.conditions == one.conditions and first.num_devices == one.num_devices
        assert abs(first.parameters / one.parameters - 1) < 0.05


def test_plans_name_what_their_bands_rest_on() -> None:
    """A step counts runs of its stack on such devices, a deployment those of its engine."""
    model, cluster = load_model("llama-3-8b"), Cluster.parse("8xh100")
    step = evidence_of(train(model, cluster, Plan(tp=8, dp=1), Training(seq_len=4096, global_batch=8)))
    batch = evidence_of(infer(model, cluster, Plan(tp=8), Serving(batch=8, input_tokens=128, output_tokens=128)))
    counted = Counter(one.headline for found in (step, batch) for one in found.nearest)
    assert counted == {"step_seconds": 3, "request_seconds": 3}
    assert 0 < batch.same_stack < batch.runs and step.sources > 20
