"""Pipeline schedules as plans name them: a row each, of where pieces of the model lie and what the schedule asks for.

The order of tasks of a schedule, its seconds and what its stages hold are one file of training/schedules, of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, TypeAlias, get_args

from shardwise.records import dataclass

Schedule: TypeAlias = Literal[
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "interleaved-zb",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe",
    "dualpipe-v",
    "sequential",
]
Placement: TypeAlias = Literal["loop", "v", "both ways"]
Rounds: TypeAlias = Literal["whole", "equal", "any"]
# How frameworks fill the rounds of an interleaved schedule, and what they need of the number of micro-batches.
ROUNDS: dict[Rounds, str] = {
    "whole": "a multiple of pp = {pp}",
    "equal": "rounds of as many micro-batches each, of pp = {pp} or more",
    "any": "at least pp = {pp}",
}


def filled_rounds(rounds: Rounds, pp: int, count: int) -> int:
    """Return the next number of micro-batches that a framework runs in rounds, from a number upwards.

    "equal": torch.distributed.pipelining.schedules, ScheduleInterleaved1F1B; "any": Megatron-LM
    core/pipeline_parallel/schedules.py, microbatch_group_size_per_vp_stage (Megatron-Core 0.9).

    >>> [filled_rounds(rounds, 4, 9) for rounds in ("whole", "equal", "any")]
    [12, 10, 9]
    """
    if rounds == "whole":
        return -(-count // pp) * pp
    while rounds == "equal" and count % max(count // pp, 1):
        count += 1
    return max(count, pp)


def round_size(pp: int, count: int) -> int:
    """Return the micro-batches of a round: the fewest of which the last round has all, or as many as there are stages.

    Megatron-LM core/pipeline_parallel/schedules.py, microbatch_group_size_per_vp_stage; rounds of one size where that
    goes are those of torch.distributed.pipelining too.

    >>> round_size(4, 8), round_size(4, 10), round_size(4, 11), round_size(4, 3)
    (4, 5, 6, 3)
    """
    return next((size for size in range(pp, count) if not 0 < count % size < pp), count)


def _any_count(pp: int, count: int) -> int:
    """Return the micro-batches themselves: the schedule runs on any number of them."""
    return count


def _twice(pp: int, count: int) -> int:
    """Return the next number of at least twice the stages (torch.distributed.pipelining.schedules)."""
    return max(count, 2 * pp)


def _twice_even(pp: int, count: int) -> int:
    """Return the next even number of at least twice the stages (deepseek-ai/DualPipe, dualpipe/dualpipe.py)."""
    return max(count + count % 2, 2 * pp)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRules:
    """What a schedule is to a plan: pieces a stage, where they lie, and the stages and micro-batches that it runs on.

    Piece c of stage i is the (c * pp + i)-th of the model in a "loop"; in a "v" the second piece is on the way up, so
    that the first stage has both ends; "both ways" a device holds stage i and the opposite one, for the micro-batches
    that enter at either end.
    """

    name: Schedule
    torch: str = ""
    """Its class in torch.distributed.pipelining, without "Schedule" before it."""
    chunks: tuple[int, int] = (1, 1)
    """Least and most pieces of the model on a stage (0: any number)."""
    placement: Placement = "loop"
    paired: bool = False
    """A forward and a backward pass of two micro-batches run as one, so that each hides the other's messages."""
    even_stages: bool = False
    uneven_error: float = 0.0
    """By how much seconds in closed form were off its order where stages differ by up to 20 %, if by over 5 %."""
    rounds: bool = False
    """Micro-batches run through one piece after the other in rounds, which frameworks fill in ways of their own."""
    searched: bool = True
    """A search tries it; one is left out that no plan is better with."""
    one_process: bool = False
    """One process drives all stages, so that they are devices of one node."""
    next_count: Callable[[int, int], int] = _any_count
    """The least number of micro-batches on so many stages that it runs on, from a number upwards."""
    needs: str = ""
    """What it needs of the number of micro-batches, with {pp} and {twice} in words."""

    @property
    def mirrored(self) -> bool:
        """Whether a device holds the opposite stage too."""
        return self.placement == "both ways"

    @property
    def folded(self) -> bool:
        """Whether the first stage has both ends of the model."""
        return self.placement == "v"

    @property
    def chunked(self) -> bool:
        """Whether a stage holds several pieces of the model."""
        return self.chunks[0] > 1

    def piece(self, pp: int, stage: int, chunk: int) -> int:
        """Return which piece of the model a chunk of a stage is, from 0; "both ways" which stage.

        >>> [find_rules("zb-v").piece(4, stage, 1) for stage in range(4)]
        [7, 6, 5, 4]
        """
        if self.placement == "loop" or not chunk:
            return chunk * pp + stage
        return (1 if self.mirrored else 2) * pp - 1 - stage

    def stays(self, pp: int, piece: int, following: int) -> bool:
        """Return whether two pieces that follow one another are on one stage, with no message between them."""
        return self.folded and {piece, following} == {pp - 1, pp}

    def chunks_of(self, several: list[int]) -> list[int]:
        """Return those of some numbers of pieces a stage that the schedule runs with.

        >>> find_rules("interleaved").chunks_of([1, 2, 4]), find_rules("1f1b").chunks_of([1, 2, 4])
        ([2, 4], [1])
        """
        least, most = self.chunks
        return [v for v in several if v >= least and (not most or v <= most)]


_HALVES: tuple[Schedule, ...] = ("v-half", "v-min")
_CONTROLLED = "a pattern of V-Half and V-Min repeats from at least 2 x pp = {twice}"
RULES: dict[Schedule, ScheduleRules] = {
    row.name: row
    for row in (
        ScheduleRules(name="gpipe", torch="GPipe", searched=False),
        ScheduleRules(name="1f1b", torch="1F1B"),
        ScheduleRules(
            name="interleaved",
            torch="Interleaved1F1B",
            chunks=(2, 0),
            rounds=True,
        ),
        ScheduleRules(name="looped-bfs", torch="LoopedBFS", chunks=(2, 0), searched=False),
        ScheduleRules(name="zb-h1"),
        ScheduleRules(
            name="interleaved-zb",
            torch="InterleavedZeroBubble",
            chunks=(2, 0),
            uneven_error=0.11,
            rounds=True,
            next_count=max,
            needs="the interleaved zero bubble needs at least pp = {pp}",
        ),
        ScheduleRules(
            name="zb-v",
            torch="ZBVZeroBubble",
            chunks=(2, 2),
            uneven_error=0.06,
            placement="v",
            next_count=_twice,
            needs="the V of ZB-V is filled by at least 2 x pp = {twice}",
        ),
        *(
            ScheduleRules(
                name=name, chunks=(2, 2), placement="v", uneven_error=0.11, next_count=_twice, needs=_CONTROLLED
            )
            for name in _HALVES
        ),
        ScheduleRules(
            name="dualpipe",
            placement="both ways",
            paired=True,
            even_stages=True,
            next_count=_twice_even,
            needs="DualPipe needs an even number of at least 2 x pp = {twice}",
        ),
        ScheduleRules(
            name="dualpipe-v",
            torch="DualPipeV",
            chunks=(2, 2),
            uneven_error=0.10,
            placement="v",
            paired=True,
            next_count=_twice,
            needs="DualPipe-V needs at least 2 x pp = {twice}",
        ),
        ScheduleRules(name="sequential", searched=False, one_process=True),
    )
}
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def find_rules(name: Schedule) -> ScheduleRules:
    """Return what a schedule is to a plan.

    >>> find_rules("dualpipe").mirrored
    True
    """
    return RULES[name]


def runnable_count(rules: ScheduleRules, pp: int, count: int, rounds: Rounds) -> int:
    """Return the least number of micro-batches that a schedule runs on in rounds as a framework fills them, upwards.

    >>> [runnable_count(find_rules(name), 4, 6, "whole") for name in ("1f1b", "interleaved", "dualpipe")]
    [6, 8, 8]
    """
    least = rules.next_count(pp, count) if pp > 1 else count
    return filled_rounds(rounds, pp, count) if pp > 1 and rules.rounds and least == count else least


def schedule_for(vpp: int, known: Collection[str] = ()) -> Schedule:
    """Return the schedule of plans that name none, by the pieces of the model on a stage.

    `known` are those that a framework runs, where it is said; the first that takes so many stands for the usual one.

    >>> schedule_for(1), schedule_for(2), schedule_for(2, ("gpipe", "looped-bfs"))
    ('1f1b', 'interleaved', 'looped-bfs')
    """
    usual: Schedule = "interleaved" if vpp > 1 else "1f1b"
    fitting = (name for name, row in RULES.items() if name in known and row.chunks_of([vpp]))
    return usual if usual in known else next(fitting, usual)
