"""How many layers each chunk of a pipeline holds where they do not divide evenly and the source does not say."""

from __future__ import annotations


def spread(layers: int, chunks: int) -> tuple[int, ...]:
    """Return the layers of each chunk, in the order of the model.

    Where two more would divide, the table of words and the loss count as a layer each, on the first and the last chunk
    (Megatron-LM --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split: Llama 3.1 405B,
    Qwen3-235B; BLOOM's 70 layers on 12 stages, arXiv:2211.05100 section 3.3). Elsewhere the last chunk, which has the
    loss and the prediction layers, holds what is left: DeepSeek-V3 and Kimi K2 (github.com/NVIDIA-NeMo/Megatron-Bridge
    recipes/deepseek/deepseek_v3.py, set_deepseek_v3_pipeline_model_parallel_layout).

    With a layer a chunk those two have none (arXiv:2407.21783 section 3.3.2).

    >>> spread(6, 8)
    (0, 1, 1, 1, 1, 1, 1, 0)
    >>> spread(126, 16), spread(61, 16)
    ((7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7), (4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1))
    """
    whole = -(-layers // chunks)
    if layers % chunks and (layers + 2) % chunks == 0:
        return (whole - 1, *(whole,) * (chunks - 2), whole - 1)
    left = layers - whole * (chunks - 1)
    if left > 0:
        return (*(whole,) * (chunks - 1), left)
    each, more = divmod(layers, chunks)
    return tuple(each + (i < more) for i in range(chunks))
