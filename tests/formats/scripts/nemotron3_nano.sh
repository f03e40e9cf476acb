#!/bin/bash
# Facts of https://github.com/NVIDIA/Megatron-LM/blob/main/examples/post_training/modelopt/conf/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.sh
# in other words: arguments alone, for another script to use.
if [ -z ${CHECKPOINT} ]; then
    CHECKPOINT=nvidia/somewhere
fi
MODEL_ARGS=" \
    --micro-batch-size 1 --seq-length 8192 --max-position-embeddings 8192 --bf16 \
    --hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME \
    --hidden-size 2688 --ffn-hidden-size 1856 --num-attention-heads 32 --group-query-attention --num-query-groups 2 \
    --kv-channels 128 --mamba-num-heads 64 --mamba-head-dim 64 --squared-relu --normalization RMSNorm \
    --num-experts 128 --moe-router-topk 6 --moe-router-score-function sigmoid --moe-router-enable-expert-bias \
    --moe-shared-expert-intermediate-size 3712 --moe-grouped-gemm --moe-token-dispatcher-type alltoall \
    --attention-backend flash --position-embedding-type none --untie-embeddings-and-output-weights \
    --disable-bias-linear --export-model-type HybridModel --tokenizer-type HuggingFaceTokenizer \
    \
    "
