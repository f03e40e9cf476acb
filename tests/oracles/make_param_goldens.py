"""Writes tests/data/models/param_counts.json: exact parameter counts of transformers' own classes, on the meta device.

Two parts: named models of known size (oracle_models.json beside this file), and twenty seeded random small
configurations of every family. Needs torch 2.13.0 and transformers 5.23.0 (neither a dependency of the project), no
weights and no network. Not run in CI; a change of a count is a change of transformers and is to be looked at.

    python tests/oracles/make_param_goldens.py [model_type ...]
"""

import importlib
import json
import os
import pathlib
import random
import sys
import warnings
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "src"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

# What follows needs the lines above: no network, and the package from the source tree.
import torch  # noqa: E402
import transformers  # noqa: E402
from random_configs import fields  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM  # noqa: E402
from transformers import AutoModelForImageClassification as AutoClassifier  # noqa: E402

from shardwise.models._fields import NO_EFFECT  # noqa: E402

PINNED = {"torch": "2.13.0", "transformers": "5.24.0"}
OUT = ROOT / "tests/data/models/param_counts.json"
EACH = 20
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert")
CLASSIFIERS = ("vit", "deit", "beit", "dinov2", "dinov2_with_registers")
BARE = ("clip_text_model", "siglip_text_model", "siglip2_text_model", "dinov3_vit")
NOT_BUILT = ("dbrx",)


# Classes that no automatic one knows, or of which it knows several.
NAMED = {
    "deit": "DeiTForImageClassification",
    "siglip_text_model": "SiglipTextModel",
    "siglip2_text_model": "Siglip2TextModel",
}
HEADLESS = {
    "glm5_next_text": ("glm5_next", "Glm5NextTextModel"),
    "step3p5": ("step3p7", "Step3p7TextModel"),
    "mistral_large4_text": ("mistral_large4", "MistralLarge4TextModel"),
    "glm_ocr_text": ("glm_ocr", "GlmOcrTextModel"),
    "molmo2_text": ("molmo2", "Molmo2TextModel"),
    "deepseek_ocr2_text": ("deepseek_ocr2", "DeepseekOcr2TextModel"),
    "unlimited_ocr_text": ("unlimited_ocr", "UnlimitedOcrTextModel"),
    "voxtral_realtime_text": ("voxtral_realtime", "VoxtralRealtimeTextModel"),
}
# Keys that change a size in this family alone.
SIZED = {"mistral_large4_text": ("no_rope_layers",)}
AUTO = {AutoModelForMaskedLM: ENCODERS, AutoClassifier: CLASSIFIERS, AutoModel: BARE}


def build(config: Any) -> Any:
    """The model of a configuration, its weights on the meta device and tied."""
    with torch.device("meta"):
        if config.model_type in HEADLESS:
            return _headed(config)
        if config.model_type == "mistral4":
            return _mistral4(config)
        if config.model_type in NAMED:
            return getattr(transformers, NAMED[config.model_type])(config)
        auto = next((auto for auto, types in AUTO.items() if config.model_type in types), AutoModelForCausalLM)
        model = auto.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    return model


def _headed(config: Any) -> Any:
    """Text models of wrappers, Step-3.5 and GLM-5.3 have no causal class; the head is one more linear map."""
    module, name = HEADLESS[config.model_type]
    text = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)(config)
    if getattr(config, "tie_word_embeddings", False):
        return text
    return torch.nn.ModuleList([text, torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)])


def _mistral4(config: Any) -> Any:
    """Mistral 4 has a causal class that the automatic one does not know."""
    from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

    model = Mistral4ForCausalLM(config)
    model.tie_weights()
    return model


def count(model: Any) -> tuple[int, int]:
    """Unique parameters, and values in buffers that a checkpoint stores."""
    parameters = sum({id(p): p.numel() for p in model.parameters()}.values())
    stored = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name in stored)
    return parameters - _unused(model), buffers


def _unused(model: Any) -> int:
    """Rows that LongCat's expert tensor has for its zero-computation experts, which no checkpoint holds."""
    return sum(
        module.gate_up_proj[module.num_routed_experts :].numel()
        for module in model.modules()
        if type(module).__name__ == "LongcatFlashExperts"
    )


def plain(config: Any, *, whole: bool) -> dict[str, Any]:
    """The configuration as a file holds it: with class defaults, or without those that saving leaves out."""
    data = json.loads(config.to_json_string(use_diff=not whole))
    sized = SIZED.get(config.model_type, ())
    return {k: v for k, v in data.items() if k == "model_type" or k in sized or k not in NO_EFFECT}


def entry(config: Any, *, whole: bool) -> dict[str, Any]:
    """One golden entry."""
    model = build(config)
    parameters, buffers = count(model)
    named = {"architectures": [type(model).__name__]} if config.model_type in (*CLASSIFIERS, *BARE) else {}
    found = {**named, **plain(config, whole=whole)}
    return {"parameters": parameters, "stored_buffers": buffers, "config": found}


def named() -> dict[str, Any]:
    """The models of known size."""
    models = json.loads((HERE / "oracle_models.json").read_text())
    golden = {}
    for name, given in models.items():
        if given["model_type"] not in NOT_BUILT:
            config = AutoConfig.for_model(given["model_type"], **given["fields"])
            golden[name] = {"published": given["published"], **entry(config, whole=True)}
            print(name, golden[name]["parameters"], flush=True)
    return golden


def drawn(model_type: str) -> list[dict[str, Any]]:
    """Twenty random configurations of a family; those that the class itself refuses are drawn again."""
    default, golden, tries = AutoConfig.for_model(model_type), [], 0
    while len(golden) < EACH and tries < 4 * EACH:
        tries += 1
        rng = random.Random(f"{model_type} {tries}")
        try:
            config = AutoConfig.for_model(model_type, **fields(model_type, default, rng), pad_token_id=0)
            golden.append(entry(config, whole=False))
        except Exception as error:  # any refusal means only that this draw is not legal
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
    print(model_type, len(golden), "of", tries, "" if len(golden) == tries else reason, flush=True)
    return golden


def write(models: dict[str, Any], randoms: dict[str, Any]) -> None:
    """Write the goldens, one entry a line."""
    head = json.dumps({**PINNED, "failed": list(NOT_BUILT)})
    lines = ",\n".join(f"  {json.dumps(name)}: {_compact(value)}" for name, value in models.items())
    kinds = ",\n".join(
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {_compact(value)}" for value in values) + "\n  ]"
        for name, values in randoms.items()
    )
    OUT.write_text(f'{{\n "versions": {head},\n "models": {{\n{lines}\n }},\n "random": {{\n{kinds}\n }}\n}}\n')


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    found = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    if found != PINNED:
        raise SystemExit(f"pinned {PINNED}, found {found}")
    types = json.loads((ROOT / "src/shardwise/models/class_defaults.json").read_text())["defaults"]
    chosen = sys.argv[1:] or [name for name in types if name not in NOT_BUILT]
    old = json.loads(OUT.read_text()) if sys.argv[1:] and OUT.exists() else {"models": {}, "random": {}}
    randoms = {**old["random"], **{name: drawn(name) for name in chosen}}
    write(old["models"] if sys.argv[1:] else named(), dict(sorted(randoms.items())))
