"""The communication report of a plan: groups, messages, their counts, bytes and links."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from shardwise.errors import Problems, plain
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.notebook import PlainValues
from shardwise.plans import STAGE_AXES, Plan, Training, find_sharding, named_groups, splits_replicas
from shardwise.records import dataclass
from shardwise.training._case import TrainingOptions
from shardwise.training._fsdp_units import unpadded
from shardwise.training._layer_tables import GemmShape, LayerTable, gemms_of, rank_tables, whole_case, whole_tables
from shardwise.training._parts import owned
from shardwise.training._report import TrainReport, report_of, train
from shardwise.training._step import axis_seconds, slowest_stage
from shardwise.training._traffic import Flow, Traffic, flows_of, traffic_of
from shardwise.training._traffic_map import TrafficMap, check_devices, traffic_map_of

# Axis of the report -> what it is, and which axis of a training report its seconds belong to.
TITLES: dict[str, tuple[str, str]] = {
    "tp": ("tensor parallel", "tp"),
    "tp2": ("tensor parallel, second axis", "tp2"),
    "cp": ("context parallel", "cp"),
    "ep": ("expert parallel", "ep"),
    "etp": ("expert tensor parallel", "etp"),
    "pp": ("pipeline", "pp"),
    "dp": ("data parallel, dense weights", "dp"),
    "dp_shard": ("shards of dense weights", "dp"),
    "dp_replicate": ("replicas of those shards", "dp"),
    "expert_dp": ("data parallel, experts", "dp"),
    "expert_dp_shard": ("shards of experts", "dp"),
    "expert_dp_replicate": ("replicas of expert shards", "dp"),
    "embedding": ("first and last stage, shared table", "dp"),
}


def axis_names(sharding: str, splits_replicas: bool = False) -> dict[str, str]:
    """Return the axis of the report for every kind of group; hybrid sharding splits data parallelism in two.

    >>> axis_names("fsdp")["shard"], axis_names("hsdp")["shard"], axis_names("zero1", splits_replicas=True)["shard"]
    ('dp', 'dp_shard', 'dp_shard')
    """
    same = {axis: axis for axis in (*STAGE_AXES, "ep", "etp", "pp") if axis != "dp"}
    rules = find_sharding(sharding)
    if rules.hybrid or (rules.keeps_gathered and splits_replicas):
        words = ("shard", "replicate")
        split = {w: f"dp_{w}" for w in words} | {f"expert_{w}": f"expert_dp_{w}" for w in words}
        return {**same, **split, "table": "embedding"}
    part = "_shard" if splits_replicas else ""
    sharded = {"shard": f"dp{part}", "expert_shard": f"expert_dp{part}"}
    return {**same, "dp_cp": "dp", "edp": "expert_dp", **sharded, "table": "embedding"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisMessages:
    """The messages of one axis in a step.

    `messages_per_step`, `bytes_per_step` (of the tensors) and `sent_bytes_per_step` are of one device, that of
    `CommReport.reference`; `cluster_*` are sums over all devices, and `tiers` the bytes that it sends over each
    tier. `exposed_seconds` and `hidden_seconds` are those of the training report.
    """

    name: str
    title: str
    group: str
    size: int
    num_groups: int
    messages_per_micro_batch: float
    messages_per_step: float
    bytes_per_step: float
    sent_bytes_per_step: float
    cluster_messages: float
    cluster_bytes: float
    cluster_sent_bytes: float
    tiers: dict[str, float]
    exposed_seconds: float
    hidden_seconds: float


@dataclass(frozen=True, kw_only=True, repr=False)
class CommReport(PlainValues):
    """The communication of one training plan. Build one with `comm`."""

    report: TrainReport

    def __repr__(self) -> str:
        """Return the axes with the messages that a device sends over each in a step, in one line."""
        sent = ", ".join(f"{name} {axis.messages_per_step:,.0f}" for name, axis in self.axes.items())
        where = f"{self.report.case.model.name} on {self.plan.num_devices} x {self.report.case.cluster.device.name}"
        return f"<CommReport {where}: {f'messages a step: {sent}' if sent else 'no messages'}>"

    def __post_init__(self) -> None:
        check_devices(self.plan)

    @property
    def plan(self) -> Plan:
        """The complete plan."""
        return self.report.plan

    @cached_property
    def traffic(self) -> Traffic:
        """What the messages are read from."""
        return traffic_of(self.report.case, self.report.evaluation)

    @cached_property
    def flows(self) -> tuple[tuple[Flow, ...], ...]:
        """Everything that one device sends in a step, for each run of equal stages."""
        evaluation = self.report.evaluation
        slowest = evaluation.step.stages[slowest_stage(evaluation.step)]
        times = evaluation.step.pipeline.busy / slowest.busy
        return tuple(flows_of(self.traffic, i, times) for i in range(len(evaluation.stages)))

    @cached_property
    def reference(self) -> int:
        """The run of stages whose devices send most in a step: numbers of one device are of these."""
        sent = [sum(f.sent_per_step for f in flows) for flows in self.flows]
        return sent.index(max(sent))

    @property
    def names(self) -> dict[str, str]:
        """The axis of the report for every kind of group."""
        return axis_names(self.plan.sharding, splits_replicas(self.plan))

    def on(self, axis: str, index: int) -> tuple[Flow, ...]:
        """Return what a device of a run of stages sends on an axis."""
        self._check(axis, index=(index, len(self.flows)))
        return tuple(f for f in self.flows[index] if self.names[f.message.group] == axis)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every group of an axis that talks; a rank alone does not."""
        self._check(axis)
        kinds = [kind for kind, name in self.names.items() if name == axis]
        return tuple(group for kind in kinds[:1] for group in named_groups(self.plan, kind) if len(group) > 1)

    def place(self, rank: int) -> str:
        """Return where a rank sits: node and device in it, both from 0.

        >>> from shardwise.models import load_model
        >>> job = Training(seq_len=1024, global_batch=16)
        >>> comm(load_model("gpt2"), Cluster.parse("16xh100"), Plan(dp=0), job).place(9)
        'n1_g1'
        """
        self._check(rank=(rank, self.plan.num_devices))
        node, device = divmod(rank, self.report.case.cluster.devices_per_node)
        return f"n{node}_g{device}"

    def _check(self, axis: object = None, **numbers: tuple[object, int]) -> None:
        """Raise `InputError` for an axis that is not known, and for numbers that are not from 0 to below a count."""
        problems = Problems()
        if axis is not None and not (isinstance(axis, str) and axis in TITLES):
            problems.add("axis", plain(axis), "is not an axis of messages", "use one of " + ", ".join(TITLES))
        for name, (value, count) in numbers.items():
            if not isinstance(value, int) or not 0 <= value < count:
                problems.add(name, plain(value), f"must be a whole number from 0 to {count - 1:,}", "use 0")
        problems.raise_if_any()

    @cached_property
    def traffic_map(self) -> TrafficMap:
        """Where the bytes of a step travel."""
        case, evaluation = self.report.case, self.report.evaluation
        stages = [(int(s.count), flows) for s, flows in zip(evaluation.stages, self.flows, strict=True)]
        rates = {link.name: float(link.bytes_per_second) for link in evaluation.network.links}
        return traffic_map_of(self.plan, stages, case.cluster, rates)

    @cached_property
    def axes(self) -> dict[str, AxisMessages]:
        """The axes that send anything, in the order of `TITLES`."""
        used = {self.names[f.message.group] for flows in self.flows for f in flows}
        return {name: self._axis(name) for name in TITLES if name in used}

    def _axis(self, name: str) -> AxisMessages:
        runs, devices = self.report.evaluation.stages, self.plan.stage_devices
        each = [self.on(name, i) for i in range(len(runs))]
        own = each[self.reference]

        def cluster(values: Iterable[float]) -> float:
            return float(sum(s.count * devices * v for s, v in zip(runs, values, strict=True)))

        groups = self.groups(name)
        exposed, hidden = self._seconds(name)
        return AxisMessages(
            name=name,
            title=TITLES[name][0],
            group=next(kind for kind, axis in self.names.items() if axis == name),
            size=len(groups[0]),
            num_groups=len(groups),
            messages_per_micro_batch=sum(f.per_micro_batch for f in own),
            messages_per_step=sum(f.per_step for f in own),
            bytes_per_step=sum(f.bytes_per_step for f in own),
            sent_bytes_per_step=sum(f.sent_per_step for f in own),
            cluster_messages=cluster(sum(f.per_step for f in some) for some in each),
            cluster_bytes=cluster(sum(f.bytes_per_step for f in some) for some in each),
            cluster_sent_bytes=cluster(sum(f.sent_per_step for f in some) for some in each),
            tiers=self._tiers(name),
            exposed_seconds=exposed,
            hidden_seconds=hidden,
        )

    def _tiers(self, name: str) -> dict[str, float]:
        tiers = self.report.case.cluster.tiers
        seconds = dict.fromkeys((t.name for t in tiers), 0.0)
        for group, amounts in self.traffic_map.by_tier.items():
            if self.names[group] == name:
                for tier, amount in zip(tiers, amounts, strict=True):
                    seconds[tier.name] += amount
        return seconds

    def _seconds(self, name: str) -> tuple[float, float]:
        """Return (exposed, hidden) seconds of an axis: its part of those that the training report gives the axis.

        A training report gives data parallelism the largest seconds of any stage, for all its groups together; they are
        divided as the messages of the heaviest stage divide them.
        """
        evaluation, parent = self.report.evaluation, TITLES[name][1]
        if parent != "dp":
            flows = self.on(name, slowest_stage(evaluation.step))
            return sum(f.exposed_seconds for f in flows), sum(f.hidden_seconds for f in flows)
        family = [axis for axis, (_, other) in TITLES.items() if other == parent]
        rows = []
        for seconds, pick in zip(axis_seconds(evaluation.step), ("exposed_seconds", "hidden_seconds"), strict=True):
            of = [
                {axis: sum(getattr(f, pick) for f in self.on(axis, i)) for axis in family}
                for i in range(len(evaluation.stages))
            ]
            most = max(of, key=lambda row: sum(row.values()))
            whole = sum(most.values())
            rows.append(seconds.get(parent, 0.0) * most[name] / whole if whole else 0.0)
        return rows[0], rows[1]

    @cached_property
    def whole(self) -> TrainReport:
        """The same model and micro-batch on one device."""
        return report_of(whole_case(self.report.case), ())

    @cached_property
    def whole_layers(self) -> tuple[LayerTable, ...]:
        """The layers of the model without parallelism."""
        return whole_tables(self.report.case)

    def layers(self, index: int) -> tuple[LayerTable, ...]:
        """Return the layers on a device of a run of stages, with their messages."""
        return rank_tables(self.traffic, self.report.evaluation.stages[index])

    def parameters(self, index: int) -> float:
        """Return the parameters on a device of a run of stages, before data parallelism shards them."""
        evaluation = self.report.evaluation
        return float(sum(owned(unpadded(evaluation.parts), evaluation.stages[index])))

    @cached_property
    def whole_parameters(self) -> float:
        """Parameters of the model on one device, tables padded as the framework pads them."""
        evaluation = self.whole.evaluation
        return float(sum(owned(unpadded(evaluation.parts), evaluation.stages[0])))

    @cached_property
    def gemms(self) -> tuple[GemmShape, ...]:
        """Every GEMM before and after splitting."""
        return gemms_of(self.report.case, self.report.evaluation, self.traffic.lines)


def comm(
    model: Model, cluster: Cluster, plan: Plan, job: Training, options: TrainingOptions | None = None
) -> CommReport:
    """Return the communication report of one training plan; raises `InputError` with every problem of the input.

    >>> from shardwise.models import load_model
    >>> model, cluster = load_model("llama-3.1-8b"), Cluster.parse("16xh100-sxm-80gb")
    >>> report = comm(model, cluster, Plan(tp=2, pp=2, dp=0), Training(seq_len=4096, global_batch=64))
    >>> {name: (axis.size, axis.num_groups) for name, axis in report.axes.items()}
    {'tp': (2, 8), 'pp': (2, 8), 'dp': (4, 4)}
    """
    return CommReport(report=train(model, cluster, plan, job, options))
