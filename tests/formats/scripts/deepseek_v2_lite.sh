#!/bin/bash
# Facts of https://github.com/NVIDIA/Megatron-LM/blob/main/examples/post_training/modelopt/conf/deepseek-ai/DeepSeek-V2-Lite.sh
# in other words: arguments alone, for another script to use.
TOKENIZER_MODEL="deepseek-ai/DeepSeek-V2-Lite"

MODEL_ARGS=" \
    --bf16 --micro-batch-size 1 --seq-length 1024 --max-position-embeddings 1024 \
    --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --kv-channels 16 \
    --multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 --qk-head-dim 128 --qk-pos-emb-head-dim 64 \
    --qk-layernorm --num-experts 64 --moe-layer-freq ([0]+[1]*26) --moe-ffn-hidden-size 1408 --moe-grouped-gemm \
    --moe-router-score-function softmax --moe-router-topk 6 --moe-router-pre-softmax \
    --moe-shared-expert-intermediate-size 2816 --moe-router-load-balancing-type seq_aux_loss \
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --position-embedding-type rope \
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --no-rope-fusion \
    --tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 3200 --mscale 0.707 --sequence-parallel \
"
