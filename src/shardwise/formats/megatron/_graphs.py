"""What the host of a run launches module by module, where its arguments capture graphs or none."""

from __future__ import annotations

from typing import Any

from shardwise.formats.megatron._reader import Reader
from shardwise.plans import Stack, find_stack
from shardwise.records import replace


def launch_seconds(reader: Reader, base: Stack) -> dict[str, Any]:
    """Return seconds in which the host launches modules, by field, where they are not those of most runs of a stack.

    Megatron-Bridge's is that of its performance recipes. Others capture none: 217 of 226 settings of cuda_graph_impl
    in its src/megatron/bridge/recipes (067f987) are none, Megatron-Core's default. Graphs of some modules leave the
    launches of the others, of which a script of Megatron-LM keeps all.
    """
    impl, bridged = reader.word("cuda_graph_impl"), base.name.startswith("megatron-bridge")
    captured = impl != "none" or reader.flag("enable_cuda_graph") or reader.flag("external_cuda_graph")
    some = bool(reader.words("cuda_graph_modules") or reader.words("cuda_graph_scope_deprecated"))
    if bridged and reader.has("cuda_graph_impl") and not captured:
        runs_as = find_stack("megatron")
    elif captured and not some:
        runs_as = replace(base, module_launch_seconds=0.0, gradient_launch_seconds=0.0)
    else:
        return {}
    return {name: getattr(runs_as, name) for name in ("module_launch_seconds", "gradient_launch_seconds")}
