#!/bin/bash
# Facts of https://github.com/NVIDIA/Megatron-LM/blob/v2.5/examples/pretrain_gpt3_175B.sh in other words.
#SBATCH <SLURM OPTIONS> --nodes=128 --exclusive --ntasks-per-node=8 --job-name=gpt3

HERE=`pwd`
STAMP=`date +'%y-%m-%d'`
CORPUS="0.3 <FIRST CORPUS> 0.7 <SECOND CORPUS>"

wanted=" \
	--num-layers 96 --hidden-size 12288 --num-attention-heads 96 \
	--seq-length 2048 --max-position-embeddings 2048 \
	--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \
	--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \
	--train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 \
	--lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 \
	--data-path ${CORPUS} --vocab-file <PATH TO gpt-vocab.json> --merge-file <PATH TO gpt-merges.txt> \
	--save <WHERE TO SAVE> --split 98,2,0 --init-method-std 0.006 \
	--fp16 --checkpoint-activations "

command="python -u ${HERE}/pretrain_gpt.py $@ ${wanted}"

srun -l --container-image "nvcr.io/nvidia/pytorch:20.12-py3" --output=$HERE/%x_$STAMP.log sh -c "${command}"
