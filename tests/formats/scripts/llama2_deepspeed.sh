#!/bin/bash
# Facts of https://github.com/microsoft/Megatron-DeepSpeed/blob/main/examples_deepspeed/pretrain_llama2_distributed.sh in other words.
TP=2
PP=2
STAGE=0
GPUS_PER_NODE=8
again="false"
PLOTS=0
PLOT_ARGS=
if [ $PLOTS -eq 1 ]
then
PLOT_ARGS="--wandb-project p --wandb-exp-name e"
fi
more=""
more=" --deepspeed ${more}"
more=" --deepspeed_config=./tmp/deepspeed.json ${more}"
more=" --zero-stage=$STAGE ${more}"
if [ "${again}" = "true" ]; then
  more="--deepspeed-activation-checkpointing --recompute-granularity full --recompute-method uniform ${more}"
fi
HOW="--nproc_per_node $GPUS_PER_NODE --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000"
torchrun $HOW \
       pretrain_gpt.py \
       --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
       --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --num-key-value-heads 4 \
       --micro-batch-size 4 --global-batch-size 32 --seq-length 2048 --max-position-embeddings 2048 \
       --train-iters 250000 --data-path 1 ./text --data-impl mmap \
       --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model ./tokenizer.model --vocab-size 32000 \
       --lr 3e-4 --optimizer adam --bf16 --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 \
       --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm \
       --disable-bias-linear \
       $PLOT_ARGS \
       $more
