# The README's program on one process; a run on two ranks that is saved, and resumed on one.
python readme.py
torchrun --standalone --nproc-per-node 2 "$JOBS/resume_megatron.py" checkpoint
torchrun --standalone --nproc-per-node 1 "$JOBS/resume_megatron.py" checkpoint
