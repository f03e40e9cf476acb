"""What an engine's host adds to steps, and what of them starts from captured graphs."""

from __future__ import annotations

from shardwise.plans import find_stack
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSeconds:
    """Seconds of the host, each for every such thing."""

    step_seconds: float
    sequence_seconds: float
    block_seconds: float = 0.0
    serial_seconds: float = 0.0
    """Seconds of a step that pass before the next is scheduled where none is scheduled ahead of time."""
    serial_families: str = ""
    """The families of models, as a pattern, of which that is so beside cached prefixes, for their states."""
    worker_doubling_seconds: float = 0.0
    """Seconds of a step for each time that the tensor-parallel workers double."""
    layer_seconds: float = 0.0
    """Seconds between the kernels of a layer where no captured graph holds them."""
    layer_kernels: int = 0
    """Kernels of a layer that the ledger does not count, in place of those seconds where one has measured seconds."""
    stage_seconds: float = 0.0
    """Seconds to hand over from one part of a layer split to the next."""
    copy_seconds: float = 0.0
    """Seconds of a copy between the device and its host beside its bytes."""
    row_split_seconds: float = 0.0
    """Seconds of a layer and rank in which the host hands over between tensor-parallel ranks."""
    between_seconds: float = 0.0
    """Seconds of the host between two steps where the second is not scheduled while the first runs."""
    scheduled_between: bool = False
    """Steps are scheduled so."""
    between_methods: tuple[str, ...] = ()
    """Ways to guess tokens with which they are, whatever they are without."""
    eager_prompts: bool = False
    """Steps with prompts are launched module by module from Python, as those of transformers."""
    eager_decode: bool = False
    """Steps without prompts are launched so."""
    captured_prompts: bool = False
    """Steps with prompts are replayed but for their attention, where nothing in [static_share] speaks against it."""
    captured_tokens: int = 0
    """Most tokens of a step that is replayed from a captured graph instead, with prompts or without."""
    captured_of_family: tuple[tuple[str, int], ...] = ()
    """The same on families of devices."""
    captured_by_memory: bool = False
    """Decode steps of more sequences than are captured for the memory of the device ([static_share]) are launched too.
    """
    captured_below: tuple[tuple[float, int, int], ...] = ()
    """Other such numbers: below so many GiB, of fewer than four ranks and of others."""
    captured_sequences: int = 0
    """Sequences of the largest decode step that is captured, where a launch says other than that."""
    captured_per_sequence: int = 0
    """The same for each token that a step verifies of the sequences that may run, where that is less."""
    compiled_prompts: bool = False
    """Python launches what a compiler has left: norms and activations write what narrow GEMMs read."""

    def most_captured(self, family: str) -> int:
        """Return the tokens of the largest captured step on a family of devices.

        >>> from shardwise.serving import find_engine
        >>> [find_engine("vllm").host.most_captured(family) for family in ("hopper", "blackwell")]
        [512, 1024]
        """
        return self.captured_tokens and dict(self.captured_of_family).get(family, self.captured_tokens)

    def schedules_between(self, method: str) -> bool:
        """Return whether steps are scheduled one after another where tokens are guessed by a method, or not at all.

        >>> from shardwise.serving import find_engine
        >>> [find_engine(name).host.schedules_between("ngram") for name in ("vllm", "vllm-0.28")]
        [False, True]
        """
        return self.scheduled_between or method in self.between_methods

    @property
    def module_launch_seconds(self) -> float:
        """Seconds of the host for each kernel of a step that Python launches, which run behind the kernels before."""
        return find_stack("transformers").module_launch_seconds if self.eager_prompts else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCapture:
    """Kernels that start from captured graphs."""

    small_kernel_seconds: float
    """Start of a small kernel; 0 takes the launches of the stack that it runs."""
    as_measured: bool = False
    """Small kernels start as the shortest replayed ones of the device's family do, where those were measured."""
    merged: tuple[str, ...] = ()
    """Operators that are part of another's kernel on such devices."""
    captured_sizes: tuple[tuple[int, int, int], ...] = ()
    """Decode steps that are captured (first, last, step), up to the next of which rows are added to smaller ones."""
    routes_padding: str = ""
    """Whether such rows choose experts as others do ("always", "unspread" where no ranks share experts out), or all of
    them the same or none ("")."""
    verified_sizes: tuple[tuple[int, int, int], ...] = ()
    """The same where tokens are guessed, where the engine has another list for that."""
    whole_sequences: bool = False
    """Sizes are of tokens, rounded up to whole sequences of the tokens that a step verifies of each."""
    captures_most: bool = False
    """A step of as many sequences as may run is captured too."""
