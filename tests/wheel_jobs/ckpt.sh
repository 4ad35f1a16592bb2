# A checkpoint is made, halved by the README's program on two ranks, converted by each command, and trained and resumed.
python "$JOBS/small_llama.py" model
torchrun --standalone --nproc-per-node 2 readme.py model halved
ckpt inspect halved --check
ckpt plan model --tp 2 --json
ckpt shard model shards --tp 2 --target megatron
ckpt reshard shards resharded --tp 4
ckpt merge resharded merged
ckpt verify model merged
ckpt convert model converted --format fp8
ckpt verify model halved && exit 1
python "$JOBS/resume_ckpt.py" model run
ckpt inspect run
ckpt --help
