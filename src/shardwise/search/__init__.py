"""Search: every legal plan of a space evaluated, the best ranked, and the reasons for the others.

Names are loaded when they are first asked for: a search of training plans does not load what serves, nor the reverse.
"""

from typing import TYPE_CHECKING

from shardwise._lazy import lazily

if TYPE_CHECKING:
    from shardwise.search._batch import FrontPlan
    from shardwise.search._every_plan import frame
    from shardwise.search._executor import Executor, ProcessExecutor, SerialExecutor
    from shardwise.search._generation import count_generation, finished
    from shardwise.search._load import LoadResult, plan_serve
    from shardwise.search._load_groups import LoadSpace
    from shardwise.search._load_remedies import LoadRemedy, load_remedies
    from shardwise.search._moved import CONSTANTS, constant_band, with_constant
    from shardwise.search._options import OBJECTIVES, SERVING_OBJECTIVES, TRAIN_LIMITS, SearchOptions
    from shardwise.search._ray import RayExecutor
    from shardwise.search._result import FrontPoint, PlanGroup, Rejection, Remedy, SearchResult, TiedPlan
    from shardwise.search._rollout import Rollout, least_generation, rollout_of, timed_rollouts, with_rollouts
    from shardwise.search._scaling import ScalingRow, doubling, scaled_result, scaled_rows, scaled_task, strong_scaling
    from shardwise.search._sensitivity import RunnerUp, Sensitivity, runners_up
    from shardwise.search._serving import ServingResult, plan_serving, tokens_per_second_per_gpu
    from shardwise.search._serving_space import ServingSpace
    from shardwise.search._space import IntRanges, SearchSpace, multiples, upto
    from shardwise.search._study import StudyFolder, StudyQuestion, StudyResult, StudyTask, run_study
    from shardwise.search._training import SearchTask, TrainingResult, searched, work_of
    from shardwise.search._tuning import TuningRecipe, elsewhere, longest_sequence, quickest, shorter, tuning_recipes

__getattr__ = lazily(
    __name__,
    {
        "_batch": "FrontPlan",
        "_every_plan": "frame",
        "_executor": "Executor ProcessExecutor SerialExecutor",
        "_generation": "count_generation finished",
        "_load": "LoadResult plan_serve",
        "_load_groups": "LoadSpace",
        "_load_remedies": "LoadRemedy load_remedies",
        "_moved": "CONSTANTS constant_band with_constant",
        "_options": "OBJECTIVES SERVING_OBJECTIVES SearchOptions TRAIN_LIMITS",
        "_ray": "RayExecutor",
        "_result": "FrontPoint PlanGroup Rejection Remedy SearchResult TiedPlan",
        "_rollout": "Rollout least_generation rollout_of timed_rollouts with_rollouts",
        "_scaling": "ScalingRow doubling scaled_result scaled_rows scaled_task strong_scaling",
        "_sensitivity": "RunnerUp Sensitivity runners_up",
        "_serving": "ServingResult plan_serving tokens_per_second_per_gpu",
        "_serving_space": "ServingSpace",
        "_space": "IntRanges SearchSpace multiples upto",
        "_study": "StudyFolder StudyQuestion StudyResult StudyTask run_study",
        "_training": "SearchTask TrainingResult searched work_of",
        "_tuning": "TuningRecipe elsewhere longest_sequence quickest shorter tuning_recipes",
    },
)
