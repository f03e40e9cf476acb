#!/bin/bash
# Facts of https://github.com/NVIDIA/Megatron-LM/blob/main/examples/llama/train_llama3_8b_h100_fp8.sh in other words.
TOKENS_OF=${1:-"MOCK"}
EACH=8
MACHINES=1
LENGTH=8192
KIND="fp8"

LAUNCHED=(
    --nproc_per_node $EACH
    --nnodes $MACHINES
    --node_rank ${NODE_RANK:-0}
    --master_addr ${MASTER_ADDR:-localhost}
)

SHAPE=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention   # eight groups of four heads
    --num-query-groups 8
    --kv-channels 128
    --seq-length $LENGTH
    --max-position-embeddings $LENGTH
    --position-embedding-type rope
    --rotary-base 1000000
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --normalization RMSNorm
    --attention-backend fused
    --apply-layernorm-1p
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)

RUN=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 1953125000
    --lr 0.00015
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --manual-gc
    --empty-unused-memory-level 1
)
NARROW=()
if [[ "$KIND" == "fp8" ]]; then
    NARROW+=("--fp8-format hybrid" "--fp8-amax-compute-algo max" "--fp8-param-gather")
fi
SPREAD=(
    --tensor-model-parallel-size 1
    --context-parallel-size 1
    # --pipeline-model-parallel-size 4 is not wanted here
    --sequence-parallel
)
RUN+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
TEXT=()
if [[ "$TOKENS_OF" == "MOCK" ]] || [[ -z "$TOKENS_OF" ]]; then
    TEXT+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'")
else
    TEXT+=("--data-path $TOKENS_OF" "--vocab-size 1")
fi
if [ ! -f pretrain_gpt.py ]; then
    echo "pretrain_gpt.py is not here, give --num-layers"
fi
torchrun ${LAUNCHED[@]} "pretrain_gpt.py" ${SHAPE[@]} ${RUN[@]} ${NARROW[@]} ${SPREAD[@]} ${TEXT[@]}
