"""Writes how transformers writes the class of each family: tests/data/models/class_facts.json.

Needs transformers (pinned below), no torch and no network: the facts are read from the source of the classes.

    python tests/oracles/make_class_facts.py
"""

import importlib.util
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from shardwise.models.families import FAMILIES  # noqa: E402  (the package need not be installed here)

PINNED = "5.24.0"
# Heads that are put together from a part that is rotated and one that is not.
JOINED = r"torch\.cat\(\[?\(?\[?(q_embed|q_rot|query_rot|q_rope|query_states_rot)[^\n]*, ?(q_pass|query_pass)"
FUSED = r"self\.(qkv_proj|query_key_value|Wqkv|c_attn) = "
# The product of a norm's weight and what it made, ahead of the cast to 16 bits, and a power of the mean square.
FLOAT_NORM = (
    r"class \w*(?<!Gated)RMSNorm\(nn\.Module\):(?:(?!\nclass )[\s\S])*?"
    r"return \(self\.weight(\.to\(torch\.float32\))? \* "
)
POWER_NORM = r"torch\.pow\(mean_squared, -0\.5\)"
FLOAT_ROUTER = (
    r"wg\.weight\.dtype == torch\.float32|"
    r"F\.linear\(\w*hidden_states\w*\.(type\(torch\.float32\)|to\(torch\.float32\)|float\(\))"
)


def source(model_type: str) -> str:
    """The source of a family's classes, empty where transformers has none; a text part stands in its wrapper's file."""
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    models = pathlib.Path(package.origin).parent / "models"
    name = model_type.replace("-", "_").removesuffix("_text").removesuffix("_text_model")
    file = models / name / f"modeling_{name}.py"
    return file.read_text() if file.exists() else ""


def facts(text: str) -> dict[str, bool]:
    """What the source says."""
    rules = {"joined_rotary": JOINED, "fused_qkv": FUSED, "float_router": FLOAT_ROUTER, "float_norm": FLOAT_NORM,
             "power_norm": POWER_NORM}  # fmt: skip
    return {name: bool(re.search(rule, text)) for name, rule in rules.items()}


if __name__ == "__main__":
    import transformers

    if transformers.__version__ != PINNED:
        raise SystemExit(f"transformers {PINNED} is pinned, found {transformers.__version__}")
    found = {name: facts(text) for name in sorted(FAMILIES) if (text := source(name))}
    head = json.dumps(f"the source of transformers {PINNED}, models/*/modeling_*.py")
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
    (ROOT / "tests/data/models/class_facts.json").write_text(f'{{\n "source": {head},\n "facts": {{\n{rows}\n }}\n}}\n')
