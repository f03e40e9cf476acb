#!/bin/bash
# Facts of https://github.com/NVIDIA/Megatron-LM/blob/main/examples/mixtral/train_mixtral_8x7b_distributed.sh in other words.
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"1"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
SAVE_TO=$1
TOKENIZER=$2

MODEL=(--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
    --untie-embeddings-and-output-weights --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000)
EXPERTS=(--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce)
PARALLEL=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --use-distributed-optimizer --sequence-parallel)
REST=(--tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER} --data-path $3 --micro-batch-size 1
    --global-batch-size 256 --train-iters 500000 --lr 1e-4 --bf16 --save $SAVE_TO --no-load-optim --no-load-rng)
if [ -n "${WANDB_API_KEY}" ]; then
    REST+=(--wandb-project ${WANDB_PROJECT:-"Mixtral"})
fi

torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \
    ${MODEL[@]} ${EXPERTS[@]} ${PARALLEL[@]} ${REST[@]}
