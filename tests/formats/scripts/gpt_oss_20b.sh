#!/bin/bash
# Facts of https://github.com/NVIDIA/Megatron-LM/blob/main/examples/post_training/modelopt/conf/openai/gpt-oss-20b.sh
# in other words: arguments alone, for another script to use.
MODEL_ARGS=" \
    --micro-batch-size 1 --seq-length 4096 --max-position-embeddings 40960 --bf16 --num-layers 24 \
    --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --group-query-attention --num-query-groups 8 \
    --kv-channels 64 --num-experts 32 --moe-ffn-hidden-size 2880 --moe-router-topk 4 --moe-router-dtype fp32 \
    --normalization RMSNorm --untie-embeddings-and-output-weights --padded-vocab-size 201088 --quick-geglu \
    --glu-linear-offset 1.0 --softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2 \
    --no-bias-gelu-fusion --no-rope-fusion --rotary-base 150000 --position-embedding-type rope --enable-gpt-oss \
    --activation-func-clamp-value 7.0 --attention-dropout 0 --hidden-dropout 0 --sequence-parallel \
    --tokenizer-type HuggingFaceTokenizer \
"
