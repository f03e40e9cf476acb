#!/bin/bash
# Facts of https://github.com/alibaba/Pai-Megatron-Patch/blob/main/examples/llama3_1/run_mcore_llama3_1.sh in other words.
# Called as: dsw 8B 1 8 1e-5 1e-6 4096 4096 bf16 4 1 2 true true true false sel false
WHERE=$1
if [ -z ${AGAIN_LAYERS} ];then
    AGAIN_LAYERS=1
fi
if [ $WHERE = dsw ]; then
    NODES=1
    EACH=8
elif [ $WHERE = dlc ]; then
    NODES=${WORLD_SIZE}
    EACH=${KUBERNETES_CONTAINER_RESOURCE_GPU}
fi
SIZE=$2
MICRO=$3
BATCH=$4
LENGTH=$7
KIND=${9}
TP=${10}
PP=${11}
CP=${12}
SP=${13}
SHARD=${14}
AC=${17}

if [ $SIZE = 8B ]; then
L=32; D=4096; N=32; F=14336
groups=" \
	    --group-query-attention --num-query-groups 8"
elif [ $SIZE = 70B ]; then
L=80; D=8192; N=64; F=28672
groups="--group-query-attention --num-query-groups 8"
fi

WIDE=$(( ($TP > 1) ? 1 : 0 ))
if [ $WIDE -eq 1 ]; then
    overlap="--tp-comm-overlap --overlap-grad-reduce --overlap-param-gather"
fi
case $AC in
    full) again="--recompute-method uniform --recompute-num-layers ${AGAIN_LAYERS} --recompute-granularity full" ;;
    sel) again="--recompute-activations" ;;
    *) again="" ;;
esac
if [ $KIND = bf16 ]; then
    narrow="--bf16"
elif [ $KIND = fp8 ]; then
    narrow="--bf16 --fp8-format hybrid"
fi
if [ $SHARD = true ]; then
    shard="--use-distributed-optimizer"
fi
if [ $SP = true ] && [ $TP -gt 1 ]; then
    sequence="--sequence-parallel"
fi
ITERS=$(( 1000000000 / ${BATCH} / ${LENGTH} ))

options="  \
    --lr $5 --min-lr $6 --attention-dropout 0.0 --hidden-dropout 0.0 --train-iters ${ITERS} \
    --micro-batch-size ${MICRO} --global-batch-size ${BATCH} --num-layers ${L} --hidden-size ${D} \
    --num-attention-heads ${N} --ffn-hidden-size ${F} --seq-length ${LENGTH} --max-position-embeddings 131072 \
    --max-padding-length $8 --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} \
    --context-parallel-size ${CP} --extra-vocab-size 256 --patch-tokenizer-type LLama3Tokenizer --swiglu \
    --normalization RMSNorm --use-rotary-position-embeddings --position-embedding-type rope \
    --untie-embeddings-and-output-weights --disable-bias-linear --dataset LLama-Pretrain-Idxmap --train-mode pretrain"
run="torchrun --nproc_per_node $EACH --nnodes $NODES pretrain_llama.py
 ${options} ${narrow} --transformer-impl transformer_engine ${again} ${shard} ${sequence} ${groups} ${overlap}"

echo ${run}
eval ${run}
